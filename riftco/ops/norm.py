"""Layer normalisation and root-mean-square normalisation of the last axis, statistics in at least float32."""

from typing import Any

import jax.numpy as jnp

from riftco.autodiff.tape import Op
from riftco.errors import DomainError
from riftco.ops import validate
from riftco.ops.elementwise import astype, rsqrt
from riftco.ops.linalg import dot, sum_rows
from riftco.ops.reduce import mean
from riftco.ops.shape import broadcast_to, reshape
from riftco.types import Array


def statistics_dtype(x: Any) -> Any:
    """float32, or x's own dtype where that is wider."""
    return jnp.dtype(jnp.float64) if x.dtype == jnp.float64 else jnp.dtype(jnp.float32)


def _check(who: str, x: Any, eps: float, **parameters: Any) -> tuple[Any, ...]:
    x = validate.floating(who, "x", x)
    if not eps > 0:
        raise DomainError(f"{who}: eps must be positive; got {eps}.")
    checked = [validate.floating(who, name, p) for name, p in parameters.items()]
    validate.same_dtype(who, x, *checked)
    for name, p in zip(parameters, checked, strict=True):
        fits = x.ndim >= 1 and tuple(p.shape) == (x.shape[-1],)
        validate.require(who, fits, f"{name} must be [D] for x [..., D]", f"{list(p.shape)} and {list(x.shape)}")
    return x, *checked


def _wide(x: Any, shape: Any) -> Any:
    return broadcast_to(x, tuple(shape))


# ------------------------------------------------------------------------------------------------ layer norm


def _layer_stats(x: Any, eps: float) -> tuple[Any, Any]:
    center = mean(x, -1, keepdims=True)
    apart = x - _wide(center, x.shape)
    return center, rsqrt(mean(apart * apart, -1, keepdims=True) + eps)


def _layer_norm_fwd(x: Any, scale: Any, bias: Any, eps: float) -> Any:
    dtype = statistics_dtype(x)
    wide = astype(x, dtype)
    center, inverse = _layer_stats(wide, eps)
    x_hat = (wide - _wide(center, x.shape)) * _wide(inverse, x.shape)
    out = x_hat * _wide(astype(scale, dtype), x.shape) + _wide(astype(bias, dtype), x.shape)
    # x is kept rather than x_hat: it is the residual stream, which other ops keep as well.
    return astype(out, x.dtype), (x, center, inverse, scale)


def _layer_norm_bwd(saved: Any, ct: Any, eps: float) -> Any:
    x, center, inverse, scale = saved
    dtype, shape = statistics_dtype(x), x.shape
    dy, wide_scale = astype(ct, dtype), astype(scale, dtype)
    x_hat = (astype(x, dtype) - _wide(center, shape)) * _wide(inverse, shape)
    product = dy * x_hat
    dx = dy * _wide(wide_scale, shape) - _row_means(dy, wide_scale) - x_hat * _row_means(product, wide_scale)
    dx = astype(_wide(inverse, shape) * dx, x.dtype)
    return dx, astype(sum_rows(product), x.dtype), astype(sum_rows(dy), x.dtype)


def _row_means(x: Any, scale: Any) -> Any:
    """The mean of `x * scale` over the last axis, repeated along it.

    A product of a matrix and a vector, for the reason that `sum_rows` gives.
    """
    rows = reshape(x, (-1, x.shape[-1]))
    means = dot(rows, reshape(scale, (-1, 1)), contract=(1, 0)) / x.shape[-1]
    return broadcast_to(reshape(means, (*x.shape[:-1], 1)), x.shape)


def _impl(fwd: Any) -> Any:
    return lambda *arrays, eps: fwd(*arrays, eps=eps)[0]


_layer_norm = Op("layer_norm", impl=_impl(_layer_norm_fwd), fwd=_layer_norm_fwd, bwd=_layer_norm_bwd)


