"""Arithmetic and functions that act on each element: equal shapes and dtypes, or an array and a Python number."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from riftco.autodiff.box import unbox
from riftco.autodiff.tape import Op
from riftco.errors import DomainError, DTypeError
from riftco.ops import validate
from riftco.types import Array

# ------------------------------------------------------------------------------------------------ rules

_neg = Op("neg", impl=lambda x: -x, fwd=lambda x: (neg(x), ()), bwd=lambda _, ct: (-ct,))
_add = Op("add", impl=lambda x, y: x + y, fwd=lambda x, y: (add(x, y), ()), bwd=lambda _, ct: (ct, ct))
_sub = Op("sub", impl=lambda x, y: x - y, fwd=lambda x, y: (sub(x, y), ()), bwd=lambda _, ct: (ct, -ct))


def _mul_fwd(x: Any, y: Any, needs: tuple[bool, bool]) -> Any:
    return mul(x, y), (x if needs[1] else None, y if needs[0] else None)


def _mul_bwd(saved: Any, ct: Any) -> Any:
    x, y = saved
    return None if y is None else ct * y, None if x is None else ct * x


_mul = Op("mul", impl=lambda x, y: x * y, fwd=_mul_fwd, bwd=_mul_bwd, takes_needs=True)


def _div_fwd(x: Any, y: Any, needs: tuple[bool, bool]) -> Any:
    out = _div(x, y)
    return out, (out if needs[1] else None, y)


def _div_bwd(saved: Any, ct: Any) -> Any:
    out, y = saved
    dx = _div(ct, y)
    return dx, None if out is None else -(dx * out)


_div = Op("div", impl=lambda x, y: x / y, fwd=_div_fwd, bwd=_div_bwd, takes_needs=True)

# With a Python number the number is static: nothing is saved and its dtype is the array's.
_add_scalar = Op("add", impl=lambda x, c: x + c, fwd=lambda x, c: (_add_scalar(x, c=c), ()), bwd=lambda _, ct, c: (ct,))
_mul_scalar = Op(
    "mul", impl=lambda x, c: x * c, fwd=lambda x, c: (_mul_scalar(x, c=c), ()), bwd=lambda _, ct, c: (ct * c,)
)
_div_scalar = Op(
    "div", impl=lambda x, c: x / c, fwd=lambda x, c: (_div_scalar(x, c=c), ()), bwd=lambda _, ct, c: (ct / c,)
)


def _scalar_div_fwd(x: Any, c: Any) -> Any:
    out = _scalar_div(x, c=c)
    return out, (out, x)


_scalar_div = Op(
    "div",
    impl=lambda x, c: c / x,
    fwd=_scalar_div_fwd,
    bwd=lambda saved, ct, c: (-_div(ct * saved[0], saved[1]),),
)


def _unary(name: str, impl: Any, derivative: Any, *, saves: str) -> Op:
    """An op of one argument whose derivative is a function of its input or of its output."""

    def fwd(x: Any) -> Any:
        out = op(x)
        return out, (x if saves == "input" else out)

    op = Op(name, impl=impl, fwd=fwd, bwd=lambda saved, ct: (ct * derivative(saved),))
    return op


_exp = _unary("exp", jnp.exp, lambda y: y, saves="output")
_log = _unary("log", jnp.log, lambda x: _scalar_div(x, c=1.0), saves="input")
_sqrt = _unary("sqrt", jnp.sqrt, lambda y: _scalar_div(y, c=0.5), saves="output")
_rsqrt = _unary("rsqrt", jax.lax.rsqrt, lambda y: -0.5 * (y * y * y), saves="output")
_tanh = _unary("tanh", jnp.tanh, lambda y: 1.0 - y * y, saves="output")
_sigmoid = _unary("sigmoid", jax.nn.sigmoid, lambda y: y * (1.0 - y), saves="output")
_erf = _unary("erf", jax.lax.erf, lambda x: (2.0 / math.sqrt(math.pi)) * _exp(-(x * x)), saves="input")

_pow = Op(
    "pow",
    impl=lambda x, exponent: x**exponent,
    fwd=lambda x, exponent: (_pow(x, exponent=exponent), x),
    bwd=lambda x, ct, exponent: (ct * (exponent * _pow(x, exponent=exponent - 1)) if exponent != 0 else ct * 0.0,),
)

_where = Op(
    "where",
    impl=jnp.where,
    fwd=lambda condition, x, y: (_where(condition, x, y), condition),
    bwd=lambda condition, ct: (None, where(condition, ct, 0.0), where(condition, 0.0, ct)),
)
_where_x = Op(
    "where",
    impl=lambda condition, x, c: jnp.where(condition, x, jnp.asarray(c, x.dtype)),
    fwd=lambda condition, x, c: (_where_x(condition, x, c=c), condition),
    bwd=lambda condition, ct, c: (None, _where_x(condition, ct, c=0.0)),
)
_where_y = Op(
    "where",
    impl=lambda condition, y, c: jnp.where(condition, jnp.asarray(c, y.dtype), y),
    fwd=lambda condition, y, c: (_where_y(condition, y, c=c), condition),
    bwd=lambda condition, ct, c: (None, _where_y(condition, ct, c=0.0)),
)

_astype = Op(
    "astype",
    impl=lambda x, dtype, source: x.astype(dtype),
    fwd=lambda x, dtype, source: (_astype(x, dtype=dtype, source=source), ()),
    bwd=lambda _, ct, dtype, source: (_astype(ct, dtype=source, source=dtype),),
)


def _extremum(name: str, impl: Any, wins: Any) -> Op:
    def fwd(x: Any, y: Any) -> Any:
        # Where either is NaN no one wins: both masks say so, and the derivative is NaN as the value is.
        nan = jnp.isnan(unbox(x)) | jnp.isnan(unbox(y))
        return op(x, y), (wins(x, y) | nan, (unbox(x) == unbox(y)) | nan)

    def bwd(saved: Any, ct: Any) -> Any:
        first, equal = saved
        shared = where(first, jnp.nan, 0.5 * ct)
        return where(equal, shared, where(first, ct, 0.0)), where(equal, shared, where(first, 0.0, ct))

    op = Op(name, impl=impl, fwd=fwd, bwd=bwd)
    return op


_maximum = _extremum("maximum", jnp.maximum, lambda x, y: x > y)
_minimum = _extremum("minimum", jnp.minimum, lambda x, y: x < y)

# ------------------------------------------------------------------------------------------------ functions


def _pair(who: str, x: Any, y: Any) -> tuple[Any, Any]:
    """Both operands, checked; at most one may be a number, of Python or NumPy, which takes the array's dtype."""
    y = validate.static_scalar(y)
    if not validate.is_scalar(y):
        x = validate.static_scalar(x)
    if validate.is_scalar(y):
        return validate.floating(who, "the array", x), y
    if validate.is_scalar(x):
        return x, validate.floating(who, "the array", y)
    x, y = validate.floating(who, "x", x), validate.floating(who, "y", y)
    validate.same(who, x, y)
    return x, y


