"""The options of `ops.attention` that decide what is seen, checked; what they mean is in pallas/core/visibility.py."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco.autodiff.box import unbox
from riftco.errors import ConfigError
from riftco.ops import validate
from riftco.pallas.core.visibility import Visibility

__all__ = ["Visibility", "visibility"]

FARTHEST = 2**30  # positions and windows are int32, and so are their sums


def window_of(who: str, window: Any) -> int | None:
    """A window, checked."""
    if window is None:
        return None
    size = validate.index(window)
    if size is None or size < 1:
        raise ConfigError(f"{who}: window must be a positive integer or None; got {window!r}.")
    return min(size, FARTHEST)


def visibility(
    batch: int,
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None,
    q_segment_ids: Any,
    kv_segment_ids: Any,
    q_offset: Any,
    kv_lengths: Any,
) -> Visibility:
    """The checked options of one call."""
    who = "attention"
    causal, window = validate.boolean(who, "causal", causal), window_of(who, window)
    if q_offset is None or isinstance(q_offset, bool | np.bool_ | float | str):
        raise ConfigError(f"{who}: q_offset must be an integer, or an integer array [{batch}]; got {q_offset!r}.")
    if isinstance(q_offset, int | np.integer):
        q_offset = int(q_offset)
        if abs(q_offset) > FARTHEST:
            raise ConfigError(f"{who}: q_offset must lie within {FARTHEST} of 0; got {q_offset}.")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ConfigError(f"{who}: q_segment_ids and kv_segment_ids must be given together.")
    arrays = {}
    wanted = {
        "q_segment_ids": (q_segment_ids, (batch, queries)),
        "kv_segment_ids": (kv_segment_ids, (batch, keys)),
        "kv_lengths": (kv_lengths, (batch,)),
        "q_offset": (None if isinstance(q_offset, int) else q_offset, (batch,)),
    }
    for name, (value, shape) in wanted.items():
        if value is None:
            arrays[name] = None
            continue
        value = unbox(value)
        if (
            name in ("q_offset", "kv_lengths")
            and isinstance(value, np.ndarray | np.generic)
            and value.dtype.kind in "iu"
        ):
            value = np.minimum(value, FARTHEST).astype(np.int64)  # jax would wrap 64 bits into 32
            value = np.maximum(value, -FARTHEST).astype(np.int32)
        value = validate.integer(who, name, value)
        if name == "q_offset" and value.ndim == 0:
            value = jnp.broadcast_to(value, (batch,))
        validate.require(who, tuple(value.shape) == shape, f"{name} must be {list(shape)}", list(value.shape))
        if name == "kv_lengths":  # before it is narrowed: 2^32 + 5 keys are not 5
            value = jnp.maximum(jnp.minimum(value, keys), 0)
        arrays[name] = value.astype(jnp.int32) if name in ("q_offset", "kv_lengths") else value
    return Visibility(
        arrays["q_segment_ids"],
        arrays["kv_segment_ids"],
        arrays["q_offset"],
        arrays["kv_lengths"],
        causal,
        window,
        q_offset if isinstance(q_offset, int) else 0,
    )
