"""Sources that draw with Python's `random.Random(seed)`, exactly as the reference implementation does.

Their draws are sequential, so their state holds the generator's. Kinds, fingerprints and draws agree with
riftco-transformer 0.6.1; given the same tokens, sizes and seed they emit the same batches.
"""

import hashlib
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from riftco.data._checks import positive_integer, unsigned_integer
from riftco.data.sources import Rows, check_state, row_slice
from riftco.data.tokens import Tokens, as_id_array, as_tokens, update_digest
from riftco.data.windows import Batch, cut_windows, require_window
from riftco.errors import DataError

_FINGERPRINT_TAG = b"riftco-transformer-batch-source-v1\0"


class _SequentialWindowSource:
    """What the three sources share; a subclass says how to draw one (sequence, start)."""

    kind: str

    def __init__(self, sequences: Sequence[Any], context: int, batch_size: int, seed: int) -> None:
        who = type(self).__name__
        self.context = positive_integer(who, "context", context)
        self.batch_size = positive_integer(who, "batch_size", batch_size)
        self._random = random.Random(unsigned_integer(who, "seed", seed))
        arrays = [as_id_array(f"{who}: sequence {index}", sequence) for index, sequence in enumerate(sequences)]
        kept = [index for index, array in enumerate(arrays) if len(array) > self.context]
        if not kept:
            require_window(who, max(map(len, arrays), default=0), self.context)
        arrays = [arrays[index] for index in kept]
        self._lengths = [len(array) for array in arrays]
        self._origins = np.array(kept, np.int64)  # place of each kept sequence among those given
        self._offsets = np.cumsum([0, *self._lengths[:-1]])
        self._tokens = Tokens([np.concatenate(arrays)] if len(arrays) > 1 else arrays)
        self.dropped = len(sequences) - len(kept)
        self.batches_emitted = 0
        self.fingerprint = _fingerprint(self.kind, arrays, self.batch_size, self.context)

    def _draw(self) -> tuple[int, int]:
        raise NotImplementedError

    def batch(self, step: int, rows: Rows | None = None) -> Batch:
        """The batch of `step`, which must be the next one. Raises DataError for any other step."""
        if step != self.batches_emitted:
            raise DataError(
                f"{type(self).__name__}: batches come in order; step {step} was asked for and the next is "
                f"{self.batches_emitted}; restore the state that was saved with that step"
            )
        return self.next(rows)

    def next(self, rows: Rows | None = None) -> Batch:
        """The next batch, or its rows start .. stop-1; the draws of all rows are made either way."""
        wanted = row_slice(rows, self.batch_size)
        drawn = np.array([self._draw() for _ in range(self.batch_size)], np.int64)[wanted]  # (B, 2)
        ids = np.stack([self._origins[drawn[:, 0]], drawn[:, 1]], axis=1)
        self.batches_emitted += 1
        return cut_windows(self._tokens, self._offsets[drawn[:, 0]] + drawn[:, 1], self.context, ids, self.kind)

    def state(self) -> dict[str, Any]:
        """{"type", "fingerprint", "batches_emitted", "random_state"}; the last is Python's generator state as lists."""
        version, words, gauss = self._random.getstate()
        return {
            "type": self.kind,
            "fingerprint": self.fingerprint,
            "batches_emitted": self.batches_emitted,
            "random_state": [version, list(words), gauss],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a stored place. Raises DataError, with nothing changed, if the state is not of this source."""
        emitted = check_state(state, self.kind, self.fingerprint)
        generator = random.Random()
        try:
            version, words, gauss = state["random_state"]
            generator.setstate((version, tuple(words), gauss))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"restore: random_state must be a state of Python's random.Random; {error}") from None
        self._random, self.batches_emitted = generator, emitted


class RandomWindowBatchSource(_SequentialWindowSource):
    """Windows of one row of N tokens: one `randrange(N - T)` a row, uniform with replacement.

    Args:
        tokens: N ids, N > T.
        context: T.
        batch_size: B.
        seed: of Python's generator.

    Raises:
        DataError: N <= T, or tokens are not a row of ids.  ConfigError: a bad option.
    """

    kind = "random_window"

    def __init__(self, tokens: Any, context: int, batch_size: int, seed: int) -> None:
        row = as_tokens(type(self).__name__, tokens)
        super().__init__([row.read(0, len(row))], context, batch_size, seed)

    def _draw(self) -> tuple[int, int]:
        return 0, self._random.randrange(self._lengths[0] - self.context)


class SequenceWindowBatchSource(_SequentialWindowSource):
    """Windows that never cross a sequence, every window of every sequence equally likely: one `randrange` a row.

    Sequences of at most T tokens are left out; `dropped` counts them.

    Raises:
        DataError: no sequence is longer than T, or one is not a row of ids.  ConfigError: a bad option.
    """

    kind = "sequence_window"

    def __init__(self, sequences: Sequence[Any], context: int, batch_size: int, seed: int) -> None:
        super().__init__(sequences, context, batch_size, seed)
        self._ends = np.cumsum([length - self.context for length in self._lengths])  # windows up to and with each

    def _draw(self) -> tuple[int, int]:
        window = self._random.randrange(int(self._ends[-1]))
        sequence = int(np.searchsorted(self._ends, window, side="right"))
        return sequence, window - int(self._ends[sequence - 1] if sequence else 0)


class ExampleWindowBatchSource(_SequentialWindowSource):
    """A sequence drawn uniformly, then a window in it, so that a long example counts no more than a short one.

    Two draws a row: `randrange(sequences)`, `randrange(length - T)`. Sequences of at most T tokens are left out;
    `dropped` counts them.

    Raises:
        DataError: no sequence is longer than T, or one is not a row of ids.  ConfigError: a bad option.
    """

    kind = "example_window"

    def _draw(self) -> tuple[int, int]:
        sequence = self._random.randrange(len(self._lengths))
        return sequence, self._random.randrange(self._lengths[sequence] - self.context)


def _fingerprint(kind: str, sequences: Sequence[np.ndarray], batch_size: int, context: int) -> str:
    """SHA-256 of tag, kind, sizes and every id, integers little-endian; the recipe of riftco-transformer 0.6.1."""
    name = kind.encode("ascii")
    hasher = hashlib.sha256(_FINGERPRINT_TAG + struct.pack("<Q", len(name)) + name)
    hasher.update(struct.pack("<QQQ", batch_size, context, len(sequences)))
    for sequence in sequences:
        hasher.update(struct.pack("<Q", len(sequence)))
        update_digest(hasher, sequence)
    return hasher.hexdigest()
