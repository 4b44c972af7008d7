"""Adam, clipping and learning-rate schedules in NumPy float64, one step and one tensor at a time."""

import math
from typing import NamedTuple

import numpy as np

from riftco.errors import ConfigError
from riftco.oracle.elementwise import as_float64

FLOAT32_MAX = float(np.finfo(np.float32).max)


class AdamState(NamedTuple):
    """Updates made, the running products b1^step and b2^step, and the moments, one array per parameter."""

    step: int
    b1_power: float
    b2_power: float
    m: list
    v: list


class AdamStats(NamedTuple):
    """The step after the update, the norm before clipping, the clip scale, and whether the update took effect."""

    step: int
    grad_norm: float
    clip_scale: float
    ok: bool


def global_norm(gradients):
    """The Euclidean norm of all scalars of a list of arrays, by a running scale and sum of squares.

    At every scalar the norm so far is scale · √ssq, with scale the largest magnitude met; nothing is squared that is
    not at most 1, so neither ±1e300 nor 1e-300 leaves float64. A NaN or infinity gives NaN or infinity.
    """
    scale, ssq = 0.0, 1.0
    for gradient in gradients:
        for value in np.abs(as_float64(gradient)).ravel():
            if not np.isfinite(value):
                return float(value)
            if value > scale:
                ssq = 1.0 + ssq * (scale / value) ** 2
                scale = value
            elif value > 0.0:
                ssq += (value / scale) ** 2
    return float(scale * math.sqrt(ssq)) if scale else 0.0


def clip_scale(norm, limit):
    """The factor limit / norm where norm > limit, else exactly 1; None is no limit."""
    return limit / norm if limit is not None and norm > limit else 1.0


def adam_init(parameters):
    """The state before the first update."""
    zeros = lambda: [np.zeros(np.shape(parameter)) for parameter in parameters]
    return AdamState(0, 1.0, 1.0, zeros(), zeros())


def adam_step(
    gradients,
    state,
    parameters,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    max_grad_norm=1.0,
    weight_decay=0.0,
    decays=None,
    finite_below=FLOAT32_MAX,
):
    """One update of a list of parameters; returns (parameters, state, stats).

    The equations are those of `riftco.optim.adam`. A non-finite gradient, or a candidate beyond `finite_below` (what
    the arrays could hold), leaves parameters and state as they were, with ok False. Kingma and Ba 2015,
    arXiv:1412.6980, algorithm 1; decoupled decay: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.

    Args:
        gradients: list of arrays, shaped as the parameters.
        state: an `AdamState`.
        parameters: list of arrays.
        learning_rate: a number, or f(number of updates made so far).
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root after the bias correction.
        max_grad_norm: limit on the global norm, or None.
        weight_decay: decoupled decay.
        decays: one bool per parameter; None decays all.
        finite_below: largest magnitude that a candidate may have.
    """
    norm = global_norm(gradients)
    refused = lambda scale: (parameters, state, AdamStats(state.step, norm, scale, False))
    if not math.isfinite(norm):
        return refused(math.nan)
    scale = clip_scale(norm, max_grad_norm)
    rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
    step, b1_power, b2_power = state.step + 1, state.b1_power * b1, state.b2_power * b2

    new_parameters, new_m, new_v = [], [], []
    for index, parameter in enumerate(parameters):
        theta = as_float64(parameter)
        clipped = scale * as_float64(gradients[index])
        m = b1 * state.m[index] + (1.0 - b1) * clipped
        v = b2 * state.v[index] + (1.0 - b2) * clipped**2
        change = (m / (1.0 - b1_power)) / (np.sqrt(v / (1.0 - b2_power)) + eps)
        if decays is None or decays[index]:
            change = change + weight_decay * theta
        candidates = (theta - rate * change, m, v)
        if not all(np.all(np.abs(candidate) <= finite_below) for candidate in candidates):
            return refused(scale)
        for kept, candidate in zip((new_parameters, new_m, new_v), candidates, strict=True):
            kept.append(candidate)
    new_state = AdamState(step, b1_power, b2_power, new_m, new_v)
    return new_parameters, new_state, AdamStats(step, norm, scale, True)


def learning_rate(name, step, *, peak, total_steps, warmup_steps=0, min_lr=0.0, decay_steps=None):
    """The rate of update number `step` (from 0) under a schedule "cosine", "constant", "linear" or "wsd".

    Warm-up: peak·(step + 1)/(warmup_steps + 1) while step < warmup_steps. From total_steps on, the floor.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if name == "constant":
        return peak
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    if name == "cosine":
        return min_lr + (peak - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if name == "linear":
        return peak + (min_lr - peak) * progress
    if name == "wsd":
        left = total_steps - step
        return peak if left >= decay_steps else min_lr + (peak - min_lr) * left / decay_steps
    raise ConfigError(f"learning_rate: the name must be cosine, constant, linear or wsd; got {name!r}. Choose one.")
