"""What `--data` and `--tokenizer` mean for training: files, a directory of splits, or a prepared dataset, as ids."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from riftco.cli import tokenizer as tokenizer_verb
from riftco.cli.options import UsageError
from riftco.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus ready for training.

    Attributes:
        tokenizer: what made the ids.
        train: training ids: a `Tokens` or an array.
        validation: held-out ids, or None.
        facts: what identifies the data, as JSON values.
    """

    tokenizer: Any
    train: Any
    validation: Any
    facts: dict[str, Any]


def load(
    data: tuple[str, ...],
    *,
    tokenizer: str,
    vocab_size: int | None,
    min_frequency: int,
    validation_fraction: float | None,
    note: Callable[[str], None],
) -> Corpus:
    """Read or open the data, and train or load the tokenizer, on training text alone.

    Args:
        data: files, globs, .jsonl files; or one directory: a prepared dataset, or one with train.* and valid.* files.
        tokenizer: "byte", "bpe", or a path. A prepared dataset brings its own unless a path is given.
        vocab_size: the most ids of a BPE that is trained here.
        min_frequency: for such a BPE.
        validation_fraction: share of the text, from its end, for validation; None for 0.1, 0 for none.
        note: receives a line for each part of the work that may take long.

    Raises:
        UsageError: no data was named. DataError, TokenizerError, ConfigError: something of it cannot be used.
    """
    if not data:
        raise UsageError("--data is required: text files, globs, .jsonl files, or a prepared dataset")
    directory = Path(data[0])
    if len(data) == 1 and directory.is_dir() and (directory / "manifest.json").is_file():
        return _prepared(directory, tokenizer, validation_fraction)
    return _texts(data, tokenizer, vocab_size, min_frequency, validation_fraction, note)


def _prepared(directory: Path, tokenizer: str, validation_fraction: float | None) -> Corpus:
    from riftco import data

    if validation_fraction is not None:
        raise ConfigError(
            f"--validation-fraction belongs to text; {directory} is a dataset with its own splits; leave it out"
        )
    dataset = data.open_dataset(directory)
    if tokenizer in ("byte", "bpe"):
        if not (directory / "tokenizer.json").is_file():
            raise DataError(
                f"data: {directory} has no tokenizer.json; name the tokenizer that made it with --tokenizer DIR"
            )
        tokenizer = str(directory)
    made = tokenizer_verb.open_tokenizer(tokenizer)
    dataset = data.open_dataset(directory, tokenizer=made)
    return Corpus(made, dataset.train, dataset.validation, {"dataset": dataset.fingerprint})


def _texts(
    paths: tuple[str, ...],
    tokenizer: str,
    vocab_size: int | None,
    min_frequency: int,
    validation_fraction: float | None,
    note: Callable[[str], None],
) -> Corpus:
    from riftco import data

    held_out, named = None, paths
    if len(paths) == 1 and Path(paths[0]).is_dir():
        splits = data.find_splits(paths[0])
        if not splits:
            raise DataError(
                f"data: directory '{paths[0]}' must hold a manifest.json or train.txt or train.jsonl; it has none; "
                f"name files, as in '{paths[0]}/*.txt'"
            )
        named = (str(splits["train"]),)
        held_out = str(splits["validation"]) if "validation" in splits and validation_fraction is None else None
    texts = data.load_texts(named, validation_fraction=validation_fraction, validation_paths=held_out)
    if tokenizer == "bpe":
        note(f"training a tokenizer on {len(texts.train):,} characters")
    made = tokenizer_verb.build(tokenizer, texts.train, vocab_size, min_frequency)
    train = data.encode_text(made, texts.train)
    validation = None if texts.validation is None else data.encode_text(made, texts.validation)
    note(
        f"{len(texts.train):,} characters are {len(train):,} training tokens"
        + ("" if validation is None else f"; {len(validation):,} are held out")
    )
    return Corpus(made, train, validation, {"sources": {source.path: source.sha256 for source in texts.sources}})
