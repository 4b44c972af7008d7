"""The checker: terms to typed terms, by one rule for each constructor, or diagnostics.

Typing is bidirectional: `want` is the type that the surroundings ask for and the reason they give. Usage is computed
upwards: the names that a term consumes, each with the place of one use, and whether it swallows any other name.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from riftco.cajal import core, terms, types
from riftco.cajal.core import Node, make
from riftco.cajal.diagnostics import CajalTypeError, Diagnostic, Place, Span, refuse, shallow
from riftco.cajal.lexer import is_identifier
from riftco.cajal.patterns import covered, written
from riftco.cajal.terms import Context, Term
from riftco.cajal.usage import Part, Usage, additive, closed, multiplicative

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


@shallow
def check(expr: Term, context: Context | Mapping[str, types.Type], result: types.Type | None = None) -> Node:
    """Check a term against the rules of types and of linear usage.

    Args:
        expr: the term; a `Definition.expr` carries its declared result.
        context: its free variables in order, pairs (name, type).
        result: the type it is to have, or None to infer it.

    Returns:
        The typed term: types and free variables at every node, `_` and number patterns written out.

    Raises:
        CajalTypeError: a rule is broken; `.diagnostics` names the rule, the places and the variable.
    """
    pairs = list(context.items()) if isinstance(context, Mapping) else list(context)
    scope: dict[str, Binding] = {}
    for pair in pairs:
        name, span = pair[0], getattr(pair, "span", None)
        if not is_identifier(name):
            refuse("context-name", f"context: a variable must be an identifier; got {name!r}{{0}}", (span, "the name"))
        if name in scope:
            refuse(
                "context-twice",
                f"context: every variable must have a name of its own; {name}{{0}} is there already{{1}}",
                (span, "again"),
                (scope[name].span, "first"),
                variable=name,
            )
        scope[name] = Binding(pair[1], span)
    checker = _Checker(terms.names_in([expr]) | set(scope))
    want = None if result is None else Want(result, "the asked-for result", None)
    node, usage = checker.check(expr, scope, want)
    found: list[Diagnostic] = []
    for name, binding in scope.items():
        found += closed(usage, name, "context", binding.span, expr.span)[1]
    if found:
        raise CajalTypeError(found)
    return node


_RECENT: collections.OrderedDict[tuple[int, Context], tuple[Term, Node]] = collections.OrderedDict()


def checked(expr: Term, context: tuple[tuple[str, types.Type], ...]) -> Node:
    """As `check`, remembering the last 256 answers by the identity of the term."""
    key = (id(expr), context)
    found = _RECENT.get(key)
    if found is None:
        found = _RECENT[key] = (expr, check(expr, context))  # holding the term keeps its id its own
        if len(_RECENT) > 256:
            _RECENT.popitem(last=False)
    return found[1]


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


class _Checker:
    """One check: the names that occur in it, so that names made for patterns are new."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = frozenset(taken)
        # Terms built in Python may share parts; in one scope, where one type is wanted, a part has one answer. Terms
        # and scopes are kept beside the answers, so that their ids stay their own.
        self.done: dict[tuple[int, int, types.Type | None], tuple[Term, Scope, Checked]] = {}

    def check(self, term: Term, scope: Scope, want: Want | None = None) -> Checked:
        """Apply the rule of a term's constructor, and compare with what is wanted."""
        key = (id(term), id(scope), None if want is None else want.type)
        if key not in self.done:
            self.done[key] = term, scope, self._check(term, scope, want)
        return self.done[key][2]

    def _check(self, term: Term, scope: Scope, want: Want | None) -> Checked:
        node, usage = self.rule(term, scope, want)
        if want is not None and node.type is not want.type:
            rule = type(term).__name__.lower()
            what = term.name if isinstance(term, terms.Variable) else "this"
            bound, places = _origin(term, scope)
            refuse(
                f"{rule}-type",
                f"{rule}: the type must be {want.type}, as {want.reason}{{1}} asks; {what}{{0}} has the type "
                f"{node.type}{bound}",
                (term.span, f"has the type {node.type}"),
                (want.span, f"{want.reason} asks for {want.type}"),
                *places,
                variable=_variable_of(term),
            )
        return node, usage

    def rule(self, term: Term, scope: Scope, want: Want | None) -> Checked:
        """The typing rules, in the order of the constructors."""
        span = term.span
        match term:
            case terms.Variable(name):
                return self._variable(name, span, scope)
            case terms.Unit():
                return make(core.Unit, types.Unit(), span=span), Usage({})
            case terms.Error():
                return make(core.Error, _asked("error", term, want).type, span=span), Usage({}, absorbs=True)
            case terms.Inject():
                return self._inject(term, scope, want)
            case terms.Tuple():
                return self._tuple(term, scope, want)
            case terms.Project():
                return self._project(term, scope)
            case terms.Sequence():
                return self._sequence(term, scope, want)
            case terms.Let():
                return self._let(term, scope, want)
            case terms.Case():
                return self._case(term, scope, want)
            case terms.Choice(left, right, weight):
                sides = [(left, scope, "the left side"), (right, scope, "the right side")]
                (one, other), usages = self._alike(sides, want)
                usage = additive("choice", _parts(sides, usages))
                return make(core.Choice, one.type, one, other, weight, span=span), usage
            case terms.Dictionary():
                return self._dictionary(term, scope, want)
            case terms.KeysValues():
                return self._keys_values(term, scope, want)
            case terms.Lookup():
                return self._lookup(term, scope, want)
            case terms.Ascribe(operand, type, reason=reason, type_span=where):
                return self.check(operand, scope, Want(type, reason, where))
        raise AssertionError(term)

    def _variable(self, name: str, span: Span | None, scope: Scope) -> Checked:
        if name not in scope:
            near = difflib.get_close_matches(name, scope, n=1)
            known = ", ".join(f"{other}{_at(binding.span)}" for other, binding in scope.items()) or "none"
            places: list[Place] = [(span, "not in scope")]
            if near:
                places.append((scope[near[0]].span, "bound here"))
            refuse(
                "variable-unknown",
                f"variable: a variable must be bound around its use; {name}{{0}} is not; in scope: {known}",
                *places,
                variable=name,
            )
        return make(core.Variable, scope[name].type, name, span=span), Usage({name: span})

    def _inject(self, term: terms.Inject, scope: Scope, want: Want | None) -> Checked:
        wanted = _asked("inject", term, want)
        if not isinstance(wanted.type, types.Sum):
            refuse(
                "inject-type",
                f"inject: an injection{{0}} makes a sum; {wanted.reason}{{1}} asks for {wanted.type}, which is none",
                (term.span, "makes a sum"),
                (wanted.span, f"asks for {wanted.type}"),
            )
        if not 0 <= term.index < len(wanted.type.parts):
            refuse(
                "inject-index",
                f"inject: the summand{{0}} must be below {len(wanted.type.parts)}, those of {wanted.type} for which "
                f"{wanted.reason}{{1}} asks; got {term.index}",
                (term.span, f"summand {term.index}"),
                (wanted.span, f"asks for {wanted.type}"),
            )
        summand = Want(wanted.type.parts[term.index], f"summand {term.index} of {wanted.reason}", wanted.span)
        value, usage = self.check(term.value, scope, summand)
        return make(core.Inject, wanted.type, term.index, value, span=term.span), usage

    def _tuple(self, term: terms.Tuple, scope: Scope, want: Want | None) -> Checked:
        count = len(term.components)
        wants: list[Want | None] = [None] * count
        if want is not None:
            if not isinstance(want.type, types.Product) or len(want.type.parts) != count:
                refuse(
                    "tuple-type",
                    f"tuple: a tuple{{0}} of {count} makes a product of {count}; {want.reason}{{1}} asks for "
                    f"{want.type}",
                    (term.span, f"{count} components"),
                    (want.span, f"asks for {want.type}"),
                )
            wants = [Want(part, f"component {i} of {want.reason}", want.span) for i, part in enumerate(want.type.parts)]
        elif count == 0:
            refuse("tuple-empty", "tuple: a tuple must have a component; this{0} has none", (term.span, "empty"))
        checked = _each(
            lambda pair=pair: self.check(pair[0], scope, pair[1]) for pair in zip(term.components, wants, strict=True)
        )
        labels = [(component, scope, f"component {i}") for i, component in enumerate(term.components)]
        usage = additive("tuple", _parts(labels, [usage for _, usage in checked]))
        components = tuple(node for node, _ in checked)
        product = types.Product(node.type for node in components)
        return make(core.Tuple, product, components, span=term.span), usage

    def _project(self, term: terms.Project, scope: Scope) -> Checked:
        operand, usage = self.check(term.operand, scope)
        if not isinstance(operand.type, types.Product) or not 0 <= term.index < len(operand.type.parts):
            limit = f"has {len(operand.type.parts)}" if isinstance(operand.type, types.Product) else "is no product"
            bound, places = _origin(term.operand, scope)
            refuse(
                "project-index",
                f"project: component {term.index}{{0}} must be one of a product's; the operand{{1}} has the type "
                f"{operand.type}, which {limit}{bound}",
                (term.span, f"component {term.index}"),
                (term.operand.span, f"has the type {operand.type}"),
                *places,
                variable=_variable_of(term.operand),
            )
        return make(core.Project, operand.type.parts[term.index], operand, term.index, span=term.span), usage

    def _sequence(self, term: terms.Sequence, scope: Scope, want: Want | None) -> Checked:
        unit = Want(types.Unit(), "the left side of `;`", term.span)
        (first, left), (second, right) = _each(
            [lambda: self.check(term.first, scope, unit), lambda: self.check(term.second, scope, want)]
        )
        parts = [Part(left, "the left side", term.first.span), Part(right, "the right side", term.second.span)]
        usage = multiplicative("sequence", term.span, parts)
        return make(core.Sequence, second.type, first, second, span=term.span), usage

    def _let(self, term: terms.Let, scope: Scope, want: Want | None) -> Checked:
        bound, outer = self.check(term.bound, scope)
        inner = self._bound("let", term.name, Binding(bound.type, term.name_span or term.span), scope)
        body, usage = self.check(term.body, inner, want)
        usage, unused = closed(usage, term.name, "let", term.name_span or term.span, term.body.span)
        if unused:
            raise CajalTypeError(unused)
        parts = [Part(outer, "the bound term", term.bound.span), Part(usage, "the body", term.body.span)]
        usage = multiplicative("let", term.span, parts)
        return make(core.Let, body.type, term.name, bound, body, span=term.span), usage

    def _bound(self, rule: str, name: str, binding: Binding, scope: Scope) -> Scope:
        """The scope with one more name, which must be new."""
        if not is_identifier(name):
            refuse(f"{rule}-name", f"{rule}: a variable must be an identifier; got {name!r}{{0}}", (binding.span, "it"))
        if name in scope:
            refuse(
                f"{rule}-shadow",
                f"{rule}: a variable must have a name of its own; {name}{{0}} is bound already{{1}}; rename one",
                (binding.span, "bound again"),
                (scope[name].span, "bound first"),
                variable=name,
            )
        return {**scope, name: binding}

    def _case(self, term: terms.Case, scope: Scope, want: Want | None) -> Checked:
        scrutinee, outer = self.check(term.scrutinee, scope)
        if not isinstance(scrutinee.type, types.Sum):
            bound, places = _origin(term.scrutinee, scope)
            refuse(
                "case-type",
                f"case: the scrutinee{{1}} of a case{{0}} must be a sum; it has the type {scrutinee.type}{bound}",
                (term.span, "the case"),
                (term.scrutinee.span, f"has the type {scrutinee.type}"),
                *places,
                variable=_variable_of(term.scrutinee),
            )
        arms = covered(term, scrutinee.type)
        fresh = self._fresh(scope)
        names = tuple(fresh if arm.name is None else arm.name for arm in arms)
        # Equal arms of equal types, as `_` makes them, are checked once.
        distinct = {(id(arm), part): (arm, part) for arm, part in zip(arms, scrutinee.type.parts, strict=True)}
        branches = []
        for arm, part in distinct.values():
            name, place = (fresh, arm.span) if arm.name is None else (arm.name, arm.name_span or arm.span)
            inner = self._bound("case", name, Binding(part, place), scope)
            body = arm.body
            if arm.name is None:
                body = terms.Sequence(terms.Variable(name, span=arm.span), body, span=body.span)
            branches.append((body, inner, f"the arm {written(arm)}"))
        checked, usages = self._alike(branches, want)
        unused: list[Diagnostic] = []
        for number, (arm, _) in enumerate(distinct.values()):
            name = fresh if arm.name is None else arm.name
            usages[number], found = closed(usages[number], name, "case", arm.name_span or arm.span, arm.body.span)
            unused += found
        if unused:
            raise CajalTypeError(unused)
        inside = additive("case", _parts(branches, usages))
        parts = [Part(outer, "the scrutinee", term.scrutinee.span), Part(inside, "the arms", None)]
        usage = multiplicative("case", term.span, parts)
        node_of = dict(zip(distinct, checked, strict=True))
        nodes = tuple(node_of[id(arm), part] for arm, part in zip(arms, scrutinee.type.parts, strict=True))
        return make(core.Case, nodes[0].type, scrutinee, names, nodes, span=term.span), usage

    def _fresh(self, scope: Scope) -> str:
        """The name of a payload that a pattern leaves without one; equal in equal scopes, so that nodes are shared."""
        numbered = itertools.chain(["u"], (f"u_{number}" for number in itertools.count(1)))
        return next(name for name in numbered if name not in scope and name not in self.taken)

    def _dictionary(self, term: terms.Dictionary, scope: Scope, want: Want | None) -> Checked:
        if not term.entries:
            refuse("dictionary-empty", "dictionary: it must have an entry; this{0} has none", (term.span, "empty"))
        wanted = _dictionary_want(term, want)
        sides = [
            [(entry[side], scope, f"{what} {i}") for i, entry in enumerate(term.entries)]
            for side, what in enumerate(("key", "value"))
        ]
        (keys, of_keys), (values, of_values) = _each(
            [lambda: self._alike(sides[0], wanted[0]), lambda: self._alike(sides[1], wanted[1])]
        )
        parts = [
            Part(additive("dictionary", _parts(sides[0], of_keys)), "a key", term.span),
            Part(additive("dictionary", _parts(sides[1], of_values)), "a value", term.span),
        ]
        usage = multiplicative("dictionary", term.span, parts)
        made = types.Dictionary(keys[0].type, values[0].type)
        return make(core.Dictionary, made, tuple(zip(keys, values, strict=True)), span=term.span), usage

    def _keys_values(self, term: terms.KeysValues, scope: Scope, want: Want | None) -> Checked:
        """`dict(keys, values)` is the dictionary of their components."""
        checked: list[Checked] = []
        for product, wanted in zip((term.keys, term.values), _dictionary_want(term, want), strict=True):
            if wanted is not None and isinstance(product, terms.Tuple):
                power = types.power(wanted.type, max(1, len(product.components)))
                wanted = dataclasses.replace(wanted, type=power)
            else:
                wanted = None
            node, usage = self.check(product, scope, wanted)
            if not isinstance(node.type, types.Product) or any(
                part is not node.type.parts[0] for part in node.type.parts
            ):
                refuse(
                    "dict-type",
                    f"dict: keys and values{{0}} must be products of equal types; this{{1}} has the type {node.type}",
                    (term.span, "the dictionary"),
                    (product.span, f"has the type {node.type}"),
                )
            checked.append((node, usage))
        (keys, of_keys), (values, of_values) = checked
        assert isinstance(keys.type, types.Product) and isinstance(values.type, types.Product)
        if len(keys.type.parts) != len(values.type.parts):
            refuse(
                "dict-length",
                f"dict: there must be as many keys{{0}} as values{{1}}; got {len(keys.type.parts)} and "
                f"{len(values.type.parts)}",
                (term.keys.span, f"{len(keys.type.parts)} keys"),
                (term.values.span, f"{len(values.type.parts)} values"),
            )
        parts = [Part(of_keys, "the keys", term.keys.span), Part(of_values, "the values", term.values.span)]
        usage = multiplicative("dict", term.span, parts)
        made = types.Dictionary(keys.type.parts[0], values.type.parts[0])
        entries = tuple(zip(_components(keys), _components(values), strict=True))
        return make(core.Dictionary, made, entries, span=term.span), usage

    def _lookup(self, term: terms.Lookup, scope: Scope, want: Want | None) -> Checked:
        related = term.relation
        asked = None
        if needs_type(term.dictionary) and related is not None and want is not None:
            asked = Want(types.Dictionary(related.key, want.type), f"relation {related.name}", related.span)
        dictionary, of_dictionary = self.check(term.dictionary, scope, asked)
        bound, places = _origin(term.dictionary, scope)
        if not isinstance(dictionary.type, types.Dictionary):
            refuse(
                "lookup-type",
                f"lookup: what stands before `@`{{0}} must be a dictionary; it{{1}} has the type "
                f"{dictionary.type}{bound}",
                (term.span, "the lookup"),
                (term.dictionary.span, f"has the type {dictionary.type}"),
                *places,
                variable=_variable_of(term.dictionary),
            )
        key = dictionary.type.key
        if not key.is_enum:
            refuse(
                "lookup-finite",
                f"lookup: keys{{1}} of a lookup{{0}} must have a finite type, a sum of 1; they have the type "
                f"{key}{bound}",
                (term.span, "the lookup"),
                (term.dictionary.span, f"keys have the type {key}"),
                *places,
                variable=_variable_of(term.dictionary),
            )
        if related is not None and related.key is not key:
            refuse(
                "lookup-key",
                f"lookup: keys{{0}} must have the type {related.key} of the keys of {related.name}{{1}}; they have the "
                f"type {key}",
                (term.dictionary.span, f"keys have the type {key}"),
                (related.span, f"relates keys of {related.key}"),
                variable=related.name,
            )
        if related is None:
            asked = Want(key, "the keys of the dictionary", term.dictionary.span)
        else:
            asked = Want(related.query, f"relation {related.name}", related.span)
        query, of_query = self.check(term.query, scope, asked)
        parts = [
            Part(of_dictionary, "the dictionary", term.dictionary.span),
            Part(of_query, "the query", term.query.span),
        ]
        usage = multiplicative("lookup", term.span, parts)
        return make(core.Lookup, dictionary.type.value, dictionary, query, related, span=term.span), usage

    def _alike(self, parts: Sequence[tuple[Term, Scope, str]], want: Want | None) -> tuple[list[Node], list[Usage]]:
        """Check parts that must have one type: the wanted one, or that of the first part that has one of its own."""
        first = 0
        done: dict[int, Checked] = {}
        if want is None:
            first = next((i for i, (term, _, _) in enumerate(parts) if not needs_type(term)), 0)
            term, scope, label = parts[first]
            done[first] = self.check(term, scope)
            want = Want(done[first][0].type, label, term.span)
        rest = [i for i in range(len(parts)) if i not in done]
        found = _each(lambda part=parts[i]: self.check(part[0], part[1], want) for i in rest)
        done |= dict(zip(rest, found, strict=True))
        return [done[i][0] for i in range(len(parts))], [done[i][1] for i in range(len(parts))]


