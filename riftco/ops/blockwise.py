"""Attention one block of queries at a time, for XLA: no scores above the diagonal, memory linear in the length.

Queries are laid out [B, G, R T, K] within a block and keys [B, G, S, K], so that each product is one batched matrix
product. Short sequences are cut into a few blocks whose keys are sliced statically at the diagonal. Long ones run a
loop over query blocks with an inner loop over just the key blocks that they reach, and an online softmax. One statistic
a row is saved; the weights, where they cost no more than q, k and v do, and else made again. Plain arrays only; the
caller takes the plain rule where an outer derivative is being recorded.

Source: Dao 2023, arXiv:2307.08691.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from riftco.ops.masks import Visibility
from riftco.ops.norm import statistics_dtype
from riftco.ops.shape import transpose
from riftco.pallas.core.sizes import ceil_div, least, pad_to, quotient, round_up

# Up to this many queries the blocks are unrolled; beyond, loops keep the program and the memory small.
UNROLLED_QUERIES = 1024
LOOP_QUERIES, LOOP_KEYS = 256, 512


class BlockwiseResiduals(NamedTuple):
    """What the blockwise rule saves; head-major layouts, as its products read them."""

    q: Any  # [B, H, T, K]
    k: Any  # [B, G, S, K]
    v: Any  # [B, G, S, K]
    out: Any  # [B, H, T, K]; None where the blocks are unrolled: their backward pass needs only the weights
    lse: Any  # [B, H, T], natural logarithm; -inf for a row that sees nothing
    weights: Any  # of unrolled blocks, if without a cap and no larger than q, k and v together; else None, made again
    sees: Visibility

    def inputs(self) -> tuple[Any, Any, Any]:
        """q, k and v as they came."""
        return tuple(transpose(x, (0, 2, 1, 3)) for x in (self.q, self.k, self.v))  # type: ignore[return-value]


def _block_size(queries: int) -> int:
    """Rows of an unrolled block: a multiple of 32 near 80, in at most 8 blocks, since each is compiled."""
    blocks = min(8, max(1, round(queries / 80)))
    return max(64, round_up(ceil_div(queries, blocks), 32))


def _positions(first: int, last: int) -> Any:
    """Positions as int32 whatever jax's default integer is, as the offsets that they meet are."""
    return jnp.arange(first, last, dtype=jnp.int32)


def _heads_first(x: Any) -> Any:
    return jnp.swapaxes(x, 1, 2)


def _rows(x: Any, groups: int) -> Any:
    """[B, H, t, K] as [B, G, R t, K]."""
    return jnp.reshape(x, (x.shape[0], groups, -1, x.shape[-1]))


def _scores(q: Any, k: Any, scale: float, cap: float | None) -> tuple[Any, Any]:
    s = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=statistics_dtype(q)) * scale
    if cap is None:
        return s, None
    t = jnp.tanh(s / cap)
    return cap * t, t


def _visible(sees: Visibility, rows: Any, columns: Any, repeats: int) -> Any:
    """[B or 1, 1, R t, s], or None when all is seen."""
    mask = sees.mask(rows, columns)
    return None if mask is None else jnp.tile(mask, (1, repeats, 1))[:, None]


def _times(p: Any, x: Any) -> Any:
    """[.., t, s] times [.., s, K]."""
    return lax.dot_general(p, x, (((3,), (2,)), ((0, 1), (0, 1))))


def _transposed_times(p: Any, x: Any) -> Any:
    """[.., t, s] transposed, times [.., t, K]."""
    return lax.dot_general(p, x, (((2,), (2,)), ((0, 1), (0, 1))))


