"""Train, validation and test by a hash of each row: duplicates dropped, what leaks counted, the result verifiable.

The side of a row follows from the row and the seed alone: not from its place, nor from the rows beside it, so a growing
data set keeps its splits. Rows of prompt and response go where the reference implementation puts them.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from riftco.data._checks import unsigned_integer
from riftco.data.conversations import Example, ExampleFile, Message, Preference, read_examples
from riftco.data.jsonl import rows_of_text
from riftco.data.text import read_chunks
from riftco.errors import ConfigError, DataError
from riftco.files import new_directory

FILE_NAME = "splits.json"
FORMAT = "riftco.example_splits"
VERSION = 1
FILES = {"train": "train.jsonl", "validation": "valid.jsonl", "test": "test.jsonl"}
_SPACE = 1 << 256
_DOMAIN = b"riftco_transformer.stable_split.v1\0"

By = Literal["example", "prompt"]


@dataclass(frozen=True)
class SplitFile:
    """One side: its file in the directory, how many rows it holds, its size, the SHA-256 of its bytes."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ExampleSplits:
    """What splits.json says; `str` of it is for reading.

    Attributes:
        source: {"file", "bytes", "sha256"} of the file that was split, or {"generator", "rows"}.
        row_format: a key of `riftco.data.conversations.SHAPES`.
        seed: of the hash, or of the generator.
        read: rows of the source.
        files: the sides that have rows.
        fractions: of train, validation and test, whose sum is 1; {} for generated rows.
        by: "example": a row is hashed whole; "prompt": its prompt alone, so that no prompt is on two sides.
        exact_duplicates: rows dropped since an earlier one is the same.
        space_duplicates: rows dropped since an earlier one differs from it in white space alone.
        shared_prompts: prompts that are on more than one side, with different answers.
    """

    source: dict[str, Any]
    row_format: str
    seed: int
    read: int
    files: dict[str, SplitFile]
    fractions: dict[str, float] = field(default_factory=dict)
    by: str = "example"
    exact_duplicates: int = 0
    space_duplicates: int = 0
    shared_prompts: int = 0

    @classmethod
    def of(
        cls, source: dict[str, Any], row_format: str, seed: int, sides: Mapping[str, bytes], **facts: Any
    ) -> "ExampleSplits":
        """The description of sides whose bytes are given; `read` is their rows unless it is among the facts."""
        files = {
            name: SplitFile(FILES[name], data.count(b"\n"), len(data), hashlib.sha256(data).hexdigest())
            for name, data in sides.items()
        }
        facts.setdefault("read", sum(file.rows for file in files.values()))
        return cls(source=source, row_format=row_format, seed=seed, files=files, **facts)

    def to_json(self) -> str:
        """The text of splits.json."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    def __str__(self) -> str:
        sides = ", ".join(f"{side.rows:,} {name}" for name, side in self.files.items())
        dropped = self.exact_duplicates + self.space_duplicates
        lines = [f"{self.read:,} rows of {self.row_format}: {sides}"]
        if dropped:
            lines.append(
                f"  {dropped:,} duplicates dropped, {self.space_duplicates:,} of them equal but for white space"
            )
        if self.shared_prompts:
            lines.append(
                f"  {self.shared_prompts:,} prompts are on more than one side, with other answers; "
                "split by prompt to part them"
            )
        return "\n".join(lines)


def split_examples(
    path: str | Path,
    out_dir: str | Path,
    *,
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
    seed: int = 7,
    by: By = "example",
    force: bool = False,
) -> ExampleSplits:
    """Split a JSON-lines file of examples or preferences into a new directory.

    Args:
        path: the file; every row is checked as `read_examples` does.
        out_dir: holds train.jsonl, valid.jsonl, test.jsonl (those that have rows) and splits.json afterwards; appears
            whole or not at all.
        validation_fraction: the share of the hash's range, not exactly of the rows.
        test_fraction: the same.
        seed: of the hash.
        by: see `ExampleSplits`.
        force: replace a directory that this function made.

    Returns:
        What splits.json says.

    Raises:
        DataError: a row is not usable; no row falls to training; the directory exists, or cannot be written.
        ConfigError: an option that is none.

    Source:
        The rule of riftco-transformer 0.6.1: SHA-256 of a tag, the seed and the row's canonical JSON, against
        thresholds.
    """
    fractions = _fractions(validation_fraction, test_fraction)
    seed = unsigned_integer("split_examples", "seed", seed)
    if by not in ("example", "prompt"):
        raise ConfigError(f"split_examples: by must be 'example' or 'prompt'; got {by!r}")
    content = b"".join(read_chunks(path))
    source = read_examples(path, content)
    lines: dict[str, list[str]] = {name: [] for name in FILES}
    prompts: dict[str, set[str]] = {}
    exact, spaced = set(), set()
    counts = {"exact_duplicates": 0, "space_duplicates": 0}
    for (number, row), example in zip(rows_of_text(path, content), source.rows, strict=True):
        identity = _identity(example)
        squeezed = _squeezed(example)
        whole, loose = _digest(identity), _digest(_identity(squeezed))
        if whole in exact or loose in spaced:
            counts["exact_duplicates" if whole in exact else "space_duplicates"] += 1
            continue
        exact.add(whole)
        spaced.add(loose)
        prompt = _prompt(squeezed)
        side = assign({"prompt": prompt} if by == "prompt" and prompt else identity, fractions, seed)
        if prompt:
            prompts.setdefault(prompt, set()).add(side)
        lines[side].append(_line(path, number, row))
    if not lines["train"]:
        raise DataError(
            f"split: at least one row must fall to training; of the {len(source)} of '{path}' none does; give more "
            "rows, smaller fractions or another seed"
        )
    sides = {name: "".join(rows).encode() for name, rows in lines.items() if rows}
    splits = ExampleSplits.of(
        {"file": Path(path).name, "bytes": len(content), "sha256": source.sha256},
        source.format,
        seed,
        sides,
        read=len(source),
        fractions=fractions,
        by=by,
        shared_prompts=sum(len(names) > 1 for names in prompts.values()),
        **counts,
    )
    write_splits(out_dir, splits, sides, force=force)
    return splits


def write_splits(out_dir: str | Path, splits: ExampleSplits, sides: Mapping[str, bytes], *, force: bool) -> None:
    """The files of each side and splits.json as a new directory. Raises DataError where it cannot be."""
    out = Path(out_dir)
    is_taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    if is_taken and not force:
        raise DataError(f"split: the output directory must be new; '{out}' exists; choose another or use force")
    if is_taken and not (out / FILE_NAME).is_file():
        raise DataError(f"split: force replaces only splits; '{out}' has no {FILE_NAME}; choose another directory")
    own = {FILE_NAME, *FILES.values()}
    if is_taken and (others := sorted(path.name for path in out.iterdir() if path.name not in own)):
        raise DataError(
            f"split: force replaces only splits; '{out}' holds {others[0]} besides; choose another directory"
        )
    try:
        with new_directory(out, replace=force) as directory:
            for name, content in sides.items():
                (directory / FILES[name]).write_bytes(content)
            (directory / FILE_NAME).write_bytes(splits.to_json().encode())
    except OSError as error:
        raise DataError(f"split: cannot write '{out}': {error.strerror or error}") from error


def assign(identity: Mapping[str, str], fractions: Mapping[str, float], seed: int) -> str:
    """The side of a row: its hash against the fractions, laid end to end over all hashes."""
    text = _canonical(identity).encode()
    value = int(hashlib.sha256(_DOMAIN + f"int:{seed}".encode() + b"\0" + text).hexdigest(), 16)
    train = fractions["train"]
    if value < int(train * _SPACE):
        return "train"
    return "validation" if value < int((train + fractions["validation"]) * _SPACE) else "test"


def read_splits(directory: str | Path) -> ExampleSplits | None:
    """What a directory's splits.json says; None where there is none. Raises DataError if it is not one."""
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
        if content.pop("format") != FORMAT or content.pop("version") != VERSION:
            raise ValueError(f"it is not {FORMAT} of version {VERSION}")
        files = {name: SplitFile(**side) for name, side in content.pop("files").items()}
        splits = ExampleSplits(files=files, **content)
        if wrong := [name for name, side in files.items() if side.file != FILES.get(name)]:
            raise ValueError(f"it names an unknown side or file: {wrong[0]}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"data: '{path}' must be what `riftco data split` wrote; {error}; split the data again"
        ) from None
    return splits