def add(x: Array, y: Array | float) -> Array:
    """`x + y`, element by element.

    Args:
        x: floating array, or a number if `y` is an array.
        y: array of the same shape and dtype, or a number of Python or NumPy, which takes the array's dtype.

    Raises:
        ShapeError: if the shapes differ. DTypeError: if the dtypes differ or are not floating.

    Gradient:
        dx = dy = ct. Saves nothing. Any order.
    """
    x, y = _pair("add", x, y)
    if validate.is_scalar(y):
        return _add_scalar(x, c=y)
    return _add_scalar(y, c=x) if validate.is_scalar(x) else _add(x, y)


def sub(x: Array, y: Array | float) -> Array:
    """`x - y`, element by element; arguments and errors as `add`.

    Gradient:
        dx = ct, dy = -ct. Saves nothing. Any order.
    """
    x, y = _pair("sub", x, y)
    if validate.is_scalar(y):
        return _add_scalar(x, c=-y)
    return _add_scalar(_neg(y), c=x) if validate.is_scalar(x) else _sub(x, y)


def mul(x: Array, y: Array | float) -> Array:
    """`x * y`, element by element; arguments and errors as `add`.

    Gradient:
        dx = ct * y, dy = ct * x. Saves what the wanted cotangents need. Any order.
    """
    x, y = _pair("mul", x, y)
    if validate.is_scalar(y):
        return _mul_scalar(x, c=y)
    return _mul_scalar(y, c=x) if validate.is_scalar(x) else _mul(x, y)


def div(x: Array, y: Array | float) -> Array:
    """`x / y`, element by element; arguments and errors as `add`.

    Raises:
        DomainError: if a concrete denominator is exactly 0; under jit the quotient is inf or NaN.

    Gradient:
        dx = ct / y, dy = -ct * x / y². Saves y and the quotient. Any order.
    """
    x, y = _pair("div", x, y)
    if validate.is_scalar(y):
        if y == 0:
            raise DomainError("div: the denominator must not be 0; got the Python number 0.")
        return _div_scalar(x, c=y)
    validate.domain("div", y, lambda v: v == 0, "denominators must not be 0")
    return _scalar_div(y, c=x) if validate.is_scalar(x) else _div(x, y)


def neg(x: Array) -> Array:
    """`-x`. Gradient: -ct; saves nothing; any order."""
    return _neg(validate.floating("neg", "x", x))


def exp(x: Array) -> Array:
    """The exponential of a floating array. Gradient: ct times the output; saves the output; any order."""
    return _exp(validate.floating("exp", "x", x))


def log(x: Array) -> Array:
    """The natural logarithm of a positive floating array.

    Raises:
        DomainError: if a concrete entry is <= 0; NaN passes through. Under jit the result is -inf or NaN.

    Gradient:
        ct / x. Saves x. Any order.
    """
    x = validate.floating("log", "x", x)
    validate.domain("log", x, lambda v: v <= 0, "entries must be positive")
    return _log(x)


