"""Gathers and their scatter-adds, in NumPy float64, one index at a time.

An index outside [0, n) is never clamped or wrapped: what it reads is NaN, and it takes part in no gradient.
"""

import numpy as np

from riftco.errors import ShapeError
from riftco.oracle.elementwise import as_float64


def take(x, indices, axis=0):
    """The rows of x named by the indices, along `axis`.

    Args:
        x: the table; the embedding's weight [V, D] with axis 0, for one.
        indices: integers of any shape.
        axis: the axis of x that is indexed; the axes of `indices` take its place in the result.
    """
    x, indices = as_float64(x), np.asarray(indices)
    axis = axis % x.ndim
    rows = np.moveaxis(x, axis, 0)
    result = np.full(indices.shape + rows.shape[1:], np.nan)
    for position in np.ndindex(indices.shape):
        index = int(indices[position])
        if 0 <= index < len(rows):
            result[position] = rows[index]
    return np.moveaxis(result, range(indices.ndim), range(axis, axis + indices.ndim)).copy()


def take_vjp(x, indices, dy, axis=0):
    """Cotangents (dx, None): each row of dy added to the row of x that it came from; repeats add up."""
    x, indices = as_float64(x), np.asarray(indices)
    axis = axis % x.ndim
    dy = np.moveaxis(as_float64(dy), range(axis, axis + indices.ndim), range(indices.ndim))
    dx = np.zeros_like(x)
    drows = np.moveaxis(dx, axis, 0)  # a view, so that adding to it adds to dx
    for position in np.ndindex(indices.shape):
        index = int(indices[position])
        if 0 <= index < len(drows):
            drows[index] += dy[position]
    return dx, None


def take_along_axis(x, indices, axis):
    """Element x[..., indices[..., i, ...], ...]: the indices have x's shape except along `axis`."""
    x, indices = as_float64(x), np.asarray(indices)
    result = np.full(indices.shape, np.nan)
    for position, source in _sources(x.shape, indices, axis):
        result[position] = x[source]
    return result


def take_along_axis_vjp(x, indices, dy, axis):
    """Cotangents (dx, None): each element of dy added where it came from."""
    dx, dy = np.zeros(np.shape(x)), as_float64(dy)
    for position, source in _sources(dx.shape, np.asarray(indices), axis):
        dx[source] += dy[position]
    return dx, None


def _sources(shape: tuple[int, ...], indices: np.ndarray, axis: int):
    """Pairs (position in the result, position in x) for every index that lies inside x."""
    axis = axis % len(shape)
    if indices.ndim != len(shape) or any(
        size != indices.shape[other] for other, size in enumerate(shape) if other != axis
    ):
        raise ShapeError(
            f"take_along_axis: the indices must have x's shape {shape} except along axis {axis}; got {indices.shape}. "
            "Broadcast them first."
        )
    for position in np.ndindex(indices.shape):
        index = int(indices[position])
        if 0 <= index < shape[axis]:
            yield position, (*position[:axis], index, *position[axis + 1 :])
