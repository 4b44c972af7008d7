"""Incremental decoding: the whole prompt in one call, then one token a call, over cached keys and values.

Layers are laid out one after another, each with its own arrays: a scan over stacked weights would copy each layer's
weights for every token. Inference only; nothing here is recorded.

A cache has a number of slots, of which the first `context` are used: whole pages may hold more. Position p is written
to slot p mod context, so that a model with rotary positions goes on past its context by forgetting the oldest position
(rotary scores depend on distances alone).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from riftco import layers, ops
from riftco.models.adapters import Adapters, attach
from riftco.models.config import DecoderConfig
from riftco.models.decoder import cast, embed, head
from riftco.models.packed import held_back
from riftco.models.rotary_tables import rope_tables
from riftco.ops.norm import statistics_dtype
from riftco.types import Array, PyTree


class DecodingParams(NamedTuple):
    """The params with each layer's arrays cut out of the stack, in the compute dtype."""

    blocks: tuple[PyTree, ...]
    rest: PyTree  # embeddings, final norm, head


def decoding_params(
    params: PyTree, config: DecoderConfig, dtype: Any = None, adapters: Adapters | None = None
) -> DecodingParams:
    """Cut the stacked params once, so that no decoding step has to.

    Args:
        params: as `riftco.models.init` makes them, or packed (`riftco.tune.quantize`): they stay packed.
        config: their configuration.
        dtype: compute dtype; None for the params' own.
        adapters: low-rank adapters beside the linear layers, or None.
    """
    params = cast(attach(params, adapters, config), None if dtype is None else jnp.dtype(dtype))
    blocks = tuple(
        jax.tree_util.tree_map(lambda leaf, i=i: jnp.asarray(leaf)[i], params["blocks"]) for i in range(config.layers)
    )
    return DecodingParams(blocks, {name: value for name, value in params.items() if name != "blocks"})


class ContiguousCache(NamedTuple):
    """Keys and values of every layer, one row of slots for each sequence: [B, G, S, K]."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def slots(self) -> int:
        """S."""
        return self.keys[0].shape[2]

    def write(self, layer: int, k: Array, v: Array, slot: Any) -> "ContiguousCache":
        """With k and v [B, G, t, K] at the slots [slot, slot + t) of a layer."""
        place = functools.partial(lax.dynamic_update_slice_in_dim, start_index=slot, axis=2)
        return ContiguousCache(
            _replaced(self.keys, layer, place(self.keys[layer], k)),
            _replaced(self.values, layer, place(self.values[layer], v)),
        )

    def read(self, layer: int, slots: int) -> tuple[Array, Array]:
        """Keys and values of a layer's first slots, [B, G, slots, K]."""
        return self.keys[layer][:, :, :slots], self.values[layer][:, :, :slots]


class PagedCache(NamedTuple):
    """Keys and values in pages: pools [G, P, N, K] and, for each sequence, the physical page of each logical one."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    table: Array  # int32 [B, S / N]

    @property
    def slots(self) -> int:
        """S."""
        return self.table.shape[1] * self.keys[0].shape[2]

    def write(self, layer: int, k: Array, v: Array, slot: Any) -> "PagedCache":
        """With k and v [B, G, t, K] at the slots [slot, slot + t) of a layer."""
        size = self.keys[layer].shape[2]
        slots = slot + jnp.arange(k.shape[2])
        page, offset = self.table[:, slots // size], jnp.broadcast_to(slots % size, (k.shape[0], k.shape[2]))

        def place(pool: Array, new: Array) -> Array:
            return pool.at[:, page, offset].set(jnp.moveaxis(new, 1, 0))  # [G, B, t, K]

        return PagedCache(
            _replaced(self.keys, layer, place(self.keys[layer], k)),
            _replaced(self.values, layer, place(self.values[layer], v)),
            self.table,
        )

    def read(self, layer: int, slots: int) -> tuple[Array, Array]:
        """Keys and values of a layer's first slots, [B, G, slots, K], gathered from their pages."""

        def gather(pool: Array) -> Array:
            pages = pool[:, self.table]  # [G, B, S / N, N, K]
            return jnp.moveaxis(jnp.reshape(pages, (*pages.shape[:2], -1, pages.shape[-1])), 1, 0)[:, :, :slots]

        return gather(self.keys[layer]), gather(self.values[layer])


Cache = ContiguousCache | PagedCache


def _replaced(arrays: tuple[Array, ...], index: int, new: Array) -> tuple[Array, ...]:
    return (*arrays[:index], new, *arrays[index + 1 :])


def contiguous_cache(config: DecoderConfig, batch: int, slots: int, dtype: Any) -> ContiguousCache:
    """An empty contiguous cache."""
    shape = (batch, config.kv_heads, slots, config.head_dim)
    make = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))
    return ContiguousCache(make(), make())


