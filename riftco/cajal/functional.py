"""The older Cajal: booleans, linear functions and bounded naturals with iteration, embedded in Python.

Terms are Python objects; `compile` gives the map of a term in a context. A function A ⊸ B is its matrix, flattened with
the output first, so its vectors are d(B)·d(A) wide. There is no first-order program behind such a map.

    x and y:   if_(x, y, if_(y, false, false))   is linear in both

Source:
    Velez-Ginorio et al., Compiling to linear neurons, arXiv:2511.13769, and to recurrent neurons, arXiv:2511.14953.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from riftco.cajal.diagnostics import CajalError, CajalLoweringError, refuse
from riftco.cajal.maps import MultilinearMap
from riftco.cajal.semirings import Semiring, named
from riftco.cajal.tables import Table, merged, product, stacked
from riftco.cajal.usage import Part, Usage, additive, closed, multiplicative


@dataclasses.dataclass(frozen=True)
class Type:
    """A type: `Bool`, `Nat(n)` or `Arrow`; `A >> B` is the type of functions from A to B."""

    @property
    def dimension(self) -> int:
        """Coordinates of its vectors."""
        raise NotImplementedError

    def __rshift__(self, other: Type) -> Arrow:
        return Arrow(self, other)


@dataclasses.dataclass(frozen=True)
class Boolean(Type):
    """Truth values: true is [1, 0], false is [0, 1]."""

    @property
    def dimension(self) -> int:
        """2."""
        return 2

    def __str__(self) -> str:
        return "Bool"


Bool = Boolean()


@dataclasses.dataclass(frozen=True)
class Nat(Type):
    """The naturals below `bound`; the successor of the last has no value, and its vector is zero.

    Raises:
        CajalError: the bound is below 1.
    """

    bound: int

    def __post_init__(self) -> None:
        if self.bound < 1:
            raise CajalError(f"functional.Nat: the bound must be at least 1; got {self.bound}")

    @property
    def dimension(self) -> int:
        """The bound."""
        return self.bound

    def __str__(self) -> str:
        return f"Nat({self.bound})"


@dataclasses.dataclass(frozen=True)
class Arrow(Type):
    """Linear functions."""

    argument: Type
    result: Type

    @property
    def dimension(self) -> int:
        """The product of both."""
        return self.argument.dimension * self.result.dimension

    def __str__(self) -> str:
        left = f"({self.argument})" if isinstance(self.argument, Arrow) else str(self.argument)
        return f"{left} ⊸ {self.result}"


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """A term with its type; calling it applies it.

    Attributes:
        type: its type.
        usage: the variables that it consumes.
        rule: the rule that made it.
        parts: the terms it was made of.
        name: the variable that it is or binds.
        index: a number that belongs to it.
    """

    type: Type
    usage: Usage
    rule: str
    parts: tuple[Term, ...] = ()
    name: str = ""
    index: int = 0

    def __call__(self, argument: Term) -> Term:
        """Apply a function.

        Raises:
            CajalTypeError: it is none, the argument has another type, or a variable is used on both sides.
        """
        if not isinstance(self.type, Arrow) or argument.type != self.type.argument:
            refuse("apply-type", f"apply: {self.type} does not take an argument of type {argument.type}")
        usage = multiplicative("apply", None, [_part(self, "the function"), _part(argument, "the argument")])
        return Term(self.type.result, usage, "apply", (self, argument))


def _part(term: Term, label: str) -> Part:
    return Part(term.usage, label, None)


true = Term(Bool, Usage({}), "constant", index=0)
false = Term(Bool, Usage({}), "constant", index=1)


def numeral(value: int, type: Nat) -> Term:
    """A natural; `numeral(0, Nat(n))` is zero.

    Raises:
        CajalError: it is not below the bound.
    """
    if not 0 <= value < type.bound:
        raise CajalError(f"functional.numeral: the value must be from 0 to {type.bound - 1}; got {value}")
    return Term(type, Usage({}), "constant", index=value)


def variable(name: str, type: Type) -> Term:
    """A free variable, which the context of `compile` gives."""
    return Term(type, Usage({name: None}), "variable", name=name)


def succ(value: Term) -> Term:
    """The next natural; nothing after the last.

    Raises:
        CajalTypeError: the term is no natural.
    """
    if not isinstance(value.type, Nat):
        refuse("succ-type", f"succ: a natural is required; got a term of type {value.type}")
    return Term(value.type, value.usage, "succ", (value,))


def if_(condition: Term, then: Term, otherwise: Term) -> Term:
    """One of two terms, which use the same variables.

    Raises:
        CajalTypeError: the condition is no Bool, the branches differ in type or in what they use.
    """
    if condition.type != Bool or then.type != otherwise.type:
        refuse(
            "if-type", f"if: Bool and two equal types are required; got {condition.type}, {then.type}, {otherwise.type}"
        )
    inside = additive("if", [_part(then, "the first branch"), _part(otherwise, "the second branch")])
    usage = multiplicative("if", None, [_part(condition, "the condition"), Part(inside, "the branches", None)])
    return Term(then.type, usage, "if", (condition, then, otherwise))


_NUMBERS = itertools.count()


def function(argument: Type, body: Callable[[Term], Term]) -> Term:
    """The linear function x ↦ body(x).

    Raises:
        CajalTypeError: the body does not use x exactly once on every path.
    """
    name, inner, usage = _bound("function", argument, body)
    return Term(Arrow(argument, inner.type), usage, "function", (inner,), name)


def iterate(base: Term, step: Callable[[Term], Term], count: Term) -> Term:
    """`step` applied `count` times to `base`.

    Args:
        base: where it starts.
        step: from the base's type to the same type, using nothing but its argument.
        count: a natural.

    Raises:
        CajalTypeError: the count is no natural, the step has another type or uses another variable.
    """
    if not isinstance(count.type, Nat):
        refuse("iterate-type", f"iterate: the count must be a natural; it has the type {count.type}")
    name, inner, usage = _bound("iterate", base.type, step)
    if inner.type != base.type:
        refuse("iterate-step", f"iterate: the step must give the type {base.type} of the base; it gives {inner.type}")
    for other in usage.names:
        refuse(
            "iterate-closed",
            f"iterate: the step is repeated, so it must use nothing but its argument; it uses {other}",
            variable=other,
        )
    outer = multiplicative("iterate", None, [_part(base, "the base"), _part(count, "the count")])
    return Term(base.type, outer, "iterate", (base, inner, count), name)


def _bound(rule: str, type: Type, body: Callable[[Term], Term]) -> tuple[str, Term, Usage]:
    name = f"x{next(_NUMBERS)}"
    inner = body(variable(name, type))
    usage, unused = closed(inner.usage, name, rule, None, None)
    if unused:
        refuse(unused[0].code, f"{rule}: its argument must be used exactly once on every path; it is not used")
    return name, inner, usage


def compile(
    term: Term, context: Sequence[tuple[str, Type]] | Mapping[str, Type] = (), semiring: str = "natural"
) -> MultilinearMap:
    """The map of a term, linear in each variable of its context; a closed term is a constant.

    Args:
        term: the term.
        context: its variables in order.
        semiring: as for `riftco.cajal.compile`.

    Raises:
        CajalTypeError: a variable of the context is not used, or one that is used is missing.
    """
    pairs = tuple(context.items() if isinstance(context, Mapping) else context)
    for name in term.usage.names:
        if name not in dict(pairs):
            refuse("variable-unknown", f"variable: {name} must be in the context; it is not", variable=name)
    for name, type in pairs:
        if name not in term.usage.names:
            refuse("context-unused", f"context: a variable must be used once; {name} is never used", variable=name)
        _same_type(term, name, type)
    ring = named(semiring)
    if ring.weighted:
        raise CajalLoweringError("functional.compile: there is no choice to weigh; use natural, boolean or float")

    def coefficients() -> tuple[np.ndarray, np.ndarray]:
        table = _table(term, ring)
        axes = [table.axes[name] for name, _ in pairs]
        return np.stack([table.out, *axes], axis=1), table.values

    return MultilinearMap([type.dimension for _, type in pairs], term.type.dimension, coefficients, semiring=semiring)


def _same_type(term: Term, name: str, type: Type) -> None:
    if term.rule == "variable" and term.name == name and term.type != type:
        refuse("variable-type", f"variable: {name} has the type {term.type}; the context gives {type}", variable=name)
    for part in term.parts:
        _same_type(part, name, type)


def _table(term: Term, ring: Semiring) -> Table:
    """The coefficients of a term, by one rule for each constructor."""
    parts = term.parts
    match term.rule:
        case "variable":
            every = np.arange(term.type.dimension)
            return Table(every, {term.name: every}, ring.ones(len(every)))
        case "constant":
            return Table(np.array([term.index]), {}, ring.ones(1))
        case "succ":
            assert isinstance(term.type, Nat)
            return _table(parts[0], ring).block(0, term.type.bound - 1).shifted(1)
        case "if":
            condition = _table(parts[0], ring)
            sides = []
            for row, branch in enumerate(parts[1:]):
                one, other, values = product(condition.block(row, row + 1), _table(branch, ring))
                sides.append(Table(other.out, {**one.axes, **other.axes}, values))
            return stacked(sides)
        case "function":
            assert isinstance(term.type, Arrow)
            body = _table(parts[0], ring)
            return Table(
                body.out * term.type.argument.dimension + body.axes[term.name], body.axes, body.values
            ).without(term.name)
        case "apply":
            matrix, argument = (_table(part, ring) for part in parts)
            row, column = np.divmod(matrix.out, parts[1].type.dimension)
            one, other, values = product(dataclasses.replace(matrix, out=row), argument, (column, argument.out))
            return merged(Table(one.out, {**one.axes, **other.axes}, values))
        case "iterate":
            base, step, count = (_table(part, ring) for part in parts)
            rounds, power = [], base
            for number in range(parts[2].type.dimension):
                one, other, values = product(count.block(number, number + 1), power)
                rounds.append(Table(other.out, {**one.axes, **other.axes}, values))
                one, other, values = product(power, step, (power.out, step.axes[term.name]), drop=term.name)
                power = merged(Table(other.out, {**one.axes, **other.axes}, values))
            return stacked(rounds)
    raise AssertionError(term.rule)
