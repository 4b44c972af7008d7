"""Places in a source, diagnostics that point at them, and the errors that carry them."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from riftco.errors import RiftcoError

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A text that programs come from; two sources are the same only if they are one object.

    Attributes:
        text: the whole text.
        name: its file, or "" for a string.
    """

    text: str
    name: str = ""

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both counted from 1."""
        return self.text.count("\n", 0, offset) + 1, offset - self.text.rfind("\n", 0, offset)


@dataclasses.dataclass(frozen=True)
class Span:
    """The characters `start` up to, not including, `end` of a source."""

    source: Source = dataclasses.field(repr=False)
    start: int
    end: int

    @property
    def line(self) -> int:
        """The line of its first character, from 1."""
        return self.source.position(self.start)[0]

    @property
    def column(self) -> int:
        """The column of its first character, from 1."""
        return self.source.position(self.start)[1]

    def __str__(self) -> str:
        where = f"line {self.line}, column {self.column}"
        return f"{os.path.basename(self.source.name)}: {where}" if self.source.name else where

    def excerpt(self, label: str = "") -> str:
        """Its first line with the characters underlined, and a label behind the carets."""
        line, column = self.source.position(self.start)
        text = self.source.text.split("\n")[line - 1]
        width = max(1, min(self.end - self.start, len(text) - column + 1))
        # Tabs stay tabs, so that the carets stand under the text whatever a tab's width.
        indent = "".join("\t" if character == "\t" else " " for character in text[: column - 1])
        return f"{line:>5} | {text}\n      | {indent}{'^' * width}{' ' if label else ''}{label}"


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One thing that is wrong with a program.

    Attributes:
        code: the rule and what it found, such as "tuple-usage".
        message: one sentence that names the rule, the places and the variable.
        variable: the variable it is about, or None.
        spans: the places, the one to change first; empty for terms that were built without a source.
        labels: what each place is, in the order of `spans`.
    """

    code: str
    message: str
    variable: str | None = None
    spans: tuple[Span, ...] = ()
    labels: tuple[str, ...] = ()

    def render(self) -> str:
        """The message, and under it each place with its text underlined."""
        parts = [f"error[{self.code}]: {self.message}"]
        for span, label in zip(self.spans, self.labels, strict=True):
            parts += [f"  --> {span}", span.excerpt(label)]
        return "\n".join(parts)


class CajalError(RiftcoError, ValueError):
    """Base of every error about a Cajal program.

    Attributes:
        diagnostics: what is wrong, with places; empty where the error is not about a source.
    """

    def __init__(self, message: str, diagnostics: Iterable[Diagnostic] = ()) -> None:
        super().__init__(message)
        self.diagnostics = tuple(diagnostics)

    def render(self) -> str:
        """The diagnostics with their sources underlined, or the message where there are none."""
        return "\n\n".join(diagnostic.render() for diagnostic in self.diagnostics) or str(self)


class CajalSyntaxError(CajalError):
    """A text is not a program."""


class CajalTypeError(CajalError):
    """A program breaks a rule of types, of names or of linear usage."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        found = tuple(diagnostics)
        super().__init__("\n".join(diagnostic.message for diagnostic in found), found)


class CajalEvaluationError(CajalError):
    """A program has no single result, or its environment does not fit."""


class CajalEncodingError(CajalError):
    """A vector is no value, a value is not of its type, or there are too many values to list."""


class CajalLoweringError(CajalError):
    """A map cannot be built, stored or lowered as asked."""


Place = tuple[Span | None, str]
"""A span, if there is one, and what stands there."""


def diagnostic(code: str, message: str, *places: Place, variable: str | None = None) -> Diagnostic:
    """A diagnostic whose message holds `{0}`, `{1}` … where the places are to be named.

    Args:
        code: the rule and what it found.
        message: one sentence; `{i}` becomes " (line 3, column 5)", or nothing where place i has no span.
        *places: the places with their labels.
        variable: the variable it is about.
    """
    texts = ["" if span is None else f" ({span})" for span, _ in places]
    for number, text in enumerate(texts):
        message = message.replace(f"{{{number}}}", text)
    known = [(span, label) for span, label in places if span is not None]
    return Diagnostic(code, message, variable, tuple(s for s, _ in known), tuple(label for _, label in known))


def refuse(code: str, message: str, *places: Place, variable: str | None = None) -> NoReturn:
    """Raise CajalTypeError with one diagnostic, made as by `diagnostic`."""
    raise CajalTypeError([diagnostic(code, message, *places, variable=variable)])


def shallow(function: Callable[P, R]) -> Callable[P, R]:
    """A pass over terms whose recursion, where it goes too deep, ends in a sentence."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RecursionError:
            raise CajalError(
                f"cajal.{function.__name__}: a program must nest less deeply than Python's stack allows; "
                "name parts of it by `let` or definitions"
            ) from None

    return guarded
