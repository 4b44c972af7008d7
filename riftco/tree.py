"""Pytree helpers that name what they find: leaves with dotted paths, counts, structure differences."""

from typing import Any

import jax

from riftco.types import PyTree


def path_name(path: tuple[Any, ...]) -> str:
    """The dotted name of a jax key path: dict keys, attributes and indices joined by dots."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Every leaf with its dotted name, in jax's leaf order."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def with_value(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    """Nested dicts with another value at a path, whose last key may be new; nothing is copied."""
    first, *rest = path
    return {**tree, first: with_value(tree[first], tuple(rest), value) if rest else value}


def scalar_count(tree: PyTree) -> int:
    """How many scalars the leaves hold together."""
    return sum(int(leaf.size) for leaf in jax.tree_util.tree_leaves(tree))


def byte_count(tree: PyTree) -> int:
    """How many bytes the leaves hold together."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(tree))


def describe(leaf: Any) -> str:
    """`float32[2,3]` for anything with a dtype and a shape, else the name of its type."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None:
        return type(leaf).__name__
    return f"{dtype}[{','.join(map(str, shape))}]"


def differences(left: PyTree, right: PyTree) -> list[str]:
    """One line for each path that is missing on a side or whose shape or dtype differs; [] when they agree."""
    ours, theirs = dict(named_leaves(left)), dict(named_leaves(right))
    lines = [f"{name or '(root)'}: only on the left" for name in ours if name not in theirs]
    lines += [f"{name or '(root)'}: only on the right" for name in theirs if name not in ours]
    for name, leaf in ours.items():
        if name in theirs and describe(leaf) != describe(theirs[name]):
            lines.append(f"{name or '(root)'}: {describe(leaf)} against {describe(theirs[name])}")
    return lines
