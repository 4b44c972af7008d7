"""Ops that move elements and compute nothing: reshape, transpose, broadcast, join, cut."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from riftco.autodiff.tape import Op, Static
from riftco.errors import ShapeError
from riftco.ops import validate
from riftco.types import Array

Shape = tuple[int, ...]

# ------------------------------------------------------------------------------------------------ rules

_reshape = Op(
    "reshape",
    impl=lambda x, shape, source: jnp.reshape(x, shape),
    fwd=lambda x, shape, source: (_reshape(x, shape=shape, source=source), ()),
    bwd=lambda _, ct, shape, source: (_reshape(ct, shape=source, source=shape),),
)


def _inverse(axes: Shape) -> Shape:
    return tuple(sorted(range(len(axes)), key=lambda i: axes[i]))


_transpose = Op(
    "transpose",
    impl=lambda x, axes: jnp.transpose(x, axes),
    fwd=lambda x, axes: (_transpose(x, axes=axes), ()),
    bwd=lambda _, ct, axes: (_transpose(ct, axes=_inverse(axes)),),
)

_broadcast = Op(
    "broadcast_to",
    impl=lambda x, shape, source: jnp.broadcast_to(x, shape),
    fwd=lambda x, shape, source: (_broadcast(x, shape=shape, source=source), ()),
    bwd=lambda _, ct, shape, source: (sum_to(ct, source),),
)
# The adjoint of broadcasting: each stretched axis is summed.
_sum_to = Op(
    "sum_to",
    impl=lambda x, shape, source: jnp.reshape(jnp.sum(x, axis=stretched_axes(shape, source)), shape),
    fwd=lambda x, shape, source: (_sum_to(x, shape=shape, source=source), ()),
    bwd=lambda _, ct, shape, source: (_broadcast(ct, shape=source, source=shape),),
)

_concatenate = Op(
    "concatenate",
    impl=lambda xs, axis: jnp.concatenate(xs, axis=axis),
    fwd=lambda xs, axis: (_concatenate(xs, axis=axis), Static(tuple(x.shape[axis] for x in xs))),
    bwd=lambda sizes, ct, axis: (list(_split(ct, sizes=sizes.value, axis=axis)),),
)
_split = Op(
    "split",
    impl=lambda x, sizes, axis: tuple(
        lax.slice_in_dim(x, start, start + size, axis=axis) for start, size in zip(_starts(sizes), sizes, strict=True)
    ),
    fwd=lambda x, sizes, axis: (_split(x, sizes=sizes, axis=axis), ()),
    bwd=lambda _, ct, sizes, axis: (_concatenate(list(ct), axis=axis),),
)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


_slice = Op(
    "slice",
    impl=lambda x, starts, limits, strides, source: lax.slice(x, starts, limits, strides),
    fwd=lambda x, starts, limits, strides, source: (
        _slice(x, starts=starts, limits=limits, strides=strides, source=source),
        (),
    ),
    bwd=lambda _, ct, starts, limits, strides, source: (
        _place(ct, starts=starts, limits=limits, strides=strides, source=source),
    ),
)
# The adjoint of slicing: the cotangent in its place, zeros elsewhere.
_place = Op(
    "place",
    impl=lambda x, starts, limits, strides, source: lax.pad(
        x,
        jnp.zeros((), x.dtype),
        [
            (start, total - start - ((size - 1) * stride + 1), stride - 1)
            for start, total, size, stride in zip(starts, source, x.shape, strides, strict=True)
        ],
    ),
    fwd=lambda x, starts, limits, strides, source: (
        _place(x, starts=starts, limits=limits, strides=strides, source=source),
        (),
    ),
    bwd=lambda _, ct, starts, limits, strides, source: (
        _slice(ct, starts=starts, limits=limits, strides=strides, source=source),
    ),
)


def _inside(starts: Sequence[Any], sizes: Shape, shape: Shape) -> Any:
    """Whether the box lies inside; XLA would move one that does not."""
    ok = jnp.asarray(True)
    for start, size, total in zip(starts, sizes, shape, strict=True):
        ok = ok & (start >= 0) & (start <= total - size)
    return ok


def _update_impl(x: Any, update: Any, starts: Any, poison: bool) -> Any:
    # Only the box is touched, so that a large buffer is still updated in place.
    if poison:
        ok = _inside(starts, update.shape, x.shape)
        update = jnp.where(jnp.broadcast_to(ok, update.shape), update, jnp.full((), jnp.nan, x.dtype))
    return lax.dynamic_update_slice(x, update, _from_zero(starts))


def _from_zero(starts: Sequence[Any]) -> list[Any]:
    return [jnp.maximum(start, 0) for start in starts]  # jax would count a negative start from the end


def _dynamic_slice_impl(x: Any, starts: Any, sizes: Shape) -> Any:
    """The box, or zeros where it does not lie inside x: nothing of it went into the result."""
    box = lax.dynamic_slice(x, _from_zero(starts), sizes)
    return jnp.where(jnp.broadcast_to(_inside(starts, sizes, x.shape), sizes), box, jnp.zeros((), x.dtype))


_update = Op(
    "dynamic_update_slice",
    impl=_update_impl,
    fwd=lambda x, update, starts, poison: (
        _update(x, update, starts, poison=poison),
        (starts, Static(tuple(update.shape))),
    ),
    bwd=lambda saved, ct, poison: (
        _update(ct, jnp.zeros(saved[1].value, ct.dtype), saved[0], poison=False),
        _dynamic_slice(ct, saved[0], sizes=saved[1].value),
        [None for _ in saved[0]],
    ),
)
_dynamic_slice = Op(
    "dynamic_slice",
    impl=_dynamic_slice_impl,
    fwd=lambda x, starts, sizes: (_dynamic_slice(x, starts, sizes=sizes), (starts, Static(tuple(x.shape)))),
    bwd=lambda saved, ct, sizes: (
        _update(jnp.zeros(saved[1].value, ct.dtype), ct, saved[0], poison=False),
        [None for _ in saved[0]],
    ),
)

# ------------------------------------------------------------------------------------------------ functions


def reshape(x: Array, shape: Sequence[int]) -> Array:
    """`x` with its elements, in row-major order, in another shape.

    Args:
        x: floating array.
        shape: the new dimensions; one of them may be -1.

    Raises:
        ShapeError: if the element counts differ.

    Gradient:
        ct in x's shape. Saves nothing. Any order.
    """
    x = validate.floating("reshape", "x", x)
    target = tuple(int(d) for d in ((shape,) if isinstance(shape, int) else shape))
    total = math.prod(x.shape)
    if target.count(-1) == 1:
        known = math.prod(d for d in target if d != -1)
        if known > 0 and total % known == 0:
            target = tuple(total // known if d == -1 else d for d in target)
    if math.prod(target) != total or any(d < 0 for d in target):
        raise ShapeError(
            f"reshape: the new shape must hold {total} elements, as {list(x.shape)} does; got {list(shape)}."
        )
    return x if target == tuple(x.shape) else _reshape(x, shape=target, source=tuple(x.shape))


def transpose(x: Array, axes: Sequence[int] | None = None) -> Array:
    """`x` with its axes permuted, reversed when `axes` is None.

    Raises:
        ShapeError: if `axes` is not a permutation of x's axes.

    Gradient:
        ct, permuted back. Saves nothing. Any order.
    """
    x = validate.floating("transpose", "x", x)
    order = tuple(reversed(range(x.ndim))) if axes is None else tuple(validate.axis("transpose", x, a) for a in axes)
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"transpose: axes must be a permutation of 0..{x.ndim - 1}; got {list(axes or ())}.")
    return _transpose(x, axes=order)


def stretched_axes(source: Shape, target: Shape) -> Shape:
    """The axes of `target` along which an array of shape `source` is repeated."""
    offset = len(target) - len(source)
    return tuple(i for i in range(len(target)) if i < offset or (source[i - offset] == 1 and target[i] != 1))


def broadcast_to(x: Array, shape: Sequence[int]) -> Array:
    """`x` repeated to `shape`: axes are aligned on the right, and a size of 1 is stretched.

    Raises:
        ShapeError: if an axis of x is neither 1 nor the size asked for.

    Gradient:
        ct summed over the stretched axes. Saves nothing. Any order.
    """
    x = validate.floating("broadcast_to", "x", x)
    target = tuple(shape)
    source = tuple(x.shape)
    offset = len(target) - len(source)
    if offset < 0 or any(d not in (1, target[i + offset]) for i, d in enumerate(source)):
        raise ShapeError(
            f"broadcast_to: {list(source)} does not broadcast to {list(target)}; sizes must be equal or 1."
        )
    return x if source == target else _broadcast(x, shape=target, source=source)


def sum_to(x: Array, shape: Shape) -> Array:
    """The adjoint of `broadcast_to`: x summed to `shape`."""
    return x if tuple(x.shape) == tuple(shape) else _sum_to(x, shape=tuple(shape), source=tuple(x.shape))


def concatenate(xs: Sequence[Array], axis: int = -1) -> Array:
    """Arrays joined along an axis.

    Args:
        xs: at least one floating array; equal dtypes, and equal shapes but for `axis`.
        axis: the axis that grows.

    Raises:
        ShapeError, DTypeError: if the arrays do not fit.

    Gradient:
        ct, cut at the joints. Saves nothing. Any order.
    """
    xs = [validate.floating("concatenate", f"xs[{i}]", x) for i, x in enumerate(xs)]
    if not xs:
        raise ShapeError("concatenate: at least one array is required; got none.")
    axis = validate.axis("concatenate", xs[0], axis)
    validate.same_dtype("concatenate", *xs)
    rests = {tuple(d for i, d in enumerate(x.shape) if i != axis) for x in xs}
    if len(rests) > 1 or len({x.ndim for x in xs}) > 1:
        raise ShapeError(
            f"concatenate: shapes must agree but for axis {axis}; got {', '.join(str(list(x.shape)) for x in xs)}."
        )
    return _concatenate(xs, axis=axis)


def split(x: Array, sections: int | Sequence[int], axis: int = -1) -> tuple[Array, ...]:
    """`x` cut along an axis.

    Args:
        x: floating array.
        sections: a number of equal parts, or the list of the parts' sizes.
        axis: the axis that is cut.

    Raises:
        ShapeError: if the sizes do not add up to the axis.

    Gradient:
        the cotangents, joined. Saves nothing. Any order.
    """
    x = validate.floating("split", "x", x)
    axis = validate.axis("split", x, axis)
    total = x.shape[axis]
    if isinstance(sections, int):
        if sections < 1 or total % sections:
            raise ShapeError(f"split: axis {axis} of size {total} must divide into {sections} equal parts.")
        sizes: Shape = (total // sections,) * sections
    else:
        sizes = tuple(sections)
        if sum(sizes) != total or any(s < 0 for s in sizes):
            raise ShapeError(f"split: the sizes must add up to {total}, the size of axis {axis}; got {list(sizes)}.")
    return tuple(_split(x, sizes=sizes, axis=axis))


def slice(x: Array, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int] | None = None) -> Array:
    """The box `x[start:limit:stride]` on every axis.

    Raises:
        ShapeError: unless 0 <= start <= limit <= size and stride >= 1 on every axis.

    Gradient:
        ct in its place, zeros elsewhere. Saves nothing. Any order.
    """
    x = validate.floating("slice", "x", x)
    starts, limits = tuple(starts), tuple(limits)
    steps: Shape = (1,) * x.ndim if strides is None else tuple(strides)
    fits = len(starts) == len(limits) == len(steps) == x.ndim and all(
        0 <= a <= b <= n and s >= 1 for a, b, n, s in zip(starts, limits, x.shape, steps, strict=True)
    )
    validate.require(
        "slice",
        fits,
        f"starts, limits and strides must describe a box inside {list(x.shape)}",
        f"{list(starts)}, {list(limits)}, {list(steps)}",
    )
    return _slice(x, starts=starts, limits=limits, strides=steps, source=tuple(x.shape))


def dynamic_update_slice(x: Array, update: Array, starts: Sequence[Any]) -> Array:
    """`x` with `update` written over the box that begins at `starts`.

    Args:
        x: floating array.
        update: floating array of the same dtype and rank, no axis larger than x's.
        starts: one integer or int32 scalar for each axis, possibly traced.

    Raises:
        ShapeError: if the box is larger than x. IndexRangeError: if a concrete start lets it reach outside x; under
        jit the nearest box inside x is filled with NaN, and the update gets no gradient.

    Gradient:
        dx = ct with the box zeroed, dupdate = the box of ct. Saves the starts. Any order.
    """
    who = "dynamic_update_slice"
    x, update = validate.floating(who, "x", x), validate.floating(who, "update", update)
    validate.same_dtype(who, x, update)
    fits = x.ndim == update.ndim == len(starts) and all(u <= n for u, n in zip(update.shape, x.shape, strict=True))
    validate.require(who, fits, f"update must fit inside {list(x.shape)}, with one start an axis", list(update.shape))
    for axis, (start, size, total) in enumerate(zip(starts, update.shape, x.shape, strict=True)):
        validate.in_range(who, f"the start on axis {axis}", start, total - size + 1)
    # Starts that could be looked at have been; the others are watched where they are used.
    poison = any(validate.concrete(s) is None for s in starts)
    return _update(x, update, [jnp.asarray(s, jnp.int32) for s in starts], poison=poison)
