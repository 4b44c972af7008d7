"""`riftco eval`: loss, perplexity and bits per byte over a whole text, every token once.

Of examples the answers are scored, and the share of their tokens that the model would choose (eval_responses.py).
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from riftco.cli import corpus, eval_responses, models
from riftco.cli.console import Console
from riftco.cli.model_options import Attention, DeviceOptions, Dtype, check_attention
from riftco.cli.options import UsageError, flag
from riftco.cli.verbs import Action
from riftco.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(DeviceOptions):
    """Options of `eval`."""

    model: str | None = flag(None, "a bundle, a run directory, or a Hugging Face directory", metavar="DIR")
    adapter: str | None = flag(
        None, "adapters for it: a run of finetune, its final/, or a directory that PEFT wrote", metavar="DIR"
    )
    data: tuple[str, ...] = flag(
        (),
        "text files, globs, .jsonl files, a prepared dataset, or examples for post-training",
        metavar="PATH …",
        shown="the run's own held-out text",
    )
    validation_fraction: float | None = flag(
        None, "score only this share of the text, from its end", shown="all of it; the run's own share for its own text"
    )
    split: Literal["train", "validation", "test"] | None = flag(
        None, "which side of a dataset, of a directory of splits, or of text that is divided", shown="validation"
    )
    loss_on: Literal["response", "all"] | None = flag(
        None, "of examples: which tokens are scored", shown="as they were learned, else response"
    )
    chat_template: str | None = flag(
        None, "of examples: a Jinja file, or plain for the built-in one", metavar="FILE|plain",
        shown="the model's own, else plain",
    )  # fmt: skip
    max_seq_length: int | None = flag(None, "tokens in a window", shown="the model's context")
    batch_size: int = flag(16, "rows at once; changes no figure")
    dtype: Dtype | None = flag(None, "of activations", shown="the weights' own")  # noqa: RUF009
    attention: Attention | None = flag(None, "how attention is computed", shown="the fastest here")  # noqa: RUF009


def run(options: EvalOptions, console: Console) -> dict[str, Any]:
    """Load, encode, score."""
    from riftco import backend, data, train
    from riftco.tune.objectives import Supervised

    path = models.require(options.model)
    place = models.locate(path)
    recorded = {} if options.data else _recorded(Path(path))
    if "method" in recorded:
        options = dataclasses.replace(options, **_as_tuned(options, recorded))
        recorded = {}
    is_text = not eval_responses.is_responses(options.data)
    text = _text(options, recorded, place) if is_text else None
    backend.select(options.device)
    model = models.load(path, adapter=options.adapter)
    check_attention(model.config, options.attention)
    if not is_text:
        return eval_responses.run(options, model, options.data[0], console)
    if text is None:
        tokens = _dataset_split(options, recorded, place, model.tokenizer)
    else:
        tokens = data.encode_text(model.tokenizer, text)
    context = model.config.context if options.max_seq_length is None else options.max_seq_length
    result = train.evaluate(
        model.trained,
        model.config,
        data.evaluation_windows(tokens, context, options.batch_size, padded=True),
        byte_lengths=data.token_byte_lengths(model.tokenizer),
        dtype=options.dtype,
        attention=options.attention,
        objective=model.objective(Supervised),
    )
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits per byte"
    console.say(f"loss {result.loss:.6f} nats a token, perplexity {result.perplexity:.4f}{bits}")
    console.note(f"{result.targets:,} tokens scored once each, in {result.seconds:.1f} s")
    return {"model": model.path, **dataclasses.asdict(result)}


def _as_tuned(options: EvalOptions, recorded: dict[str, Any]) -> dict[str, Any]:
    """The data of a run of finetune, as that read them, where the options do not say otherwise."""
    same: dict[str, Any] = {"data": (recorded["data"],)}
    if options.loss_on is None:
        same["loss_on"] = recorded.get("loss_on")
    if options.chat_template is None:
        same["chat_template"] = recorded.get("chat_template")
    if options.max_seq_length is None:
        same["max_seq_length"] = recorded.get("max_length")
    return same


def _text(options: EvalOptions, recorded: dict[str, Any], place: Path) -> str | None:
    """The text to score; None where it is a prepared dataset, which holds ids."""
    from riftco import data

    share = options.validation_fraction
    if "corpus_bytes" in recorded:
        from riftco.cli.quickstart import stories

        return _side(options, *stories(recorded["corpus_bytes"], recorded["seed"], share))
    paths = _paths(options, recorded)
    if _is_dataset(paths):
        if share is not None:
            raise UsageError(f"--validation-fraction belongs to text; {paths[0]} is a dataset; name a --split of it")
        return None
    if recorded:
        texts = corpus.read_texts(paths, recorded.get("validation_fraction") if share is None else share)
        _refuse_changed(place, "sources", corpus.sources(texts))
        return _side(options, texts.train, texts.validation)
    is_directory = len(paths) == 1 and Path(paths[0]).is_dir()
    splits = data.find_splits(paths[0]) if is_directory and share is None else {}
    if splits:
        split = options.split or "validation"
        if split not in splits:
            raise UsageError(f"--split {split} is not in {paths[0]}; it has {', '.join(splits)}")
        return data.load_texts(str(splits[split]), validation_fraction=0).train
    texts = corpus.read_texts(paths, 0 if share is None else share)
    return _side(options, texts.train, texts.validation)


def _side(options: EvalOptions, train: str, validation: str | None) -> str:
    """The side that --split names, of text with or without a held-out side."""
    if validation is not None:
        return train if options.split == "train" else validation
    if options.split == "validation":
        raise UsageError("--split validation needs text that is divided; this is not; add --validation-fraction")
    return train


def _dataset_split(options: EvalOptions, recorded: dict[str, Any], place: Path, tokenizer: Any) -> Any:
    from riftco import data

    dataset = data.open_dataset(_paths(options, recorded)[0], tokenizer=tokenizer)
    if recorded:
        _refuse_changed(place, "dataset", dataset.fingerprint)
    return dataset.split(options.split or "validation")


def _refuse_changed(place: Path, kind: str, found: Any) -> None:
    """Compare a run's data with what its bundle says they were; a figure over others would pass for the run's own."""
    manifest = place / "riftco.json"
    said = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    known = said.get("fingerprints", {}).get("data", {}).get(kind)
    if known is None or known == found:
        return
    changed = ""
    if isinstance(found, dict):
        # A file that only moved is the same file.
        if sorted(known.values()) == sorted(found.values()):
            return
        changed = ", ".join(path for path, digest in found.items() if digest not in known.values())
    raise DataError(
        f"eval: the run's own text must be what it was trained on; {changed or 'the ' + kind} changed since; "
        "restore it, or name the text to score with --data"
    )


def _is_dataset(paths: tuple[str, ...]) -> bool:
    return len(paths) == 1 and (Path(paths[0]) / "manifest.json").is_file()


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
