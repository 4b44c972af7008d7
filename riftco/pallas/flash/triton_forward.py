"""Flash attention's forward pass for Pallas Triton: one program for each tile of queries of one head.

Source: Dao 2023, arXiv:2307.08691, algorithm 1.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from riftco.pallas.call import shape_like, triton_call
from riftco.pallas.core import softmax
from riftco.pallas.core.sizes import ceil_div
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash import triton_tiles as tile
from riftco.pallas.flash.triton_tiles import Row, Tiles


def forward(
    q: Any, k: Any, v: Any, sees: Visibility, *, scale: float, cap: float | None, interpret: Any
) -> tuple[Any, Any]:
    """The output [B, T, H, K] in q's dtype and the natural logsumexp [B, H, T] float32."""
    b, t, h, width = q.shape
    group = functools.partial(tile.key_head, repeats=h // k.shape[2])
    tiles = tile.choose(tile.FORWARD, q, k)
    operands = (q, k, v, sees)
    call = triton_call(
        functools.partial(_forward_kernel, tiles=tiles, width=width, scale=scale, cap=cap),
        name="flash_attention_forward",
        grid=(ceil_div(t, tiles.queries), h, b),
        in_specs=(tile.row_of(q.shape), tile.row_of(k.shape, group), tile.row_of(v.shape, group), tile.whole(sees)),
        out_specs=(tile.row_of(q.shape), tile.statistics_of((b, h, t))),
        out_shape=(shape_like(q.shape, q.dtype, *operands), shape_like((b, h, t), jnp.float32, *operands)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
    )
    return call(*operands)


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    refs: Visibility,
    out_ref: Any,
    lse_ref: Any,
    *,
    tiles: Tiles,
    width: int,
    scale: float,
    cap: float | None,
) -> None:
    queries, batch = q_ref.shape[0], pl.program_id(2)
    # The last queries see the most keys; starting with them leaves the short programs for the end.
    first = (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.queries
    row = Row.of(batch, refs, k_ref.shape[0])
    q = tile.load(q_ref, first, tiles.queries, queries, width)
    q_segment = row.q_segments(first, tiles.queries)

    def step(is_masked: bool, j: Any, carry: Any) -> Any:
        top, total, acc = carry
        s0 = j * tiles.keys
        limit = row.keys if is_masked else None
        keys = tile.load(k_ref, s0, tiles.keys, limit, width)
        s, _ = softmax.scores(tile.dot(q, keys, transposed=True), scale, cap)
        if is_masked:
            s = softmax.masked(s, row.mask(first, s0, tiles, q_segment, row.kv_segments(s0, tiles.keys)))
        top, total, p, factor = softmax.update(top, total, s)
        values = tile.load(v_ref, s0, tiles.keys, limit, width)
        return top, total, acc * factor + tile.dot(p.astype(values.dtype), values)

    start = (
        jnp.full((tiles.queries, 1), -jnp.inf, jnp.float32),
        jnp.zeros((tiles.queries, 1), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    parts = tile.key_parts(row, first, tiles.queries, queries, tiles.keys)
    out, lse = softmax.finish(*tile.run(parts, step, start))
    tile.store(out_ref, first, tiles.queries, width, out)
    tile.store_vector(lse_ref, first, jnp.reshape(lse, (tiles.queries,)))
