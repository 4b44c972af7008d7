"""What the tests of serving share: small models, engines of one shape, and the reference that serves one at a time.

All engines here have the same number of rows and pages, so that each model is compiled once for all tests.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco import models, sampling, tune
from riftco.models import DecoderConfig
from riftco.models.decoding import decoding_params
from riftco.models.stacked_adapters import attach_stacked
from riftco.serve import Completion, Engine, Request
from riftco.serve.calls import Calls, scored
from riftco.serve.scheduler import Chunk, Row
from riftco.serve.sequence import Sequence, text_of
from riftco.tokenizers import ByteTokenizer

ROWS, PAGES, SIZE, CHUNK = 4, 24, 4, 8
TOKENIZER = ByteTokenizer.train("abcdefghijklmnopqrstuvwxyz .,\né€😀")
CONFIG = DecoderConfig(TOKENIZER.vocab_size, 64, 32, 4, 2, 48, kv_heads=2, norm="rms", mlp="swiglu", position="rope")


@functools.cache
def params_of(config: DecoderConfig = CONFIG) -> Any:
    """Random params whose logits spread enough that the likeliest token is seldom in doubt."""
    params = models.init(jax.random.key(3), config)
    return jax.tree_util.tree_map(lambda leaf: leaf * (3.0 if leaf.ndim > 1 else 1.0), params)


@functools.cache
def adapters() -> dict[str, Any]:
    """Two adapters of different ranks and targets, neither of them the identity."""
    made = {}
    for i, (name, targets, rank) in enumerate((("first", ["attention"], 2), ("second", ["query", "down"], 3))):
        fresh = tune.lora_init(jax.random.key(i), params_of(), CONFIG, targets=targets, rank=rank, alpha=4.0)
        made[name] = jax.tree_util.tree_map(
            lambda leaf, i=i: leaf + 0.2 * jax.random.normal(jax.random.key(i + 9), leaf.shape), fresh
        )
    return made


def engine(**options: Any) -> Engine:
    """An engine of the shape that is compiled already."""
    given = {"max_num_seqs": ROWS, "num_pages": PAGES, "page_size": SIZE, "prefill_chunk": CHUNK, **options}
    return Engine(params_of(), CONFIG, TOKENIZER, adapters=adapters(), **given)


class ReferenceEngine:
    """Serves each request alone, by the same compiled calls, from a private contiguous cache: page i is its i-th.

    Nothing is shared, cached, preempted or guessed, and nothing is scheduled: this is a loop.
    """

    def __init__(self, params: Any = None, config: DecoderConfig = CONFIG, *, slot: int = 0) -> None:
        given = adapters() if params is None else {}
        stacked = attach_stacked(params_of(config) if params is None else params, given, config)
        self._numbers = {None: 0, **{name: i + 1 for i, name in enumerate(given)}}
        self._params, self._config, self._slot = decoding_params(stacked, config), config, slot

    def generate(self, requests: list[Request]) -> list[Completion]:
        """The completions, in order."""
        return [self._serve(request, choice) for request in requests for choice in range(request.n)]

    def _serve(self, request: Request, choice: int) -> Completion:
        calls = Calls(self._params, self._config, rows=ROWS, pages=PAGES, page_size=SIZE, chunk=CHUNK)
        prompt = list(request.prompt_ids or TOKENIZER.encode(request.prompt or ""))
        assert request.max_tokens is not None
        limit = min(request.max_tokens, self._config.context - len(prompt))
        adapter = self._numbers[request.adapter]
        stop_ids = frozenset(request.stop_token_ids)
        served = Sequence(request, prompt, choice, limit, stop_ids, adapter, calls.table_width, TOKENIZER)
        served.hold(list(range(min(PAGES, calls.table_width))))
        told = [None]
        for start in range(0, served.prefill_end, CHUNK):
            end = min(start + CHUNK, served.prefill_end)
            (drawn,) = calls.read([calls.prefill(Chunk(served, start, start, end))])
            if request.logprobs is not None:
                told += [scored(drawn, i, prompt[start + i + 1], request.logprobs) for i in range(end - start)]
        if not limit:
            served.finish("length")
        while served.finish_reason is None:
            position = len(served.tokens) - 1
            (drawn,) = calls.read([calls.decode([Row(served, position, served.tokens[-1], ())])])
            token = int(drawn.ids[0])
            served.accept(token, scored(drawn, 0, token, request.logprobs))
        ids, text, logprobs = served.drawn, served.text, list(served.logprobs)
        if request.echo:
            ids, text, logprobs = prompt + ids, text_of(TOKENIZER, prompt) + text, told + logprobs
        return Completion(
            ids, text, served.finish_reason, None if request.logprobs is None else logprobs, choice, len(prompt)
        )


@functools.partial(jax.jit, static_argnames="config")
def _logits(params: Any, tokens: Any, each: Any, config: DecoderConfig) -> Any:
    return models.forward(params, tokens, config, adapters=each)


def full_logits(
    tokens: list[int], adapter: str | None = None, params: Any = None, config: DecoderConfig = CONFIG
) -> Any:
    """Logits [len(tokens), V] of the plain forward pass over all the tokens at once."""
    row = np.zeros((1, config.context), np.int32)
    row[0, : len(tokens)] = tokens
    each = None if adapter is None else adapters()[adapter]
    params = params_of(config) if params is None else params
    return np.asarray(_logits(params, jnp.asarray(row), each, config))[0, : len(tokens)]


_LONGEST = 24


@jax.jit
def _scores(
    logits: Any, prompt: Any, output: Any, bias: Any, seed: Any, choice: Any, positions: Any, settings: Any
) -> Any:
    """Scores with the noise of each draw, and by how much the best leads; 0 where a cut is within 1e-4 of a token."""
    every = lambda name: jnp.full(logits.shape[:1], settings[name])
    penalties = {name: every(f"{name}_penalty") for name in ("repetition", "presence", "frequency")}
    logits = sampling.apply_penalties(logits, prompt, output, **penalties) + bias
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), choice)
    noise = jax.vmap(lambda at: jax.random.gumbel(jax.random.fold_in(key, at), logits.shape[1:]))(positions)
    options = {name: every(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    kept = sampling.filter_logits(logits, **options)
    scores = jnp.where(settings["temperature"] > 0, kept + noise, logits)
    best = jnp.sort(jnp.where(jnp.isfinite(kept) | (settings["temperature"] == 0), scores, -1e30), axis=1)
    lead = best[:, -1] - best[:, -2]
    for moved in (1e-4, -1e-4):  # a cut that is near a token keeps another set when it is moved
        top_p = jnp.where(options["top_p"] < 1, jnp.clip(options["top_p"] + moved, 0, 1), options["top_p"])
        other = sampling.filter_logits(
            logits, **{**options, "top_p": top_p, "min_p": jnp.clip(options["min_p"] * (1 + moved), 0, 1)}
        )
        lead = jnp.where((jnp.isfinite(other) != jnp.isfinite(kept)).any(axis=1), 0.0, lead)
    return scores, lead


def expected(request: Request, prompt: list[int], ids: list[int], choice: int) -> tuple[np.ndarray, np.ndarray]:
    """What the plain forward pass draws after each token of an answer, and by how much its best score leads."""
    tokens, vocabulary = [*prompt, *ids], CONFIG.vocab_size
    rows = np.minimum(len(prompt) - 1 + np.arange(_LONGEST), len(tokens) - 2)
    seen = np.stack([np.bincount(tokens[: row + 1], minlength=vocabulary) for row in rows]).astype(np.int32)
    asked = np.broadcast_to(np.bincount(prompt, minlength=vocabulary), seen.shape).astype(np.int32)
    bias = np.tile(sampling.logit_bias_vector(request.logit_bias or {}, vocabulary), (_LONGEST, 1))
    bias[: request.min_tokens, list(request.stop_token_ids)] = -np.inf
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    settings = {name: np.float32(getattr(request, name)) for name in names} | {"top_k": np.int32(request.top_k)}
    scores, lead = _scores(
        full_logits(tokens, request.adapter)[rows],
        asked,
        seen - asked,
        bias,
        np.uint32(request.seed & 0xFFFFFFFF),
        np.int32(choice),
        (rows + 1).astype(np.int32),
        settings,
    )
    return np.asarray(scores).argmax(axis=1)[: len(ids)], np.asarray(lead)[: len(ids)]
