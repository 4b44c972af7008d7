"""NF4 matmul on TPU: one kernel whose decoded tile of the weight stays in VMEM while all rows of x pass by.

By the compiler's count of instructions, decoding a tile is dearer than reading it would be, so a tile is decoded once
for a chunk of rows: the grid runs over (chunks of rows, kept axis, contracted axis, tiles of rows), the last innermost,
and the sums of a whole chunk wait in float32. What NF4 saves here is memory.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from riftco.pallas import dispatch
from riftco.pallas.call import shape_like, tpu_call
from riftco.pallas.core import nf4
from riftco.pallas.core.sizes import ceil_div, round_up
from riftco.pallas.nf4 import layout

DTYPES = ("bfloat16", "float32")
ROWS = 256  # of x in a tile
MIN_ROWS = 8  # that Mosaic lays out in bfloat16
MAX_OUT = 512  # rows of the weight in a tile
VMEM_LIMIT = 48 * 1024 * 1024

# The most rows of x in a chunk: their sums and their output must fit in VMEM, which the kinds listed have least of.
MAX_ROWS = {"TPU v4": 1024}
DEFAULT_MAX_ROWS = 4096


def unsupported(x: Any, shape: tuple[int, int], block_size: int) -> str | None:
    """Why this kernel cannot multiply x [..., in] by a weight [out, in], as half a sentence; None if it can."""
    if x.dtype.name not in DTYPES:
        return f"x must be bfloat16 or float32, the floats that TPUs multiply; got {x.dtype.name}"
    return layout.misfit(x, shape, block_size)


def matmul(x: Any, codes: Any, scales: Any, *, block_size: int, interpret: Any = False) -> Any:
    """The product of x and the decoded weight, transposed.

    Args:
        x: bfloat16 or float32 [M, K].
        codes: uint8 [N, padded(K) / 2], in the order of `layout`.
        scales: float32 [N, K / block_size], the absolute maxima of the blocks.
        block_size: columns that share a scale.
        interpret: True for the HLO interpreter, an InterpretParams for the TPU one.

    Returns:
        [M, N] in x's dtype, summed in float32.
    """
    tiles = _tiles(x.shape[0], codes.shape[0], x.shape[1], block_size, x, codes)
    return _call("nf4_matmul", x, codes, scales, tiles, codes.shape[0], False, interpret)


def input_gradient(dy: Any, codes: Any, scales: Any, *, width: int, block_size: int, interpret: Any = False) -> Any:
    """The product of dy [M, N] and the decoded weight [N, width]: [M, width] in dy's dtype; see `matmul`."""
    tiles = _tiles(dy.shape[0], codes.shape[0], width, block_size, dy, codes)
    return _call("nf4_input_gradient", dy, codes, scales, tiles, width, True, interpret)


# ------------------------------------------------------------------------------------------------ schedule


class _Tiles(NamedTuple):
    """Sizes of tiles; `out` and `width` are of the weight, whichever axis is contracted."""

    rows: int
    chunk: int
    out: int
    width: int
    block_size: int


def _tiles(m: int, out: int, width: int, block_size: int, *arrays: Any) -> _Tiles:
    rows = min(ROWS, round_up(m, 16))
    chunks = ceil_div(m, MAX_ROWS.get(dispatch.current_target(*arrays).kind, DEFAULT_MAX_ROWS))
    chunk = round_up(ceil_div(m, chunks), rows)
    out_tile = round_up(ceil_div(out, ceil_div(out, MAX_OUT)), nf4.LANES)
    # Two layout tiles at a time, unless a third of a row would then be padding.
    whole = layout.padded(width)
    width_tile = 2 * layout.TILE if whole % (2 * layout.TILE) == 0 or whole > 8 * layout.TILE else layout.TILE
    return _Tiles(rows, chunk, out_tile, width_tile, block_size)


