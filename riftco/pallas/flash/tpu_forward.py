"""Flash attention for TPU, forward: one tile of rows keeps its running softmax while the key tiles it reaches pass by.

Source: Dao 2023, arXiv:2307.08691, algorithm 1.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from riftco.pallas.call import shape_like, tpu_call
from riftco.pallas.core import softmax
from riftco.pallas.flash.tpu_tiles import LANES, Tiling


def precision(x: Any) -> Any:
    """Of the products: float32 is multiplied as float32, whatever jax's default is."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def dot(a: Any, b: Any) -> Any:
    """The product of [m, n] and [n, k] in float32."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision(a), preferred_element_type=jnp.float32)


def dot_transposed(a: Any, b: Any) -> Any:
    """The product of [m, k] and [n, k] transposed, in float32: [m, n]."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision(a), preferred_element_type=jnp.float32)


def column(row: Any) -> Any:
    """A row [1, n] of 32-bit values as a column [n, 1]."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))[:, :1]


def as_row(values: Any) -> Any:
    """A column [n, 1] of 32-bit values as a row [1, n]."""
    return jnp.transpose(jnp.broadcast_to(values, (values.shape[0], LANES)))[:1]


def after_segments(tiling: Tiling, refs: Any) -> tuple[Any, Any, Any]:
    """The refs of both segments, None without, and those that follow them."""
    return (refs[0], refs[1], refs[2:]) if tiling.segmented else (None, None, refs)


def row_specs(tiling: Tiling, width: int) -> tuple[Any, Any, Any, Any, Any]:
    """Blocks for a grid (batch, group, row tile, key step): of rows, of keys, of row statistics, and of the segments.

    Steps past the last key tile stay on it, so that nothing is copied for them.
    """

    def keys(b: Any, g: Any, i: Any, step: Any, offsets: Any, lengths: Any) -> Any:
        low, count = tiling.keys_of(i, *tiling.scalars(offsets, lengths, b))
        return b, g, jnp.minimum(low + jnp.clip(step, 0, jnp.maximum(count - 1, 0)), tiling.key_tiles - 1), 0

    def key_segments(b: Any, g: Any, i: Any, step: Any, *scalars: Any) -> Any:
        return b, 0, keys(b, g, i, step, *scalars)[2]

    return (
        pl.BlockSpec((1, 1, tiling.row_tile, width), lambda b, g, i, step, *_: (b, g, i, 0)),
        pl.BlockSpec((1, 1, tiling.key_tile, width), keys),
        pl.BlockSpec((1, 1, 1, tiling.row_tile), lambda b, g, i, step, *_: (b, g, 0, i)),
        pl.BlockSpec((1, 1, tiling.row_tile), lambda b, g, i, step, *_: (b, 0, i)),
        pl.BlockSpec((1, 1, tiling.key_tile), key_segments),
    )


def _forward_kernel(
    tiling: Tiling, scale: float, cap: float | None, offsets: Any, lengths: Any, q: Any, k: Any, v: Any, *refs: Any
) -> None:
    q_segments, kv_segments, others = after_segments(tiling, refs)
    out, lse, top, total, acc, *segment_column = others
    b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    offset, limit = tiling.scalars(offsets, lengths, b)
    low, count = tiling.keys_of(i, offset, limit)
    j = low + step

    @pl.when(step == 0)
    def _() -> None:
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)
        if tiling.segmented:
            segment_column[0][...] = column(q_segments[0])

    def tile(masked: bool) -> None:
        keys, values, mask = k[0, 0], v[0, 0], None
        if masked:
            segments = (segment_column[0][...], kv_segments[0]) if tiling.segmented else (None, None)
            mask = tiling.mask(i, j, offset, limit, *segments, row_axis=0, rows=False)
            values = tiling.keep_keys(j, limit, values)
        s, _ = softmax.scores(dot_transposed(q[0, 0], keys), scale, cap)
        top[...], total[...], p, factor = softmax.update(top[...], total[...], softmax.masked(s, mask))
        acc[...] = acc[...] * factor + dot(p.astype(values.dtype), values)

    tiling.visit(i, j, step < count, offset, limit, False, tile)

    @pl.when(step == tiling.key_steps - 1)
    def _() -> None:
        o, statistic = softmax.finish(top[...], total[...], acc[...])
        out[0, 0] = o.astype(out.dtype)
        lse[0, 0] = as_row(statistic)


def forward_call(
    tiling: Tiling, q: Any, k: Any, v: Any, scalars: Any, segments: Any, scale: float, cap: float | None, interpret: Any
) -> tuple[Any, Any]:
    """The output [B, G, T R, K] and the logsumexp [B, G, 1, row tiles] of packed rows.

    Args:
        tiling: of the call.
        q: packed queries [B, G, T R, K].
        k: keys [B, G, S, K].
        v: values [B, G, S, K].
        scalars: int32 [B] offsets and lengths.
        segments: int32 [B, 1, row tiles] and [B, 1, key tiles], or nothing.
        scale: of the products.
        cap: of the scores, or None.
        interpret: as `tpu_call` takes it.
    """
    batch, groups, _, width = q.shape
    rows, keys, statistics, *segment_specs = row_specs(tiling, width)
    scratch = [
        pltpu.VMEM((tiling.row_tile, 1), jnp.float32),
        pltpu.VMEM((tiling.row_tile, 1), jnp.float32),
        pltpu.VMEM((tiling.row_tile, width), jnp.float32),
    ]
    if tiling.segmented:
        scratch.append(pltpu.VMEM((tiling.row_tile, 1), jnp.int32))
    return tpu_call(
        functools.partial(_forward_kernel, tiling, scale, cap),
        name="flash_attention_forward",
        out_shape=[
            shape_like(q.shape, q.dtype, q, k, v, *scalars, *segments),
            shape_like(
                (batch, groups, 1, tiling.row_tiles * tiling.row_tile), jnp.float32, q, k, v, *scalars, *segments
            ),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, groups, tiling.row_tiles, tiling.key_steps),
            in_specs=[rows, keys, keys, *segment_specs[: len(segments)]],
            out_specs=[rows, statistics],
            scratch_shapes=scratch,
        ),
        semantics=("parallel", "parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=tiling.memory,
        cost_estimate=tiling.cost(batch, groups, width, 2, (q, k, v, q)),
        interpret=interpret,
    )(*scalars, q, k, v, *segments)