def layer_norm(x: Array, scale: Array, bias: Array, *, eps: float = 1e-5) -> Array:
    """Normalise the last axis to zero mean and unit variance, then scale and shift.

    Statistics are computed in float32, or x's dtype if that is wider; the result has x's dtype.

    Args:
        x: activations [..., D].
        scale: [D], of x's dtype.
        bias: [D], of x's dtype.
        eps: added to the (population) variance before the square root; positive.

    Returns:
        An array like x.

    Raises:
        ShapeError: if scale or bias is not [D]. DTypeError: if dtypes differ. DomainError: if eps is not positive.

    Gradient:
        dx = inv * (g - mean(g) - x̂ mean(g x̂)) with g = ct * scale, x̂ the normalised input, inv = 1/std;
        dscale = sum(ct x̂), dbias = sum(ct). Saves x, its mean and inv. Any order.

    Source:
        Ba et al. 2016, arXiv:1607.06450, eq. 3-4. Oracle: riftco.oracle.layer_norm.
    """
    x, scale, bias = _check("layer_norm", x, eps, scale=scale, bias=bias)
    return _layer_norm(x, scale, bias, eps=eps)


# ------------------------------------------------------------------------------------------------ rms norm


_SHORT_ROW = 32


def _mean_square(x: Any) -> Any:
    """The mean of x² over the last axis, kept as an axis of one.

    A CPU unrolls the sum over a short row, a narrow head's, and how it then rounds depends on what was fused into it. A
    product does not, for the reason that `sum_rows` gives.
    """
    square = x * x
    if x.shape[-1] > _SHORT_ROW:
        return mean(square, -1, keepdims=True)
    rows = reshape(square, (-1, x.shape[-1]))
    sums = dot(rows, jnp.ones((x.shape[-1], 1), x.dtype), contract=(1, 0))
    return reshape(sums, (*x.shape[:-1], 1)) / x.shape[-1]


def _rms_norm_fwd(x: Any, scale: Any, eps: float) -> Any:
    dtype = statistics_dtype(x)
    wide = astype(x, dtype)
    inverse = rsqrt(_mean_square(wide) + eps)
    out = wide * _wide(inverse, x.shape) * _wide(astype(scale, dtype), x.shape)
    return astype(out, x.dtype), (x, inverse, scale)


def _rms_norm_bwd(saved: Any, ct: Any, eps: float) -> Any:
    x, inverse, scale = saved
    dtype, shape = statistics_dtype(x), x.shape
    dy, wide_scale = astype(ct, dtype), astype(scale, dtype)
    x_hat = astype(x, dtype) * _wide(inverse, shape)
    product = dy * x_hat
    dx = _wide(inverse, shape) * (dy * _wide(wide_scale, shape) - x_hat * _row_means(product, wide_scale))
    return astype(dx, x.dtype), astype(sum_rows(product), x.dtype)


_rms_norm = Op("rms_norm", impl=_impl(_rms_norm_fwd), fwd=_rms_norm_fwd, bwd=_rms_norm_bwd)


def rms_norm(x: Array, scale: Array, *, eps: float = 1e-5) -> Array:
    """Divide the last axis by its root mean square, then scale.

    Statistics are computed in float32, or x's dtype if that is wider; the result has x's dtype.

    Args:
        x: activations [..., D].
        scale: [D], of x's dtype.
        eps: added to the mean square before the square root; positive.

    Returns:
        An array like x.

    Raises:
        ShapeError: if scale is not [D]. DTypeError: if dtypes differ. DomainError: if eps is not positive.

    Gradient:
        dx = inv * (g - x̂ mean(g x̂)) with g = ct * scale, x̂ = x inv, inv = 1/rms; dscale = sum(ct x̂).
        Saves x and inv. Any order.

    Source:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4. Oracle: riftco.oracle.rms_norm.
    """
    x, scale = _check("rms_norm", x, eps, scale=scale)
    return _rms_norm(x, scale, eps=eps)
