"""What a batch is, and how windows of T tokens with targets shifted by one are cut from a long row."""

from dataclasses import dataclass

import numpy as np

from riftco.data.tokens import Tokens
from riftco.errors import DataError, ShapeError


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of T tokens with their targets; arrays that nothing else writes to.

    Attributes:
        tokens: int32[B, T], the input ids.
        targets: int32[B, T], the id that follows each input.
        weights: float32[B, T], 1 where a target counts and 0 where it does not; None when all count.
        ids: int64[B, 2], for every row the sequence it was cut from and its start there; -1 for a row of padding.
        source: the kind of source that made it.
        segment_ids: int32[B, T], which of several texts in a row a token belongs to, from 1; 0 for padding; None when a
            row is one text.
        positions: int32[B, T], a token's place in its text; None for 0 .. T-1.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None = None
    ids: np.ndarray | None = None
    source: str = "batch"
    segment_ids: np.ndarray | None = None
    positions: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, array in self.arrays().items():
            if array is not None and array.shape != self.tokens.shape:
                raise ShapeError(f"Batch: {name} must have the shape of tokens, {self.tokens.shape}; got {array.shape}")
        if self.tokens.ndim != 2 or self.tokens.size == 0:
            raise ShapeError(f"Batch: tokens must be [B, T] with B, T >= 1; got shape {self.tokens.shape}")

    def arrays(self) -> dict[str, np.ndarray | None]:
        """What a step computes on, by name; None for what the batch does not have."""
        return {name: getattr(self, name) for name in ("tokens", "targets", "weights", "segment_ids", "positions")}

    @property
    def target_count(self) -> int:
        """How many targets count."""
        return self.targets.size if self.weights is None else int(np.count_nonzero(self.weights))

    def byte_count(self, byte_lengths: np.ndarray) -> int:
        """UTF-8 bytes of the targets that count, from `token_byte_lengths(tokenizer)`."""
        lengths = byte_lengths[self.targets]
        return int(lengths.sum() if self.weights is None else lengths[self.weights > 0].sum())

    def describe(self, limit: int = 8) -> str:
        """One line for an error message: the source and where its first rows were cut, as sequence:start."""
        if self.ids is None:
            return f"{self.source} of {len(self.tokens)} rows"
        rows = ", ".join(f"{sequence}:{start}" for sequence, start in self.ids[:limit].tolist())
        more = f" and {len(self.ids) - limit} more" if len(self.ids) > limit else ""
        return f"{self.source} rows {rows}{more}"


def require_window(who: str, count: int, context: int) -> None:
    """Raise DataError unless `count` tokens hold one window of `context` inputs and a target each."""
    if count <= context:
        raise DataError(
            f"{who}: at least {context + 1} tokens (context + 1) are required; got {count}; "
            "give more text or a shorter context"
        )


def cut_windows(tokens: Tokens, starts: np.ndarray, context: int, ids: np.ndarray, source: str) -> Batch:
    """The windows of `context` tokens at `starts` (int64[B], each at most N - context - 1) as a batch."""
    rows = tokens.gather(starts[:, None] + np.arange(context + 1))  # (B, T + 1)
    return Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), ids=ids, source=source)
