"""The default source of training batches: uniform windows with replacement, a pure function of (seed, step).

`Source` is what the trainer asks of any source. The sources that reproduce Python's `random.Random` draws are
in parity.py.
"""

import hashlib
import struct
from typing import Any, Protocol

import numpy as np

from riftco.data._checks import positive_integer, unsigned_integer
from riftco.data.tokens import as_tokens
from riftco.data.windows import Batch, cut_windows, require_window
from riftco.errors import DataError

Rows = tuple[int, int]


class Source(Protocol):
    """A source of batches whose place can be stored in a checkpoint and found again.

    Attributes:
        kind: the name of the kind of source, part of its state and fingerprint.
        fingerprint: SHA-256 (hex) of everything that decides the batches, except what `state` holds.
        batches_emitted: how many batches were drawn; the step that comes next.
    """

    kind: str
    fingerprint: str
    batches_emitted: int

    def batch(self, step: int, rows: Rows | None = None) -> Batch:
        """The batch of `step` (from 0), or its rows start .. stop-1; a sequential source refuses any but the next."""
        ...

    def next(self, rows: Rows | None = None) -> Batch:
        """The batch of step `batches_emitted`, which grows by one."""
        ...

    def state(self) -> dict[str, Any]:
        """What `restore` needs, of types that JSON holds."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a stored place; DataError, with nothing changed, if the state is not of this source."""
        ...


class SeekableSource:
    """What sources share whose batch is a function of the step alone: their place is the number of batches drawn."""

    kind: str
    fingerprint: str
    batches_emitted: int

    def batch(self, step: int, rows: Rows | None = None) -> Batch:
        """The batch of `step`, or its rows start .. stop-1."""
        raise NotImplementedError

    def next(self, rows: Rows | None = None) -> Batch:
        """The batch of step `batches_emitted`, which grows by one."""
        batch = self.batch(self.batches_emitted, rows)
        self.batches_emitted += 1
        return batch

    def state(self) -> dict[str, Any]:
        """{"type", "fingerprint", "batches_emitted"}."""
        return {"type": self.kind, "fingerprint": self.fingerprint, "batches_emitted": self.batches_emitted}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a stored place. Raises DataError, with nothing changed, if the state is not of this source."""
        self.batches_emitted = check_state(state, self.kind, self.fingerprint)


class UniformWindowSource(SeekableSource):
    """Windows that start anywhere, drawn uniformly with replacement, each batch a function of (seed, step) alone.

    The starts of step s are the first B words of Philox-4x64 with key (seed, s), modulo the N - T starts there
    are (a bias below N / 2^64). Raw words of a bit generator are stable across NumPy versions, its higher-level
    draws are not; so a run can be resumed under another NumPy.

    Args:
        tokens: N ids: a `Tokens` of a dataset, an integer array or a list.
        context: T, tokens in a window; N > T is required.
        batch_size: B, rows of the whole batch.
        seed: 0 .. 2^64 - 1.

    Raises:
        DataError: N <= T, or tokens are not a row of ids.  ConfigError: a bad option.
    """

    kind = "uniform_window"

    def __init__(self, tokens: Any, context: int, batch_size: int, seed: int) -> None:
        self._tokens = as_tokens("UniformWindowSource", tokens)
        self.context = positive_integer("UniformWindowSource", "context", context)
        self.batch_size = positive_integer("UniformWindowSource", "batch_size", batch_size)
        self.seed = unsigned_integer("UniformWindowSource", "seed", seed)
        require_window("UniformWindowSource", len(self._tokens), self.context)
        self.batches_emitted = 0
        header = struct.pack("<QQQQ", self.seed, self.batch_size, self.context, len(self._tokens))
        self.fingerprint = hashlib.sha256(
            b"riftco uniform_window 1\0" + header + bytes.fromhex(self._tokens.digest)
        ).hexdigest()

    def starts(self, step: int) -> np.ndarray:
        """int64[B], the first position of every window of the whole batch of `step`."""
        key = np.array([self.seed, unsigned_integer("UniformWindowSource", "step", step)], np.uint64)
        words = np.random.Philox(key=key).random_raw(self.batch_size)
        return (words % np.uint64(len(self._tokens) - self.context)).astype(np.int64)

    def batch(self, step: int, rows: Rows | None = None) -> Batch:
        """The batch of `step` (from 0), or rows start .. stop-1 of it, the same whoever asks for them."""
        starts = self.starts(step)[row_slice(rows, self.batch_size)]
        ids = np.stack([np.zeros_like(starts), starts], axis=1)
        return cut_windows(self._tokens, starts, self.context, ids, self.kind)


def fixed_batches(source: Source, count: int) -> tuple[Batch, ...]:
    """The next `count` batches of a source, kept: a deterministic evaluation set."""
    return tuple(source.next() for _ in range(positive_integer("fixed_batches", "count", count)))


def row_slice(rows: Rows | None, batch_size: int) -> slice:
    """`rows` as a slice of the batch; all of it for None. Raises DataError if it is empty or reaches outside."""
    if rows is None:
        return slice(None)
    start, stop = rows
    if not 0 <= start < stop <= batch_size:
        raise DataError(f"batch: rows must satisfy 0 <= start < stop <= batch size {batch_size}; got {tuple(rows)}")
    return slice(start, stop)


def check_state(state: Any, kind: str, fingerprint: str) -> int:
    """The `batches_emitted` of a state of this very source. Raises DataError for any other."""
    if not isinstance(state, dict) or not {"type", "fingerprint", "batches_emitted"} <= state.keys():
        raise DataError("restore: a source state has the keys type, fingerprint and batches_emitted; this one does not")
    if state["type"] != kind:
        raise DataError(
            f"restore: the state is of a {state['type']!r} source and this is {kind!r}; use the same source"
        )
    if state["fingerprint"] != fingerprint:
        raise DataError(
            f"restore: the {kind} state was made from other data or options (fingerprint "
            f"{str(state['fingerprint'])[:12]}, here {fingerprint[:12]}); "
            "use the same tokens, context, batch size and seed"
        )
    emitted = state["batches_emitted"]
    if isinstance(emitted, bool) or not isinstance(emitted, int) or emitted < 0:
        raise DataError(f"restore: batches_emitted must be an integer of at least 0; got {emitted!r}")
    return emitted
