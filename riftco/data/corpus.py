"""A corpus: text files and JSON-lines files read in order as one text, with what is known of its sources.

A document is one text file or one `{"text": …}` row; documents are joined by a separator. The corpus is read
in pieces, never needed whole; `load_texts` joins it where training in memory is what is wanted.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from riftco.data.jsonl import iterate_row_texts
from riftco.data.text import expand_paths, file_sha256, iterate_text, split_text
from riftco.errors import ConfigError, DataError

Paths = str | Path | Iterable[str | Path]

DEFAULT_SEPARATOR = "\n"
DEFAULT_VALIDATION_FRACTION = 0.1


@dataclass(frozen=True)
class SourceFile:
    """A file that text came from.

    Attributes:
        path: the file as it was named.
        bytes: its size.
        sha256: of its bytes.
        split: `all` when train and validation both come from it, else `train` or `validation`.
    """

    path: str
    bytes: int
    sha256: str
    split: str


@dataclass(frozen=True)
class Survey:
    """What one pass over a corpus tells: its files, its length, and the SHA-256 of its joined UTF-8 text."""

    files: tuple[Path, ...]
    sources: tuple[SourceFile, ...]
    characters: int
    text_sha256: str


@dataclass(frozen=True)
class TextSplit:
    """Training text, validation text (None where none was asked for), and the files behind them."""

    train: str
    validation: str | None
    sources: tuple[SourceFile, ...]


def corpus_pieces(files: Iterable[Path], separator: str = DEFAULT_SEPARATOR) -> Iterator[str]:
    """The corpus in pieces that joined are its text. Raises DataError as the readers of text and rows do."""
    is_first = True
    for file in files:
        documents = ([text] for text in iterate_row_texts(file)) if is_json_lines(file) else [iterate_text(file)]
        for document in documents:
            if not is_first:
                yield separator
            is_first = False
            yield from document


def survey(paths: Paths, separator: str = DEFAULT_SEPARATOR, split: str = "all") -> Survey:
    """Read a corpus once, checking every byte of it. Raises DataError on a file that cannot be used."""
    files = expand_paths(paths)
    characters, digest = 0, hashlib.sha256()
    for piece in corpus_pieces(files, separator):
        characters += len(piece)
        digest.update(piece.encode("utf-8"))
    sources = tuple(SourceFile(str(file), file.stat().st_size, file_sha256(file), split) for file in files)
    return Survey(files, sources, characters, digest.hexdigest())


def refuse_leak(train: Survey, validation: Survey) -> None:
    """Raise DataError if the two sides of an explicit split share a file, a file's content, or their whole text."""
    train_files = {file.resolve() for file in train.files}
    for file in validation.files:
        if file.resolve() in train_files:
            raise DataError(
                f"data: training and validation must be different files; '{file}' is in both; name a held-out file"
            )
    by_hash = {source.sha256: source.path for source in train.sources}
    for source in validation.sources:
        if source.sha256 in by_hash:
            raise DataError(
                f"data: training and validation text must differ; '{by_hash[source.sha256]}' and '{source.path}' have "
                "the same SHA-256; name a held-out file"
            )
    if train.text_sha256 == validation.text_sha256:
        raise DataError(
            "data: training and validation text must differ; both have the same SHA-256; name a held-out file"
        )


def effective_fraction(validation_fraction: float | None, validation_paths: Paths | None) -> float:
    """The fraction to split off: the default without either option, 0 for an explicit pair. Raises ConfigError."""
    if validation_paths is None:
        return DEFAULT_VALIDATION_FRACTION if validation_fraction is None else validation_fraction
    if validation_fraction is not None:
        raise ConfigError(
            "data: give validation files or a validation fraction, not both; got a fraction of "
            f"{validation_fraction!r} beside validation files"
        )
    return 0.0


def load_texts(
    paths: Paths,
    *,
    validation_fraction: float | None = None,
    validation_paths: Paths | None = None,
    separator: str = DEFAULT_SEPARATOR,
) -> TextSplit:
    """Read a corpus whole and split it, leak-free, before a tokenizer is trained on its training text.

    Args:
        paths: files or patterns of the training side (of the whole corpus when a fraction is split off).
        validation_fraction: share of the characters, from the end, that is validation text; 0 for none. Without
            it and without `validation_paths`: 0.1.
        validation_paths: files or patterns of an explicit validation side.
        separator: stands between two documents.

    Raises:
        DataError: a file cannot be used, a side is empty, or the two sides share a file or a text.
        ConfigError: both a fraction and validation files, or a fraction outside 0 … 1.
    """
    share = effective_fraction(validation_fraction, validation_paths)
    if validation_paths is not None:
        train, held_out = survey(paths, separator, "train"), survey(validation_paths, separator, "validation")
        refuse_leak(train, held_out)
        train_text, held_out_text = ("".join(corpus_pieces(side.files, separator)) for side in (train, held_out))
        return TextSplit(train_text, held_out_text, train.sources + held_out.sources)
    whole = survey(paths, separator, "all" if share else "train")
    text = "".join(corpus_pieces(whole.files, separator))
    if not share:
        return TextSplit(text, None, whole.sources)
    return TextSplit(*split_text(text, share), whole.sources)


def find_splits(directory: str | Path) -> dict[str, Path]:
    """The files `train`, `valid` (or `validation`) and `test` of a data directory, as .jsonl or .txt.

    Returns:
        A subset of {"train", "validation", "test"} to files; empty where the directory has no train file.

    Raises:
        DataError: two files could be the same split.
    """
    names = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}
    found: dict[str, Path] = {}
    for split, stems in names.items():
        candidates = [Path(directory) / f"{stem}{suffix}" for stem in stems for suffix in (".jsonl", ".txt")]
        present = [path for path in candidates if path.is_file()]
        if len(present) > 1:
            raise DataError(f"data: one {split} file is required; '{present[0]}' and '{present[1]}' exist; remove one")
        if present:
            found[split] = present[0]
    return found if "train" in found else {}


def is_json_lines(file: Path) -> bool:
    """Whether the file is read as JSON lines."""
    return file.suffix.lower() == ".jsonl"
