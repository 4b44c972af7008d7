"""The arithmetic of block-wise codes: tables, blocks, and float32 sums that no compiler rounds otherwise."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from riftco.pallas.core.nf4 import CODES
from riftco.pallas.core.sizes import pad_to


@functools.cache
def dynamic_map() -> np.ndarray:
    """The 256 numbers of signed dynamic 8-bit quantisation, ascending, float32.

    Source:
        Dettmers 2016, arXiv:1511.04561; Dettmers et al. 2022, arXiv:2110.02861, section 1.3.
    """
    parts = [np.array([0.0, 1.0], np.float32)]
    for exponent in range(7):
        steps = 2**exponent
        i = np.arange(steps + 1)
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(steps))
        # Rounded once, and counted from the nearer end: the numbers are symmetric to the last bit but one.
        edges = np.where(2 * i < steps, np.float64(np.float32(0.1)) + step * i, 1.0 - step * (steps - i))
        edges = edges.astype(np.float32)
        numbers = np.float32(10.0 ** (exponent - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        parts += [numbers, -numbers]
    table = np.sort(np.concatenate(parts))
    table.setflags(write=False)
    return table


PAIRS = np.stack([np.repeat(CODES, 16), np.tile(CODES, 16)], axis=1)  # the two numbers of each byte


def look_up(table: np.ndarray, index: Any) -> Any:
    """Rows of a table at indices that cannot be out of range."""
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


def middles(table: np.ndarray) -> np.ndarray:
    """The thresholds between neighbours of an ascending table."""
    return (table[:-1] + table[1:]) / np.float32(2)


def blocks_of(flat: Any, size: int) -> Any:
    """[..., n] as [..., blocks, size], the last block filled up with zeros."""
    flat = pad_to(flat, -1, size)
    return jnp.reshape(flat, (*flat.shape[:-1], -1, size))


def spread(scales: Any, size: int, count: int) -> Any:
    """[..., blocks] as [..., count], each scale `size` times."""
    flat = jnp.broadcast_to(scales[..., None], (*scales.shape, size)).reshape(*scales.shape[:-1], -1)
    return lax.slice_in_dim(flat, 0, count, axis=flat.ndim - 1)


def scaled_blocks(blocks: Any) -> tuple[Any, Any]:
    """Blocks over their absolute maximum (by its reciprocal), and the maxima; a block of zeros stays one."""
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    inverse = jnp.where(absmax == 0, jnp.float32(0), jnp.float32(1) / jnp.where(absmax == 0, jnp.float32(1), absmax))
    return blocks * jnp.broadcast_to(inverse[..., None], blocks.shape), absmax


def hidden_zero(x: Any) -> Any:
    """0, int32, though no compiler can know: the sign bit of a sum of maxima."""
    return lax.shift_right_logical(lax.bitcast_convert_type(x, jnp.int32), jnp.int32(31))


def exact_sum(x: Any) -> Any:
    """The sum of float32 [n], rounded once: halves are added to halves, and the rounding errors are added up beside.

    So it does not depend on an order that compilers may choose.
    """
    size = 1 << max(0, x.shape[0] - 1).bit_length()
    total = jnp.pad(x, (0, size - x.shape[0]))
    error = jnp.zeros_like(total)
    while size > 1:
        size //= 2
        (a, b), (e, f) = jnp.split(total, 2), jnp.split(error, 2)
        total = a + b
        part = total - a
        error = e + f + ((a - (total - part)) + (b - part))
    return total[0] + error[0]
