"""`riftco data prepare|check|show`."""

import dataclasses
from typing import Any, Literal

from riftco.cli import tokenizer as tokenizer_verb
from riftco.cli.console import Console
from riftco.cli.options import Common, UsageError, flag
from riftco.cli.verbs import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions(Common):
    """Options of `data prepare`."""

    data: tuple[str, ...] = flag((), "text files, globs or .jsonl files with a text field", metavar="FILE …")
    validation_data: tuple[str, ...] = flag((), "files of an explicit validation side", metavar="FILE …")
    validation_fraction: float | None = flag(None, "share of the text, from its end, for validation", shown="0.1")
    tokenizer: str = flag("bpe", "byte, bpe, or a directory that holds a tokenizer.json", metavar="byte|bpe|DIR")
    vocab_size: int | None = flag(None, "the most ids of a BPE that is trained here", shown="512")
    min_frequency: int | None = flag(
        None, "how often a pair must occur to become a token of a BPE that is trained here", shown="2"
    )
    out_dir: str = flag("dataset", "the directory to make", metavar="DIR")
    force: bool = flag(False, "replace a dataset that is there")


def run_prepare(options: PrepareOptions, console: Console) -> dict[str, Any]:
    """Files to shards; a tokenizer that is trained here sees training text alone, and is saved inside."""
    from riftco import data

    if not options.data:
        raise UsageError("--data is required: text files, globs, or .jsonl files with a text field")
    tokenizer_verb.refuse_for_others(
        options.tokenizer, vocab_size=options.vocab_size, min_frequency=options.min_frequency
    )
    held_out = options.validation_data or None
    text = ""
    if options.tokenizer in ("byte", "bpe"):
        text = data.load_texts(
            options.data, validation_fraction=options.validation_fraction, validation_paths=held_out
        ).train
    made = tokenizer_verb.build(options.tokenizer, text, options.vocab_size, options.min_frequency)
    data.prepare(
        options.data,
        options.out_dir,
        made,
        options.validation_fraction,
        validation_paths=held_out,
        force=options.force,
    )
    return _report(options.out_dir, data.check(options.out_dir, tokenizer=made), console)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions(Common):
    """Options of `data check`."""

    data: str | None = flag(None, "a dataset directory", metavar="DIR")
    tokenizer: str | None = flag(None, "must be the tokenizer that made the ids", metavar="DIR")
    max_seq_length: int | None = flag(None, "the training split must hold a window of so many tokens")


def run_check(options: CheckOptions, console: Console) -> dict[str, Any]:
    """Hash every shard and look at every id."""
    from riftco import data

    made = tokenizer_verb.open_tokenizer(options.tokenizer) if options.tokenizer else None
    directory = _directory(options.data)
    return _report(directory, data.check(directory, tokenizer=made, context=options.max_seq_length), console)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowOptions(Common):
    """Options of `data show`."""

    data: str | None = flag(None, "a dataset directory", metavar="DIR")
    tokenizer: str | None = flag(None, "the tokenizer that made the ids", metavar="DIR", shown="the dataset's own")
    split: Literal["train", "validation"] = flag("train", "which split")
    index: int = flag(0, "the window's first position")
    max_seq_length: int = flag(32, "tokens in the window")


def run_show(options: ShowOptions, console: Console) -> dict[str, Any]:
    """One window in words."""
    from riftco import data

    directory = _directory(options.data)
    data.open_dataset(directory)
    made = tokenizer_verb.open_tokenizer(options.tokenizer or directory)
    text = data.show(directory, options.index, options.max_seq_length, made, split=options.split)
    console.say(text)
    return {"split": options.split, "index": options.index, "text": text}


def _directory(path: str | None) -> str:
    if not path:
        raise UsageError("--data is required: a directory that riftco data prepare made")
    return path


def _report(directory: str, report: Any, console: Console) -> dict[str, Any]:
    console.say(str(report))
    return {"path": directory, **dataclasses.asdict(report)}


ACTIONS = {
    "prepare": Action(
        PrepareOptions, run_prepare, "encode text files into memory-mapped shards", "data",
        "riftco data prepare --data 'texts/*.txt' --out-dir dataset",
    ),
    "check": Action(
        CheckOptions, run_check, "compare a dataset with its manifest, every byte of it", "data",
        "riftco data check dataset",
    ),
    "show": Action(
        ShowOptions, run_show, "print one window as text, tokens and ids", "data",
        "riftco data show dataset --index 100",
    ),
}  # fmt: skip
