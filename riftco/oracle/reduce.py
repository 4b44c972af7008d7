"""Reductions and the functions normalised by one, in NumPy float64.

`axis` is None (all of them), an int, or a tuple of ints. -inf entries are allowed in max, logsumexp and the
softmaxes; a softmax slice with nothing but -inf is 0/0 and gives NaN.
"""

import numpy as np

from riftco.oracle.elementwise import as_float64


def _kept(dy, x: np.ndarray, axis) -> np.ndarray:
    """The cotangent with the reduced axes put back at size 1, ready to broadcast against x."""
    return as_float64(dy).reshape(np.sum(x, axis=axis, keepdims=True).shape)


@np.errstate(all="ignore")
def sum(x, axis=None, keepdims=False):
    """The sum over `axis`."""
    return np.sum(as_float64(x), axis=axis, keepdims=keepdims)


@np.errstate(all="ignore")
def sum_vjp(x, dy, axis=None, keepdims=False):
    """Cotangent dy, copied to every element that was summed."""
    x = as_float64(x)
    return (np.broadcast_to(_kept(dy, x, axis), x.shape).copy(),)


@np.errstate(all="ignore")
def mean(x, axis=None, keepdims=False):
    """The arithmetic mean over `axis`."""
    return np.mean(as_float64(x), axis=axis, keepdims=keepdims)


@np.errstate(all="ignore")
def mean_vjp(x, dy, axis=None, keepdims=False):
    """Cotangent dy divided by the number of elements averaged, copied to each."""
    x = as_float64(x)
    dy = _kept(dy, x, axis)
    count = x.size / dy.size
    return (np.broadcast_to(dy / count, x.shape).copy(),)


@np.errstate(all="ignore")
def max(x, axis=None, keepdims=False):
    """The largest element over `axis`; NaN if there is a NaN."""
    return np.max(as_float64(x), axis=axis, keepdims=keepdims)


@np.errstate(all="ignore")
def max_vjp(x, dy, axis=None, keepdims=False):
    """Cotangent dy, shared equally by all elements that equal the maximum."""
    x = as_float64(x)
    ties = x == np.max(x, axis=axis, keepdims=True)
    return (ties * _kept(dy, x, axis) / np.sum(ties, axis=axis, keepdims=True),)


@np.errstate(all="ignore")
def logsumexp(x, axis=-1, keepdims=False):
    """The logarithm of the sum, log Σ exp(x); -inf when every element is -inf."""
    x = as_float64(x)
    largest = np.max(x, axis=axis, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0.0)  # inf - inf would be NaN where the answer is plain
    result = shift + np.log(np.sum(np.exp(x - shift), axis=axis, keepdims=True))
    return result if keepdims else result.reshape(np.sum(x, axis=axis).shape)


@np.errstate(all="ignore")
def logsumexp_vjp(x, dy, axis=-1, keepdims=False):
    """Cotangent dy softmax(x)."""
    x = as_float64(x)
    return (_kept(dy, x, axis) * softmax(x, axis),)


@np.errstate(all="ignore")
def softmax(x, axis=-1):
    """The probabilities exp(x) / Σ exp(x) over `axis`, with the maximum subtracted first."""
    x = as_float64(x)
    exponentials = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return exponentials / np.sum(exponentials, axis=axis, keepdims=True)


@np.errstate(all="ignore")
def softmax_vjp(x, dy, axis=-1):
    """Cotangent p (dy - Σ dy p)."""
    p, dy = softmax(x, axis), as_float64(dy)
    return (p * (dy - np.sum(dy * p, axis=axis, keepdims=True)),)


@np.errstate(all="ignore")
def log_softmax(x, axis=-1):
    """The logarithm of softmax, x - log Σ exp(x) over `axis`, with the maximum subtracted first."""
    x = as_float64(x)
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


@np.errstate(all="ignore")
def log_softmax_vjp(x, dy, axis=-1):
    """Cotangent dy - p Σ dy."""
    dy = as_float64(dy)
    return (dy - softmax(x, axis) * np.sum(dy, axis=axis, keepdims=True),)


@np.errstate(all="ignore")
def cumsum(x, axis=-1):
    """The running sum along `axis`, each element included in its own sum."""
    return np.cumsum(as_float64(x), axis=axis)


@np.errstate(all="ignore")
def cumsum_vjp(x, dy, axis=-1):
    """The running sum of dy from the far end: element i reaches every output from i on."""
    return (np.flip(np.cumsum(np.flip(as_float64(dy), axis=axis), axis=axis), axis=axis),)
