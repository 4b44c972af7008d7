"""The global gradient norm and the clip scale, safe from overflow and underflow.

A gradient of ±1e20 has a norm that float32 holds and a square that it does not. Where squares might leave the range,
the gradients are first multiplied by 2^−e, with 2^e just above the largest magnitude: a power of two changes no digit,
and the sum of squares then lies between 1/4 and the number of scalars. The clip is applied in the same two factors, so
that it also holds where norm / limit lies outside float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from riftco.types import Array

_LARGEST = float(jnp.finfo(jnp.float32).max)


class Clip(NamedTuple):
    """What clipping needs to know of all gradients together; float32 scalars.

    A gradient is clipped by `g * shift * factor`, in this order; shift is a power of two. Without clipping both are 1.
    """

    norm: Array
    shift: Array
    factor: Array

    @property
    def scale(self) -> Array:
        """The clip scale as one number: exactly 1 where norm <= limit."""
        return self.shift * self.factor


def sum_of_squares(leaves: list[Array]) -> Array:
    """Σx² over all leaves, in float32: infinite or zero where squares leave the range. An empty list gives 0."""
    total = jnp.float32(0)
    for leaf in leaves:
        wide = leaf.astype(jnp.float32)
        total = total + jnp.sum(wide * wide)
    return total


def squares_are_safe(leaves: list[Array], total: Array) -> Array:
    """Whether Σx² = `total` is a faithful sum: finite, and so large that squares lost to underflow cannot show.

    A square below 2^−126 may be flushed to zero; n of them lose less than n·2^−126, which is below half a unit in the
    last place of the sum if that is at least n·2^−101.
    """
    count = sum(leaf.size for leaf in leaves)
    return jnp.isfinite(total) & (total >= count * 2.0**-101)


def quick_clip(total: Array, limit: float | None) -> Clip:
    """The clip from a faithful sum of squares."""
    norm = jnp.sqrt(total)
    one = jnp.ones_like(norm)
    factor = one if limit is None else jnp.where(norm > limit, limit / norm, one)
    return Clip(norm, one, factor)


def careful_clip(leaves: list[Array], limit: float | None) -> Clip:
    """The clip from any gradients; a norm beyond float32 is reported as the largest float32, and clipped correctly.

    Non-finite gradients give a non-finite norm.
    """
    largest = jnp.float32(0)
    for leaf in leaves:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(leaf.astype(jnp.float32)), initial=0.0))
    # frexp: largest = f · 2^e with f in [1/2, 1). Both 2^e and 2^−e must be normal numbers.
    exponent = jnp.clip(jnp.frexp(largest)[1], -126, 126)
    down, up = jnp.ldexp(jnp.ones_like(largest), -exponent), jnp.ldexp(jnp.ones_like(largest), exponent)
    root = jnp.sqrt(sum_of_squares([leaf.astype(jnp.float32) * down for leaf in leaves]))
    norm = jnp.where(jnp.isfinite(largest), jnp.minimum(root * up, _LARGEST), largest)
    one = jnp.ones_like(root)
    if limit is None:
        return Clip(norm, one, one)
    is_over = root > limit * down
    return Clip(norm, jnp.where(is_over, down, one), jnp.where(is_over, limit / root, one))


def global_norm(gradients: object) -> Array:
    """The Euclidean norm of all scalars of a pytree together, safe from overflow.

    Args:
        gradients: pytree of floating arrays.

    Returns:
        float32 scalar; 0 for an empty tree; the largest float32 where the norm exceeds it; non-finite where a leaf is.
    """
    leaves = jax.tree.leaves(gradients)
    total = sum_of_squares(leaves)
    safe = squares_are_safe(leaves, total)
    return jax.lax.cond(safe, lambda: jnp.sqrt(total), lambda: careful_clip(leaves, None).norm)
