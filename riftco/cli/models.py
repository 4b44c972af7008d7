"""Finding and loading the model that `--model` names: a bundle, a run, another program's directory, a .gguf file.

With `--adapter`, or where the path is that of adapters, the model is their base with them beside it.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from riftco.cli.options import UsageError
from riftco.errors import BundleError

ADAPTER = "adapter_config.json"
"""The file by which adapters are known; said again because help starts without the package that writes it."""


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

    @property
    def trained(self) -> Any:
        """What an objective of `objective` is evaluated at."""
        return self.params if self.adapters is None else self.adapters.weights

    def objective(self, kind: Any) -> Any:
        """An objective of `riftco.tune.objectives` for this model.

        Args:
            kind: its class.
        """
        from riftco.tune.objectives import template_of

        if self.adapters is None:
            return kind(config=self.config)
        return kind(config=self.config, frozen=(self.params,), adapters=template_of(self.adapters))


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
        if any((candidate / name).is_file() for name in ("riftco.json", "config.json", ADAPTER)):
            return candidate
    if (place / "metrics.jsonl").is_file() or (place / "checkpoints").is_dir():
        raise BundleError(
            f"model: {path} is a run that has not finished, so it has no final/; finish it with --resume auto"
        )
    raise BundleError(
        f"model: {path} holds neither riftco.json, config.json nor final/; give a bundle or a run directory"
    )


def load(path: str, *, adapter: str | None = None, needs_tokenizer: bool = True) -> Loaded:
    """Load a model with its tokenizer and the ids that end its texts.

    Args:
        path: what `locate` finds; where it is that of adapters, the base that they name is loaded with them.
        adapter: a run of finetune, its final/, or a directory that PEFT wrote, for the base at `path`.
        needs_tokenizer: whether a model without one is refused.

    Raises:
        BundleError: it is missing or damaged, has no tokenizer though one is needed, or is not the adapters' base.
    """
    place = locate(path)
    if adapter is None and (place / ADAPTER).is_file():
        place, adapter = _base_of(place), str(place)
    if adapter is None:
        from riftco.interchange import load_model

        model: Any = load_model(place)
        params, tokenizer, adapters = model.params, model.tokenizer, None
    else:
        from riftco.tune import bases

        model = bases.load_base(place)
        found = bases.load_adapter(adapter, model)
        params, adapters = bases.trained_beside(model, adapter, found), found.adapters
        template = (found.manifest or {}).get("fingerprints", {}).get("chat_template")
        tokenizer = model.tokenizer
        tokenizer = tokenizer.with_chat_template(template) if template and tokenizer is not None else tokenizer
    if needs_tokenizer and tokenizer is None:
        raise BundleError(f"model: {place} must have a tokenizer.json; it has none; use riftco.generate with ids")
    published = _published(place).get("eos_token_id")
    ends = (published, model.generation.get("eos_token_id"), getattr(tokenizer, "eos_id", None))
    return Loaded(place, params, model.config, tokenizer, model.generation, _union(ends), adapters)


def _published(place: Path) -> dict[str, Any]:
    """The content of config.json, where there is one."""
    from riftco.bundle.manifest import strict_json

    file = place / "config.json"
    return strict_json(file.read_bytes(), str(file)) if place.is_dir() and file.is_file() else {}


def _base_of(place: Path) -> Path:
    """The base that adapters name: kept beside them by their run, or where it was when they were made.

    Raises:
        BundleError: it is not there.
    """
    from riftco.bundle.manifest import strict_json

    kept = place.parent / "base"
    if (kept / "riftco.json").is_file():
        return kept
    said = strict_json((place / ADAPTER).read_bytes(), str(place / ADAPTER)).get("base_model_name_or_path")
    if not said or not Path(said).exists():
        raise BundleError(
            f"model: {place} holds adapters, and their base ({said}) is not there; name it: --model BASE --adapter "
            f"{place}"
        )
    return locate(said)


def chat_template(given: str | None, tokenizer: Any, note: Callable[[str], None]) -> str:
    """The template of conversations: the one that is asked for, the model's own, or the plain one.

    Args:
        given: a Jinja file, "plain", or None.
        tokenizer: the model's; carries its own template.
        note: is told where a model that was made elsewhere has none.

    Raises:
        UsageError: the file cannot be read.
    """
    from riftco.tokenizers import chat

    if given is None:
        own = getattr(tokenizer, "chat_template", None)
        if own is None and getattr(tokenizer, "foreign", None) is not None:
            note("the model has no chat template; the plain one is used")
        return chat.PLAIN if own is None else own
    if given == "plain":
        return chat.PLAIN
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--chat-template must be a Jinja file, or plain; {given}: {reason}") from None


@contextlib.contextmanager
def noted(console: Any) -> Iterator[None]:
    """Warnings about examples as lines for the user; what is left out is said by the report of the encoding."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if "left out" not in str(warning.message):
            console.note(f"warning: {warning.message}")


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
