"""Sugar of the text syntax, and its elaboration into terms: comprehensions, indices, numbers, calls."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from riftco.cajal import terms
from riftco.cajal.diagnostics import Span, refuse
from riftco.cajal.relations import Arithmetic, sort_of, value_of
from riftco.cajal.terms import Term
from riftco.cajal.types import Type

MAX_NODES = 2**20
"""The most nodes that one text may grow to."""


@dataclass(frozen=True)
class Call(Term):
    """`name(arguments)`: a `let` for each argument, then the definition's body."""

    name: str
    arguments: tuple[Term, ...]


@dataclass(frozen=True)
class Comprehension(Term):
    """`[body for index < count]`, a product; with a key `{key -> body for index < count}`, a dictionary."""

    body: Term
    index: str
    count: int
    key: Term | None = None
    index_span: Span | None = dataclasses.field(default=None, compare=False, kw_only=True)


@dataclass(frozen=True)
class IndexLetter(Term):
    """`index:type`."""

    index: str
    type: Type


@dataclass(frozen=True)
class IndexProject(Term):
    """`operand[index]`."""

    operand: Term
    index: Arithmetic


class Elaborator:
    """Turns sugar into terms; holds the definitions so far and the names that are taken.

    Args:
        definitions: what calls may name.
        taken: names that no fresh name may equal.

    `current` is the name and the place of the definition that is being read.
    """

    def __init__(self, definitions: Mapping[str, terms.Definition], taken: Iterable[str]) -> None:
        self.definitions = definitions
        self.taken = set(taken)
        self.nodes = 0
        self.current: tuple[str, Span] | None = None

    def fresh(self, base: str) -> str:
        """A name that occurs nowhere else."""
        number = 1
        while f"{base}_{number}" in self.taken:
            number += 1
        self.taken.add(f"{base}_{number}")
        return f"{base}_{number}"

    def _count(self, span: Span | None) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            refuse(
                "size", f"size: a text must elaborate to at most {MAX_NODES} nodes; it grows past that{{0}}",
                (span, "grows past the limit"),
            )  # fmt: skip

    def expand(self, term: Term, indices: Mapping[str, tuple[int, Span | None]]) -> Term:
        """A term without sugar.

        Args:
            term: a term, perhaps with sugar inside.
            indices: the value of each index in scope, and where it is bound.

        Raises:
            CajalTypeError: an index or definition that is not known, a wrong number of arguments, a wrong sort.
        """
        self._count(term.span)
        again = lambda part: self.expand(part, indices)
        span = term.span
        match term:
            case Comprehension():
                return self._comprehension(term, indices)
            case IndexLetter(index, type):
                if index not in indices:
                    self._unbound(index, span, indices)
                return terms.letter(indices[index][0], type, span=span)
            case IndexProject(operand, index):
                if (sort := sort_of(index, {name: where for name, (_, where) in indices.items()})) != "int":
                    refuse(
                        "index-sort",
                        f"index: what stands in `[…]`{{0}} must be a number; the expression{{1}} is {sort}",
                        (span, "the projection"),
                        (index.span, f"is {sort}"),
                    )
                place = value_of(index, {name: value for name, (value, _) in indices.items()})
                return terms.Project(again(operand), place, span=span)
            case Call():
                return self._call(term, tuple(again(argument) for argument in term.arguments))
        return rebuilt(term, again)

    def _unbound(self, index: str, span: Span | None, indices: Mapping[str, tuple[int, Span | None]]) -> None:
        known = ", ".join(sorted(indices)) or "none"
        refuse(
            "index-unbound",
            f"index: an index must be bound by `for`; {index}{{0}} is not; bound here: {known}",
            (span, "not bound"),
            variable=index,
        )

    def _comprehension(self, term: Comprehension, indices: Mapping[str, tuple[int, Span | None]]) -> Term:
        if term.index in indices:
            refuse(
                "index-shadow",
                f"for: an index must have a name of its own; {term.index}{{0}} is bound already{{1}}; rename one",
                (term.index_span, "bound again"),
                (indices[term.index][1], "bound first"),
                variable=term.index,
            )
        if term.count < 1:
            refuse(
                "for-count", f"for: the bound of {term.index}{{0}} must be at least 1; got {term.count}",
                (term.index_span, "counts to nothing"), variable=term.index,
            )  # fmt: skip
        found = []
        for value in range(term.count):
            inner = {**indices, term.index: (value, term.index_span)}
            key = None if term.key is None else self.expand(term.key, inner)
            found.append((key, self.expand(term.body, inner)))
        if term.key is None:
            return terms.Tuple(tuple(body for _, body in found), span=term.span)
        return terms.Dictionary(tuple((key, body) for key, body in found if key is not None), span=term.span)

    def _call(self, term: Call, arguments: tuple[Term, ...]) -> Term:
        definition = self.definitions.get(term.name)
        if definition is None:
            known = ", ".join(self.definitions) or "none"
            itself = self.current is not None and self.current[0] == term.name
            places = [(self.current[1], "being defined here")] if self.current is not None and itself else []
            refuse(
                "call-unknown",
                f"call: a definition must come before its use, and none may call itself; {term.name}{{0}} "
                f"{'calls itself{1}' if itself else 'is not defined before'}; defined: {known}",
                (term.span, "called here"),
                *places,
                variable=term.name,
            )
        if len(arguments) != len(definition.context):
            refuse(
                "call-arity",
                f"call: {term.name}{{1}} takes {len(definition.context)} arguments; the call{{0}} has {len(arguments)}",
                (term.span, f"{len(arguments)} arguments"),
                (definition.span, f"{len(definition.context)} parameters"),
                variable=term.name,
            )
        new = {name: self.fresh(name) for name, _ in definition.context}
        body = self._renamed(definition.expr, new)
        for parameter, argument in reversed(list(zip(definition.context, arguments, strict=True))):
            name, type = parameter
            place = getattr(parameter, "span", None)
            bound = terms.Ascribe(
                argument, type, span=argument.span, reason=f"the parameter {name} of {term.name}", type_span=place
            )
            body = terms.Let(new[name], bound, body, span=term.span, name_span=place)
        return body

    def _renamed(self, term: Term, new: Mapping[str, str]) -> Term:
        """A copy of a definition's body with its parameters renamed and fresh names for what it binds."""
        self._count(term.span)
        match term:
            case terms.Variable(name):
                return terms.Variable(new.get(name, name), span=term.span)
            case terms.Let(name, bound, body):
                inner = {**new, name: self.fresh(name)}
                return dataclasses.replace(
                    term, name=inner[name], bound=self._renamed(bound, new), body=self._renamed(body, inner)
                )
            case terms.Case(scrutinee, arms):
                return dataclasses.replace(
                    term,
                    scrutinee=self._renamed(scrutinee, new),
                    arms=tuple(self._renamed_arm(arm, new) for arm in arms),
                )
        return rebuilt(term, lambda part: self._renamed(part, new))

    def _renamed_arm(self, arm: terms.Arm, new: Mapping[str, str]) -> terms.Arm:
        inner = new if arm.name is None else {**new, arm.name: self.fresh(arm.name)}
        name = None if arm.name is None else inner[arm.name]
        return dataclasses.replace(arm, name=name, body=self._renamed(arm.body, inner))


