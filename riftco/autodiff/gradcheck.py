"""Derivatives against centred finite differences, along random directions, in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves

from riftco import _compat
from riftco.autodiff.api import floating_part, vjp
from riftco.autodiff.box import is_floating
from riftco.errors import ConfigError, GradError
from riftco.types import PyTree


@dataclass(frozen=True)
class GradReport:
    """The largest disagreement that `check_grads` saw: `|difference quotient - derivative| / scale`."""

    order: int
    error: float
    tolerance: float


def check_grads(
    f: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    *,
    order: int = 1,
    directions: int = 2,
    eps: float = 1e-5,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> GradReport:
    """Compare the derivatives of `f` at `args` with centred differences; raise where they disagree.

    For a random direction v and a random cotangent u, `<u, f(x + eps v) - f(x - eps v)> / (2 eps)` must equal
    `<VJP(u), v>`. The cost does not grow with the number of elements. Everything runs in float64, outside jit.

    Args:
        f: a function written in `riftco.ops`.
        args: its arguments; floating leaves are converted to float64 and differentiated, other leaves are held fixed.
        order: 1, or 2 to check the derivative of the VJP as well.
        directions: how many random directions are tried.
        eps: the step of the difference.
        tolerance: the largest accepted error, relative to the size of the quantities compared.
        seed: of the directions.

    Returns:
        The largest error seen.

    Raises:
        GradError: if an error passes the tolerance or is not finite, or if there is nothing to compare: no floating
            input or no floating output, or only empty ones. ConfigError: if `order` or `directions` is below 1.
    """
    if order < 1 or directions < 1:
        raise ConfigError(f"check_grads: order and directions must be at least 1; got {order} and {directions}.")
    with _compat.enable_x64(True):
        moving, rebuild = floating_part(args)
        start = [jnp.asarray(np.asarray(leaf), jnp.float64) for leaf in moving]

        def of_moving(*values: Any) -> list[Any]:
            return [leaf for leaf in tree_leaves(f(*rebuild(values))) if is_floating(leaf)]

        return _check(of_moving, start, order, directions, eps, tolerance, np.random.default_rng(seed))


def _check(
    f: Callable[..., list[Any]],
    start: list[Any],
    order: int,
    directions: int,
    eps: float,
    tolerance: float,
    rng: np.random.Generator,
) -> GradReport:
    out, pull = vjp(f, *start)
    for what, arrays in (("input", start), ("output", out)):
        if not any(x.size for x in arrays):
            raise GradError(f"check_grads: a floating {what} that is not empty is required; got none to compare.")
    worst = 0.0
    for _ in range(directions):
        step = [_random_like(x, rng) for x in start]
        weight = [_random_like(y, rng) for y in out]
        ahead = f(*(x + eps * v for x, v in zip(start, step, strict=True)))
        behind = f(*(x - eps * v for x, v in zip(start, step, strict=True)))
        quotient = sum(_dot(u, (a - b) / (2 * eps)) for u, a, b in zip(weight, ahead, behind, strict=True))
        parts = [_dot(g, v) for g, v in zip(pull(weight), step, strict=True)]
        # Terms of opposite sign may cancel: errors scale with the sizes of the terms, not with their sum. The floor
        # covers the rounding of the difference, about 1e-11 of the output, where the derivative is (nearly) zero.
        floor = 1e-3 * (1.0 + sum(_dot(abs(u), abs(y)) for u, y in zip(weight, out, strict=True)))
        scale = max(floor, abs(quotient), sum(abs(p) for p in parts))
        error = abs(quotient - sum(parts)) / scale
        worst = max(worst, error)
        if not error <= tolerance:
            raise GradError(
                f"check_grads: order {order}: centred difference {quotient:.10g}, derivative {sum(parts):.10g}, "
                f"relative error {error:.3g} > {tolerance:.3g}."
            )
    if order > 1:
        weight = [_random_like(y, rng) for y in out]
        second = _check(lambda *x: list(vjp(f, *x)[1](weight)), start, order - 1, directions, eps, tolerance, rng)
        worst = max(worst, second.error)
    return GradReport(order, worst, tolerance)


def _random_like(x: Any, rng: np.random.Generator) -> Any:
    return jnp.asarray(rng.standard_normal(x.shape), jnp.float64)


def _dot(x: Any, y: Any) -> float:
    return float(jnp.sum(x * y))
