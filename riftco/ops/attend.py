"""Attention: the public functions, and the plain rule that holds all scores.

The blockwise rule is in blockwise.py, the kernels behind pallas/dispatch.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from riftco.autodiff.box import Box, unbox
from riftco.autodiff.bridge import without_jax_derivatives
from riftco.autodiff.tape import Op
from riftco.ops import blockwise, validate
from riftco.ops.elementwise import astype, exp, tanh, where
from riftco.ops.linalg import einsum
from riftco.ops.masks import Visibility, visibility
from riftco.ops.norm import statistics_dtype
from riftco.ops.reduce import sum
from riftco.ops.shape import broadcast_to, reshape
from riftco.pallas import dispatch
from riftco.types import Array

# ------------------------------------------------------------------------------------------------ the plain rule
# Query head h reads key head h // R, R = H / G; scores are [B, G, R, T, S].


class PlainResiduals(NamedTuple):
    """What the plain rule saves."""

    q: Any
    k: Any
    v: Any
    weights: Any
    sees: Visibility


def _grouped(q: Any, groups: int) -> Any:
    b, t, h, k = q.shape
    return reshape(q, (b, t, groups, h // groups, k))


def _mask(sees: Visibility, shape: Any) -> Any:
    """[B, G, R, T, S], or None."""
    mask = sees.mask(jnp.arange(shape[3], dtype=jnp.int32), jnp.arange(shape[4], dtype=jnp.int32))
    return None if mask is None else jnp.broadcast_to(mask[:, None, None], shape)


def _scores(q: Any, k: Any, scale: float, cap: float | None) -> tuple[Any, Any]:
    """Scaled and capped scores, and the tanh of the cap, which its derivative needs."""
    dtype = statistics_dtype(q)
    s = astype(einsum("btgrk,bsgk->bgrts", _grouped(q, k.shape[2]), k), dtype) * scale
    if cap is None:
        return s, None
    t = tanh(s / cap)
    return cap * t, t


def plain_weights(q: Any, k: Any, sees: Visibility, scale: float, cap: float | None) -> Any:
    """Attention probabilities [B, G, R, T, S]; rows that see nothing are 0, as is every unseen entry."""
    s, _ = _scores(q, k, scale, cap)
    mask = _mask(sees, s.shape)
    if mask is not None:
        s = where(mask, s, -jnp.inf)
    top = jnp.max(unbox(s), axis=-1, keepdims=True)  # any shift gives the same weights, so it needs no derivative
    e = exp(s - jnp.broadcast_to(jnp.where(jnp.isneginf(top), jnp.zeros((), s.dtype), top), s.shape))
    total = sum(e, -1, keepdims=True)
    total = where(unbox(total) == 0, 1.0, total)
    return e / broadcast_to(total, e.shape)


def _silence(values: Any, sees: Visibility) -> Any:
    """Keys or values with the slots past each row's length zeroed: 0 times a stale NaN would be NaN."""
    if sees.kv_lengths is None:
        return values
    valid = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :] < sees.kv_lengths[:, None]
    return where(jnp.broadcast_to(valid[:, :, None, None], values.shape), values, 0.0)


def _plain_fwd(q: Any, k: Any, v: Any, sees: Visibility, scale: float, cap: float | None) -> Any:
    k, v = _silence(k, sees), _silence(v, sees)
    weights = astype(plain_weights(q, k, sees, scale, cap), q.dtype)
    out = reshape(einsum("bgrts,bsgk->btgrk", weights, v), (*q.shape[:3], v.shape[3]))
    return out, PlainResiduals(q, k, v, weights, sees)


def _plain_bwd(saved: PlainResiduals, ct: Any, scale: float, cap: float | None) -> Any:
    q, k, v, weights, sees = saved
    groups = k.shape[2]
    dout = _grouped(ct, groups)
    dtype = statistics_dtype(q)
    p = astype(weights, dtype)
    dv = einsum("bgrts,btgrk->bsgk", weights, dout)
    dp = astype(einsum("btgrk,bsgk->bgrts", dout, v), dtype)
    ds = p * (dp - broadcast_to(sum(dp * p, -1, keepdims=True), dp.shape))
    if cap is not None:
        t = _scores(q, k, scale, cap)[1]
        ds = ds * (1.0 - t * t)
    mask = _mask(sees, ds.shape)
    if mask is not None:
        ds = where(mask, ds, 0.0)
    ds = astype(ds * scale, q.dtype)
    dq = reshape(einsum("bgrts,bsgk->btgrk", ds, k), q.shape)
    dk = einsum("bgrts,btgrk->bsgk", ds, _grouped(q, groups))
    return dq, _silence(dk, sees), _silence(dv, sees)


