"""Terms, typed terms and modules to text; `parse` reads the text back to the same.

Two parts: `to_text` prints what a person could have written; `erase` gives the term of a typed term, with an annotation
wherever the checker would need one.
"""

from __future__ import annotations

from riftco.cajal import core, terms, types
from riftco.cajal.core import Node
from riftco.cajal.diagnostics import shallow
from riftco.cajal.relations import Arithmetic, Name, Number, Operation, Relation
from riftco.cajal.terms import Definition, Module, Term

# How tightly a form holds its parts: what stands in a place of a higher level is put in parentheses.
_EXPRESSION, _CHOICE, _SEQUENCE, _PREFIX, _POSTFIX = range(5)


@shallow
def to_text(what: Term | Node | Definition | Module) -> str:
    """The text of a term, a typed term, a definition or a module.

    `parse_expression` of a term's text is that term, `check` of a typed term's text is that typed term, and `parse` of
    a module's text is that module.
    """
    match what:
        case Module():
            parts = [f"type {name} = {type}" for name, type in what.types.items()]
            parts += [_relation(relation) for relation in what.relations.values()]
            return "\n".join([*parts, *(to_text(definition) for definition in what.defs.values())]) + "\n"
        case Definition():
            context = ", ".join(f"{name}: {type}" for name, type in what.context)
            body = what.expr.operand if what.result is not None and isinstance(what.expr, terms.Ascribe) else what.expr
            result = "" if what.result is None else f": {what.result}"
            return f"def {what.name}({context}){result} = {_text(body, _EXPRESSION, 0)}"
        case Node():
            return _text(erase(what), _EXPRESSION, 0)
    return _text(what, _EXPRESSION, 0)


def _text(term: Term, level: int, depth: int) -> str:
    """A term at a place of a level; `depth` counts the indices in scope, which need names."""
    own, text = _form(term, depth)
    return text if own >= level else f"({text})"


def _form(term: Term, depth: int) -> tuple[int, str]:
    """The level of a form, and its text."""
    sub = lambda part, level=_EXPRESSION: _text(part, level, depth)
    match term:
        case terms.Variable(name):
            return _POSTFIX, name
        case terms.Unit():
            return _POSTFIX, "()"
        case terms.Error():
            return _POSTFIX, "error"
        case terms.Inject(index, value):
            return _PREFIX, f"inj {index} {sub(value, _PREFIX)}"
        case terms.Tuple((component,)):
            index = f"i{depth or ''}"  # a tuple of one has no other form
            return _POSTFIX, f"[{_text(component, _EXPRESSION, depth + 1)} for {index} < 1]"
        case terms.Tuple(components):
            return _POSTFIX, f"({', '.join(map(sub, components))})"
        case terms.Project(operand, index):
            return (
                _POSTFIX,
                f"{sub(operand, _POSTFIX)}.{index}" if index >= 0 else f"{sub(operand, _POSTFIX)}[0 - {-index}]",
            )
        case terms.Sequence(first, second):
            return _SEQUENCE, f"{sub(first, _SEQUENCE)}; {sub(second, _PREFIX)}"
        case terms.Choice(left, right, weight):
            sign = "<|>" if weight is None else f"<{weight.numerator}/{weight.denominator}>"
            return _CHOICE, f"{sub(left, _CHOICE)} {sign} {sub(right, _SEQUENCE)}"
        case terms.Let(name, bound, body):
            return _EXPRESSION, f"let {name} = {sub(bound)} in {sub(body)}"
        case terms.Case(scrutinee, arms):
            # A `|` belongs to the nearest open case, which may also stand at the right end of a body.
            inner = [sub(arm.body, _CHOICE) for arm in arms[:-1]] + [sub(arm.body) for arm in arms[-1:]]
            written = (f"| {_pattern(arm)} -> {body}" for arm, body in zip(arms, inner, strict=True))
            return _EXPRESSION, f"case {sub(scrutinee)} of {' '.join(written)}"
        case terms.Dictionary(entries):
            return _POSTFIX, f"{{{', '.join(f'{sub(key)} -> {sub(value)}' for key, value in entries)}}}"
        case terms.KeysValues(keys, values):
            return _POSTFIX, f"dict({sub(keys)}, {sub(values)})"
        case terms.Lookup(dictionary, query, relation):
            name = "" if relation is None else relation.name
            return _POSTFIX, f"{sub(dictionary, _POSTFIX)} @{name}({sub(query)})"
        case terms.Ascribe(terms.Inject(index, terms.Unit()), types.Sum() as type):
            return _POSTFIX, f"{index}:{type if _is_letters(type) else f'({type})'}"
        case terms.Ascribe(operand, type):
            return _POSTFIX, f"({sub(operand)} as {type})"
    raise AssertionError(term)


