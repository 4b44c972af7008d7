"""Layers as functions: a dict of one layer's arrays and activations in, activations out.

Shape letters: B batch, T positions, D width, H query heads, G key heads, K head width, F hidden.
"""

from collections.abc import Callable, Mapping
from typing import Any

import chex

from riftco import ops
from riftco.types import Array

Params = Mapping[str, Any]


def linear(params: Params, x: Array) -> Array:
    """`x Wᵀ + b`, and what an adapter adds.

    Args:
        params: "weight" [O, I], floating or an `ops.NF4Array`; where there is one, "bias" [O]; where there is one,
            "adapter", a function [..., I] -> [..., O].
        x: [..., I].

    Returns:
        [..., O].
    """
    weight, bias, adapter = params["weight"], params.get("bias"), params.get("adapter")
    if isinstance(weight, ops.NF4Array):
        out = ops.nf4_linear(x, weight, bias)
    else:
        chex.assert_rank(weight, 2)
        out = ops.linear(x, weight, bias)
    return out if adapter is None else out + adapter(x)


def norm(params: Params, x: Array, *, eps: float) -> Array:
    """Layer normalisation if there is a "bias", root-mean-square normalisation otherwise, over the last axis.

    Args:
        params: "scale" [D] and, for layer normalisation, "bias" [D].
        x: [..., D].
        eps: added inside the root.
    """
    chex.assert_rank(params["scale"], 1)
    if "bias" in params:
        return ops.layer_norm(x, params["scale"], params["bias"], eps=eps)
    return ops.rms_norm(x, params["scale"], eps=eps)


def embedding(params: Params, ids: Array) -> Array:
    """Rows of "weight" [V, D] at `ids` [...]: [..., D]."""
    chex.assert_rank(params["weight"], 2)
    return ops.take(params["weight"], ids, 0)


def feed_forward(params: Params, x: Array, *, mlp: str) -> Array:
    """The position-wise network.

    Args:
        params: "expand" and "project" for gelu and gelu_tanh; "gate", "up" and "down" for swiglu.
        x: [B, T, D].
        mlp: "gelu", "gelu_tanh" or "swiglu".

    Returns:
        [B, T, D].
    """
    chex.assert_rank(x, 3)
    if mlp == "swiglu":
        return linear(params["down"], ops.swiglu(linear(params["gate"], x), linear(params["up"], x)))
    return linear(params["project"], ops.gelu(linear(params["expand"], x), approximate=mlp == "gelu_tanh"))


def project_heads(
    params: Params, x: Array, *, head_dim: int, eps: float, rope: tuple[Array, Array] | None
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of a layer, normalised and rotated where the model does so.

    Args:
        params: "query", "key", "value", and under qk-norm "query_norm", "key_norm".
        x: [B, T, D].
        head_dim: K.
        eps: of the qk-norm.
        rope: cosines and sines, see `ops.rope`; None for learned positions.

    Returns:
        q [B, T, H, K], k and v [B, T, G, K].
    """
    chex.assert_rank(x, 3)
    q, k, v = (ops.reshape(linear(params[name], x), (*x.shape[:2], -1, head_dim)) for name in ("query", "key", "value"))
    if "query_norm" in params:
        q, k = norm(params["query_norm"], q, eps=eps), norm(params["key_norm"], k, eps=eps)
    if rope is not None:
        q, k = ops.rope(q, *rope), ops.rope(k, *rope)
    return q, k, v


def attention(
    params: Params,
    x: Array,
    *,
    head_dim: int,
    eps: float = 1e-5,
    rope: tuple[Array, Array] | None = None,
    attend: Callable[[Array, Array, Array], Array] = ops.attention,
) -> Array:
    """Causal self-attention: project, attend, project back.

    Args:
        params: "query", "key", "value", "output", and under qk-norm "query_norm", "key_norm".
        x: [B, T, D].
        head_dim: K.
        eps: of the qk-norm.
        rope: see `project_heads`.
        attend: `(q, k, v) -> [B, T, H, K]`.

    Returns:
        [B, T, D].
    """
    q, k, v = project_heads(params, x, head_dim=head_dim, eps=eps, rope=rope)
    out = attend(q, k, v)
    return linear(params["output"], ops.reshape(out, (*x.shape[:2], -1)))
