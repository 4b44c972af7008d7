"""The typed core: what the checker returns and every later pass reads. Twelve constructors, hash-consed.

Equal nodes are one object, so a program is a DAG, `is` compares programs, and passes may cache by node. Nodes are made
by `make` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar
from weakref import WeakValueDictionary

from riftco.cajal import types
from riftco.cajal.diagnostics import Span
from riftco.cajal.relations import Relation

N = TypeVar("N", bound="Node")
_TABLE: WeakValueDictionary[tuple[object, ...], Node] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Node:
    """A typed term.

    Attributes:
        type: its type.
        free: the type of each free variable, by name in alphabetical order.
        chooses: whether `<|>` occurs in it.
        span: where one of its occurrences was written, or None.
    """

    type: types.Type
    free: dict[str, types.Type] = field(init=False, repr=False)
    chooses: bool = field(init=False, repr=False)
    span: Span | None = field(init=False, repr=False)

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """The nodes directly inside it, each with the name it binds there."""
        return ()

    def __copy__(self: N) -> N:
        return self

    def __deepcopy__(self: N, memo: object) -> N:
        return self


@dataclass(frozen=True, eq=False)
class Variable(Node):
    """A name."""

    name: str


@dataclass(frozen=True, eq=False)
class Unit(Node):
    """The value of the type 1."""


@dataclass(frozen=True, eq=False)
class Error(Node):
    """No value."""


@dataclass(frozen=True, eq=False)
class Inject(Node):
    """A value of one summand as a value of the sum."""

    index: int
    value: Node

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """The value."""
        return ((self.value, None),)


@dataclass(frozen=True, eq=False)
class Tuple(Node):
    """Components side by side, each suspended."""

    components: tuple[Node, ...]

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """The components."""
        return tuple((component, None) for component in self.components)


@dataclass(frozen=True, eq=False)
class Project(Node):
    """A component."""

    operand: Node
    index: int

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """The operand."""
        return ((self.operand, None),)


@dataclass(frozen=True, eq=False)
class Sequence(Node):
    """A term of type 1, then another."""

    first: Node
    second: Node

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """Both."""
        return ((self.first, None), (self.second, None))


@dataclass(frozen=True, eq=False)
class Let(Node):
    """A value with a name."""

    name: str
    bound: Node
    body: Node

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """The bound term and the body."""
        return ((self.bound, None), (self.body, self.name))


@dataclass(frozen=True, eq=False)
class Case(Node):
    """One branch for each summand, each binding the payload."""

    scrutinee: Node
    names: tuple[str, ...]
    branches: tuple[Node, ...]

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """The scrutinee and the branches."""
        return ((self.scrutinee, None), *zip(self.branches, self.names, strict=True))


@dataclass(frozen=True, eq=False)
class Choice(Node):
    """Either side, with a weight for the left one or without."""

    left: Node
    right: Node
    weight: Fraction | None

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """Both sides."""
        return ((self.left, None), (self.right, None))


@dataclass(frozen=True, eq=False)
class Dictionary(Node):
    """Entries, each suspended."""

    entries: tuple[tuple[Node, Node], ...]

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """Keys and values in turn."""
        return tuple((node, None) for entry in self.entries for node in entry)


@dataclass(frozen=True, eq=False)
class Lookup(Node):
    """The values whose keys are related to the query; the relation None is identity."""

    dictionary: Node
    query: Node
    relation: Relation | None

    @property
    def scopes(self) -> tuple[tuple[Node, str | None], ...]:
        """The dictionary and the query."""
        return ((self.dictionary, None), (self.query, None))


def make(kind: type[N], type: types.Type, *fields: object, span: Span | None = None) -> N:
    """The one node of a kind with a type and fields; the types are the caller's to check.

    Args:
        kind: a class of this module.
        type: the type of the node.
        *fields: its own fields in order.
        span: its place, kept if the node is new.
    """
    key = (kind, type, *fields)
    found = _TABLE.get(key)
    if found is None:
        new = kind(type, *fields)
        free: dict[str, types.Type] = {new.name: type} if isinstance(new, Variable) else {}
        for node, bound in new.scopes:
            free |= {name: of for name, of in node.free.items() if name != bound}
        object.__setattr__(new, "free", dict(sorted(free.items())))
        object.__setattr__(new, "chooses", kind is Choice or any(node.chooses for node, _ in new.scopes))
        object.__setattr__(new, "span", span)
        found = _TABLE.setdefault(key, new)
    return found  # type: ignore[return-value]


def nodes(root: Node) -> Iterator[Node]:
    """Every node of a DAG once, what is inside before what is outside."""
    done: set[Node] = set()
    todo: list[tuple[Node, bool]] = [(root, False)]
    while todo:
        node, ready = todo.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
        else:
            todo.append((node, True))
            todo += [(inner, False) for inner, _ in reversed(node.scopes)]
