"""`riftco eval`: loss, perplexity and bits per byte over a whole text, every token once."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from riftco.cli import models
from riftco.cli.console import Console
from riftco.cli.model_options import DeviceOptions
from riftco.cli.options import UsageError, flag
from riftco.cli.verbs import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(DeviceOptions):
    """Options of `eval`."""

    model: str | None = flag(None, "a bundle, a run directory, or a Hugging Face directory", metavar="DIR")
    data: tuple[str, ...] = flag(
        (),
        "text files, globs, .jsonl files, or a prepared dataset",
        metavar="PATH …",
        shown="the run's own held-out text",
    )
    validation_fraction: float | None = flag(
        None, "score only this share of the text, from its end", shown="all of it; the run's own share for its own text"
    )
    split: Literal["train", "validation"] = flag("validation", "which split of a prepared dataset")
    max_seq_length: int | None = flag(None, "tokens in a window", shown="the model's context")
    batch_size: int = flag(16, "rows at once; changes no figure")
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(None, "of activations", shown="the weights' own")
    attention: str | None = flag(None, "plain, blockwise, …", metavar="NAME", shown="the fastest here")


def run(options: EvalOptions, console: Console) -> dict[str, Any]:
    """Load, encode, score."""
    from riftco import backend, data, train

    path = models.require(options.model)
    models.locate(path)
    paths, share = options.data, options.validation_fraction
    if not paths:
        paths, share = _own_data(Path(path), share)
    prepared = _prepared(paths)
    text = None if prepared else data.load_texts(paths, validation_fraction=share or 0)
    backend.select(options.device)
    model = models.load(path)
    if prepared:
        tokens: Any = data.open_dataset(paths[0], tokenizer=model.tokenizer).split(options.split)
    else:
        assert text is not None
        tokens = data.encode_text(model.tokenizer, text.train if text.validation is None else text.validation)
    context = options.max_seq_length or model.config.context
    result = train.evaluate(
        model.params,
        model.config,
        data.evaluation_windows(tokens, context, options.batch_size, padded=True),
        byte_lengths=data.token_byte_lengths(model.tokenizer),
        dtype=options.dtype,
        attention=options.attention,
    )
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits per byte"
    console.say(f"loss {result.loss:.6f} nats a token, perplexity {result.perplexity:.4f}{bits}")
    console.note(f"{result.targets:,} tokens scored once each, in {result.seconds:.1f} s")
    return {"model": model.path, "data": list(paths), **dataclasses.asdict(result)}


def _prepared(paths: tuple[str, ...]) -> bool:
    return len(paths) == 1 and (Path(paths[0]) / "manifest.json").is_file()


def _own_data(place: Path, share: float | None) -> tuple[tuple[str, ...], float | None]:
    """What a run was trained on, from its config.yaml, and the share of it that was held out."""
    import yaml

    file = next((f for f in (place / "config.yaml", place.parent / "config.yaml") if f.is_file()), None)
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file else None
    stored = content.get("data") if isinstance(content, dict) else None
    if not stored:
        raise UsageError(f"--data is required: {place} does not say what it was trained on")
    paths = (stored,) if isinstance(stored, str) else tuple(stored)
    fraction = content.get("validation_fraction") if isinstance(content, dict) else None
    return paths, share if share is not None else fraction if fraction is not None else 0.1


ACTIONS = {
    "": Action(
        EvalOptions, run, "score every token of a text once", "model", "riftco eval runs/small --data heldout.txt"
    )
}
