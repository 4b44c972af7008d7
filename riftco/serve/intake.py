"""From a request to the sequences that answer it: encoding, and every check that needs the model."""

from collections.abc import Iterable, Sequence
from typing import Any

from riftco.errors import CapacityError, ConfigError, IndexRangeError
from riftco.models.config import DecoderConfig
from riftco.models.paged_decoding import table_width
from riftco.serve.request import Request
from riftco.serve.sequence import Sequence as Served
from riftco.serve.sequence import text_of
from riftco.tokenizers import chat


class Intake:
    """What a model can be asked.

    Args:
        config: the model's.
        tokenizer: its tokenizer, or None.
        adapters: names, in the order of the stack.
        stop_ids: ids that end an answer beside the tokenizer's own.
        num_pages: P.
        page_size: N.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tokenizer: Any,
        adapters: tuple[str, ...],
        stop_ids: Sequence[int],
        num_pages: int,
        page_size: int,
    ) -> None:
        self._config, self._tokenizer, self._adapters = config, tokenizer, adapters
        self._num_pages, self._page_size = num_pages, page_size
        own = set(stop_ids) | ({tokenizer.eos_id} if tokenizer is not None else set())
        self._stop_ids = frozenset(id for id in own if id is not None and 0 <= id < config.vocab_size)

    def prompt_of(self, request: Request) -> list[int]:
        """A request's prompt as token ids; see `Engine.prompt_of`."""
        if request.prompt_ids is not None:
            ids = list(request.prompt_ids)
        elif self._tokenizer is None:
            raise ConfigError("Engine: text and messages need a tokenizer; this engine has none; give prompt_ids.")
        elif request.prompt is not None:
            ids = self._tokenizer.encode(request.prompt)
        else:
            text = chat.render_text(
                request.messages or (),
                self._tokenizer.effective_chat_template,
                add_generation_prompt=True,
                special_tokens=chat.special_tokens(self._tokenizer),
            )
            ids = self._tokenizer.encode(text)
        if not ids:
            raise ConfigError("Engine: a prompt must have at least one token; got none.")
        self._check_ids("a prompt", ids)
        return ids

    def take(self, request: Request) -> tuple[list[Served], str]:
        """One sequence for each choice, and the prompt's text under echo; see `Engine.submit` for what is refused."""
        if not isinstance(request, Request):
            raise ConfigError(f"Engine: a request must be a riftco.serve.Request; got {type(request).__name__}.")
        prompt = self.prompt_of(request)
        limit = self._limit(request, len(prompt))
        if request.adapter is not None and request.adapter not in self._adapters:
            there = ", ".join(self._adapters) or "none"
            raise ConfigError(
                f"Engine: adapter must be one of the engine's; got {request.adapter!r}; there are {there}."
            )
        if request.stop and self._tokenizer is None:
            raise ConfigError("Engine: stop strings need a tokenizer; this engine has none; use stop_token_ids.")
        self._check_ids("stop_token_ids", request.stop_token_ids)
        self._check_ids("logit_bias", request.logit_bias or ())
        stop_ids = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self._stop_ids)
        if request.min_tokens and len(stop_ids) >= self._config.vocab_size:
            raise ConfigError("Engine: min_tokens needs an id that does not stop; every id of the vocabulary does.")
        adapter = 0 if request.adapter is None else self._adapters.index(request.adapter) + 1
        width = table_width(self._config, self._page_size)
        sequences = [
            Served(request, prompt, choice, limit, stop_ids, adapter, width, self._tokenizer)
            for choice in range(request.n)
        ]
        text = text_of(self._tokenizer, prompt) if request.echo and self._tokenizer is not None else ""
        return sequences, text

    def _limit(self, request: Request, length: int) -> int:
        """How many tokens may be drawn: what is asked for, as far as the context goes."""
        context = self._config.context
        room = context - length
        if room < (request.max_tokens != 0):
            raise CapacityError(
                f"Engine: a prompt must leave room for a token in the model's context of {context}; got {length} "
                "tokens; shorten it."
            )
        most = self._num_pages * self._page_size  # the last token that is drawn needs no place
        limit = min(room, most - length + 1) if request.max_tokens is None else min(room, request.max_tokens)
        if limit < 0 or max(length, length + limit - 1) > most:
            raise CapacityError(
                f"Engine: a request must fit into {self._num_pages} pages of {self._page_size} tokens; got a prompt of "
                f"{length} and {max(limit, 0)} tokens to draw; ask for fewer, or give the engine more pages."
            )
        return limit

    def _check_ids(self, what: str, ids: Iterable[int]) -> None:
        if wrong := [id for id in ids if not 0 <= id < self._config.vocab_size]:
            raise IndexRangeError(
                f"Engine: ids of {what} must be in [0, {self._config.vocab_size}); got {wrong[0]}; check the tokenizer."
            )
