"""NF4 matmul on NVIDIA GPUs, by Triton: fused with the decoding for few rows, decoded first for many.

Few rows leave the matmul bound by the weight's bytes, so each program decodes its tiles between load and product and
the weight never exists elsewhere. Many rows would decode every tile many times; then one pass writes the weight in x's
dtype, a temporary that lives until XLA's product has read it. The sum over the contracted axis may be parted among
programs; the parts are float32 and are added in a fixed order, so that runs repeat bit for bit.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from riftco.pallas import dispatch
from riftco.pallas.call import shape_like, triton_call
from riftco.pallas.core import nf4
from riftco.pallas.core.sizes import ceil_div
from riftco.pallas.nf4 import layout

DTYPES = ("bfloat16", "float16", "float32")
ROWS = 64  # rows of the weight in a tile

# The most rows of x that the fused kernel takes, and the programs that fill the chip; other kinds take the default.
FUSED_ROWS = {"NVIDIA H200": 64}
PROGRAMS = {"NVIDIA H200": 2 * 132}
DEFAULT_FUSED_ROWS = 64
DEFAULT_PROGRAMS = 256
MAX_PARTS = 16


def unsupported(x: Any, shape: tuple[int, int], block_size: int) -> str | None:
    """Why these kernels cannot multiply x [..., in] by a weight [out, in], as half a sentence; None if they can."""
    if x.dtype.name not in DTYPES:
        return f"x must be bfloat16, float16 or float32; got {x.dtype.name}"
    return layout.misfit(x, shape, block_size)


def matmul(x: Any, codes: Any, scales: Any, *, block_size: int, interpret: Any = False) -> Any:
    """The product of x and the decoded weight, transposed.

    Args:
        x: bfloat16, float16 or float32 [M, K].
        codes: uint8 [N, padded(K) / 2], in the order of `layout`.
        scales: float32 [N, K / block_size], the absolute maxima of the blocks.
        block_size: columns that share a scale.
        interpret: run by the HLO interpreter.

    Returns:
        [M, N] in x's dtype, summed in float32.
    """
    m, k = x.shape
    n = codes.shape[0]
    if _is_fused(m, x, codes):
        parts, each = _parts(ceil_div(n, ROWS) * ceil_div(m, _row_tile(m)), _chunks(k, block_size, x.dtype), x, codes)
        grid = (ceil_div(n, ROWS), ceil_div(m, _row_tile(m)), parts)
        kernel = functools.partial(_matmul_kernel, each=each, tile=_row_tile(m), block_size=block_size)
        return _fused(kernel, "nf4_matmul", grid, (m, n), x, codes, scales, interpret)
    w = dequantize(codes, scales, width=k, block_size=block_size, dtype=x.dtype, interpret=interpret)
    return _product(x, w, 1)


def input_gradient(dy: Any, codes: Any, scales: Any, *, width: int, block_size: int, interpret: Any = False) -> Any:
    """The product of dy [M, N] and the decoded weight [N, width]: [M, width] in dy's dtype; see `matmul`."""
    m, n = dy.shape
    if _is_fused(m, dy, codes):
        chunks = _chunks(width, block_size, dy.dtype)
        parts, each = _parts(chunks * ceil_div(m, _row_tile(m)), ceil_div(n, ROWS), dy, codes)
        grid = (chunks, ceil_div(m, _row_tile(m)), parts)
        kernel = functools.partial(_gradient_kernel, each=each, tile=_row_tile(m), block_size=block_size)
        return _fused(kernel, "nf4_input_gradient", grid, (m, width), dy, codes, scales, interpret)
    w = dequantize(codes, scales, width=width, block_size=block_size, dtype=dy.dtype, interpret=interpret)
    return _product(dy, w, 0)


def dequantize(codes: Any, scales: Any, *, width: int, block_size: int, dtype: Any, interpret: Any = False) -> Any:
    """The weight [N, width] in `dtype`, decoded in one pass."""
    n = codes.shape[0]
    call = triton_call(
        functools.partial(_dequantize_kernel, block_size=block_size),
        name="nf4_dequantize",
        grid=(ceil_div(n, ROWS), _chunks(width, block_size, dtype)),
        out_shape=shape_like((n, width), dtype, codes, scales),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )
    return call(codes, scales, jnp.asarray(nf4.CODES))


# ------------------------------------------------------------------------------------------------ schedule
# A chunk is a run of bytes whose high nibbles share one scale a row, and whose low nibbles share another.


def _is_fused(m: int, *arrays: Any) -> bool:
    return m <= FUSED_ROWS.get(dispatch.current_target(*arrays).kind, DEFAULT_FUSED_ROWS)


def _row_tile(m: int) -> int:
    return 16 if m <= 16 else 32 if m <= 32 else 64


def _chunk(block_size: int, dtype: Any) -> int:
    # A product of float32 is unrolled into multiplications of registers: a short one compiles and fits.
    return min(block_size, 32 if dtype == jnp.float32 else 64)


def _chunks(width: int, block_size: int, dtype: Any) -> int:
    return layout.padded(width) // 2 // _chunk(block_size, dtype)


