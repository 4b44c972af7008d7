"""Kernels under a mesh: XLA cannot cut a kernel, so each device runs it on the rows and heads that are its own."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from riftco import _compat

# Which axes of a mesh split what. Another axis is met with the whole arrays: right, and nothing won by it.
ROWS = ("data", "fsdp")
HEADS = ("tensor",)
_SPLITS = {"B": ROWS, "H": HEADS, "G": HEADS}


def on_each_device(
    call: Callable[..., Any], takes: tuple[str, ...], gives: str | tuple[str, ...]
) -> Callable[..., Any]:
    """`call` under the mesh in context, or that of the arguments' types: `shard_map` over the axes that are uncut yet.

    Axes of the partitioner and explicit ones (`jax.sharding.AxisType`) are cut alike. Without a mesh, inside a
    `shard_map` over all of it, or on one device, `call` itself runs. An axis that does not divide the rows or the heads
    leaves them whole.

    Args:
        call: arrays in, arrays out; a row or a group of heads of its result needs only that row or group.
        takes: for each argument the letters of its leading axes: B is split over the mesh axes `ROWS`, H and G over
            `HEADS`, any other not at all. All leaves of a tree have the same.
        gives: the letters of the result, or of each result.
    """

    def spread(*arguments: Any) -> Any:
        mesh = _compat.mesh_around(jax.tree_util.tree_leaves(arguments))
        axes = {} if mesh is None else _compat.uncut_axes(mesh)
        if math.prod(axes.values()) == 1:
            return call(*arguments)
        sizes: dict[str, int] = {}
        for argument, letters in zip(arguments, takes, strict=True):
            for leaf in jax.tree_util.tree_leaves(argument):
                sizes.update(zip(letters, leaf.shape, strict=False))
        parts = {name: _dividing(name, sizes, axes) for name in (ROWS, HEADS)}

        def spec(letters: str) -> PartitionSpec:
            return PartitionSpec(*(parts[_SPLITS[one]] if one in _SPLITS else None for one in letters))

        out = spec(gives) if isinstance(gives, str) else tuple(map(spec, gives))
        return _compat.shard_map(call, mesh, tuple(map(spec, takes)), out)(*arguments)

    return spread


def _dividing(names: tuple[str, ...], sizes: dict[str, int], axes: dict[str, int]) -> tuple[str, ...] | None:
    """Those of the mesh axes, as many as divide every size that they split."""
    size = math.gcd(*(sizes[letter] for letter, split in _SPLITS.items() if split == names and letter in sizes))
    taken: tuple[str, ...] = ()
    for name in names:
        if name in axes and size % math.prod(axes[one] for one in (*taken, name)) == 0:
            taken = (*taken, name)
    return taken or None
