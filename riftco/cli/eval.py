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
    split: Literal["train", "validation"] = flag("validation", "of a dataset, or of a directory of splits")
    max_seq_length: int | None = flag(None, "tokens in a window", shown="the model's context")
    batch_size: int = flag(16, "rows at once; changes no figure")
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(None, "of activations", shown="the weights' own")
    attention: Literal["plain", "blockwise", "pallas_tpu", "pallas_triton", "pallas_mosaic_gpu", "cudnn"] | None = flag(
        None, "how attention is computed", shown="the fastest here"
    )


def run(options: EvalOptions, console: Console) -> dict[str, Any]:
    """Load, encode, score."""
    from riftco import backend, data, train

    path = models.require(options.model)
    models.locate(path)
    recorded = {} if options.data else _recorded(Path(path))
    text = _text(options, recorded)
    backend.select(options.device)
    model = models.load(path)
    if text is None:
        directory = _paths(options, recorded)[0]
        tokens: Any = data.open_dataset(directory, tokenizer=model.tokenizer).split(options.split)
    else:
        tokens = data.encode_text(model.tokenizer, text)
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
    return {"model": model.path, **dataclasses.asdict(result)}


def _text(options: EvalOptions, recorded: dict[str, Any]) -> str | None:
    """The text to score; None where it is a prepared dataset, which holds ids."""
    from riftco import data

    share = options.validation_fraction
    if "corpus_bytes" in recorded:
        from riftco.cli.quickstart import stories

        return stories(recorded["corpus_bytes"], recorded["seed"])[1]
    paths = _paths(options, recorded)
    if len(paths) == 1 and (Path(paths[0]) / "manifest.json").is_file():
        return None
    if recorded and share is None:
        share = recorded.get("validation_fraction")
        share = 0.1 if share is None else share
    splits = data.find_splits(paths[0]) if len(paths) == 1 and Path(paths[0]).is_dir() else {}
    if options.split in splits:
        paths, share = (str(splits[options.split]),), 0
    texts = data.load_texts(paths, validation_fraction=share or 0)
    return texts.train if texts.validation is None else texts.validation


def _paths(options: EvalOptions, recorded: dict[str, Any]) -> tuple[str, ...]:
    return options.data or tuple(recorded["data"])


def _recorded(place: Path) -> dict[str, Any]:
    """What a run's config.yaml says about its data, for a run directory or its final/."""
    import yaml

    file = next((f for f in (place / "config.yaml", place.parent / "config.yaml") if f.is_file()), None)
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file else None
    if not isinstance(content, dict) or not (content.get("data") or "corpus_bytes" in content):
        raise UsageError(f"--data is required: {place} does not say what it was trained on")
    return content


ACTIONS = {
    "": Action(
        EvalOptions, run, "score every token of a text once", "model", "riftco eval runs/small --data heldout.txt"
    )
}
