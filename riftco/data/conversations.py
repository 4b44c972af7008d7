"""Rows for post-training: conversations, prompts with answers, plain texts, preferences; which of them a file holds.

The first row of a JSON-lines file decides its format, and every other row must have it. A prompt with an answer becomes
a conversation of two messages, so that one template writes them all. Tokens and weights are in sft.py, splits in
splits.py.
"""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from riftco.data.corpus import find_splits
from riftco.data.jsonl import row_fault, row_string, rows_of_text
from riftco.errors import DataError

Message = Mapping[str, Any]
Format = Literal["messages", "completion", "response", "text", "alpaca", "preference"]

SHAPES: dict[str, str] = {
    "messages": '{"messages": [{"role", "content"}, …]}',
    "completion": '{"prompt", "completion"}',
    "response": '{"prompt", "response"}',
    "text": '{"text"}',
    "alpaca": '{"instruction", "input", "output"}',
    "preference": '{"prompt", "chosen", "rejected"}',
}
"""The keys of a row in each format; `input` may be absent, and `prompt` beside chosen and rejected conversations."""


@dataclass(frozen=True)
class Example:
    """One row to learn from: a conversation, or a text.

    Attributes:
        where: "FILE:LINE".
        messages: the conversation; () for a text.
        text: the text; None for a conversation.
        given: so many messages at the start are context, whoever wrote them, and nothing of them is learned.
    """

    where: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    given: int = 0


@dataclass(frozen=True)
class Preference:
    """One row of two answers, the first of which is preferred.

    Attributes:
        where: "FILE:LINE".
        prompt: the messages before both.
        chosen: the messages that answer better.
        rejected: the messages that answer worse.
    """

    where: str
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]


@dataclass(frozen=True)
class ExampleFile:
    """The rows of one file.

    Attributes:
        path: the file as it was named.
        format: a key of `SHAPES`.
        rows: `Preference` rows where the format is "preference", else `Example` rows.
        sha256: of the file's bytes.
    """

    path: str
    format: Format
    rows: tuple[Any, ...]
    sha256: str

    def __len__(self) -> int:
        return len(self.rows)


def read_examples(path: str | Path, content: bytes | None = None) -> ExampleFile:
    """The rows of a JSON-lines file, each checked.

    Args:
        path: the file.
        content: its bytes, where they were read already.

    Returns:
        An `ExampleFile`; the format is that of the first row.

    Raises:
        DataError: as `iterate_rows`; a row in no known format, or in another than the first row's. File and line are
            named.
    """
    content = _read(path) if content is None else content
    kind: Format | None = None
    rows = []
    for number, row in rows_of_text(path, content):
        kind = _detect(path, number, row) if kind is None else kind
        rows.append(_PARSERS[kind](_Row(path, number, row)))
    assert kind is not None  # `rows_of_text` yields at least one
    return ExampleFile(str(path), kind, tuple(rows), hashlib.sha256(content).hexdigest())


def find_examples(path: str | Path) -> dict[str, Path]:
    """{"train": file} of a file; of a directory its train.jsonl and, where there are such, "validation" and "test".

    Raises:
        DataError: no such path, a directory without train.jsonl, or two files for one split.
    """
    path = Path(path)
    if not path.is_dir():
        return {"train": path}
    found = {split: file for split, file in find_splits(path).items() if file.suffix == ".jsonl"}
    if "train" not in found:
        raise DataError(
            f"data: directory '{path}' must hold train.jsonl, and may hold valid.jsonl and test.jsonl; it has no "
            "train.jsonl; make them with `riftco data split`, or name one file"
        )
    return found


def load_examples(path: str | Path) -> dict[str, ExampleFile]:
    """Every split of a file or directory, read and checked; see `find_examples` and `read_examples`.

    A directory that `riftco data split` made is compared with its splits.json: what is read is what was hashed.

    Raises:
        DataError: as those; a file that is not what splits.json says; preferences in one split and examples in another.

    Warns:
        UserWarning: if a row of training is in another split too, in a directory without splits.json.
    """
    from riftco.data.splits import find_leaks, verified_contents

    files = find_examples(path)
    contents = verified_contents(path, files) if Path(path).is_dir() else {}
    splits = {split: read_examples(file, contents.get(split)) for split, file in files.items()}
    kinds = {split: file.format == "preference" for split, file in splits.items()}
    for split, is_preference in kinds.items():
        if is_preference != kinds["train"]:
            raise DataError(
                f"data: the splits of '{path}' must all hold preferences or none; '{splits['train'].path}' is "
                f"{splits['train'].format} and '{splits[split].path}' is {splits[split].format}; use one kind"
            )
    if not contents and (leaks := find_leaks(splits)):
        (one, other), more = leaks[0], "" if len(leaks) == 1 else f" and {len(leaks) - 1:,} more pairs"
        warnings.warn(f"data: rows of training are held out as well: {one} is {other}{more}", stacklevel=2)
    return splits


