"""One choice of one request while it is served: its tokens, its pages, its text, and when it ends."""

from typing import Any

import numpy as np

from riftco.serve.pages import Scope
from riftco.serve.request import FinishReason, Piece, Request, TokenLogprob
from riftco.tokenizers.stream import DecodeStream, StopFilter


class Sequence:
    """What the scheduler moves about.

    Attributes:
        tokens: the prompt and what was drawn.
        pages: physical pages of the positions from 0 on.
        table: the same as an array that a row of a compiled call takes; entries past the pages are 0.
        computed: how many positions have their keys and values in the pages.
        cached_tokens: how many of the prompt's were found when it first ran; None before.
        finish_reason: None while it goes on.

    Args:
        request: whose it is.
        prompt: token ids.
        choice: 0 … n − 1.
        limit: how many tokens may be drawn.
        stop_ids: ids that end it.
        adapter: its number in the stack; 0 for the base.
        table_width: M.
        tokenizer: turns tokens into text, or None.
    """

    def __init__(
        self,
        request: Request,
        prompt: list[int],
        choice: int,
        limit: int,
        stop_ids: frozenset[int],
        adapter: int,
        table_width: int,
        tokenizer: Any,
    ) -> None:
        self.request, self.prompt, self.choice, self.limit = request, prompt, choice, limit
        self.stop_ids, self.adapter = stop_ids, adapter
        self.answer: Any = None
        self.tokens, self.pages = list(prompt), []
        self.table = np.zeros(table_width, np.int32)
        self.computed = 0
        self.cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprob | None] = []
        self._parts: list[str] = []
        self._pieces: list[Piece] = []
        self._decoder = None if tokenizer is None else DecodeStream(_bytes_of(tokenizer))
        self._filter = StopFilter(request.stop)

    @property
    def drawn(self) -> list[int]:
        """The tokens of the answer."""
        return self.tokens[len(self.prompt) :]

    @property
    def count(self) -> int:
        """How many those are."""
        return len(self.tokens) - len(self.prompt)

    @property
    def text(self) -> str:
        """The answer's text so far, as far as it is certain."""
        return "".join(self._parts)

    @property
    def scope(self) -> Scope:
        """What its pages' contents depend on beside the tokens."""
        return self.adapter, self.request.cache_salt

    @property
    def prefill_end(self) -> int:
        """The positions that prefill computes: all of the prompt but the last, which decode takes to draw from."""
        return len(self.prompt) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prefill has to tell log-probabilities, for which every position must be computed."""
        return self.request.echo and self.request.logprobs is not None and self.choice == 0

    def hold(self, pages: list[int]) -> None:
        """Take pages for the positions that follow those held."""
        self.table[len(self.pages) : len(self.pages) + len(pages)] = pages
        self.pages.extend(pages)

    def drop_pages(self) -> list[int]:
        """Forget what was computed; returns the pages that were held."""
        pages, self.pages, self.computed = self.pages, [], 0
        return pages

    def bans_stop_ids(self, count: int) -> bool:
        """Whether the token after `count` drawn ones must not be a stop id."""
        return count < self.request.min_tokens and bool(self.stop_ids)

    def accept(self, token: int, score: TokenLogprob | None) -> None:
        """Take a drawn token; it may end the sequence."""
        if token < 0:
            return self.finish("error")
        if token in self.stop_ids:
            return self.finish("stop")
        self.tokens.append(token)
        self.logprobs.append(score)
        text = "" if self._decoder is None else self._decoder.push(token)
        if self.count > self.request.min_tokens:
            text = self._filter.push(text)
        if self._filter.found:
            return self._end("stop", token, text, score)
        if self.count >= self.limit:
            return self._end("length", token, text + self._rest(), score)
        self._add(Piece(self.choice, token, text, score))

    def finish(self, reason: FinishReason) -> None:
        """End without another token."""
        self._end(reason, None, self._rest(), None)

    def take_pieces(self) -> list[Piece]:
        """What has not been published yet."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _rest(self) -> str:
        if self._filter.found:
            return ""
        last = "" if self._decoder is None else self._decoder.flush()
        text = self._filter.push(last)
        return text if self._filter.found else text + self._filter.flush()

    def _end(self, reason: FinishReason, token: int | None, text: str, score: TokenLogprob | None) -> None:
        self.finish_reason = reason
        self._add(Piece(self.choice, token, text, score, reason))

    def _add(self, piece: Piece) -> None:
        self._parts.append(piece.text)
        self._pieces.append(piece)


def text_of(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids, special tokens left out."""
    return b"".join(map(_bytes_of(tokenizer), ids)).decode("utf-8", "replace")


def _bytes_of(tokenizer: Any) -> Any:
    """The bytes of an id: none for special tokens, nor for ids that only the model's padded vocabulary has."""
    vocabulary, special = tokenizer.vocabulary, set(tokenizer.special_tokens.values())
    return lambda id: vocabulary[id] if id < len(vocabulary) and id not in special else b""
