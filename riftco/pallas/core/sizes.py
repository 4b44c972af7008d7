"""Integers of kernels and their schedules, Python's or traced int32, and arrays filled up to whole tiles.

Nothing here is negative, so that no code for signs is traced: `//` would bring some along.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

SMALLEST = 16  # side of the smallest tile that Triton's dot takes


def least(a: Any, b: Any) -> Any:
    """The smaller of two integers."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def most(a: Any, b: Any) -> Any:
    """The larger of two integers."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def quotient(a: Any, n: int) -> Any:
    """The quotient a / n, rounded down; `a` may be an array."""
    return a // n if isinstance(a, int) or n == 1 else lax.div(a, _like(a, n))


def remainder(a: Any, n: int) -> Any:
    """What `quotient` leaves."""
    return a % n if isinstance(a, int) else lax.rem(a, _like(a, n))


def ceil_div(a: Any, n: int) -> Any:
    """The quotient a / n, rounded up."""
    return quotient(a + (n - 1), n)


def round_up(a: int, n: int) -> int:
    """The next multiple of n."""
    return ceil_div(a, n) * n


def power_of_two(n: int) -> int:
    """The next power of two, at least `SMALLEST`: what Triton's tiles are made of."""
    return max(SMALLEST, 1 << (n - 1).bit_length())


def pad_to(x: Any, axis: int, multiple: int) -> Any:
    """`x` with an axis extended by zeros to a multiple; as it is, without a copy, where it has one."""
    axis %= x.ndim
    missing = -x.shape[axis] % multiple
    return x if missing == 0 else jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _like(a: Any, n: int) -> Any:
    return jnp.int32(n) if jnp.ndim(a) == 0 else jnp.full(jnp.shape(a), n, jnp.int32)
