"""Checks that ops make on their arguments: on shapes and dtypes always, on data when it can be looked at."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco import _compat
from riftco.autodiff.box import is_floating, unbox
from riftco.errors import ConfigError, DomainError, DTypeError, IndexRangeError, ShapeError, domain_checks_enabled
from riftco.tree import describe


def is_scalar(x: Any) -> bool:
    """Whether `x` is a Python number, which takes the dtype of the array beside it."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def static_scalar(x: Any) -> Any:
    """A NumPy scalar as the Python number that it stands for, so that it takes the array's dtype; all else as it is.

    `np.float64` is a subclass of `float`, yet it has a dtype and would promote a bfloat16 array.
    """
    if isinstance(x, np.generic):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return int(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return float(x)
    return x


def index(value: Any) -> int | None:
    """`value` as a Python integer if it is an integer of any kind; None if it is not, or is a bool."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def boolean(who: str, name: str, value: Any) -> bool:
    """`value` if it is True or False; neither a number nor a word stands for one."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{who}: {name} must be True or False; got {value!r}.")
    return bool(value)


def finite(who: str, name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number as a Python float: a NumPy scalar would bring its own dtype, and NaN is not equal to itself."""
    try:
        number = math.nan if isinstance(value, bool | np.bool_ | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (positive and number <= 0):
        kind = "positive and finite" if positive else "finite"
        raise ConfigError(f"{who}: {name} must be {kind}, a Python number or None; got {value!r}.")
    return number


def array(who: str, name: str, x: Any) -> Any:
    """`x` if it is an array or a box; NumPy arrays become jax arrays."""
    if isinstance(x, np.ndarray | np.generic):
        return jnp.asarray(x)
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise DTypeError(f"{who}: {name} must be an array; got {type(x).__name__}. Convert it with jnp.asarray.")
    return x


def floating(who: str, name: str, x: Any) -> Any:
    """`x` if it is a floating array."""
    x = array(who, name, x)
    if not is_floating(x):
        raise DTypeError(f"{who}: {name} must have a floating dtype; got {describe(x)}. Use riftco.ops.astype.")
    return x


def integer(who: str, name: str, x: Any) -> Any:
    """`x` if it is an array of integers."""
    x = array(who, name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise DTypeError(f"{who}: {name} must have an integer dtype; got {describe(x)}.")
    return x


def wide_integer(x: Any) -> Any:
    """Integers narrower than 32 bits as int32: a narrow dtype may not hold the size that its values stay below."""
    return x.astype(jnp.int32) if jnp.dtype(x.dtype).itemsize < 4 else x


def same(who: str, x: Any, y: Any) -> None:
    """Refuse two arrays whose shapes or dtypes differ: broadcasting and promotion are asked for, never implied."""
    if tuple(x.shape) != tuple(y.shape):
        raise ShapeError(
            f"{who}: both arrays must have one shape; got {describe(x)} and {describe(y)}. Ask for broadcasting with "
            "riftco.ops.broadcast_to, or pass a Python number."
        )
    same_dtype(who, x, y)


def same_dtype(who: str, *arrays: Any) -> None:
    """Refuse arrays of different dtypes."""
    if len({str(x.dtype) for x in arrays}) > 1:
        raise DTypeError(
            f"{who}: all arrays must have one dtype; got {', '.join(describe(x) for x in arrays)}. "
            "Use riftco.ops.astype."
        )


def axis(who: str, x: Any, value: int) -> int:
    """A non-negative axis of `x`."""
    number = index(value)
    if number is None or not -x.ndim <= number < x.ndim:
        raise ShapeError(f"{who}: axis must be an integer in [{-x.ndim}, {x.ndim}); got {value!r}.")
    return number % x.ndim


def require(who: str, condition: bool, required: str, came: Any) -> None:
    """Raise a ShapeError of the usual form unless `condition` holds."""
    if not condition:
        raise ShapeError(f"{who}: {required}; got {came}.")


def concrete(x: Any) -> Any:
    """The values of `x` as they are if they can be looked at and looking is asked for, else None."""
    if not domain_checks_enabled():
        return None
    x = unbox(x)
    return x if _compat.is_concrete(x) else None


def domain(who: str, x: Any, bad: Any, required: str) -> None:
    """Raise a DomainError if `bad(values)` holds anywhere, on concrete values only."""
    values = concrete(x)
    if values is None:
        return
    # A constant may be looked at inside jit or scan as well; without this its check would be traced with the rest.
    with jax.ensure_compile_time_eval():
        wrong = np.asarray(bad(values))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise DomainError(f"{who}: {required}; got {np.asarray(values)[where]} at index {list(where)}.")


def in_range(who: str, name: str, indices: Any, size: int) -> None:
    """Raise an IndexRangeError if a concrete index is outside [0, size)."""
    values = concrete(indices)
    if values is None:
        return
    values = np.asarray(values)
    wrong = (values < 0) | (values >= size)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise IndexRangeError(f"{who}: {name} must be in [0, {size}); got {values[where]} at index {list(where)}.")
