"""`riftco eval` on examples: how well the answers of a conversation are predicted, and nothing else of it."""

import dataclasses
from pathlib import Path
from typing import Any

from riftco.cli import models
from riftco.cli.console import Console
from riftco.cli.options import UsageError
from riftco.errors import DataError, RiftcoError
from riftco.files import json_lines

_LEAST = 256  # tokens of a row, so that short examples share one


def is_responses(paths: tuple[str, ...]) -> bool:
    """Whether the data are rows of answers or preferences, and not text."""
    from riftco import data

    if len(paths) != 1 or (Path(paths[0]) / "manifest.json").is_file():
        return False
    try:
        file = data.find_examples(paths[0])["train"]
    except RiftcoError:
        return False
    if file.suffix != ".jsonl" or not file.is_file():
        return False
    first = next((line.record for line in json_lines(file) if line.record is not None), {})
    keys = ("messages", "instruction", "completion", "response", "chosen", "rejected")
    return any(key in first for key in keys)


def run(options: Any, model: models.Loaded, path: str, console: Console) -> dict[str, Any]:
    """Score the answers of every example once.

    Args:
        options: those of `eval`.
        model: what is scored.
        path: the file or directory of examples.
        console: where it goes.
    """
    from riftco import data, train
    from riftco.data.packing import inputs
    from riftco.tune.objectives import Scored

    splits = data.load_examples(path)
    split = options.split or ("validation" if "validation" in splits else "train" if len(splits) == 1 else None)
    if split not in splits:
        raise UsageError(f"--split {split or 'validation'} is not in {path}; it has {', '.join(splits)}")
    if splits[split].format == "preference":
        raise DataError(
            f"eval: rows with one answer are required; '{splits[split].path}' holds preferences; their figures are in "
            "the metrics of finetune --objective dpo"
        )
    template = models.chat_template(options.chat_template, model.tokenizer, console.note)
    context = model.config.context if options.max_seq_length is None else options.max_seq_length
    with models.noted(console):
        encoded = data.encode_examples(
            model.tokenizer, splits[split].rows, context, template=template, loss_on=options.loss_on or "response"
        )
    longest = max(inputs(example) for example in encoded.items)
    encoded = dataclasses.replace(encoded, context=min(context, max(longest, _LEAST)))
    result = train.evaluate(
        model.trained,
        model.config,
        data.ExampleWindows(encoded, options.batch_size),
        byte_lengths=data.token_byte_lengths(model.tokenizer),
        dtype=options.dtype,
        attention=options.attention,
        objective=model.objective(Scored),
    )
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits per byte"
    console.say(
        f"loss {result.loss:.6f} nats a token, perplexity {result.perplexity:.4f}{bits}, "
        f"token accuracy {result.accuracy or 0.0:.4f}"
    )
    console.note(f"{split}: {encoded.report}; scored in {result.seconds:.1f} s")
    report = dataclasses.asdict(encoded.report)
    return {
        "model": model.path,
        "split": split,
        "loss_on": options.loss_on or "response",
        **dataclasses.asdict(result),
        "data": report,
    }
