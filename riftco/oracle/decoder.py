"""The decoder-only transformer, forward only, from a dict of named float64 parameters.

Names and the [out, in] orientation of linear weights are those of the native bundle: `token_embedding.weight`,
`blocks.0.attention.query.weight`, … An absent bias is no bias; present query and key norm scales are applied.
"""

import numpy as np

from riftco.oracle.activation import gelu, swiglu
from riftco.oracle.attend import attention
from riftco.oracle.index import take
from riftco.oracle.linalg import linear
from riftco.oracle.loss import cross_entropy
from riftco.oracle.norm import layer_norm, rms_norm
from riftco.oracle.rotary import rope, rope_tables


def decoder_logits(
    params,
    tokens,
    *,
    heads,
    kv_heads,
    norm,
    mlp,
    position,
    norm_eps,
    rope_theta,
    tied=False,
    rope_scaling=None,
    sliding_window=None,
):
    """Logits [B, T, V] of a pre-norm decoder: x + attention(norm(x)), then x + mlp(norm(x)), in every block.

    Args:
        params: {dotted name: array}.
        tokens: ids [B, T]; one outside the vocabulary makes its row NaN from there on.
        heads: query heads H.
        kv_heads: key/value heads G, dividing H.
        norm: "layer" or "rms".
        mlp: "gelu", "gelu_tanh" or "swiglu".
        position: "learned" or "rope".
        norm_eps: the eps of every norm.
        rope_theta: base of the rotary frequencies; not read under learned positions.
        tied: whether the token embedding serves as the head's weight.
        rope_scaling: None or Hugging Face's `rope_parameters` dict.
        sliding_window: None, or how many keys a query sees, its own included.
    """
    tokens = np.asarray(tokens)
    batch, time = tokens.shape

    def normalise(x, name):
        if norm == "rms":
            return rms_norm(x, params[f"{name}.scale"], eps=norm_eps)
        return layer_norm(x, params[f"{name}.scale"], params[f"{name}.bias"], eps=norm_eps)

    def project(x, name):
        return linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))

    def attend(x, name):
        q = project(x, f"{name}.query").reshape(batch, time, heads, -1)
        k = project(x, f"{name}.key").reshape(batch, time, kv_heads, -1)
        v = project(x, f"{name}.value").reshape(batch, time, kv_heads, -1)
        if f"{name}.query_norm.scale" in params:  # normalised per head, before the rotation
            q = rms_norm(q, params[f"{name}.query_norm.scale"], eps=norm_eps)
            k = rms_norm(k, params[f"{name}.key_norm.scale"], eps=norm_eps)
        if position == "rope":
            cos, sin = rope_tables(np.arange(time), q.shape[-1], theta=rope_theta, scaling=rope_scaling)
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        context = attention(q, k, v, causal=True, window=sliding_window)
        return project(context.reshape(batch, time, -1), f"{name}.output")

    def feed_forward(x, name):
        if mlp == "swiglu":
            return project(swiglu(project(x, f"{name}.gate"), project(x, f"{name}.up")), f"{name}.down")
        return project(gelu(project(x, f"{name}.expand"), approximate=mlp == "gelu_tanh"), f"{name}.project")

    x = take(params["token_embedding.weight"], tokens)  # (B, T, D)
    if position == "learned":
        x = x + take(params["position_embedding.weight"], np.arange(time))
    block = 0
    while f"blocks.{block}.attention.query.weight" in params:
        name = f"blocks.{block}"
        x = x + attend(normalise(x, f"{name}.attention_norm"), f"{name}.attention")
        x = x + feed_forward(normalise(x, f"{name}.feed_forward_norm"), f"{name}.feed_forward")
        block += 1
    x = normalise(x, "final_norm")
    if tied:
        return linear(x, params["token_embedding.weight"], params.get("language_model_head.bias"))
    return project(x, "language_model_head")


def decoder_loss(params, tokens, targets, *, weights=None, **options):
    """The mean cross-entropy of the targets [B, T] under `decoder_logits(params, tokens, **options)`, in nats."""
    return cross_entropy(decoder_logits(params, tokens, **options), targets, weights=weights)
