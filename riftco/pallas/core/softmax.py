"""The running softmax of Flash attention, one tile of scores at a time.

Scores are kept in units of log 2: they are multiplied by log2(e) once, so that each exponential is one exp2. The
statistic that leaves a kernel is the natural logarithm. Rows are the second-to-last axis; per-row values keep their
last axis, of size 1. (A chip without such shapes may leave that axis away in `update` and `finish`, and hand the other
functions per-row values broadcast to the tile.) Masked scores are -inf; a row that sees nothing ends with output 0 and
logsumexp -inf.

Source: Dao 2023, arXiv:2307.08691, algorithms 1 and 2.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def scores(product: Any, scale: float, cap: float | None) -> tuple[Any, Any]:
    """Base-2 scores from the products q·k in float32, and the tanh of the cap (None without), for its derivative."""
    if cap is None:
        return product * (scale * LOG2E), None
    t = jnp.tanh(product * (scale / cap))
    return t * (cap * LOG2E), t


def masked(s: Any, mask: Any) -> Any:
    """Scores with -inf where `mask` is False; `mask` None hides nothing."""
    return s if mask is None else jnp.where(mask, s, -jnp.inf)


def update(top: Any, total: Any, s: Any) -> tuple[Any, Any, Any, Any]:
    """One tile: the new running maximum [r, 1] and sum [r, 1], the tile's weights p [r, c], and the factor [r, 1].

    The caller's accumulator becomes `acc * factor + p @ v`. Start from `top` -inf, `total` 0, accumulator 0.
    """
    keep = top.ndim == s.ndim
    new = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=keep))
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    factor = jnp.exp2(top - shift)
    p = jnp.exp2(s - over_rows(shift, s))
    return new, total * factor + jnp.sum(p, axis=-1, keepdims=keep), p, factor


def finish(top: Any, total: Any, acc: Any) -> tuple[Any, Any]:
    """The output acc / total [r, k], and the natural logsumexp [r, 1]."""
    empty = total == 0.0
    lse = jnp.where(empty, -jnp.inf, top * LN2 + jnp.log(jnp.where(empty, 1.0, total)))
    return acc / over_rows(jnp.where(empty, 1.0, total), acc), lse


def over_rows(row: Any, tile: Any) -> Any:
    """Per-row values that broadcast to a tile [r, c]: [r, 1] as they are, [r] repeated along the columns."""
    return row if row.ndim == tile.ndim else lax.broadcast_in_dim(row, tile.shape, (0,))


def weights(s: Any, lse: Any) -> Any:
    """The probabilities again, from base-2 scores [r, c] and the natural logsumexp [r, 1]."""
    return jnp.exp2(s - jnp.where(lse == -jnp.inf, 0.0, lse * LOG2E))


def score_cotangent(p: Any, dp: Any, delta: Any, t: Any, scale: float) -> Any:
    """The cotangent of the products q·k: scale · p (dp - delta) (1 - t²); delta = rowsum(dO · O) [r, 1]."""
    ds = p * (dp - delta) * scale
    return ds if t is None else ds * (1.0 - t * t)


def combine(outs: Any, lses: Any) -> tuple[Any, Any]:
    """Partial attentions over disjoint keys as one.

    `outs` [n, ..., k] are float32, each divided by its own sum; `lses` [n, ...] are natural logarithms. A part that saw
    nothing has lse -inf and weight 0.
    """
    top = jnp.max(lses, axis=0)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    w = jnp.exp(lses - shift[None])
    total = jnp.sum(w, axis=0)
    lse = jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(jnp.where(total == 0.0, 1.0, total)))
    w = w / jnp.where(total == 0.0, 1.0, total)[None]
    # A part without weight may hold anything.
    parts = jnp.where(w[..., None] == 0.0, 0.0, outs * w[..., None])
    return jnp.sum(parts, axis=0), lse
