"""Values, each with its type. Components of tuples and entries of dictionaries may be suspended: not computed yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from riftco.cajal import types
from riftco.cajal.diagnostics import CajalEvaluationError


class Suspended(Protocol):
    """What a component or an entry is: something with results. A value is its own single result."""

    @property
    def type(self) -> types.Type:
        """The type of every result."""
        ...

    def results(self) -> list[Value]:
        """Every result, errors included."""
        ...

    def force(self) -> Value:
        """The single result, deterministically; raises CajalEvaluationError where there is none."""
        ...


@dataclass(frozen=True)
class Value:
    """A result of a program."""

    type: types.Type

    def results(self) -> list[Value]:
        """Itself."""
        return [self]

    def force(self) -> Value:
        """Itself."""
        return self


@dataclass(frozen=True)
class Unit(Value):
    """`()`."""

    type: types.Type = types.Unit()  # noqa: RUF009

    def __str__(self) -> str:
        return "()"


@dataclass(frozen=True)
class Error(Value):
    """No value: what a lookup without a match and the term `error` come to."""

    def force(self) -> Value:
        """Raise CajalEvaluationError."""
        raise CajalEvaluationError(
            "cajal.evaluate: a single result is required; the program comes to error; use evaluate_all"
        )

    def __str__(self) -> str:
        return "error"


@dataclass(frozen=True)
class Inject(Value):
    """A value of one summand."""

    index: int
    value: Value

    def __str__(self) -> str:
        if isinstance(self.value, Unit):
            return f"{self.index}:{self.type if str(self.type).startswith('Fin') else f'({self.type})'}"
        return f"inj {self.index} {self.value}"


@dataclass(frozen=True, eq=False)
class Tuple(Value):
    """Components side by side; two tuples are equal if their components have equal results."""

    components: tuple[Suspended, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tuple) or self.type is not other.type:
            return False
        return all(a.results() == b.results() for a, b in zip(self.components, other.components, strict=True))

    def __hash__(self) -> int:
        return hash((Tuple, self.type))

    def __str__(self) -> str:
        return f"({', '.join(shown(component) for component in self.components)})"


@dataclass(frozen=True, eq=False)
class Dictionary(Value):
    """Entries in order; two dictionaries are equal if their entries, in order, have equal results."""

    entries: tuple[tuple[Suspended, Suspended], ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dictionary) or self.type is not other.type or len(self.entries) != len(other.entries):
            return False
        pairs = zip(self.entries, other.entries, strict=True)
        return all(a[side].results() == b[side].results() for a, b in pairs for side in (0, 1))

    def __hash__(self) -> int:
        return hash((Dictionary, self.type))

    def __str__(self) -> str:
        return f"{{{', '.join(f'{shown(key)} -> {shown(value)}' for key, value in self.entries)}}}"


def shown(part: Suspended) -> str:
    """A component or entry as text: its results with `<|>` between them."""
    return " <|> ".join(str(value) for value in part.results())


def unit() -> Unit:
    """`()`."""
    return Unit()


def inject(type: types.Type, index: int, value: Value | None = None) -> Inject:
    """A value of a sum; without a payload the summand must be 1.

    Raises:
        CajalEvaluationError: the type is no sum, the index out of range, or the payload of another type.
    """
    value = Unit() if value is None else value
    parts = type.parts if isinstance(type, types.Sum) else ()
    if not 0 <= index < len(parts) or value.type is not parts[index]:
        raise CajalEvaluationError(f"values.inject: {type} has no summand {index} with a payload of type {value.type}")
    return Inject(type, index, value)


def tuple_of(components: Iterable[Suspended]) -> Tuple:
    """A tuple of values.

    Raises:
        CajalError: there is no component.
    """
    components = tuple(components)
    return Tuple(types.Product(component.type for component in components), components)


def ordinal(value: Value) -> int:
    """The number of a value of a finite type, as `enumerate_values` counts."""
    offset = 0
    while isinstance(value, Inject):
        assert isinstance(value.type, types.Sum)
        offset += value.type.offsets[value.index]
        value = value.value
    return offset
