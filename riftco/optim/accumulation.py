"""Token-exact gradient accumulation: sums over micro-batches and devices, divided once by what was counted.

The mean of means is not the mean: with answers of 1 and 99 tokens, averaging two micro-batches weights the single token
like the 99 others together. Here a micro-batch contributes its summed loss, the gradient of that sum and the number of
tokens counted; the division comes last.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from riftco._compat import scan
from riftco.errors import ShapeError
from riftco.tree import named_leaves
from riftco.types import Array, PyTree

SummedGradient: TypeAlias = Callable[[PyTree, PyTree], tuple[tuple[Array, Array], PyTree]]
"""f(params, microbatch) -> ((loss_sum, count), gradients of loss_sum): what `riftco.value_and_grad(has_aux=True)` of a
summed loss returns."""


class Accumulated(NamedTuple):
    """The result of `accumulate`."""

    loss: Array
    """float32 scalar: Σ loss_sum / Σ count; 0 where nothing was counted."""
    gradients: PyTree
    """float32, as the parameters: Σ gradients / Σ count."""
    count: Array
    """float32 scalar: how much was counted, over all micro-batches and devices."""


def zeros_like(tree: PyTree) -> PyTree:
    """A float32 zero for every leaf; no two leaves share a buffer."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.float32), tree)


def add_scaled(total: PyTree, tree: PyTree, scale: Array | float = 1.0) -> PyTree:
    """The sum total + scale·tree, leaf by leaf, in the total's dtype."""
    return jax.tree.map(lambda sum_, leaf: sum_ + jnp.asarray(scale, sum_.dtype) * leaf.astype(sum_.dtype), total, tree)


def accumulate(
    summed_gradient: SummedGradient, params: PyTree, microbatches: PyTree, *, axis_name: Any = None
) -> Accumulated:
    """The mean loss and gradients of several micro-batches, equal to those of one batch that holds them all.

    The micro-batches run one after another in a scan, so only one's activations live at a time. Sums are float32.

    Args:
        summed_gradient: f(params, microbatch) -> ((loss_sum, count), gradients of loss_sum).
        params: passed through.
        microbatches: pytree of arrays [A, ...]: A micro-batches, A >= 1.
        axis_name: inside shard_map or pmap, the mesh axis or axes over which batches differ; sums go over them too.

    Returns:
        `Accumulated`. Where nothing at all was counted, loss and gradients are the plain sums, that is 0.

    Raises:
        ShapeError: if the leaves of `microbatches` do not agree on a leading length A >= 1.
    """
    leaves = named_leaves(microbatches)
    lengths = {leaf.shape[0] if leaf.ndim else 0 for _, leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        shapes = ", ".join(f"{name or '(root)'} {leaf.shape}" for name, leaf in leaves)
        raise ShapeError(
            f"accumulate: arrays must lead with one number of micro-batches, at least 1; got {shapes or 'none'}. "
            "Reshape the batch to [micro-batches, rows, ...]."
        )

    def add(sums: PyTree, microbatch: PyTree) -> tuple[PyTree, None]:
        (loss, count), gradients = summed_gradient(params, microbatch)
        return add_scaled(sums, (loss, count, gradients)), None

    first = jax.tree.map(lambda leaf: leaf[0], microbatches)
    (loss, count), gradients = jax.eval_shape(summed_gradient, params, first)
    sums, _ = scan(add, zeros_like((loss, count, gradients)), microbatches, None, False, 1)
    if axis_name is not None:
        sums = jax.lax.psum(sums, axis_name)
    loss, count, gradients = sums
    inverse = 1.0 / jnp.where(count > 0, count, 1.0)
    return Accumulated(loss * inverse, jax.tree.map(lambda leaf: leaf * inverse, gradients), count)