def _arranged(scales: Any, tiles: _Tiles) -> Any:
    """Scales as [n, scales of a tile, out], rows of the weight along lanes; 0 where the weight ends.

    A block of scales with few lanes would be stored with 128.
    """
    out, count = scales.shape
    each = max(1, tiles.width // tiles.block_size)
    scales = jnp.pad(scales, ((0, round_up(out, tiles.out) - out), (0, round_up(count, each) - count)))
    return jnp.transpose(scales.reshape(scales.shape[0], -1, each), (1, 2, 0))


def _call(
    name: str, x: Any, codes: Any, scales: Any, tiles: _Tiles, columns: int, is_gradient: bool, interpret: Any
) -> Any:
    m, contracted = x.shape
    if m < MIN_ROWS:
        x = jnp.pad(x, ((0, MIN_ROWS - m), (0, 0)))
        return _call(name, x, codes, scales, tiles, columns, is_gradient, interpret)[:m]
    kept_tile, summed_tile = (tiles.width, tiles.out) if is_gradient else (tiles.out, tiles.width)
    steps = tiles.chunk // tiles.rows
    last = ceil_div(m, tiles.rows) - 1
    grid = (ceil_div(m, tiles.chunk), ceil_div(columns, kept_tile), ceil_div(contracted, summed_tile), steps)

    def weight_tile(kept: Any, summed: Any) -> tuple[Any, Any]:
        return (summed, kept) if is_gradient else (kept, summed)

    def x_index(chunk: Any, kept: Any, summed: Any, i: Any) -> tuple[Any, Any]:
        # The last chunk may have tiles past the end, which are skipped.
        return jnp.minimum(chunk * steps + i, last), summed

    def scales_index(chunk: Any, kept: Any, summed: Any, i: Any) -> tuple[Any, Any, Any]:
        row, column = weight_tile(kept, summed)
        # A block may span several tiles.
        return column * tiles.width // max(tiles.width, tiles.block_size), 0, row

    scales = _arranged(scales, tiles)
    call = tpu_call(
        functools.partial(_kernel, tiles=tiles, m=m, contracted=contracted, is_gradient=is_gradient),
        name=name,
        out_shape=shape_like((m, columns), x.dtype, x, codes, scales),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=VMEM_LIMIT,
        interpret=interpret,
        grid=grid,
        in_specs=[
            pl.BlockSpec((tiles.rows, summed_tile), x_index),
            pl.BlockSpec((tiles.out, tiles.width // 2), lambda chunk, kept, summed, i: weight_tile(kept, summed)),
            pl.BlockSpec((None, scales.shape[1], tiles.out), scales_index),
            pl.BlockSpec((1, nf4.LANES), lambda chunk, kept, summed, i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((tiles.chunk, kept_tile), lambda chunk, kept, summed, i: (chunk, kept)),
        scratch_shapes=[
            pltpu.VMEM((tiles.out, tiles.width), x.dtype),
            pltpu.VMEM((tiles.chunk, kept_tile), jnp.float32),
        ],
    )
    return call(x, codes, scales, jnp.asarray(nf4.lane_table()))


# ------------------------------------------------------------------------------------------------ kernel


def _decode(codes: Any, scales: Any, table: Any, w: Any, tiles: _Tiles) -> None:
    """Writes a tile of the weight, columns in order: a nibble of a layout tile is one run of 128 lanes."""
    by_row = jnp.transpose(scales[...])  # (out, scales of a tile)
    lane = lax.broadcasted_iota(jnp.int32, (tiles.out, nf4.LANES), 1)
    lookup = nf4.lane_gather(table[...])
    for run in range(0, tiles.width // 2, layout.HALF):
        numbers = nf4.decode(codes[:, run : run + layout.HALF], lookup)
        for number, start in zip(numbers, (2 * run, 2 * run + layout.HALF), strict=True):
            w[:, start : start + layout.HALF] = nf4.rounded(
                number, _scales_of_run(by_row, start, lane, tiles.block_size), w.dtype
            )


def _scales_of_run(by_row: Any, start: int, lane: Any, block_size: int) -> Any:
    """The scales [out, 128] of the columns from `start` on."""
    first = start // block_size
    result = jnp.broadcast_to(by_row[:, first : first + 1], lane.shape)
    for i in range(1, layout.HALF // block_size):
        scale = jnp.broadcast_to(by_row[:, first + i : first + i + 1], lane.shape)
        result = jnp.where(lane >= i * block_size, scale, result)
    return result


def _kernel(
    x: Any,
    codes: Any,
    scales: Any,
    table: Any,
    out: Any,
    w: Any,
    acc: Any,
    *,
    tiles: _Tiles,
    m: int,
    contracted: int,
    is_gradient: bool,
) -> None:
    """One tile of x against one tile of the weight."""
    chunk, summed, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(i == 0)
    def _() -> None:
        _decode(codes, scales, table, w, tiles)

    first = i * tiles.rows
    rows = pl.ds(pl.multiple_of(first, tiles.rows), tiles.rows)

    @pl.when(chunk * tiles.chunk + first < m)
    def _() -> None:
        operand = x[...]
        if contracted % operand.shape[1]:
            # Past the end the weight is 0, but x may be anything.
            column = lax.broadcasted_iota(jnp.int32, operand.shape, 1) + summed * operand.shape[1]
            operand = jnp.where(column < contracted, operand, jnp.zeros_like(operand))
        product = lax.dot_general(
            operand,
            w[...],
            (((1,), (0 if is_gradient else 1,)), ((), ())),
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

        @pl.when(summed == 0)
        def _() -> None:
            acc[rows] = product

        @pl.when(summed != 0)
        def _() -> None:
            acc[rows] += product

        @pl.when(summed == pl.num_programs(2) - 1)
        def _() -> None:
            out[rows] = acc[rows].astype(out.dtype)
