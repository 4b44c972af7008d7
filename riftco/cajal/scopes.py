"""What the rules of the checker share: scopes, wanted types, and words for messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from riftco.cajal import terms, types
from riftco.cajal.core import Node
from riftco.cajal.diagnostics import CajalTypeError, Diagnostic, Place, Span, refuse
from riftco.cajal.terms import Term
from riftco.cajal.usage import Part, Usage

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Want:
    """A type that is asked for, by what, and where that stands."""

    type: types.Type
    reason: str
    span: Span | None


@dataclasses.dataclass(frozen=True)
class Binding:
    """What a name in scope has."""

    type: types.Type
    span: Span | None


Scope = Mapping[str, Binding]
Checked = tuple[Node, Usage]


def needs_type(term: Term) -> bool:
    """Whether a term has no type of its own and takes that of its surroundings."""
    match term:
        case terms.Error() | terms.Inject():
            return True
        case terms.Tuple(components):
            return any(needs_type(component) for component in components)
        case terms.Sequence(_, last) | terms.Let(_, _, last):
            return needs_type(last)
        case terms.Case(_, arms):
            return all(needs_type(arm.body) for arm in arms)
        case terms.Choice(left, right):
            return needs_type(left) and needs_type(right)
        case terms.Dictionary(entries):
            keys, values = (all(needs_type(entry[side]) for entry in entries) for side in (0, 1))
            return keys or values
        case terms.KeysValues(keys, values):
            return needs_type(keys) or needs_type(values)
    return False


def at(span: Span | None) -> str:
    """A place in parentheses."""
    return "" if span is None else f" ({span})"


def variable_of(term: Term) -> str | None:
    """The variable that a term is, perhaps behind projections."""
    while isinstance(term, terms.Project):
        term = term.operand
    return term.name if isinstance(term, terms.Variable) else None


def origin(term: Term, scope: Scope) -> tuple[str, list[Place]]:
    """Words for a message, and the place, of what binds the variable that a term is; `{2}` is that place."""
    name = variable_of(term)
    if name is None or scope[name].span is None:
        return "", []
    return f"; {name} is bound{{2}}", [(scope[name].span, f"{name} is bound here")]


def asked(rule: str, term: Term, want: Want | None) -> Want:
    """The type that the surroundings ask for, which this rule needs."""
    if want is None:
        refuse(
            f"{rule}-untyped",
            f"{rule}: its type must be known from around it; nothing around this{{0}} tells it; write `(… as type)`",
            (term.span, "of which type?"),
        )
    return want


def parts_of(parts: Sequence[tuple[Term, Scope, str]], usages: Sequence[Usage]) -> list[Part]:
    """The parts of a term, (term, scope, label), with their usages."""
    return [Part(usage, label, term.span) for (term, _, label), usage in zip(parts, usages, strict=True)]


def each(checks: Iterable[Callable[[], T]]) -> list[T]:
    """Do all checks, and raise what all of them found."""
    done: list[T] = []
    found: list[Diagnostic] = []
    for one in checks:
        try:
            done.append(one())
        except CajalTypeError as error:
            found += error.diagnostics
    if found:
        raise CajalTypeError(found)
    return done
