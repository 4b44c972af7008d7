"""The backward kernels for Hopper: dq by blocks of queries, dk and dv by blocks of keys.

No two blocks add to one sum, so that each run gives the same bits.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from riftco import _compat
from riftco.pallas import call
from riftco.pallas.core import softmax
from riftco.pallas.core.sizes import ceil_div, pad_to, quotient, remainder
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash import mosaic_gpu_tiles as tiles
from riftco.pallas.flash.mosaic_gpu_tiles import ROWS, SLOTS

plgpu = _compat.mosaic_gpu()

GROUPS = 2  # warpgroups that compute
STREAMED = 64  # keys of a step of dq, queries of a step of dk and dv


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
    """As `mosaic_gpu.backward`."""
    t, s = q.shape[1], k.shape[1]
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    lse, delta = (pad_to(x, 2, ROWS) for x in (lse, jnp.swapaxes(delta, 1, 2)))
    q, k, v, dout = (pad_to(x, 1, tiles.SWIZZLED) for x in (q, k, v, dout))
    static = {"sees": tiles.prepared(sees, GROUPS * ROWS, GROUPS * ROWS), "queries": t, "keys": s}
    static |= {"scale": scale, "cap": cap, "interpret": interpret}
    dq = _dq_call(q, k, v, lse, delta, dout, **static)
    dk, dv = _dkv_call(q, k, v, lse, delta, dout, **static)
    return dq[:, :t], dk[:, :s], dv[:, :s]


def _dq_call(
    q: Any,
    k: Any,
    v: Any,
    lse: Any,
    delta: Any,
    dout: Any,
    *,
    sees: Visibility,
    queries: int,
    keys: int,
    scale: float,
    cap: float | None,
    interpret: Any,
) -> Any:
    b, _, h, width = q.shape
    segmented = sees.q_segment_ids is not None
    operands = (q, k, v, lse, delta, dout, sees)

    def kernel(
        q: Any,
        k: Any,
        v: Any,
        lse: Any,
        delta: Any,
        dout: Any,
        options: Visibility,
        dq: Any,
        shared: Any,
        barriers: Any,
    ) -> None:
        q_tiles, do_tiles, ds_tiles, k_ring, v_ring, lse_tiles, delta_tiles, q_segments, kv_segments = shared
        ready, arrived, consumed, together = barriers
        batch, head, group = (lax.axis_index(name) for name in ("batch", "head", "warpgroup"))
        block = lax.axis_index("block") * (GROUPS * ROWS)
        kv_head = quotient(head, h // k.shape[2])
        seen = tiles.sees_of(options, batch, queries, keys)
        start, stop = seen.keys(block, GROUPS * ROWS, STREAMED)

        @pl.when(group == GROUPS)
        def _() -> None:
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")

            def load(step: Any, slot: Any) -> None:
                some = pl.ds((start + step) * STREAMED, STREAMED)
                plgpu.copy_gmem_to_smem(k.at[batch, some, kv_head], k_ring.at[slot], arrived.at[slot])
                plgpu.copy_gmem_to_smem(v.at[batch, some, kv_head], v_ring.at[slot], arrived.at[slot])
                if segmented:
                    plgpu.copy_gmem_to_smem(
                        options.kv_segment_ids.at[batch, some], kv_segments.at[slot], arrived.at[slot]
                    )

            tiles.ring(stop - start, consumed, load)

        @pl.when(group < GROUPS)
        def _() -> None:
            plgpu.set_max_registers(tiles.REGISTERS, action="increase")
            first = block + group * ROWS
            rows = pl.ds(first, ROWS)
            q_tile, do_tile, ds_tile = (x.at[group] for x in (q_tiles, do_tiles, ds_tiles))
            mine = ready.at[group]
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_tile, mine)
            plgpu.copy_gmem_to_smem(dout.at[batch, rows, head], do_tile, mine)
            plgpu.copy_gmem_to_smem(lse.at[batch, head, rows], lse_tiles.at[group], mine)
            plgpu.copy_gmem_to_smem(delta.at[batch, head, rows], delta_tiles.at[group], mine)
            if segmented:
                plgpu.copy_gmem_to_smem(options.q_segment_ids.at[batch, rows], q_segments.at[group], mine)
            plgpu.barrier_wait(mine)
            shape = (ROWS, STREAMED)
            lse_rows = tiles.over_rows(tiles.per_row(lse_tiles.at[group]), shape)
            delta_rows = tiles.over_rows(tiles.per_row(delta_tiles.at[group]), shape)

            def step(index: Any, acc: Any) -> Any:
                slot = remainder(index, SLOTS)
                key = (start + index) * STREAMED
                k_tile, v_tile = k_ring.at[slot], v_ring.at[slot]
                plgpu.barrier_wait(arrived.at[slot])
                if options.kv_lengths is not None:
                    tiles.silence_shared([k_tile, v_tile], key, seen.length, group, together)
                scores, t = softmax.scores(tiles.dot(q_tile, k_tile.T, shape), scale, cap)
                segments = (q_segments.at[group], kv_segments.at[slot]) if segmented else None
                scores = seen.masked(scores, first, key, 0, segments)
                p = softmax.weights(scores, lse_rows)
                dp = tiles.dot(do_tile, v_tile.T, shape)
                ds = softmax.score_cotangent(p, dp, delta_rows, t, scale)
                ds_tile[...] = ds.astype(ds_tile.dtype)
                plgpu.commit_smem()
                acc = acc + tiles.dot(ds_tile, k_tile, acc.shape)
                plgpu.barrier_arrive(consumed.at[slot])
                return acc

            result = lax.fori_loop(0, stop - start, step, tiles.zeros((ROWS, width)))
            q_tile[...] = result.astype(q_tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, dq.at[batch, rows, head])
            plgpu.wait_smem_to_gmem(0)

    shared = (
        tiles.matrix((GROUPS, ROWS, width), q.dtype),
        tiles.matrix((GROUPS, ROWS, width), q.dtype),
        tiles.matrix((GROUPS, ROWS, STREAMED), q.dtype),
        tiles.matrix((SLOTS, STREAMED, width), q.dtype),
        tiles.matrix((SLOTS, STREAMED, width), q.dtype),
        tiles.vector((GROUPS, ROWS), jnp.float32),
        tiles.vector((GROUPS, ROWS), jnp.float32),
        tiles.vector((GROUPS, ROWS), jnp.int32) if segmented else None,
        tiles.vector((SLOTS, STREAMED), jnp.int32) if segmented else None,
    )
    barriers = (
        plgpu.Barrier(num_barriers=GROUPS, num_arrivals=4 + segmented),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2 + segmented),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=GROUPS),
        plgpu.Barrier(num_arrivals=GROUPS),
    )
    return call.mosaic_gpu_call(
        kernel,
        name="flash_attention_dq",
        grid={"head": h, "block": ceil_div(queries, GROUPS * ROWS), "batch": b},
        warpgroups=GROUPS + 1,
        out_shape=call.shape_like(q.shape, q.dtype, *operands),
        scratch=(shared, barriers),
        approximate=cap is None,
        interpret=interpret,
    )(*operands)


def _dkv_call(
    q: Any,
    k: Any,
    v: Any,
    lse: Any,
    delta: Any,
    dout: Any,
    *,
    sees: Visibility,
    queries: int,
    keys: int,
    scale: float,
    cap: float | None,
    interpret: Any,
) -> tuple[Any, Any]:
    # Everything is transposed, keys down and queries across: products then need no transposed register tile.
    b, _, g, width = k.shape
    members = q.shape[2] // g
    segmented = sees.q_segment_ids is not None
    operands = (q, k, v, lse, delta, dout, sees)

    def kernel(
        q: Any,
        k: Any,
        v: Any,
        lse: Any,
        delta: Any,
        dout: Any,
        options: Visibility,
        dk: Any,
        dv: Any,
        shared: Any,
        barriers: Any,
    ) -> None:
        k_tiles, v_tiles, p_tiles, ds_tiles, q_ring, do_ring, lse_ring, delta_ring, q_segments, kv_segments = shared
        ready, arrived, consumed = barriers
        batch, kv_head, group = (lax.axis_index(name) for name in ("batch", "kv_head", "warpgroup"))
        block = lax.axis_index("block") * (GROUPS * ROWS)
        seen = tiles.sees_of(options, batch, queries, keys)
        start, stop = seen.queries_of(block, GROUPS * ROWS, STREAMED)
        steps = stop - start  # for each of the query heads

        @pl.when(group == GROUPS)
        def _() -> None:
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")

            def load(step: Any, slot: Any) -> None:
                head = kv_head * members + lax.div(step, steps)
                some = pl.ds((start + lax.rem(step, steps)) * STREAMED, STREAMED)
                plgpu.copy_gmem_to_smem(q.at[batch, some, head], q_ring.at[slot], arrived.at[slot])
                plgpu.copy_gmem_to_smem(dout.at[batch, some, head], do_ring.at[slot], arrived.at[slot])
                plgpu.copy_gmem_to_smem(lse.at[batch, head, some], lse_ring.at[slot], arrived.at[slot])
                plgpu.copy_gmem_to_smem(delta.at[batch, head, some], delta_ring.at[slot], arrived.at[slot])
                if segmented:
                    plgpu.copy_gmem_to_smem(
                        options.q_segment_ids.at[batch, some], q_segments.at[slot], arrived.at[slot]
                    )

            tiles.ring(steps * members, consumed, load)

        @pl.when(group < GROUPS)
        def _() -> None:
            plgpu.set_max_registers(tiles.REGISTERS, action="increase")
            first = block + group * ROWS
            rows = pl.ds(first, ROWS)
            k_tile, v_tile, p_tile, ds_tile = (x.at[group] for x in (k_tiles, v_tiles, p_tiles, ds_tiles))
            mine = ready.at[group]
            plgpu.copy_gmem_to_smem(k.at[batch, rows, kv_head], k_tile, mine)
            plgpu.copy_gmem_to_smem(v.at[batch, rows, kv_head], v_tile, mine)
            if segmented:
                plgpu.copy_gmem_to_smem(options.kv_segment_ids.at[batch, rows], kv_segments.at[group], mine)
            plgpu.barrier_wait(mine)
            if options.kv_lengths is not None:
                tiles.silence(k_tile, first, seen.length)
                tiles.silence(v_tile, first, seen.length)
            shape = (ROWS, STREAMED)

            def step(index: Any, carry: Any) -> Any:
                dk_acc, dv_acc = carry
                slot = remainder(index, SLOTS)
                query = (start + lax.rem(index, steps)) * STREAMED
                q_tile, do_tile = q_ring.at[slot], do_ring.at[slot]
                plgpu.barrier_wait(arrived.at[slot])
                scores, t = softmax.scores(tiles.dot(k_tile, q_tile.T, shape), scale, cap)
                segments = (q_segments.at[slot], kv_segments.at[group]) if segmented else None
                scores = seen.masked(scores, query, first, 1, segments)
                p = softmax.weights(scores, tiles.over_columns(tiles.per_column(lse_ring.at[slot]), shape))
                dp = tiles.dot(v_tile, do_tile.T, shape)
                delta_columns = tiles.over_columns(tiles.per_column(delta_ring.at[slot]), shape)
                ds = softmax.score_cotangent(p, dp, delta_columns, t, scale)
                p_tile[...] = p.astype(p_tile.dtype)
                ds_tile[...] = ds.astype(ds_tile.dtype)
                plgpu.commit_smem()
                dv_acc = dv_acc + tiles.dot(p_tile, do_tile, dv_acc.shape)
                dk_acc = dk_acc + tiles.dot(ds_tile, q_tile, dk_acc.shape)
                plgpu.barrier_arrive(consumed.at[slot])
                return dk_acc, dv_acc

            init = (tiles.zeros((ROWS, width)), tiles.zeros((ROWS, width)))
            dk_acc, dv_acc = lax.fori_loop(0, steps * members, step, init)
            k_tile[...] = dk_acc.astype(k_tile.dtype)
            v_tile[...] = dv_acc.astype(v_tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_tile, dk.at[batch, rows, kv_head])
            plgpu.copy_smem_to_gmem(v_tile, dv.at[batch, rows, kv_head])
            plgpu.wait_smem_to_gmem(0)

    shared = (
        tiles.matrix((GROUPS, ROWS, width), q.dtype),
        tiles.matrix((GROUPS, ROWS, width), q.dtype),
        tiles.matrix((GROUPS, ROWS, STREAMED), q.dtype),
        tiles.matrix((GROUPS, ROWS, STREAMED), q.dtype),
        tiles.matrix((SLOTS, STREAMED, width), q.dtype),
        tiles.matrix((SLOTS, STREAMED, width), q.dtype),
        tiles.vector((SLOTS, STREAMED), jnp.float32),
        tiles.vector((SLOTS, STREAMED), jnp.float32),
        tiles.vector((SLOTS, STREAMED), jnp.int32) if segmented else None,
        tiles.vector((GROUPS, ROWS), jnp.int32) if segmented else None,
    )
    barriers = (
        plgpu.Barrier(num_barriers=GROUPS, num_arrivals=2 + segmented),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=4 + segmented),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=GROUPS),
    )
    return call.mosaic_gpu_call(
        kernel,
        name="flash_attention_dkv",
        grid={"kv_head": g, "block": ceil_div(keys, GROUPS * ROWS), "batch": b},
        warpgroups=GROUPS + 1,
        out_shape=(call.shape_like(k.shape, k.dtype, *operands), call.shape_like(v.shape, v.dtype, *operands)),
        scratch=(shared, barriers),
        approximate=cap is None,
        interpret=interpret,
    )(*operands)
