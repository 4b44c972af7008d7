"""The two compiled calls from which every number comes: a chunk of one prompt, and one token of each row.

Settings of rows are arrays, so that new settings compile nothing. They travel in two arrays a call, and the answers
come back in one. The order of sampling is that of `riftco.sampling`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from riftco import sampling
from riftco.models.config import DecoderConfig
from riftco.models.decoding import DecodingParams, logits_of
from riftco.models.paged_decoding import Pools, copy_page, run_rows
from riftco.models.stacked_adapters import choose_adapters
from riftco.types import Array

MOST_ALTERNATIVES = 20

# Columns of a decode call's settings; the row's table follows the integers.
INTEGERS = ("token", "position", "length", "adapter", "seed", "choice", "top_k", "wants_logprobs", "prompt_length")
NUMBERS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
IDLE = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
"""The numbers of a row that nobody uses."""
# Entries of a prefill call's header.
HEADER = ("start", "low", "length", "adapter", "wants_logprobs")


class Weights(NamedTuple):
    """What both calls read and neither changes."""

    params: DecodingParams
    rope: tuple[Array, Array] | None


def alternatives(config: DecoderConfig) -> int:
    """How many most likely tokens come back where log-probabilities are wanted."""
    return min(MOST_ALTERNATIVES, config.vocab_size)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("pools",))
def prefill(
    weights: Weights, pools: Pools, header: Array, tokens: Array, table: Array, config: DecoderConfig
) -> tuple[Array, Pools]:
    """Run one chunk of a prompt.

    Args:
        weights: the model's.
        pools: donated.
        header: int32 [5], see `HEADER`: the chunk's first position, the first position that is written, the number of
            positions that are the prompt's, the adapter, whether log-probabilities are wanted.
        tokens: int32 [2, C]: the chunk's tokens, and those that follow each.
        table: int32 [M], the request's pages.
        config: the configuration.

    Returns:
        Log-probabilities of the tokens that follow, as `_packed` [C, 2 + 2 A] (zeros where not wanted), and the pools.
    """
    start, low, length, adapter, wants = (header[i] for i in range(len(HEADER)))
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    written = (positions >= low) & (positions < length)
    x, pools = run_rows(
        choose_adapters(weights.params, adapter[None]),
        pools,
        weights.rope,
        tokens[:1],
        jnp.minimum(positions, config.context - 1)[None],
        written[None],
        jnp.minimum(start + tokens.shape[1], length)[None],
        table[None],
        config,
    )
    params = choose_adapters(weights.params, adapter[None])
    scores = lax.cond(
        wants > 0,
        lambda: _packed(tokens[1], *_logprobs(logits_of(params, x, config)[0], tokens[1])),
        lambda: jnp.zeros((tokens.shape[1], 2 + 2 * alternatives(config)), jnp.int32),
    )
    return scores, pools


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("pools",))
def decode(
    weights: Weights,
    pools: Pools,
    integers: Array,
    numbers: Array,
    bias: Array,
    history: Array,
    config: DecoderConfig,
) -> tuple[Array, Pools]:
    """Run one token of each row and draw the next.

    Args:
        weights: the model's.
        pools: donated.
        integers: int32 [S, 9 + M], see `INTEGERS`, and each row's pages; a length of 0 is a row that nobody uses.
        numbers: float32 [S, 6], see `NUMBERS`.
        bias: float32 [S, V], added after the penalties.
        history: int32 [S, W], the tokens of each row, prompt first, the one that is run included; read only where a
            row has penalties.
        config: the configuration.

    Returns:
        int32 [S, 2 + 2 A], see `unpack`, and the pools. A row that cannot be drawn from has id −1.
    """
    column = {name: integers[:, i] for i, name in enumerate(INTEGERS)}
    number = {name: numbers[:, i] for i, name in enumerate(NUMBERS)}
    position, length = column["position"], column["length"]
    params = choose_adapters(weights.params, column["adapter"])
    x, pools = run_rows(
        params,
        pools,
        weights.rope,
        column["token"][:, None],
        position[:, None],
        (length > 0)[:, None],
        length,
        integers[:, len(INTEGERS) :],
        config,
    )
    raw = logits_of(params, x, config)[:, 0].astype(jnp.float32)
    logits = _penalised(raw, history, column, number) + bias
    ids = sampling.sample(
        logits,
        lax.bitcast_convert_type(column["seed"], jnp.uint32),
        position + 1,
        temperature=number["temperature"],
        top_k=column["top_k"],
        top_p=number["top_p"],
        min_p=number["min_p"],
        choices=column["choice"],
    )
    count = alternatives(config)
    scores = lax.cond(
        jnp.any(column["wants_logprobs"] > 0),
        lambda: _logprobs(raw, jnp.maximum(ids, 0)),
        lambda: (
            jnp.zeros(ids.shape, jnp.float32),
            jnp.zeros((*ids.shape, count), jnp.int32),
            jnp.zeros((*ids.shape, count), jnp.float32),
        ),
    )
    return _packed(ids, *scores), pools


copy = jax.jit(copy_page, static_argnames=("config",), donate_argnames=("pools",))
"""`copy_page`, which makes no number: a shared page is copied before it is written to."""


def _penalised(logits: Array, history: Array, column: dict[str, Array], number: dict[str, Array]) -> Array:
    def penalise() -> Array:
        vocabulary = logits.shape[-1]
        prompt = sampling.count_tokens(history, vocabulary, lengths=column["prompt_length"])
        everything = sampling.count_tokens(history, vocabulary, lengths=column["length"])
        penalties = {name: number[name] for name in ("repetition", "presence", "frequency")}
        return sampling.apply_penalties(logits, prompt, everything - prompt, **penalties)

    is_on = (number["repetition"] != 1) | (number["presence"] != 0) | (number["frequency"] != 0)
    return lax.cond(jnp.any(is_on), penalise, lambda: logits)


def _logprobs(logits: Array, ids: Array) -> tuple[Array, Array, Array]:
    """The model's own log-probabilities, before penalties and temperature: of ids [B], and of the most likely."""
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, ids[:, None], axis=-1) - total
    top, top_ids = lax.top_k(logits, min(MOST_ALTERNATIVES, logits.shape[-1]))
    return own[:, 0], top_ids.astype(jnp.int32), top - jnp.broadcast_to(total, top.shape)


def _packed(ids: Array, own: Array, top_ids: Array, top: Array) -> Array:
    """All that is read back, in one array: [B, 2 + 2 A]."""
    bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return jnp.concatenate([ids[:, None], bits(own)[:, None], top_ids, bits(top)], axis=1)


class Drawn(NamedTuple):
    """What `unpack` finds: ids [B], their log-probabilities [B], the most likely ids and theirs [B, A]."""

    ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def unpack(packed: Any) -> Drawn:
    """The parts of what a call returned, on the host."""
    packed = np.asarray(packed)
    count = (packed.shape[1] - 2) // 2
    logprobs, top = packed[:, 1:2].view(np.float32), np.ascontiguousarray(packed[:, 2 + count :]).view(np.float32)
    return Drawn(packed[:, 0], logprobs[:, 0], packed[:, 2 : 2 + count], top)
