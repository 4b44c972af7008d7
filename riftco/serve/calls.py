"""The device's side of the engine: weights, pools, and what the scheduler decided turned into calls and back.

Arrays that a call was given are never written to again: on a CPU it may still be reading them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco.models.config import DecoderConfig
from riftco.models.decoding import DecodingParams
from riftco.models.paged_decoding import empty_pools, position_tables, table_width
from riftco.serve import programs
from riftco.serve.programs import IDLE, INTEGERS, NUMBERS, Drawn, Weights
from riftco.serve.request import TokenLogprob
from riftco.serve.scheduler import Chunk, Row
from riftco.types import Array


class Calls:
    """Runs chunks and rows.

    Args:
        params: of the model, adapters stacked beside the weights.
        config: its configuration.
        rows: S.
        pages: P.
        page_size: N.
        chunk: C.
    """

    def __init__(
        self, params: DecodingParams, config: DecoderConfig, *, rows: int, pages: int, page_size: int, chunk: int
    ) -> None:
        dtype = params.rest["token_embedding"]["weight"].dtype
        self._config, self._rows, self._chunk = config, rows, chunk
        self._weights = Weights(params, position_tables(config, dtype))
        self._pools = empty_pools(config, pages, page_size, dtype)
        self.table_width = table_width(config, page_size)
        self._no_bias = jnp.zeros((rows, config.vocab_size), jnp.float32)
        self._no_history = jnp.zeros((rows, config.context), jnp.int32)
        self._bias: Array = self._no_bias
        self._bias_of: list[Any] = []

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page, in all layers."""
        self._pools = programs.copy(self._pools, np.int32(source), np.int32(target), self._config)

    def prefill(self, chunk: Chunk) -> Array:
        """Start one chunk; what it returns is read with `read`."""
        sequence, start, low, end = chunk
        tokens = np.zeros((2, self._chunk), np.int32)
        following = sequence.prompt[start : end + 1]
        tokens[0, : end - start] = following[:-1]
        tokens[1, : end - start] = following[1:]
        header = [start, low, sequence.prefill_end, sequence.adapter, sequence.wants_prompt_logprobs]
        scores, self._pools = programs.prefill(
            self._weights, self._pools, np.array(header, np.int32), tokens, sequence.table.copy(), self._config
        )
        return scores

    def decode(self, rows: list[Row]) -> Array:
        """Start one token of each row; what it returns is read with `read`."""
        integers = np.zeros((self._rows, len(INTEGERS) + self.table_width), np.int32)
        numbers = np.tile(np.array([IDLE[name] for name in NUMBERS], np.float32), (self._rows, 1))
        for i, row in enumerate(rows):
            sequence, request = row.sequence, row.sequence.request
            integers[i, : len(INTEGERS)] = (
                row.token,
                row.position,
                row.position + 1,
                sequence.adapter,
                np.uint32(request.seed & 0xFFFFFFFF).view(np.int32),
                sequence.choice,
                min(max(request.top_k, 0), self._config.vocab_size),
                request.logprobs is not None,
                len(sequence.prompt),
            )
            integers[i, len(INTEGERS) :] = sequence.table
            numbers[i] = (
                request.temperature,
                request.top_p,
                request.min_p,
                request.repetition_penalty,
                request.presence_penalty,
                request.frequency_penalty,
            )
        packed, self._pools = programs.decode(
            self._weights, self._pools, integers, numbers, self._biases(rows), self._histories(rows), self._config
        )
        return packed

    @staticmethod
    def read(started: list[Array]) -> list[Drawn]:
        """Wait for what calls returned: the one place where anything comes from the device."""
        return [programs.unpack(packed) for packed in jax.device_get(started)]

    def _biases(self, rows: list[Row]) -> Array:
        """[S, V]; made and sent again only when it changes."""
        wanted: list[Any] = []
        for row in rows:
            sequence = row.sequence
            bans = sequence.bans_stop_ids(row.position + 1 - len(sequence.prompt))
            wanted.append((sequence, bans) if bans or sequence.request.logit_bias else None)
        if not any(wanted):
            return self._no_bias
        if wanted != self._bias_of:
            bias = np.zeros((self._rows, self._config.vocab_size), np.float32)
            for i, entry in enumerate(wanted):
                if entry is not None:
                    sequence, bans = entry
                    for token, value in (sequence.request.logit_bias or {}).items():
                        bias[i, token] = value
                    if bans:
                        bias[i, list(sequence.stop_ids)] = -np.inf
            self._bias, self._bias_of = jax.device_put(bias), wanted
        return self._bias

    def _histories(self, rows: list[Row]) -> Any:
        """[S, W]; zeros where no row has penalties."""
        history = None
        for i, row in enumerate(rows):
            request = row.sequence.request
            if (request.repetition_penalty, request.presence_penalty, request.frequency_penalty) != (1.0, 0.0, 0.0):
                if history is None:
                    history = np.zeros((self._rows, self._config.context), np.int32)
                tokens = [*row.sequence.tokens, *row.guess][: row.position + 1]
                history[i, : len(tokens)] = tokens
        return self._no_history if history is None else history

    def self_check(self) -> bool:
        """Compile both calls, and tell whether a row's bits are the same in several slots beside several others.

        Uses the first two pages, which must be free.
        """
        generator = np.random.default_rng(0)
        size, vocabulary = self._pools.keys.shape[2], self._config.vocab_size
        steps = min(3, size, self._config.context)
        probe = generator.integers(0, vocabulary, steps)
        other_page = min(1, self._pools.keys.shape[1] // self._config.layers - 1)
        seen: list[np.ndarray] = []
        for slot in sorted({0, self._rows // 2, self._rows - 1}):
            found = []
            for position, token in enumerate(probe):
                integers = np.zeros((self._rows, len(INTEGERS) + self.table_width), np.int32)
                integers[:, 0] = generator.integers(0, vocabulary, self._rows)
                integers[:, 1:3] = position, position + 1 if other_page else 0
                integers[:, len(INTEGERS) :] = other_page
                integers[slot] = 0
                integers[slot, :3] = token, position, position + 1
                integers[:, INTEGERS.index("wants_logprobs")] = 1
                numbers = np.tile(np.array([IDLE[name] for name in NUMBERS], np.float32), (self._rows, 1))
                packed, self._pools = programs.decode(
                    self._weights, self._pools, integers, numbers, self._no_bias, self._no_history, self._config
                )
                found.append(jax.device_get(packed)[slot])
            seen.append(np.stack(found))
        header, tokens = np.zeros(len(programs.HEADER), np.int32), np.zeros((2, self._chunk), np.int32)
        scores, self._pools = programs.prefill(
            self._weights, self._pools, header, tokens, np.zeros(self.table_width, np.int32), self._config
        )
        self.copy_page(0, 0)
        jax.block_until_ready((scores, self._pools))
        return all(np.array_equal(each, seen[0]) for each in seen)


def scored(drawn: Drawn, row: int, token: int, count: int | None) -> TokenLogprob | None:
    """A row's log-probabilities for a request that asked for `count` alternatives."""
    if count is None:
        return None
    top = zip(drawn.top_ids[row, :count].tolist(), drawn.top_logprobs[row, :count].tolist(), strict=True)
    return TokenLogprob(token, float(drawn.logprobs[row]), tuple(top))