def _at(span: Span | None) -> str:
    return "" if span is None else f" ({span})"


def _variable_of(term: Term) -> str | None:
    """The variable that a term is, perhaps behind projections."""
    while isinstance(term, terms.Project):
        term = term.operand
    return term.name if isinstance(term, terms.Variable) else None


def _origin(term: Term, scope: Scope) -> tuple[str, list[Place]]:
    """Words for a message, and the place, of what binds the variable that a term is; `{2}` is that place."""
    name = _variable_of(term)
    if name is None or scope[name].span is None:
        return "", []
    return f"; {name} is bound{{2}}", [(scope[name].span, f"{name} is bound here")]


def _asked(rule: str, term: Term, want: Want | None) -> Want:
    """The type that the surroundings ask for, which this rule needs."""
    if want is None:
        refuse(
            f"{rule}-untyped",
            f"{rule}: its type must be known from around it; nothing around this{{0}} tells it; write `(… as type)`",
            (term.span, "of which type?"),
        )
    return want


def _dictionary_want(term: Term, want: Want | None) -> tuple[Want | None, Want | None]:
    """What is asked of the keys and of the values of a dictionary."""
    if want is None:
        return None, None
    if not isinstance(want.type, types.Dictionary):
        refuse(
            "dictionary-type",
            f"dictionary: a dictionary{{0}} has a type `key => value`; {want.reason}{{1}} asks for {want.type}",
            (term.span, "a dictionary"),
            (want.span, f"asks for {want.type}"),
        )
    key, value = want.type.key, want.type.value
    return Want(key, f"a key of {want.reason}", want.span), Want(value, f"a value of {want.reason}", want.span)


def _parts(parts: Sequence[tuple[Term, Scope, str]], usages: Sequence[Usage]) -> list[Part]:
    return [Part(usage, label, term.span) for (term, _, label), usage in zip(parts, usages, strict=True)]


def _components(node: Node) -> tuple[Node, ...]:
    """The components of a product; those of a tuple are there already."""
    if isinstance(node, core.Tuple):
        return node.components
    assert isinstance(node.type, types.Product)
    return tuple(make(core.Project, part, node, i, span=node.span) for i, part in enumerate(node.type.parts))


def _each(checks: Iterable[Callable[[], T]]) -> list[T]:
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
