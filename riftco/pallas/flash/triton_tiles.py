"""What the Triton kernels of Flash attention share: tile sizes, masked loads, and which tiles need a mask.

Arrays stay in device memory as [B, T, H, K]; a program reads a tile of them by its row, its head and a range. Head
widths are padded to a power of two, and every edge is a masked load: nothing is padded or transposed outside.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from riftco.pallas.core.sizes import ceil_div, least, most, power_of_two, quotient
from riftco.pallas.core.visibility import (
    Visibility,
    keys_seen,
    keys_seen_by_all,
    queries_seeing,
    queries_seeing_all,
    sees,
)

WIDEST = 256  # head width


class Tiles(NamedTuple):
    """The tile of scores that a program holds, its warps, and the depth of its loads' pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


# By padded head width, for elements of 2 bytes and of 4. They fit the shared memory of sm_90 (227 KiB) and hardly spill
# registers there. 4-byte tiles are small: full float32 products run outside the tensor cores, each unrolled into its
# thread's multiply-adds.
FORWARD = {
    64: (Tiles(128, 64, 8, 3), Tiles(64, 32, 8, 2)),
    128: (Tiles(128, 64, 8, 3), Tiles(32, 32, 8, 1)),
    256: (Tiles(128, 64, 8, 2), Tiles(32, 32, 8, 2)),
}
BACKWARD = {
    64: (Tiles(64, 64, 4, 2), Tiles(32, 32, 8, 2)),
    128: (Tiles(64, 64, 8, 2), Tiles(32, 16, 8, 2)),
    256: (Tiles(64, 32, 8, 2), Tiles(16, 16, 8, 2)),
}


def choose(table: dict[int, tuple[Tiles, Tiles]], q: Any, k: Any) -> Tiles:
    """The tiles of a call: the table's, no larger than the call."""
    width = power_of_two(q.shape[3])
    tiles = table[max(width, min(table))][0 if q.dtype.itemsize == 2 else 1]
    queries, keys = min(tiles.queries, power_of_two(q.shape[1])), min(tiles.keys, power_of_two(k.shape[1]))
    # A warp without rows of its own only adds to the reductions.
    warps = tiles.warps if queries == tiles.queries else min(tiles.warps, 4)
    return tiles._replace(queries=queries, keys=keys, warps=warps)


# ------------------------------------------------------------------------------------------------ loads, stores, dots


def row_of(shape: tuple[int, ...], axis: Callable[[Any], Any] = lambda i: i, heads: int | None = None) -> pl.BlockSpec:
    """For the program (_, i, b): row b of an array [B, T, H, K] and its head `axis(i)`, as [T, padded K].

    `heads` takes that many, from the head `axis(i) * heads` on: [T, heads, padded K].
    """
    return pl.BlockSpec((None, shape[1], heads, power_of_two(shape[3])), lambda _, head, b: (b, 0, axis(head), 0))


def statistics_of(shape: tuple[int, ...], heads: int | None = None) -> pl.BlockSpec:
    """The same of an array [B, H, T], head i: [T], or [heads, T]."""
    return pl.BlockSpec((None, heads, shape[2]), lambda _, head, b: (b, head, 0))


def whole(tree: Any) -> Any:
    """Every array of a tree as it is."""
    return jax.tree_util.tree_map(lambda _: pl.BlockSpec(), tree)


def _inside(first: Any, size: int, limit: Any, columns: int, width: int) -> Any:
    """The mask of a tile [size, columns]: rows from `first` below `limit` (None: all), columns below `width`."""
    mask = None
    if limit is not None:
        rows = first + jnp.arange(size, dtype=jnp.int32) < limit
        mask = jnp.broadcast_to(rows[:, None], (size, columns))
    if columns != width:
        narrow = jnp.broadcast_to((jnp.arange(columns, dtype=jnp.int32) < width)[None, :], (size, columns))
        mask = narrow if mask is None else mask & narrow
    return mask


def load(ref: Any, first: Any, size: int, limit: Any, width: int, *head: Any) -> Any:
    """A tile [size, padded K] of [T, padded K], or of one head of [T, heads, padded K], from `first`.

    It is 0 in columns past `width` and in rows at and past `limit`, for which None promises that there are none.
    """
    mask = _inside(first, size, limit, ref.shape[-1], width)
    return pltriton.load(
        ref.at[(pl.ds(first, size), *head, slice(None))], mask=mask, other=None if mask is None else 0.0
    )


def store(ref: Any, first: Any, size: int, width: int, value: Any) -> None:
    """Writes a tile of [T, padded K] within the array's bounds, in the array's dtype."""
    mask = _inside(first, size, ref.shape[0], ref.shape[1], width)
    pltriton.store(ref.at[pl.ds(first, size), :], value.astype(ref.dtype), mask=mask)


def load_vector(ref: Any, first: Any, size: int, other: Any, *index: Any) -> Any:
    """A piece [size] of a vector, or of one vector of several; `other` past its end."""
    mask = first + jnp.arange(size, dtype=jnp.int32) < ref.shape[-1]
    return pltriton.load(ref.at[(*index, pl.ds(first, size))], mask=mask, other=other)


def store_vector(ref: Any, first: Any, value: Any) -> None:
    """Writes a piece of a vector within its bounds."""
    size = value.shape[0]
    mask = first + jnp.arange(size, dtype=jnp.int32) < ref.shape[-1]
    pltriton.store(ref.at[pl.ds(first, size)], value, mask=mask)


