"""How the TPU kernels cut the scores into tiles: sizes for each chip, the tiles that are visited, and the mask of one.

The query heads that share a key head are packed into its rows: row `t R + r` is query t of the group's head r, with
R = H / G. Each key tile is then read once for all of them, one query fills a tile, and what a key gathers over its
group is summed by the product itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from riftco.pallas import dispatch
from riftco.pallas.core.sizes import ceil_div, least, quotient, round_up
from riftco.pallas.core.visibility import Visibility, keys_seen, keys_seen_by_all, queries_seeing, sees

LANES = 128
MIB = 1 << 20

# Of a tile, by the device's kind as jax names it ("TPU v5 lite" is sold as v5e, "TPU v6 lite" as v6e): rows and keys
# forward, rows and keys backward, and the memory that a kernel may take.
# A chip needs peak FLOP/s over bandwidth in rows (v5e 240, v6e 561) before reading the keys is hidden.
# Source: kinds and memory from jax's table of chips.
TILES = {
    "TPU v4": (256, 512, 256, 256, 14 * MIB),
    "TPU v5 lite": (512, 512, 512, 512, 96 * MIB),
    "TPU v5": (512, 512, 512, 512, 48 * MIB),
    "TPU v5p": (512, 512, 512, 512, 48 * MIB),
    "TPU v6 lite": (1024, 1024, 512, 512, 96 * MIB),
}
OTHER_TPU = (512, 512, 512, 512, 48 * MIB)
# An interpreter is to see several tiles, and to compute little that no one asked for.
INTERPRETED = (128, 128, 128, 128, 96 * MIB)


def _shrunk(size: int, length: int) -> int:
    """A tile of at most `size` that cuts the length evenly, rounded up to what 16-bit sublanes or the lanes hold."""
    even = ceil_div(length, ceil_div(length, size))
    return round_up(even, 16 if length < LANES else LANES)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The static part of one call: sizes, options, and from them which tiles meet."""

    queries: int
    keys: int
    repeats: int  # query heads of one key head
    row_tile: int
    key_tile: int
    memory: int
    causal: bool
    window: int | None
    offset: int | None  # None when each batch row has its own
    has_lengths: bool
    segmented: bool

    @classmethod
    def of(cls, q: Any, k: Any, sees: Visibility, backward: bool = False) -> "Tiling":
        """The tiling of a call, for the device that the trace is made for."""
        target = dispatch.current_target(q, k)
        sizes = TILES.get(target.kind, OTHER_TPU) if target.platform == "tpu" else INTERPRETED
        # A float32 product is six passes of the matrix unit: half the tile hides the copies, and spares the compiler.
        rows, keys = (max(LANES, n // (2 if q.dtype == jnp.float32 else 1)) for n in sizes[2 * backward :][:2])
        repeats = q.shape[2] // k.shape[2]
        return cls(
            queries=q.shape[1],
            keys=k.shape[1],
            repeats=repeats,
            row_tile=_shrunk(rows, q.shape[1] * repeats),
            key_tile=_shrunk(keys, k.shape[1]),
            memory=sizes[4],
            causal=sees.causal,
            window=sees.window,
            offset=None if sees.offsets is not None else sees.offset,
            has_lengths=sees.kv_lengths is not None,
            segmented=sees.q_segment_ids is not None,
        )

    # -------------------------------------------------------------------------------------------- sizes

    @property
    def rows(self) -> int:
        """Rows of a key head: its query heads' queries."""
        return self.queries * self.repeats

    @property
    def row_tiles(self) -> int:
        """How many tiles hold the rows."""
        return ceil_div(self.rows, self.row_tile)

    @property
    def key_tiles(self) -> int:
        """How many tiles hold the keys."""
        return ceil_div(self.keys, self.key_tile)

    @property
    def has_ragged_keys(self) -> bool:
        """Whether some tile holds slots that are no keys."""
        return self.has_lengths or self.keys % self.key_tile != 0

    @property
    def has_ragged_rows(self) -> bool:
        """Whether some tile holds rows that are none."""
        return self.rows % self.row_tile != 0

    # -------------------------------------------------------------------------------------------- which tiles meet

    def scalars(self, offsets: Any, lengths: Any, b: Any) -> tuple[Any, Any]:
        """The position of the first query, and how many keys there are, of batch row b; ints where they are static."""
        return (
            offsets[b] if self.offset is None else self.offset,
            lengths[b] if self.has_lengths else self.keys,
        )

    def _positions(self, i: Any, offset: Any) -> tuple[Any, Any]:
        """The positions [first, last) of the queries in row tile i."""
        first = i * self.row_tile
        stop = least(first + self.row_tile, self.rows)
        return offset + quotient(first, self.repeats), offset + quotient(stop - 1, self.repeats) + 1

    def keys_of(self, i: Any, offset: Any, limit: Any) -> tuple[Any, Any]:
        """The first key tile that row tile i meets, and how many it meets."""
        low, high = keys_seen(*self._positions(i, offset), limit, causal=self.causal, window=self.window)
        return _tiles(low, high, self.key_tile)

    def rows_of(self, j: Any, offset: Any, limit: Any) -> tuple[Any, Any]:
        """The first row tile that key tile j meets, and how many it meets."""
        first = j * self.key_tile
        last = least(first + self.key_tile, limit)
        low, high = queries_seeing(first, last, offset, offset + self.queries, causal=self.causal, window=self.window)
        if self.has_lengths:  # past the length, `last` precedes `first`, and any range may come
            high = jnp.where(first < limit, high, low)
        return _tiles((low - offset) * self.repeats, (high - offset) * self.repeats, self.row_tile)

    @property
    def key_steps(self) -> int:
        """The most key tiles that a row tile meets, whatever the traced options are."""
        if self.offset is not None:
            return max(1, *(self.keys_of(i, self.offset, self.keys)[1] for i in range(self.row_tiles)))
        queries = (self.row_tile + self.repeats - 2) // self.repeats + 1
        return self._most_steps(queries, self.key_tile, self.key_tiles)

    @property
    def row_steps(self) -> int:
        """The most row tiles that a key tile meets, whatever the traced options are."""
        if self.offset is not None:
            static = dataclasses.replace(self, has_lengths=False)
            return max(1, *(static.rows_of(j, self.offset, self.keys)[1] for j in range(self.key_tiles)))
        return self._most_steps(self.key_tile, self.row_tile, self.row_tiles, self.repeats)

    def _most_steps(self, span: int, tile: int, tiles: int, repeats: int = 1) -> int:
        if self.window is None:
            return tiles
        reached = span + (self.window - 1) * (1 if self.causal else 2)
        return min(tiles, (reached * repeats - 2) // tile + 2)

    def cost(self, batch: int, groups: int, width: int, products: int, arrays: Any) -> Any:
        """What XLA is told of a kernel with `products` matrix products a tile; what is hidden while running counts."""
        if self.offset is None:
            tiles = self.row_tiles * self.key_steps
        else:
            tiles = sum(self.keys_of(i, self.offset, self.keys)[1] for i in range(self.row_tiles))
        scores = batch * groups * tiles * self.row_tile * self.key_tile
        moved = sum(x.size * x.dtype.itemsize for x in arrays)
        return pl.CostEstimate(flops=2 * products * scores * width, transcendentals=scores, bytes_accessed=moved)

    # -------------------------------------------------------------------------------------------- the mask

    def needs_no_mask(self, i: Any, j: Any, offset: Any, limit: Any, rows: bool) -> Any:
        """Whether every row of tile i sees every key of tile j; `rows` asks for no ragged end of rows either.

        A Python bool where that holds for all tiles or for none.
        """
        ragged_rows = rows and self.has_ragged_rows
        if self.segmented:
            return False
        if not (self.causal or self.window is not None or self.has_ragged_keys or ragged_rows):
            return True
        low, high = keys_seen_by_all(*self._positions(i, offset), limit, causal=self.causal, window=self.window)
        first = j * self.key_tile
        full = (low <= first) & (first + self.key_tile <= high)
        return full & ((i + 1) * self.row_tile <= self.rows) if ragged_rows else full

    def visit(self, i: Any, j: Any, met: Any, offset: Any, limit: Any, rows: bool, tile: Callable[..., None]) -> None:
        """Calls `tile(masked)` if the tiles meet, with masked False where no mask is needed."""
        full = self.needs_no_mask(i, j, offset, limit, rows)
        if isinstance(full, bool):
            pl.when(met)(lambda: tile(not full))
            return
        pl.when(met & full)(lambda: tile(False))
        pl.when(met & jnp.logical_not(full))(lambda: tile(True))

    def mask(
        self, i: Any, j: Any, offset: Any, limit: Any, q_segment: Any, kv_segment: Any, *, row_axis: int, rows: bool
    ) -> Any:
        """Which row of tile i sees which key of tile j: a boolean tile, with the rows along `row_axis`; None for all.

        `q_segment` and `kv_segment` lie along their own axes, with 1 along the other.
        """
        row = lax.broadcasted_iota(jnp.int32, _along(row_axis, self.row_tile), row_axis)
        key = j * self.key_tile + lax.broadcasted_iota(jnp.int32, _along(1 - row_axis, self.key_tile), 1 - row_axis)
        out = sees(
            self._position(i, row, offset),
            key,
            causal=self.causal,
            window=self.window,
            length=limit if self.has_ragged_keys else None,
            q_segment=q_segment,
            kv_segment=kv_segment,
        )
        if not (rows and self.has_ragged_rows):
            return out
        inside = i * self.row_tile + row < self.rows
        return inside if out is None else out & inside

    def _position(self, i: Any, row: Any, offset: Any) -> Any:
        """The positions of the rows `row` of tile i."""
        first = i * self.row_tile
        if self.repeats == 1:
            return offset + first + row
        query = quotient(first, self.repeats)
        # No TPU divides integers. Halves keep the quotient off the whole numbers, so rounding cannot reach the next.
        past = (row + (first - query * self.repeats)).astype(jnp.float32)
        return offset + query + jnp.floor((past + 0.5) * (1.0 / self.repeats)).astype(jnp.int32)

    def keep_rows(self, i: Any, x: Any) -> Any:
        """A tile [row_tile, K] of rows, with 0 for what is no row."""
        return x if not self.has_ragged_rows else _kept(x, self.rows - i * self.row_tile)

    def keep_keys(self, j: Any, limit: Any, x: Any) -> Any:
        """A tile [key_tile, K] of keys or values, with 0 for the slots past the limit: 0 times a NaN would be NaN."""
        return x if not self.has_ragged_keys else _kept(x, limit - j * self.key_tile)


def _kept(x: Any, count: Any) -> Any:
    index = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(index < count, x, jnp.zeros((), x.dtype))


def _tiles(low: Any, high: Any, tile: int) -> tuple[Any, Any]:
    """The first tile of the elements [low, high), and how many hold them; none if there are none."""
    first = quotient(low, tile)
    last = ceil_div(high, tile)
    if isinstance(low, int) and isinstance(high, int):
        return first, last - first if low < high else 0
    return first, jnp.where(low < high, last - first, 0)


def _along(axis: int, size: int) -> tuple[int, int]:
    return (size, 1) if axis == 0 else (1, size)
