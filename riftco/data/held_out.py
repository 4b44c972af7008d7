"""The exhaustive held-out walk: every target after the first of every sequence, scored exactly once."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from riftco.data._checks import positive_integer
from riftco.data.tokens import Tokens, as_id_array
from riftco.data.windows import Batch
from riftco.errors import DataError

_KIND = "held_out"


@dataclass(frozen=True, eq=False)
class EvaluationWindows:
    """The chunks of a held-out split in the order they are scored; iterate for batches, as often as you like.

    Attributes:
        context: T, the most targets in a chunk.
        batch_size: B, the most chunks in a batch.
        padded: every batch is [B, T] with weights; else every batch holds chunks of one width, without weights.
        sequences: how many were kept.
        skipped: how many had fewer than two tokens, so nothing to score.
        target_count: targets scored in one walk.
    """

    context: int
    batch_size: int
    padded: bool
    sequences: int
    skipped: int
    target_count: int
    _tokens: Tokens
    _starts: np.ndarray  # int64[C], chunk's first input in _tokens
    _widths: np.ndarray  # int64[C], its targets
    _ids: np.ndarray  # int64[C, 2], sequence and start in it
    _batches: tuple[tuple[int, int], ...]  # first chunk and chunk after the last of every batch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        cut = self._padded if self.padded else self._equal
        return (cut(slice(*bounds)) for bounds in self._batches)

    def _equal(self, chunks: slice) -> Batch:
        width = int(self._widths[chunks][0])
        rows = self._tokens.gather(self._starts[chunks, None] + np.arange(width + 1))  # (b, width + 1)
        inputs, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
        return Batch(inputs, targets, ids=self._ids[chunks], source=_KIND)

    def _padded(self, chunks: slice) -> Batch:
        starts, widths = self._starts[chunks], self._widths[chunks]
        place = np.arange(self.context + 1)
        rows = self._tokens.gather(np.where(place <= widths[:, None], starts[:, None] + place, 0))  # (b, T + 1)
        counted = place[:-1] < widths[:, None]  # (b, T)
        shape = (self.batch_size, self.context)
        tokens, targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        ids = np.full((self.batch_size, 2), -1, np.int64)
        filled = slice(len(starts))
        tokens[filled], targets[filled] = np.where(counted, rows[:, :-1], 0), np.where(counted, rows[:, 1:], 0)
        weights[filled], ids[filled] = counted, self._ids[chunks]
        return Batch(tokens, targets, weights, ids, _KIND)


def evaluation_windows(tokens: Any, context: int, batch_size: int, *, padded: bool = False) -> EvaluationWindows:
    """Cut held-out tokens into chunks of at most `context` targets, consecutive chunks sharing one token.

    A chunk's inputs start at the last target of the chunk before, so each target after a sequence's first token is
    scored once, with whatever of its chunk comes before it as context.

    Args:
        tokens: one row of ids (`Tokens`, array, list of ints) or a sequence of such rows; chunks never cross rows.
        context: T >= 1.
        batch_size: B >= 1.
        padded: False: batches hold chunks of one width, widest first, so one row gives at most two widths and no
            weights. True: every batch is [B, T], chunks in order, filled up with token 0 and weight 0, so that a
            jitted evaluation sees one shape.

    Raises:
        DataError: no row has two tokens, or one is not a row of ids.  ConfigError: a bad option.
    """
    who = "evaluation_windows"
    context, batch_size = positive_integer(who, "context", context), positive_integer(who, "batch_size", batch_size)
    store, lengths = _store(who, tokens)
    kept = np.flatnonzero(lengths >= 2)
    if not len(kept):
        raise DataError(f"{who}: a sequence of at least 2 tokens is required; got none; give more held-out text")
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])[kept]
    targets = lengths[kept] - 1
    chunks = -(-targets // context)  # chunks of each sequence, rounded up
    owner = np.repeat(np.arange(len(kept)), chunks)
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(chunks) - chunks, chunks)  # chunk's place in its sequence
    inside = rank * context
    widths = np.minimum(context, targets[owner] - inside)
    order = np.arange(len(owner)) if padded else np.argsort(-widths, kind="stable")
    widths = widths[order]
    return EvaluationWindows(
        context=context,
        batch_size=batch_size,
        padded=padded,
        sequences=len(kept),
        skipped=len(lengths) - len(kept),
        target_count=int(targets.sum()),
        _tokens=store,
        _starts=(offsets[owner] + inside)[order],
        _widths=widths,
        _ids=np.stack([kept[owner], inside], axis=1)[order],
        _batches=_group(widths, batch_size, padded),
    )


def _store(who: str, tokens: Any) -> tuple[Tokens, np.ndarray]:
    """The ids in one store, and the length of every sequence in it (int64)."""
    if isinstance(tokens, Tokens):
        return tokens, np.array([len(tokens)])
    is_one_row = tokens.ndim == 1 if isinstance(tokens, np.ndarray) else not len(tokens) or np.ndim(tokens[0]) == 0
    rows: Any = [tokens] if is_one_row else tokens
    arrays = [as_id_array(f"{who}: sequence {index}", row) for index, row in enumerate(rows)]
    store = Tokens([np.concatenate(arrays)] if len(arrays) > 1 else arrays)
    return store, np.array([len(array) for array in arrays], np.int64)


def _group(widths: np.ndarray, batch_size: int, padded: bool) -> tuple[tuple[int, int], ...]:
    """Bounds of batches of at most `batch_size` chunks; where not padded, of equal (here adjacent) widths."""
    edges = [0, len(widths)] if padded else [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(widths)]
    return tuple(
        (start, min(start + batch_size, stop))
        for first, stop in itertools.pairwise(edges)
        for start in range(first, stop, batch_size)
    )