def forward(q: Any, k: Any, v: Any, sees: Visibility, scale: float, cap: float | None) -> tuple[Any, Any]:
    """The output [B, T, H, K], and the residuals."""
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    if sees.kv_lengths is not None:  # 0 times a stale NaN would be NaN
        valid = (_positions(0, k.shape[2])[None, :] < sees.kv_lengths[:, None])[:, None, :, None]
        k, v = jnp.where(valid, k, jnp.zeros((), k.dtype)), jnp.where(valid, v, jnp.zeros((), v.dtype))
    if q.shape[2] > UNROLLED_QUERIES:
        out, lse = _forward_loop(q, k, v, sees, scale, cap)
        return _heads_first(out), BlockwiseResiduals(q, k, v, out, lse, None, sees)
    out, lse, weights = _forward_unrolled(q, k, v, sees, scale, cap)
    # With a cap the backward pass needs the scores themselves.
    kept = cap is None and sum(w.size for w in weights) <= q.size + k.size + v.size
    return _heads_first(out), BlockwiseResiduals(q, k, v, None, lse, weights if kept else None, sees)


def backward(saved: BlockwiseResiduals, ct: Any, scale: float, cap: float | None) -> tuple[Any, Any, Any]:
    """The cotangents of q [B, T, H, K], k and v [B, S, G, K]."""
    dout = _heads_first(ct)
    dq, dk, dv = (_backward_unrolled if saved.out is None else _backward_loop)(saved, dout, scale, cap)
    if saved.sees.kv_lengths is not None:
        valid = (_positions(0, dk.shape[2])[None, :] < saved.sees.kv_lengths[:, None])[:, None, :, None]
        dk, dv = jnp.where(valid, dk, jnp.zeros((), dk.dtype)), jnp.where(valid, dv, jnp.zeros((), dv.dtype))
    return _heads_first(dq), _heads_first(dk), _heads_first(dv)


# ------------------------------------------------------------------------------------------------ unrolled


def _blocks(queries: int, keys: int, sees: Visibility) -> list[tuple[int, int, int, int]]:
    """(first query, last query, first key, last key) of each block, ends exclusive."""
    size = _block_size(queries)
    return [
        (first, min(first + size, queries), *sees.reach(first, min(first + size, queries), keys))
        for first in range(0, queries, size)
    ]


def _softmax_rows(s: Any, mask: Any) -> tuple[Any, Any]:
    """Weights and natural-log sums of rows; weight 0 and -inf for a row that sees nothing."""
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True)
    top = jnp.where(jnp.isneginf(top), jnp.zeros((), s.dtype), top)
    e = jnp.exp(s - top)
    total = jnp.sum(e, axis=-1, keepdims=True)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, jnp.ones((), s.dtype), total)))
    return e / jnp.where(total == 0, jnp.ones((), s.dtype), total), lse[..., 0]


