"""What `+ - * / @ **` and `[]` on a box mean; `riftco.autodiff.box` looks them up here."""

import builtins
from typing import Any

from riftco.errors import ShapeError
from riftco.ops import validate
from riftco.ops.elementwise import add, div, mul, neg, pow, sub
from riftco.ops.linalg import matmul
from riftco.ops.shape import reshape, slice
from riftco.types import Array

__all__ = ["add", "div", "getitem", "matmul", "mul", "neg", "pow", "sub"]


def getitem(x: Array, index: Any) -> Array:
    """`x[index]` for integers (of Python or NumPy; a bool is none), slices with positive steps, `...` and None.

    Raises:
        ShapeError: for anything else; use `riftco.ops.take` for arrays of indices.
    """
    parts = tuple(_part(p) for p in (index if isinstance(index, tuple) else (index,)))
    named = [p for p in parts if p is not None and p is not Ellipsis]
    if len(named) > x.ndim or parts.count(Ellipsis) > 1:
        raise ShapeError(f"[]: too many indices for an array of rank {x.ndim}.")
    fill = (builtins.slice(None),) * (x.ndim - len(named))
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts = (*parts[:at], *fill, *parts[at + 1 :])
    starts, limits, strides, shape = [], [], [], []
    axis = 0
    for part in parts:
        if part is None:
            shape.append(1)
            continue
        size = x.shape[axis]
        if isinstance(part, int):
            if not -size <= part < size:
                raise ShapeError(f"[]: index {part} is out of range for axis {axis} of size {size}.")
            start, stop, step = part % size, part % size + 1, 1
        else:
            start, stop, step = part.indices(size)
            if step < 1:
                raise ShapeError("[]: a slice's step must be positive.")
            stop = max(start, stop)
            shape.append(len(range(start, stop, step)))
        starts.append(start)
        limits.append(stop)
        strides.append(step)
        axis += 1
    return reshape(slice(x, starts, limits, strides), shape)


def _part(part: Any) -> Any:
    if part is None or part is Ellipsis or isinstance(part, builtins.slice):
        return part
    number = validate.index(part)
    if number is None:
        raise ShapeError(
            "[]: only integers, slices, ... and None can index a differentiated array; got "
            f"{type(part).__name__}; use riftco.ops.take."
        )
    return number