def verified_contents(directory: str | Path, files: Mapping[str, Path]) -> dict[str, bytes]:
    """The bytes of each split's file, equal to what splits.json says; {} where there is no splits.json.

    Args:
        directory: of the splits.
        files: the splits that were found there.

    Raises:
        DataError: a file is missing, was added or has changed, or splits.json is damaged.
    """
    splits = read_splits(directory)
    if splits is None:
        return {}
    if files.keys() != splits.files.keys():
        names = ", ".join(sorted(files.keys() ^ splits.files.keys()))
        raise DataError(
            f"data: '{directory}' must have the sides that its {FILE_NAME} lists; these differ: {names}; restore the "
            "files, or split the data again"
        )
    contents = {}
    for name, path in files.items():
        contents[name] = content = b"".join(read_chunks(path))
        actual, known = hashlib.sha256(content).hexdigest(), splits.files[name].sha256
        if actual != known:
            raise DataError(
                f"data: '{path}' must have the SHA-256 that {FILE_NAME} says, {known[:12]}…; it has {actual[:12]}…; "
                f"restore the file, split the data again, or remove {FILE_NAME}"
            )
    return contents


def find_leaks(splits: Mapping[str, ExampleFile]) -> list[tuple[str, str]]:
    """Pairs ("FILE:LINE" of training, "FILE:LINE" of another split) of rows that differ in white space at most."""
    known = {_digest(_identity(_squeezed(row))): row.where for row in reversed(splits["train"].rows)}
    held_out = (row for name, file in splits.items() if name != "train" for row in file.rows)
    found = ((known.get(_digest(_identity(_squeezed(row)))), row.where) for row in held_out)
    return [(one, other) for one, other in found if one is not None]