def rebuilt(term: Term, each) -> Term:
    """A term with `each` applied to the terms directly inside it."""
    match term:
        case terms.Inject(_, value):
            return dataclasses.replace(term, value=each(value))
        case terms.Tuple(components):
            return dataclasses.replace(term, components=tuple(each(part) for part in components))
        case terms.Project(operand) | terms.Ascribe(operand):
            return dataclasses.replace(term, operand=each(operand))
        case terms.Sequence(first, second):
            return dataclasses.replace(term, first=each(first), second=each(second))
        case terms.Let(_, bound, body):
            return dataclasses.replace(term, bound=each(bound), body=each(body))
        case terms.Case(scrutinee, arms):
            new = tuple(dataclasses.replace(arm, body=each(arm.body)) for arm in arms)
            return dataclasses.replace(term, scrutinee=each(scrutinee), arms=new)
        case terms.Choice(left, right):
            return dataclasses.replace(term, left=each(left), right=each(right))
        case terms.Dictionary(entries):
            return dataclasses.replace(term, entries=tuple((each(key), each(value)) for key, value in entries))
        case terms.KeysValues(keys, values):
            return dataclasses.replace(term, keys=each(keys), values=each(values))
        case terms.Lookup(dictionary, query):
            return dataclasses.replace(term, dictionary=each(dictionary), query=each(query))
    return term
