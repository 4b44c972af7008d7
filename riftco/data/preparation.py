"""Behind `riftco data prepare | check | show`: text files to token shards, a full check, a window in words."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from riftco.data._checks import positive_integer
from riftco.data.corpus import (
    DEFAULT_SEPARATOR,
    Paths,
    SourceFile,
    Survey,
    corpus_pieces,
    effective_fraction,
    refuse_leak,
    survey,
)
from riftco.data.encoding import encode_pieces
from riftco.data.manifest import FILE_NAME, Manifest, Split, is_dataset
from riftco.data.shards import Dataset, ShardWriter, open_dataset, shard_dtype
from riftco.data.text import file_sha256, validation_size
from riftco.data.windows import require_window
from riftco.errors import DataError
from riftco.files import new_directory

TOKENS_PER_SHARD = 1 << 27


def prepare(
    paths: Paths,
    out_dir: str | Path,
    tokenizer: Any,
    validation_fraction: float | None = None,
    *,
    validation_paths: Paths | None = None,
    separator: str = DEFAULT_SEPARATOR,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    force: bool = False,
) -> Dataset:
    """Encode text files into a directory of token shards with a manifest; files are streamed, never held whole.

    The directory appears when it is complete. The tokenizer must have been trained on training text alone:
    `load_texts` with the same paths and options gives that text.

    Args:
        paths: files or patterns, .jsonl files as rows of {"text": …}, any other as plain text.
        out_dir: the directory to make.
        tokenizer: has encode, vocab_size and fingerprint; where it has save, the directory gets its tokenizer.json.
        validation_fraction: share of the characters, from the end, for validation; 0 for none; by default 0.1.
        validation_paths: an explicit validation side instead.
        separator: stands between two documents.
        tokens_per_shard: ids in every shard but the last of a split.
        force: replace a dataset that is there already.

    Raises:
        DataError: a source is missing, empty, not UTF-8, or changed while it was read; the two sides share a file or a
            text; out_dir is taken or cannot be written; the tokenizer gives an id outside its vocabulary.
        ConfigError: both a fraction and validation files, or an option out of range.
    """
    share = effective_fraction(validation_fraction, validation_paths)
    tokens_per_shard = positive_integer("prepare", "tokens_per_shard", tokens_per_shard)
    whole = survey(paths, separator, "all" if share else "train")
    parts: dict[str, tuple[Survey, int, int]] = {"train": (whole, 0, whole.characters)}
    if validation_paths is not None:
        held_out = survey(validation_paths, separator, "validation")
        refuse_leak(whole, held_out)
        parts["validation"] = (held_out, 0, held_out.characters)
    elif share:
        point = whole.characters - validation_size(whole.characters, share)
        parts = {"train": (whole, 0, point), "validation": (whole, point, whole.characters)}
    sources = tuple(dict.fromkeys(source for side, _, _ in parts.values() for source in side.sources))
    with _new_dataset(Path(out_dir), force=force) as directory:
        splits = {}
        for name, (side, start, stop) in parts.items():
            text = _characters(corpus_pieces(side.files, separator), start, stop)
            with ShardWriter(directory, name, tokenizer.vocab_size, tokens_per_shard) as writer:
                splits[name] = _encode(writer, tokenizer, text)
        _refuse_changed(sources)
        manifest = Manifest(
            dtype=shard_dtype(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            tokenizer_fingerprint=tokenizer.fingerprint(),
            separator=separator,
            validation_fraction=share,
            sources=sources,
            splits=splits,
        )
        if hasattr(tokenizer, "save"):
            tokenizer.save(directory)
        (directory / FILE_NAME).write_bytes(manifest.to_json().encode())
    return open_dataset(out_dir)


@contextlib.contextmanager
def _new_dataset(destination: Path, *, force: bool) -> Iterator[Path]:
    """A directory to fill that takes the place of nothing, of an empty directory, or with `force` of a dataset."""
    is_taken = destination.exists() and not (destination.is_dir() and not any(destination.iterdir()))
    if is_taken and not force:
        raise DataError(f"data: the output directory must be new; '{destination}' exists; choose another or use force")
    if is_taken and not is_dataset(destination):
        raise DataError(f"data: force replaces only a dataset; '{destination}' is none; choose another directory")
    try:
        with new_directory(destination, replace=force) as directory:
            yield directory
    except OSError as error:
        raise DataError(f"data: cannot write '{os.path.abspath(destination)}': {error.strerror}") from error


def _encode(writer: ShardWriter, tokenizer: Any, pieces: Iterable[str]) -> Split:
    characters = utf8_bytes = 0
    for text, ids in encode_pieces(tokenizer, pieces):
        characters += len(text)
        utf8_bytes += len(text.encode("utf-8"))
        writer.append(ids)
    return writer.finish(characters, utf8_bytes)


def _characters(pieces: Iterable[str], start: int, stop: int) -> Iterator[str]:
    """The characters start .. stop-1 of the text that the pieces make."""
    position = 0
    for piece in pieces:
        if position >= stop:
            return
        wanted = piece[max(0, start - position) : stop - position]
        position += len(piece)
        if wanted:
            yield wanted


def _refuse_changed(sources: Iterable[SourceFile]) -> None:
    """The split point and the hashes were taken in an earlier pass; they hold only if the files are still those."""
    for source in sources:
        if file_sha256(source.path) != source.sha256:
            raise DataError(f"data: a source must not change while it is read; '{source.path}' did; prepare again")


@dataclass(frozen=True)
class CheckReport:
    """What `check` found in a sound dataset; `str` of it is for reading.

    Attributes:
        directory: the dataset.
        fingerprint: of its ids, vocabulary and tokenizer.
        vocab_size: of the tokenizer.
        dtype: of the shards.
        files: shards read and hashed.
        tokens: ids by split.
        utf8_bytes: bytes of text by split.
    """

    directory: str
    fingerprint: str
    vocab_size: int
    dtype: str
    files: int
    tokens: dict[str, int]
    utf8_bytes: dict[str, int]

    def __str__(self) -> str:
        lines = [f"{self.directory}: {self.files} shards of {self.dtype} agree with the manifest"]
        lines += [
            f"  {name}: {count:,} tokens, {self.utf8_bytes[name]:,} bytes of text, "
            f"{self.utf8_bytes[name] / count:.2f} bytes a token"
            for name, count in self.tokens.items()
        ]
        lines.append(f"  vocabulary {self.vocab_size:,}, fingerprint {self.fingerprint}")
        return "\n".join(lines)


def check(directory: str | Path, *, tokenizer: Any = None, context: int | None = None) -> CheckReport:
    """Read a whole dataset and compare it with its manifest.

    Args:
        directory: a dataset.
        tokenizer: if given, it must be the one that made the ids.
        context: if given, the training split must hold a window of so many tokens.

    Raises:
        DataError: the first thing found wrong, naming the file.
    """
    dataset = open_dataset(directory, tokenizer=tokenizer)
    dataset.verify()
    if context is not None:
        require_window(f"check: split 'train' of '{directory}'", len(dataset.train), context)
    manifest = dataset.manifest
    return CheckReport(
        directory=str(directory),
        fingerprint=dataset.fingerprint,
        vocab_size=manifest.vocab_size,
        dtype=manifest.dtype,
        files=sum(len(split.shards) for split in manifest.splits.values()),
        tokens={name: split.tokens for name, split in manifest.splits.items()},
        utf8_bytes={name: split.utf8_bytes for name, split in manifest.splits.items()},
    )


def show(directory: str | Path, index: int, context: int, tokenizer: Any, *, split: str = "train") -> str:
    """One training window in words: its text, its ids, and its tokens divided by bars.

    Args:
        directory: a dataset.
        index: the window's first position, as in a batch's `ids`: 0 .. N - context - 1.
        context: T, tokens in the window.
        tokenizer: the one that made the dataset.
        split: `train` or `validation`.

    Raises:
        DataError: no such split or window, or another tokenizer.
    """
    context = positive_integer("show", "context", context)
    tokens = open_dataset(directory, tokenizer=tokenizer).split(split)
    require_window("show", len(tokens), context)
    last = len(tokens) - context - 1
    if isinstance(index, bool) or not 0 <= index <= last:
        raise DataError(f"show: index must lie in 0 .. {last} for windows of {context}; got {index}")
    ids = tokens.read(index, index + context + 1)
    pieces = [tokenizer.token_bytes(int(token)) for token in ids]
    bars = "|".join(visible(piece) for piece in pieces[:-1])
    return "\n".join(
        [
            f"{split} window at {index} of 0 .. {last}, {context} tokens",
            f"text    {visible(b''.join(pieces[:-1]))}",
            f"tokens  {bars}",
            f"ids     {' '.join(map(str, np.asarray(ids[:-1])))}",
            f"then    {visible(pieces[-1])} ({ids[-1]})",
        ]
    )


def visible(content: bytes) -> str:
    """Bytes as text on one line; what is not a whole character, or moves the cursor, as an escape."""
    text = content.decode("utf-8", "backslashreplace")
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