def _read(path: str | Path) -> bytes:
    from riftco.data.text import read_chunks

    return b"".join(read_chunks(path))


def _detect(path: str | Path, number: int, row: Mapping[str, Any]) -> Format:
    """The format that a row's keys mean."""
    has = row.keys().__contains__
    if has("chosen") or has("rejected"):
        return "preference"
    if has("messages"):
        return "messages"
    if has("instruction"):
        return "alpaca"
    if has("prompt") and (has("completion") or has("response")):
        return "completion" if has("completion") else "response"
    if has("text"):
        return "text"
    hint = "; turn each {from, value} into {role, content} under 'messages'" if has("conversations") else ""
    known = ", ".join(SHAPES.values())
    found = ", ".join(map(repr, row)) or "no key"
    raise row_fault(path, number, f"have the keys of a known format ({known})", f"it has {found}{hint}")


@dataclass(frozen=True)
class _Row:
    """A row with its place, for parsers that say what is wrong where."""

    path: str | Path
    number: int
    row: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"

    def string(self, key: str, *, may_be_blank: bool = False) -> str:
        """A string with something in it; one that may be blank may be empty too."""
        if may_be_blank and self.row.get(key) == "":
            return ""
        value = row_string(self.path, self.number, dict(self.row), key)
        if not may_be_blank and not value.strip():
            raise self.fault(f"have text as '{key}'", "it is white space alone")
        return value

    def turns(self, key: str, role: str) -> tuple[Message, ...]:
        """Messages under a key: one of `role` for a string, or those of a list."""
        if isinstance(self.row.get(key), list):
            return self.messages(key)
        return ({"role": role, "content": self.string(key, may_be_blank=role == "assistant")},)

    def messages(self, key: str) -> tuple[Message, ...]:
        value = self.row.get(key)
        if not isinstance(value, list) or not value:
            found = "an empty list" if value == [] else f"a {type(value).__name__}"
            raise self.fault(f"have a list of messages as '{key}'", f"it is {found}")
        return tuple(self.message(item, f"{key}[{index}]") for index, item in enumerate(value))

    def message(self, item: Any, name: str) -> Message:
        if not isinstance(item, dict) or not isinstance(item.get("role"), str) or not item["role"]:
            found = f"has {', '.join(map(repr, item)) or 'no key'}" if isinstance(item, dict) else f"is {item!r:.60}"
            raise self.fault(f'have {{"role", "content"}} as {name}', f"it {found}")
        message = {key: value for key, value in item.items() if value is not None}
        content = message.get("content")
        if content is None and len(message) > 1:
            return message  # a tool call has no text
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = message["content"] = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            found = "is absent" if content is None else f"is a {type(content).__name__}, of which only text can be read"
            raise self.fault(f"have a string as {name}.content", f"it {found}")
        try:
            content.encode()
        except UnicodeEncodeError:
            raise self.fault(f"have Unicode text as {name}.content", "it has a lone surrogate") from None
        return message

    def fault(self, requirement: str, found: str) -> DataError:
        return row_fault(self.path, self.number, requirement, found)


def _parse_messages(row: _Row) -> Example:
    return Example(row.where, row.messages("messages"))


def _parse_answer(key: str) -> Any:
    def parse(row: _Row) -> Example:
        prompt = row.turns("prompt", "user")
        return Example(row.where, prompt + row.turns(key, "assistant"), given=len(prompt))

    return parse


def _parse_alpaca(row: _Row) -> Example:
    prompt = row.string("instruction")
    more = row.string("input", may_be_blank=True) if row.row.get("input") is not None else ""
    if more.strip():
        prompt = f"{prompt}\n\n{more}"
    answer = {"role": "assistant", "content": row.string("output", may_be_blank=True)}
    return Example(row.where, ({"role": "user", "content": prompt}, answer), given=1)


def _parse_text(row: _Row) -> Example:
    return Example(row.where, text=row.string("text"))


def _parse_preference(row: _Row) -> Preference:
    sides = [row.turns(side, "assistant") for side in ("chosen", "rejected")]
    if "prompt" in row.row:
        prompt = row.turns("prompt", "user")
        return Preference(row.where, prompt, *sides)
    if not all(isinstance(row.row[side], list) for side in ("chosen", "rejected")):
        raise row.fault("have the key 'prompt'", "it has none beside answers that are text")
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    return Preference(row.where, sides[0][:shared], *(side[shared:] for side in sides))


_PARSERS: dict[str, Any] = {
    "messages": _parse_messages,
    "completion": _parse_answer("completion"),
    "response": _parse_answer("response"),
    "text": _parse_text,
    "alpaca": _parse_alpaca,
    "preference": _parse_preference,
}