def _parts(programs: int, steps: int, *arrays: Any) -> tuple[int, int]:
    """Into how many parts to cut a sum of `steps` so that the chip is full, and the steps of one part."""
    wanted = PROGRAMS.get(dispatch.current_target(*arrays).kind, DEFAULT_PROGRAMS) // max(1, programs)
    each = ceil_div(steps, max(1, min(wanted, steps // 4, MAX_PARTS)))
    return ceil_div(steps, each), each


def _fused(kernel: Any, name: str, grid: Any, shape: Any, x: Any, codes: Any, scales: Any, interpret: Any) -> Any:
    parts = grid[2]
    call = triton_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=shape_like((parts, *shape), x.dtype if parts == 1 else jnp.float32, x, codes, scales),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
    )
    out = call(x, codes, scales, jnp.asarray(nf4.CODES))
    return out[0] if parts == 1 else jnp.sum(out, axis=0).astype(x.dtype)


def _product(x: Any, w: Any, axis: int) -> Any:
    out = lax.dot_general(
        x, w, (((1,), (axis,)), ((), ())), precision=_precision(x.dtype), preferred_element_type=jnp.float32
    )
    return out.astype(x.dtype)


def _precision(dtype: Any) -> Any:
    # TF32 would drop 13 bits of a float32.
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


# ------------------------------------------------------------------------------------------------ kernels


def _tile(codes: Any, scales: Any, table: Any, rows: Any, chunk: Any, block_size: int, dtype: Any) -> Any:
    """The weights of both nibbles of a chunk, [ROWS, chunk] each, and the first column of each; 0 outside."""
    n, size = codes.shape[0], _chunk(block_size, dtype)
    first = chunk * size
    inside = rows < n
    columns = first + jnp.arange(size, dtype=jnp.int32)
    mask = jnp.broadcast_to(inside[:, None], (ROWS, size))
    packed = pltriton.load(codes.at[rows[:, None], columns[None, :]], mask=mask, other=0)
    high = first // layout.HALF * layout.TILE + first % layout.HALF
    starts = (high, high + layout.HALF)

    def weights(numbers: Any, start: Any) -> Any:
        # Columns of padding hold the code of 0; their scale must only be finite.
        block = start // block_size
        mask = inside & (block < scales.shape[1])
        scale = pltriton.load(scales.at[rows, block], mask=mask, other=0.0)
        return nf4.rounded(numbers, jnp.broadcast_to(scale[:, None], numbers.shape), dtype)

    numbers = nf4.decode(packed, nf4.ref_gather(table))
    return tuple(weights(a, b) for a, b in zip(numbers, starts, strict=True)), starts


def _load(ref: Any, rows: Any, columns: Any) -> Any:
    mask = (rows < ref.shape[0])[:, None] & (columns < ref.shape[1])[None, :]
    return pltriton.load(ref.at[rows[:, None], columns[None, :]], mask=mask, other=0.0)


def _matmul_kernel(
    x: Any, codes: Any, scales: Any, table: Any, out: Any, *, each: int, tile: int, block_size: int
) -> None:
    """One [tile, ROWS] of the output, over `each` chunks of columns."""
    part = pl.program_id(2)
    rows = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    x_rows = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    size, total = _chunk(block_size, x.dtype), _chunks(x.shape[1], block_size, x.dtype)

    def step(chunk: Any, acc: Any) -> Any:
        weights, starts = _tile(codes, scales, table, rows, chunk, block_size, x.dtype)
        for w, start in zip(weights, starts, strict=True):
            operand = _load(x, x_rows, start + jnp.arange(size, dtype=jnp.int32))
            acc += pltriton.dot(operand, w, trans_b=True, precision=_precision(x.dtype))
        return acc

    end = jnp.minimum((part + 1) * each, total)
    acc = lax.fori_loop(part * each, end, step, jnp.zeros((tile, ROWS), jnp.float32))
    mask = (x_rows < out.shape[1])[:, None] & (rows < out.shape[2])[None, :]
    pltriton.store(out.at[part, x_rows[:, None], rows[None, :]], acc.astype(out.dtype), mask=mask)


def _gradient_kernel(
    dy: Any, codes: Any, scales: Any, table: Any, out: Any, *, each: int, tile: int, block_size: int
) -> None:
    """Two [tile, chunk] of the output, one for each nibble, over `each` tiles of rows of the weight."""
    chunk, part = pl.program_id(0), pl.program_id(2)
    dy_rows = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    size = _chunk(block_size, dy.dtype)

    def step(i: Any, sums: Any) -> Any:
        rows = i * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        weights, _ = _tile(codes, scales, table, rows, chunk, block_size, dy.dtype)
        operand = _load(dy, dy_rows, rows)
        return tuple(
            acc + pltriton.dot(operand, w, precision=_precision(dy.dtype)) for acc, w in zip(sums, weights, strict=True)
        )

    end = jnp.minimum((part + 1) * each, ceil_div(dy.shape[1], ROWS))
    zeros = jnp.zeros((tile, size), jnp.float32)
    sums = lax.fori_loop(part * each, end, step, (zeros, zeros))
    first = chunk * size // layout.HALF * layout.TILE + chunk * size % layout.HALF
    for acc, start in zip(sums, (first, first + layout.HALF), strict=True):
        columns = start + jnp.arange(size, dtype=jnp.int32)
        mask = (dy_rows < out.shape[1])[:, None] & (columns < out.shape[2])[None, :]
        pltriton.store(out.at[part, dy_rows[:, None], columns[None, :]], acc.astype(out.dtype), mask=mask)


def _dequantize_kernel(codes: Any, scales: Any, table: Any, out: Any, *, block_size: int) -> None:
    """Two [ROWS, chunk] of the weight, one for each nibble."""
    rows = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    weights, starts = _tile(codes, scales, table, rows, pl.program_id(1), block_size, out.dtype)
    for w, start in zip(weights, starts, strict=True):
        columns = start + jnp.arange(_chunk(block_size, out.dtype), dtype=jnp.int32)
        mask = (rows < out.shape[0])[:, None] & (columns < out.shape[1])[None, :]
        pltriton.store(out.at[rows[:, None], columns[None, :]], w, mask=mask)
