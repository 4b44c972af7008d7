"""Sums, means, extrema and their smooth relatives."""

from typing import Any

import jax
import jax.numpy as jnp

from riftco.autodiff.box import unbox
from riftco.autodiff.tape import Op
from riftco.ops import validate
from riftco.ops.elementwise import exp, mul, where
from riftco.ops.shape import broadcast_to, reshape
from riftco.types import Array

Axes = tuple[int, ...]


def _axes(who: str, x: Any, axis: int | tuple[int, ...] | None) -> Axes:
    if axis is None:
        return tuple(range(x.ndim))
    return tuple(validate.axis(who, x, a) for a in (axis if isinstance(axis, tuple | list) else (axis,)))


def _kept(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    return tuple(1 if i in axes else d for i, d in enumerate(shape))


def expand(x: Any, axes: Axes, shape: tuple[int, ...]) -> Any:
    """A reduced array, repeated along the axes that the reduction removed (kept as 1 or dropped)."""
    return broadcast_to(reshape(x, _kept(shape, axes)), shape)


_sum = Op(
    "sum",
    impl=lambda x, axes, keepdims, source: jnp.sum(x, axis=axes, keepdims=keepdims),
    fwd=lambda x, axes, keepdims, source: (_sum(x, axes=axes, keepdims=keepdims, source=source), ()),
    bwd=lambda _, ct, axes, keepdims, source: (expand(ct, axes, source),),
)


def sum(x: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """The sum over `axis`, or over everything.

    Args:
        x: floating array.
        axis: an axis, several, or None for all.
        keepdims: keep the summed axes with size 1.

    Raises:
        ShapeError: if an axis is out of range.

    Gradient:
        ct, repeated. Saves nothing. Any order.
    """
    x = validate.floating("sum", "x", x)
    return _sum(x, axes=_axes("sum", x, axis), keepdims=keepdims, source=tuple(x.shape))


def mean(x: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """The mean over `axis`, or over everything; arguments and errors as `sum`.

    Gradient:
        ct / count, repeated. Saves nothing. Any order.
    """
    x = validate.floating("mean", "x", x)
    count = 1
    for a in _axes("mean", x, axis):
        count *= x.shape[a]
    validate.require("mean", count > 0, "the reduced axes must not be empty", list(x.shape))
    return sum(x, axis, keepdims) / count


def _max_fwd(x: Any, axes: Axes, keepdims: bool) -> Any:
    out = _max(x, axes=axes, keepdims=keepdims)
    plain = unbox(x)
    top = jnp.reshape(unbox(out), _kept(plain.shape, axes))
    # Where the largest is NaN, the entries that are NaN get it back as their share.
    winners = jnp.isnan(plain) | (plain == jnp.broadcast_to(top, plain.shape))
    count = jnp.sum(winners, axis=axes, keepdims=True).astype(plain.dtype)
    return out, (winners, jnp.where(jnp.isnan(top), top, 1.0 / count))


def _max_bwd(saved: Any, ct: Any, axes: Axes, keepdims: bool) -> Any:
    winners, share = saved
    share = jnp.broadcast_to(share, winners.shape)
    return (where(winners, mul(expand(ct, axes, winners.shape), share), 0.0),)


_max = Op(
    "max",
    impl=lambda x, axes, keepdims: jnp.max(x, axis=axes, keepdims=keepdims),
    fwd=_max_fwd,
    bwd=_max_bwd,
)


def max(x: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """The largest entry over `axis`, or over everything; arguments and errors as `sum`.

    Gradient:
        ct to the largest entries, in equal shares; NaN to entries that are NaN. Saves a mask and the share. Any order.
    """
    x = validate.floating("max", "x", x)
    axes = _axes("max", x, axis)
    validate.require("max", all(x.shape[a] > 0 for a in axes), "the reduced axes must not be empty", list(x.shape))
    return _max(x, axes=axes, keepdims=keepdims)


def _check_softmax(who: str, x: Any, axis: int) -> None:
    validate.domain(who, x, lambda v: jnp.isnan(v) | (v == jnp.inf), "entries must not be NaN or +inf")
    validate.domain(who, x, lambda v: jnp.all(v == -jnp.inf, axis=axis), "a slice must not consist of -inf alone")


def _logsumexp_impl(x: Any, axis: int) -> Any:
    top = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, jnp.zeros((), x.dtype))  # inf - inf would hide the plain answer
    return jnp.squeeze(top + jnp.log(jnp.sum(jnp.exp(x - top), axis=axis, keepdims=True)), axis)


def _logsumexp_fwd(x: Any, axis: int) -> Any:
    out = _logsumexp(x, axis=axis)
    return out, (x, out)


_logsumexp = Op(
    "logsumexp",
    impl=_logsumexp_impl,
    fwd=_logsumexp_fwd,
    bwd=lambda saved, ct, axis: (
        expand(ct, (axis,), saved[0].shape) * exp(saved[0] - expand(saved[1], (axis,), saved[0].shape)),
    ),
)


def logsumexp(x: Array, axis: int = -1, keepdims: bool = False) -> Array:
    """`log(sum(exp(x)))` over one axis, without overflow.

    Args:
        x: floating array; -inf entries count as absent.
        axis: the reduced axis.
        keepdims: keep it with size 1.

    Raises:
        DomainError: if concrete entries are NaN or +inf, or a slice is all -inf; under jit they flow on (a
        slice that is all -inf gives -inf, and a gradient of NaN).

    Gradient:
        ct * softmax(x). Saves x and the output. Any order.
    """
    x = validate.floating("logsumexp", "x", x)
    axis = validate.axis("logsumexp", x, axis)
    _check_softmax("logsumexp", x, axis)
    out = _logsumexp(x, axis=axis)
    return reshape(out, _kept(tuple(x.shape), (axis,))) if keepdims else out


def _softmax_fwd(x: Any, axis: int) -> Any:
    out = _softmax(x, axis=axis)
    return out, out


def _softmax_bwd(p: Any, ct: Any, axis: int) -> Any:
    inner = sum(ct * p, axis, keepdims=True)
    return (p * (ct - broadcast_to(inner, p.shape)),)


def _softmax_impl(x: Any, axis: int) -> Any:
    weights = jnp.exp(x - jnp.max(x, axis=axis, keepdims=True))
    return weights / jnp.sum(weights, axis=axis, keepdims=True)


_softmax = Op("softmax", impl=_softmax_impl, fwd=_softmax_fwd, bwd=_softmax_bwd)


def softmax(x: Array, axis: int = -1) -> Array:
    """`exp(x) / sum(exp(x))` over one axis; the largest entry is subtracted first.

    Args and errors as `logsumexp`; an entry of -inf gives exactly 0, a slice that is all -inf gives NaN under jit.

    Gradient:
        p * (ct - sum(ct * p)). Saves p. Any order.
    """
    x = validate.floating("softmax", "x", x)
    axis = validate.axis("softmax", x, axis)
    _check_softmax("softmax", x, axis)
    return _softmax(x, axis=axis)


def _log_softmax_impl(x: Any, axis: int) -> Any:
    shifted = x - jnp.max(x, axis=axis, keepdims=True)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=axis, keepdims=True))


def _log_softmax_fwd(x: Any, axis: int) -> Any:
    out = _log_softmax(x, axis=axis)
    return out, out


_log_softmax = Op(
    "log_softmax",
    impl=_log_softmax_impl,
    fwd=_log_softmax_fwd,
    bwd=lambda y, ct, axis: (ct - exp(y) * broadcast_to(sum(ct, axis, keepdims=True), y.shape),),
)


def log_softmax(x: Array, axis: int = -1) -> Array:
    """`x - logsumexp(x)` over one axis; arguments and errors as `logsumexp`.

    Gradient:
        ct - softmax(x) * sum(ct). Saves the output. Any order.
    """
    x = validate.floating("log_softmax", "x", x)
    axis = validate.axis("log_softmax", x, axis)
    _check_softmax("log_softmax", x, axis)
    return _log_softmax(x, axis=axis)


_cumsum = Op(
    "cumsum",
    impl=lambda x, axis, reverse: jax.lax.cumsum(x, axis=axis, reverse=reverse),
    fwd=lambda x, axis, reverse: (_cumsum(x, axis=axis, reverse=reverse), ()),
    bwd=lambda _, ct, axis, reverse: (_cumsum(ct, axis=axis, reverse=not reverse),),
)


def cumsum(x: Array, axis: int = -1) -> Array:
    """The running sum along an axis.

    Gradient:
        the running sum of ct from the other end. Saves nothing. Any order.
    """
    x = validate.floating("cumsum", "x", x)
    return _cumsum(x, axis=validate.axis("cumsum", x, axis), reverse=False)