def paged_cache(config: DecoderConfig, batch: int, slots: int, page_size: int, dtype: Any) -> PagedCache:
    """An empty paged cache whose table hands out the pages from the last to the first."""
    pages = -(-slots // page_size)
    shape = (config.kv_heads, batch * pages, page_size, config.head_dim)
    make = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))
    table = np.arange(batch * pages, dtype=np.int32)[::-1].reshape(batch, pages)
    return PagedCache(make(), make(), jnp.asarray(table.copy()))


def block(config: DecoderConfig, params: PyTree, x: Array, rope: Any, attend: Any) -> Array:
    """Carry x [B, T, D] through one layer, of which `params` are; rope and attend as in `riftco.layers.attention`."""
    params = held_back(params, x)
    normed = layers.norm(params["attention_norm"], x, eps=config.norm_eps)
    x = x + layers.attention(
        params["attention"], normed, head_dim=config.head_dim, eps=config.norm_eps, rope=rope, attend=attend
    )
    normed = layers.norm(params["feed_forward_norm"], x, eps=config.norm_eps)
    return x + layers.feed_forward(params["feed_forward"], normed, mlp=config.mlp)


def logits_of(params: DecodingParams, x: Array, config: DecoderConfig) -> Array:
    """Final norm and head: [B, T, D] to [B, T, V]."""
    x = layers.norm(params.rest["final_norm"], x, eps=config.norm_eps)
    return layers.linear(head(held_back(params.rest, x), config, None), x)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def prefill(
    params: DecodingParams, cache: Cache, tokens: Array, length: Array, config: DecoderConfig
) -> tuple[Array, Cache]:
    """Run a whole prompt through an empty cache.

    Args:
        params: from `decoding_params`.
        cache: empty; donated.
        tokens: int32 [B, T], the prompt padded on the right with any valid id; T at most the cache's slots.
        length: int32 scalar, how many of the T are the prompt.
        config: the configuration.

    Returns:
        Logits after the prompt's last token [B, V], and the cache. What the padding wrote lies past the length and is
        written over before it can be seen.
    """
    rope = None
    if config.position == "rope":
        rope = rope_tables(config, np.arange(tokens.shape[1]), params.rest["token_embedding"]["weight"].dtype)
    x = embed(params.rest, tokens, config, None, None)
    for i, layer in enumerate(params.blocks):

        def attend(q: Array, k: Array, v: Array, i: int = i) -> Array:
            nonlocal cache
            cache = cache.write(i, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), 0)
            return ops.attention(q, k, v, window=config.sliding_window)

        x = block(config, layer, x, rope, attend)
    last = lax.dynamic_slice_in_dim(x, length - 1, 1, axis=1)
    return logits_of(params, last, config)[:, 0], cache


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def decode_step(
    params: DecodingParams, cache: Cache, token: Array, position: Array, rope: Any, config: DecoderConfig
) -> tuple[Array, Cache]:
    """Run one token.

    Args:
        params: from `decoding_params`.
        cache: holds the positions before; donated.
        token: int32 [B].
        position: int32 scalar, the token's position counted from the first token of all.
        rope: cosines and sines [1, K/2] of that position (`riftco.models.rotary_tables.rope_tables`), or None.
        config: the configuration.

    Returns:
        Logits [B, V], and the cache.
    """
    slots = min(cache.slots, config.context)
    slot = position % slots
    # How long ago each slot was written, in positions; a slot not written yet would be from before the start.
    age = (position - jnp.arange(slots)) % slots
    visible = age <= position
    if config.sliding_window is not None:
        visible = visible & (age < config.sliding_window)
    x = embed(params.rest, token[:, None], config, jnp.broadcast_to(position, (token.shape[0], 1)), None)
    for i, layer in enumerate(params.blocks):

        def attend(q: Array, k: Array, v: Array, i: int = i) -> Array:
            nonlocal cache
            cache = cache.write(i, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), slot)
            return _attend_cached(q, *cache.read(i, slots), visible)

        x = block(config, layer, x, rope, attend)
    return logits_of(params, x, config)[:, 0], cache


def _attend_cached(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """One query [B, 1, H, K] over keys and values [B, G, S, K]; `visible` [S]."""
    batch, _, heads, width = q.shape
    groups = k.shape[1]
    rows = jnp.reshape(q, (batch, groups, heads // groups, width))
    scores = jnp.einsum("bgrk,bgsk->bgrs", rows, k, preferred_element_type=statistics_dtype(q)) * (width**-0.5)
    scores = jnp.where(visible[None, None, None, :], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    # A slot that is not visible may hold anything: 0 times NaN would be NaN.
    v = jnp.where(visible[None, None, :, None], v, jnp.zeros((), v.dtype))
    return jnp.reshape(jnp.einsum("bgrs,bgsk->bgrk", weights, v), (batch, 1, heads, width))
