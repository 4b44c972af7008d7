"""Who runs next: admission in order, prompts in chunks beside running rows, preemption when pages run out.

Decisions only; the engine computes what they say. The oldest request always goes on: whatever it lacks is taken from
the youngest, which starts again later and draws the same tokens. So every request that fits alone ends.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from riftco.serve.drafts import prompt_lookup
from riftco.serve.pages import Pages
from riftco.serve.sequence import Sequence


class Chunk(NamedTuple):
    """A part of a prompt to be computed: positions [start, end), of which those from `low` on are written."""

    sequence: Sequence
    start: int
    low: int
    end: int


class Row(NamedTuple):
    """A token to be run at a position; what was drawn up to it, itself included, is `history`."""

    sequence: Sequence
    position: int
    token: int
    guess: tuple[int, ...]  # the guessed tokens up to this one, itself included; () for one that is known


class Scheduler:
    """The queue, the running sequences, and their pages.

    Args:
        pages: the allocator.
        rows: S, how many tokens one decode call takes.
        chunk: C; a prompt is cut at its multiples.
        prefix_cache: whether prefixes are found and kept.
        copy: `(source, target)`: copies a page.
        guesses: how many tokens are guessed at most for each sequence, on rows that are spare; 0 for none.
    """

    def __init__(
        self,
        pages: Pages,
        rows: int,
        chunk: int,
        prefix_cache: bool,
        copy: Callable[[int, int], None],
        guesses: int = 0,
    ) -> None:
        self.pages, self.row_count, self.chunk, self.prefix_cache = pages, rows, chunk, prefix_cache
        self.guesses, self._copy = guesses, copy
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # the oldest first
        self._refused: tuple[Sequence, int] | None = None
        self.preemptions = self.prompt_tokens = self.cached_tokens = 0

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended; its pages are given back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pages.release(sequence.drop_pages())

    def admit(self) -> None:
        """Let waiting sequences run, in order, while there are rows and pages."""
        while self.waiting and len(self.running) < self.row_count:
            sequence = self.waiting[0]
            first = sequence.answer.sequences[0]
            if sequence is not first and first in self.running and first.computed < first.prefill_end:
                return  # its prompt is being computed already; the pages will be shared
            if self._refused == (sequence, self.pages.gains):
                return  # nothing has become free since
            if not self._place(sequence, first):
                self._refused = sequence, self.pages.gains
                return
            self.running.append(self.waiting.popleft())

    def next_chunk(self) -> Chunk | None:
        """The next part of the oldest prompt that is not computed."""
        for sequence in self.running:
            if sequence.computed < sequence.prefill_end:
                start = sequence.computed // self.chunk * self.chunk
                end = min(start + self.chunk, sequence.prefill_end)
                return Chunk(sequence, start, sequence.computed, end)
        return None

    def finish_chunk(self, chunk: Chunk) -> None:
        """Note that a chunk is computed; its whole pages can be shared from now on."""
        chunk.sequence.computed = chunk.end
        if self.prefix_cache:
            self.pages.index(chunk.sequence.prompt[: chunk.end], chunk.sequence.pages, chunk.sequence.scope)

    def rows(self) -> list[Row]:
        """The tokens to run next: one of each sequence, then, on spare rows, those that are known or guessed."""
        for sequence in list(self.running):
            if sequence in self.running and sequence.computed >= sequence.prefill_end:
                self._make_room(sequence)
        ready = [s for s in self.running if s.computed >= s.prefill_end]
        rows = [Row(s, s.computed, s.tokens[s.computed], ()) for s in ready]
        for sequence in ready:
            spare = min(self.row_count - len(rows), len(sequence.pages) * self.pages.size - sequence.computed - 1)
            known = sequence.tokens[sequence.computed + 1 :][: max(spare, 0)]
            rows += [Row(sequence, sequence.computed + 1 + i, token, ()) for i, token in enumerate(known)]
            spare -= len(known)
            if sequence.computed + 1 + len(known) == len(sequence.tokens) and self.guesses:
                # The last token that may be drawn is never run.
                spare = min(spare, self.guesses, sequence.limit - sequence.count - 1)
                guess = tuple(prompt_lookup(sequence.tokens, spare)) if spare > 0 else ()
                end = len(sequence.tokens)
                rows += [Row(sequence, end + i, token, guess[: i + 1]) for i, token in enumerate(guess)]
        return rows

    def _place(self, sequence: Sequence, first: Sequence) -> bool:
        """Take pages for all tokens that are known; False, and nothing has changed, if there are too few."""
        size, end = self.pages.size, sequence.prefill_end
        needed = -(-len(sequence.tokens) // size)
        shared: list[int] = []
        if sequence is not first and first in self.running:
            shared, found = first.pages[: -(-end // size)], end
        elif self.prefix_cache and not sequence.wants_prompt_logprobs:
            shared = self.pages.match(sequence.prompt, sequence.scope)
            found = min(len(shared) * size, end)
        else:
            found = 0
        # The last page is written to while others hold it: this sequence gets a copy.
        source = shared[found // size :]
        held = self.pages.acquire(shared, needed - found // size)
        if held is None and source:
            shared, source, found = shared[: found // size], [], found // size * size
            held = self.pages.acquire(shared, needed - len(shared))
        if held is None:
            return False
        fresh = held[len(shared) :]
        if source:
            self._copy(source[0], fresh[0])
            self.pages.release(source)
        sequence.hold([*shared[: found // size], *fresh])
        sequence.computed = found
        if sequence.cached_tokens is None:  # not counted again after a preemption
            sequence.cached_tokens = found
            self.prompt_tokens += len(sequence.prompt)
            self.cached_tokens += found
        return True

    def _make_room(self, sequence: Sequence) -> None:
        """A page for the sequence's next position, if need be from the youngest, itself included."""
        while sequence.computed // self.pages.size >= len(sequence.pages):
            fresh = self.pages.acquire([], 1)
            if fresh is not None:
                sequence.hold(fresh)
                return
            youngest = self.running.pop()
            self.pages.release(youngest.drop_pages())
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is sequence:
                return
