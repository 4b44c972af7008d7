"""JSON lines: one object a line, every fault named by file and line number (from 1)."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from riftco.data.text import iterate_text
from riftco.errors import DataError


def iterate_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every row; lines of white space alone are passed over.

    Raises:
        DataError: as `iterate_text`; a line is not JSON or not an object; the file has no row.
    """
    yield from _rows(path, _lines(iterate_text(path)))


def rows_of_text(path: str | Path, content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """`iterate_rows` of a file whose bytes were read already; `path` is for messages."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise row_fault(
            path, number, "be UTF-8", f"byte 0x{content[error.start]:02x} is not ({error.reason})"
        ) from None
    yield from _rows(path, _lines([text]))


def _rows(path: str | Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise row_fault(path, number, "be one JSON object", f"it is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise row_fault(path, number, "be one JSON object", f"it is a {type(row).__name__}")
        rows += 1
        yield number, row
    if not rows:
        raise DataError(f"data: at least one row is required; file '{path}' has none")


def iterate_row_texts(path: str | Path) -> Iterator[str]:
    """The `text` of every `{"text": …}` row; other keys are ignored. Raises DataError naming the line."""
    for number, row in iterate_rows(path):
        yield row_string(path, number, row, "text")


def read_instructions(path: str | Path) -> list[dict[str, str]]:
    """Every `{"prompt": …, "completion": …}` row, both non-empty strings. Raises DataError naming the line."""
    return [
        {key: row_string(path, number, row, key) for key in ("prompt", "completion")}
        for number, row in iterate_rows(path)
    ]


def row_string(path: str | Path, number: int, row: dict[str, Any], key: str) -> str:
    """`row[key]` if it is a non-empty string that UTF-8 can hold. Raises DataError naming file and line."""
    if key not in row:
        raise row_fault(path, number, f"have the key '{key}'", f"it has {', '.join(map(repr, row)) or 'no key'}")
    value = row[key]
    if not isinstance(value, str) or not value:
        shown = "an empty string" if value == "" else f"a {type(value).__name__}"
        raise row_fault(path, number, f"have a non-empty string as '{key}'", f"it is {shown}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no UTF-8 text can hold
        raise row_fault(path, number, f"have Unicode text as '{key}'", "it has a lone surrogate") from None
    return value


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """Lines of a text without their newline; nothing else ends a line, so U+2028 inside a string is safe."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
    yield rest


def row_fault(path: str | Path, number: int, requirement: str, found: str) -> DataError:
    """The error for a row that is not as required."""
    return DataError(f"data: every row must {requirement}; file '{path}' line {number}: {found}; correct that line")
