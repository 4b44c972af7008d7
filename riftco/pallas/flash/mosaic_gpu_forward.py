"""The forward kernel for Hopper: two warpgroups of 64 queries each share the keys and values that a third one loads."""

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
STREAMED = 128  # keys of a step


def forward(
    q: Any, k: Any, v: Any, sees: Visibility, *, scale: float, cap: float | None, interpret: Any
) -> tuple[Any, Any]:
    """As `mosaic_gpu.forward`."""
    (b, t, h, width), s = q.shape, k.shape[1]
    blocks = ceil_div(t, GROUPS * ROWS)
    segmented = sees.q_segment_ids is not None
    q, k, v = (pad_to(x, 1, tiles.SWIZZLED) for x in (q, k, v))
    operands = (q, k, v, tiles.prepared(sees, GROUPS * ROWS, STREAMED))

    def kernel(q: Any, k: Any, v: Any, options: Visibility, out: Any, lse: Any, shared: Any, barriers: Any) -> None:
        q_tiles, p_tiles, k_ring, v_ring, lse_tiles, q_segments, kv_segments = shared
        q_ready, k_ready, v_ready, consumed, together = barriers
        batch, head, group = (lax.axis_index(name) for name in ("batch", "head", "warpgroup"))
        block = lax.axis_index("block") * (GROUPS * ROWS)
        kv_head = quotient(head, h // k.shape[2])
        seen = tiles.sees_of(options, batch, t, s)
        start, stop = seen.keys(block, GROUPS * ROWS, STREAMED)

        @pl.when(group == GROUPS)
        def _() -> None:
            plgpu.set_max_registers(tiles.LOADER_REGISTERS, action="decrease")

            def load(step: Any, slot: Any) -> None:
                place = (batch, pl.ds((start + step) * STREAMED, STREAMED), kv_head)
                plgpu.copy_gmem_to_smem(k.at[place], k_ring.at[slot], k_ready.at[slot])
                if segmented:
                    segments = options.kv_segment_ids.at[batch, pl.ds((start + step) * STREAMED, STREAMED)]
                    plgpu.copy_gmem_to_smem(segments, kv_segments.at[slot], k_ready.at[slot])
                plgpu.copy_gmem_to_smem(v.at[place], v_ring.at[slot], v_ready.at[slot])

            tiles.ring(stop - start, consumed, load)

        @pl.when(group < GROUPS)
        def _() -> None:
            plgpu.set_max_registers(tiles.REGISTERS, action="increase")
            first = block + group * ROWS
            rows = pl.ds(first, ROWS)
            q_tile, p_tile, lse_tile = (x.at[group] for x in (q_tiles, p_tiles, lse_tiles))
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_tile, q_ready.at[group])
            if segmented:
                plgpu.copy_gmem_to_smem(options.q_segment_ids.at[batch, rows], q_segments.at[group], q_ready.at[group])
            plgpu.barrier_wait(q_ready.at[group])

            def step(index: Any, carry: Any) -> Any:
                top, total, acc = carry
                slot = remainder(index, SLOTS)
                key = (start + index) * STREAMED
                k_tile, v_tile = k_ring.at[slot], v_ring.at[slot]
                plgpu.barrier_wait(k_ready.at[slot])
                product = tiles.dot(q_tile, k_tile.T, (ROWS, STREAMED))
                scores, _ = softmax.scores(product, scale, cap)

                segments = (q_segments.at[group], kv_segments.at[slot]) if segmented else None
                scores = seen.masked(scores, first, key, 0, segments)
                top, total, p, factor = softmax.update(top, total, scores)
                p_tile[...] = p.astype(p_tile.dtype)
                plgpu.commit_smem()
                plgpu.barrier_wait(v_ready.at[slot])
                if options.kv_lengths is not None:
                    tiles.silence_shared([v_tile], key, seen.length, group, together)
                acc = acc * tiles.over_rows(factor, acc.shape) + tiles.dot(p_tile, v_tile, acc.shape)
                plgpu.barrier_arrive(consumed.at[slot])
                return top, total, acc

            init = (tiles.zeros((ROWS,), -jnp.inf), tiles.zeros((ROWS,)), tiles.zeros((ROWS, width)))
            result, statistic = softmax.finish(*lax.fori_loop(0, stop - start, step, init))
            q_tile[...] = result.astype(q_tile.dtype)
            lse_tile[...] = statistic
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out.at[batch, rows, head])
            plgpu.copy_smem_to_gmem(lse_tile, lse.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0)

    arrivals = 1 + segmented
    shared = (
        tiles.matrix((GROUPS, ROWS, width), q.dtype),
        tiles.matrix((GROUPS, ROWS, STREAMED), q.dtype),
        tiles.matrix((SLOTS, STREAMED, width), q.dtype),
        tiles.matrix((SLOTS, STREAMED, width), q.dtype),
        tiles.vector((GROUPS, ROWS), jnp.float32),
        tiles.vector((GROUPS, ROWS), jnp.int32) if segmented else None,
        tiles.vector((SLOTS, STREAMED), jnp.int32) if segmented else None,
    )
    barriers = (
        plgpu.Barrier(num_barriers=GROUPS, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=GROUPS),
        plgpu.Barrier(num_arrivals=GROUPS),
    )
    out, lse = call.mosaic_gpu_call(
        kernel,
        name="flash_attention_forward",
        grid={"head": h, "block": blocks, "batch": b},
        warpgroups=GROUPS + 1,
        out_shape=(
            call.shape_like(q.shape, q.dtype, *operands),
            call.shape_like((b, h, blocks * GROUPS * ROWS), jnp.float32, *operands),
        ),
        scratch=(shared, barriers),
        approximate=cap is None,
        interpret=interpret,
    )(*operands)
    return out[:, :t], lse[:, :, :t]
