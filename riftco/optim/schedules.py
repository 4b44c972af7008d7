"""Learning-rate schedules: pure functions from an update's number to its rate.

The number counts from 0: the first update of a run uses f(0). Nothing is read back from an earlier rate, so a
resumed run and an uninterrupted one agree. Every schedule takes a Python integer or a traced integer scalar and
returns a float32 scalar. NumPy float64 twins: `riftco.oracle.optim`.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp

from riftco.errors import ConfigError
from riftco.types import Array

Schedule: TypeAlias = Callable[[Array | int], Array]

NAMES = ("cosine", "constant", "linear", "wsd")


def constant(rate: float, warmup_steps: int = 0) -> Schedule:
    """The same rate for ever, after an optional linear warm-up.

    Args:
        rate: the rate once warm; finite and >= 0.
        warmup_steps: updates of warm-up; update t below it uses rate·(t+1)/(warmup_steps+1).

    Returns:
        f(step) -> float32 scalar.

    Raises:
        ConfigError: if an argument is out of range.
    """
    _check("constant", rate, warmup_steps, None, 0.0)
    return lambda step: _warmed(step, rate, warmup_steps, jnp.float32(rate))


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, min_lr: float = 0.0) -> Schedule:
    """Linear warm-up to `peak`, then half a cosine down to `min_lr` at update `total_steps`, then flat.

    With w = warmup_steps and n = total_steps, update t uses peak·(t+1)/(w+1) for t < w, and from there
    min_lr + (peak − min_lr)·(1 + cos(π·(t − w)/(n − w)))/2. The rate is `peak` exactly at t = w.

    Args:
        peak: the highest rate; finite and >= min_lr.
        warmup_steps: updates of warm-up, 0 <= warmup_steps < total_steps.
        total_steps: the update at which the floor is reached; the last update of a run is total_steps − 1.
        min_lr: the floor, >= 0.

    Returns:
        f(step) -> float32 scalar.

    Raises:
        ConfigError: if an argument is out of range.

    Source:
        Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, one period; the warm-up is nanoGPT's.
    """
    _check("warmup_cosine", peak, warmup_steps, total_steps, min_lr)

    def rate(step: Array | int) -> Array:
        remaining = 0.5 * (1.0 + jnp.cos(math.pi * _progress(step, warmup_steps, total_steps)))
        return _warmed(step, peak, warmup_steps, _between(min_lr, peak, remaining))

    return rate


def linear(peak: float, warmup_steps: int, total_steps: int, min_lr: float = 0.0) -> Schedule:
    """Linear warm-up to `peak`, then a straight line down to `min_lr` at update `total_steps`, then flat.

    Arguments, result and errors are those of `warmup_cosine`.
    """
    _check("linear", peak, warmup_steps, total_steps, min_lr)

    def rate(step: Array | int) -> Array:
        remaining = 1.0 - _progress(step, warmup_steps, total_steps)
        return _warmed(step, peak, warmup_steps, _between(min_lr, peak, remaining))

    return rate


def warmup_stable_decay(
    peak: float, warmup_steps: int, total_steps: int, min_lr: float = 0.0, decay_steps: int | None = None
) -> Schedule:
    """Linear warm-up, a plateau at `peak`, and a straight line to `min_lr` over the last `decay_steps` updates.

    Args:
        peak: the plateau's rate; finite and >= min_lr.
        warmup_steps: updates of warm-up, 0 <= warmup_steps < total_steps.
        total_steps: the update at which the floor is reached; flat after it.
        min_lr: the floor, >= 0.
        decay_steps: length of the descent, 1 <= decay_steps <= total_steps − warmup_steps; None takes a fifth of
            total_steps, or what the warm-up leaves if that is less.

    Returns:
        f(step) -> float32 scalar.

    Raises:
        ConfigError: if an argument is out of range.

    Source:
        Hu et al. 2024, arXiv:2404.06395 (MiniCPM), section 4; the descent here is linear.
    """
    _check("warmup_stable_decay", peak, warmup_steps, total_steps, min_lr)
    room = total_steps - warmup_steps
    if decay_steps is None:
        decay_steps = min(max(1, total_steps // 5), room)
    if not 1 <= decay_steps <= room:
        raise ConfigError(
            f"warmup_stable_decay: decay_steps must be in [1, total_steps − warmup_steps = {room}]; got {decay_steps}. "
            "Shorten the descent or the warm-up."
        )

    def rate(step: Array | int) -> Array:
        remaining = 1.0 - _progress(step, total_steps - decay_steps, total_steps)
        return _warmed(step, peak, warmup_steps, _between(min_lr, peak, remaining))

    return rate


def schedule(
    name: str,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    min_lr: float = 0.0,
    decay_steps: int | None = None,
) -> Schedule:
    """The schedule that a command-line name stands for.

    Args:
        name: "cosine", "constant", "linear" or "wsd" (warm-up, stable, decay).
        peak: the highest rate.
        total_steps: updates in the run; "constant" does not use it.
        warmup_steps: updates of warm-up.
        min_lr: the floor; "constant" does not use it.
        decay_steps: length of the descent of "wsd"; the others do not use it.

    Returns:
        f(step) -> float32 scalar.

    Raises:
        ConfigError: if the name is unknown or a value is out of range.
    """
    match name:
        case "cosine":
            return warmup_cosine(peak, warmup_steps, total_steps, min_lr)
        case "constant":
            return constant(peak, warmup_steps)
        case "linear":
            return linear(peak, warmup_steps, total_steps, min_lr)
        case "wsd":
            return warmup_stable_decay(peak, warmup_steps, total_steps, min_lr, decay_steps)
    raise ConfigError(f"schedule: the name must be one of {', '.join(NAMES)}; got {name!r}. Choose one of these.")


def _progress(step: Array | int, start: int, end: int) -> Array:
    """How far `step` is from `start` to `end`, held in [0, 1]; the difference is taken in integers, which is exact."""
    elapsed = jnp.clip(jnp.asarray(step, jnp.int32) - start, 0, end - start)
    return elapsed.astype(jnp.float32) / (end - start)


def _between(low: float, high: float, remaining: Array) -> Array:
    """`high` at remaining = 1, `low` at 0; written so that both ends are exact."""
    return high * remaining + low * (1.0 - remaining)


def _warmed(step: Array | int, peak: float, warmup_steps: int, rate: Array) -> Array:
    """The warm-up ramp while it lasts, then `rate`; the first update already moves."""
    number = jnp.asarray(step, jnp.int32)
    ramp = peak * ((number + 1).astype(jnp.float32) / (warmup_steps + 1))
    return jnp.where(number < warmup_steps, ramp, rate)


def _check(who: str, peak: float, warmup_steps: int, total_steps: int | None, min_lr: float) -> None:
    if not (math.isfinite(peak) and 0.0 <= min_lr <= peak):
        raise ConfigError(
            f"{who}: rates must be finite with 0 <= min_lr <= peak; got peak {peak} and min_lr {min_lr}. "
            "Raise the peak or lower the floor."
        )
    if warmup_steps < 0 or (total_steps is not None and warmup_steps >= total_steps):
        raise ConfigError(
            f"{who}: warmup_steps must be at least 0 and less than total_steps; got {warmup_steps} of {total_steps}. "
            "Shorten the warm-up or train longer."
        )
