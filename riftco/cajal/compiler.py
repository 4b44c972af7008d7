"""From typed terms to coefficients: one rule for each constructor, over any semiring, exact, without a dense array."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from riftco.cajal import core, types
from riftco.cajal.checker import check
from riftco.cajal.core import Node
from riftco.cajal.diagnostics import CajalLoweringError, shallow
from riftco.cajal.maps import MultilinearMap
from riftco.cajal.semirings import Semiring, named
from riftco.cajal.tables import Table, matches, merged, product, stacked
from riftco.cajal.terms import Context, Term


@shallow
def compile(
    expr: Term | Node, context: Context | Mapping[str, types.Type], semiring: str = "natural"
) -> MultilinearMap:
    """The multilinear map of a program: linear in the vector of each variable of its context.

    The program is checked; its coefficients are computed when they are first asked for, since a map can also be
    applied, and lowered, by its program alone.

    Args:
        expr: a term, or a typed term.
        context: its variables in the order of the map's inputs, pairs (name, type).
        semiring: "natural" counts derivations, "boolean" tells which results are possible, "probability" weighs them
            by `<p/q>`, "float" counts in float64.

    Raises:
        CajalTypeError: the term does not check, or the context does not fit a typed term.
        CajalLoweringError: the semiring is unknown, or has no meaning for a choice in the program.
    """
    pairs = tuple(context.items() if isinstance(context, Mapping) else context)
    ring = named(semiring)
    node = check(expr, pairs) if isinstance(expr, Term) else expr
    known = dict(pairs)
    for name, type in node.free.items():
        if known.get(name) is not type:
            raise CajalLoweringError(
                f"cajal.compile: the context must give {name} the type {type}; it gives {known.get(name)}"
            )
    for inner in core.nodes(node):
        if isinstance(inner, core.Choice) and (inner.weight is not None) != ring.weighted:
            written = "<|>" if inner.weight is None else f"<{inner.weight}>"
            where = f" ({inner.span})" if inner.span else ""
            wanted = "a weight, as in <1/2>" if ring.weighted else "no weight; weights belong to semiring='probability'"
            raise CajalLoweringError(
                f"cajal.compile: a choice in the semiring {semiring} must have {wanted}; got `{written}`{where}"
            )
    return MultilinearMap(
        tuple(type.dimension for _, type in pairs),
        node.type.dimension,
        lambda: _coefficients(node, pairs, ring),
        semiring=semiring,
        program=node,
        context=pairs,
    )


def _coefficients(
    root: Node, context: tuple[tuple[str, types.Type], ...], ring: Semiring
) -> tuple[np.ndarray, np.ndarray]:
    """Indices [N, 1 + inputs], output first, and values [N] of a program."""
    tables: dict[Node, Table] = {}
    for node in core.nodes(root):
        tables[node] = _table(node, tables, ring)
    table = tables[root]
    # Where a variable of the context has no axis, the program absorbs it, and is zero.
    axes = [table.axes.get(name, np.zeros(0, np.int64)) for name, _ in context]
    assert len(table) == 0 or all(len(axis) == len(table) for axis in axes)
    rows = np.stack([table.out, *axes], axis=1) if len(table) else np.zeros((0, 1 + len(axes)), np.int64)
    return rows, table.values


def _table(node: Node, tables: Mapping[Node, Table], ring: Semiring) -> Table:
    """The coefficients of a node from those of the nodes inside it; axes are its free variables."""
    match node:
        case core.Variable(name=name):
            every = np.arange(node.type.dimension)
            return Table(every, {name: every}, ring.ones(len(every)))
        case core.Unit():
            return Table(np.zeros(1, np.int64), {}, ring.ones(1))
        case core.Error():
            return Table(np.zeros(0, np.int64), {}, ring.ones(0))
        case core.Inject(type=types.Sum() as sum, index=index, value=value):
            return tables[value].shifted(sum.offsets[index])
        case core.Tuple(type=types.Product() as factors, components=components):
            blocks = (tables[part].shifted(at) for part, at in zip(components, factors.offsets, strict=False))
            return stacked(list(blocks), merge=False)
        case core.Project(operand=operand, index=index):
            assert isinstance(operand.type, types.Product)
            return tables[operand].block(*operand.type.offsets[index : index + 2])
        case core.Sequence(first=first, second=second):
            one, other, values = product(tables[first], tables[second])
            return Table(other.out, {**one.axes, **other.axes}, values)
        case core.Let(name=name, bound=bound, body=body):
            return merged(_substituted(tables[bound], tables[body], name))
        case core.Case(scrutinee=scrutinee, names=names, branches=branches):
            assert isinstance(scrutinee.type, types.Sum)
            at = scrutinee.type.offsets
            blocks = [tables[scrutinee].block(start, stop) for start, stop in itertools.pairwise(at)]
            return stacked(
                [
                    merged(_substituted(block, tables[branch], name))
                    for block, branch, name in zip(blocks, branches, names, strict=True)
                ]
            )
        case core.Choice(left=left, right=right, weight=weight):
            sides = [tables[left], tables[right]]
            if weight is not None:
                sides = [_scaled(side, share) for side, share in zip(sides, (weight, 1 - weight), strict=True)]
            return stacked(sides)
        case core.Dictionary(type=types.Dictionary(key=key_type), entries=entries):
            rows = []
            for key, value in entries:
                one, other, values = product(tables[key], tables[value])
                rows.append(Table(other.out * key_type.dimension + one.out, {**one.axes, **other.axes}, values))
            return stacked(rows)
        case core.Lookup(dictionary=dictionary, query=query):
            return merged(_looked_up(tables[dictionary], tables[query], node))
    raise AssertionError(node)


def _substituted(bound: Table, body: Table, name: str) -> Table:
    """Σ over the coordinates of a bound variable: the axis `name` of the body meets the output of the bound term."""
    if name not in body.axes:  # absorbed: the body is zero
        return Table(body.out[:0], {**bound.take(np.zeros(0, np.int64)).axes, **body.axes}, body.values[:0])
    one, other, values = product(bound, body, (bound.out, body.axes[name]), drop=name)
    return Table(other.out, {**one.axes, **other.axes}, values)


def _looked_up(dictionary: Table, query: Table, node: core.Lookup) -> Table:
    """D · R · q: each entry of the dictionary with each query that its key is related to."""
    assert isinstance(node.dictionary.type, types.Dictionary)
    if node.relation is not None:
        keys, queries = np.nonzero(node.relation.matrix)
        pairs, rows = matches(queries, query.out)
        query = dataclasses.replace(query.take(rows), out=keys[pairs])
    value, key = np.divmod(dictionary.out, node.dictionary.type.key.dimension)
    one, other, values = product(dataclasses.replace(dictionary, out=value), query, (key, query.out))
    return Table(one.out, {**one.axes, **other.axes}, values)


def _scaled(table: Table, share: Fraction) -> Table:
    rows = np.arange(len(table) if share else 0)
    found = table.take(rows)
    return dataclasses.replace(found, values=found.values * share)
