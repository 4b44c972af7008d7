"""Flash attention's backward pass for Pallas Triton: a kernel for dQ, and one for dK and dV.

Each output tile is summed by one program in a fixed order: seven products in place of the fused five, for results that
are the same in every run, without atomics. The query heads that share a key head are summed in the kernel, in float32.

Source: Dao 2023, arXiv:2307.08691, algorithm 2.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from riftco.pallas.call import shape_like, triton_call
from riftco.pallas.core import softmax
from riftco.pallas.core.sizes import ceil_div
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash import triton_tiles as tile
from riftco.pallas.flash.triton_tiles import Row, Tiles


def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    sees: Visibility,
    *,
    scale: float,
    cap: float | None,
    interpret: Any,
) -> tuple[Any, Any, Any]:
    """The cotangents of q, k and v in their dtypes."""
    b, t, h, width = q.shape
    s, groups = k.shape[1:3]
    tiles = tile.choose(tile.BACKWARD, q, k)
    repeats = h // groups
    group = functools.partial(tile.key_head, repeats=repeats)
    options = {"tiles": tiles, "width": width, "scale": scale, "cap": cap}
    launch = {"num_warps": tiles.warps, "num_stages": tiles.stages, "interpret": interpret}
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    operands = (q, k, v, dout, lse, jnp.moveaxis(delta, 2, 1), sees)
    dq = triton_call(
        functools.partial(_dq_kernel, **options),
        name="flash_attention_dq",
        grid=(ceil_div(t, tiles.queries), h, b),
        in_specs=(
            tile.row_of(q.shape),
            tile.row_of(k.shape, group),
            tile.row_of(v.shape, group),
            tile.row_of(q.shape),
            *(tile.statistics_of(lse.shape),) * 2,
            tile.whole(sees),
        ),
        out_specs=tile.row_of(q.shape),
        out_shape=shape_like(q.shape, q.dtype, *operands),
        **launch,
    )(*operands)
    dk, dv = triton_call(
        functools.partial(_dkv_kernel, **options),
        name="flash_attention_dkv",
        grid=(ceil_div(s, tiles.keys), groups, b),
        in_specs=(
            tile.row_of(q.shape, heads=repeats),
            tile.row_of(k.shape),
            tile.row_of(v.shape),
            tile.row_of(q.shape, heads=repeats),
            *(tile.statistics_of(lse.shape, repeats),) * 2,
            tile.whole(sees),
        ),
        out_specs=(tile.row_of(k.shape), tile.row_of(v.shape)),
        out_shape=tuple(shape_like(x.shape, x.dtype, *operands) for x in (k, v)),
        **launch,
    )(*operands)
    return dq, dk, dv


def _dq_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dout_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    refs: Visibility,
    dq_ref: Any,
    *,
    tiles: Tiles,
    width: int,
    scale: float,
    cap: float | None,
) -> None:
    queries, batch = q_ref.shape[0], pl.program_id(2)
    first = (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.queries
    row = Row.of(batch, refs, k_ref.shape[0])
    q = tile.load(q_ref, first, tiles.queries, queries, width)
    dout = tile.load(dout_ref, first, tiles.queries, queries, width)
    lse = tile.load_vector(lse_ref, first, tiles.queries, -jnp.inf)[:, None]
    delta = tile.load_vector(delta_ref, first, tiles.queries, 0.0)[:, None]
    q_segment = row.q_segments(first, tiles.queries)

    def step(is_masked: bool, j: Any, dq: Any) -> Any:
        s0 = j * tiles.keys
        limit = row.keys if is_masked else None
        keys = tile.load(k_ref, s0, tiles.keys, limit, width)
        s, t = softmax.scores(tile.dot(q, keys, transposed=True), scale, cap)
        if is_masked:
            s = softmax.masked(s, row.mask(first, s0, tiles, q_segment, row.kv_segments(s0, tiles.keys)))
        p = softmax.weights(s, lse)
        dp = tile.dot(dout, tile.load(v_ref, s0, tiles.keys, limit, width), transposed=True)
        # The scale waits for the end: float16 would lose what it makes small.
        ds = softmax.score_cotangent(p, dp, delta, t, 1.0)
        return dq + tile.dot(ds.astype(keys.dtype), keys)

    parts = tile.key_parts(row, first, tiles.queries, queries, tiles.keys)
    dq = tile.run(parts, step, jnp.zeros(q.shape, jnp.float32))
    tile.store(dq_ref, first, tiles.queries, width, dq * scale)


def _dkv_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dout_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    refs: Visibility,
    dk_ref: Any,
    dv_ref: Any,
    *,
    tiles: Tiles,
    width: int,
    scale: float,
    cap: float | None,
) -> None:
    queries, repeats = q_ref.shape[:2]
    first, batch = pl.program_id(0) * tiles.keys, pl.program_id(2)
    row = Row.of(batch, refs, k_ref.shape[0])
    keys = tile.load(k_ref, first, tiles.keys, row.keys, width)
    values = tile.load(v_ref, first, tiles.keys, row.keys, width)
    kv_segment = row.kv_segments(first, tiles.keys)
    parts = tile.query_parts(row, first, tiles.keys, queries, tiles.queries)

    def one_head(head: Any, carry: Any) -> Any:
        # Scores lie transposed, keys by queries, so that no product needs its left operand turned.
        def step(is_masked: bool, j: Any, carry: Any) -> Any:
            dk, dv = carry
            t0 = j * tiles.queries
            limit = queries if is_masked else None
            q = tile.load(q_ref, t0, tiles.queries, limit, width, head)
            dout = tile.load(dout_ref, t0, tiles.queries, limit, width, head)
            lse = tile.load_vector(lse_ref, t0, tiles.queries, -jnp.inf, head)[None, :]
            delta = tile.load_vector(delta_ref, t0, tiles.queries, 0.0, head)[None, :]
            s, t = softmax.scores(tile.dot(keys, q, transposed=True), scale, cap)
            if is_masked:
                q_segment = row.q_segments(t0, tiles.queries)
                s = softmax.masked(s, row.mask(t0, first, tiles, q_segment, kv_segment, keys_first=True))
            p = softmax.weights(s, lse)
            dv = dv + tile.dot(p.astype(dout.dtype), dout)
            dp = tile.dot(values, dout, transposed=True)
            ds = softmax.score_cotangent(p, dp, delta, t, 1.0)
            return dk + tile.dot(ds.astype(q.dtype), q), dv

        return tile.run(parts, step, carry)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, repeats, one_head, (zeros, zeros))
    # Whole tiles of queries are not masked; what they gave to keys past the row's length is not wanted.
    seen = (first + jnp.arange(tiles.keys, dtype=jnp.int32) < row.keys)[:, None]
    tile.store(dk_ref, first, tiles.keys, width, jnp.where(seen, dk * scale, 0.0))
    tile.store(dv_ref, first, tiles.keys, width, jnp.where(seen, dv, 0.0))
