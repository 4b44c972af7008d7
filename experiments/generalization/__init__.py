"""Full weights, LoRA and QLoRA from one base: what each learns, and what of it holds for examples that it never saw."""
