"""The model side of serving: a chunk of one prompt, and one token of several rows, over pools of pages.

Rows share the pools; a table says which pages are whose. In each layer new keys and values are written first and then
read back in fixed blocks of pages with an online softmax, up to the last block that any row needs. A block in which a
row sees nothing leaves that row's numbers as they were, bit for bit: so its bits do not depend on how long the others
are. Slots that nobody wrote may hold anything, NaN included.

Nothing is compiled here; `riftco.serve` does that, once for each of the two.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from riftco.models.config import DecoderConfig
from riftco.models.decoder import embed
from riftco.models.decoding import DecodingParams, block
from riftco.models.rotary_tables import rope_tables
from riftco.ops.norm import statistics_dtype
from riftco.types import Array

_KEYS_AT_A_TIME = 128


class Pools(NamedTuple):
    """Keys and values of all layers: [G, L P, N, K] each; page p of layer l is at l P + p."""

    keys: Array
    values: Array


def empty_pools(config: DecoderConfig, pages: int, page_size: int, dtype: Any) -> Pools:
    """Pools of zeros."""
    shape = (config.kv_heads, config.layers * pages, page_size, config.head_dim)
    return Pools(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def pages_per_block(page_size: int) -> int:
    """How many pages are read at a time; a table has a multiple of it."""
    return max(1, _KEYS_AT_A_TIME // page_size)


def table_width(config: DecoderConfig, page_size: int) -> int:
    """M, the entries of a row's table: enough for the context, in whole blocks."""
    at_a_time = pages_per_block(page_size)
    return -(-config.context // (page_size * at_a_time)) * at_a_time


def position_tables(config: DecoderConfig, dtype: Any) -> tuple[Array, Array] | None:
    """Cosines and sines of every position, [C, K/2] each, or None for learned positions."""
    return rope_tables(config, np.arange(config.context), dtype) if config.position == "rope" else None


def copy_page(pools: Pools, source: Array, target: Array, config: DecoderConfig) -> Pools:
    """With a page's contents, in all layers, copied to another page."""

    def copy(pool: Array) -> Array:
        by_layer = jnp.reshape(pool, (pool.shape[0], config.layers, -1, *pool.shape[2:]))
        page = lax.dynamic_slice_in_dim(by_layer, source, 1, axis=2)
        return jnp.reshape(lax.dynamic_update_slice_in_dim(by_layer, page, target, axis=2), pool.shape)

    return Pools(copy(pools.keys), copy(pools.values))


def run_rows(
    params: DecodingParams,
    pools: Pools,
    rope: tuple[Array, Array] | None,
    tokens: Array,
    positions: Array,
    written: Array,
    lengths: Array,
    table: Array,
    config: DecoderConfig,
) -> tuple[Array, Pools]:
    """Run new tokens of several rows through all layers.

    Args:
        params: from `riftco.models.decoding.decoding_params`.
        pools: hold the rows' earlier positions.
        rope: from `position_tables`.
        tokens: int32 [B, T].
        positions: int32 [B, T], below the context.
        written: bool [B, T]: which of the tokens' keys and values are written. One that is not is in its page already,
            or is padding, whose result means nothing.
        lengths: int32 [B], how many positions of the row are in its pages once these are written; 0 for no row.
        table: int32 [B, M], the pages of each row; entries past its length may be any page.
        config: the configuration.

    Returns:
        What the last layer gives, [B, T, D], before the final norm, and the pools.
    """
    size, per_layer = pools.keys.shape[2], pools.keys.shape[1] // config.layers
    page = jnp.take_along_axis(table, positions // size, axis=1)
    angles = None if rope is None else tuple(table[positions] for table in rope)
    reach = _reach(positions, lengths, pages_per_block(size) * size, config.sliding_window)
    x = embed(params.rest, tokens, config, positions, None)
    for i, layer in enumerate(params.blocks):
        first = i * per_layer
        # A place outside the pool is dropped.
        place = jnp.where(written, page + first, pools.keys.shape[1]), positions % size

        def attend(q: Array, k: Array, v: Array, first: int = first, place: Any = place) -> Array:
            nonlocal pools
            pools = Pools(_write(pools.keys, place, k), _write(pools.values, place, v))
            return _attend(q, pools, table + first, positions, lengths, reach, config.sliding_window)

        x = block(config, layer, x, angles, attend)
    return x, pools


def _write(pool: Array, place: tuple[Array, Array], new: Array) -> Array:
    """With new [B, T, G, K] at (page, slot) [B, T]."""
    return pool.at[:, place[0], place[1]].set(jnp.moveaxis(new, 2, 0), mode="drop")


def _reach(positions: Array, lengths: Array, keys: int, window: int | None) -> tuple[Array, Array]:
    """The blocks [first, last) of keys that some row sees."""
    last = (jnp.max(lengths) + (keys - 1)) // keys
    if window is None:
        return jnp.zeros_like(last), last
    seen = jnp.where(lengths > 0, jnp.maximum(jnp.min(positions, axis=1) - (window - 1), 0), np.int32(2**31 - 1))
    return jnp.minimum(jnp.min(seen) // keys, last), last


def _attend(
    q: Array, pools: Pools, table: Array, positions: Array, lengths: Array, reach: Any, window: int | None
) -> Array:
    """Queries [B, T, H, K] over the pages of their rows: [B, T, H, K]."""
    batch, queries, heads, width = q.shape
    groups, per_head, size, _ = pools.keys.shape
    at_a_time, repeats, dtype = pages_per_block(size), heads // groups, statistics_dtype(q)
    keys, head_starts = at_a_time * size, jnp.arange(groups, dtype=jnp.int32) * per_head
    # Query heads of one key head, and its queries, are the rows of one product.
    rows = jnp.transpose(jnp.reshape(q, (batch, queries, groups, repeats, width)), (2, 0, 3, 1, 4))
    rows = jnp.reshape(rows, (groups, batch, repeats * queries, width))
    lowest = jnp.asarray(jnp.finfo(dtype).min, dtype)  # not −inf, whose difference with itself is NaN

    def step(i: Array, carry: Any) -> Any:
        maximum, total, out = carry
        pages = lax.dynamic_slice_in_dim(table, i * at_a_time, at_a_time, axis=1)
        # Heads and pages as one axis: what is gathered then lies as the products read it.
        pages = jax.vmap(lambda start, pages=pages: start + pages)(head_starts)

        def read(pool: Array) -> Array:
            found = jnp.reshape(pool, (-1, size, width)).at[pages].get(mode="promise_in_bounds")  # [G, B, pages, N, K]
            return jnp.reshape(found, (groups, batch, keys, width))

        k, v = read(pools.keys), read(pools.values)
        slot = i * keys + jnp.arange(keys, dtype=jnp.int32)
        is_there = slot[None, :] < lengths[:, None]  # [B, S]
        distance = positions[:, :, None] - slot[None, None, :]
        visible = (distance >= 0) & is_there[:, None, :]
        if window is not None:
            visible = visible & (distance < window)
        visible = jnp.broadcast_to(visible[None, :, None], (groups, batch, repeats, queries, keys))
        scores = jnp.einsum("gbqk,gbsk->gbqs", rows, k, preferred_element_type=dtype) * (width**-0.5)
        scores = jnp.where(jnp.reshape(visible, scores.shape), scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
        kept = jnp.exp(maximum - new_maximum)
        weights = jnp.exp(scores - new_maximum)
        # A slot that nobody wrote may hold NaN, and 0 times NaN is NaN.
        v = jnp.where(is_there[None, :, :, None], v, jnp.zeros((), v.dtype))
        added = jnp.einsum("gbqs,gbsk->gbqk", weights.astype(q.dtype), v, preferred_element_type=dtype)
        total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
        return new_maximum, total, out * kept + added

    shape = (groups, batch, repeats * queries)
    start = jnp.full((*shape, 1), lowest), jnp.zeros((*shape, 1), dtype), jnp.zeros((*shape, width), dtype)
    _, total, out = lax.fori_loop(reach[0], reach[1], step, start)
    out = (out / jnp.where(total == 0, jnp.ones_like(total), total)).astype(q.dtype)
    out = jnp.transpose(jnp.reshape(out, (groups, batch, repeats, queries, width)), (1, 3, 0, 2, 4))
    return jnp.reshape(out, (batch, queries, heads, width))
