"""Flash attention for TPU (Mosaic): what it supports, and the layouts around its kernels.

Every option of `ops.attention` is decided inside the kernels; lengths need be no multiple of anything. Arrays are
turned to [B, G, rows, K] outside, where XLA joins the turn to its neighbours. A row's statistic is one float32.
"""

from typing import Any

import jax.numpy as jnp

from riftco import _compat
from riftco.pallas.core.sizes import pad_to
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash import tpu_backward, tpu_forward
from riftco.pallas.flash.tpu_tiles import Tiling

WIDEST = 256


def unsupported(q: Any, k: Any, v: Any, sees: Visibility, cap: float | None) -> str | None:
    """Why the kernels cannot run a call, as half a sentence; None if they can.

    Args:
        q: queries [B, T, H, K], an array or its type, as all others.
        k: keys [B, S, G, K].
        v: values [B, S, G, K].
        sees: what is seen.
        cap: of the scores, or None.
    """
    del cap
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it takes float32 or bfloat16; got {q.dtype}"
    if not 1 <= q.shape[3] <= WIDEST:
        return f"the head width must be at most {WIDEST}; got {q.shape[3]}"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return f"it needs at least one query and one key; got q {list(q.shape)} and k {list(k.shape)}"
    if sees.has_wide_segments:
        return "segment ids must be of at most 32 bits"
    return None


def forward(
    q: Any, k: Any, v: Any, sees: Visibility, *, scale: float, cap: float | None, interpret: Any = False
) -> tuple[Any, Any]:
    """Attention's output and each row's logsumexp.

    Args:
        q: queries [B, T, H, K], float32 or bfloat16.
        k: keys [B, S, G, K] in q's dtype.
        v: values [B, S, G, K] in q's dtype.
        sees: which query sees which key.
        scale: of the products q·k.
        cap: of the scores, or None.
        interpret: True for the HLO interpreter, an InterpretParams for the TPU one.

    Returns:
        The output [B, T, H, K] in q's dtype, and the natural logsumexp [B, H, T] float32, -inf where nothing is seen.
    """
    tiling = Tiling.of(q, k, sees)
    groups = k.shape[2]
    scalars, segments = _scalars(q, sees, tiling), _segments(sees, tiling)
    out, lse = tpu_forward.forward_call(
        tiling, _packed(q, groups), _heads_first(k), _heads_first(v), scalars, segments, scale, cap, interpret
    )
    lse = jnp.reshape(lse[:, :, 0, : tiling.rows], (q.shape[0], groups, tiling.queries, tiling.repeats))
    return _unpacked(out, tiling), jnp.reshape(jnp.swapaxes(lse, 2, 3), (q.shape[0], q.shape[2], tiling.queries))


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
    interpret: Any = False,
) -> tuple[Any, Any, Any]:
    """The cotangents of q, k and v.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, S, G, K].
        v: values [B, S, G, K].
        out: the output of `forward` [B, T, H, K].
        lse: the logsumexp of `forward` [B, H, T].
        dout: the output's cotangent [B, T, H, K].
        sees: as `forward` took it, and so scale, cap and interpret.
        scale: of the products q·k.
        cap: of the scores, or None.
        interpret: True for the HLO interpreter, an InterpretParams for the TPU one.

    Returns:
        dq [B, T, H, K], dk and dv [B, S, G, K], in the inputs' dtypes. Sums are kept in float32.
    """
    tiling = Tiling.of(q, k, sees, backward=True)
    groups = k.shape[2]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [B, T, H]
    statistics = (_packed_statistic(jnp.swapaxes(lse, 1, 2), groups, tiling), _packed_statistic(delta, groups, tiling))
    arrays = (_packed(q, groups), _heads_first(k), _heads_first(v), _packed(dout.astype(q.dtype), groups), *statistics)
    shared = (arrays, _scalars(q, sees, tiling), _segments(sees, tiling), scale, cap, interpret)
    dq = tpu_backward.dq_call(tiling, *shared)
    dk, dv = tpu_backward.dkv_call(tiling, *shared)
    return _unpacked(dq, tiling), _heads_first(dk), _heads_first(dv)


# ------------------------------------------------------------------------------------------------ layouts


def _heads_first(x: Any) -> Any:
    return jnp.swapaxes(x, 1, 2)


def _packed(x: Any, groups: int) -> Any:
    """[B, T, H, K] as [B, G, T R, K]: row t R + r is query t of head r of the group."""
    b, t, h, k = x.shape
    x = jnp.reshape(x, (b, t, groups, h // groups, k))
    return jnp.reshape(jnp.transpose(x, (0, 2, 1, 3, 4)), (b, groups, -1, k))


def _unpacked(x: Any, tiling: Tiling) -> Any:
    b, groups, _, k = x.shape
    x = jnp.reshape(x, (b, groups, tiling.queries, tiling.repeats, k))
    return jnp.reshape(jnp.transpose(x, (0, 2, 1, 3, 4)), (b, tiling.queries, groups * tiling.repeats, k))


def _packed_statistic(x: Any, groups: int, tiling: Tiling) -> Any:
    """[B, T, H] as [B, G, 1, whole row tiles]."""
    return pad_to(_packed(x[..., None], groups)[..., 0], -1, tiling.row_tile)[:, :, None]


def _scalars(q: Any, sees: Visibility, tiling: Tiling) -> tuple[Any, Any]:
    """Offsets and lengths, int32 [B], whether the kernels read them or not."""
    batch = q.shape[0]
    offsets = jnp.zeros((batch,), jnp.int32) if sees.offsets is None else sees.offsets.astype(jnp.int32)
    lengths = jnp.full((batch,), tiling.keys, jnp.int32)
    if sees.kv_lengths is not None:
        lengths = jnp.clip(sees.kv_lengths.astype(jnp.int32), 0, tiling.keys)
    axes = _compat.varying_axes(q)  # scalars are prefetched, and may vary no less than what they lead to
    return _compat.mark_varying(offsets, axes), _compat.mark_varying(lengths, axes)


def _segments(sees: Visibility, tiling: Tiling) -> tuple[Any, ...]:
    """The segments of packed rows and of keys, int32 [B, 1, whole tiles]; nothing without segments."""
    if sees.q_segment_ids is None:
        return ()
    rows = jnp.repeat(sees.q_segment_ids.astype(jnp.int32), tiling.repeats, axis=1)
    keys = sees.kv_segment_ids.astype(jnp.int32)
    return pad_to(rows, -1, tiling.row_tile)[:, None], pad_to(keys, -1, tiling.key_tile)[:, None]
