"""Scaled dot-product attention, one query row at a time, in NumPy float64.

Query head h reads key/value head h // (H // G). Only the keys that a query may see are ever read, so a masked key
contributes exactly 0.0 whatever it holds. A row with nothing to attend to gives output 0 and gradient 0.

All functions here share these keywords:

    causal            a key after the query's absolute position q_offset + t is masked
    window            W: only keys less than W positions before the query (not causal: on either side), itself included
    q_segment_ids     int [B, T] and kv_segment_ids int [B, S], both or neither: a query sees keys of its own segment
    q_offset          int, or int [B]: the absolute position of the first query; keys stand at 0 .. S-1
    kv_lengths        int [B]: keys from there on are masked
    logits_soft_cap   c: scores become c·tanh(score / c), after scaling
    scale             factor of the dot products; 1/√K when None
"""

import math

import numpy as np

from riftco.errors import ConfigError, ShapeError
from riftco.oracle.elementwise import as_float64


def _visible(
    batch,
    time,
    key_count,
    *,
    causal=True,
    window=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_offset=0,
    kv_lengths=None,
) -> list[int]:
    """The key positions that the query at (batch, time) may look at."""
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ConfigError(
            "attention: q_segment_ids and kv_segment_ids come together; got only one of them. Pass both or neither."
        )
    offsets = np.asarray(q_offset)
    position = time + int(offsets if offsets.ndim == 0 else offsets[batch])
    keys = []
    for s in range(key_count):
        distance = position - s
        if causal and distance < 0:
            continue
        if window is not None and (distance >= window or (not causal and -distance >= window)):
            continue
        if kv_lengths is not None and s >= int(kv_lengths[batch]):
            continue
        if q_segment_ids is not None and kv_segment_ids is not None:
            if int(q_segment_ids[batch][time]) != int(kv_segment_ids[batch][s]):
                continue
        keys.append(s)
    return keys


def _rows(q, k, *, logits_soft_cap=None, scale=None, **masking):
    """Yields (b, h, g, t, keys, scores, slopes) for each query row that sees a key.

    `scores` are the scaled and capped dot products with the visible keys, `slopes` their derivatives by the plain
    dot products.
    """
    batches, times, heads, width = q.shape
    key_count, kv_heads = k.shape[1], k.shape[2]
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    for b in range(batches):
        for t in range(times):
            keys = _visible(b, t, key_count, **masking)
            if not keys:
                continue
            for h in range(heads):
                g = h // (heads // kv_heads)
                scores = scale * (k[b, keys, g] @ q[b, t, h])
                slopes = np.full(len(keys), scale)
                if logits_soft_cap is not None:
                    saturation = np.tanh(scores / logits_soft_cap)
                    scores, slopes = logits_soft_cap * saturation, slopes * (1.0 - saturation**2)
                yield b, h, g, t, keys, scores, slopes


def _softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - np.max(scores))
    return exponentials / np.sum(exponentials)


def _inputs(q, k, *others) -> list[np.ndarray]:
    """Everything as float64, with the shapes checked; `others` is v, when there is one."""
    arrays = [as_float64(x) for x in (q, k, *others)]
    q, k = arrays[:2]
    fits = q.ndim == k.ndim == 4 and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not fits or q.shape[2] % k.shape[2] or any(v.shape != k.shape for v in arrays[2:]):
        raise ShapeError(
            "attention: q[B, T, H, K] needs k and v [B, S, G, K] with G dividing H; got "
            f"{', '.join(str(x.shape) for x in arrays)}. Check the number of key/value heads."
        )
    return arrays


@np.errstate(all="ignore")
def attention(q, k, v, **options):
    """Softmax(scale · q kᵀ) v over the keys that each query may see.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, S, G, K], G dividing H.
        v: values [B, S, G, K].
        options: the module's keywords.

    Returns:
        Contexts [B, T, H, K].
    """
    q, k, v = _inputs(q, k, v)
    context = np.zeros_like(q)
    for b, h, g, t, keys, scores, _ in _rows(q, k, **options):
        context[b, t, h] = _softmax(scores) @ v[b, keys, g]
    return context


@np.errstate(all="ignore")
def attention_vjp(q, k, v, dy, **options):
    """Cotangents (dq, dk, dv): dv = Pᵀ dy, dP = dy vᵀ, dS = P (dP - Σ P dP)."""
    q, k, v = _inputs(q, k, v)
    dy = as_float64(dy)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h, g, t, keys, scores, slopes in _rows(q, k, **options):
        p = _softmax(scores)
        dp = v[b, keys, g] @ dy[b, t, h]
        ddot = p * (dp - np.sum(p * dp)) * slopes
        for index, s in enumerate(keys):
            dv[b, s, g] += p[index] * dy[b, t, h]
            dq[b, t, h] += ddot[index] * k[b, s, g]
            dk[b, s, g] += ddot[index] * q[b, t, h]
    return dq, dk, dv


@np.errstate(all="ignore")
def attention_weights(q, k, **options):
    """The probabilities P [B, H, T, S]; a masked entry is exactly 0."""
    q, k = _inputs(q, k)
    weights = np.zeros((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    for b, h, _, t, keys, scores, _ in _rows(q, k, **options):
        weights[b, h, t, keys] = _softmax(scores)
    return weights


@np.errstate(all="ignore")
def attention_weights_vjp(q, k, dy, **options):
    """Cotangents (dq, dk); dy at masked entries is not read."""
    q, k = _inputs(q, k)
    dy = as_float64(dy)
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    for b, h, g, t, keys, scores, slopes in _rows(q, k, **options):
        p, dp = _softmax(scores), dy[b, h, t, keys]
        ddot = p * (dp - np.sum(p * dp)) * slopes
        for index, s in enumerate(keys):
            dq[b, t, h] += ddot[index] * k[b, s, g]
            dk[b, s, g] += ddot[index] * q[b, t, h]
    return dq, dk


@np.errstate(all="ignore")
def attention_statistics(q, k, **options):
    """The natural-log logsumexp of each row's scores [B, H, T]; -inf for a row that sees nothing."""
    q, k = _inputs(q, k)
    statistics = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for b, h, _, t, _, scores, _ in _rows(q, k, **options):
        largest = np.max(scores)
        statistics[b, h, t] = largest + np.log(np.sum(np.exp(scores - largest)))
    return statistics


@np.errstate(all="ignore")
def attention_statistics_vjp(q, k, dy, **options):
    """Cotangents (dq, dk): the derivative of a row's logsumexp by its scores is its softmax."""
    q, k = _inputs(q, k)
    dy = as_float64(dy)
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    for b, h, g, t, keys, scores, slopes in _rows(q, k, **options):
        ddot = dy[b, h, t] * _softmax(scores) * slopes
        for index, s in enumerate(keys):
            dq[b, t, h] += ddot[index] * k[b, s, g]
            dk[b, s, g] += ddot[index] * q[b, t, h]
    return dq, dk