def _forward_unrolled(
    q: Any, k: Any, v: Any, sees: Visibility, scale: float, cap: float | None
) -> tuple[Any, Any, list[Any]]:
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1], k.shape[2]
    outs, stats, weights = [], [], []
    for first, last, low, high in _blocks(queries, keys, sees):
        shape = (batch, heads, last - first)
        if low == high:
            outs.append(jnp.zeros((*shape, v.shape[3]), q.dtype))
            stats.append(jnp.full(shape, -jnp.inf, statistics_dtype(q)))
            continue
        s, _ = _scores(_rows(q[:, :, first:last], groups), k[:, :, low:high], scale, cap)
        mask = _visible(sees, _positions(first, last), _positions(low, high), heads // groups)
        p, lse = _softmax_rows(s, mask)
        p = p.astype(q.dtype)
        outs.append(jnp.reshape(_times(p, v[:, :, low:high]), (*shape, v.shape[3])))
        stats.append(jnp.reshape(lse, shape))
        weights.append(p)
    return jnp.concatenate(outs, axis=2), jnp.concatenate(stats, axis=2), weights


def _weights_again(s: Any, lse: Any, mask: Any) -> Any:
    """exp(s - lse), 0 where nothing is seen."""
    finite = jnp.where(jnp.isneginf(lse), jnp.zeros((), lse.dtype), lse)
    p = jnp.exp(s - finite)
    if mask is None:
        return p
    return jnp.where(mask, p, jnp.zeros((), p.dtype))


def _dscores(p: Any, dp: Any, delta: Any, tanh: Any, scale: float, mask: Any) -> Any:
    ds = p * (dp - delta)
    if tanh is not None:
        ds = ds * (1.0 - tanh * tanh)
    ds = ds * scale
    return ds if mask is None else jnp.where(mask, ds, jnp.zeros((), ds.dtype))


def _backward_unrolled(saved: BlockwiseResiduals, dout: Any, scale: float, cap: float | None) -> tuple[Any, Any, Any]:
    q, k, v, _, lse, weights, sees = saved
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    kept = None if weights is None else iter(weights)
    dqs, dk, dv = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for first, last, low, high in _blocks(queries, keys, sees):
        shape = (batch, heads, last - first, width)
        if low == high:
            dqs.append(jnp.zeros(shape, q.dtype))
            continue
        q_rows, do_rows = _rows(q[:, :, first:last], groups), _rows(dout[:, :, first:last], groups)
        if kept is not None:  # a weight of 0 needs no mask: its score's cotangent is 0 times a finite number
            p, t, mask = next(kept), None, None
        else:
            s, t = _scores(q_rows, k[:, :, low:high], scale, cap)
            mask = _visible(sees, _positions(first, last), _positions(low, high), heads // groups)
            p = _weights_again(s, _rows(lse[:, :, first:last, None], groups), mask)
        wide = p.astype(statistics_dtype(q))
        dp, _ = _scores(do_rows, v[:, :, low:high], 1.0, None)
        delta = jnp.sum(dp * wide, axis=-1, keepdims=True)
        ds = _dscores(wide, dp, delta, t, scale, mask).astype(q.dtype)
        dqs.append(jnp.reshape(_times(ds, k[:, :, low:high]), shape))
        dk = dk.at[:, :, low:high].add(_transposed_times(ds, q_rows))
        dv = dv.at[:, :, low:high].add(_transposed_times(p.astype(q.dtype), do_rows))
    return jnp.concatenate(dqs, axis=2), dk, dv


# ------------------------------------------------------------------------------------------------ loops


def _key_range(sees: Visibility, first: Any, queries: int, keys: int) -> tuple[Any, Any]:
    """The key blocks [low, high) that the query block at `first` reaches; traced."""
    low, high = sees.reach(first, least(first + LOOP_QUERIES, queries), keys)
    return quotient(low, LOOP_KEYS), ceil_div(high, LOOP_KEYS)


def _loop_mask(sees: Visibility, first: Any, start: Any, queries: int, keys: int, repeats: int) -> Any:
    rows, columns = first + _positions(0, LOOP_QUERIES), start + _positions(0, LOOP_KEYS)
    inside = (rows < queries)[:, None] & (columns < keys)[None, :]
    mask = sees.mask(jnp.minimum(rows, queries - 1), jnp.minimum(columns, keys - 1))
    mask = inside[None] if mask is None else mask & inside[None]
    return jnp.tile(mask, (1, repeats, 1))[:, None]


def _cut(x: Any, start: Any, size: int) -> Any:
    return lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _forward_loop(q: Any, k: Any, v: Any, sees: Visibility, scale: float, cap: float | None) -> tuple[Any, Any]:
    batch, heads, queries, _ = q.shape
    groups, keys, repeats = k.shape[1], k.shape[2], heads // k.shape[1]
    q, k, v = pad_to(q, 2, LOOP_QUERIES), pad_to(k, 2, LOOP_KEYS), pad_to(v, 2, LOOP_KEYS)
    dtype, rows = statistics_dtype(q), repeats * LOOP_QUERIES

    def block(i: Any) -> Any:
        first = i * LOOP_QUERIES
        q_rows = _rows(_cut(q, first, LOOP_QUERIES), groups)

        def step(j: Any, state: Any) -> Any:
            top, total, acc = state
            start = j * LOOP_KEYS
            s, _ = _scores(q_rows, _cut(k, start, LOOP_KEYS), scale, cap)
            s = jnp.where(_loop_mask(sees, first, start, queries, keys, repeats), s, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
            shift = jnp.where(jnp.isneginf(new_top), jnp.zeros((), dtype), new_top)
            p, keep = jnp.exp(s - shift), jnp.exp(top - shift)
            part = _times(p.astype(q.dtype), _cut(v, start, LOOP_KEYS)).astype(dtype)
            return new_top, total * keep + jnp.sum(p, axis=-1, keepdims=True), acc * keep + part

        start = (
            jnp.full((batch, groups, rows, 1), -jnp.inf, dtype),
            jnp.zeros((batch, groups, rows, 1), dtype),
            jnp.zeros((batch, groups, rows, v.shape[3]), dtype),
        )
        top, total, acc = lax.fori_loop(*_key_range(sees, first, queries, keys), step, start)
        safe = jnp.where(total == 0, jnp.ones((), dtype), total)
        lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
        shape = (batch, heads, LOOP_QUERIES)
        return jnp.reshape(acc / safe, (*shape, -1)).astype(q.dtype), jnp.reshape(lse, shape)

    out, lse = lax.map(block, _positions(0, q.shape[2] // LOOP_QUERIES))  # [N, B, H, t, ...]
    out, lse = (jnp.reshape(jnp.moveaxis(x, 0, 2), (batch, heads, -1, *x.shape[4:])) for x in (out, lse))
    return out[:, :, :queries], lse[:, :, :queries]


def _backward_loop(saved: BlockwiseResiduals, dout: Any, scale: float, cap: float | None) -> tuple[Any, Any, Any]:
    q, k, v, out, lse, _, sees = saved
    batch, heads, queries, width = q.shape
    groups, keys, repeats = k.shape[1], k.shape[2], heads // k.shape[1]
    dtype = statistics_dtype(q)
    delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)
    q, dout, lse, delta = (pad_to(x, 2, LOOP_QUERIES) for x in (q, dout, lse, delta))
    k, v = pad_to(k, 2, LOOP_KEYS), pad_to(v, 2, LOOP_KEYS)

    def block(state: Any, i: Any) -> Any:
        first = i * LOOP_QUERIES
        q_rows, do_rows = (_rows(_cut(x, first, LOOP_QUERIES), groups) for x in (q, dout))
        lse_rows, delta_rows = (_rows(_cut(x, first, LOOP_QUERIES)[..., None], groups) for x in (lse, delta))

        def step(j: Any, state: Any) -> Any:
            dq, dk, dv = state
            start = j * LOOP_KEYS
            k_block, v_block = _cut(k, start, LOOP_KEYS), _cut(v, start, LOOP_KEYS)
            s, t = _scores(q_rows, k_block, scale, cap)
            mask = _loop_mask(sees, first, start, queries, keys, repeats)
            p = _weights_again(s, lse_rows, mask)
            dp, _ = _scores(do_rows, v_block, 1.0, None)
            ds = _dscores(p, dp, delta_rows, t, scale, mask).astype(q.dtype)
            dk = _added(dk, start, _transposed_times(ds, q_rows))
            dv = _added(dv, start, _transposed_times(p.astype(q.dtype), do_rows))
            return dq + _times(ds, k_block).astype(dtype), dk, dv

        zero = jnp.zeros((batch, groups, repeats * LOOP_QUERIES, width), dtype)
        dq, dk, dv = lax.fori_loop(*_key_range(sees, first, queries, keys), step, (zero, *state))
        return (dk, dv), jnp.reshape(dq, (batch, heads, LOOP_QUERIES, width)).astype(q.dtype)

    start = (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
    (dk, dv), dq = lax.scan(block, start, _positions(0, q.shape[2] // LOOP_QUERIES))
    dq = jnp.reshape(jnp.moveaxis(dq, 0, 2), (batch, heads, -1, width))[:, :, :queries]
    return dq, dk[:, :, :keys].astype(k.dtype), dv[:, :, :keys].astype(v.dtype)


def _added(total: Any, start: Any, part: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(total, _cut(total, start, LOOP_KEYS) + part.astype(total.dtype), start, 2)
