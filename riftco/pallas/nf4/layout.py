"""The order in which kernels read NF4 codes: a permutation of the canonical one.

Canonical, as bitsandbytes stores it: the weight flattened in rows, two codes a byte, the first in the high nibble.
Neighbouring columns in one byte would have to be woven together after decoding, which no chip does well. In "halves"
order byte j of a tile of 256 columns holds column j in the high nibble and column j + 128 in the low: each nibble of a
run of bytes is a run of columns. Every row is padded to whole tiles with the code of 0.
"""

from typing import Any

import jax.numpy as jnp

from riftco.pallas.core.nf4 import ZERO
from riftco.pallas.core.sizes import round_up

TILE = 256
HALF = TILE // 2  # bytes of a tile, and columns of one nibble
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def padded(width: int) -> int:
    """The columns of a row in whole tiles."""
    return round_up(width, TILE)


def to_halves(codes: Any, out: int, width: int) -> Any:
    """Codes in the order of the kernels.

    Args:
        codes: uint8 [ceil(out·width / 2)], canonical; the low nibble of the last byte is spare if out·width is odd.
        out: rows of the weight.
        width: columns of the weight.

    Returns:
        uint8 [out, padded(width) / 2].
    """
    packed = jnp.asarray(codes)
    flat = jnp.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[: out * width]
    rows = jnp.pad(flat.reshape(out, width), ((0, 0), (0, padded(width) - width)), constant_values=ZERO)
    halves = rows.reshape(out, padded(width) // TILE, 2, HALF)
    return ((halves[:, :, 0] << 4) | halves[:, :, 1]).reshape(out, padded(width) // 2)


def from_halves(codes: Any, out: int, width: int) -> Any:
    """Canonical codes, uint8 [ceil(out·width / 2)], of codes in the order of the kernels; a spare nibble codes 0."""
    packed = jnp.asarray(codes).reshape(out, padded(width) // TILE, 1, HALF)
    rows = jnp.concatenate([packed >> 4, packed & 15], axis=2).reshape(out, padded(width))[:, :width]
    pairs = jnp.pad(rows.reshape(-1), (0, out * width % 2), constant_values=ZERO).reshape(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1]


def misfit(x: Any, shape: tuple[int, int], block_size: int) -> str | None:
    """Why no kernel can multiply x [..., in] by a weight [out, in], as half a sentence; None if both can."""
    out, width = shape
    if not x.size * out:
        return "there is nothing to multiply"
    if block_size not in BLOCK_SIZES:
        return f"the block size must be a power of two from 32 to 4096; got {block_size}"
    if width % block_size:
        return f"rows must be whole blocks: {width} columns are no multiple of {block_size}"
    if out * width >= 2**31:
        return f"a weight of 2^31 entries and more is not indexed; got {out} x {width}"
    return None
