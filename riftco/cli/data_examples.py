"""Examples for post-training on the command line: shown with their weights, split, generated."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

from riftco.cli import tokenizer as tokenizer_verb
from riftco.cli.console import Console
from riftco.cli.options import Common, UsageError, flag
from riftco.errors import DataError

_OPEN, _CLOSE, _CUT = "⟦", "⟧", "✂"


def is_examples(path: str) -> bool:
    """Whether a path holds rows for post-training rather than a dataset of ids."""
    place = Path(path)
    return not (place / "manifest.json").is_file() and ((place / "train.jsonl").is_file() or not place.is_dir())


def show(options: Any, console: Console) -> dict[str, Any]:
    """Print one example as its model will see it, and which tokens count.

    Args:
        options: those of `data show`.
        console: where it goes; in colour on a terminal, else with marks around what counts.
    """
    from riftco import data

    splits = data.load_examples(options.data)
    if options.split not in splits:
        raise UsageError(f"--split {options.split} is not in {options.data}; it has {', '.join(splits)}")
    file = splits[options.split]
    if not 0 <= options.index < len(file):
        raise DataError(f"data: --index must lie in 0 .. {len(file) - 1} for '{file.path}'; got {options.index}")
    made = tokenizer_verb.open_tokenizer(options.tokenizer)
    context = options.max_seq_length
    if context is not None and context < 1:
        raise UsageError(f"--max-seq-length must be at least 1; got {context}")
    row = file.rows[options.index]
    parts: dict[str, Any] = {"": row}
    if isinstance(row, data.Preference):
        sides = {"chosen": row.chosen, "rejected": row.rejected}
        parts = {n: data.Example(row.where, row.prompt + side, given=len(row.prompt)) for n, side in sides.items()}
    summary = {
        "split": options.split, "index": options.index, "where": row.where, "format": file.format,
        "loss_on": options.loss_on,
    }  # fmt: skip
    console.say(f"{options.split} example {options.index} of 0 .. {len(file) - 1}, {row.where}, {file.format}")
    for name, example in parts.items():
        loss_on = "response" if name else options.loss_on
        found = _tokens(made, data.encode_example(made, example, loss_on=loss_on), context)
        kept = [token for token in found if not token["cut"]]
        counted = sum(token["weight"] > 0 for token in kept)
        dropped = f", {len(found) - len(kept)} cut off" if len(kept) < len(found) else ""
        console.say(f"{name + ': ' if name else ''}{len(kept)} tokens, {counted} of them learned{dropped}")
        _print(found, console)
        if not counted:
            console.note("nothing of it is learned: training leaves it out")
        text = "".join(token["text"] for token in found)
        part = {"tokens": found, "counted": counted, "dropped": len(found) - len(kept), "text": text}
        summary |= {name: part} if name else part
    return summary


def _tokens(tokenizer: Any, encoded: Any, context: int | None) -> list[dict[str, Any]]:
    """Every token with its text and weight; the first is never a target, so its weight is 0."""
    limit = len(encoded.ids) if context is None else context + 1
    return [
        {
            "id": int(token),
            "text": tokenizer.token_bytes(int(token)).decode("utf-8", "backslashreplace"),
            "weight": float(encoded.weights[place]) if 0 < place < limit else 0.0,
            "cut": place >= limit,
        }
        for place, token in enumerate(encoded.ids)
    ]


def _kind(token: dict[str, Any]) -> str:
    return "cut" if token["cut"] else "learned" if token["weight"] > 0 else "given"


def _shown(token: dict[str, Any]) -> str:
    """A token's text with what does not print as an escape, and a line's end both written and made."""
    from riftco.data.preparation import visible

    return visible(token["text"].encode()).replace("\\n", "\\n\n")


def _print(tokens: list[dict[str, Any]], console: Console) -> None:
    if sys.stdout.isatty() and not console.as_json:
        from rich.console import Console as Terminal
        from rich.text import Text

        styles = {"learned": "bold black on green", "given": "dim", "cut": "red strike"}
        text = Text()
        for number, token in enumerate(tokens):
            # Neighbours differ a little, so that one sees where tokens end.
            style = styles[_kind(token)] + (" underline" if number % 2 else "")
            text.append(_shown(token), style=style)
        Terminal(highlight=False).print(text)
        return
    parts, before = [], "given"
    for token in tokens:
        kind = _kind(token)
        if kind != before:
            parts.append((_CLOSE if before == "learned" else "") + {"learned": _OPEN, "cut": _CUT}.get(kind, ""))
        elif parts and not parts[-1].endswith("\n"):
            parts.append("|")
        parts.append(_shown(token))
        before = kind
    console.say("".join(parts) + (_CLOSE if before == "learned" else ""))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitOptions(Common):
    """Options of `data split`."""

    data: str | None = flag(None, "a .jsonl file of examples or preferences", metavar="FILE")
    validation_fraction: float = flag(0.1, "share of the rows for validation, on average")
    test_fraction: float = flag(0.1, "share of the rows for the test, on average")
    seed: int = flag(7, "of the hash that decides")
    by: Literal["example", "prompt"] = flag(
        "example", "what is hashed: a whole row, or its prompt alone, so that no prompt is on two sides"
    )
    out_dir: str = flag("examples", "the directory to make", metavar="DIR")
    force: bool = flag(False, "replace a directory that this verb made")


def run_split(options: SplitOptions, console: Console) -> dict[str, Any]:
    """One file to train.jsonl, valid.jsonl, test.jsonl and splits.json."""
    from riftco import data

    if not options.data:
        raise UsageError("--data is required: a .jsonl file of examples or preferences")
    splits = data.split_examples(
        options.data,
        options.out_dir,
        validation_fraction=options.validation_fraction,
        test_fraction=options.test_fraction,
        seed=options.seed,
        by=options.by,
        force=options.force,
    )
    console.say(f"{options.out_dir}: {splits}")
    return {"path": options.out_dir, **dataclasses.asdict(splits)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(Common):
    """Options of `data generate`."""

    rows: int = flag(2000, "training rows; validation and test have a quarter of that each")
    seed: int = flag(0, "which rows")
    out_dir: str = flag("examples", "the directory to make", metavar="DIR")
    force: bool = flag(False, "replace a directory that this verb, or data split, made")


def run_generate(options: GenerateOptions, console: Console) -> dict[str, Any]:
    """Generated rows as a directory of splits."""
    from riftco.data import compositions

    splits = compositions.write_compositions(options.out_dir, options.rows, options.seed, force=options.force)
    console.say(f"{options.out_dir}: {splits}")
    return {"path": options.out_dir, **dataclasses.asdict(splits)}
