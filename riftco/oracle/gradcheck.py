"""Centred finite differences, in NumPy float64: the judge of every cotangent in this package."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def numerical_vjp(f: Callable[..., Any], args: Sequence[Any], cotangent: Any, eps: float = 1e-6) -> tuple[Any, ...]:
    """The cotangent of every floating array argument, one element at a time.

    For each element x_i: Σ cotangent · (f(x + eps e_i) - f(x - eps e_i)) / (2 eps). For values near 1 the error is
    about 1e-10 (rounding over eps) plus eps² times the third derivative.

    Args:
        f: a function of the arguments that returns an array or a tuple of arrays.
        args: floating arrays, lists of them, or anything else (left alone, and answered with None).
        cotangent: an array of the output's shape, or a tuple of them.
        eps: the step in each direction.

    Returns:
        One entry per argument: a float64 array, a tuple of them for a list, or None.
    """
    values = [_float64(argument) for argument in args]

    def objective() -> float:
        outputs, cotangents = f(*values), cotangent
        if not isinstance(outputs, tuple):
            outputs, cotangents = (outputs,), (cotangent,)
        return sum(float(np.sum(np.multiply(y, dy))) for y, dy in zip(outputs, cotangents, strict=True))

    def derivative(x: np.ndarray) -> np.ndarray:
        dx = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            kept = x[index]
            x[index] = kept + eps
            above = objective()
            x[index] = kept - eps
            below = objective()
            x[index] = kept
            dx[index] = (above - below) / (2.0 * eps)
        return dx

    cotangents = []
    for value in values:
        if isinstance(value, list):
            cotangents.append(tuple(derivative(x) for x in value))
        else:
            cotangents.append(derivative(value) if _is_floating(value) else None)
    return tuple(cotangents)


def _is_floating(x: Any) -> bool:
    return isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)


def _float64(argument: Any) -> Any:
    """A float64 copy that may be disturbed in place; what is not floating comes back as it is."""
    if isinstance(argument, list) and argument and all(hasattr(x, "dtype") for x in argument):
        return [np.array(x, dtype=np.float64) for x in argument]
    dtype = getattr(argument, "dtype", None)
    # bfloat16 is no subtype of np.floating, so whatever is neither integer nor boolean counts as floating.
    if dtype is None or np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.bool_):
        return argument
    return np.array(argument, dtype=np.float64)
