"""bitsandbytes' tensors for a packed weight: transformers stores 4-bit models so, and packed bundles are stored so."""

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco.errors import BundleError, ConfigError, DTypeError, ShapeError, UnsupportedError
from riftco.ops.nf4 import NESTED_BLOCK, NF4Array, unpack_from_kernels
from riftco.ops.nf4_blocks import dynamic_map
from riftco.pallas.core.nf4 import CODES, ZERO
from riftco.pallas.nf4.layout import BLOCK_SIZES

_STATE = "quant_state.bitsandbytes__"
_DTYPES = ("bfloat16", "float16", "float32")


def as_array(who: str, name: str, x: Any) -> np.ndarray:
    """Anything that NumPy can read, torch tensors among it."""
    try:
        return np.asarray(x)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{who}: {name} must be an array that NumPy can read; got {type(x).__name__}.") from error


def checked_size(who: str, shape: Any, block_size: Any) -> tuple[tuple[int, int], int, int]:
    """The shape, its entries and its blocks."""
    shape = tuple(shape)
    if len(shape) != 2 or not all(isinstance(n, int | np.integer) and n > 0 for n in shape):
        raise ShapeError(f"{who}: the weight must be [out, in] and not empty; got {list(shape)}.")
    if block_size not in BLOCK_SIZES:
        raise ConfigError(f"{who}: the block size must be a power of two from 32 to 4096; got {block_size!r}.")
    out, width = int(shape[0]), int(shape[1])
    return (out, width), out * width, -(-out * width // int(block_size))


def nested_maxima(
    table: np.ndarray, codes: np.ndarray, nested: np.ndarray, size: int, offset: np.float32
) -> np.ndarray:
    """First-level scales of second-level ones: product and sum are two roundings."""
    return table[codes] * np.repeat(nested, size)[: codes.size] + offset


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
        x = as_array(who, full, mapping[full])
        return np.ascontiguousarray(x).reshape(-1) if dtype is None else x.reshape(-1).astype(dtype)

    if state.get("quant_type") != "nf4":
        raise UnsupportedError(f"{who}: the type must be nf4; got {state.get('quant_type')!r}.")
    shape, count, blocks = checked_size(who, state.get("shape") or (), state.get("blocksize"))
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
    packed = jnp.asarray(with_spare_zero(codes, count))
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
    maxima = nested_maxima(table, absmax, second, size, offset)
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
        state = json.loads(as_array(who, packed[0], mapping[packed[0]]).astype(np.uint8).tobytes())
    except ValueError as error:
        raise BundleError(f"{who}: {packed[0]} must hold JSON; it does not: {error}.") from error
    if not isinstance(state, dict):
        raise BundleError(f"{who}: {packed[0]} must hold a JSON object; got {type(state).__name__}.")
    return state


def with_spare_zero(codes: np.ndarray, count: int) -> np.ndarray:
    """The codes, the spare nibble of an odd count set to the code of 0."""
    codes = codes.copy()
    if count % 2:
        codes[-1] = (codes[-1] & 0xF0) | ZERO
    return codes
