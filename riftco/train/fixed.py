"""A source over batches that are given: the same ones, round and round."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from riftco.data import Batch
from riftco.data.sources import Rows, check_state, row_slice
from riftco.errors import DataError


class FixedBatchSource:
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
            for array in (batch.tokens, batch.targets, batch.weights):
                if array is not None:
                    hasher.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        self.fingerprint = hasher.hexdigest()

    def batch(self, step: int, rows: Rows | None = None) -> Batch:
        """The batch of `step`, or rows start .. stop-1 of it."""
        whole = self._batches[step % len(self._batches)]
        part = row_slice(rows, len(whole.tokens))
        cut = lambda array: None if array is None else array[part]
        return Batch(whole.tokens[part], whole.targets[part], cut(whole.weights), cut(whole.ids), whole.source)

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
