"""An answer while it is made: what a caller waits on, reads piece by piece, or cancels."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from riftco.serve.request import Completion, Piece, Request, TokenLogprob
from riftco.serve.sequence import Sequence


class Answer:
    """All choices of one request. Made by `Engine.submit`; safe to use from any thread.

    Args:
        request: as it was submitted.
        sequences: one for each choice.
        advance: does some work, or waits until there is news; called while a caller waits.
        start: lets a thread of its own do the work.
        prompt_text: the prompt's text, under echo. It begins the completion's text; pieces are of the answer alone.
    """

    def __init__(
        self,
        request: Request,
        sequences: list[Sequence],
        advance: Callable[["Answer"], None],
        start: Callable[[], None],
        prompt_text: str = "",
    ) -> None:
        self.request, self.sequences = request, sequences
        self._advance, self._start, self.prompt_text = advance, start, prompt_text
        self._expires = None if request.deadline is None else time.monotonic() + request.deadline
        self._news = threading.Condition()
        self._pieces: deque[Piece] = deque()
        self._done = False
        self._cancelled = False
        self._failure: BaseException | None = None
        self._wake: Callable[[], Any] | None = None
        self.prompt_logprobs: list[TokenLogprob | None] = [None]

    # ---- for the caller

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        return self._done

    def cancel(self) -> None:
        """End the answer as it is; its pages are free after the step that is running."""
        self._cancelled = True

    def result(self) -> list[Completion]:
        """Wait for all choices.

        Raises:
            RuntimeError: the engine stopped because of an error, which is the cause.
        """
        while not self._done:
            self._advance(self)
        self._raise_failure()
        return [self._completion(sequence) for sequence in self.sequences]

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come, of all choices."""
        while True:
            with self._news:
                piece = self._pieces.popleft() if self._pieces else None
            if piece is not None:
                yield piece
            elif self._done:
                self._raise_failure()
                return
            else:
                self._advance(self)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces as they come; the work goes on in a thread of the engine. Closing the iterator early cancels."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(news.set)
        self._start()
        try:
            while True:
                news.clear()
                is_done = self._done  # read first: pieces that come after it wake us again
                with self._news:
                    pieces = list(self._pieces)
                    self._pieces.clear()
                for piece in pieces:
                    yield piece
                if is_done:
                    self._raise_failure()
                    return
                if not pieces:
                    await news.wait()
        finally:
            self._wake = None
            if not self._done:
                self.cancel()

    # ---- for the engine

    def ended_early(self) -> Any:
        """Why the answer is not to go on: "cancelled" or "deadline"; None if it is."""
        if self._cancelled:
            return "cancelled"
        return "deadline" if self._expires is not None and time.monotonic() >= self._expires else None

    def publish(self, pieces: list[Piece]) -> None:
        """Hand pieces over."""
        with self._news:
            self._pieces.extend(pieces)
            self._done = all(sequence.finish_reason is not None for sequence in self.sequences)
            self._tell()

    def fail(self, error: BaseException) -> None:
        """End because the engine cannot go on."""
        with self._news:
            self._failure, self._done = error, True
            self._tell()

    def wait(self, seconds: float) -> None:
        """Until there is news, at most so long."""
        with self._news:
            if not self._pieces and not self._done:
                self._news.wait(seconds)

    def _tell(self) -> None:
        self._news.notify_all()
        wake = self._wake
        if wake is not None:
            try:
                wake()
            except RuntimeError:  # the loop that waited is closed
                self._cancelled = True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"Engine: it stopped on an error: {self._failure}") from self._failure

    def _completion(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None
        ids, text, logprobs = list(sequence.drawn), sequence.text, list(sequence.logprobs)
        if self.request.echo:
            ids, text = [*sequence.prompt, *ids], self.prompt_text + text
            logprobs = [*self.prompt_logprobs, *logprobs]
        return Completion(
            ids,
            text,
            sequence.finish_reason,
            None if self.request.logprobs is None else logprobs,
            sequence.choice,
            len(sequence.prompt),
            sequence.cached_tokens or 0,
        )
