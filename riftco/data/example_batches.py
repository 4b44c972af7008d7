"""Batches of examples: shuffled by epoch, packed or one a row; pairs of answers; and a held-out walk.

Rows form one endless stream, epoch after epoch, each example once an epoch; the batch of step s is its rows s · B to
s · B + B - 1. So a batch is a function of (seed, step). Packing differs from epoch to epoch, and with it the number of
rows: the first batch after a resume packs the epochs before it once more.
"""

import bisect
import functools
import hashlib
import struct
from collections.abc import Iterator

import numpy as np

from riftco.data._checks import positive_integer, unsigned_integer
from riftco.data.packing import first_fit, inputs, lay_out, permutation
from riftco.data.sft import Encoded, EncodedSet, flat
from riftco.data.sources import Rows, SeekableSource, row_slice
from riftco.data.windows import Batch
from riftco.errors import DataError


class _EpochSource(SeekableSource):
    """Rows of items, each item once an epoch. Sub-classes say which items share a row."""

    kind: str

    def __init__(self, encoded: EncodedSet, batch_size: int, seed: int, width: int) -> None:
        who = type(self).__name__
        self.batch_size = positive_integer(who, "batch_size", batch_size)
        self.seed = unsigned_integer(who, "seed", seed)
        self.width = width
        self.encoded = encoded
        self.batches_emitted = 0
        self._ends: list[int] = []  # of the epochs so far, in rows from the start of the stream
        self._epoch = functools.lru_cache(maxsize=2)(self.epoch)
        header = struct.pack("<QQQ", self.seed, self.batch_size, self.width)
        digest = hashlib.sha256(f"riftco {self.kind} 1\0".encode() + header + bytes.fromhex(encoded.fingerprint))
        self.fingerprint = digest.hexdigest()

    def epoch(self, number: int) -> list[list[int]]:
        """The rows of an epoch: which items are in each."""
        raise NotImplementedError

    def row(self, items: list[int]) -> list[Encoded]:
        """What a row of these items holds."""
        return list(flat(self.encoded.items[index] for index in items))

    def epochs_before(self, step: int) -> float:
        """How often every example was seen before the batch of `step`."""
        epoch, row = self._find(unsigned_integer(type(self).__name__, "step", step) * self.batch_size)
        return epoch + row / len(self._epoch(epoch))

    def batch(self, step: int, rows: Rows | None = None) -> Batch:
        """The batch of `step` (from 0), or rows start .. stop-1 of it, the same whoever asks for them."""
        first = unsigned_integer(type(self).__name__, "step", step) * self.batch_size
        wanted = range(first, first + self.batch_size)[row_slice(rows, self.batch_size)]
        found = []
        for number in wanted:
            epoch, row = self._find(number)
            found.append(self._epoch(epoch)[row])
        ids = np.array([[items[0], 0] for items in found], np.int64)
        return lay_out([self.row(items) for items in found], self.width, ids, self.kind, segmented=self._is_segmented)

    _is_segmented = True
    _rows_per_epoch: int | None = None  # where all epochs have as many

    def _find(self, row: int) -> tuple[int, int]:
        """Epoch, and row in it, of a row of the stream."""
        if self._rows_per_epoch is not None:
            return divmod(row, self._rows_per_epoch)
        while not self._ends or self._ends[-1] <= row:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._epoch(len(self._ends))))
        epoch = bisect.bisect_right(self._ends, row)
        return epoch, row - (self._ends[epoch - 1] if epoch else 0)


class PackedExampleSource(_EpochSource):
    """Rows of T tokens filled with whole examples: first fit over an order that (seed, epoch) decides.

    Batches have segment ids and positions, with which each example is seen as if it stood alone.

    Args:
        encoded: of `encode_examples`.
        batch_size: B, rows of the whole batch.
        seed: 0 .. 2^64 - 1.

    Raises:
        ConfigError: a bad option. DataError: preferences.
    """

    kind = "packed_examples"

    def __init__(self, encoded: EncodedSet, batch_size: int, seed: int) -> None:
        _refuse_pairs(type(self).__name__, encoded)
        self._sizes = np.array([inputs(example) for example in encoded.items])
        super().__init__(encoded, batch_size, seed, encoded.context)

    def epoch(self, number: int) -> list[list[int]]:
        """The rows of an epoch: which examples are in each."""
        order = permutation(self.seed, 2 * number, len(self._sizes))
        bins = first_fit(self._sizes[order].tolist(), self.width)
        # First fit fills the bins that it opens first; shuffled, no part of an epoch has the fuller rows.
        shuffled = permutation(self.seed, 2 * number + 1, len(bins))
        return [order[bins[place]].tolist() for place in shuffled]


