"""What the Mosaic GPU kernels of Flash attention share: shared memory, masks of tiles, and the ring of loads.

A block has a few warpgroups that compute, each on 64 rows of its own (the height of Hopper's matrix instruction), and
one more that loads: the others' operands arrive through a ring of slots in shared memory, by TMA.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from riftco import _compat
from riftco.pallas.core import softmax, visibility
from riftco.pallas.core.sizes import ceil_div, pad_to, quotient, remainder
from riftco.pallas.core.visibility import Visibility

plgpu = _compat.mosaic_gpu()

ROWS = 64  # of a warpgroup's tile
SLOTS = 2  # of the ring
# Of a thread: three warpgroups start with a third of 504 each, and the one that loads leaves most of its share.
REGISTERS, LOADER_REGISTERS = 232, 40
SWIZZLED = 8  # rows of a piece of a swizzled tile: TMA takes no array with a broken one


def matrix(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory [..., rows, columns] in the order that wgmma reads; columns are a multiple of 64."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def vector(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of per-row or per-column values."""
    return plgpu.SMEM(shape, dtype)


def zeros(shape: tuple[int, ...], fill: float = 0.0) -> Any:
    """A float32 tile [r, c], or per-row values [r], in registers."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)


def per_row(ref: Any) -> Any:
    """Values of a tile's rows, from shared memory."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def per_column(ref: Any) -> Any:
    """Values of a tile's columns, from shared memory."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def over_columns(column: Any, shape: tuple[int, int]) -> Any:
    """Per-column values [c] repeated along the rows of a tile."""
    return lax.broadcast_in_dim(column, shape, (1,))


def over_rows(row: Any, shape: tuple[int, int]) -> Any:
    """Per-row values [r] repeated along the columns of a tile."""
    return lax.broadcast_in_dim(row, shape, (0,))


def dot(a: Any, b: Any, shape: tuple[int, int]) -> Any:
    """The product of two matrices in shared memory, a [r, k] and b [k, c]: float32 [r, c] in registers."""

    def product(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Sees:
    """What the queries of one row of the batch see; `length` and `offset` may be traced."""

    causal: bool
    window: int | None
    offset: Any
    length: Any
    queries: int

    def keys(self, first: Any, rows: int, tile: int) -> tuple[Any, Any]:
        """The tiles of keys [start, stop) that the queries [first, first + rows) need."""
        low, high = visibility.keys_seen(
            self.offset + first, self._last(first, rows), self.length, causal=self.causal, window=self.window
        )
        return quotient(jnp.int32(low), tile), ceil_div(jnp.int32(high), tile)

    def queries_of(self, first: Any, rows: int, tile: int) -> tuple[Any, Any]:
        """The tiles of queries [start, stop) that see any of the keys [first, first + rows)."""
        low, high = visibility.queries_seeing(
            first,
            first + rows,
            jnp.int32(self.offset),
            jnp.int32(self.offset + self.queries),
            causal=self.causal,
            window=self.window,
        )
        # Keys past the length are seen by nobody.
        high = jnp.where(first < self.length, high, low)
        return quotient(low - self.offset, tile), ceil_div(high - self.offset, tile)

    def masked(self, scores: Any, query: Any, key: Any, query_axis: int, segments: Any) -> Any:
        """A tile's scores with -inf where the query does not see the key.

        Args:
            scores: float32 [r, c].
            query: number of the first query.
            key: number of the first key.
            query_axis: the axis along which queries go on.
            segments: the queries' and the keys' segments in shared memory, or None.
        """
        if segments is not None:
            # How many tiles lie within one segment is not known, so all are masked.
            per = (per_row, per_column) if query_axis == 0 else (per_column, per_row)
            over = (over_rows, over_columns) if query_axis == 0 else (over_columns, over_rows)
            q_segment, kv_segment = (o(p(ref), scores.shape) for o, p, ref in zip(over, per, segments, strict=True))
            return softmax.masked(scores, self._mask(query, key, scores.shape, query_axis, q_segment, kv_segment))
        return lax.cond(
            self._all_seen(query, scores.shape[query_axis], key, scores.shape[1 - query_axis]),
            lambda s: s,
            lambda s: softmax.masked(s, self._mask(query, key, s.shape, query_axis)),
            scores,
        )

    def _all_seen(self, query: Any, queries: int, key: Any, keys: int) -> Any:
        low, high = visibility.keys_seen_by_all(
            self.offset + query, self.offset + query + queries, self.length, causal=self.causal, window=self.window
        )
        return (low <= key) & (key + keys <= high)

    def _mask(
        self,
        query: Any,
        key: Any,
        shape: tuple[int, int],
        query_axis: int,
        q_segment: Any = None,
        kv_segment: Any = None,
    ) -> Any:
        position = plgpu.broadcasted_iota(jnp.int32, shape, query_axis, layout=plgpu.Layout.WGMMA)
        number = plgpu.broadcasted_iota(jnp.int32, shape, 1 - query_axis, layout=plgpu.Layout.WGMMA)
        return visibility.sees(
            position + (self.offset + query),
            number + key,
            causal=self.causal,
            window=self.window,
            length=self.length,
            q_segment=q_segment,
            kv_segment=kv_segment,
        )

    def _last(self, first: Any, rows: int) -> Any:
        return self.offset + jnp.minimum(first + rows, self.queries)


def sees_of(options: Visibility, batch: Any, queries: int, keys: int) -> Sees:
    """The options of one row, from refs."""
    offset = options.offset if options.offsets is None else options.offsets[batch]
    length = keys if options.kv_lengths is None else jnp.minimum(options.kv_lengths[batch], keys)
    return Sees(options.causal, options.window, offset, length, queries)


def ring(steps: Any, consumed: Any, load: Callable[[Any, Any], None]) -> None:
    """The loading warpgroup's loop: `load(step, slot)` once the slot's former content is `consumed`."""

    @pl.loop(0, steps)
    def _(step: Any) -> None:
        slot = remainder(step, SLOTS)

        @pl.when(step >= SLOTS)
        def _() -> None:
            plgpu.barrier_wait(consumed.at[slot])

        load(step, slot)


def silence(tile: Any, first: Any, length: Any) -> None:
    """Zeroes a tile's rows past the length, which may hold anything: 0 times NaN would be NaN."""
    rows, width = tile.shape

    @pl.when(first + rows > length)
    def _() -> None:
        values = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
        number = plgpu.broadcasted_iota(jnp.int32, (rows, width), 0, layout=plgpu.Layout.WGMMA)
        tile[...] = jnp.where(number + first < length, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()


def silence_shared(shared: Sequence[Any], first: Any, length: Any, group: Any, together: Any) -> None:
    """`silence` for tiles that have arrived and that all computing warpgroups read; all of them call it.

    `together` is a barrier of as many arrivals.
    """

    @pl.when(first + shared[0].shape[0] > length)
    def _() -> None:
        @pl.when(group == 0)
        def _() -> None:
            for tile in shared:
                silence(tile, first, length)

        plgpu.barrier_arrive(together)
        plgpu.barrier_wait(together)


def prepared(sees: Visibility, queries: int, keys: int) -> Visibility:
    """The options as a kernel takes them: int32, segment numbers padded to whole tiles, lengths not negative."""

    def segments(x: Any, multiple: int) -> Any:
        return None if x is None else pad_to(x.astype(jnp.int32), 1, multiple)

    return dataclasses.replace(
        sees,
        q_segment_ids=segments(sees.q_segment_ids, queries),
        kv_segment_ids=segments(sees.kv_segment_ids, keys),
        offsets=None if sees.offsets is None else sees.offsets.astype(jnp.int32),
        kv_lengths=None if sees.kv_lengths is None else jnp.maximum(sees.kv_lengths.astype(jnp.int32), 0),
    )
