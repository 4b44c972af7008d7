"""A sequence of token ids as a linked list in arrays, where one pair is merged at all its places at once.

Training and the encoding of long chunks are the same motion: find where (left, right) still stands, put one
token in its place, and learn which pairs that made. Here that motion costs a handful of NumPy calls however
many places there are.
"""

import numpy as np
from numpy.typing import NDArray

GONE = -1
"""In `tokens`: the place was merged away, or is a border between chunks. No pair includes it."""


def pack(left: int, right: int) -> int:
    """A pair as one integer whose order is the lexicographic order of pairs; ids are below 2**31."""
    return left << 32 | right


class Chain:
    """Chunks of token ids, with borders between them.

    Args:
        tokens: [N] ids; the chunks one after the other.
        lengths: [C] how many tokens each chunk has; they sum to N.

    Attributes:
        tokens: int64[N + C + 1]; `GONE` at borders (the first and last place are borders) and at merged places.
        after, before: the neighbouring places still standing.
        chunk: int64[N], the chunk of each token as given; place = index + chunk + 1.
    """

    def __init__(self, tokens: NDArray[np.integer], lengths: NDArray[np.integer]) -> None:
        size = len(tokens) + len(lengths) + 1
        self.chunk = np.repeat(np.arange(len(lengths)), lengths)
        self.places = np.arange(len(tokens)) + self.chunk + 1
        self.tokens = np.full(size, GONE, np.int64)
        self.tokens[self.places] = tokens
        self.after = np.arange(1, size + 1)
        self.before = np.arange(-1, size - 1)

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every adjacent pair, overlapping ones too: (places of the left token, packed pairs)."""
        left, right = self.tokens[:-1], self.tokens[1:]
        places = np.flatnonzero((left >= 0) & (right >= 0))
        return places, left[places] << 32 | right[places]

    def standing(self, places: NDArray[np.int64], left: int, right: int) -> NDArray[np.int64]:
        """Those of `places` where the pair (left, right) still stands."""
        places = places[self.tokens[places] == left]
        return places[self.tokens[self.after[places]] == right]

    def merge(self, places: NDArray[np.int64], left: int, right: int, new: int) -> tuple[NDArray, NDArray]:
        """Replace (left, right) by `new` at the standing, ascending `places`; overlaps go to the leftmost.

        Returns:
            Places where pairs (x, new) with x != new now stand, and places where pairs (new, y) do; ascending.
        """
        if left == right:
            places = places[_every_other(places, self.after[places])]
        gone = self.after[places]
        following = self.after[gone]
        self.tokens[places] = new
        self.tokens[gone] = GONE
        self.after[places] = following
        self.before[following] = places
        preceding = self.before[places]
        before = self.tokens[preceding]
        return preceding[(before >= 0) & (before != new)], places[self.tokens[following] >= 0]


def _every_other(places: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which places a left-to-right, non-overlapping replacement of (a, a) takes: every other one of each run."""
    index = np.arange(len(places))
    begins = np.ones(len(places), bool)
    begins[1:] = after[:-1] != places[1:]
    return (index - np.maximum.accumulate(np.where(begins, index, 0))) % 2 == 0


def group(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sort equal values together: (order, starts into the order, the distinct values ascending).

    `values` holds at least one. The order is stable, so indices within a group ascend.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return order, starts, ordered[starts]
