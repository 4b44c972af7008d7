"""Programs written as Python functions: a function runs once on symbols, and what it did to them is the program.

    Bit = types.fin(2)

    @dsl.program
    def swap(x: types.power(Bit, 2)):
        return x[1], x[0]

`swap` is then a `Definition`, as `parse` gives it. Symbols take `x[i]`, `d @ q`, `a | b`, `a >> b` (that is `a ; b`)
and `x.as_(type)`; tuples, lists, dicts and whole numbers become terms by themselves. Using a symbol twice is using its
term twice, which the checker judges as in a text; its messages point to the Python lines.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from riftco.cajal import terms, types
from riftco.cajal.diagnostics import CajalError, Source, Span
from riftco.cajal.relations import Relation
from riftco.cajal.terms import Definition, Parameter, Term

otherwise = object()
"""The pattern `_` among the arms of `case`."""

_SOURCES: dict[str, Source] = {}
_HERE = __file__


class Symbol:
    """A term under construction.

    Attributes:
        term: the term so far.
    """

    __slots__ = ("term",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, term: Term) -> None:
        self.term = term

    def __getitem__(self, index: int) -> Symbol:
        """A component; negative numbers do not count from the end."""
        return Symbol(terms.Project(self.term, _whole(index), span=_here()))

    def __iter__(self) -> Any:
        raise CajalError("dsl: a symbol has no known length; take components by x[i], or ask components(x, n)")

    def __bool__(self) -> bool:
        raise CajalError("dsl: a symbol has no truth value while it is traced; use dsl.case")

    def __matmul__(self, query: Any) -> Symbol:
        """A lookup by identity; `lookup` takes a relation."""
        return lookup(self, query)

    def __or__(self, other: Any) -> Symbol:
        """Either."""
        return choose(self, other)

    def __ror__(self, other: Any) -> Symbol:
        return choose(other, self)

    def __rshift__(self, other: Any) -> Symbol:
        """This, of type 1, then the other."""
        return Symbol(terms.Sequence(self.term, term_of(other), span=_here()))

    def as_(self, type: types.Type) -> Symbol:
        """The same with its type said."""
        place = _here()
        return Symbol(terms.Ascribe(self.term, type, span=place, type_span=place))


def term_of(value: Any) -> Term:
    """The term of a Python value: symbols and terms as they are, tuples and lists, dicts, () and whole numbers.

    A whole number k is `inj k ()`, whose type must be known from around it.

    Raises:
        CajalError: the value is none of these.
    """
    match value:
        case Symbol():
            return value.term
        case Term():
            return value
        case ():
            return terms.Unit(span=_here())
        case tuple() | list():
            return terms.Tuple(tuple(map(term_of, value)), span=_here())
        case bool():
            pass
        case int():
            return terms.Inject(value, terms.Unit(span=_here()), span=_here())
        case Mapping():
            return terms.Dictionary(tuple((term_of(k), term_of(v)) for k, v in value.items()), span=_here())
    raise CajalError(f"dsl: a symbol, tuple, list, dict or whole number is required; got {value!r}")


def letter(index: int, type: types.Type) -> Symbol:
    """`index:type`, a value of a finite type."""
    return Symbol(terms.letter(_whole(index), type, span=_here()))


def inject(index: int, value: Any = ()) -> Symbol:
    """`inj index value`, whose type must be known from around it."""
    return Symbol(terms.Inject(_whole(index), term_of(value), span=_here()))


def error() -> Symbol:
    """`error`."""
    return Symbol(terms.Error(span=_here()))


def components(value: Any, count: int) -> list[Symbol]:
    """The first components of a product."""
    return [Symbol(terms.Project(term_of(value), index, span=_here())) for index in range(count)]


def choose(left: Any, right: Any, weight: Fraction | None = None) -> Symbol:
    """Either side; a weight is that of the left one."""
    return Symbol(terms.Choice(term_of(left), term_of(right), weight, span=_here()))


def dictionary(*entries: tuple[Any, Any]) -> Symbol:
    """A dictionary from pairs; a Python dict cannot have symbols as keys."""
    return Symbol(terms.Dictionary(tuple((term_of(k), term_of(v)) for k, v in entries), span=_here()))


def keys_values(keys: Any, values: Any) -> Symbol:
    """A dictionary from a product of keys and a product of values."""
    return Symbol(terms.KeysValues(term_of(keys), term_of(values), span=_here()))


def lookup(dictionary: Any, query: Any, relation: Relation | None = None) -> Symbol:
    """The values whose keys are related to the query; without a relation, equal to it."""
    return Symbol(terms.Lookup(term_of(dictionary), term_of(query), relation, span=_here()))


def let(bound: Any, body: Callable[[Symbol], Any]) -> Symbol:
    """`let x = bound in body(x)`: the value is computed once and used once."""
    place, value = _here(), term_of(bound)
    name, inner = _applied(body, place)
    return Symbol(terms.Let(name, value, inner, span=place, name_span=place))


def case(scrutinee: Any, arms: Mapping[Any, Any]) -> Symbol:
    """One arm for each summand.

    Args:
        scrutinee: a value of a sum.
        arms: by number of the summand, or `otherwise`, which comes last: a function of the payload, or, where the
            payload is (), a value.
    """
    place = _here()
    found = []
    for index, arm in arms.items():
        number = None if index is otherwise else _whole(index)
        name, body = _applied(arm, place) if callable(arm) else (None, term_of(arm))
        if number is None and name is not None:
            raise CajalError(
                "dsl.case: `otherwise` matches summands that are 1, so its arm must be a value, no function"
            )
        found.append(terms.Arm(number, name, body, span=body.span or place, name_span=body.span or place))
    return Symbol(terms.Case(term_of(scrutinee), tuple(found), span=place))


def program(function: Callable[..., Any]) -> Definition:
    """Trace a function whose parameters are annotated with types; a return annotation is the declared result.

    Args:
        function: called once, with a symbol for each parameter.

    Returns:
        A definition with the function's name; nothing is checked yet.

    Raises:
        CajalError: a parameter has no type, or the function did something that is no term.
    """
    signature = inspect.signature(function, eval_str=True)
    code = function.__code__
    place = _line(code.co_filename, code.co_firstlineno)
    context = []
    for name, parameter in signature.parameters.items():
        if not isinstance(parameter.annotation, types.Type):
            raise CajalError(f"dsl.program: parameter {name} of {function.__name__} must be annotated with a type")
        context.append(Parameter(name, parameter.annotation, place))
    _BINDERS.append({name for name, _ in context})
    try:
        body = term_of(function(*(Symbol(terms.Variable(name, span=place)) for name, _ in context)))
    finally:
        _BINDERS.pop()
    result = signature.return_annotation
    if result is signature.empty:
        return Definition(function.__name__, body, tuple(context), span=place)
    if not isinstance(result, types.Type):
        raise CajalError(f"dsl.program: the result of {function.__name__} must be annotated with a type")
    reason = f"the declared result of {function.__name__}"
    typed = terms.Ascribe(body, result, span=body.span, reason=reason, type_span=place)
    return Definition(function.__name__, typed, tuple(context), result, span=place)


_BINDERS: list[set[str]] = []
"""For each trace that is going on, the names that are in scope."""


def _applied(body: Callable[[Symbol], Any], place: Span | None) -> tuple[str, Term]:
    """A name for the parameter of a function, new in its scope, and the term of the function at it."""
    scope = _BINDERS[-1] if _BINDERS else set()
    base = next(iter(inspect.signature(body).parameters), "x")
    name, number = base, 1
    while name in scope:
        name, number = f"{base}_{number}", number + 1
    _BINDERS.append(scope | {name})
    try:
        return name, term_of(body(Symbol(terms.Variable(name, span=place))))
    finally:
        _BINDERS.pop()


def _whole(index: Any) -> int:
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise CajalError(f"dsl: a number must be whole and known while tracing; got {index!r}")
    return index.__index__()


def _here() -> Span | None:
    """The line outside this file that is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == _HERE:
        frame = frame.f_back
    return None if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _line(file: str, number: int) -> Span | None:
    if file not in _SOURCES:
        lines = linecache.getlines(file)
        if not lines:
            return None
        _SOURCES[file] = Source("".join(lines), file)
    source = _SOURCES[file]
    lines = source.text.split("\n")
    if number > len(lines):
        return None
    text = lines[number - 1]
    start = sum(len(line) + 1 for line in lines[: number - 1]) + len(text) - len(text.lstrip())
    return Span(source, start, start + len(text.strip()))
