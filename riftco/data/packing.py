"""Several examples in a row: which go together, and the arrays that keep them apart.

An example of n tokens takes n - 1 places: its last token is a target and never an input, so no target belongs to
another example. Each has a segment id of its own from 1, and positions from 0; places that are left over have segment
0, weight 0.
"""

from collections.abc import Sequence

import numpy as np

from riftco.data.sft import Encoded
from riftco.data.windows import Batch
from riftco.errors import DataError


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """int64[count], an order of 0 .. count-1 that (seed, epoch) decides: raw Philox words, sorted.

    Raw words of a bit generator are stable across NumPy versions, its higher-level draws are not.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices: each size goes to the first bin that has room for it, or to a new one.

    Args:
        sizes: at least 1 each, in the order in which they are placed.
        capacity: of every bin.

    Returns:
        The bins in the order in which they were opened, their indices ascending. O(n log n).

    Raises:
        DataError: a size is larger than the capacity.

    Source:
        Johnson 1973, Near-optimal bin packing algorithms: at most 1.7 times as many bins as needed, asymptotically.
    """
    if not len(sizes):
        return []
    if max(sizes) > capacity:
        raise DataError(f"packing: an example must fit a row of {capacity} tokens; one has {max(sizes)}; truncate it")
    leaves = 1 << (len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # a tree: the most room of any bin below a node; bin i is leaf i
    bins: list[list[int]] = []
    for index, size in enumerate(sizes):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        place = node - leaves
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def inputs(example: Encoded) -> int:
    """How many places of a row an example takes."""
    return len(example.ids) - 1


def lay_out(rows: Sequence[Sequence[Encoded]], width: int, ids: np.ndarray, source: str, *, segmented: bool) -> Batch:
    """A batch whose rows hold examples one after another.

    Args:
        rows: the examples of each of B rows; a row may have none.
        width: T.
        ids: int64[B, 2], for `Batch.ids`.
        source: the kind of source.
        segmented: give segment ids and positions; without them a row has one example at most.
    """
    shape = (len(rows), width)
    tokens, targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, examples in enumerate(rows):
        start = 0
        for segment, example in enumerate(examples, start=1):
            stop = start + inputs(example)
            tokens[row, start:stop], targets[row, start:stop] = example.ids[:-1], example.ids[1:]
            weights[row, start:stop] = example.weights[1:]
            segments[row, start:stop], positions[row, start:stop] = segment, np.arange(stop - start)
            start = stop
    if not segmented:
        return Batch(tokens, targets, weights, ids, source)
    return Batch(tokens, targets, weights, ids, source, segment_ids=segments, positions=positions)
