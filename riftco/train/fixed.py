"""A source over batches that are given: the same ones, round and round."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from riftco.data import Batch
from riftco.data.sources import Rows, SeekableSource, row_slice
from riftco.errors import DataError


class FixedBatchSource(SeekableSource):
    """Batches in the order given, from the first again after the last; one batch makes a model learn it by heart.

    Args:
        batches: at least one, all with as many rows.

    Raises:
        DataError: no batch, or batches of different sizes.
    """

    kind = "fixed"

    def __init__(self, batches: Sequence[Batch]) -> None:
        if not batches or len({len(batch.tokens) for batch in batches}) > 1:
            raise DataError("FixedBatchSource: batches of one number of rows are required; got none, or several sizes")
        self._batches = tuple(batches)
        self.batches_emitted = 0
        hasher = hashlib.sha256(b"riftco fixed 1\0")
        for batch in self._batches:
            for array in batch.arrays().values():
                if array is not None:
                    hasher.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        self.fingerprint = hasher.hexdigest()

    def batch(self, step: int, rows: Rows | None = None) -> Batch:
        """The batch of `step`, or rows start .. stop-1 of it."""
        whole = self._batches[step % len(self._batches)]
        part = row_slice(rows, len(whole.tokens))
        cut = {name: array[part] for name, array in whole.arrays().items() if array is not None}
        return dataclasses.replace(whole, **cut, ids=None if whole.ids is None else whole.ids[part])