# ------------------------------------------------------------------------------------------------ what a row is


def _identity(example: Example | Preference) -> dict[str, str]:
    """What makes two rows the same, as texts by name."""
    if isinstance(example, Preference):
        names = ("prompt", "chosen", "rejected")
        return {name: _text(getattr(example, name)) for name in names if getattr(example, name)}
    if example.text is not None:
        return {"text": example.text}
    if not example.given:
        return {"messages": _text(example.messages)}
    return {"prompt": _prompt(example), "response": _text(example.messages[example.given :])}


def _prompt(example: Example | Preference) -> str:
    """What stands before the answer, or before the last one; "" for a text."""
    if isinstance(example, Preference):
        return _text(example.prompt)
    if example.given or not example.messages:
        return _text(example.messages[: example.given])
    return _text(example.messages[:-1])


def _text(messages: Sequence[Message]) -> str:
    """The content of a single message, which is what a row's plain string became; else all of them as JSON."""
    if len(messages) == 1 and messages[0].keys() == {"role", "content"}:
        return messages[0]["content"]
    return _canonical(messages) if messages else ""


def _squeezed(value: Any) -> Any:
    """A row with every stretch of white space in its texts as one space, and none around them."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Example | Preference):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _squeezed(field) for name, field in fields.items()})
    if isinstance(value, Mapping):
        return {key: _squeezed(item) for key, item in value.items()}
    return tuple(map(_squeezed, value)) if isinstance(value, list | tuple) else value


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _digest(identity: Mapping[str, str]) -> bytes:
    return hashlib.sha256(_canonical(identity).encode()).digest()


def _line(path: str | Path, number: int, row: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
        text.encode()
    except ValueError as error:
        raise DataError(f"split: every row must be strict JSON; file '{path}' line {number}: {error}") from None
    return text + "\n"


def _fractions(validation: float, test: float) -> dict[str, float]:
    for name, value in (("validation_fraction", validation), ("test_fraction", test)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not 0 <= value < 1:
            raise ConfigError(f"split_examples: {name} must be a number of 0 or more and below 1; got {value!r}")
    if validation + test >= 1:
        raise ConfigError(
            f"split_examples: validation and test fractions must leave some for training; got {validation:g} and "
            f"{test:g}; make them smaller"
        )
    return {"train": 1.0 - validation - test, "validation": float(validation), "test": float(test)}