# ------------------------------------------------------------------------------------------------ the op


class KernelResiduals(NamedTuple):
    """What a Flash kernel saves: nothing larger than q, k and v."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any  # [B, H, T] float32, natural logarithm; -inf for a row that sees nothing
    sees: Visibility

    def inputs(self) -> tuple[Any, Any, Any]:
        """q, k and v."""
        return self.q, self.k, self.v


class AttentionCall(NamedTuple):
    """The static part of one call of `attention`."""

    scale: float
    cap: float | None
    how: str
    interpret: Any = False


def _attention_impl(q: Any, k: Any, v: Any, sees: Visibility, *, call: AttentionCall) -> Any:
    return attention_fwd(q, k, v, sees, call=call)[0]


def attention_fwd(q: Any, k: Any, v: Any, sees: Visibility, *, call: AttentionCall) -> Any:
    """The forward rule: the output and the residuals."""
    # Under an outer derivative the rule must be made of ops; loops and kernels are not.
    if call.how == "plain" or any(isinstance(x, Box) for x in (q, k, v)):
        return _plain_fwd(q, k, v, sees, call.scale, call.cap)
    if call.how == "blockwise":
        return blockwise.forward(q, k, v, sees, call.scale, call.cap)

    def kernel(q: Any, k: Any, v: Any, sees: Visibility) -> Any:
        return dispatch.attention(call.how, q, k, v, sees, call.scale, call.cap, call.interpret)

    out, lse = without_jax_derivatives(kernel, f"attention[{call.how}]")(q, k, v, sees)
    return out, KernelResiduals(q, k, v, out, lse, sees)


def attention_bwd(saved: Any, ct: Any, *, call: AttentionCall) -> Any:
    """The backward rule: the cotangents of q, k, v, and a None for each of the options."""
    scale, cap = call.scale, call.cap
    if isinstance(saved, PlainResiduals):
        return *_plain_bwd(saved, ct, scale, cap), no_cotangents(saved.sees)
    if isinstance(ct, Box) or any(isinstance(x, Box) for x in jax.tree_util.tree_leaves(saved)):
        q, k, v = saved.inputs()
        return *_plain_bwd(_plain_fwd(q, k, v, saved.sees, scale, cap)[1], ct, scale, cap), no_cotangents(saved.sees)
    if isinstance(saved, KernelResiduals):
        q, k, v, out, lse, sees = saved

        def kernel(q: Any, k: Any, v: Any, out: Any, lse: Any, ct: Any, sees: Visibility) -> Any:
            return dispatch.attention_backward(call.how, q, k, v, out, lse, ct, sees, scale, cap, call.interpret)

        cotangents = without_jax_derivatives(kernel, f"attention[{call.how}]")(q, k, v, out, lse, ct, sees)
        return *cotangents, no_cotangents(sees)
    return *blockwise.backward(saved, ct, scale, cap), no_cotangents(saved.sees)


def no_cotangents(sees: Visibility) -> Visibility:
    """The options' share of the cotangents: a None for each of their integer arrays."""
    return jax.tree_util.tree_map(lambda _: None, sees)


_attention = Op("attention", _attention_impl, attention_fwd, attention_bwd)


