"""Which query sees which key: the one place that turns attention's options into a mask."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from riftco.pallas.core.sizes import least, most


def sees(
    position: Any,
    key: Any,
    *,
    causal: bool,
    window: int | None,
    length: Any = None,
    q_segment: Any = None,
    kv_segment: Any = None,
) -> Any:
    """Whether a query sees a key, of whatever shape the arguments broadcast to; None if all is seen.

    Args:
        position: int32, the queries' absolute positions.
        key: int32, the keys' absolute positions.
        causal: hide keys past the query.
        window: a query sees this many keys, its own included; not causal: on either side.
        length: keys at and past it are hidden.
        q_segment: the queries' segments, given together with `kv_segment`.
        kv_segment: the keys' segments.
    """
    parts = []
    if causal:
        parts.append(key <= position)
    if window is not None:
        parts.append(position - key < window)
        if not causal:
            parts.append(key - position < window)
    if length is not None:
        parts.append(key < length)
    if q_segment is not None:
        parts.append(q_segment == kv_segment)
    out = None
    for part in parts:
        out = part if out is None else out & part
    return out


def keys_seen(first: Any, last: Any, keys: Any, *, causal: bool, window: int | None) -> tuple[Any, Any]:
    """The keys [low, high) outside which queries at the positions [first, last) see nothing.

    Integers in, integers out; traced int32 scalars in, traced scalars out. `keys` is how many there are (or the row's
    length). The range may be empty: high is never below low.
    """
    low, high = 0, keys
    if causal:
        high = least(keys, last)
    if window is not None:
        low = most(0, first - window + 1)
        if not causal:
            high = least(high, last - 1 + window)
    low = least(low, keys)
    return low, most(low, high)


def keys_seen_by_all(first: Any, last: Any, keys: Any, *, causal: bool, window: int | None) -> tuple[Any, Any]:
    """The keys [low, high) that every query at the positions [first, last) sees: no mask is needed there."""
    low, high = 0, keys
    if causal:
        high = least(keys, first + 1)
    if window is not None:
        low = most(0, last - window)
        if not causal:
            high = least(high, first + window)
    low = least(low, keys)
    return low, most(low, high)


def queries_seeing(first: Any, last: Any, low: Any, high: Any, *, causal: bool, window: int | None) -> tuple[Any, Any]:
    """The positions within [low, high) outside which no query sees any of the keys [first, last)."""
    start, stop = low, high
    if causal:
        start = most(low, first)
    if window is not None:
        stop = least(high, last - 1 + window)
        if not causal:
            start = most(low, first - window + 1)
    start = least(start, high)
    return start, most(start, stop)


def queries_seeing_all(
    first: Any, last: Any, low: Any, high: Any, *, causal: bool, window: int | None
) -> tuple[Any, Any]:
    """The positions within [low, high) where a query sees every one of the keys [first, last): no mask is needed."""
    start, stop = low, high
    if causal:
        start = most(low, last - 1)
    if window is not None:
        stop = least(high, first + window)
        if not causal:
            start = most(low, last - window)
    start = least(start, high)
    return start, most(start, stop)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Visibility:
    """The options of `ops.attention` that decide what is seen; arrays are leaves, the rest is static."""

    q_segment_ids: Any = None  # int [B, T]
    kv_segment_ids: Any = None  # int [B, S]
    offsets: Any = None  # int32 [B], when it is not one static integer
    kv_lengths: Any = None  # int32 [B]
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

    @property
    def has_wide_segments(self) -> bool:
        """Whether segment ids have more than the 32 bits that kernels compare."""
        return any(x is not None and x.dtype.itemsize > 4 for x in (self.q_segment_ids, self.kv_segment_ids))

    def reach(self, first: Any, last: Any, keys: int) -> tuple[Any, Any]:
        """The keys [low, high) outside which the queries [first, last) see nothing, as far as static options say."""
        if self.offsets is not None:
            return 0, keys
        return keys_seen(self.offset + first, self.offset + last, keys, causal=self.causal, window=self.window)

    def mask(self, rows: Any, columns: Any) -> Any:
        """Boolean [B or 1, T, S] for query numbers `rows` [T] and key numbers `columns` [S]; None if all is seen."""
        position = rows[None, :, None] + (self.offset if self.offsets is None else self.offsets[:, None, None])
        segmented = self.q_segment_ids is not None
        out = sees(
            position,
            columns[None, None, :],
            causal=self.causal,
            window=self.window,
            length=None if self.kv_lengths is None else self.kv_lengths[:, None, None],
            q_segment=self.q_segment_ids[:, rows][:, :, None] if segmented else None,
            kv_segment=self.kv_segment_ids[:, columns][:, None, :] if segmented else None,
        )
        return None if out is None else jnp.broadcast_to(out, (out.shape[0], rows.shape[0], columns.shape[0]))
