"""Long texts to ids a piece at a time, and how many bytes each id stands for."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from riftco.data.tokens import as_id_array

PIECE_CHARACTERS = 1 << 20
_SEARCH = 4096


def encode_pieces(
    tokenizer: Any, pieces: Iterable[str], limit: int = PIECE_CHARACTERS
) -> Iterator[tuple[str, np.ndarray]]:
    """(text, ids) of consecutive stretches of at most `limit` characters, so that ids are never all Python ints.

    A stretch ends before white space that follows a letter or digit: the published split patterns all cut there,
    so the ids are those of the whole text. Where there is no such place, and with a tokenizer that does not split
    first, a merge across the end of a stretch is lost; decoding gives the same text all the same.
    """
    encode = getattr(tokenizer, "encode_array", tokenizer.encode)
    for text in stretches(pieces, limit):
        yield text, as_id_array("encode", encode(text))


def encode_text(tokenizer: Any, text: str) -> np.ndarray:
    """The ids of a text, uint16[N] or uint32[N] by vocabulary size; the same ids as `prepare` writes."""
    dtype = np.uint16 if tokenizer.vocab_size <= 65_536 else np.uint32
    parts = [ids.astype(dtype) for _, ids in encode_pieces(tokenizer, [text])]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def stretches(pieces: Iterable[str], limit: int) -> Iterator[str]:
    """The text of `pieces` in stretches of at most `limit` characters, each cut where tokens end."""
    waiting: list[str] = []
    held = 0
    for piece in pieces:
        waiting.append(piece)
        held += len(piece)
        if held <= limit:
            continue
        text = "".join(waiting)
        start = 0
        while len(text) - start > limit:
            stop = _cut(text, start, start + limit)
            yield text[start:stop]
            start = stop
        waiting, held = [text[start:]], len(text) - start
    if held:
        yield "".join(waiting)


def _cut(text: str, start: int, limit: int) -> int:
    """The last place in (start, limit] before white space after a letter or digit; `limit` if none is near."""
    for place in range(limit, max(start, limit - _SEARCH), -1):
        if text[place].isspace() and text[place - 1].isalnum():
            return place
    return limit


def token_byte_lengths(tokenizer: Any) -> np.ndarray:
    """int32[V]: how many bytes each id stands for, by its bytes and never by decoding it to a string.

    An id may hold part of a character, which no string shows; bits per byte built on decoded strings are wrong.
    A tokenizer's own `byte_lengths` are taken where it has them (special tokens stand for 0 bytes there).
    """
    known = getattr(tokenizer, "byte_lengths", None)
    if known is not None:
        return np.asarray(known, np.int32)
    return np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)], np.int32)
