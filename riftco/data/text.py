"""Text from files: paths and globs, strict UTF-8 in a stream, and the rule that splits off validation text.

Bytes are taken as they are: no newline translation, no byte-order-mark removal, no normalisation, so that
decoding the tokens gives the file back. Rows of JSON lines are in jsonl.py, whole corpora in corpus.py.
"""

import codecs
import glob
import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from riftco.data._checks import fraction
from riftco.errors import DataError

CHUNK_BYTES = 1 << 20


def expand_paths(patterns: str | Path | Iterable[str | Path]) -> tuple[Path, ...]:
    """The files that paths and glob patterns name, each once.

    Args:
        patterns: one path or pattern, or several. `*`, `?`, `[...]` and `**` are wildcards unless a file of
            that very name exists. The files of one pattern are sorted by name; patterns keep their order.

    Raises:
        DataError: a file is missing, a pattern matches no file, a path is a directory, or nothing was given.
    """
    given = [patterns] if isinstance(patterns, str | Path) else list(patterns)
    if not given:
        raise DataError("data: at least one file or pattern is required; got none")
    found: dict[Path, Path] = {}
    for pattern in given:
        for path in _match(str(pattern)):
            found.setdefault(path.resolve(), path)
    return tuple(found.values())


def _match(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        raise DataError(f"data: a file is required; '{pattern}' is a directory; name its files, as in '{path}/*.txt'")
    if path.exists():
        return [path]
    if not glob.has_magic(pattern):
        raise DataError(f"data: file '{pattern}' does not exist; check the path")
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise DataError(f"data: pattern '{pattern}' matches no file; check the pattern")
    return paths


def read_chunks(path: str | Path) -> Iterator[bytes]:
    """The file's bytes in pieces of at most 1 MiB. Raises DataError if it cannot be read or is empty."""
    try:
        with open(path, "rb") as file:
            chunk = file.read(CHUNK_BYTES)
            if not chunk:
                raise DataError(f"data: a text of at least one byte is required; file '{path}' is empty")
            while chunk:
                yield chunk
                chunk = file.read(CHUNK_BYTES)
    except FileNotFoundError:
        raise DataError(f"data: file '{path}' does not exist; check the path") from None
    except OSError as error:
        raise DataError(f"data: file '{path}' cannot be read: {error.strerror or error}") from error


def iterate_text(path: str | Path) -> Iterator[str]:
    """The file's text in pieces, decoded as strict UTF-8; the pieces joined are the file.

    Raises:
        DataError: the file is missing, unreadable or empty, or is not UTF-8: the message names the file and
            the offset in bytes (from 0) of the first byte that does not decode.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    bytes_read = base = 0  # base: offset in the file of the first byte the decoder is given, its pending ones included
    try:
        for chunk in read_chunks(path):
            base = bytes_read - len(decoder.getstate()[0])
            bytes_read += len(chunk)
            yield decoder.decode(chunk)
        base = bytes_read - len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"data: text must be UTF-8; file '{path}' has byte 0x{error.object[error.start]:02x} at offset "
            f"{base + error.start}, which is not ({error.reason}); save the file as UTF-8"
        ) from None


def read_text(path: str | Path) -> str:
    """The whole text of one file. Raises as `iterate_text`."""
    return "".join(iterate_text(path))


def file_sha256(path: str | Path) -> str:
    """The lower-case hex SHA-256 of a file's bytes. Raises DataError if the file is empty or unreadable."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def validation_size(length: int, validation_fraction: float) -> int:
    """How many of `length` characters are validation text: max(1, ceil(length * validation_fraction)).

    Raises:
        ConfigError: the fraction is not strictly between 0 and 1.
        DataError: no character would be left for training.
    """
    share = fraction("split_text", "validation_fraction", validation_fraction)
    size = max(1, math.ceil(length * share))
    if size >= length:
        raise DataError(
            f"split_text: a split needs at least one character on either side; {length} characters with a validation "
            f"fraction of {share:g} leave none for training; give more text or a smaller fraction"
        )
    return size


def split_text(text: str, validation_fraction: float) -> tuple[str, str]:
    """Split off the tail of a text for validation; done on characters, before any tokenizer is trained.

    Args:
        text: at least two characters.
        validation_fraction: strictly between 0 and 1; the last max(1, ceil(len(text) * fraction)) characters
            are validation text.

    Returns:
        (training text, validation text), which joined are `text`. Train the tokenizer on the first alone.
    """
    point = len(text) - validation_size(len(text), validation_fraction)
    return text[:point], text[point:]


def refuse_identical_texts(train: str, validation: str) -> None:
    """Raise DataError if the two texts of an explicit split are the same, compared by SHA-256."""
    if text_sha256([train]) == text_sha256([validation]):
        raise DataError(
            "data: training and validation text must differ; both have the same SHA-256; "
            "give text held out from training"
        )


def text_sha256(pieces: Iterable[str]) -> str:
    """The SHA-256 of the UTF-8 bytes of the pieces joined."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.encode("utf-8"))
    return digest.hexdigest()
