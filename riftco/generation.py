"""Generation: sessions over a cache, and token streams drawn from them.

Past the context: with rotary positions the cache forgets its oldest position for each new one (the window slides, at
most `context` tokens are seen). With learned positions there is no position past the table, so the newest half of the
context is run again from position 0 and generation goes on from there.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco import sampling
from riftco.errors import ConfigError, DTypeError, IndexRangeError, ShapeError
from riftco.models.adapters import Adapters
from riftco.models.config import DecoderConfig
from riftco.models.decoding import contiguous_cache, decode_step, decoding_params, paged_cache, prefill
from riftco.models.rotary_tables import rope_tables
from riftco.tokenizers.stream import StopFilter
from riftco.types import Array, PyTree

_SMALLEST_PREFILL = 16
_LONGEST_REST = 32  # tokens that are run one at a time rather than with all that stands before them


def _token_id(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DTypeError(f"generate: token ids must be integers; got {value!r}.") from None


class Session:
    """One sequence being decoded: its params, its cache, and how far it has come.

    A call that raises leaves the session as it was. Not safe for use by two threads at a time.

    Args:
        params: as `riftco.models.init` makes them, or packed (`riftco.tune.quantize`): they stay packed.
        config: their configuration.
        cache: "contiguous", or "paged" (keys and values in pages behind a table); the logits are equal.
        page_size: positions in a page.
        dtype: compute dtype; None for the params' own.
        adapters: low-rank adapters beside the linear layers (`riftco.tune.lora_init`), or None.
    """

    def __init__(
        self,
        params: PyTree,
        config: DecoderConfig,
        *,
        cache: str = "contiguous",
        page_size: int = 16,
        dtype: Any = None,
        adapters: Adapters | None = None,
    ) -> None:
        if cache not in ("contiguous", "paged"):
            raise ConfigError(f"Session: cache must be 'contiguous' or 'paged'; got {cache!r}.")
        if page_size < 1:
            raise ConfigError(f"Session: page_size must be at least 1; got {page_size}.")
        self._params, self.config = decoding_params(params, config, dtype, adapters), config
        self._kind, self._page_size = cache, page_size
        self._dtype = self._params.rest["token_embedding"]["weight"].dtype
        self.reset()

    def reset(self) -> None:
        """Forget everything decoded so far."""
        self._position = 0
        self._recent: list[int] = []
        self._cache: Any = None

    @property
    def size(self) -> int:
        """How many tokens the next one will see, at most `capacity`."""
        return len(self._recent)

    @property
    def capacity(self) -> int:
        """The context: how many tokens can be seen at once."""
        return self.config.context

    def prefill(self, ids: Sequence[int]) -> Array:
        """Run a prompt, in one call.

        Args:
            ids: 1 .. capacity token ids.

        Returns:
            Logits [V] of the token that follows.

        Raises:
            ConfigError: if the session is not empty. ShapeError: for an empty prompt or one longer than the context.
            IndexRangeError: for an id outside the vocabulary.
        """
        if self._position:
            raise ConfigError("Session.prefill: the session must be empty; call reset() first, or step() to go on.")
        ids = [_token_id(i) for i in ids]
        if not 1 <= len(ids) <= self.capacity:
            raise ShapeError(
                f"prefill: the prompt must have 1 to {self.capacity} tokens, the model's context; got {len(ids)}. "
                "Shorten the prompt."
            )
        self._check(ids)
        logits = self._run_prompt(ids)
        self._position, self._recent = len(ids), ids
        return logits

    def resume(self, ids: Sequence[int]) -> Array:
        """Run a prompt that may begin with what the session holds, as the next turn of a conversation does.

        A short rest is run a token at a time after what is there; otherwise the whole prompt is run anew. Both give the
        logits of `prefill`, up to rounding.

        Args:
            ids: 1 .. capacity token ids.

        Returns:
            Logits [V] of the token that follows.

        Raises:
            ShapeError, IndexRangeError: as `prefill`.
        """
        ids = [_token_id(i) for i in ids]
        held = self._recent if self._position == len(self._recent) else []
        rest = ids[len(held) :]
        if held and 0 < len(rest) <= _LONGEST_REST and len(ids) <= self.capacity and ids[: len(held)] == held:
            self._check(rest)
            return [self.step(token) for token in rest][-1]
        before = self._position, self._recent, self._cache
        self.reset()
        try:
            return self.prefill(ids)
        except Exception:
            self._position, self._recent, self._cache = before
            raise

    def step(self, token: int) -> Array:
        """Run one more token.

        Args:
            token: its id.

        Returns:
            Logits [V] of the token that follows.

        Raises:
            IndexRangeError: for an id outside the vocabulary.
        """
        token = _token_id(token)
        self._check([token])
        if self._position == 0:
            return self.prefill([token])
        if self.config.position == "learned" and self._position == self.capacity:
            kept = [*self._recent, token][-max(1, self.capacity // 2) :]
            logits = self._run_prompt(kept)
            self._position, self._recent = len(kept), kept
            return logits
        rope = None
        if self.config.position == "rope":
            rope = rope_tables(self.config, np.array([self._position]), self._dtype)
        # The donated cache is gone once the call is made; ids were checked before, so it does not fail half-way.
        logits, self._cache = decode_step(
            self._params, self._cache, jnp.asarray([token], jnp.int32), jnp.int32(self._position), rope, self.config
        )
        self._position += 1
        self._recent = [*self._recent, token][-self.capacity :]
        return logits[0]

    def _check(self, ids: list[int]) -> None:
        for i in ids:
            if not 0 <= i < self.config.vocab_size:
                raise IndexRangeError(f"Session: token ids must be in [0, {self.config.vocab_size}); got {i}.")

    def _empty_cache(self) -> Any:
        if self._kind == "paged":
            return paged_cache(self.config, 1, self.capacity, self._page_size, self._dtype)
        return contiguous_cache(self.config, 1, self.capacity, self._dtype)

    def _run_prompt(self, ids: list[int]) -> Array:
        # Prompts are padded to a few lengths, so that few programs are compiled.
        length = min(self.capacity, max(_SMALLEST_PREFILL, 1 << (len(ids) - 1).bit_length()))
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(ids)] = ids
        logits, self._cache = prefill(
            self._params, self._empty_cache(), jnp.asarray(tokens), jnp.int32(len(ids)), self.config
        )
        return logits[0]


def stream(
    session: Session,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> Iterator[int]:
    """Token ids as they are drawn; see `generate` for the arguments.

    Args:
        session: what it holds already of the prompt is not run again (`Session.resume`).
        prompt_ids: the prompt.
        max_tokens: how many ids are drawn at most.
        temperature: 0 is greedy.
        top_k: see `riftco.sampling.sample`.
        top_p: see `riftco.sampling.sample`.
        min_p: see `riftco.sampling.sample`.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen already; 1 is off.
        seed: the draw at position p depends on (seed, p) alone.
        stop_ids: an id that ends the stream; it is not yielded.
    """
    if max_tokens < 0:
        raise ConfigError(f"generate: max_tokens must not be negative; got {max_tokens}.")
    stop, history = {_token_id(i) for i in stop_ids}, [_token_id(i) for i in prompt_ids]
    if max_tokens == 0:
        return
    logits = session.resume(history)
    for count in range(max_tokens):
        row = logits[None]
        if repetition_penalty != 1.0:
            counts = jnp.asarray(np.bincount(history, minlength=session.config.vocab_size)[None], jnp.int32)
            row = sampling.apply_penalties(row, counts, jnp.zeros_like(counts), repetition=repetition_penalty)
        ids = sampling.sample(
            row,
            jnp.asarray([seed & 0xFFFFFFFF], jnp.uint32),
            jnp.asarray([len(history)], jnp.int32),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        token = int(ids[0])
        if token in stop:
            return
        yield token
        history.append(token)
        if count + 1 < max_tokens:
            logits = session.step(token)


def generate(
    params: PyTree,
    config: DecoderConfig,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    adapters: Adapters | None = None,
) -> list[int]:
    """Continue a prompt.

    Args:
        params: as `riftco.models.init` makes them, or packed (`riftco.tune.quantize`).
        config: their configuration.
        prompt_ids: 1 .. context token ids.
        max_tokens: how many ids are drawn at most.
        temperature: 0 takes the most likely token, the lowest id among equals.
        top_k: keep the k most likely tokens; off if <= 0 or >= V.
        top_p: keep the fewest most likely tokens whose probabilities reach p; 1 is off.
        min_p: drop tokens below p times the largest probability; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen already; 1 is off.
        seed: equal seeds give equal ids; the draw at position p depends on (seed, p) alone.
        stop_ids: ids that end the text; they are not returned.
        adapters: low-rank adapters beside the linear layers (`riftco.tune.lora_init`), or None.

    Returns:
        The new ids alone. Shorter than `max_tokens` only if a stop id was drawn.

    Raises:
        ShapeError: for an empty prompt or one longer than the context. IndexRangeError: for an id out of range.
        ConfigError, DomainError: for an option out of range.
    """
    return list(
        stream(
            Session(params, config, adapters=adapters),
            prompt_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop_ids=stop_ids,
        )
    )


def stream_text(pieces: Iterator[str], stop: Sequence[str]) -> Iterator[str]:
    """Text pieces up to the first stop string, never emitting part of one.

    Args:
        pieces: decoded text as it comes.
        stop: strings that end the text; they are not emitted.

    Raises:
        ConfigError: for an empty stop string.
    """
    if any(not s for s in stop):
        raise ConfigError("generate: a stop string must not be empty.")
    waiting = StopFilter(stop)
    for piece in pieces:
        ready = waiting.push(piece)
        if ready:
            yield ready
        if waiting.found:
            return
    if rest := waiting.flush():
        yield rest
