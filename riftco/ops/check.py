"""Runs the registry: each op against its twin, in three dtypes, and against centred differences.

Nothing here needs a test framework or another library's derivatives; tests/test_ops.py adds those.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco import _compat
from riftco.autodiff import vjp
from riftco.autodiff.box import is_floating
from riftco.ops.spec.kinds import BadInput, Call, OpSpec, Sample
from riftco.ops.spec.tolerances import DIFFERENCES, TOLERANCES

EPS = 1e-5
CHECKS = ("float64", "float32", "bfloat16", "differences", "second order")


@dataclass(frozen=True)
class CheckResult:
    """One comparison: the largest error that was seen, and the largest that is accepted."""

    subject: str
    sample: str
    check: str
    error: float
    tolerance: float
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


def failed(subject: str, sample: str, check: str, message: str) -> CheckResult:
    """The result of a comparison that could not be made."""
    return CheckResult(subject, sample, check, math.inf, 0.0, message)


def check_op(spec: OpSpec, sample: Sample, *, checks: Iterable[str] = CHECKS) -> list[CheckResult]:
    """Compare one op on one sample.

    Args:
        spec: the op.
        sample: one of its samples.
        checks: which comparisons to make: "float64", "float32" and "bfloat16" compare value and cotangents with the
            twin; "differences" and "second order" compare derivatives with centred
            differences in float64.

    Returns:
        One result for each comparison that applies to the sample. An exception is a failed comparison.
    """
    trial, results = Trial(spec, sample), []
    for check in checks:
        if not spec.applies(sample, check):
            continue
        order = {"differences": 1, "second order": 2}.get(check, 0)
        try:
            if order:
                error, tolerance = trial.differences_error(order), DIFFERENCES[order]
            else:
                error, tolerance = trial.twin_error(check), TOLERANCES[check, spec.tolerance]
            results.append(CheckResult(spec.name, sample.name, check, error, tolerance))
        except Exception as error:  # a table shows every op, the broken ones too
            results.append(failed(spec.name, sample.name, check, f"{type(error).__name__}: {error}"))
    return results


def check_bad_input(spec: OpSpec, bad: BadInput) -> CheckResult:
    """Whether a bad call is refused with the right class and words."""
    try:
        bad.run()
    except bad.error as error:
        if bad.fragment in str(error):
            return CheckResult(spec.name, bad.name, "bad input", 0.0, 0.0)
        return failed(spec.name, bad.name, "bad input", f"the message lacks {bad.fragment!r}: {error}")
    except Exception as error:
        return failed(spec.name, bad.name, "bad input", f"expected {bad.error.__name__}, got {type(error).__name__}")
    return failed(spec.name, bad.name, "bad input", f"expected {bad.error.__name__}, but the call was accepted")


# ------------------------------------------------------------------------------------------------ against the twin


def is_floating_array(x: Any) -> bool:
    """Whether `x` is what a check differentiates: Python numbers, integers and keys are held fixed."""
    return hasattr(x, "dtype") and is_floating(x)


@dataclass(frozen=True)
class Moving:
    """An op as a function of its floating arrays alone, everything else held at the sample's values."""

    spec: OpSpec
    call: Call

    def values(self, dtype: Any) -> list[Any]:
        """The floating arrays, rounded to `dtype`."""
        return [np.asarray(x, dtype) for x in jax.tree_util.tree_leaves(self.call.args) if is_floating_array(x)]

    def held(self) -> list[Any]:
        """The other arrays: integers, booleans, keys."""
        leaves = jax.tree_util.tree_leaves(self.call.args)
        return [x for x in leaves if hasattr(x, "dtype") and not is_floating_array(x)]

    def filled(self, values: Iterable[Any], held: Iterable[Any]) -> tuple[Any, ...]:
        """The positional arguments, with these arrays; Python numbers stay as they are."""
        leaves, tree = jax.tree_util.tree_flatten(self.call.args)
        floating, other = iter(values), iter(held)
        filled = [x if not hasattr(x, "dtype") else next(floating if is_floating_array(x) else other) for x in leaves]
        return jax.tree_util.tree_unflatten(tree, filled)

    def at(self, held: list[Any], *values: Any) -> Any:
        """The op at these values."""
        return self.spec.run(*self.filled(values, held), **self.call.kwargs)

    def __call__(self, *values: Any) -> Any:
        """The op at these values of its floating arrays."""
        return self.at(self.held(), *values)


def cotangent_like(out: Any) -> Any:
    """A cotangent for a twin's output: a fixed pattern of values that every dtype can hold."""

    def pattern(x: Any) -> np.ndarray:
        count = int(np.size(x))
        return ((np.arange(count) * 5 % 13 - 6 + 0.5) / 4).reshape(np.shape(x))

    return tuple(pattern(x) for x in out) if isinstance(out, tuple) else pattern(out)


