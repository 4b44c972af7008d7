"""A program at vectors: its map applied without building coefficients, one NumPy step for each node of the DAG."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from riftco.cajal import core, types
from riftco.cajal.core import Node
from riftco.cajal.diagnostics import shallow

Vectors = Mapping[str, np.ndarray]


@shallow
def at(root: Node, inputs: Vectors, *, boolean: bool = False) -> np.ndarray:
    """The vector of a program at a vector for each of its variables.

    Args:
        root: the program.
        inputs: float64 vectors by name; non-negative where `boolean` is set.
        boolean: keep only whether a coordinate is zero, after every step.

    Returns:
        float64[root.type.dimension].
    """
    # A node has one value for the vectors of its free variables, which are kept, so that their ids stay their own.
    done: dict[tuple[Node, tuple[int, ...]], tuple[np.ndarray, Vectors]] = {}

    def visit(node: Node, env: Vectors) -> np.ndarray:
        key = (node, tuple(id(env[name]) for name in node.free))
        if key not in done:
            found = step(node, env)
            done[key] = (np.minimum(found, 1) if boolean else found, env)
        return done[key][0]

    def step(node: Node, env: Vectors) -> np.ndarray:
        match node:
            case core.Variable(name=name):
                return env[name]
            case core.Unit():
                return np.ones(1)
            case core.Error():
                return np.zeros(node.type.dimension)
            case core.Inject(type=types.Sum() as sum, index=index, value=value):
                whole = np.zeros(sum.dimension)
                whole[sum.offsets[index] : sum.offsets[index + 1]] = visit(value, env)
                return whole
            case core.Tuple(components=components):
                return np.concatenate([visit(component, env) for component in components])
            case core.Project(operand=operand, index=index):
                assert isinstance(operand.type, types.Product)
                start, stop = operand.type.offsets[index : index + 2]
                return visit(operand, env)[start:stop]
            case core.Sequence(first=first, second=second):
                return visit(first, env) * visit(second, env)
            case core.Let(name=name, bound=bound, body=body):
                return visit(body, {**env, name: visit(bound, env)})
            case core.Case(scrutinee=scrutinee, names=names, branches=branches):
                assert isinstance(scrutinee.type, types.Sum)
                whole, offsets = visit(scrutinee, env), scrutinee.type.offsets
                total = np.zeros(node.type.dimension)
                for name, branch, start, stop in zip(names, branches, offsets, offsets[1:], strict=False):
                    total = total + visit(branch, {**env, name: whole[start:stop]})
                return total
            case core.Choice(left=left, right=right, weight=weight):
                shares = (1.0, 1.0) if weight is None else (float(weight), float(1 - weight))
                return shares[0] * visit(left, env) + shares[1] * visit(right, env)
            case core.Dictionary(entries=entries):
                total = np.zeros((entries[0][1].type.dimension, entries[0][0].type.dimension))
                for key, value in entries:
                    total = total + np.outer(visit(value, env), visit(key, env))
                return total.reshape(-1)
            case core.Lookup(dictionary=dictionary, query=query, relation=relation):
                asked = visit(query, env)
                if relation is not None:
                    asked = relation.matrix.astype(np.float64) @ asked
                return visit(dictionary, env).reshape(node.type.dimension, -1) @ asked
        raise AssertionError(node)

    return visit(root, dict(inputs))
