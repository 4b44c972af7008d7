"""Adam with decoupled weight decay, global-norm clipping and a whole-step commit.

An update either takes effect in full or not at all: if a gradient, or a candidate for any moment or parameter, is not
finite, every array keeps its bits, the step count included, and `stats.ok` is False. The choice is made inside the
compiled update, so it holds for donated buffers too. NumPy float64 twin: `riftco.oracle.optim.adam_step`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from riftco import _compat
from riftco.errors import DTypeError, ShapeError
from riftco.optim.clipping import Clip, careful_clip, quick_clip, squares_are_safe, sum_of_squares
from riftco.optim.options import Options, checked_options, decay_flags
from riftco.optim.packing import Packing
from riftco.optim.pages import from_pages, paged
from riftco.optim.schedules import Schedule
from riftco.optim.state import AdamState, AdamStats
from riftco.tree import describe, differences, named_leaves
from riftco.types import Array, PyTree

# Bounds below this leave 28 powers of two for rounding, for 1/(1 − b2^t), and for sums that were themselves rounded.
_SURELY_FINITE = 2.0**100
_LAST_STEP = 2**31 - 1


class _Rates(NamedTuple):
    """The scalars of one update, float32: lr, lr/(1 − b1^t), 1/√(1 − b2^t)."""

    learning_rate: Array
    step_size: Array
    root_correction: Array


def adam(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    max_grad_norm: float | None = 1.0,
    weight_decay: float = 0.0,
    decay_mask: Callable[[PyTree], PyTree] | PyTree = None,
    page_size: int | None = None,
) -> tuple[Callable[[PyTree], AdamState], Callable[[PyTree, AdamState, PyTree], tuple[PyTree, AdamState, AdamStats]]]:
    """Adam as a pair of pure functions, `init(params) -> state` and `update(grads, state, params)`.

    With N = max_grad_norm, ‖g‖ the norm over all gradients and t counting from 1, an update is

        s  = N/‖g‖ if ‖g‖ > N else 1
        m ← b1·m + (1 − b1)·s·g          v ← b2·v + (1 − b2)·(s·g)²
        θ ← θ − lr·(m/(1 − b1^t)) / (√(v/(1 − b2^t)) + eps) − lr·weight_decay·θ

    with the old θ on the right. Arithmetic and moments are float32 whatever the parameters' dtype; a bfloat16 parameter
    is rounded once, at the end. 1 − b^t is −expm1(t·log b), which keeps its digits. Zero gradients on a fresh state
    leave undecayed parameters bit-unchanged; after momentum exists they still move.

    `update(grads, state, params)` returns `(params, state, stats)`, stats an `AdamStats`. It runs under jit, scan, vmap
    and shard_map (there on gradients that are already reduced and parameters that every device holds in full; for
    sharded parameters use jit with shardings, where the norm is global by itself). No two leaves of a state share a
    buffer, so parameters and state can be donated; XLA then works in place if the compiled function takes and returns
    them in the same order, as in `step(params, state, batch) -> (params, state, ...)`.

    Args:
        learning_rate: a number >= 0, or a pure f(step) of the number of updates made so far: the first uses f(0).
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added to the root, after the bias correction; > 0.
        max_grad_norm: the limit on the global norm, > 0, or None for no clipping.
        weight_decay: decoupled decay, >= 0; it is not part of the moments.
        decay_mask: which leaves decay: a pytree of bools like the parameters, or a function from the parameters to one;
            None decays every leaf.
        page_size: None keeps moments shaped as the parameters; n keeps them flattened in pages of n scalars. The
            equations are the same.

    Returns:
        (init, update).

    Raises:
        ConfigError: if an option is out of range, or is so once rounded to float32.
        ShapeError, DTypeError: from `update`, while tracing, if gradients, parameters and state do not match.

    Source:
        Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; decay: Loshchilov and Hutter 2019, arXiv:1711.05101,
        algorithm 2, with the schedule inside lr.
    """
    options, limit = checked_options(learning_rate, b1, b2, eps, max_grad_norm, weight_decay, page_size)

    def init(params: PyTree) -> AdamState:
        _check_floating("adam: init", params)

        zeros = lambda leaf: paged(jnp.zeros_like(leaf, dtype=jnp.float32), page_size)
        # Two separate maps: m and v must not share a buffer.
        return AdamState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params), jax.tree.map(zeros, params))

    def update(grads: PyTree, state: AdamState, params: PyTree) -> tuple[PyTree, AdamState, AdamStats]:
        _check_update(grads, state, params, page_size)
        names = [name for name, _ in named_leaves(params)]
        leaves, structure = jax.tree.flatten(params)
        gradients, first, second = (jax.tree.leaves(tree) for tree in (grads, state.m, state.v))
        decays = decay_flags(decay_mask, params, names) if weight_decay else [False] * len(leaves)
        rates = _rates(learning_rate, state.step, options)
        packing = Packing(leaves, gradients, decays, page_size)
        shapes = [leaf.shape for leaf in leaves]
        gradients, first, second, leaves = (packing.pack(side) for side in (gradients, first, second, leaves))
        decays = packing.first_of_each(decays)

        def careful() -> tuple[Clip, Array]:
            clip = careful_clip(gradients, limit)
            ok = jnp.isfinite(clip.norm)
            for g, m, v, theta, decay in zip(gradients, first, second, leaves, decays, strict=True):
                g, wide = paged(g, page_size), paged(theta, page_size)
                m, v = _moments(g, m, v, clip, options)
                # A finite parameter shows that m is: an infinite m would have made it infinite or NaN.
                finite = jnp.isfinite(_parameter(m, v, wide, rates, options, decay)) & jnp.isfinite(v)
                ok = ok & jnp.all(finite)
            return clip, ok

        # Looking at every candidate costs a second computation of the step. Sums of squares, which cost a fraction of
        # it, nearly always prove that all of them are finite; only where they do not is the long way taken.
        total = sum_of_squares(gradients)
        clip = quick_clip(total, limit)
        proof = squares_are_safe(gradients, total) & _surely_finite(clip, first, second, leaves, rates, options, limit)
        # The proof itself, not a constant, stands for ok: under shard_map both branches then vary alike.
        clip, ok = jax.lax.cond(proof, lambda: (clip, proof), careful)
        ok = ok & (state.step < _LAST_STEP)

        def committed(i: int) -> tuple[Array, Array, Array]:
            g, m, v, theta = gradients[i], first[i], second[i], leaves[i]
            new_m, new_v = _moments(paged(g, page_size), m, v, clip, options)
            # Committed moments, not candidates, enter the parameter: equal where ok, and already in memory.
            new_m, new_v = jnp.where(ok, new_m, m), jnp.where(ok, new_v, v)
            wide = paged(theta, page_size)
            new_theta = jnp.where(ok, _parameter(new_m, new_v, wide, rates, options, decays[i]), wide)
            return from_pages(new_theta, theta.shape), new_m, new_v

        def committed_together(i: int) -> tuple[Array, ...]:
            # XLA would give each leaf cut from a packed vector its own program; it does not look into a conditional.
            old = (leaves[i], first[i], second[i])
            axes = frozenset().union(*map(_compat.varying_axes, (ok, gradients[i], *old, *clip, *rates)))
            alike = lambda arrays: tuple(_compat.mark_varying(x, axes) for x in arrays)
            return jax.lax.cond(ok, lambda: alike(committed(i)), lambda: alike(old))

        updated = [committed_together(i) if packing.is_packed(i) else committed(i) for i in range(len(leaves))]
        next_leaves, next_first, next_second = zip(*updated, strict=True) if updated else ((), (), ())

        step = state.step + ok.astype(jnp.int32)
        new_params, *moments = (
            jax.tree.unflatten(structure, packing.unpack(side, shapes))
            for side in (next_leaves, next_first, next_second)
        )
        return new_params, AdamState(step, *moments), AdamStats(step, clip.norm, clip.scale, ok)

    return init, update


def _moments(g: Array, m: Array, v: Array, clip: Clip, options: Options) -> tuple[Array, Array]:
    g = g.astype(jnp.float32) * clip.shift * clip.factor
    # ((1 − b2)·g)·g rather than (1 − b2)·g²: the square alone leaves float32 ten times sooner.
    return options.b1 * m + (1.0 - options.b1) * g, options.b2 * v + (1.0 - options.b2) * g * g


def _parameter(m: Array, v: Array, theta: Array, rates: _Rates, options: Options, decay: bool) -> Array:
    wide = theta.astype(max(jnp.float32, theta.dtype, key=lambda dtype: jnp.finfo(dtype).bits))
    change = rates.step_size * m / (jnp.sqrt(v) * rates.root_correction + options.eps)
    if decay:
        change = change + rates.learning_rate * options.weight_decay * wide
    # A device that flushes subnormals would change such a parameter by subtracting nothing from it.
    return jnp.where(change == 0.0, theta, (wide - change.astype(wide.dtype)).astype(theta.dtype))


def _rates(learning_rate: float | Schedule, step: Array, options: Options) -> _Rates:
    rate = jnp.asarray(learning_rate(step) if callable(learning_rate) else learning_rate, jnp.float32)
    count = (step + 1).astype(jnp.float32)
    correction = lambda beta: -jnp.expm1(count * (math.log(beta) if beta else -math.inf))
    return _Rates(rate, rate / correction(options.b1), jax.lax.rsqrt(correction(options.b2)))


def _surely_finite(
    clip: Clip,
    first: list[Array],
    second: list[Array],
    leaves: list[Array],
    rates: _Rates,
    options: Options,
    limit: float | None,
) -> Array:
    """Whether bounds alone prove every candidate finite; False may mean only that they do not."""
    gradient = clip.norm if limit is None else jnp.minimum(clip.norm, limit)
    # One sum bounds all three at once: each of Σm², Σv and Σθ² is at most their total. v is never negative.
    total = jnp.float32(0)
    for m, v, theta in zip(first, second, leaves, strict=True):
        wide = theta.astype(jnp.float32)
        total = total + jnp.sum(m * m) + jnp.sum(v) + jnp.sum(wide * wide)
    root = jnp.sqrt(total)
    # m and v are averages of what they were and of what comes in, so they are bounded by the larger of the two.
    m_bound = jnp.maximum(root, gradient)
    v_bound = jnp.maximum(total, gradient * gradient)
    theta_bound = root * (1.0 + jnp.abs(rates.learning_rate) * options.weight_decay)
    theta_bound = theta_bound + jnp.abs(rates.step_size) * (m_bound / options.eps)
    # Parameters narrower than float32 in exponent (float16) leave theirs sooner. A NaN compares false.
    theta_limit = min([_SURELY_FINITE, *(0.5 * float(jnp.finfo(leaf.dtype).max) for leaf in leaves)])
    return (m_bound < _SURELY_FINITE) & (v_bound < _SURELY_FINITE) & (theta_bound < theta_limit)


def _check_update(grads: PyTree, state: AdamState, params: PyTree, page_size: int | None) -> None:
    _check_floating("adam: update", params)
    _check_floating("adam: update", grads)
    shapes = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.float32), tree)
    moments = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: paged(leaf, page_size), tree), shapes(params))
    for what, got, wanted in (
        ("gradients", shapes(grads), shapes(params)),
        ("first moments", state.m, moments),
        ("second moments", state.v, moments),
    ):
        lines = differences(got, wanted)
        if not lines and jax.tree.structure(got) != jax.tree.structure(wanted):
            lines = ["the names agree but the containers do not"]
        if lines:
            raise ShapeError(
                f"adam: update: the {what} must match the parameters; {'; '.join(lines)}, left being the {what}. "
                "Pass the gradients and the state of these parameters, and the page_size of that state."
            )


def _check_floating(who: str, tree: PyTree) -> None:
    for name, leaf in named_leaves(tree):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype if not hasattr(leaf, "dtype") else leaf.dtype, jnp.floating):
            raise DTypeError(
                f"{who}: every leaf must be a floating array; {name or '(root)'} is {describe(leaf)}. "
                "Keep what is not trained out of the parameters."
            )
