"""The two interpreters: deterministic, and of all results. Both are strict but for tuples and entries, which wait.

The results of a program are counted by derivation: a choice gives the results of both sides, a lookup one for each key
that matches and each way to get there. So the encoded results add up to the program's map at the encoded environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from riftco.cajal import core, values
from riftco.cajal.checker import checked
from riftco.cajal.core import Node
from riftco.cajal.diagnostics import CajalEvaluationError, shallow
from riftco.cajal.terms import Term
from riftco.cajal.values import Value

Environment = Mapping[str, Value]


@shallow
def evaluate(expr: Term | Node, env: Environment) -> Value:
    """The single result of a program; components of tuples and dictionaries wait until they are asked for.

    Args:
        expr: a term, checked with the types of the environment's values, or a typed term.
        env: a value for each variable.

    Raises:
        CajalEvaluationError: the program holds `<|>`, comes to `error`, or a lookup has no match or several.
        CajalTypeError: a term does not check.
    """
    node = _typed(expr, env)
    if node.chooses:
        at = next(inner.span for inner in core.nodes(node) if isinstance(inner, core.Choice))
        where = f" ({at})" if at else ""
        raise CajalEvaluationError(f"cajal.evaluate: the program must not choose; `<|>`{where} does; use evaluate_all")
    return _one(node, env)


@shallow
def evaluate_all(expr: Term | Node, env: Environment) -> list[Value]:
    """Every result of a program, errors included, one for each derivation.

    Args:
        expr: a term, checked with the types of the environment's values, or a typed term.
        env: a value for each variable.

    Raises:
        CajalEvaluationError: the environment does not fit.
        CajalTypeError: a term does not check.
    """
    return list(_all(_typed(expr, env), env))


def _typed(expr: Term | Node, env: Environment) -> Node:
    for name, value in env.items():
        if not isinstance(value, Value):
            raise CajalEvaluationError(
                f"cajal.evaluate: the environment must hold values; {name} is {value!r}; use decode or evaluate"
            )
    node = expr if isinstance(expr, Node) else checked(expr, tuple((name, value.type) for name, value in env.items()))
    for name, type in node.free.items():
        if name not in env or env[name].type is not type:
            found = f"of type {env[name].type}" if name in env else "missing"
            raise CajalEvaluationError(f"cajal.evaluate: {name} must be a value of type {type}; it is {found}")
    return node


class _Thunk:
    """A component or entry with the environment it was met in; computed at most once each way."""

    __slots__ = ("_force", "_results", "env", "node")

    def __init__(self, node: Node, env: Environment) -> None:
        self.node, self.env = node, env
        self._results: list[Value] | None = None
        self._force: Value | None = None

    @property
    def type(self):
        """The type of every result."""
        return self.node.type

    def results(self) -> list[Value]:
        """Every result."""
        if self._results is None:
            self._results = list(_all(self.node, self.env))
        return self._results

    def force(self) -> Value:
        """The single result."""
        if self._force is None:
            self._force = _one(self.node, self.env)
        return self._force


def _suspended(node: Node, env: Environment) -> values.Suspended:
    return env[node.name] if isinstance(node, core.Variable) else _Thunk(node, env)


def _all(node: Node, env: Environment) -> Iterator[Value]:
    """Every result. A failing part gives one error where its results were needed."""
    match node:
        case core.Variable(name=name):
            yield env[name]
        case core.Unit():
            yield values.Unit()
        case core.Error():
            yield values.Error(node.type)
        case core.Inject(index=index, value=value):
            for payload in _all(value, env):
                yield values.Error(node.type) if _failed(payload) else values.Inject(node.type, index, payload)
        case core.Tuple() | core.Dictionary():
            yield _product(node, env)
        case core.Project(operand=operand, index=index):
            for product in _all(operand, env):
                if isinstance(product, values.Tuple):
                    yield from product.components[index].results()
                else:
                    yield values.Error(node.type)
        case core.Sequence(first=first, second=second):
            for unit in _all(first, env):
                if _failed(unit):
                    yield values.Error(node.type)
                else:
                    yield from _all(second, env)
        case core.Let(name=name, bound=bound, body=body):
            for value in _all(bound, env):
                if _failed(value):
                    yield values.Error(node.type)
                else:
                    yield from _all(body, {**env, name: value})
        case core.Case(scrutinee=scrutinee, names=names, branches=branches):
            for value in _all(scrutinee, env):
                if isinstance(value, values.Inject):
                    yield from _all(branches[value.index], {**env, names[value.index]: value.value})
                else:
                    yield values.Error(node.type)
        case core.Choice(left=left, right=right):
            yield from _all(left, env)
            yield from _all(right, env)
        case core.Lookup(dictionary=dictionary, query=query):
            queries = list(_all(query, env))
            for entries in _all(dictionary, env):
                for asked in queries:
                    yield from _matches(node, entries, asked)


def _matches(node: core.Lookup, entries: Value, asked: Value) -> Iterator[Value]:
    """The results of a lookup in one dictionary with one query; one error where nothing matches."""
    matched = False
    if isinstance(entries, values.Dictionary) and not _failed(asked):
        for key, value in entries.entries:
            for found in key.results():
                if not _failed(found) and related(node, asked, found):
                    matched = True
                    yield from value.results()
    if not matched:
        yield values.Error(node.type)


def related(node: core.Lookup, query: Value, key: Value) -> bool:
    """Whether a key answers a query."""
    pair = values.ordinal(query), values.ordinal(key)
    return pair[0] == pair[1] if node.relation is None else pair in node.relation.pairs


def _failed(value: Value) -> bool:
    return isinstance(value, values.Error)


def _product(node: core.Tuple | core.Dictionary, env: Environment) -> Value:
    if isinstance(node, core.Tuple):
        return values.Tuple(node.type, tuple(_suspended(component, env) for component in node.components))
    return values.Dictionary(node.type, tuple((_suspended(k, env), _suspended(v, env)) for k, v in node.entries))


def _one(node: Node, env: Environment) -> Value:
    """The single result."""
    match node:
        case core.Variable(name=name):
            return env[name].force()
        case core.Unit():
            return values.Unit()
        case core.Error():
            return values.Error(node.type).force()
        case core.Inject(index=index, value=value):
            return values.Inject(node.type, index, _one(value, env))
        case core.Tuple() | core.Dictionary():
            return _product(node, env)
        case core.Project(operand=operand, index=index):
            product = _one(operand, env)
            assert isinstance(product, values.Tuple)
            return product.components[index].force()
        case core.Sequence(first=first, second=second):
            _one(first, env)
            return _one(second, env)
        case core.Let(name=name, bound=bound, body=body):
            return _one(body, {**env, name: _one(bound, env)})
        case core.Case(scrutinee=scrutinee, names=names, branches=branches):
            value = _one(scrutinee, env)
            assert isinstance(value, values.Inject)
            return _one(branches[value.index], {**env, names[value.index]: value.value})
        case core.Lookup(dictionary=dictionary, query=query):
            entries, asked = _one(dictionary, env), _one(query, env)
            assert isinstance(entries, values.Dictionary)
            found = [value for key, value in entries.entries if related(node, asked, key.force())]
            if len(found) != 1:
                where = f" ({node.span})" if node.span else ""
                raise CajalEvaluationError(
                    f"cajal.evaluate: a lookup{where} must match exactly one key; {len(found)} match {asked}; "
                    "use evaluate_all"
                )
            return found[0].force()
        case core.Choice():
            raise CajalEvaluationError("cajal.evaluate: a suspended part chooses by `<|>`; use evaluate_all")
    raise AssertionError(node)
