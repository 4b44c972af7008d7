"""One door for every kind: train by name, load from a file, restore from a state."""

import os
from typing import Any

from riftco.errors import TokenizerError
from riftco.tokenizers.base import Tokenizer
from riftco.tokenizers.bpe import BPETokenizer
from riftco.tokenizers.byte import ByteTokenizer
from riftco.tokenizers.hf_read import read

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
    """The tokenizer of a `tokenizer.json`, or of the directory that holds one.

    Raises:
        TokenizerError: the file is missing or damaged, or needs what is not supported (the message names the field).
    """
    return read(path)


def from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a `to_state()` dict, of whichever kind.

    Raises:
        TokenizerError: the state is of no known kind, or is inconsistent.
    """
    kind = KINDS.get(state.get("kind", ""))
    if kind is None:
        raise TokenizerError(f'from_state: kind must be "byte" or "bpe"; got {state.get("kind")!r}')
    return kind.from_state(state)
