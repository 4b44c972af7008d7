"""Adam's state, what an update reports, and the state's one layout-independent form."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from riftco.errors import ConfigError, ShapeError
from riftco.optim.pages import from_pages, paged
from riftco.tree import differences, named_leaves
from riftco.types import Array, PyTree


class AdamState(NamedTuple):
    """What Adam remembers between updates."""

    step: Array
    """int32 scalar: how many updates took effect."""
    m: PyTree
    """First moments, float32, as the parameters; in paged mode each leaf is [pages, page_size]."""
    v: PyTree
    """Second moments, float32, laid out as `m`; never negative."""


class AdamStats(NamedTuple):
    """What one update reports; scalars."""

    step: Array
    """int32: updates that took effect, this one included if it did."""
    grad_norm: Array
    """float32: the global norm before clipping; non-finite exactly where a gradient is (saturates otherwise)."""
    clip_scale: Array
    """float32: what the gradients were multiplied by; exactly 1 where grad_norm <= max_grad_norm, 0 if
    too small for a normal float32 (the gradients are clipped all the same)."""
    ok: Array
    """bool: whether the update took effect."""


def logical_state(state: AdamState, params: PyTree) -> AdamState:
    """The state in its one layout-independent form: step, and m and v shaped as the parameters.

    Args:
        state: contiguous or paged.
        params: arrays or `jax.ShapeDtypeStruct`s that give the shapes.

    Returns:
        A contiguous state. Of a contiguous state it shares the arrays: do not donate one and keep the other.
    """
    contiguous = lambda moments, leaf: from_pages(moments, leaf.shape)
    return AdamState(state.step, *(jax.tree.map(contiguous, side, params) for side in (state.m, state.v)))


def from_logical_state(logical: AdamState, params: PyTree, *, page_size: int | None = None) -> AdamState:
    """A state for `adam(..., page_size=page_size)` from its layout-independent form; the inverse of `logical_state`.

    Args:
        logical: concrete step >= 0, m and v float32, shaped as the parameters, finite, v >= 0.
        params: arrays or `jax.ShapeDtypeStruct`s that give the shapes.
        page_size: as in `adam`.

    Returns:
        The state. Without pages it shares the arrays of `logical`.

    Raises:
        ShapeError: if a moment is missing, or is not shaped as its parameter.
        ConfigError: if the step is negative, or a moment is not finite, or a second moment is negative.
    """
    if int(logical.step) < 0:
        raise ConfigError(f"from_logical_state: step must be >= 0; got {int(logical.step)}. The state is damaged.")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    for side, moments in (("m", logical.m), ("v", logical.v)):
        if lines := differences(moments, shapes):
            raise ShapeError(
                f"from_logical_state: {side} must be float32 and shaped as the parameters; {'; '.join(lines)}. "
                "Load the state that was saved with these parameters."
            )
        for name, leaf in named_leaves(moments):
            if not bool(jnp.all(jnp.isfinite(leaf))) or (side == "v" and bool(jnp.any(leaf < 0))):
                raise ConfigError(
                    f"from_logical_state: {side} must be finite, and v not negative; {side}.{name} is not. "
                    "The state is damaged: load an earlier one."
                )
    layout = lambda leaf: paged(leaf, page_size)
    return AdamState(
        jnp.asarray(logical.step, jnp.int32), jax.tree.map(layout, logical.m), jax.tree.map(layout, logical.v)
    )
