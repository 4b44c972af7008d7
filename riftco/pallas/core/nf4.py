"""NF4 codes to numbers, in ways that each kind of chip can do.

A byte holds two codes, the first in the high nibble. Decoding takes a `lookup` from indices (int32) to float32 numbers;
which one a kernel can have depends on the chip: a gather from a table in memory, or one along lanes.

Source: Dettmers et al. 2023, arXiv:2305.14314, appendix E.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

CODES = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
ZERO = 7  # the code of exact 0
LANES = 128


def decode(packed: Any, lookup: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The numbers of the high and of the low nibbles of bytes, each float32 of the bytes' shape."""
    index = packed.astype(jnp.int32)
    return lookup(index >> 4), lookup(index & 15)


def lane_table() -> np.ndarray:
    """CODES over and over along 128 lanes, [1, 128], for `lane_gather`."""
    return np.tile(CODES, LANES // CODES.size)[None]


def lane_gather(table: Any) -> Callable[[Any], Any]:
    """Lookup of indices [r, 128] in `lane_table`, by a permutation of lanes."""

    def lookup(index: Any) -> Any:
        return jnp.take_along_axis(jnp.broadcast_to(table, index.shape), index, axis=1, mode="promise_in_bounds")

    return lookup


def ref_gather(table_ref: Any) -> Callable[[Any], Any]:
    """Lookup of indices of any shape in a ref of CODES [16], by loads."""
    return lambda index: table_ref[index]


def rounded(numbers: Any, scales: Any, dtype: Any) -> Any:
    """The weights: code times scale in float32, rounded once."""
    return (numbers * scales).astype(dtype)
