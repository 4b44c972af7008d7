"""Token ids as one long row, held in memory or mapped from shards, that gathers windows without copying the rest."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from riftco.errors import DataError

MAXIMUM_TOKEN_ID = 2**31 - 1
_HASH_CHUNK = 1 << 20


class Tokens:
    """A row of N token ids in one or more parts (shards), indexable as if they were one array.

    Args:
        parts: 1-D arrays of an integer dtype, in order; memory maps stay mapped.
        digest: the SHA-256 of the ids as little-endian uint32, where it is known already.
    """

    def __init__(self, parts: Sequence[np.ndarray], digest: str | None = None) -> None:
        self._parts = tuple(parts)
        self._offsets = np.cumsum([0, *(len(part) for part in parts)])
        self._digest = digest

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """The parts, in order."""
        return self._parts

    def gather(self, index: np.ndarray) -> np.ndarray:
        """The ids at `index` (integers of any shape, each in 0 .. N-1) as int32 of the same shape."""
        if len(self._parts) == 1:
            return self._parts[0][index].astype(np.int32)
        part_of = np.searchsorted(self._offsets, index, side="right") - 1
        out = np.empty(index.shape, np.int32)
        for part in np.unique(part_of):
            here = part_of == part
            out[here] = self._parts[part][index[here] - self._offsets[part]]
        return out

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids of positions start .. stop-1 as int32."""
        return self.gather(np.arange(start, min(stop, len(self))))

    @property
    def digest(self) -> str:
        """The SHA-256 of the ids as little-endian uint32, however they are stored."""
        if self._digest is None:
            hasher = hashlib.sha256()
            for part in self._parts:
                update_digest(hasher, part)
            self._digest = hasher.hexdigest()
        return self._digest


def update_digest(hasher: Any, ids: np.ndarray) -> None:
    """Feed ids to a hash as little-endian uint32, a chunk at a time."""
    for start in range(0, len(ids), _HASH_CHUNK):
        hasher.update(ids[start : start + _HASH_CHUNK].astype("<u4").tobytes())


def as_id_array(who: str, ids: Any) -> np.ndarray:
    """`ids` as a 1-D integer array of at most 4 bytes an id; not copied where it is one already.

    Raises:
        DataError: not one row of integers, or an id outside 0 .. 2^31 - 1.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):
        raise DataError(f"{who}: token ids must be one row of integers; got a ragged or too large sequence") from None
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = ",".join(map(str, array.shape))
        raise DataError(f"{who}: token ids must be one row of integers; got {array.dtype}[{shape}]")
    if array.dtype.itemsize > 2 or array.dtype.kind == "i":
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > MAXIMUM_TOKEN_ID:
            raise DataError(
                f"{who}: token ids must lie in 0 .. {MAXIMUM_TOKEN_ID}; got {low if low < 0 else high}; "
                "check the tokenizer"
            )
    return array.astype(np.int32) if array.dtype.itemsize > 4 else array


def as_tokens(who: str, tokens: Any) -> Tokens:
    """`tokens` as a `Tokens`: one already, or a row of integer ids. Raises DataError."""
    return tokens if isinstance(tokens, Tokens) else Tokens([as_id_array(who, tokens)])
