"""Gathers and their scatter-adds."""

from typing import Any

import jax.numpy as jnp

from riftco.autodiff.tape import Op
from riftco.ops import validate
from riftco.types import Array


def _safe(indices: Any, size: int) -> Any:
    """Indices with every negative one sent past the end, where gathers give NaN and scatters drop."""
    indices = validate.wide_integer(indices)
    return jnp.where(indices < 0, size, indices)


def _take_impl(x: Any, indices: Any, axis: int, size: int, poison: bool) -> Any:
    return jnp.take(x, _safe(indices, size), axis=axis, mode="fill", fill_value=jnp.nan if poison else 0)


def _scatter_impl(ct: Any, indices: Any, axis: int, size: int) -> Any:
    """Zeros with the slices of ct added at `indices` of `axis`: the adjoint of `take`."""
    flat = _safe(jnp.reshape(indices, (-1,)), size)
    lead, rest = ct.shape[:axis], ct.shape[axis + indices.ndim :]
    rows = jnp.moveaxis(jnp.reshape(ct, (*lead, flat.shape[0], *rest)), axis, 0)
    out = jnp.zeros((size, *lead, *rest), ct.dtype).at[flat].add(rows, mode="drop")
    return jnp.moveaxis(out, 0, axis)


_take = Op(
    "take",
    impl=_take_impl,
    fwd=lambda x, indices, axis, size, poison: (_take(x, indices, axis=axis, size=size, poison=poison), indices),
    bwd=lambda indices, ct, axis, size, poison: (_scatter(ct, indices, axis=axis, size=size), None),
)
_scatter = Op(
    "scatter_add",
    impl=_scatter_impl,
    fwd=lambda ct, indices, axis, size: (_scatter(ct, indices, axis=axis, size=size), indices),
    # The adjoint of dropping an index that is out of range is 0, not NaN.
    bwd=lambda indices, ct, axis, size: (_take(ct, indices, axis=axis, size=size, poison=False), None),
)


def take(x: Array, indices: Array, axis: int = 0) -> Array:
    """The slices of `x` at `indices` of an axis; an embedding lookup for axis 0.

    Args:
        x: floating array [..., N, ...] with N at `axis`.
        indices: integer array of any shape; entries in [0, N).
        axis: the axis that is indexed.

    Returns:
        x's shape with the indices' shape in place of `axis`.

    Raises:
        IndexRangeError: if a concrete index is out of range; under jit its slice is NaN, never a clamped row.

    Gradient:
        dx: ct's slices added at their indices. Saves the indices. Any order.
    """
    x, indices = validate.floating("take", "x", x), validate.integer("take", "indices", indices)
    axis = validate.axis("take", x, axis)
    validate.in_range("take", "indices", indices, x.shape[axis])
    return _take(x, indices, axis=axis, size=x.shape[axis], poison=True)


_take_along = Op(
    "take_along_axis",
    impl=lambda x, indices, axis, size, poison: jnp.take_along_axis(
        x, _safe(indices, size), axis=axis, mode="fill", fill_value=jnp.nan if poison else 0
    ),
    fwd=lambda x, indices, axis, size, poison: (
        _take_along(x, indices, axis=axis, size=size, poison=poison),
        indices,
    ),
    bwd=lambda indices, ct, axis, size, poison: (_put_along(ct, indices, axis=axis, size=size), None),
)


def _put_along_impl(ct: Any, indices: Any, axis: int, size: int) -> Any:
    shape = tuple(size if i == axis else n for i, n in enumerate(ct.shape))
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in indices.shape), indexing="ij"))
    grid[axis] = _safe(indices, size)
    return jnp.zeros(shape, ct.dtype).at[tuple(grid)].add(ct, mode="drop")


_put_along = Op(
    "put_along_axis",
    impl=_put_along_impl,
    fwd=lambda ct, indices, axis, size: (_put_along(ct, indices, axis=axis, size=size), indices),
    bwd=lambda indices, ct, axis, size: (_take_along(ct, indices, axis=axis, size=size, poison=False), None),
)


def take_along_axis(x: Array, indices: Array, axis: int) -> Array:
    """One entry of `x` for each index, matched along every other axis.

    Args:
        x: floating array.
        indices: integer array of x's rank, equal to x's shape but for `axis`; entries in [0, x.shape[axis]).
        axis: the axis that is indexed.

    Returns:
        An array of the indices' shape.

    Raises:
        ShapeError: if the shapes do not match. IndexRangeError: as `take`; under jit the entry is NaN.

    Gradient:
        dx: ct added at its indices. Saves the indices. Any order.
    """
    who = "take_along_axis"
    x, indices = validate.floating(who, "x", x), validate.integer(who, "indices", indices)
    axis = validate.axis(who, x, axis)
    fits = x.ndim == indices.ndim and all(
        a == b for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True)) if i != axis
    )
    validate.require(who, fits, f"indices must match {list(x.shape)} but for axis {axis}", list(indices.shape))
    validate.in_range(who, "indices", indices, x.shape[axis])
    return _take_along(x, indices, axis=axis, size=x.shape[axis], poison=True)
