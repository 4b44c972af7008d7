"""Where words go: results to stdout, everything else to stderr; under --json one line to stdout and no more."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


class Console:
    """The two streams of one command.

    Args:
        as_json: the result is one JSON line, and what would have been printed as a result goes to stderr.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, text: str = "", *, end: str = "\n") -> None:
        """A part of the result, shown at once."""
        print(text, end=end, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def note(self, text: str) -> None:
        """Something about the work, on stderr."""
        print(text, file=sys.stderr, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The summary, if it was asked for."""
        if self.as_json:
            print(json.dumps(_plain(summary), ensure_ascii=False, allow_nan=False), flush=True)


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite as null, arrays' numbers as numbers, anything else as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item"):
        return _plain(value.item())
    return (value if math.isfinite(value) else None) if isinstance(value, float) else str(value)
