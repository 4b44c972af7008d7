"""Folding adapters into the weights of their base, and how far the answers move."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from riftco import models
from riftco.errors import DomainError
from riftco.models.adapters import Adapters, check_adapters
from riftco.models.config import DecoderConfig
from riftco.models.packed import replaced, weight_of
from riftco.models.specification import check_params
from riftco.ops import NF4Array
from riftco.tune.quantization import decoded, dequantize
from riftco.types import Array, PyTree


def merge(params: PyTree, adapters: Adapters, config: DecoderConfig) -> PyTree:
    """Plain params that answer as the base with its adapters does: `W + scale · B A` where there is an adapter.

    A packed base is decoded first: the adapters were trained beside those numbers, and not beside the weights that were
    packed (`logit_difference` measures it). Sums are made in float32 and rounded once, to the weight's dtype or, for a
    packed one, the embedding's. Merging has no inverse, and nothing in the result says that it was merged: bundles
    do, and refuse a second time.

    Args:
        params: the base, plain or packed; not changed.
        adapters: from `lora_init` or a loaded adapter.
        config: the configuration.

    Returns:
        Params with the names, shapes and, for a plain base, dtypes of the base.

    Raises:
        ShapeError, DTypeError: where adapters and params do not fit. DomainError: for a merged weight that is not
            finite; it is named, and nothing is returned.
    """
    check_adapters(adapters, config)
    merged = params
    for name, a, b in adapters.pairs():
        weight = weight_of(params, name)
        packed = isinstance(weight, NF4Array)
        base = decoded(weight, name, config) if packed else jnp.asarray(weight)
        dtype = params["token_embedding"]["weight"].dtype if packed else base.dtype
        result = _merged(base, jnp.asarray(a), jnp.asarray(b), adapters.scale, jnp.dtype(dtype))
        if not bool(jnp.isfinite(result).all()):
            raise DomainError(f"merge: every merged weight must be finite; {name} is not; use an earlier checkpoint")
        merged = replaced(merged, name, result)
    merged = dequantize(merged, config, params["token_embedding"]["weight"].dtype)
    check_params(merged, config)
    return merged


@functools.partial(jax.jit, static_argnames="dtype")
def _merged(weight: Array, a: Array, b: Array, scale: float, dtype: Any) -> Array:
    wide = jnp.float64 if weight.dtype == jnp.float64 else jnp.float32
    change = jnp.matmul(b.astype(wide), a.astype(wide), precision=jax.lax.Precision.HIGHEST)
    return (weight.astype(wide) + jnp.asarray(scale, wide) * change).astype(dtype)


class LogitDifference(NamedTuple):
    """How far the logits of two models lie apart on the same tokens."""

    max_abs: float
    """The largest difference of two logits."""
    kl: float
    """The mean of KL(first ‖ second) over positions, in nats."""
    argmax_agreement: float
    """The share of positions whose most likely token is the same."""


def logit_difference(
    left: PyTree,
    right: PyTree,
    config: DecoderConfig,
    *,
    left_adapters: Adapters | None = None,
    right_adapters: Adapters | None = None,
    tokens: Array | None = None,
) -> LogitDifference:
    """Compare two models of one configuration by their logits.

    Args:
        left: params, plain or packed.
        right: params, plain or packed.
        config: their configuration.
        left_adapters: of the first, or None.
        right_adapters: of the second, or None.
        tokens: integers [B, T]; None takes 4 rows of up to 64 ids drawn from a fixed seed.
    """
    if tokens is None:
        shape = (4, min(64, config.context))
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32)
    run = jax.jit(lambda params, adapters: models.forward(params, jnp.asarray(tokens), config, adapters=adapters))
    wide = lambda logits: np.asarray(logits.astype(jnp.float32), np.float64)
    p, q = wide(run(left, left_adapters)), wide(run(right, right_adapters))
    log_p, log_q = (x - _logsumexp(x) for x in (p, q))
    return LogitDifference(
        float(np.abs(p - q).max()),
        float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        float((p.argmax(-1) == q.argmax(-1)).mean()),
    )


def _logsumexp(x: np.ndarray) -> np.ndarray:
    top = x.max(-1, keepdims=True)
    return top + np.log(np.exp(x - top).sum(-1, keepdims=True))