class PaddedExampleSource(_EpochSource):
    """One example a row, in an order that (seed, epoch) decides, filled up with token 0 and weight 0.

    Rows are as long as the longest example. Arguments as `PackedExampleSource`.
    """

    kind = "padded_examples"
    _is_segmented = False

    def __init__(self, encoded: EncodedSet, batch_size: int, seed: int) -> None:
        _refuse_pairs(type(self).__name__, encoded)
        self._rows_per_epoch = len(encoded)
        super().__init__(encoded, batch_size, seed, max(map(inputs, encoded.items)))

    def epoch(self, number: int) -> list[list[int]]:
        """The rows of an epoch: which example is in each."""
        return permutation(self.seed, number, len(self.encoded))[:, None].tolist()


class PreferenceSource(_EpochSource):
    """One pair of answers a row, the chosen one as segment 1 and the rejected one as segment 2, both from position 0.

    So one forward pass sees both, neither sees the other, and a batch is split over devices without parting a pair.
    Rows are as long as the longest pair, which may be up to 2 T.

    Args:
        encoded: of `encode_preferences`.
        batch_size: B, pairs of the whole batch.
        seed: 0 .. 2^64 - 1.

    Raises:
        ConfigError: a bad option. DataError: examples that are no pairs.
    """

    kind = "preferences"

    def __init__(self, encoded: EncodedSet, batch_size: int, seed: int) -> None:
        if not isinstance(encoded.items[0], tuple):
            raise DataError("PreferenceSource: pairs of encode_preferences are required; got single examples")
        self._rows_per_epoch = len(encoded)
        super().__init__(encoded, batch_size, seed, max(sum(map(inputs, pair)) for pair in encoded.items))

    def epoch(self, number: int) -> list[list[int]]:
        """The rows of an epoch: which pair is in each."""
        return permutation(self.seed, number, len(self.encoded))[:, None].tolist()


class ExampleWindows:
    """Held-out examples in a fixed order, each scored once; iterate for batches, as often as you like.

    Takes the place of `EvaluationWindows`: packed rows of one shape, the last batch filled up with rows of weight 0.

    Args:
        encoded: of `encode_examples`.
        batch_size: B.

    Attributes:
        context: T, the places of a row.
        batch_size: B.
        padded: True: every batch is [B, T].
        sequences: how many examples there are.
        skipped: how many were left out, since they have no target.
        target_count: targets that are scored.
    """

    padded = True

    def __init__(self, encoded: EncodedSet, batch_size: int) -> None:
        _refuse_pairs("ExampleWindows", encoded)
        self.context = encoded.context
        self.batch_size = positive_integer("ExampleWindows", "batch_size", batch_size)
        self.sequences, self.skipped = len(encoded), len(encoded.report.skipped)
        self.target_count = sum(example.targets for example in encoded.items)
        self._items = encoded.items
        self._rows = first_fit([inputs(example) for example in encoded.items], self.context)

    def __len__(self) -> int:
        return -(-len(self._rows) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self._rows), self.batch_size):
            rows = self._rows[start : start + self.batch_size]
            rows = rows + [[]] * (self.batch_size - len(rows))
            ids = np.array([[items[0], 0] if items else [-1, -1] for items in rows], np.int64)
            examples = [[self._items[index] for index in items] for items in rows]
            yield lay_out(examples, self.context, ids, "held_out_examples", segmented=True)


class PreferenceWindows:
    """Held-out pairs in a fixed order, each scored once: the counterpart of `ExampleWindows` for preferences.

    Rows are those of `PreferenceSource`; the last batch is filled up with rows of weight 0.

    Args:
        encoded: of `encode_preferences`.
        batch_size: B, pairs of a batch.

    Attributes:
        context: T, the most tokens of one answer with its prompt.
        batch_size: B.
        padded: True: every batch has one shape.
        sequences: how many pairs there are.
        skipped: how many were left out.
        target_count: how many pairs are scored.
    """

    padded = True

    def __init__(self, encoded: EncodedSet, batch_size: int) -> None:
        self._source = PreferenceSource(encoded, batch_size, 0)
        self.context, self.batch_size = encoded.context, self._source.batch_size
        self.sequences, self.skipped = len(encoded), len(encoded.report.skipped)
        self.target_count = len(encoded)

    def __len__(self) -> int:
        return -(-self.sequences // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.sequences, self.batch_size):
            rows = [[index] if index < self.sequences else [] for index in range(start, start + self.batch_size)]
            ids = np.array([[items[0], 0] if items else [-1, -1] for items in rows], np.int64)
            pairs = [self._source.row(items) for items in rows]
            yield lay_out(pairs, self._source.width, ids, "held_out_preferences", segmented=True)


def _refuse_pairs(who: str, encoded: EncodedSet) -> None:
    if isinstance(encoded.items[0], tuple):
        raise DataError(f"{who}: examples of encode_examples are required; got preferences; use PreferenceSource")
