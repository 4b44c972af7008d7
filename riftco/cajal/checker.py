"""The checker: terms to typed terms, by one rule for each constructor, or diagnostics.

Typing is bidirectional: `want` is the type that the surroundings ask for and the reason they give. Usage is computed
upwards: the names that a term consumes, each with the place of one use, and whether it swallows any other name.
"""

from __future__ import annotations

import collections
import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence

from riftco.cajal import core, dictionaries, terms, types
from riftco.cajal.core import Node, make
from riftco.cajal.diagnostics import CajalTypeError, Diagnostic, Place, Span, refuse, shallow
from riftco.cajal.lexer import is_identifier
from riftco.cajal.patterns import covered, written
from riftco.cajal.scopes import (
    Binding,
    Checked,
    Scope,
    Want,
    asked,
    at,
    each,
    needs_type,
    origin,
    parts_of,
    variable_of,
)
from riftco.cajal.terms import Context, Term
from riftco.cajal.usage import Part, Usage, additive, closed, multiplicative


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
        if not isinstance(pair[1], types.Type):
            refuse(
                "context-type",
                f"context: a variable must have a type of cajal.types; {name}{{0}} has {pair[1]!r}; use parse_type",
                (span, "here"),
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
            bound, places = origin(term, scope)
            refuse(
                f"{rule}-type",
                f"{rule}: the type must be {want.type}, as {want.reason}{{1}} asks; {what}{{0}} has the type "
                f"{node.type}{bound}",
                (term.span, f"has the type {node.type}"),
                (want.span, f"{want.reason} asks for {want.type}"),
                *places,
                variable=variable_of(term),
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
                return make(core.Error, asked("error", term, want).type, span=span), Usage({}, absorbs=True)
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
                (one, other), usages = self.alike(sides, want)
                usage = additive("choice", parts_of(sides, usages))
                return make(core.Choice, one.type, one, other, weight, span=span), usage
            case terms.Dictionary():
                return dictionaries.literal(self, term, scope, want)
            case terms.KeysValues():
                return dictionaries.keys_values(self, term, scope, want)
            case terms.Lookup():
                return dictionaries.lookup(self, term, scope, want)
            case terms.Ascribe(operand, type, reason=reason, type_span=where):
                return self.check(operand, scope, Want(type, reason, where))
        raise AssertionError(term)

    def _variable(self, name: str, span: Span | None, scope: Scope) -> Checked:
        if name not in scope:
            near = difflib.get_close_matches(name, scope, n=1)
            known = ", ".join(f"{other}{at(binding.span)}" for other, binding in scope.items()) or "none"
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
        wanted = asked("inject", term, want)
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
        checked = each(
            lambda pair=pair: self.check(pair[0], scope, pair[1]) for pair in zip(term.components, wants, strict=True)
        )
        labels = [(component, scope, f"component {i}") for i, component in enumerate(term.components)]
        usage = additive("tuple", parts_of(labels, [usage for _, usage in checked]))
        components = tuple(node for node, _ in checked)
        product = types.Product(node.type for node in components)
        return make(core.Tuple, product, components, span=term.span), usage

    def _project(self, term: terms.Project, scope: Scope) -> Checked:
        operand, usage = self.check(term.operand, scope)
        if not isinstance(operand.type, types.Product) or not 0 <= term.index < len(operand.type.parts):
            limit = f"has {len(operand.type.parts)}" if isinstance(operand.type, types.Product) else "is no product"
            bound, places = origin(term.operand, scope)
            refuse(
                "project-index",
                f"project: component {term.index}{{0}} must be one of a product's; the operand{{1}} has the type "
                f"{operand.type}, which {limit}{bound}",
                (term.span, f"component {term.index}"),
                (term.operand.span, f"has the type {operand.type}"),
                *places,
                variable=variable_of(term.operand),
            )
        return make(core.Project, operand.type.parts[term.index], operand, term.index, span=term.span), usage

    def _sequence(self, term: terms.Sequence, scope: Scope, want: Want | None) -> Checked:
        unit = Want(types.Unit(), "the left side of `;`", term.span)
        (first, left), (second, right) = each(
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
            bound, places = origin(term.scrutinee, scope)
            refuse(
                "case-type",
                f"case: the scrutinee{{1}} of a case{{0}} must be a sum; it has the type {scrutinee.type}{bound}",
                (term.span, "the case"),
                (term.scrutinee.span, f"has the type {scrutinee.type}"),
                *places,
                variable=variable_of(term.scrutinee),
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
        checked, usages = self.alike(branches, want)
        unused: list[Diagnostic] = []
        for number, (arm, _) in enumerate(distinct.values()):
            name = fresh if arm.name is None else arm.name
            usages[number], found = closed(usages[number], name, "case", arm.name_span or arm.span, arm.body.span)
            unused += found
        if unused:
            raise CajalTypeError(unused)
        inside = additive("case", parts_of(branches, usages))
        parts = [Part(outer, "the scrutinee", term.scrutinee.span), Part(inside, "the arms", None)]
        usage = multiplicative("case", term.span, parts)
        node_of = dict(zip(distinct, checked, strict=True))
        nodes = tuple(node_of[id(arm), part] for arm, part in zip(arms, scrutinee.type.parts, strict=True))
        return make(core.Case, nodes[0].type, scrutinee, names, nodes, span=term.span), usage

    def _fresh(self, scope: Scope) -> str:
        """The name of a payload that a pattern leaves without one; equal in equal scopes, so that nodes are shared."""
        numbered = itertools.chain(["u"], (f"u_{number}" for number in itertools.count(1)))
        return next(name for name in numbered if name not in scope and name not in self.taken)

    def alike(self, parts: Sequence[tuple[Term, Scope, str]], want: Want | None) -> tuple[list[Node], list[Usage]]:
        """Check parts that must have one type: the wanted one, or that of the first part that has one of its own."""
        first = 0
        done: dict[int, Checked] = {}
        if want is None:
            first = next((i for i, (term, _, _) in enumerate(parts) if not needs_type(term)), 0)
            term, scope, label = parts[first]
            done[first] = self.check(term, scope)
            want = Want(done[first][0].type, label, term.span)
        rest = [i for i in range(len(parts)) if i not in done]
        found = each(lambda part=parts[i]: self.check(part[0], part[1], want) for i in rest)
        done |= dict(zip(rest, found, strict=True))
        return [done[i][0] for i in range(len(parts))], [done[i][1] for i in range(len(parts))]
