"""`riftco data prepare|check|show|split|generate`; what concerns examples for post-training is in data_examples.py."""

import dataclasses
from typing import Any, Literal

from riftco.cli import data_examples
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

    data: str | None = flag(
        None, "a dataset directory; or a .jsonl file of examples, or a directory of such splits", metavar="PATH"
    )
    tokenizer: str | None = flag(
        None, "the tokenizer that made the ids, or the model's that is to learn the examples", metavar="DIR",
        shown="the dataset's own",
    )  # fmt: skip
    split: Literal["train", "validation", "test"] = flag("train", "which split")
    index: int = flag(0, "the window's first position, or the example's number from 0")
    max_seq_length: int | None = flag(
        None, "tokens in the window, or to which an example is cut", shown="32; the whole example"
    )
    loss_on: Literal["response", "all"] = flag("response", "which tokens of an example are learned")


def run_show(options: ShowOptions, console: Console) -> dict[str, Any]:
    """One window in words, or one example with what is learned of it."""
    from riftco import data

    directory = _directory(options.data)
    if data_examples.is_examples(directory):
        return data_examples.show(options, console)
    data.open_dataset(directory)
    made = tokenizer_verb.open_tokenizer(options.tokenizer or directory)
    context = 32 if options.max_seq_length is None else options.max_seq_length
    text = data.show(directory, options.index, context, made, split=options.split)
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
        ShowOptions, run_show, "print one window of a dataset, or one example with what is learned of it", "data",
        "riftco data show corpus/instructions.jsonl --tokenizer runs/first --index 3",
    ),
    "split": Action(
        data_examples.SplitOptions, data_examples.run_split,
        "split examples by a hash of each, without duplicates, into a directory that is verified when read", "data",
        "riftco data split corpus/instructions.jsonl --out-dir examples",
    ),
    "generate": Action(
        data_examples.GenerateOptions, data_examples.run_generate,
        "write instructions of which some combinations occur in the test split alone", None,
        "riftco data generate --rows 2000 --out-dir examples",
    ),
}  # fmt: skip
