"""Layer and root-mean-square normalisation, and dropout, in NumPy float64."""

import numpy as np

from riftco.errors import ShapeError
from riftco.oracle.elementwise import as_float64


def _check(who: str, x: np.ndarray, *parameters: np.ndarray) -> None:
    if x.ndim < 1 or any(parameter.shape != x.shape[-1:] for parameter in parameters):
        raise ShapeError(
            f"{who}: parameters must have the shape of x's last axis; got x {x.shape} and "
            f"{', '.join(str(parameter.shape) for parameter in parameters)}. Pass one number per feature."
        )


def _sum_rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1]).sum(axis=0)


@np.errstate(all="ignore")
def layer_norm(x, scale, bias, *, eps=1e-5):
    """The rows (x - mean) / √(variance + eps) · scale + bias over the last axis, with the population variance.

    A constant row gives the bias. Ba et al. 2016, arXiv:1607.06450, equations 3 and 4.

    Args:
        x: activations [..., D].
        scale: factors [D].
        bias: offsets [D].
        eps: added to the variance inside the root.
    """
    x, scale, bias = as_float64(x), as_float64(scale), as_float64(bias)
    _check("layer_norm", x, scale, bias)
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + eps) * scale + bias


@np.errstate(all="ignore")
def layer_norm_vjp(x, scale, bias, dy, *, eps=1e-5):
    """Cotangents (dx, dscale, dbias).

    With g = dy · scale and the normalised x̂: dx = (g - mean(g) - x̂ mean(g x̂)) / √(variance + eps).
    """
    x, scale, dy = as_float64(x), as_float64(scale), as_float64(dy)
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    normalised = centred / deviation
    g = dy * scale
    mean_g = g.mean(axis=-1, keepdims=True)
    mean_gx = (g * normalised).mean(axis=-1, keepdims=True)
    dx = (g - mean_g - normalised * mean_gx) / deviation
    return dx, _sum_rows(dy * normalised), _sum_rows(dy)


@np.errstate(all="ignore")
def rms_norm(x, scale, *, eps=1e-5):
    """The rows x / √(mean(x²) + eps) · scale over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        x: activations [..., D].
        scale: factors [D].
        eps: added to the mean square inside the root.
    """
    x, scale = as_float64(x), as_float64(scale)
    _check("rms_norm", x, scale)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


@np.errstate(all="ignore")
def rms_norm_vjp(x, scale, dy, *, eps=1e-5):
    """Cotangents (dx, dscale): with g = dy · scale, dx = (g - x̂ mean(g x̂)) / √(mean(x²) + eps)."""
    x, scale, dy = as_float64(x), as_float64(scale), as_float64(dy)
    root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    normalised = x / root
    g = dy * scale
    dx = (g - normalised * (g * normalised).mean(axis=-1, keepdims=True)) / root
    return dx, _sum_rows(dy * normalised)


@np.errstate(all="ignore")
def dropout(x, keep_mask, rate):
    """Elements x / (1 - rate) where the mask keeps it, 0 elsewhere (Srivastava et al. 2014).

    Args:
        x: the array.
        keep_mask: booleans of x's shape; True keeps the element.
        rate: the share that is dropped on average, 0 <= rate < 1.
    """
    return np.where(np.asarray(keep_mask, dtype=bool), as_float64(x) / (1.0 - rate), 0.0)


@np.errstate(all="ignore")
def dropout_vjp(x, keep_mask, dy, rate):
    """Cotangents (dy / (1 - rate) where kept, None)."""
    return dropout(dy, keep_mask, rate), None
