"""One door for every kind: train by name, load from a file, restore from a state."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

from riftco.errors import TokenizerError
from riftco.files import read_small
from riftco.tokenizers.base import Tokenizer
from riftco.tokenizers.bpe import BPETokenizer
from riftco.tokenizers.byte import ByteTokenizer
from riftco.tokenizers.hf_read import read

_FILE = "tokenizer.json"
# suffix -> (module, function from a path to (tokenizer, chat template)): readers that need to know whole models, and so
# lie above this package; named here, imported when such a file is met.
_READERS = {".gguf": ("riftco.interchange.gguf", "load_tokenizer")}

KINDS: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer, "bpe": BPETokenizer}


def train(kind: str, data: bytes | str, **options: Any) -> Tokenizer:
    """A tokenizer of the given kind for a corpus.

    Args:
        kind: "byte" or "bpe".
        data: the corpus.
        **options: those of `BPETokenizer.train`; a byte tokenizer has none.

    Raises:
        TokenizerError: an unknown kind, or options for a byte tokenizer.
    """
    if kind == "bpe":
        return BPETokenizer.train(data, **options)
    if kind != "byte":
        raise TokenizerError(f'train: kind must be "byte" or "bpe"; got {kind!r}')
    if options:
        raise TokenizerError(
            f"train: a byte tokenizer has no {', '.join(sorted(options))}; leave it out or use kind bpe"
        )
    return ByteTokenizer.train(data)


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model, with its chat template.

    Args:
        path: a `tokenizer.json`, a directory that holds one (a bundle, a Hugging Face directory, a run directory with a
            finished `final/`), or a .gguf file.

    Returns:
        The tokenizer: `encode(text)` adds nothing to the text, `decode(ids)`, `apply_chat_template(messages)`.

    Raises:
        TokenizerError: the file is missing or damaged, or needs what is not supported (the message names the field).
        BundleError: a .gguf file is damaged.
    """
    place = Path(path)
    if place.suffix.lower() in _READERS:
        module, name = _READERS[place.suffix.lower()]
        tokenizer = getattr(importlib.import_module(module), name)(place)[0]
        if tokenizer is None:
            raise TokenizerError(f"{place}: it must hold a tokenizer; it has none; give the model's tokenizer.json")
        return tokenizer
    if place.is_dir() and not (place / _FILE).is_file():
        if (place / "final" / _FILE).is_file():
            place = place / "final"
        elif files := sorted(place.glob("*.gguf")):
            return load(files[0])
        elif (place / "tokenizer.model").is_file():
            raise TokenizerError(
                f"{place / 'tokenizer.model'}: it must come with a {_FILE}; it does not; save the tokenizer with "
                "transformers once, which writes one"
            )
    tokenizer = read(place)
    return tokenizer.with_chat_template(read_chat_template(place)) if place.is_dir() else tokenizer


def read_chat_template(directory: str | os.PathLike[str]) -> str | None:
    """The chat template of a model directory; None where it has none.

    It is `chat_template.jinja`, or stands where older directories keep it: in `chat_template.json` or in
    `tokenizer_config.json`, as a string or a list of named ones, of which the one named "default" counts.

    Raises:
        TokenizerError: a file that is damaged, or named templates without a default.
    """
    place = Path(directory)
    file = place / "chat_template.jinja"
    try:
        if file.exists():
            return read_small(file).decode()
        for file in (place / "chat_template.json", place / "tokenizer_config.json"):
            content = json.loads(read_small(file)) if file.exists() else {}
            stored = content.get("chat_template") if isinstance(content, dict) else None
            if isinstance(stored, list):
                named = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
                if not isinstance(named.get("default"), str):
                    raise TokenizerError(
                        f"{file}: chat_template must have one named default; got {', '.join(map(str, named))}; name one"
                    )
                stored = named["default"]
            if isinstance(stored, str):
                return stored
            if stored is not None:
                raise TokenizerError(f"{file}: chat_template must be text; got {type(stored).__name__}; it is damaged")
    except (ValueError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{file}: it must be UTF-8 text of its kind; {error}; it is damaged") from error
    return None


def from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a `to_state()` dict, of whichever kind.

    Raises:
        TokenizerError: the state is of no known kind, or is inconsistent.
    """
    kind = KINDS.get(state.get("kind", ""))
    if kind is None:
        raise TokenizerError(f'from_state: kind must be "byte" or "bpe"; got {state.get("kind")!r}')
    return kind.from_state(state)
