"""4-bit NormalFloat weights: quantisation bit by bit in NumPy float32, and the linear layer in float64.

The format is that of bitsandbytes. Numbers below float32's smallest normal one count as 0.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from riftco.errors import ConfigError, DomainError, ShapeError
from riftco.oracle.elementwise import as_float64

f32 = np.float32
TINY = np.finfo(f32).tiny
CODES = np.array(
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
    "-0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
    "0.44070982933044434 0.5626170039176941 0.7229568362236023 1".split(),
    f32,
)


class NF4(NamedTuple):
    """A packed weight; the fields of `riftco.ops.NF4Array`, in NumPy."""

    codes: np.ndarray
    absmax: np.ndarray | None
    absmax_codes: np.ndarray | None
    nested_absmax: np.ndarray | None
    offset: np.ndarray | None
    shape: tuple[int, int]
    block_size: int


def dynamic_map() -> np.ndarray:
    """The 256 numbers of signed dynamic 8-bit quantisation, ascending, float32.

    For each power of ten from 1e-6 to 1, the middles of 1, 2, 4, …, 64 equal steps from 0.1 to 1 times that power, and
    their negatives; then 0 and 1.
    """
    numbers = [f32(0), f32(1)]
    for exponent in range(7):
        steps = 2**exponent
        step = np.float64((f32(1) - f32(0.1)) / f32(steps))
        # Counted from the nearer end, rounded once.
        edges = [
            f32(np.float64(f32(0.1)) + step * i) if i < (steps + 1) // 2 else f32(1 - step * (steps - i))
            for i in range(steps + 1)
        ]
        for low, high in itertools.pairwise(edges):
            number = f32(10.0 ** (exponent - 6)) * ((low + high) / f32(2))
            numbers += [number, -number]
    return np.sort(np.array(numbers, f32))


def _nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The index of the nearest entry of an ascending table; a tie takes the lower."""
    middles = (table[:-1] + table[1:]) / f32(2)
    return (x[..., None] > middles).sum(-1).astype(np.uint8)


def _blockwise(flat: np.ndarray, size: int, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of numbers divided by the largest absolute value of their block, and those values."""
    codes, absmax = np.zeros(flat.size, np.uint8), np.zeros(-(-flat.size // size), f32)
    for b in range(absmax.size):
        block = flat[b * size : (b + 1) * size]
        absmax[b] = np.abs(block).max()
        inverse = f32(1) / absmax[b] if absmax[b] else f32(0)
        codes[b * size : (b + 1) * size] = _nearest(block * inverse, table)
    return codes, absmax


def quantize_nf4(w: Any, *, block_size: int = 64, double_quant: bool = True) -> NF4:
    """w[O, I] in blocks of `block_size` along the flattened rows, two codes a byte, the first in the high nibble.

    With `double_quant` the blocks' absolute maxima, less their mean (their exact sum rounded, over their number), are
    quantised in blocks of 256 to the nearest of `dynamic_map`.
    """
    w = np.asarray(w, f32)
    if w.ndim != 2 or w.size == 0:
        raise ShapeError(f"quantize_nf4: w must be [O, I] and not empty; got {w.shape}.")
    if block_size not in [2**e for e in range(5, 13)]:
        raise ConfigError(f"quantize_nf4: block_size must be a power of two from 32 to 4096; got {block_size}.")
    if not (np.abs(w) <= f32(2.0**126)).all():
        raise DomainError("quantize_nf4: w must be finite and at most 2^126.")
    flat = np.where(np.abs(w) < TINY, f32(0), w).reshape(-1)
    codes, absmax = _blockwise(flat, block_size, CODES)
    if codes.size % 2:
        codes = np.append(codes, np.uint8(7))
    packed = codes[0::2] << 4 | codes[1::2]
    if not double_quant:
        return NF4(packed, absmax, None, None, None, (w.shape[0], w.shape[1]), block_size)
    offset = f32(math.fsum(absmax.tolist())) / f32(absmax.size)
    rest = absmax - offset
    absmax_codes, nested = _blockwise(np.where(np.abs(rest) < TINY, f32(0), rest), 256, dynamic_map())
    return NF4(packed, None, absmax_codes, nested, np.asarray(offset), (w.shape[0], w.shape[1]), block_size)


def absmax_values(q: Any) -> np.ndarray:
    """The absolute maximum of each block, float32."""
    if q.absmax is not None:
        return np.asarray(q.absmax)
    codes = np.asarray(q.absmax_codes)
    product = dynamic_map()[codes] * np.repeat(np.asarray(q.nested_absmax), 256)[: codes.size]
    return product + np.asarray(q.offset)


def dequantize_nf4(q: Any, dtype: Any = f32) -> np.ndarray:
    """[O, I]: code times absolute maximum in float32, then rounded to `dtype`; any NF4 in canonical order."""
    packed, size = np.asarray(q.codes), math.prod(q.shape)
    codes = np.stack([packed >> 4, packed & 15], 1).reshape(-1)[:size]
    scales = np.repeat(absmax_values(q), q.block_size)[:size]
    return (CODES[codes] * scales).reshape(q.shape).astype(dtype)


@np.errstate(all="ignore")
def nf4_linear(x, q, bias=None):
    """x[..., I] · Ŵᵀ + bias[O] for the decoded weight Ŵ[O, I]."""
    y = np.matmul(as_float64(x), as_float64(dequantize_nf4(q)).T)
    return y if bias is None else y + as_float64(bias)


@np.errstate(all="ignore")
def nf4_linear_vjp(x, q, *bias_and_dy) -> tuple:
    """Cotangents of nf4_linear: (dx, None) for (x, q, dy), (dx, None, dbias) for (x, q, bias, dy)."""
    dy = as_float64(bias_and_dy[-1])
    dx = np.matmul(dy, as_float64(dequantize_nf4(q)))
    if len(bias_and_dy) == 1:
        return dx, None
    return dx, None, None if bias_and_dy[0] is None else dy.reshape(-1, dy.shape[-1]).sum(axis=0)
