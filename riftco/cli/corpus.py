"""What `--data` and `--tokenizer` mean for training: files, a directory of splits, or a prepared dataset, as ids."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from riftco.cli import tokenizer as tokenizer_verb
from riftco.cli.options import UsageError
from riftco.errors import ConfigError, DataError, TokenizerError


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
    tokenizer: str | None,
    vocab_size: int | None,
    min_frequency: int | None,
    validation_fraction: float | None,
    note: Callable[[str], None],
) -> Corpus:
    """Read or open the data, and train or load the tokenizer, on training text alone.

    Args:
        data: files, globs, .jsonl files; or one directory: a prepared dataset, or one with train.* and valid.* files.
        tokenizer: "byte", "bpe", a path, or None: a prepared dataset's own, or "bpe".
        vocab_size: the most ids of a BPE that is trained here.
        min_frequency: for such a BPE; None for 2.
        validation_fraction: share of the text, from its end, for validation; None for 0.1, 0 for none.
        note: receives a line for each part of the work that may take long.

    Raises:
        UsageError: no data was named. DataError, TokenizerError, ConfigError: something of it cannot be used.
    """
    if not data:
        raise UsageError("--data is required: text files, globs, .jsonl files, or a prepared dataset")
    directory = Path(data[0])
    if len(data) == 1 and directory.is_dir() and (directory / "manifest.json").is_file():
        if min_frequency is not None:
            raise UsageError(f"--min-frequency belongs to a tokenizer trained here; {directory} has its ids already")
        return _prepared(directory, tokenizer, validation_fraction)
    tokenizer = "bpe" if tokenizer is None else tokenizer
    tokenizer_verb.refuse_for_others(tokenizer, min_frequency=min_frequency)
    return _texts(data, tokenizer, vocab_size, min_frequency, validation_fraction, note)


def _prepared(directory: Path, tokenizer: str | None, validation_fraction: float | None) -> Corpus:
    from riftco import data

    if validation_fraction is not None:
        raise ConfigError(
            f"--validation-fraction belongs to text; {directory} is a dataset with its own splits; leave it out"
        )
    dataset = data.open_dataset(directory)
    if tokenizer in ("byte", "bpe"):
        raise UsageError(
            f"--tokenizer {tokenizer} is for text; {directory} is a dataset of ids with a tokenizer of its own; "
            "leave it out, or prepare the text again"
        )
    if tokenizer is None:
        if not (directory / "tokenizer.json").is_file():
            raise DataError(
                f"data: {directory} has no tokenizer.json; name the tokenizer that made it with --tokenizer DIR"
            )
        tokenizer = str(directory)
    made = tokenizer_verb.open_tokenizer(tokenizer)
    dataset = data.open_dataset(directory, tokenizer=made)
    return Corpus(made, dataset.train, dataset.validation, {"dataset": dataset.fingerprint})


def read_texts(paths: tuple[str, ...], validation_fraction: float | None) -> Any:
    """The two sides of a corpus of text, a `riftco.data.TextSplit`.

    Args:
        paths: files and globs; or one directory with train.* and perhaps valid.* files, which is the held-out side
            unless a fraction is given.
        validation_fraction: share of the (training) text, from its end, that is held out; None for 0.1.
    """
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
    return data.load_texts(named, validation_fraction=validation_fraction, validation_paths=held_out)


def sources(texts: Any) -> dict[str, str]:
    """{path: SHA-256} of the files behind a `TextSplit`, as a bundle records them."""
    return {source.path: source.sha256 for source in texts.sources}


def _texts(
    paths: tuple[str, ...],
    tokenizer: str,
    vocab_size: int | None,
    min_frequency: int | None,
    validation_fraction: float | None,
    note: Callable[[str], None],
) -> Corpus:
    from riftco import data

    texts = read_texts(paths, validation_fraction)
    if tokenizer == "bpe":
        note(f"training a tokenizer on {len(texts.train):,} characters")
    made = tokenizer_verb.build(tokenizer, texts.train, vocab_size, min_frequency)
    train = data.encode_text(made, texts.train)
    try:
        validation = None if texts.validation is None else data.encode_text(made, texts.validation)
    except TokenizerError as error:
        raise DataError(
            "the held-out text: every byte must occur in the training text as well, which the byte tokenizer is made "
            f"from; {str(error).split(';')[0]}. Give more text, another --validation-fraction, or --tokenizer bpe."
        ) from error
    note(
        f"{len(texts.train):,} characters are {len(train):,} training tokens"
        + ("" if validation is None else f"; {len(validation):,} are held out")
    )
    return Corpus(made, train, validation, {"sources": sources(texts)})
