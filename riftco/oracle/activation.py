"""Activation functions of the feed-forward network, in NumPy float64."""

import math

import numpy as np

from riftco.oracle.elementwise import as_float64, mul, mul_vjp, sigmoid


@np.errstate(all="ignore")
def relu(x):
    """The larger of x and 0; NaN stays NaN."""
    return np.maximum(as_float64(x), 0.0)


@np.errstate(all="ignore")
def relu_vjp(x, dy):
    """Cotangent dy where x > 0, 0 elsewhere (0 itself included), NaN where x is NaN."""
    x, dy = as_float64(x), as_float64(dy)
    return (np.where(np.isnan(x), np.nan, np.where(x > 0.0, dy, 0.0)),)


@np.errstate(all="ignore")
def relu2(x):
    """The square of relu(x) (So et al. 2021, arXiv:2109.08668)."""
    return relu(x) ** 2


@np.errstate(all="ignore")
def relu2_vjp(x, dy):
    """Cotangent 2 relu(x) dy."""
    return (2.0 * relu(x) * as_float64(dy),)


@np.errstate(all="ignore")
def silu(x):
    """The product x σ(x) (Elfwing et al. 2017, arXiv:1702.03118); its limit -0.0 at minus infinity."""
    x = as_float64(x)
    return np.where(x == -np.inf, -0.0, x * sigmoid(x))


@np.errstate(all="ignore")
def silu_vjp(x, dy):
    """Cotangent dy σ(x) (1 + x σ(-x)), with its limits: 0 at minus infinity, dy at plus infinity."""
    x, dy = as_float64(x), as_float64(dy)
    derivative = sigmoid(x) * (1.0 + x * sigmoid(-x))
    derivative = np.where(x == -np.inf, 0.0, np.where(x == np.inf, 1.0, derivative))
    return (dy * derivative,)


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    """Φ(x) = (1 + erf(x/√2)) / 2, written with erfc so that the left tail keeps its digits."""
    return 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2.0))


_TANH_SCALE = math.sqrt(2.0 / math.pi)
_TANH_CUBIC = 0.044715


@np.errstate(all="ignore")
def gelu(x, *, approximate=False):
    """The product x Φ(x), or its published tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    x = as_float64(x)
    if approximate:
        return 0.5 * x * (1.0 + np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3)))
    return x * _normal_cdf(x)


@np.errstate(all="ignore")
def gelu_vjp(x, dy, *, approximate=False):
    """Cotangent dy (Φ(x) + x φ(x)), or the derivative of the tanh form by the product rule."""
    x, dy = as_float64(x), as_float64(dy)
    if approximate:
        t = np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3))
        inner_derivative = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBIC * x**2)
        return (dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t**2) * inner_derivative),)
    density = np.exp(-(x**2) / 2.0) / math.sqrt(2.0 * math.pi)
    return (dy * (_normal_cdf(x) + x * density),)


@np.errstate(all="ignore")
def swiglu(gate, up):
    """The product silu(gate) · up (Shazeer 2020, arXiv:2002.05202)."""
    return mul(silu(gate), up)


@np.errstate(all="ignore")
def swiglu_vjp(gate, up, dy):
    """Cotangents (dgate, dup)."""
    dactivated, dup = mul_vjp(silu(gate), up, dy)
    return *silu_vjp(gate, dactivated), dup