def dot(a: Any, b: Any, *, transposed: bool = False) -> Any:
    """The product a b, or a bᵀ, in float32: IEEE products for float32, where Triton would take TF32 by itself."""
    return pltriton.dot(a, b, trans_b=transposed, precision=lax.Precision.HIGHEST)


# ------------------------------------------------------------------------------------------------ what is seen


class Row(NamedTuple):
    """One row of the batch inside a kernel: its options as scalars, and refs of its segment ids."""

    batch: Any
    sees: Visibility  # of refs
    offset: Any
    keys: Any  # how many there are, at most S
    total_keys: int  # S

    @classmethod
    def of(cls, batch: Any, refs: Visibility, total_keys: int) -> "Row":
        """Reads the row's scalars."""
        offset = refs.offset if refs.offsets is None else refs.offsets[batch]
        keys = total_keys if refs.kv_lengths is None else jnp.clip(refs.kv_lengths[batch], 0, total_keys)
        return cls(batch, refs, offset, keys, total_keys)

    @property
    def options(self) -> dict[str, Any]:
        """The static options, as core.visibility takes them."""
        return {"causal": self.sees.causal, "window": self.sees.window}

    @property
    def is_segmented(self) -> bool:
        """Whether segment ids hide keys, so that no tile is known to be whole."""
        return self.sees.q_segment_ids is not None

    def q_segments(self, first: Any, size: int) -> Any:
        """Segment ids of a tile of queries [size]; None without."""
        ids = self.sees.q_segment_ids
        return None if ids is None else load_vector(ids, first, size, 0, self.batch)

    def kv_segments(self, first: Any, size: int) -> Any:
        """Segment ids of a tile of keys [size]; None without."""
        ids = self.sees.kv_segment_ids
        return None if ids is None else load_vector(ids, first, size, 0, self.batch)

    def mask(self, t: Any, s: Any, tiles: Tiles, q_segment: Any, kv_segment: Any, *, keys_first: bool = False) -> Any:
        """Boolean [queries, keys] of the tile from query t and key s, or transposed; None if all is seen."""
        q, k = np.s_[:, None], np.s_[None, :]
        q, k = (k, q) if keys_first else (q, k)
        whole = isinstance(self.keys, int) and self.keys % tiles.keys == 0
        return sees(
            (self.offset + t + jnp.arange(tiles.queries, dtype=jnp.int32))[q],
            (s + jnp.arange(tiles.keys, dtype=jnp.int32))[k],
            length=None if whole else self.keys,
            q_segment=None if q_segment is None else q_segment[q],
            kv_segment=None if kv_segment is None else kv_segment[k],
            **self.options,
        )


class Part(NamedTuple):
    """Tiles [start, stop) of a loop, and whether they need a mask."""

    start: Any
    stop: Any
    is_masked: bool


def key_parts(row: Row, first: Any, size: int, queries: int, block: int) -> list[Part]:
    """The tiles of keys that the queries [first, first + size) visit: left edge, middle that is whole, right edge."""
    start, stop = row.offset + first, row.offset + jnp.minimum(first + size, queries)
    some = keys_seen(start, stop, row.keys, **row.options)
    every = keys_seen_by_all(start, stop, row.keys, **row.options)
    windowed = row.sees.window is not None
    is_ragged = not isinstance(row.keys, int) or row.keys % block != 0
    return _parts(some, every, block, windowed, row.sees.causal or windowed or is_ragged, row.is_segmented)


def query_parts(row: Row, first: Any, size: int, queries: int, block: int) -> list[Part]:
    """The tiles of queries that visit the keys [first, first + size), in the same three parts."""
    last = jnp.minimum(first + size, row.keys)
    # A tile of keys past the row's length is seen by no query.
    some_keys = 1 if isinstance(row.keys, int) else jnp.clip(last - first, 0, 1)
    low, high = row.offset, row.offset + queries * some_keys
    some = queries_seeing(first, last, low, high, **row.options)
    every = queries_seeing_all(first, last, low, high, **row.options)
    some, every = (tuple(position - row.offset for position in pair) for pair in (some, every))
    windowed = row.sees.window is not None
    return _parts(some, every, block, row.sees.causal or windowed, windowed or queries % block != 0, row.is_segmented)


def _parts(some: Any, every: Any, block: int, has_left: bool, has_right: bool, is_segmented: bool) -> list[Part]:
    a, d = quotient(some[0], block), ceil_div(some[1], block)
    if is_segmented:
        return [Part(a, d, True)]
    b = _between(a, ceil_div(every[0], block), d) if has_left else a
    c = _between(b, quotient(every[1], block), d) if has_right else d
    return [*[Part(a, b, True)] * has_left, Part(b, c, False), *[Part(c, d, True)] * has_right]


def _between(low: Any, x: Any, high: Any) -> Any:
    return least(most(x, low), high)


def key_head(head: Any, repeats: int) -> Any:
    """The key head that a query head reads."""
    return quotient(head, repeats)


def run(parts: list[Part], step: Callable[[bool, Any, Any], Any], carry: Any) -> Any:
    """`carry = step(is_masked, tile, carry)` over all tiles of all parts."""
    for part in parts:
        carry = lax.fori_loop(part.start, part.stop, functools.partial(step, part.is_masked), carry)
    return carry
