"""Packed 4-bit weights from and for other projects: bitsandbytes' tensors, and another project's NF4 layout."""

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco.errors import BundleError, ConfigError, DomainError, DTypeError, ShapeError, UnsupportedError
from riftco.ops.nf4 import NESTED_BLOCK, NF4Array, unpack_from_kernels
from riftco.ops.nf4_blocks import dynamic_map
from riftco.pallas.core.nf4 import CODES, ZERO
from riftco.pallas.nf4.layout import BLOCK_SIZES

_STATE = "quant_state.bitsandbytes__"
_DTYPES = ("bfloat16", "float16", "float32")


def _array(who: str, name: str, x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{who}: {name} must be an array that NumPy can read; got {type(x).__name__}.") from error


def _size(who: str, shape: Any, block_size: Any) -> tuple[tuple[int, int], int, int]:
    """The shape, its entries and its blocks."""
    shape = tuple(shape)
    if len(shape) != 2 or not all(isinstance(n, int | np.integer) and n > 0 for n in shape):
        raise ShapeError(f"{who}: the weight must be [out, in] and not empty; got {list(shape)}.")
    if block_size not in BLOCK_SIZES:
        raise ConfigError(f"{who}: the block size must be a power of two from 32 to 4096; got {block_size!r}.")
    out, width = int(shape[0]), int(shape[1])
    return (out, width), out * width, -(-out * width // int(block_size))


def _maxima(table: np.ndarray, codes: np.ndarray, nested: np.ndarray, size: int, offset: np.float32) -> np.ndarray:
    """First-level scales of second-level ones: product and sum are two roundings."""
    return table[codes] * np.repeat(nested, size)[: codes.size] + offset


# ------------------------------------------------------------------------------------------------ bitsandbytes


def to_bitsandbytes(q: NF4Array, name: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The tensors under which bitsandbytes and transformers store a packed weight.

    Args:
        q: one weight, of either layout.
        name: of the weight, such as "model.layers.0.mlp.up_proj.weight".
        dtype: what the reader is to decode the weight to: "bfloat16", "float16" or "float32".

    Returns:
        NumPy arrays by name: `name`, `name.absmax`, `name.quant_map`, `name.quant_state.bitsandbytes__nf4`, and, with
        double quantisation, `name.nested_absmax` and `name.nested_quant_map`.

    Raises:
        ConfigError: for another dtype. ShapeError: if `q` is a stack of weights.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"to_bitsandbytes: dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}.")
    q = unpack_from_kernels(q)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": q.block_size, "dtype": dtype, "shape": list(q.shape)}
    tensors = {"absmax": q.absmax_codes if q.double_quant else q.absmax, "quant_map": CODES}
    if q.double_quant:
        tensors |= {"nested_absmax": q.nested_absmax, "nested_quant_map": dynamic_map()}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(q.offset)}
    tensors[f"{_STATE}nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return {name: np.array(q.codes)[:, None], **{f"{name}.{key}": np.array(x) for key, x in tensors.items()}}


def from_bitsandbytes(mapping: Mapping[str, Any], name: str) -> NF4Array:
    """The packed weight among tensors that bitsandbytes or transformers wrote.

    Nothing is quantised again: the decoded values are those that bitsandbytes decodes, and so are the bytes, save that
    maxima quantised with another table or block than `quantize_nf4` uses become float32.

    Args:
        mapping: arrays that NumPy can read, by name, as `to_bitsandbytes` gives them; torch tensors on the CPU are
            such. The facts that are no tensors may be packed in one, or stand under names of their own.
        name: of the weight.

    Raises:
        BundleError: if a tensor is missing or the packed facts cannot be read. UnsupportedError: for a type other than
            nf4, or maxima of another type than float32. ShapeError, ConfigError, DTypeError: if the tensors do not fit
            each other.
    """
    who = f"from_bitsandbytes: {name}"
    state = _state(who, mapping, name)

    def tensor(key: str, dtype: Any = None) -> np.ndarray:
        full = f"{name}.{key}" if key else name
        if full not in mapping:
            raise BundleError(f"{who}: the tensor {full} must be there; it is not.")
        x = _array(who, full, mapping[full])
        return np.ascontiguousarray(x).reshape(-1) if dtype is None else x.reshape(-1).astype(dtype)

    if state.get("quant_type") != "nf4":
        raise UnsupportedError(f"{who}: the type must be nf4; got {state.get('quant_type')!r}.")
    shape, count, blocks = _size(who, state.get("shape") or (), state.get("blocksize"))
    if not np.allclose(tensor("quant_map", np.float32), CODES, rtol=0, atol=1e-6):
        raise UnsupportedError(f"{who}: quant_map must be the 16 numbers of NF4; it holds others.")
    # The bytes may be stored under another dtype (bitsandbytes' quant_storage).
    codes, absmax = tensor("").view(np.uint8), tensor("absmax")
    nested = f"{name}.nested_absmax" in mapping
    if codes.size != -(-count // 2) or absmax.size != blocks or (nested and absmax.dtype != np.uint8):
        raise ShapeError(
            f"{who}: a weight {list(shape)} in blocks of {state['blocksize']} must have {-(-count // 2)} bytes of "
            f"codes and {blocks} maxima{', in bytes' if nested else ''}; got {codes.size} and "
            f"{absmax.dtype}[{absmax.size}]."
        )
    block_size = int(state["blocksize"])
    packed = jnp.asarray(_with_spare_zero(codes, count))
    if not nested:
        return NF4Array(packed, jnp.asarray(absmax.astype(np.float32)), None, None, None, shape, block_size)
    size, kind = state.get("nested_blocksize"), state.get("nested_dtype")
    if kind != "float32" or not isinstance(size, int) or size <= 0 or state.get("nested_offset") is None:
        raise UnsupportedError(
            f"{who}: nested maxima must be float32, with a block size and an offset; got {kind}, {size} and "
            f"{state.get('nested_offset')}."
        )
    table, second = tensor("nested_quant_map", np.float32), tensor("nested_absmax", np.float32)
    if table.size != 256 or second.size != -(-blocks // size):
        raise ShapeError(
            f"{who}: nested_quant_map must have 256 numbers and nested_absmax {-(-blocks // size)}; got {table.size} "
            f"and {second.size}."
        )
    # An offset of any floating type stands for its value.
    offset = np.float32(float(state["nested_offset"]))
    if size == NESTED_BLOCK and np.array_equal(table, dynamic_map()):
        arrays = (jnp.asarray(absmax), jnp.asarray(second), jnp.asarray(offset))
        return NF4Array(packed, None, *arrays, shape, block_size)
    maxima = _maxima(table, absmax, second, size, offset)
    return NF4Array(packed, jnp.asarray(maxima), None, None, None, shape, block_size)


def _state(who: str, mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The facts about a weight that are no tensors."""
    start = f"{name}.{_STATE}"
    packed = [key for key in mapping if key.startswith(start)]
    if not packed:
        keys = ("quant_type", "blocksize", "shape", "nested_blocksize", "nested_dtype", "nested_offset")
        state = {key: mapping[f"{name}.{key}"] for key in keys if f"{name}.{key}" in mapping}
        if "quant_type" in state:
            return state
        raise BundleError(f"{who}: {start}nf4 must be there; it is not.")
    if len(packed) > 1 or packed[0] != f"{start}nf4":
        raise UnsupportedError(f"{who}: the type must be nf4; got {', '.join(key[len(start) :] for key in packed)}.")
    try:
        state = json.loads(_array(who, packed[0], mapping[packed[0]]).astype(np.uint8).tobytes())
    except ValueError as error:
        raise BundleError(f"{who}: {packed[0]} must hold JSON; it does not: {error}.") from error
    if not isinstance(state, dict):
        raise BundleError(f"{who}: {packed[0]} must hold a JSON object; got {type(state).__name__}.")
    return state


def _with_spare_zero(codes: np.ndarray, count: int) -> np.ndarray:
    """The codes, the spare nibble of an odd count set to the code of 0."""
    codes = codes.copy()
    if count % 2:
        codes[-1] = (codes[-1] & 0xF0) | ZERO
    return codes


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
    shape, count, blocks = _size(who, shape, block_size)
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
            maxima = _maxima(linear, numbers, groups, group_size, mean)
        maxima = np.clip(maxima, np.float32(0), np.finfo(np.float32).max)
    swapped = _with_spare_zero((packed << 4) | (packed >> 4), count)
    return NF4Array(jnp.asarray(swapped), jnp.asarray(maxima), None, None, None, shape, int(block_size))


def _typed(who: str, name: str, x: Any, dtype: Any, count: int) -> np.ndarray:
    x = np.frombuffer(x, np.uint8) if isinstance(x, bytes | bytearray) else _array(who, name, x)
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
