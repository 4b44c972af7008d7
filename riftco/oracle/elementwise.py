"""Elementwise functions and their cotangents, in NumPy float64.

Every `name(...)` of this package has a `name_vjp(...)` that takes the forward's positional arrays, then the cotangent
of the output, then the forward's other arguments, and returns a tuple with one entry per positional input: its
cotangent, or None where there is none to give (integers, booleans, Python scalars). Nothing is clamped and nothing
warns: NaN and infinity flow on, as they do in compiled code.
"""

import math
from typing import Any

import numpy as np

from riftco.errors import ShapeError


def as_float64(x: Any) -> np.ndarray:
    """Any array or number as a float64 array: every oracle starts by calling this."""
    return np.asarray(x, dtype=np.float64)


def _is_scalar(x: Any) -> bool:
    """Whether x is a plain Python number; NumPy's own scalars count as arrays of shape ()."""
    return isinstance(x, (int, float)) and not isinstance(x, np.generic)


def _pair(who: str, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both operands as float64; equal shapes unless one is a Python scalar."""
    left, right = as_float64(x), as_float64(y)
    if not (_is_scalar(x) or _is_scalar(y)) and left.shape != right.shape:
        raise ShapeError(
            f"{who}: both arrays must have one shape; got {left.shape} and {right.shape}. "
            "Broadcast explicitly with broadcast_to, or pass a Python scalar."
        )
    return left, right


def _arrays_only(inputs: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[np.ndarray | None, ...]:
    """The cotangents, with None in the place of each Python scalar."""
    return tuple(None if _is_scalar(x) else as_float64(dx) for x, dx in zip(inputs, cotangents, strict=True))


@np.errstate(all="ignore")
def add(x, y):
    """The sum x + y; equal shapes, or one Python scalar."""
    left, right = _pair("add", x, y)
    return left + right


@np.errstate(all="ignore")
def add_vjp(x, y, dz):
    """Cotangents (dz, dz)."""
    dz = as_float64(dz)
    return _arrays_only((x, y), (dz, dz))


@np.errstate(all="ignore")
def sub(x, y):
    """The difference x - y; equal shapes, or one Python scalar."""
    left, right = _pair("sub", x, y)
    return left - right


@np.errstate(all="ignore")
def sub_vjp(x, y, dz):
    """Cotangents (dz, -dz)."""
    dz = as_float64(dz)
    return _arrays_only((x, y), (dz, -dz))


@np.errstate(all="ignore")
def mul(x, y):
    """The product x y; equal shapes, or one Python scalar."""
    left, right = _pair("mul", x, y)
    return left * right


@np.errstate(all="ignore")
def mul_vjp(x, y, dz):
    """Cotangents (dz y, dz x)."""
    left, right = _pair("mul", x, y)
    dz = as_float64(dz)
    return _arrays_only((x, y), (dz * right, dz * left))


@np.errstate(all="ignore")
def div(x, y):
    """The quotient x / y; equal shapes, or one Python scalar; a zero denominator gives infinity or NaN."""
    left, right = _pair("div", x, y)
    return left / right


@np.errstate(all="ignore")
def div_vjp(x, y, dz):
    """Cotangents (dz / y, -dz x / y²)."""
    left, right = _pair("div", x, y)
    dz = as_float64(dz)
    return _arrays_only((x, y), (dz / right, -dz * left / right**2))


@np.errstate(all="ignore")
def maximum(x, y):
    """The larger of x and y, element by element; NaN if either is NaN."""
    left, right = _pair("maximum", x, y)
    return np.maximum(left, right)


@np.errstate(all="ignore")
def maximum_vjp(x, y, dz):
    """All of dz to the larger operand; half to each where they tie."""
    left, right = _pair("maximum", x, y)
    dz = as_float64(dz)
    share = np.where(left > right, 1.0, np.where(left == right, 0.5, 0.0))
    other = np.where(right > left, 1.0, np.where(left == right, 0.5, 0.0))
    return _arrays_only((x, y), (dz * share, dz * other))


@np.errstate(all="ignore")
def minimum(x, y):
    """The smaller of x and y, element by element; NaN if either is NaN."""
    left, right = _pair("minimum", x, y)
    return np.minimum(left, right)


@np.errstate(all="ignore")
def minimum_vjp(x, y, dz):
    """All of dz to the smaller operand; half to each where they tie."""
    left, right = _pair("minimum", x, y)
    dz = as_float64(dz)
    share = np.where(left < right, 1.0, np.where(left == right, 0.5, 0.0))
    other = np.where(right < left, 1.0, np.where(left == right, 0.5, 0.0))
    return _arrays_only((x, y), (dz * share, dz * other))


@np.errstate(all="ignore")
def where(condition, x, y):
    """Elements of x where the condition holds, of y elsewhere; the condition has the shape of the arrays."""
    left, right = _pair("where", x, y)
    return np.where(np.asarray(condition, dtype=bool), left, right)


@np.errstate(all="ignore")
def where_vjp(condition, x, y, dz):
    """Cotangents (None, dz where the condition holds, dz where it does not)."""
    condition, dz = np.asarray(condition, dtype=bool), as_float64(dz)
    return None, *_arrays_only((x, y), (np.where(condition, dz, 0.0), np.where(condition, 0.0, dz)))


def neg(x):
    """The negative, -x."""
    return -as_float64(x)


def neg_vjp(x, dy):
    """Cotangent -dy."""
    return (-as_float64(dy),)


@np.errstate(all="ignore")
def exp(x):
    """The exponential."""
    return np.exp(as_float64(x))


@np.errstate(all="ignore")
def exp_vjp(x, dy):
    """Cotangent dy exp(x)."""
    return (as_float64(dy) * np.exp(as_float64(x)),)


@np.errstate(all="ignore")
def log(x):
    """The natural logarithm; NaN below 0, minus infinity at 0."""
    return np.log(as_float64(x))


@np.errstate(all="ignore")
def log_vjp(x, dy):
    """Cotangent dy / x."""
    return (as_float64(dy) / as_float64(x),)


@np.errstate(all="ignore")
def sqrt(x):
    """The square root; NaN below 0."""
    return np.sqrt(as_float64(x))


@np.errstate(all="ignore")
def sqrt_vjp(x, dy):
    """Cotangent dy / (2 √x)."""
    return (as_float64(dy) / (2.0 * np.sqrt(as_float64(x))),)


@np.errstate(all="ignore")
def rsqrt(x):
    """The reciprocal of the square root, 1 / √x."""
    return 1.0 / np.sqrt(as_float64(x))


@np.errstate(all="ignore")
def rsqrt_vjp(x, dy):
    """Cotangent -dy / (2 x √x)."""
    x = as_float64(x)
    return (-as_float64(dy) / (2.0 * x * np.sqrt(x)),)


@np.errstate(all="ignore")
def pow(x, exponent):
    """The power x^exponent of a Python number."""
    return as_float64(x) ** exponent


@np.errstate(all="ignore")
def pow_vjp(x, dy, exponent):
    """Cotangent dy · exponent · x^(exponent-1); exactly 0 for exponent 0, at x = 0 too."""
    x, dy = as_float64(x), as_float64(dy)
    if exponent == 0:
        return (np.zeros_like(x),)
    return (dy * exponent * x ** (exponent - 1.0),)


@np.errstate(all="ignore")
def tanh(x):
    """The hyperbolic tangent."""
    return np.tanh(as_float64(x))


@np.errstate(all="ignore")
def tanh_vjp(x, dy):
    """Cotangent dy (1 - tanh²x)."""
    return (as_float64(dy) * (1.0 - np.tanh(as_float64(x)) ** 2),)


@np.errstate(all="ignore")
def sigmoid(x):
    """The logistic function 1 / (1 + e^-x); exactly 0 and 1 far out, never NaN for a number."""
    return 1.0 / (1.0 + np.exp(-as_float64(x)))


@np.errstate(all="ignore")
def sigmoid_vjp(x, dy):
    """Cotangent dy σ(x) σ(-x); the second factor is 1 - σ(x) without its cancellation."""
    x = as_float64(x)
    return (as_float64(dy) * sigmoid(x) * sigmoid(-x),)


@np.errstate(all="ignore")
def erf(x):
    """The error function, 2/√π ∫₀ˣ e^(-t²) dt, from the C library by way of `math.erf`."""
    return np.vectorize(math.erf, otypes=[np.float64])(as_float64(x))


@np.errstate(all="ignore")
def erf_vjp(x, dy):
    """Cotangent dy · 2/√π · e^(-x²)."""
    return (as_float64(dy) * 2.0 / math.sqrt(math.pi) * np.exp(-(as_float64(x) ** 2)),)


def astype(x, dtype):
    """Each element rounded to the nearest number of another floating dtype."""
    with np.errstate(over="ignore"):
        return as_float64(np.asarray(x).astype(dtype))


def astype_vjp(x, dy, dtype):
    """Cotangent dy: rounding counts as the identity."""
    return (as_float64(dy),)