def _prepare(q: Any, k: Any, v: Any, scale: Any, cap: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    who = "attention"
    q, k, v = (validate.floating(who, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    validate.same_dtype(who, q, k, v)
    fits = q.ndim == k.ndim == 4 and q.shape[0] == k.shape[0] and tuple(k.shape) == tuple(v.shape)
    fits = fits and q.shape[3] == k.shape[3] > 0 and k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0
    validate.require(
        who,
        fits,
        "q must be [B, T, H, K], k and v [B, S, G, K] with G dividing H",
        f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}",
    )
    sees = visibility(q.shape[0], q.shape[1], k.shape[1], **options)
    factor = q.shape[3] ** -0.5 if scale is None else validate.finite(who, "scale", scale)
    return q, k, v, sees, factor, None if cap is None else validate.finite(who, "logits_soft_cap", cap, positive=True)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: Any = 0,
    kv_lengths: Array | None = None,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """Scaled dot-product attention, grouped heads, causal unless said otherwise.

    Query t of row b stands at position `q_offset + t`; key s at position s. It sees key s if s is not in its future
    (causal), closer than `window`, below the row's length, and in its segment. The weights are the softmax of
    `scale q·k`, capped to `c tanh(score / c)` with `logits_soft_cap=c`. A query that sees nothing gets output 0 and
    gradient 0. What a query does not see contributes exactly 0.0 to its output and gets exactly 0.0 from it.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, S, G, K]; query head h reads key head h // (H / G).
        v: values [B, S, G, K].
        causal: hide later positions.
        window: a query sees `window` keys, its own included (not causal: on either side of it); None for all.
        q_segment_ids: int [B, T], given together with `kv_segment_ids`.
        kv_segment_ids: int [B, S].
        q_offset: position of the first query: an int, or int32 [B].
        kv_lengths: int [B]; keys at and past it are not seen, whatever they hold.
        logits_soft_cap: c, or None.
        scale: None for 1/sqrt(K).
        implementation: "plain" holds all scores [B, H, T, S]; "blockwise" holds one block of queries, skips what is
            masked, and saves no more than a few times q, k and v; "pallas_tpu", "pallas_triton" and
            "pallas_mosaic_gpu" are Flash kernels, "cudnn" is NVIDIA's. None takes the one preferred on the device
            that supports the call (`riftco doctor --kernels`).
        interpret: True runs a kernel by its interpreter, on any device; an interpreter's own parameters are handed
            to it. The two XLA rules have none and refuse it.

    Returns:
        [B, T, H, K] in q's dtype; softmax in float32 or wider.

    Raises:
        ShapeError, DTypeError, ConfigError: if arguments do not fit. UnsupportedError (a NotImplementedError): if a
        named implementation cannot run the call here, with the reason; it is never replaced by another.

    Gradient:
        dV = Pᵀ dO, dS = P (dO Vᵀ - rowsum(P dO Vᵀ)), dQ = scale dS K, dK = scale dSᵀ Q. Plain saves q, k, v and P.
        Blockwise saves q, k, v and the logsumexp of each row, and makes P again; beyond 1024 queries it saves the
        output as well, and up to there, without a cap, the blocks of P that are not masked where they are no larger
        than q, k and v together. A kernel saves q, k, v, the output and the logsumexp. Any order (beyond the first by
        the plain rule).

    Source:
        Vaswani et al. 2017, arXiv:1706.03762, eq. 1; Dao 2023, arXiv:2307.08691, alg. 1 and 2.
    """
    options = {
        "causal": causal,
        "window": window,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_offset": q_offset,
        "kv_lengths": kv_lengths,
    }
    who = "attention"
    q, k, v, sees, factor, cap = _prepare(q, k, v, scale, logits_soft_cap, options)
    if 0 in (*q.shape, *k.shape):  # nothing sees anything, and no kernel is to say so
        dispatch.check(who, implementation, interpret)
        return where(jnp.zeros(q.shape, bool), q, 0.0)
    how = choose(implementation, unbox(q), unbox(k), unbox(v), sees, cap, interpret)
    return _attention(q, k, v, sees, call=AttentionCall(factor, cap, how, interpret))


def choose(
    implementation: str | None,
    q: Any,
    k: Any,
    v: Any,
    sees: Visibility | None = None,
    cap: float | None = None,
    interpret: Any = False,
) -> str:
    """The implementation that a call runs; of q, k and v only shape, dtype and device matter. Raises as `attention`."""
    rule = dispatch.attention_rule(q.shape[1])
    return dispatch.choose("attention", implementation, rule, interpret, (q, k, v), q, k, v, sees or Visibility(), cap)


def attention_weights(
    q: Array,
    k: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: Any = 0,
    kv_lengths: Array | None = None,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
) -> Array:
    """The probabilities that `attention` would use, for looking at them; arguments and errors as there.

    Returns:
        [B, H, T, S] in float32 or wider; rows sum to 1, or are 0 where nothing is seen.

    Gradient:
        through the softmax, op by op. Any order.
    """
    options = {
        "causal": causal,
        "window": window,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_offset": q_offset,
        "kv_lengths": kv_lengths,
    }
    q, k, _, sees, factor, cap = _prepare(q, k, k, scale, logits_soft_cap, options)
    if 0 in (*q.shape, *k.shape):
        return jnp.zeros((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), statistics_dtype(q))
    weights = plain_weights(q, _silence(k, sees), sees, factor, cap)
    return reshape(weights, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
