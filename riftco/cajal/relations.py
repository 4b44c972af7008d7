"""Index arithmetic and relations: the expressions inside `[…]` and after `rel`, and the finite tables they become."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from riftco.cajal.diagnostics import CajalError, Span, refuse
from riftco.cajal.types import Type

MAX_PAIRS = 2**22
"""The most (query, key) pairs that a relation is tabulated over."""

Sort: TypeAlias = Literal["int", "bool"]


@dataclass(frozen=True)
class Number:
    """A literal."""

    value: int
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Name:
    """An index that `for` binds, or a parameter of a relation."""

    name: str
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Operation:
    """An operator with its one or two operands."""

    operator: str
    operands: tuple["Arithmetic", ...]
    span: Span | None = field(default=None, compare=False, repr=False)


Arithmetic: TypeAlias = Number | Name | Operation

# operator: sort of its operands, sort of its result, meaning
_OPERATORS: dict[str, tuple[Sort, Sort, Callable[..., int]]] = {
    "+": ("int", "int", lambda a, b: a + b),
    "-": ("int", "int", lambda a, b: a - b),
    "*": ("int", "int", lambda a, b: a * b),
    "%": ("int", "int", lambda a, b: a % b),
    "==": ("int", "bool", lambda a, b: a == b),
    "!=": ("int", "bool", lambda a, b: a != b),
    "<": ("int", "bool", lambda a, b: a < b),
    "<=": ("int", "bool", lambda a, b: a <= b),
    ">": ("int", "bool", lambda a, b: a > b),
    ">=": ("int", "bool", lambda a, b: a >= b),
    "and": ("bool", "bool", lambda a, b: a and b),
    "or": ("bool", "bool", lambda a, b: a or b),
    "not": ("bool", "bool", lambda a: not a),
}


def sort_of(expression: Arithmetic, names: Mapping[str, Span | None]) -> Sort:
    """Whether an expression is a number or a truth value.

    Args:
        expression: the expression.
        names: the names in scope, with the places that bind them.

    Raises:
        CajalTypeError: an operand has the wrong sort, or a name is not bound.
    """
    match expression:
        case Number():
            return "int"
        case Name(name, span):
            if name not in names:
                known = ", ".join(sorted(names)) or "none"
                refuse(
                    "index-unbound",
                    f"index: an index must be bound by `for` or be a parameter of its relation; {name}{{0}} is not; "
                    f"bound here: {known}",
                    (span, "not bound"),
                    variable=name,
                )
            return "int"
        case Operation(operator, operands, span):
            wanted, result, _ = _OPERATORS[operator]
            for operand in operands:
                if (found := sort_of(operand, names)) != wanted:
                    refuse(
                        "index-sort",
                        f"index: `{operator}`{{0}} takes {wanted} operands; its operand{{1}} is {found}",
                        (span, f"takes {wanted}"),
                        (operand.span, f"is {found}"),
                    )
            return result


def value_of(expression: Arithmetic, values: Mapping[str, int]) -> int:
    """The value of an expression whose sorts are right; `%` is never negative for a positive divisor.

    Raises:
        CajalTypeError: a remainder by zero.
    """
    match expression:
        case Number(value):
            return value
        case Name(name):
            return values[name]
        case Operation("%", (left, right), span):
            dividend, divisor = value_of(left, values), value_of(right, values)
            if divisor == 0:
                refuse(
                    "index-zero",
                    "index: the right side of `%`{0} must not be 0; its value{1} is 0",
                    (span, "remainder by zero"),
                    (right.span, "is 0"),
                )
            return dividend % divisor
        case Operation("and", (left, right)):
            return value_of(left, values) and value_of(right, values)
        case Operation("or", (left, right)):
            return value_of(left, values) or value_of(right, values)
        case Operation(operator, operands):
            return _OPERATORS[operator][2](*(value_of(operand, values) for operand in operands))


@dataclass(frozen=True)
class Relation:
    """Which keys answer which queries.

    Values of finite types are numbered as `enumerate_values` lists them.

    Attributes:
        name: its name.
        query: the type of queries, finite.
        key: the type of keys, finite.
        pairs: the related (query number, key number).
        names: the names of query and key in `predicate`.
        predicate: the expression it came from, or None; plays no part in equality.
        span: where it is declared.
    """

    name: str
    query: Type
    key: Type
    pairs: frozenset[tuple[int, int]]
    names: tuple[str, str] = field(default=("q", "k"), compare=False, repr=False)
    predicate: Arithmetic | None = field(default=None, compare=False, repr=False)
    span: Span | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for what, type in (("query", self.query), ("key", self.key)):
            if not type.is_enum:
                refuse(
                    "relation-finite",
                    f"relation: queries and keys of {self.name}{{0}} must have finite types, sums of 1; "
                    f"the {what} has {type}",
                    (self.span, f"{what} is {type}"),
                    variable=self.name,
                )
        shape = self.query.dimension, self.key.dimension
        for query, key in self.pairs:
            if not (0 <= query < shape[0] and 0 <= key < shape[1]):
                raise CajalError(
                    f"Relation: pairs of {self.name} must be below {shape}; got {(query, key)}; number values from 0"
                )

    @functools.cached_property
    def matrix(self) -> np.ndarray:
        """The bool matrix [key, query]."""
        matrix = np.zeros((self.key.dimension, self.query.dimension), bool)
        for query, key in self.pairs:
            matrix[key, query] = True
        return matrix


def relation(
    name: str,
    query: Type,
    key: Type,
    related: Callable[[int, int], object] | Iterable[tuple[int, int]] | Arithmetic,
    *,
    names: tuple[str, str] = ("q", "k"),
    span: Span | None = None,
) -> Relation:
    """A relation from a function of (query number, key number), from pairs, or from an expression.

    Args:
        name: its name in texts.
        query: the type of queries, finite.
        key: the type of keys, finite.
        related: says or lists which pairs are related.
        names: what an expression calls query and key.
        span: where it is declared.

    Raises:
        CajalTypeError: a type is not finite, or the expression has wrong sorts.
        CajalError: a pair is out of range, or the table would be too large.
    """
    if isinstance(related, Number | Name | Operation):
        if (found := sort_of(related, dict.fromkeys(names, span))) != "bool":
            refuse(
                "relation-sort",
                f"relation: the predicate{{1}} of {name}{{0}} must be true or false; it is {found}",
                (span, "the relation"),
                (related.span, f"is {found}"),
                variable=name,
            )
        predicate: Arithmetic | None = related
        holds = lambda q, k: value_of(related, {names[0]: q, names[1]: k})
    elif callable(related):
        predicate, holds = None, related
    else:
        return Relation(name, query, key, frozenset(related), names, None, span)
    if not (query.is_enum and key.is_enum):
        return Relation(name, query, key, frozenset(), names, predicate, span)  # refuses with the reason
    if (size := query.dimension * key.dimension) > MAX_PAIRS:
        raise CajalError(
            f"relation: {name} must have at most {MAX_PAIRS} pairs to try; it has {size}; use smaller types"
        )
    every = ((q, k) for q in range(query.dimension) for k in range(key.dimension))
    return Relation(name, query, key, frozenset((q, k) for q, k in every if holds(q, k)), names, predicate, span)
