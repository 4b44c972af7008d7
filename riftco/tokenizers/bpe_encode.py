"""Applying learned merges: always the earliest-learned pair that stands, leftmost first.

Three ways give the same ids. A short chunk keeps its pairs' ranks in a list and lets `min` and `index` find
the next. A long one takes all places of the earliest pair at once (`Chain`), which is right whenever a merge
can only make pairs that were learned later: true of every trained list of merges. Foreign lists need not be
like that, and fall back on a heap of (rank, place). None is quadratic, none recurses.

For merges that were trained without chunks this is also what "every merge in the order learned, over the
whole sequence" gives: when the earliest standing pair is merged, no pair learned before it can appear.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from riftco.tokenizers.chain import GONE, Chain, group

_SHORT = 256  # tokens; below this the list is faster than NumPy's per-call cost
_NEVER = 1 << 62


class Merger:
    """Merges for sequences of ids.

    Args:
        merges: (left, right, id) in the order learned; no pair twice.

    Attributes:
        is_ordered: no merge can make a pair that was learned before it.
    """

    def __init__(self, merges: Sequence[tuple[int, int, int]]) -> None:
        self._rank = {left << 32 | right: rank for rank, (left, right, _) in enumerate(merges)}
        self._result = [id for _, _, id in merges]
        self._pairs = [(left, right) for left, right, _ in merges]
        last_made = {id: rank for rank, id in enumerate(self._result)}
        self.is_ordered = all(
            last_made.get(left, -1) < rank and last_made.get(right, -1) < rank
            for rank, (left, right, _) in enumerate(merges)
        )
        keys = np.fromiter(self._rank, np.int64, len(self._rank))
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def merge(self, ids: list[int]) -> list[int]:
        """The ids after every merge that applies; `ids` may be changed in place."""
        if len(ids) <= _SHORT:
            return self._merge_short(ids)
        return self._merge_ordered(ids) if self.is_ordered else self._merge_heap(ids)

    def _merge_short(self, ids: list[int]) -> list[int]:
        rank_of = self._rank.get
        ranks = [rank_of(left << 32 | right, _NEVER) for left, right in itertools.pairwise(ids)]
        while ranks:
            rank = min(ranks)
            if rank == _NEVER:
                break
            at = ranks.index(rank)
            new = self._result[rank]
            ids[at : at + 2] = [new]
            del ranks[at]
            if at:
                ranks[at - 1] = rank_of(ids[at - 1] << 32 | new, _NEVER)
            if at < len(ranks):
                ranks[at] = rank_of(new << 32 | ids[at + 1], _NEVER)
        return ids

    def _ranks(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank of each packed pair, −1 for a pair that no merge joins."""
        if not len(self._keys):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._order[at], -1)

    def _merge_ordered(self, ids: list[int]) -> list[int]:
        chain = Chain(np.asarray(ids, np.int64), np.array([len(ids)]))
        waiting: dict[int, list[NDArray[np.int64]]] = {}
        heap: list[int] = []

        def wait(keys: NDArray[np.int64], places: NDArray[np.int64]) -> None:
            ranks = self._ranks(keys)
            found = ranks >= 0
            if not found.any():
                return
            ranks, places = ranks[found], places[found]
            order, starts, distinct = group(ranks)
            for rank, part in zip(distinct.tolist(), np.split(places[order], starts[1:]), strict=True):
                if rank not in waiting:
                    waiting[rank] = []
                    heapq.heappush(heap, rank)
                waiting[rank].append(part)

        places, keys = chain.pairs()
        wait(keys, places)
        while heap:
            rank = heapq.heappop(heap)
            batches = waiting.pop(rank)
            # Two merges can make one token in a foreign list, so a pair's places may arrive in several batches.
            places = batches[0] if len(batches) == 1 else np.unique(np.concatenate(batches))
            (left, right), new = self._pairs[rank], self._result[rank]
            places = chain.standing(places, left, right)
            if len(places):
                on_left, on_right = chain.merge(places, left, right, new)
                wait(chain.tokens[on_left] << 32 | new, on_left)
                wait((new << 32) + chain.tokens[chain.after[on_right]], on_right)
        return chain.tokens[chain.tokens != GONE].tolist()

    def _merge_heap(self, ids: list[int]) -> list[int]:
        size = len(ids)
        after = list(range(1, size + 1))
        before = list(range(-1, size - 1))
        rank_of = self._rank.get
        heap = [
            (rank, place) for place in range(size - 1) if (rank := rank_of(ids[place] << 32 | ids[place + 1], -1)) >= 0
        ]
        heapq.heapify(heap)
        while heap:
            rank, place = heapq.heappop(heap)
            gone = after[place]
            if gone >= size or self._pairs[rank] != (ids[place], ids[gone]):
                continue
            new = self._result[rank]
            following, preceding = after[gone], before[place]
            ids[place], ids[gone] = new, GONE
            after[place] = following
            if following < size:
                before[following] = place
                if (rank := rank_of(new << 32 | ids[following], -1)) >= 0:
                    heapq.heappush(heap, (rank, place))
            if preceding >= 0 and (rank := rank_of(ids[preceding] << 32 | new, -1)) >= 0:
                heapq.heappush(heap, (rank, preceding))
        return [id for id in ids if id != GONE]


class ChunkCache(dict[str, bytes]):
    """Chunk -> its ids as raw bytes; a miss encodes the chunk, and a full cache starts over.

    Raw bytes make the encoding of a text one `bytes.join` of look-ups, with no Python code per chunk.

    Args:
        encode: chunk -> raw ids.
        entries: how many chunks are kept; longer ones than 256 characters never are.
    """

    def __init__(self, encode: Callable[[str], bytes], entries: int = 1 << 17) -> None:
        super().__init__()
        self._encode = encode
        self._entries = entries

    def __missing__(self, chunk: str) -> bytes:
        ids = self._encode(chunk)
        if len(chunk) <= 256:
            if len(self) >= self._entries:
                self.clear()
            self[chunk] = ids
        return ids
