"""The terms of Cajal as a person writes them: constructors for building programs without text.

Every constructor takes a `span` last, the place in a source, which plays no part in equality. Sugar of the text syntax
(comprehensions, calls, numbers) is gone by the time these exist; patterns of `Case` and `KeysValues` are resolved by
the checker, which knows types.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from riftco.cajal.diagnostics import CajalError, Span
from riftco.cajal.relations import Relation
from riftco.cajal.types import Type


@dataclass(frozen=True)
class Term:
    """A program or a part of one."""

    span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def parts(self) -> tuple["Term", ...]:
        """The terms directly inside it, in the order of the text."""
        return ()


@dataclass(frozen=True)
class Variable(Term):
    """A name that a context, `let` or `case` binds."""

    name: str


@dataclass(frozen=True)
class Unit(Term):
    """`()`, the value of the type 1."""


@dataclass(frozen=True)
class Error(Term):
    """`error`: of any type, swallows any variables, is the zero vector."""


@dataclass(frozen=True)
class Inject(Term):
    """`inj index value`; `inl` is index 0, `inr` is index 1."""

    index: int
    value: Term

    @property
    def parts(self) -> tuple[Term, ...]:
        """The value."""
        return (self.value,)


@dataclass(frozen=True)
class Tuple(Term):
    """`(first, second, …)`: every component uses the same variables; components stay suspended."""

    components: tuple[Term, ...]

    @property
    def parts(self) -> tuple[Term, ...]:
        """The components."""
        return self.components


@dataclass(frozen=True)
class Project(Term):
    """`operand.index`, or `operand[index]`."""

    operand: Term
    index: int

    @property
    def parts(self) -> tuple[Term, ...]:
        """The operand."""
        return (self.operand,)


@dataclass(frozen=True)
class Sequence(Term):
    """`first ; second`, where `first` has the type 1."""

    first: Term
    second: Term

    @property
    def parts(self) -> tuple[Term, ...]:
        """Both terms."""
        return (self.first, self.second)


@dataclass(frozen=True)
class Let(Term):
    """`let name = bound in body`."""

    name: str
    bound: Term
    body: Term
    name_span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def parts(self) -> tuple[Term, ...]:
        """The bound term and the body."""
        return (self.bound, self.body)


@dataclass(frozen=True)
class Arm:
    """One arm of a `case`: `inj index name -> body`, `index -> body` (name None), or `_ -> body` (index None too)."""

    index: int | None
    name: str | None
    body: Term
    span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)
    name_span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Case(Term):
    """`case scrutinee of | pattern -> body …`; an arm with the pattern `_` comes last."""

    scrutinee: Term
    arms: tuple[Arm, ...]

    @property
    def parts(self) -> tuple[Term, ...]:
        """The scrutinee and the bodies of the arms."""
        return (self.scrutinee, *(arm.body for arm in self.arms))


@dataclass(frozen=True)
class Choice(Term):
    """`left <|> right`, or `left <p/q> right` with a weight for the left side."""

    left: Term
    right: Term
    weight: Fraction | None = None

    @property
    def parts(self) -> tuple[Term, ...]:
        """Both sides."""
        return (self.left, self.right)


@dataclass(frozen=True)
class Dictionary(Term):
    """`{key -> value, …}`; entries stay suspended."""

    entries: tuple[tuple[Term, Term], ...]

    @property
    def parts(self) -> tuple[Term, ...]:
        """Keys and values in turn."""
        return tuple(term for entry in self.entries for term in entry)


@dataclass(frozen=True)
class KeysValues(Term):
    """`dict(keys, values)`: a dictionary from two products of one length."""

    keys: Term
    values: Term

    @property
    def parts(self) -> tuple[Term, ...]:
        """Both products."""
        return (self.keys, self.values)


@dataclass(frozen=True)
class Lookup(Term):
    """`dictionary @R(query)`, or `dictionary @ (query)` by identity (relation None)."""

    dictionary: Term
    query: Term
    relation: Relation | None = None

    @property
    def parts(self) -> tuple[Term, ...]:
        """The dictionary and the query."""
        return (self.dictionary, self.query)


@dataclass(frozen=True)
class Ascribe(Term):
    """`(operand as type)`: the type that the operand is to have.

    Attributes:
        reason: what asks for the type, for messages.
        type_span: where the type is written.
    """

    operand: Term
    type: Type
    reason: str = field(default="the annotation", compare=False, repr=False, kw_only=True)
    type_span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def parts(self) -> tuple[Term, ...]:
        """The operand."""
        return (self.operand,)


def letter(index: int, type: Type, *, span: Span | None = None) -> Ascribe:
    """`index:Fin n`, the value of a finite type with this number."""
    return Ascribe(Inject(index, Unit(span=span), span=span), type, span=span, type_span=span)


class Parameter(tuple[str, Type]):
    """A pair (name, type) of a context that remembers where it was written.

    Attributes:
        span: its place, or None.
    """

    span: Span | None

    def __new__(cls, name: str, type: Type, span: Span | None = None) -> "Parameter":
        """The pair."""
        new = super().__new__(cls, (name, type))
        new.span = span
        return new

    def __getnewargs__(self) -> tuple[str, Type, None]:
        return self[0], self[1], None


Context: TypeAlias = SequenceOf[tuple[str, Type]]


@dataclass(frozen=True)
class Definition:
    """A program with a name.

    Attributes:
        name: its name.
        expr: its body; where a result is declared, an `Ascribe` around it says so.
        context: parameters in order, pairs (name, type).
        result: the declared type, or None.
    """

    name: str
    expr: Term
    context: tuple[tuple[str, Type], ...]
    result: Type | None = None
    span: Span | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class Module:
    """What a text declares, in its order.

    Attributes:
        types: aliases by name.
        relations: relations by name.
        defs: definitions by name.
    """

    types: dict[str, Type] = field(default_factory=dict)
    relations: dict[str, Relation] = field(default_factory=dict)
    defs: dict[str, Definition] = field(default_factory=dict)


def names_in(terms: Iterable[Term]) -> set[str]:
    """Every name that occurs in terms, bound or free."""
    found: set[str] = set()
    seen: set[int] = set()
    todo = list(terms)
    while todo:
        term = todo.pop()
        if not isinstance(term, Term):
            raise CajalError(f"cajal: a term of riftco.cajal.terms is required; got {term!r}; parse texts first")
        if id(term) in seen:
            continue
        seen.add(id(term))
        match term:
            case Variable(name) | Let(name):
                found.add(name)
            case Case(_, arms):
                found |= {arm.name for arm in arms if arm.name is not None}
        todo += term.parts
    return found
