"""The engine: requests in, answers out, any number at once, each as if it were alone.

One step computes at most one chunk of a prompt and one token of every running row, and reads the device once. On a CPU
an answer is the same, bit for bit, whoever is served beside it, found in the prefix cache or not, preempted or not,
guessed ahead or not. The reasons are in docs/decisions.md; what decides is in scheduler.py, what computes in calls.py.
"""

import threading
import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax

from riftco.errors import CapacityError, ConfigError
from riftco.models.adapters import Adapters
from riftco.models.config import DecoderConfig
from riftco.models.decoding import decoding_params
from riftco.models.packed import check_packed, is_packed
from riftco.models.specification import check_params
from riftco.models.stacked_adapters import attach_stacked
from riftco.serve.answer import Answer
from riftco.serve.calls import Calls, scored
from riftco.serve.intake import Intake
from riftco.serve.pages import Pages
from riftco.serve.request import Completion, Request
from riftco.serve.scheduler import Chunk, Row, Scheduler
from riftco.types import Array, PyTree


class Engine:
    """Serves one model.

    Everything is compiled here, nothing afterwards. Methods may be called from any thread. The work is done by whoever
    waits for an answer, or, after `start`, by a thread of the engine's own; an asynchronous reader starts it.

    Args:
        params: as `riftco.models.init` makes them, or packed (`riftco.tune.quantize`).
        config: their configuration.
        tokenizer: for prompts of text and messages, for the answers' text, and for the id that ends them; None serves
            ids only.
        max_num_seqs: S, how many sequences run at once.
        num_pages: P, pages of keys and values in all.
        page_size: N, tokens in a page.
        prefix_cache: whether prompts' whole pages are kept and found again.
        adapters: {name: adapters of this model}, chosen by `Request.adapter`.
        prefill_chunk: C, how many positions of a prompt are computed at once.
        max_queue: how many sequences may wait; one more is refused.
        stop_ids: ids that end an answer beside the tokenizer's own.
        speculate: how many tokens are guessed ahead from the text itself, on rows that nobody needs; 0 for none.
        dtype: compute dtype; None for the params' own.

    Raises:
        ConfigError, ShapeError, DTypeError: for a number, params or adapters that are not acceptable.
    """

    def __init__(
        self,
        params: PyTree,
        config: DecoderConfig,
        tokenizer: Any,
        *,
        max_num_seqs: int,
        num_pages: int,
        page_size: int,
        prefix_cache: bool = True,
        adapters: Mapping[str, Adapters] | None = None,
        prefill_chunk: int = 64,
        max_queue: int = 256,
        stop_ids: Sequence[int] = (),
        speculate: int = 0,
        dtype: Any = None,
    ) -> None:
        for name, value, low in (
            ("max_num_seqs", max_num_seqs, 1),
            ("prefill_chunk", prefill_chunk, 1),
            ("max_queue", max_queue, 0),
            ("speculate", speculate, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"Engine: {name} must be an integer of at least {low}; got {value!r}.")
        pages = Pages(num_pages, page_size)
        (check_packed if is_packed(params) else check_params)(params, config)
        self.config, self.tokenizer, self._max_queue = config, tokenizer, max_queue
        self.adapters = tuple(adapters or {})
        self._intake = Intake(config, tokenizer, self.adapters, stop_ids, num_pages, page_size)
        self._calls = Calls(
            decoding_params(attach_stacked(params, adapters or {}, config), config, dtype),
            config,
            rows=max_num_seqs,
            pages=num_pages,
            page_size=page_size,
            chunk=prefill_chunk,
        )
        self._scheduler = Scheduler(pages, max_num_seqs, prefill_chunk, prefix_cache, self._calls.copy_page, speculate)
        self._inbox: deque[Answer] = deque()
        self._inbox_lock, self._step_lock = threading.Lock(), threading.Lock()
        self._work, self._thread, self._closed = threading.Event(), None, False
        self._failure: BaseException | None = None
        self._finished: Counter[str] = Counter()
        self._steps = self._generated = self._rows_run = 0
        self.exact = self._calls.self_check()
        if not self.exact and jax.default_backend() == "cpu":
            warnings.warn(
                "Engine: a row's numbers depend on its slot with this jax and these shapes, so answers may depend on "
                "who is served beside them; another max_num_seqs may not have this.",
                stacklevel=2,
            )

    # ---- asking

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer requests together; the completions are in their order, those of one request by choice.

        Raises:
            As `submit`, before any is begun; a full queue is no reason.
        """
        answers = [self._answer(request) for request in requests]
        for answer in answers:
            self._enqueue(answer)
        try:
            return [completion for answer in answers for completion in answer.result()]
        finally:
            for answer in answers:
                if not answer.done:
                    answer.cancel()

    def submit(self, request: Request) -> Answer:
        """Queue a request; see `Answer` for how to wait, read it piece by piece, or cancel.

        Encodes the prompt in the caller's thread.

        Raises:
            CapacityError: the queue is full, or the request would never fit: the sentence says which.
            ConfigError, IndexRangeError, TokenizerError: for what is not acceptable.
        """
        answer = self._answer(request)
        self._enqueue(answer, self._max_queue)
        return answer

    def prompt_of(self, request: Request) -> list[int]:
        """A request's prompt as token ids.

        Raises:
            As `submit`.
        """
        return self._intake.prompt_of(request)

    # ---- working

    def step(self) -> bool:
        """Do one step of the work; False if there was none."""
        with self._step_lock:
            self._raise_failure()
            try:
                return self._step()
            except BaseException as error:
                self._fail(error)
                raise

    def start(self) -> None:
        """Work in a thread from now on."""
        with self._inbox_lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="riftco-serve", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop; answers that are not done end as "cancelled"."""
        with self._inbox_lock:
            self._closed, thread = True, self._thread
        self._work.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._step_lock:
            if self._failure is None:
                self._take_inbox()
                for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                    sequence.answer.cancel()
                self._end_early()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Numbers that never wait for a step.

        `free_pages` are held by nobody (those of them that the prefix cache knows are `cached_pages`); `running` and
        `waiting` count sequences; `hits` are the prompt tokens found in the cache, out of `prompt_tokens`; `exact` is
        what the check at the start found; `finished` counts by reason.
        """
        scheduler = self._scheduler
        with self._inbox_lock:
            new = sum(len(answer.sequences) for answer in self._inbox)
        return {
            "num_pages": scheduler.pages.count,
            "free_pages": scheduler.pages.free,
            "cached_pages": scheduler.pages.cached,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + new,
            "hits": scheduler.cached_tokens,
            "prompt_tokens": scheduler.prompt_tokens,
            "generated_tokens": self._generated,
            "preemptions": scheduler.preemptions,
            "steps": self._steps,
            "rows": self._rows_run,
            "finished": dict(self._finished),
            "exact": self.exact,
        }

    # ---- one step

    def _step(self) -> bool:
        scheduler = self._scheduler
        self._take_inbox()
        self._end_early()
        scheduler.admit()
        started: list[Array] = []
        chunk = scheduler.next_chunk()
        if chunk is not None:
            scores = self._calls.prefill(chunk)
            scheduler.finish_chunk(chunk)
            if chunk.sequence.wants_prompt_logprobs:
                started.append(scores)
        for sequence in [s for s in scheduler.running if s.limit == 0 and s.computed >= s.prefill_end]:
            sequence.finish("length")
        rows = [row for row in scheduler.rows() if row.sequence.limit]
        if rows:
            started.append(self._calls.decode(rows))
        drawn = self._calls.read(started) if started else []
        if chunk is not None and chunk.sequence.wants_prompt_logprobs:
            self._score_prompt(chunk, drawn[0])
        if rows:
            self._accept(rows, drawn[-1])
        self._publish()
        self._steps += bool(rows or chunk)
        return bool(rows or chunk)

    def _score_prompt(self, chunk: Chunk, drawn: Any) -> None:
        known = chunk.sequence.answer.prompt_logprobs
        for position in range(chunk.low, chunk.end):
            if position + 1 == len(known):  # not so when it is computed again after a preemption
                token, row = chunk.sequence.prompt[position + 1], position - chunk.start
                known.append(scored(drawn, row, token, chunk.sequence.request.logprobs))

    def _accept(self, rows: list[Row], drawn: Any) -> None:
        self._rows_run += len(rows)
        for i, (sequence, position, token, _) in enumerate(rows):
            # A guess that turned out wrong, and what was run after it, is as if it had not been run.
            is_next = position == sequence.computed and sequence.tokens[position : position + 1] == [token]
            if sequence.finish_reason is not None or not is_next:
                continue
            sequence.computed += 1
            if sequence.computed == len(sequence.tokens):
                new = int(drawn.ids[i])
                sequence.accept(new, scored(drawn, i, new, sequence.request.logprobs))
                self._generated += 1

    def _publish(self) -> None:
        for sequence in list(self._scheduler.running):
            if sequence.finish_reason is not None:
                self._finished[sequence.finish_reason] += 1
                self._scheduler.remove(sequence)
            if pieces := sequence.take_pieces():
                sequence.answer.publish(pieces)

    def _end_early(self) -> None:
        scheduler = self._scheduler
        for sequence in [*scheduler.running, *scheduler.waiting]:
            if reason := sequence.answer.ended_early():
                sequence.finish(reason)
                self._finished[reason] += 1
                scheduler.remove(sequence)
                sequence.answer.publish(sequence.take_pieces())

    # ---- the queue

    def _answer(self, request: Request) -> Answer:
        sequences, text = self._intake.take(request)
        answer = Answer(request, sequences, self._advance, self.start, text)
        for sequence in sequences:
            sequence.answer = answer
        return answer

    def _enqueue(self, answer: Answer, bound: int | None = None) -> None:
        with self._inbox_lock:
            self._raise_failure()
            if self._closed:
                raise CapacityError("Engine: it is closed; make another.")
            waiting = len(self._scheduler.waiting) + sum(len(each.sequences) for each in self._inbox)
            if bound is not None and waiting + len(answer.sequences) > bound:
                raise CapacityError(f"Engine: the queue must not exceed {bound}; {waiting} wait already; try later.")
            self._inbox.append(answer)
        self._work.set()

    def _take_inbox(self) -> None:
        with self._inbox_lock:
            while self._inbox:
                self._scheduler.waiting.extend(self._inbox.popleft().sequences)

    # ---- threads

    def _advance(self, answer: Answer) -> None:
        if self._thread is not None:
            answer.wait(0.1)
        elif not self.step() and not answer.done:
            raise RuntimeError("Engine: nothing is left to do, yet an answer is not done.")

    def _run(self) -> None:
        while not self._closed:
            self._work.clear()
            try:
                if not self.step():
                    self._work.wait()
            except Exception:
                return  # the answers were told

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"Engine: it stopped on an error: {self._failure}") from self._failure

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._take_inbox()
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            sequence.answer.fail(error)
