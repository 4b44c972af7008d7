"""Byte-pair encoding by its definition: recount everything after every merge. Slow, and obviously right."""

import itertools
from collections import Counter
from collections.abc import Iterable

Merge = tuple[int, int, int]


def pair_counts(sequence: list[int], weight: int = 1) -> Counter[tuple[int, int]]:
    """How often each adjacent pair stands in the sequence, overlapping places included, times `weight`."""
    counts: Counter[tuple[int, int]] = Counter()
    for left, right in itertools.pairwise(sequence):
        counts[left, right] += weight
    return counts


def replace(sequence: list[int], left: int, right: int, new: int) -> list[int]:
    """The sequence with (left, right) replaced by `new`, from left to right without overlap."""
    result: list[int] = []
    index = 0
    while index < len(sequence):
        if sequence[index : index + 2] == [left, right]:
            result.append(new)
            index += 2
        else:
            result.append(sequence[index])
            index += 1
    return result


def train(
    chunks: Iterable[bytes], vocab_size: int, min_frequency: int, *, unique_pieces: bool = False
) -> tuple[Merge, ...]:
    """Merges learned from chunks (one chunk: no splitting).

    Each round takes the pair with the highest count, of those the smallest (left id, right id). With
    `unique_pieces`, a pair whose bytes are already a token's is never taken.
    """
    sequences = [list(chunk) for chunk in chunks]
    pieces = [bytes([byte]) for byte in range(256)]
    merges: list[Merge] = []
    while len(pieces) < vocab_size:
        counts: Counter[tuple[int, int]] = Counter()
        for sequence in sequences:
            counts += pair_counts(sequence)
        candidates = [
            (-count, pair)
            for pair, count in counts.items()
            if count >= min_frequency and not (unique_pieces and pieces[pair[0]] + pieces[pair[1]] in pieces)
        ]
        if not candidates:
            break
        left, right = min(candidates)[1]
        merges.append((left, right, len(pieces)))
        sequences = [replace(sequence, *merges[-1]) for sequence in sequences]
        pieces.append(pieces[left] + pieces[right])
    return tuple(merges)


def encode(data: bytes, merges: Iterable[Merge]) -> list[int]:
    """Every merge in the order learned, each over the whole sequence."""
    sequence = list(data)
    for left, right, new in merges:
        sequence = replace(sequence, left, right, new)
    return sequence


def encode_lowest_first(ids: list[int], merges: Iterable[Merge]) -> list[int]:
    """One merge at a time: the earliest-learned pair that stands, at its leftmost place (any list of merges)."""
    order = {(left, right): (rank, new) for rank, (left, right, new) in enumerate(merges)}
    sequence = list(ids)
    while True:
        standing = [
            (order[pair][0], index, order[pair][1])
            for index, pair in enumerate(itertools.pairwise(sequence))
            if pair in order
        ]
        if not standing:
            return sequence
        _, index, new = min(standing)
        sequence[index : index + 2] = [new]


def decode(ids: Iterable[int], merges: Iterable[Merge]) -> bytes:
    """The bytes that the ids stand for."""
    pieces = [bytes([byte]) for byte in range(256)]
    for left, right, _ in merges:
        pieces.append(pieces[left] + pieces[right])
    return b"".join(pieces[id] for id in ids)