def _is_letters(type: types.Sum) -> bool:
    return all(isinstance(part, types.Unit) for part in type.parts)


def _pattern(arm: terms.Arm) -> str:
    if arm.index is None:
        return "_"
    return str(arm.index) if arm.name is None else f"inj {arm.index} {arm.name}"


def _relation(relation: Relation) -> str:
    query, key = relation.names
    predicate = relation.predicate or _listed(relation)
    return f"rel {relation.name}({query}: {relation.query}, {key}: {relation.key}) = {_arithmetic(predicate)[1]}"


def _listed(relation: Relation) -> Arithmetic:
    """A predicate that holds for exactly the pairs of a relation."""
    query, key = (Name(name) for name in relation.names)
    found: Arithmetic = Operation("!=", (Number(0), Number(0)))
    for number, pair in enumerate(sorted(relation.pairs)):
        equal = [Operation("==", (name, Number(value))) for name, value in zip((query, key), pair, strict=True)]
        both = Operation("and", tuple(equal))
        found = Operation("or", (found, both)) if number else both
    return found


_LEVELS = {"or": 0, "and": 1, "not": 2, "+": 4, "-": 4, "*": 5, "%": 5}
_COMPARISON, _FACTOR = 3, 6


def _arithmetic(expression: Arithmetic) -> tuple[int, str]:
    """The level of an index expression, and its text."""
    match expression:
        case Number(value):
            return _FACTOR, str(value)
        case Name(name):
            return _FACTOR, name
        case Operation(operator, (operand,)):
            level, text = _arithmetic(operand)
            return _LEVELS[operator], f"{operator} {text if level >= _LEVELS[operator] else f'({text})'}"
        case Operation(operator, operands):
            own = _LEVELS.get(operator, _COMPARISON)
            texts = []
            for position, operand in enumerate(operands):
                level, text = _arithmetic(operand)
                # Chains group to the left; comparisons do not chain.
                least = own + 1 if position or own == _COMPARISON else own
                texts.append(text if level >= least else f"({text})")
            return own, f" {operator} ".join(texts)
    raise AssertionError(expression)


@shallow
def erase(node: Node) -> Term:
    """The term of a typed term: `check` of it, in a context of the same types, is the same typed term."""
    done: dict[Node, Term] = {}
    for inner in core.nodes(node):
        done[inner] = _erased(inner, done)
    return done[node]


def _erased(node: Node, done: dict[Node, Term]) -> Term:
    match node:
        case core.Variable(name=name):
            return terms.Variable(name)
        case core.Unit():
            return terms.Unit()
        case core.Error():
            return terms.Ascribe(terms.Error(), node.type)
        case core.Inject(index=index, value=value):
            return terms.Ascribe(terms.Inject(index, _bare(done[value])), node.type)
        case core.Tuple(components=components):
            return terms.Tuple(tuple(done[component] for component in components))
        case core.Project(operand=operand, index=index):
            return terms.Project(done[operand], index)
        case core.Sequence(first=first, second=second):
            return terms.Sequence(_bare(done[first]), done[second])
        case core.Let(name=name, bound=bound, body=body):
            return terms.Let(name, done[bound], done[body])
        case core.Case(scrutinee=scrutinee, names=names, branches=branches):
            arms = (terms.Arm(i, name, done[body]) for i, (name, body) in enumerate(zip(names, branches, strict=True)))
            return terms.Case(done[scrutinee], tuple(arms))
        case core.Choice(left=left, right=right, weight=weight):
            return terms.Choice(done[left], done[right], weight)
        case core.Dictionary(entries=entries):
            return terms.Dictionary(tuple((done[key], done[value]) for key, value in entries))
        case core.Lookup(dictionary=dictionary, query=query, relation=relation):
            return terms.Lookup(done[dictionary], _bare(done[query]), relation)
    raise AssertionError(node)


def _bare(term: Term) -> Term:
    """A term without its annotation, where the place it stands in gives the type."""
    return term.operand if isinstance(term, terms.Ascribe) else term
