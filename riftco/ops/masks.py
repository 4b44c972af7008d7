"""Which query sees which key: the one place that turns attention's options into a mask."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from riftco.autodiff.box import unbox
from riftco.errors import ConfigError
from riftco.ops import validate


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Visibility:
    """The options of `ops.attention` that decide what is seen; arrays are leaves, the rest is static."""

    q_segment_ids: Any = None  # int [B, T]
    kv_segment_ids: Any = None  # int [B, S]
    offsets: Any = None  # int32 [B], when it is not one static integer
    kv_lengths: Any = None  # int [B]
    causal: bool = True
    window: int | None = None
    offset: int = 0

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Arrays, and static options."""
        arrays = [self.q_segment_ids, self.kv_segment_ids, self.offsets, self.kv_lengths]
        return arrays, (self.causal, self.window, self.offset)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Visibility":
        """The inverse of `tree_flatten`."""
        return cls(*arrays, *static)

    def reach(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """The keys [low, high) outside which the queries [first, last) see nothing, as far as is known statically."""
        if self.offsets is not None:
            return 0, keys
        low, high = 0, keys
        if self.causal:
            high = min(keys, self.offset + last)
        if self.window is not None:
            low = max(0, self.offset + first - self.window + 1)
            if not self.causal:
                high = min(high, self.offset + last - 1 + self.window)
        return min(low, keys), max(min(low, keys), high)

    def mask(self, rows: Any, columns: Any) -> Any:
        """Boolean [B or 1, T, S] for query numbers `rows` [T] and key numbers `columns` [S]; None if all is seen."""
        parts = []
        if self.offsets is None:
            position = (rows + self.offset)[None, :, None]
        else:
            position = rows[None, :, None] + self.offsets[:, None, None]
        key = columns[None, None, :]
        if self.causal:
            parts.append(key <= position)
        if self.window is not None:
            parts.append(position - key < self.window)
            if not self.causal:
                parts.append(key - position < self.window)
        if self.kv_lengths is not None:
            parts.append(key < self.kv_lengths[:, None, None])
        if self.q_segment_ids is not None:
            parts.append(self.q_segment_ids[:, rows][:, :, None] == self.kv_segment_ids[:, columns][:, None, :])
        out = None
        for part in parts:
            out = part if out is None else out & part
        return None if out is None else jnp.broadcast_to(out, (out.shape[0], rows.shape[0], columns.shape[0]))


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
    if window is not None:
        size = validate.index(window)
        if size is None or size < 1:
            raise ConfigError(f"{who}: window must be a positive integer or None; got {window!r}.")
        window = size
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
        value = validate.integer(who, name, unbox(value))
        if name == "q_offset" and value.ndim == 0:
            value = jnp.broadcast_to(value, (batch,))
        validate.require(who, tuple(value.shape) == shape, f"{name} must be {list(shape)}", list(value.shape))
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
