"""Learning byte-pair merges from counts that are updated, not recounted.

Why this is exact: a pair gains places only in the step that makes the younger of its two tokens, and loses
places ever after. So each pair has one list of places and one count, both known when it appears and upper
bounds from then on. A heap gives the largest bound; if looking at the places finds fewer standing, the pair
goes back with its true count. The first bound that proves true is the largest count there is.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from riftco.tokenizers.bpe_checks import Merge
from riftco.tokenizers.chain import Chain, group, pack


def learn_merges(
    chunks: Iterable[tuple[bytes, int]],
    limit: int,
    min_frequency: int,
    *,
    unique_pieces: bool,
    reserved: Collection[bytes] = (),
) -> tuple[Merge, ...]:
    """The merges that byte-pair encoding learns from weighted chunks.

    Each round takes the pair with the highest count (every adjacent place counts, overlapping ones too, times
    the weight of its chunk), ties going to the smallest (left id, right id), and replaces it left to right.

    Args:
        chunks: (bytes, weight >= 1) pairs; merges stay inside a chunk. Ids 0..255 are the byte values.
        limit: at most so many merges.
        min_frequency: stop when the highest count is below this; >= 1.
        unique_pieces: pass over a pair whose bytes are already those of a token, so that no two ids mean the same.
        reserved: pieces that are never learned, because special tokens spell them.

    Returns:
        Merges with ids 256, 257, … in the order learned.
    """
    pieces, weights = [], []
    for piece, weight in chunks:
        pieces.append(piece)
        weights.append(weight)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    chain = Chain(np.frombuffer(b"".join(pieces), np.uint8), lengths)
    weight_at = np.zeros(len(chain.tokens), np.int64)
    weight_at[chain.places] = np.asarray(weights, np.int64)[chain.chunk]
    places_of: dict[int, NDArray[np.int64]] = {}
    heap: list[tuple[int, int]] = []

    def remember(keys: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """File new pairs; a count never rises later, so a pair below min_frequency can be forgotten at once."""
        if not len(keys):
            return
        order, starts, distinct = group(keys)
        places = places[order]
        counts = np.add.reduceat(weight_at[places], starts)
        enough = np.flatnonzero(counts >= min_frequency)
        stops = np.append(starts[1:], len(places))
        for key, count, start, stop in np.stack((distinct, counts, starts, stops))[:, enough].T.tolist():
            places_of[key] = places[start:stop]
            heapq.heappush(heap, (-count, key))

    places, keys = chain.pairs()
    remember(keys, places)
    spelled: list[bytes] = [bytes([byte]) for byte in range(256)]
    known = {*spelled, *reserved} if unique_pieces else set(reserved)
    merges: list[Merge] = []
    while heap and len(merges) < limit:
        bound, key = heapq.heappop(heap)
        left, right = key >> 32, key & 0xFFFFFFFF
        standing = chain.standing(places_of[key], left, right)
        count = int(weight_at[standing].sum())
        if count < -bound:
            if count >= min_frequency:
                places_of[key] = standing
                heapq.heappush(heap, (-count, key))
            else:
                del places_of[key]
            continue
        del places_of[key]
        if known:
            piece = spelled[left] + spelled[right]
            if piece in known:
                continue
            if unique_pieces:
                known.add(piece)
            spelled.append(piece)
        new = 256 + len(merges)
        merges.append((left, right, new))
        on_left, on_right = chain.merge(standing, left, right, new)
        remember(chain.tokens[on_left] << 32 | new, on_left)
        remember(pack(new, 0) + chain.tokens[chain.after[on_right]], on_right)
    return tuple(merges)


def count_chunks(chunks: Iterable[str]) -> list[tuple[bytes, int]]:
    """Distinct chunks with their counts, in order of first appearance; a lone escaped byte becomes itself again."""
    return [(chunk.encode("utf-8", "surrogateescape"), count) for chunk, count in Counter(chunks).items()]
