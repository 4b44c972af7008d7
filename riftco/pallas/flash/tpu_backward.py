"""Flash attention for TPU, backward: one kernel for the queries' cotangent, one for the keys' and the values'.

Each output tile is summed in one place and in one order, so the results do not differ from run to run. The second
kernel holds its scores transposed: a row's statistics then lie along the lanes, as they are stored, and no product
needs a transposed operand.

Source: Dao 2023, arXiv:2307.08691, algorithm 2.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from riftco.pallas.call import shape_like, tpu_call
from riftco.pallas.core import softmax
from riftco.pallas.flash.tpu_forward import after_segments, column, dot, dot_transposed, row_specs
from riftco.pallas.flash.tpu_tiles import Tiling

SEMANTICS = ("parallel", "parallel", "parallel", "arbitrary")


def _dq_kernel(tiling: Tiling, scale: float, cap: float | None, offsets: Any, lengths: Any, *refs: Any) -> None:
    q, k, v, dout, lse, delta = refs[:6]
    q_segments, kv_segments, others = after_segments(tiling, refs[6:])
    dq, acc, lse_column, delta_column, *segment_column = others
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    offset, limit = tiling.scalars(offsets, lengths, b)
    low, count = tiling.keys_of(i, offset, limit)
    j = low + step

    @pl.when(step == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)
        lse_column[...] = column(lse[0, 0])
        delta_column[...] = column(delta[0, 0])
        if tiling.segmented:
            segment_column[0][...] = column(q_segments[0])

    def tile(masked: bool) -> None:
        keys, values, mask = k[0, 0], v[0, 0], None
        if masked:
            segments = (segment_column[0][...], kv_segments[0]) if tiling.segmented else (None, None)
            mask = tiling.mask(i, j, offset, limit, *segments, row_axis=0, rows=False)
            keys, values = tiling.keep_keys(j, limit, keys), tiling.keep_keys(j, limit, values)
        s, t = softmax.scores(dot_transposed(q[0, 0], keys), scale, cap)
        p = softmax.weights(softmax.masked(s, mask), lse_column[...])
        ds = softmax.score_cotangent(p, dot_transposed(dout[0, 0], values), delta_column[...], t, scale)
        acc[...] += dot(ds.astype(keys.dtype), keys)

    tiling.visit(i, j, step < count, offset, limit, False, tile)

    @pl.when(step == tiling.key_steps - 1)
    def _() -> None:
        dq[0, 0] = acc[...].astype(dq.dtype)


def _dkv_kernel(tiling: Tiling, scale: float, cap: float | None, offsets: Any, lengths: Any, *refs: Any) -> None:
    q, k, v, dout, lse, delta = refs[:6]
    q_segments, kv_segments, others = after_segments(tiling, refs[6:])
    dk, dv, dk_acc, dv_acc, *segment_column = others
    b, j, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    offset, limit = tiling.scalars(offsets, lengths, b)
    low, count = tiling.rows_of(j, offset, limit)
    i = low + step

    @pl.when(step == 0)
    def _() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)
        if tiling.segmented:
            segment_column[0][...] = column(kv_segments[0])

    def tile(masked: bool) -> None:
        queries, douts, keys, values, mask = q[0, 0], dout[0, 0], k[0, 0], v[0, 0], None
        if masked:
            segments = (q_segments[0], segment_column[0][...]) if tiling.segmented else (None, None)
            mask = tiling.mask(i, j, offset, limit, *segments, row_axis=1, rows=True)
            queries, douts = tiling.keep_rows(i, queries), tiling.keep_rows(i, douts)
            keys, values = tiling.keep_keys(j, limit, keys), tiling.keep_keys(j, limit, values)
        s, t = softmax.scores(dot_transposed(keys, queries), scale, cap)  # [key_tile, row_tile]
        p = softmax.weights(softmax.masked(s, mask), lse[0, 0])
        dv_acc[...] += dot(p.astype(douts.dtype), douts)
        ds = softmax.score_cotangent(p, dot_transposed(values, douts), delta[0, 0], t, scale)
        dk_acc[...] += dot(ds.astype(queries.dtype), queries)

    tiling.visit(i, j, step < count, offset, limit, True, tile)

    @pl.when(step == tiling.row_steps - 1)
    def _() -> None:
        dk[0, 0] = dk_acc[...].astype(dk.dtype)
        dv[0, 0] = dv_acc[...].astype(dv.dtype)


def _key_specs(tiling: Tiling, width: int) -> tuple[Any, Any, Any, Any, Any]:
    """As `row_specs`, for a grid (batch, group, key tile, row step)."""

    def row_tile(b: Any, j: Any, step: Any, offsets: Any, lengths: Any) -> Any:
        low, count = tiling.rows_of(j, *tiling.scalars(offsets, lengths, b))
        return jnp.minimum(low + jnp.clip(step, 0, jnp.maximum(count - 1, 0)), tiling.row_tiles - 1)

    return (
        pl.BlockSpec((1, 1, tiling.row_tile, width), lambda b, g, j, s, *x: (b, g, row_tile(b, j, s, *x), 0)),
        pl.BlockSpec((1, 1, tiling.key_tile, width), lambda b, g, j, s, *_: (b, g, j, 0)),
        pl.BlockSpec((1, 1, 1, tiling.row_tile), lambda b, g, j, s, *x: (b, g, 0, row_tile(b, j, s, *x))),
        pl.BlockSpec((1, 1, tiling.row_tile), lambda b, g, j, s, *x: (b, 0, row_tile(b, j, s, *x))),
        pl.BlockSpec((1, 1, tiling.key_tile), lambda b, g, j, s, *_: (b, 0, j)),
    )


def dq_call(
    tiling: Tiling, arrays: Any, scalars: Any, segments: Any, scale: float, cap: float | None, interpret: Any
) -> Any:
    """The cotangent of the packed queries [B, G, T R, K].

    Args:
        tiling: of the call.
        arrays: q and dout packed [B, G, T R, K], k and v [B, G, S, K], lse and delta [B, G, 1, row tiles] in the order
            q, k, v, dout, lse, delta.
        scalars: int32 [B] offsets and lengths.
        segments: int32 [B, 1, row tiles] and [B, 1, key tiles], or nothing.
        scale: of the products.
        cap: of the scores, or None.
        interpret: as `tpu_call` takes it.
    """
    q = arrays[0]
    batch, groups, _, width = q.shape
    rows, keys, statistics, *segment_specs = row_specs(tiling, width)
    column_scratch = pltpu.VMEM((tiling.row_tile, 1), jnp.float32)
    scratch = [pltpu.VMEM((tiling.row_tile, width), jnp.float32), column_scratch, column_scratch]
    if tiling.segmented:
        scratch.append(pltpu.VMEM((tiling.row_tile, 1), jnp.int32))
    return tpu_call(
        functools.partial(_dq_kernel, tiling, scale, cap),
        name="flash_attention_dq",
        out_shape=shape_like(q.shape, q.dtype, *arrays, *scalars, *segments),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, groups, tiling.row_tiles, tiling.key_steps),
            in_specs=[rows, keys, keys, rows, statistics, statistics, *segment_specs[: len(segments)]],
            out_specs=rows,
            scratch_shapes=scratch,
        ),
        semantics=SEMANTICS,
        vmem_limit_bytes=tiling.memory,
        cost_estimate=tiling.cost(batch, groups, width, 3, (*arrays, q)),
        interpret=interpret,
    )(*scalars, *arrays, *segments)


def dkv_call(
    tiling: Tiling, arrays: Any, scalars: Any, segments: Any, scale: float, cap: float | None, interpret: Any
) -> tuple[Any, Any]:
    """The cotangents of keys and values [B, G, S, K]; arguments as `dq_call`."""
    k = arrays[1]
    batch, groups, _, width = k.shape
    rows, keys, statistics, *segment_specs = _key_specs(tiling, width)
    scratch = [pltpu.VMEM((tiling.key_tile, width), jnp.float32)] * 2
    if tiling.segmented:
        scratch.append(pltpu.VMEM((tiling.key_tile, 1), jnp.int32))
    return tpu_call(
        functools.partial(_dkv_kernel, tiling, scale, cap),
        name="flash_attention_dkv",
        out_shape=[shape_like(k.shape, k.dtype, *arrays, *scalars, *segments)] * 2,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, groups, tiling.key_tiles, tiling.row_steps),
            in_specs=[rows, keys, keys, rows, statistics, statistics, *segment_specs[: len(segments)]],
            out_specs=[keys, keys],
            scratch_shapes=scratch,
        ),
        semantics=SEMANTICS,
        vmem_limit_bytes=tiling.memory,
        cost_estimate=tiling.cost(batch, groups, width, 4, (*arrays, k, k)),
        interpret=interpret,
    )(*scalars, *arrays, *segments)
