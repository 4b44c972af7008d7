"""The peer of `riftco bench train`: the same transformer as one writes it for `jax.grad` and optax.

Idiomatic on purpose: einsum attention in [B, T, H, K], kernels [in, out], `jax.nn.gelu`, one `lax.scan` over stacked
layers, `optax.adamw` behind `optax.clip_by_global_norm`. Nothing of riftco's rules is used. optax comes with the `test`
extra alone, so it is imported when the twin is built, not with this module.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from riftco.errors import RiftcoError
from riftco.models.config import DecoderConfig


def _optax() -> Any:
    """The library, or one sentence that says where it comes from."""
    try:
        import optax
    except ImportError as error:
        raise RiftcoError(
            "bench train: optax, which the peer's step is written with, is required; it is not installed; "
            "pip install 'riftco[test]' installs it"
        ) from error
    return optax


def init(key: Any, c: DecoderConfig) -> Any:
    """Parameters of a GPT of this configuration, blocks stacked on a leading axis."""
    _optax()  # missing, it stops the race before anything is compiled
    keys = iter(jax.random.split(key, 16))

    def dense(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) * (shape[-2] ** -0.5)

    zeros, ones = jnp.zeros, jnp.ones
    n, d, f = c.layers, c.width, c.hidden
    return {
        "tok": jax.random.normal(next(keys), (c.vocab_size, d)) * 0.02,
        "pos": jax.random.normal(next(keys), (c.context, d)) * 0.02,
        "blocks": {
            "ln1": {"scale": ones((n, d)), "bias": zeros((n, d))},
            "q": {"w": dense(n, d, d), "b": zeros((n, d))},
            "k": {"w": dense(n, d, d), "b": zeros((n, d))},
            "v": {"w": dense(n, d, d), "b": zeros((n, d))},
            "o": {"w": dense(n, d, d), "b": zeros((n, d))},
            "ln2": {"scale": ones((n, d)), "bias": zeros((n, d))},
            "up": {"w": dense(n, d, f), "b": zeros((n, f))},
            "down": {"w": dense(n, f, d), "b": zeros((n, d))},
        },
        "lnf": {"scale": ones((d,)), "bias": zeros((d,))},
        "head": dense(d, c.vocab_size),
    }


def _layer_norm(p: Any, x: Any) -> Any:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]


def _linear(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention on [B, T, H, K]."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5)
    t = q.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def block(x: Any, p: Any, c: DecoderConfig) -> Any:
    """One pre-norm layer."""
    b, t, _ = x.shape
    h = _layer_norm(p["ln1"], x)
    q, k, v = (_linear(p[n], h).reshape(b, t, c.heads, c.head_dim) for n in ("q", "k", "v"))
    x = x + _linear(p["o"], attention(q, k, v).reshape(b, t, -1))
    h = jax.nn.gelu(_linear(p["up"], _layer_norm(p["ln2"], x)), approximate=False)
    return x + _linear(p["down"], h)


def loss(params: Any, tokens: Any, targets: Any, c: DecoderConfig, checkpoint: bool = False) -> Any:
    """Mean cross entropy."""
    x = params["tok"][tokens] + params["pos"][: tokens.shape[1]]
    body = lambda x, p: (block(x, p, c), None)
    x, _ = jax.lax.scan(jax.checkpoint(body) if checkpoint else body, x, params["blocks"])
    logits = _layer_norm(params["lnf"], x) @ params["head"]
    return _optax().softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train_step(c: DecoderConfig, checkpoint: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`(init(params) -> optimizer state, step(params, state, tokens, targets) -> (params, state, loss))`."""
    optax = _optax()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.99, weight_decay=0.1))

    def step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, targets, c, checkpoint)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return optimizer.init, step
