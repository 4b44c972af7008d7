"""Finding and loading the model that `--model` names: a bundle, a run, another program's directory, a .gguf file."""

import dataclasses
from pathlib import Path
from typing import Any

from riftco.cli.options import UsageError
from riftco.errors import BundleError


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to be used.

    Attributes:
        path: the directory or the file that the weights came from.
        params: its weights.
        config: its `DecoderConfig`.
        tokenizer: its tokenizer, or None.
        generation: sampling defaults from generation_config.json.
        stop_ids: every end-of-text id that config.json, generation_config.json or the tokenizer names.
        adapters: low-rank adapters beside the weights, or None.
    """

    path: Path
    params: Any
    config: Any
    tokenizer: Any
    generation: dict[str, Any]
    stop_ids: tuple[int, ...]
    adapters: Any = None


def require(path: str | None) -> str:
    """The value of --model. Raises UsageError where it was not given."""
    if not path:
        raise UsageError("--model is required: a bundle or a run directory, such as runs/quickstart")
    return path


def locate(path: str) -> Path:
    """The model behind a path: a directory or a .gguf file itself, or `final/` of a run directory.

    Raises:
        BundleError: there is none; the message says what is there instead.
    """
    place = Path(path)
    if not place.exists():
        raise BundleError(f"model: {path} does not exist; give a bundle or a run directory")
    if place.is_file() and place.suffix.lower() == ".gguf":
        return place
    for candidate in (place, place / "final"):
        if (candidate / "riftco.json").is_file() or (candidate / "config.json").is_file():
            return candidate
    if (place / "metrics.jsonl").is_file() or (place / "checkpoints").is_dir():
        raise BundleError(
            f"model: {path} is a run that has not finished, so it has no final/; "
            "finish it with riftco pretrain --resume auto"
        )
    raise BundleError(
        f"model: {path} holds neither riftco.json, config.json nor final/; give a bundle or a run directory"
    )


def load(path: str, *, needs_tokenizer: bool = True) -> Loaded:
    """Load a model with its tokenizer and the ids that end its texts.

    Raises:
        BundleError: it is missing or damaged, or has no tokenizer though one is needed.
    """
    from riftco.bundle.manifest import strict_json
    from riftco.interchange import load_model

    place = locate(path)
    model = load_model(place)
    if needs_tokenizer and model.tokenizer is None:
        raise BundleError(f"model: {place} must have a tokenizer.json; it has none; use riftco.generate with ids")
    published = {}
    if place.is_dir():
        published = strict_json((place / "config.json").read_bytes(), str(place / "config.json"))
    ends = (
        published.get("eos_token_id"),
        model.generation.get("eos_token_id"),
        getattr(model.tokenizer, "eos_id", None),
    )
    return Loaded(place, model.params, model.config, model.tokenizer, model.generation, _union(ends))


def in_memory(base: Any, params: Any, adapters: Any) -> Loaded:
    """A model that was just trained, ready to be used.

    Args:
        base: the `riftco.tune.bases.Base` that it was made from.
        params: its weights.
        adapters: its adapters, or None.
    """
    ends = (base.generation.get("eos_token_id"), getattr(base.tokenizer, "eos_id", None))
    return Loaded(base.path, params, base.config, base.tokenizer, base.generation, _union(ends), adapters)


def _union(ends: tuple[Any, ...]) -> tuple[int, ...]:
    ids = (token for end in ends for token in (end if isinstance(end, list) else [end]))
    return tuple(dict.fromkeys(token for token in ids if isinstance(token, int)))
