"""vmap around kernels: its axis joins the batch, the rows or the pages, so that no kernel meets vmap's rules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def joined(x: Any, is_batched: bool, size: int) -> Any:
    """The axis of vmap and the leading axis as one."""
    x = x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.reshape(x, (size * x.shape[1], *x.shape[2:]))


def parted(x: Any, size: int) -> Any:
    """The inverse of `joined`."""
    return jnp.reshape(x, (size, x.shape[0] // size, *x.shape[1:]))


def one_by_one(call: Callable[..., Any], batched: Any, arguments: Any) -> Any:
    """`call` for each index of vmap's axis in turn."""
    leaves, tree = jax.tree_util.tree_flatten(arguments)
    moves = jax.tree_util.tree_leaves(tuple(batched))

    def one(moving: Any) -> Any:
        rest = iter(moving)
        return call(*tree.unflatten([next(rest) if m else leaf for leaf, m in zip(leaves, moves, strict=True)]))

    return jax.lax.map(one, [leaf for leaf, m in zip(leaves, moves, strict=True) if m])


def folding_vmap(call: Callable[..., Any], fits: Callable[..., bool]) -> Callable[..., Any]:
    """`call`, whose arguments and results all lead with the batch axis, with vmap's axis folded into that one.

    Kernels then never meet jax's batching rules, which some schedules (scalar prefetch, Mosaic GPU) do not have. Where
    the folded batch does not fit the kernel's limits, vmap's axis is a loop.
    """
    folded = jax.custom_batching.custom_vmap(call)

    @folded.def_vmap
    def rule(size: int, batched: Any, *arguments: Any) -> tuple[Any, Any]:
        whole = jax.tree_util.tree_map(lambda x, b: joined(x, b, size), arguments, tuple(batched))
        if fits(*whole):
            result = jax.tree_util.tree_map(lambda x: parted(x, size), folded(*whole))
        else:
            result = one_by_one(folded, batched, arguments)
        return result, jax.tree_util.tree_map(lambda _: True, result)

    return folded


def rows_folding_vmap(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(x [M, ..], weight…)` whose vmap over x alone folds into M; over weights it takes them one by one."""
    folded = jax.custom_batching.custom_vmap(call)

    @folded.def_vmap
    def rule(size: int, batched: Any, x: Any, *weight: Any) -> tuple[Any, bool]:
        if not any(batched[1:]):
            return parted(folded(joined(x, batched[0], size), *weight), size), True
        return one_by_one(folded, batched, (x, *weight)), True

    return folded
