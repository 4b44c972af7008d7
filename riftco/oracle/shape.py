"""Functions that move elements without changing them, in NumPy float64."""

import math
from collections.abc import Sequence

import numpy as np

from riftco.errors import ShapeError
from riftco.oracle.elementwise import as_float64


def reshape(x, shape):
    """The same elements in row-major order under another shape; one entry may be -1."""
    return as_float64(x).reshape(shape).copy()


def reshape_vjp(x, dy, shape):
    """Cotangent dy under x's shape."""
    return (as_float64(dy).reshape(np.shape(x)).copy(),)


def transpose(x, axes=None):
    """Output axis i is input axis axes[i]; None reverses them."""
    return np.transpose(as_float64(x), axes).copy()


def transpose_vjp(x, dy, axes=None):
    """Cotangent dy under the inverse permutation."""
    rank = np.ndim(x)
    axes = [axis % rank for axis in axes] if axes is not None else list(range(rank))[::-1]
    inverse = [axes.index(axis) for axis in range(rank)]
    return (np.transpose(as_float64(dy), inverse).copy(),)


def broadcast_to(x, shape):
    """Copies along axes of size 1 and along new leading axes, right-aligned."""
    return np.broadcast_to(as_float64(x), shape).copy()


@np.errstate(all="ignore")
def broadcast_to_vjp(x, dy, shape):
    """Cotangent dy, summed over every axis along which x was copied."""
    x, dy = as_float64(x), as_float64(dy)
    for _ in range(dy.ndim - x.ndim):
        dy = dy.sum(axis=0)
    for axis, size in enumerate(x.shape):
        if size == 1:
            dy = dy.sum(axis=axis, keepdims=True)
    return (dy,)


def concatenate(xs, axis=-1):
    """The arrays of a list, one after another along `axis`."""
    return np.concatenate([as_float64(x) for x in xs], axis=axis)


def concatenate_vjp(xs, dy, axis=-1):
    """The part of dy that each array of the list contributed, in the list's order."""
    dy, parts, start = as_float64(dy), [], 0
    for x in xs:
        size = np.shape(x)[axis]
        parts.append(np.take(dy, range(start, start + size), axis=axis))
        start += size
    return tuple(parts)


def split(x, sections, axis=-1):
    """A tuple of consecutive pieces along `axis`.

    Args:
        x: the array.
        sections: the number of equal pieces, or the list of their sizes (not their ends).
        axis: the axis that is cut.
    """
    x = as_float64(x)
    total = x.shape[axis]
    if isinstance(sections, Sequence):
        sizes = list(sections)
    else:
        sizes = [total // sections] * sections
    if math.fsum(sizes) != total:
        raise ShapeError(
            f"split: the pieces must add up to the axis's size {total}; got {sections}. "
            "Pass a number that divides it, or a list of sizes."
        )
    pieces, start = [], 0
    for size in sizes:
        pieces.append(np.take(x, range(start, start + size), axis=axis))
        start += size
    return tuple(pieces)


def split_vjp(x, dys, sections, axis=-1):
    """The pieces' cotangents, joined."""
    return (concatenate(dys, axis),)


def slice(x, starts, limits, strides=None):
    """Element starts[i] + k·strides[i] below limits[i] along each axis i; one entry per axis."""
    x = as_float64(x)
    return x[_windows(x, starts, limits, strides)].copy()


def slice_vjp(x, dy, starts, limits, strides=None):
    """Cotangent dy in its place, zeros around it."""
    dx = np.zeros(np.shape(x))
    dx[_windows(dx, starts, limits, strides)] = as_float64(dy)
    return (dx,)


def _windows(x: np.ndarray, starts, limits, strides):
    """The open mesh of indices that `slice` reads."""
    strides = [1] * x.ndim if strides is None else strides
    if not len(starts) == len(limits) == len(strides) == x.ndim:
        raise ShapeError(
            f"slice: starts, limits and strides need one entry for each of {x.ndim} axes; "
            f"got {len(starts)}, {len(limits)} and {len(strides)}. Give every axis its own."
        )
    bounds = list(zip(starts, limits, strides, x.shape, strict=True))
    if any(not (0 <= start <= limit <= size and stride >= 1) for start, limit, stride, size in bounds):
        raise ShapeError(
            f"slice: 0 <= start <= limit <= size and stride >= 1 must hold on every axis of {x.shape}; "
            f"got starts {list(starts)}, limits {list(limits)}, strides {list(strides)}. Count from the front."
        )
    return np.ix_(*[np.arange(start, limit, stride) for start, limit, stride, _ in bounds])


def dynamic_update_slice(x, update, starts):
    """The array x with the block at `starts` replaced by `update`.

    Args:
        x: the array.
        update: the block, of x's rank.
        starts: one integer per axis. For a block that does not lie inside x, NaN is written over the nearest that does.
    """
    x, update = as_float64(x), as_float64(update)
    if not _fits(x, update, starts):
        starts, update = _nearest(x, update, starts), np.full(update.shape, np.nan)
    result = x.copy()
    for offset in np.ndindex(update.shape):
        result[_shifted(offset, starts)] = update[offset]
    return result


def dynamic_update_slice_vjp(x, update, starts, dy):
    """Cotangents (dy with the written block cleared, the block of dy or zeros when it does not fit, None)."""
    dx, dupdate = as_float64(dy).copy(), np.zeros(np.shape(update))
    fits = _fits(dx, dupdate, starts)
    starts = _nearest(dx, dupdate, starts)
    for offset in np.ndindex(dupdate.shape):
        if fits:
            dupdate[offset] = dx[_shifted(offset, starts)]
        dx[_shifted(offset, starts)] = 0.0
    return dx, dupdate, None


def _nearest(x: np.ndarray, update: np.ndarray, starts) -> list[int]:
    """The starts, moved as little as brings the block inside x."""
    return [
        min(max(int(start), 0), large - small)
        for start, small, large in zip(starts, update.shape, x.shape, strict=True)
    ]


def _shifted(offset: tuple[int, ...], starts) -> tuple[int, ...]:
    return tuple(int(start) + step for start, step in zip(starts, offset, strict=True))


def _fits(x: np.ndarray, update: np.ndarray, starts) -> bool:
    """Whether the block lies inside x; wrong ranks and blocks larger than x are shape errors."""
    if not len(starts) == update.ndim == x.ndim or any(
        small > large for small, large in zip(update.shape, x.shape, strict=True)
    ):
        raise ShapeError(
            f"dynamic_update_slice: update and starts must have x's rank, and update fit into x {x.shape}; "
            f"got update {update.shape} and {len(starts)} starts. Reshape the update first."
        )
    return all(
        0 <= int(start) <= large - small for start, small, large in zip(starts, update.shape, x.shape, strict=True)
    )