def value_and_cotangents(f: Any, values: list[Any], cotangent: Any) -> tuple[Any, tuple[Any, ...]]:
    """The value of `f`, and its cotangents for a cotangent that is converted to the output's dtype."""
    out, pull = vjp(f, *values)
    ct = jax.tree_util.tree_map(lambda y, c: c.astype(y.dtype), out, cotangent)
    return out, pull(ct)


def expected(spec: OpSpec, moving: Moving, values: list[Any]) -> tuple[Any, Any, list[Any]]:
    """From the twin: the value, the cotangent it is pulled back from, and one cotangent for each floating array."""
    args = moving.filled([np.asarray(x, np.float64) for x in values], moving.held())
    out = spec.forward(*args, **moving.call.kwargs)
    cotangent = cotangent_like(out)
    answers = spec.backward(args, cotangent, moving.call.kwargs)
    cts: list[Any] = []
    for arg, answer in zip(args, answers, strict=True):
        leaves = jax.tree_util.tree_leaves(arg)
        if any(is_floating_array(x) for x in leaves):
            cts += list(answer) if isinstance(arg, list) else [answer]
    return out, cotangent, cts


class Trial:
    """One op on one sample. Everything is compiled, and one program serves twin, first and second differences."""

    def __init__(self, spec: OpSpec, sample: Sample) -> None:
        self.spec, self.moving = spec, Moving(spec, spec.draw(sample))
        self.run = jax.jit(
            lambda values, held, cotangent: value_and_cotangents(
                functools.partial(self.moving.at, held), values, cotangent
            )
        )

    def twin_error(self, dtype: str) -> float:
        """The largest error of the value and of every cotangent against the twin; inf for a wrong dtype or shape."""
        with _compat.enable_x64(dtype == "float64"):
            values = self.moving.values(jnp.dtype(dtype))
            out, cotangent, cts = expected(self.spec, self.moving, values)
            ours, our_cts = self.run(values, self.moving.held(), cotangent)
            errors = [error_between(a, b) for a, b in zip(as_tuple(ours), as_tuple(out), strict=True)]
            for value, ct, twin in zip(values, our_cts, cts, strict=True):
                errors.append(error_between(ct, twin) if ct.dtype == value.dtype else math.inf)
        return max(errors)

    def differences_error(self, order: int) -> float:
        """The error of the derivatives of that order against centred differences in float64."""
        rng = np.random.default_rng(self.spec.seed)
        call, held = self.moving.call, self.moving.held()
        with _compat.enable_x64(True):
            values = self.moving.values(np.float64)
            weights = cotangent_like(self.spec.forward(*call.args, **call.kwargs))
            if order == 1:
                f = lambda values: as_tuple(self.run(values, held, weights)[0])
                derivative = self.run(values, held, weights)[1]
                return slope_error(f, values, as_tuple(weights), derivative, rng)

            # The cotangent moves as well: an op that is linear in its argument has its second derivatives there.
            def cotangents(values: Any, weights: Any) -> Any:
                return vjp(functools.partial(self.moving.at, held), *values)[1](weights)

            g = lambda point: self.run(point[0], held, point[1])[1]
            across = jax.tree_util.tree_map(lambda x: np.asarray(rng.standard_normal(x.shape)), tuple(values))
            second = jax.jit(lambda values, weights: vjp(cotangents, values, weights)[1](across))(values, weights)
            return slope_error(g, (values, weights), across, second, rng)


def slope_error(f: Any, start: Any, weight: Any, derivative: Any, rng: np.random.Generator) -> float:
    """How far `derivative`, the VJP of `f` at `start` for `weight`, is from a centred difference.

    The direction is random; the error is relative to the size of the terms compared, or to 0.01 where they are smaller.
    """
    leaves = jax.tree_util.tree_leaves
    step = jax.tree_util.tree_map(lambda x: np.asarray(rng.standard_normal(np.shape(x))), start)
    ahead, behind = (f(jax.tree_util.tree_map(lambda x, v, by=by: x + by * v, start, step)) for by in (EPS, -EPS))
    terms = zip(leaves(weight), leaves(ahead), leaves(behind), strict=True)
    quotient = sum(float(np.sum(u * (np.asarray(a) - np.asarray(b)))) for u, a, b in terms) / (2 * EPS)
    parts = [float(np.sum(np.asarray(d) * v)) for d, v in zip(leaves(derivative), leaves(step), strict=True)]
    return abs(quotient - sum(parts)) / max(0.01, abs(quotient), sum(map(abs, parts)))


def as_tuple(x: Any) -> tuple[Any, ...]:
    """Several outputs as they are, one as a tuple of one."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def error_between(ours: Any, twin: Any) -> float:
    """The largest difference relative to the larger of 1 and the twin's largest entry.

    inf where the shapes differ, or where one has a NaN or an infinity that the other has not.
    """
    x, y = np.asarray(ours).astype(np.float64), np.asarray(twin, np.float64)
    if x.shape != y.shape:
        return math.inf
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(x[finite]).all():
        return math.inf
    if not finite.any():
        return 0.0
    return float(np.max(np.abs(x[finite] - y[finite])) / max(1.0, np.max(np.abs(y[finite]))))
