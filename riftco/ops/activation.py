"""Activations of feed-forward layers, and dropout."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from riftco.autodiff.box import unbox
from riftco.autodiff.tape import Op
from riftco.errors import ConfigError, DTypeError
from riftco.ops import validate
from riftco.ops.elementwise import erf, exp, sigmoid, tanh, where
from riftco.types import Array


def _positive(x: Any) -> Any:
    return unbox(x) > 0


_relu = Op(
    "relu",
    impl=lambda x: jnp.maximum(x, 0),
    fwd=lambda x: (_relu(x), x),
    # NaN stays NaN: the masked-off branch multiplies instead of replacing.
    bwd=lambda x, ct: (where(_positive(x), ct, where(jnp.isnan(unbox(x)), ct * x, 0.0)),),
)


def relu(x: Array) -> Array:
    """`max(x, 0)`. Gradient: ct where x > 0, else 0 (NaN stays NaN); saves x; any order."""
    return _relu(validate.floating("relu", "x", x))


_relu2 = Op(
    "relu2",
    impl=lambda x: jnp.square(jnp.maximum(x, 0)),
    fwd=lambda x: (_relu2(x), x),
    bwd=lambda x, ct: (ct * (2.0 * relu(x)),),
)


def relu2(x: Array) -> Array:
    """`max(x, 0)²`. Gradient: 2 ct max(x, 0); saves x; any order. Source: So et al. 2021, arXiv:2109.08668."""
    return _relu2(validate.floating("relu2", "x", x))


def _silu_bwd(x: Any, ct: Any) -> Any:
    s = sigmoid(x)
    # s + x s (1 - s); at x = -inf the product would be inf * 0, and the limit is 0.
    slope = s + where(jnp.isinf(unbox(x)), 0.0, x * s * (1.0 - s))
    return (ct * slope,)


_silu = Op(
    "silu",
    impl=lambda x: jnp.where(x == -jnp.inf, jnp.asarray(-0.0, x.dtype), x * jax.nn.sigmoid(x)),
    fwd=lambda x: (_silu(x), x),
    bwd=_silu_bwd,
)


def silu(x: Array) -> Array:
    """`x * sigmoid(x)`. Gradient: ct (s + x s (1 - s)); saves x; any order."""
    return _silu(validate.floating("silu", "x", x))


_SQRT_HALF = math.sqrt(0.5)
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def _gelu_impl(x: Any, approximate: bool) -> Any:
    if approximate:
        return 0.5 * x * (1.0 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * (x * x * x))))
    return 0.5 * x * (1.0 + jax.lax.erf(x * _SQRT_HALF))


def _gelu_bwd(x: Any, ct: Any, approximate: bool) -> Any:
    if approximate:
        t = tanh(_TANH_SCALE * (x + _TANH_CUBIC * (x * x * x)))
        inner = _TANH_SCALE * (1.0 + (3.0 * _TANH_CUBIC) * (x * x))
        return (ct * (0.5 * (1.0 + t) + 0.5 * (x * (1.0 - t * t) * inner)),)
    return (ct * (0.5 * (1.0 + erf(x * _SQRT_HALF)) + _DENSITY * (x * exp(-0.5 * (x * x)))),)


_gelu = Op("gelu", impl=_gelu_impl, fwd=lambda x, approximate: (_gelu(x, approximate=approximate), x), bwd=_gelu_bwd)


def gelu(x: Array, *, approximate: bool = False) -> Array:
    """`x Φ(x)` with the normal distribution function Φ, exactly (by erf) or by the tanh approximation.

    Args:
        x: floating array.
        approximate: use `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`, as GPT-2 does.

    Gradient:
        ct (Φ(x) + x φ(x)), or the derivative of the approximation. Saves x. Any order.

    Source:
        Hendrycks and Gimpel 2016, arXiv:1606.08415, §2.
    """
    return _gelu(validate.floating("gelu", "x", x), approximate=bool(approximate))


def _swiglu_bwd(saved: Any, ct: Any) -> Any:
    gate, up = saved
    s = sigmoid(gate)
    swish = gate * s
    return ct * up * (s + swish * (1.0 - s)), ct * swish


_swiglu = Op(
    "swiglu",
    impl=lambda gate, up: gate * jax.nn.sigmoid(gate) * up,
    fwd=lambda gate, up: (_swiglu(gate, up), (gate, up)),
    bwd=_swiglu_bwd,
)


def swiglu(gate: Array, up: Array) -> Array:
    """`silu(gate) * up`.

    Args:
        gate: floating array.
        up: array of the same shape and dtype.

    Raises:
        ShapeError, DTypeError: if they differ.

    Gradient:
        dgate = ct up (s + gate s (1 - s)) with s = sigmoid(gate); dup = ct silu(gate). Saves both. Any order.

    Source:
        Shazeer 2020, arXiv:2002.05202, eq. 6.
    """
    gate, up = validate.floating("swiglu", "gate", gate), validate.floating("swiglu", "up", up)
    validate.same("swiglu", gate, up)
    return _swiglu(gate, up)


def _dropout_impl(x: Any, keep: Any, rate: float) -> Any:
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


_dropout = Op(
    "dropout",
    impl=_dropout_impl,
    fwd=lambda x, keep, rate: (_dropout(x, keep, rate=rate), keep),
    bwd=lambda keep, ct, rate: (_dropout(ct, keep, rate=rate), None),
)


def dropout(x: Array, key: Any, rate: float) -> Array:
    """Each entry dropped with probability `rate`, the others divided by `1 - rate`.

    Args:
        x: floating array.
        key: a jax random key; equal keys drop equal entries.
        rate: in [0, 1); 0 returns x itself and draws nothing.

    Raises:
        ConfigError: if the rate is out of range. DTypeError: if `key` is missing.

    Gradient:
        ct, dropped at the same places. Saves the mask. Any order.
    """
    x = validate.floating("dropout", "x", x)
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"dropout: the rate must be in [0, 1); got {rate}.")
    if rate == 0.0:
        return x
    if key is None:
        raise DTypeError("dropout: a random key is required when the rate is positive; got None. Pass dropout_key=.")
    return _dropout(x, jax.random.bernoulli(key, 1.0 - rate, x.shape), rate=float(rate))
