"""Packed 4-bit weights from and for other projects: bitsandbytes' tensors, and another project's NF4 layout."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco.bundle.bitsandbytes import (
    as_array,
    checked_size,
    from_bitsandbytes,
    nested_maxima,
    to_bitsandbytes,
    with_spare_zero,
)
from riftco.errors import ConfigError, DomainError, DTypeError, ShapeError
from riftco.ops.nf4 import NF4Array
from riftco.pallas.core.nf4 import ZERO
from riftco.pallas.nf4.layout import BLOCK_SIZES

__all__ = ["from_bitsandbytes", "from_reference", "to_bitsandbytes"]

# ------------------------------------------------------------------------------------------------ low nibble first


def from_reference(
    codes: Any,
    shape: tuple[int, int],
    *,
    block_size: int = 64,
    scales: Any = None,
    scale_codes: Any = None,
    group_scales: Any = None,
    offset: Any = None,
    group_size: int = 256,
) -> NF4Array:
    """A weight in the NF4 layout of the `riftco-transformer` package.

    That layout has the first entry of a pair in the low nibble, and its double quantisation is linear: the scale of a
    block is `offset + group_scale · (code - 128) / 127`. The decoded values are kept bit for bit. What is lost is
    memory: linear second-level scales have no place in bitsandbytes' format, so double-quantised ones are stored as
    float32 (4.5 bits an entry for blocks of 64, not 4.13).

    Args:
        codes: uint8 [ceil(out·in / 2)]; the high nibble that an odd count leaves over is 0.
        shape: (out, in).
        block_size: entries of the flattened rows that share a scale; a power of two from 32 to 4096.
        scales: float32 [blocks]; or else the four that follow.
        scale_codes: uint8 [blocks], 1 to 255.
        group_scales: float32 [ceil(blocks / group_size)].
        offset: float32.
        group_size: scales that share a second-level one; a power of two from 32 to 4096.

    Raises:
        ShapeError, DTypeError, ConfigError: if the arguments do not fit. DomainError: for scales that are negative or
            not finite, a code of 0 among `scale_codes`, a spare nibble that is not 0, or a block of scale 0 with codes
            other than that of 0.
    """
    who = "from_reference"
    shape, count, blocks = checked_size(who, shape, block_size)
    if group_size not in BLOCK_SIZES:
        raise ConfigError(f"{who}: group_size must be a power of two from 32 to 4096; got {group_size!r}.")
    packed = _typed(who, "codes", codes, np.uint8, -(-count // 2))
    if count % 2 and packed[-1] >> 4:
        raise DomainError(f"{who}: the spare nibble of an odd count must be 0; got {packed[-1] >> 4}.")
    second = (scale_codes, group_scales, offset)
    if (scales is None) == any(x is None for x in second) or (
        scales is not None and any(x is not None for x in second)
    ):
        raise ConfigError(f"{who}: either scales, or scale_codes, group_scales and offset must be given.")
    if scales is not None:
        maxima = _scales(who, "scales", scales, blocks)
        entries = np.stack([packed & 15, packed >> 4], 1).reshape(-1)[:count]
        if (entries[np.repeat(maxima == 0, block_size)[:count]] != ZERO).any():
            raise DomainError(f"{who}: a block of scale 0 must have only code {ZERO}; it has others.")
    else:
        numbers = _typed(who, "scale_codes", scale_codes, np.uint8, blocks)
        if not numbers.all():
            raise DomainError(f"{who}: scale_codes must be 1 to 255; got 0.")
        groups = _scales(who, "group_scales", group_scales, -(-blocks // group_size))
        (mean,) = _scales(who, "offset", offset, 1)
        linear = (np.arange(256, dtype=np.float32) - np.float32(128)) / np.float32(127)
        with np.errstate(over="ignore"):
            maxima = nested_maxima(linear, numbers, groups, group_size, mean)
        maxima = np.clip(maxima, np.float32(0), np.finfo(np.float32).max)
    swapped = with_spare_zero((packed << 4) | (packed >> 4), count)
    return NF4Array(jnp.asarray(swapped), jnp.asarray(maxima), None, None, None, shape, int(block_size))


def _typed(who: str, name: str, x: Any, dtype: Any, count: int) -> np.ndarray:
    x = np.frombuffer(x, np.uint8) if isinstance(x, bytes | bytearray) else as_array(who, name, x)
    if x.dtype != dtype:
        raise DTypeError(f"{who}: {name} must be {np.dtype(dtype)}; got {x.dtype}.")
    if x.size != count:
        raise ShapeError(f"{who}: {name} must have {count} entries; got {x.size}.")
    return x.reshape(-1)


def _scales(who: str, name: str, x: Any, count: int) -> np.ndarray:
    x = _typed(who, name, np.float32(x) if isinstance(x, int | float) else x, np.float32, count)
    if not (np.isfinite(x) & (x >= 0)).all():
        raise DomainError(f"{who}: {name} must be finite and not negative; they are not.")
    return x