def sqrt(x: Array) -> Array:
    """The square root of a non-negative floating array.

    Raises:
        DomainError: if a concrete entry is negative. The derivative at 0 is inf.

    Gradient:
        ct / (2 sqrt(x)). Saves the output. Any order.
    """
    x = validate.floating("sqrt", "x", x)
    validate.domain("sqrt", x, lambda v: v < 0, "entries must not be negative")
    return _sqrt(x)


def rsqrt(x: Array) -> Array:
    """`1 / sqrt(x)` of a positive floating array.

    Raises:
        DomainError: if a concrete entry is <= 0.

    Gradient:
        -ct / 2 * x^(-3/2). Saves the output. Any order.
    """
    x = validate.floating("rsqrt", "x", x)
    validate.domain("rsqrt", x, lambda v: v <= 0, "entries must be positive")
    return _rsqrt(x)


def tanh(x: Array) -> Array:
    """The hyperbolic tangent. Gradient: ct * (1 - y²) with y the output; saves the output; any order."""
    return _tanh(validate.floating("tanh", "x", x))


def sigmoid(x: Array) -> Array:
    """`1 / (1 + e**-x)`, finite everywhere. Gradient: ct * s * (1 - s); saves the output; any order."""
    return _sigmoid(validate.floating("sigmoid", "x", x))


def erf(x: Array) -> Array:
    """The error function. Gradient: ct * 2/sqrt(pi) * exp(-x²); saves x; any order."""
    return _erf(validate.floating("erf", "x", x))


def pow(x: Array, exponent: float) -> Array:
    """`x ** exponent` for a Python number `exponent`.

    Args:
        x: floating array; non-negative unless `exponent` is an integer, non-zero if it is negative.
        exponent: a Python int or float.

    Raises:
        DomainError: if concrete entries are outside that domain.

    Gradient:
        ct * exponent * x**(exponent - 1). Saves x. Any order.
    """
    x, exponent = validate.floating("pow", "x", x), validate.static_scalar(exponent)
    if not validate.is_scalar(exponent):
        raise DTypeError(f"pow: the exponent must be a Python number; got {type(exponent).__name__}.")
    if isinstance(exponent, float) and exponent.is_integer():
        exponent = int(exponent)
    if not isinstance(exponent, int):
        validate.domain("pow", x, lambda v: v < 0, "entries must not be negative for a fractional exponent")
    if exponent < 0:
        validate.domain("pow", x, lambda v: v == 0, "entries must not be 0 for a negative exponent")
    return _pow(x, exponent=exponent)


def maximum(x: Array, y: Array | float) -> Array:
    """The larger of `x` and `y`, element by element; arguments and errors as `add`.

    Gradient:
        ct to the larger; half to each where they are equal; NaN to both where either is NaN. Saves two masks. Any
        order.
    """
    x, y = _both_arrays("maximum", x, y)
    return _maximum(x, y)


def minimum(x: Array, y: Array | float) -> Array:
    """The smaller of `x` and `y`, element by element; arguments and errors as `add`.

    Gradient:
        ct to the smaller; half to each where they are equal; NaN to both where either is NaN. Saves two masks. Any
        order.
    """
    x, y = _both_arrays("minimum", x, y)
    return _minimum(x, y)


def _both_arrays(who: str, x: Any, y: Any) -> tuple[Any, Any]:
    x, y = _pair(who, x, y)
    if validate.is_scalar(x):
        x = jnp.full(y.shape, x, y.dtype)
    if validate.is_scalar(y):
        y = jnp.full(x.shape, y, x.dtype)
    return x, y


def where(condition: Array, x: Array | float, y: Array | float) -> Array:
    """`x` where `condition`, else `y`.

    Args:
        condition: boolean array.
        x: floating array of the condition's shape, or a Python number.
        y: the same; at most one of the two is a number.

    Raises:
        ShapeError, DTypeError: if shapes or dtypes differ.

    Gradient:
        dx = ct where the condition holds, else 0; dy the other way round. Saves the condition. Any order.
    """
    condition = validate.array("where", "condition", condition)
    if condition.dtype != jnp.bool_:
        raise DTypeError(f"where: the condition must be boolean; got {condition.dtype}.")
    x, y = _pair("where", x, y)
    array: Any = y if validate.is_scalar(x) else x
    validate.require(
        "where",
        tuple(condition.shape) == tuple(array.shape),
        f"the condition must have the shape {list(array.shape)}",
        list(condition.shape),
    )
    if validate.is_scalar(y):
        return _where_x(condition, x, c=y)
    return _where_y(condition, y, c=x) if validate.is_scalar(x) else _where(condition, x, y)


def astype(x: Array, dtype: Any) -> Array:
    """`x` in another floating dtype.

    Raises:
        DTypeError: if `dtype` is not floating.

    Gradient:
        ct, converted back. Saves nothing. Any order.
    """
    x = validate.floating("astype", "x", x)
    target = jnp.dtype(dtype)
    if not jnp.issubdtype(target, jnp.floating):
        raise DTypeError(f"astype: the dtype must be floating; got {target}.")
    return x if x.dtype == target else _astype(x, dtype=target, source=jnp.dtype(x.dtype))
