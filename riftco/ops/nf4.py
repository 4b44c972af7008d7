"""4-bit NormalFloat weights (QLoRA): how they are packed, and the linear layer over them.

The canonical form is that of bitsandbytes, byte for byte. The kernels behind pallas/dispatch.py read another order of
the same codes (pallas/nf4/layout.py). A packed weight is never differentiated and never kept in a wider form.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from riftco.autodiff.box import Box, unbox
from riftco.autodiff.bridge import without_jax_derivatives
from riftco.autodiff.tape import Op
from riftco.errors import ConfigError, DTypeError, GradError, ShapeError, UnsupportedError
from riftco.ops import validate
from riftco.ops.linalg import add_bias
from riftco.ops.nf4_blocks import (
    PAIRS,
    blocks_of,
    dynamic_map,
    exact_sum,
    hidden_zero,
    look_up,
    middles,
    scaled_blocks,
    spread,
)
from riftco.ops.shape import reshape
from riftco.pallas import dispatch
from riftco.pallas.core.nf4 import CODES, ZERO
from riftco.pallas.core.sizes import ceil_div
from riftco.pallas.nf4 import layout
from riftco.tree import byte_count, describe
from riftco.types import Array

NESTED_BLOCK = 256  # absolute maxima that share a second-level one
LARGEST = 2.0**126  # beyond it the reciprocal of a block's maximum is no normal float32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "absmax", "absmax_codes", "nested_absmax", "offset"],
    meta_fields=["shape", "block_size", "layout"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class NF4Array:
    """A weight [out, in] in 4 bits: each entry is one of 16 numbers times the absolute maximum of its block.

    Blocks are `block_size` entries of the flattened rows and may cross from row to row. The maxima are held either as
    `absmax`, or (double quantisation) as `offset + dynamic_map()[absmax_codes] · nested_absmax`, one `nested_absmax`
    for 256 of them. A pytree whose leaves are the arrays that are there; weights of several layers may be stacked along
    a leading axis of every leaf, and `scan` or `vmap` over it gives one layer's weight: `shape` is always one weight's.

    Args:
        codes: uint8 [ceil(out·in / 2)], the first entry of each pair in the high nibble; [out, bytes] in "halves".
        absmax: float32 [blocks], or None.
        absmax_codes: uint8 [blocks], or None.
        nested_absmax: float32 [ceil(blocks / 256)], or None.
        offset: float32 scalar, or None.
        shape: (out, in).
        block_size: entries that share a maximum.
        layout: "linear", the canonical order, or "halves", the order that the kernels read (`pack_for_kernels`).
    """

    codes: Any
    absmax: Any
    absmax_codes: Any
    nested_absmax: Any
    offset: Any
    shape: tuple[int, int]
    block_size: int
    layout: str = "linear"

    @property
    def double_quant(self) -> bool:
        """Whether the maxima are quantised as well."""
        return self.absmax_codes is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return byte_count(self)

    def absmax_values(self) -> Any:
        """The absolute maximum of each block, float32 [blocks]; leading axes of stacked weights stay."""
        if not self.double_quant:
            return self.absmax
        product = look_up(dynamic_map(), self.absmax_codes) * spread(
            self.nested_absmax, NESTED_BLOCK, self.absmax_codes.shape[-1]
        )
        offset = jnp.broadcast_to(self.offset[..., None], product.shape)
        # Product and sum are two roundings in this format, which compilers that see both fuse into one. They do not see
        # through integers.
        bits = lax.bitcast_convert_type(product, jnp.int32) + hidden_zero(offset)
        return lax.bitcast_convert_type(bits, jnp.float32) + offset


# ------------------------------------------------------------------------------------------------ quantising


def quantize_nf4(w: Array, *, block_size: int = 64, double_quant: bool = True) -> NF4Array:
    """Pack a weight in 4 bits, byte for byte as bitsandbytes does: the nearest of 16 numbers times a block's maximum.

    Blocks run along the flattened rows; the last may be partial. An entry times the reciprocal of its block's absolute
    maximum takes the nearest code, the lower on a tie. With `double_quant` the maxima less their mean are quantised
    too, to 8 bits in blocks of 256. All in float32; numbers below the smallest normal one count as 0.

    Args:
        w: floating [out, in], not empty.
        block_size: a power of two from 32 to 4096.
        double_quant: about 4.13 bits an entry instead of 4.5 for blocks of 64.

    Returns:
        An `NF4Array` in canonical order.

    Raises:
        ShapeError, DTypeError, ConfigError: if the arguments do not fit. DomainError: for NaN, infinity or more than
            2^126 in concrete data. GradError: if w is being differentiated.

    Gradient:
        none: use riftco.stop_gradient.

    Source:
        Dettmers et al. 2023, arXiv:2305.14314, section 3 and appendix E.
    """
    who = "quantize_nf4"
    if isinstance(w, Box):
        raise GradError(
            f"{who}: a value being differentiated ({w.origin}) cannot be quantised, which has no derivative; quantise "
            "before differentiating, or use riftco.stop_gradient."
        )
    w = validate.floating(who, "w", w)
    validate.require(who, w.ndim == 2 and 0 not in w.shape, "w must be [out, in] and not empty", list(w.shape))
    double_quant = validate.boolean(who, "double_quant", double_quant)
    if validate.index(block_size) not in layout.BLOCK_SIZES:
        raise ConfigError(f"{who}: block_size must be a power of two from 32 to 4096; got {block_size!r}.")
    validate.domain(who, w, lambda x: ~(abs(x) <= LARGEST), "w must be finite and at most 2^126")
    return _quantize(w, int(block_size), double_quant)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(w: Any, block_size: int, double_quant: bool) -> NF4Array:
    shape = (int(w.shape[0]), int(w.shape[1]))
    scaled, absmax = scaled_blocks(blocks_of(jnp.reshape(w.astype(jnp.float32), (-1,)), block_size))
    codes = jnp.zeros(scaled.shape, jnp.uint8)
    for middle in middles(CODES):
        codes = codes + (scaled > middle).astype(jnp.uint8)
    count = shape[0] * shape[1]
    codes = lax.slice_in_dim(jnp.reshape(codes, (-1,)), 0, count)
    pairs = jnp.reshape(jnp.pad(codes, (0, count % 2), constant_values=ZERO), (-1, 2))
    packed = (pairs[:, 0] << 4) | pairs[:, 1]
    if not double_quant:
        return NF4Array(packed, absmax, None, None, None, shape, block_size)
    total = exact_sum(absmax)
    # Division by a constant would become a product with its reciprocal, which rounds otherwise.
    offset = total / (absmax.shape[0] + hidden_zero(total)).astype(jnp.float32)
    rest, nested = scaled_blocks(blocks_of(absmax - jnp.broadcast_to(offset, absmax.shape), NESTED_BLOCK))
    absmax_codes = jnp.searchsorted(middles(dynamic_map()), rest.reshape(-1), side="left").astype(jnp.uint8)
    absmax_codes = lax.slice_in_dim(absmax_codes, 0, absmax.shape[0])
    return NF4Array(packed, None, absmax_codes, nested, offset, shape, block_size)


def dequantize_nf4(q: NF4Array, dtype: Any = jnp.float32) -> Array:
    """The weight [out, in] of a packed one: code times maximum in float32, rounded once to `dtype`.

    Args:
        q: of either layout; one weight, not a stack.
        dtype: a floating dtype.

    Raises:
        ShapeError: if the arrays do not have the sizes that `q.shape` asks for. DTypeError: for another dtype.

    Gradient:
        none: a packed weight is a constant.
    """
    who = "dequantize_nf4"
    _check(who, q)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise DTypeError(f"{who}: dtype must be floating; got {jnp.dtype(dtype).name}.")
    return _dequantize(q, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(q: NF4Array, dtype: Any) -> Any:
    count = q.shape[0] * q.shape[1]
    numbers = jnp.reshape(look_up(PAIRS, _linear_codes(q)), (-1,))
    blocks = blocks_of(lax.slice_in_dim(numbers, 0, count), q.block_size)
    blocks = blocks * jnp.broadcast_to(q.absmax_values()[:, None], blocks.shape)
    return jnp.reshape(lax.slice_in_dim(jnp.reshape(blocks, (-1,)), 0, count), q.shape).astype(dtype)


# ------------------------------------------------------------------------------------------------ layouts


def _linear_codes(q: NF4Array) -> Any:
    return q.codes if q.layout == "linear" else layout.from_halves(q.codes, *q.shape)


def _half_codes(q: NF4Array) -> Any:
    return q.codes if q.layout == "halves" else layout.to_halves(q.codes, *q.shape)


def pack_for_kernels(q: NF4Array) -> NF4Array:
    """The same weight with its codes in the order that the kernels read, so that no call permutes them.

    A permutation, up to the padding of rows to whole tiles; `unpack_from_kernels` is its inverse.
    """
    _check("pack_for_kernels", q)
    return dataclasses.replace(q, codes=jax.jit(_half_codes)(q), layout="halves")


def unpack_from_kernels(q: NF4Array) -> NF4Array:
    """The same weight with its codes in canonical order; the inverse of `pack_for_kernels`."""
    _check("unpack_from_kernels", q)
    return dataclasses.replace(q, codes=jax.jit(_linear_codes)(q), layout="linear")


def _check(who: str, q: Any) -> None:
    """Refuse what is no packed weight, or one whose arrays are not those of its shape."""
    if not isinstance(q, NF4Array):
        raise DTypeError(f"{who}: q must be an NF4Array; got {type(q).__name__}. Make one with quantize_nf4.")
    leaves = jax.tree_util.tree_leaves(q)
    if any(isinstance(leaf, Box) for leaf in leaves):
        raise GradError(
            f"{who}: a packed weight cannot be differentiated, its absolute maxima no more than its codes; pass it in "
            "an argument that is not (argnums)."
        )
    out, width = q.shape
    blocks = ceil_div(out * width, q.block_size)
    codes = (ceil_div(out * width, 2),) if q.layout == "linear" else (out, layout.padded(width) // 2)
    if q.double_quant:
        wanted = [
            ("uint8", codes),
            ("uint8", (blocks,)),
            ("float32", (ceil_div(blocks, NESTED_BLOCK),)),
            ("float32", ()),
        ]
    else:
        wanted = [("uint8", codes), ("float32", (blocks,))]
    if [(str(leaf.dtype), tuple(leaf.shape)) for leaf in leaves] != wanted:
        expected = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in wanted)
        raise ShapeError(
            f"{who}: the arrays of q must be {expected} for a weight {list(q.shape)} in blocks of {q.block_size}, "
            f"{q.layout} order; got {', '.join(map(describe, leaves))}. Index a stack of weights first."
        )


# ------------------------------------------------------------------------------------------------ the linear layer
# One op with two directions, each the adjoint of the other: rows times Ŵᵀ, and (`back`) rows times Ŵ. The residual is
# the packed weight, at every order.


@dataclasses.dataclass(frozen=True)
class NF4Call:
    """The static part of one call of `nf4_linear`."""

    how: str
    interpret: Any = False


def _matmul_impl(x: Any, q: NF4Array, *, back: bool, call: NF4Call) -> Any:
    if call.how == "plain":
        return lax.dot_general(x, _dequantize(q, x.dtype), (((1,), (0 if back else 1,)), ((), ())))
    scales = jnp.reshape(q.absmax_values(), (q.shape[0], -1))

    def kernel(x: Any, codes: Any, scales: Any) -> Any:
        if back:
            return dispatch.nf4_input_gradient(call.how, x, codes, scales, q.shape[1], q.block_size, call.interpret)
        return dispatch.nf4_matmul(call.how, x, codes, scales, q.block_size, call.interpret)

    return without_jax_derivatives(kernel, f"nf4_linear[{call.how}]")(x, _half_codes(q), scales)


_matmul = Op(
    "nf4_matmul",
    impl=_matmul_impl,
    fwd=lambda x, q, back, call: (_matmul(x, q, back=back, call=call), q),
    bwd=lambda q, ct, back, call: (_matmul(ct, q, back=not back, call=call), None),
)


def nf4_linear(
    x: Array,
    q: NF4Array,
    bias: Array | None = None,
    *,
    implementation: str | None = None,
    interpret: Any = False,
) -> Array:
    """`x Ŵᵀ + b` over the last axis, for a weight Ŵ held in 4 bits.

    Args:
        x: floating array [..., in].
        q: the packed weight [out, in], of either layout.
        bias: [out], of x's dtype, or None.
        implementation: "plain" decodes the weight to x's dtype, one rounding, for as long as the product takes;
            "pallas_tpu" and "pallas_triton" are kernels. None takes the device's preferred one that supports the call
            (`riftco doctor --kernels`).
        interpret: True runs a kernel by its interpreter, on any device; an interpreter's own parameters are handed
            to it. "plain" has none and refuses it.

    Returns:
        [..., out] in x's dtype.

    Raises:
        ShapeError, DTypeError, ConfigError: if arguments do not fit. UnsupportedError (a NotImplementedError): if a
            named implementation cannot run the call here, with the reason. GradError: if q is being differentiated.

    Gradient:
        dx = ct Ŵ, db = sum of ct over the leading axes; the weight has none. Saves the packed weight and nothing else.
        Any order.

    Source:
        Dettmers et al. 2023, arXiv:2305.14314, eq. 5.
    """
    who = "nf4_linear"
    x = validate.floating(who, "x", x)
    _check(who, q)
    validate.same_dtype(who, x, *(() if bias is None else (validate.floating(who, "bias", bias),)))
    fits = x.ndim >= 1 and x.shape[-1] == q.shape[1]
    validate.require(who, fits, "x must be [..., in] for a weight [out, in]", f"{list(x.shape)} and {list(q.shape)}")
    if implementation == "blockwise":
        raise UnsupportedError(f"{who}[blockwise]: there is no such rule; use None, 'plain' or a kernel.")
    plain = unbox(x)
    how = dispatch.choose(who, implementation, "plain", interpret, (plain,), plain, q.shape, q.block_size)
    out = _matmul(reshape(x, (-1, x.shape[-1])), q, back=False, call=NF4Call(how, interpret))
    if bias is not None:
        out = add_bias(out, bias)
    return reshape(out, (*x.shape[:-1], q.shape[0]))
