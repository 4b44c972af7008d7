"""Sparse coefficients with named axes, and the few ways to combine them that every rule of the compiler is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from riftco.cajal.diagnostics import CajalLoweringError
from riftco.cajal.semirings import add_groups, multiply

MAX_TERMS = 2**22
"""The most coefficients of a table, and the most pairs that a product of two may make."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Non-zero coefficients, one a row, no two at one place.

    Attributes:
        out: int64[N], the output coordinate.
        axes: for each variable int64[N], the coordinate of its input.
        values: [N], the coefficients.
    """

    out: np.ndarray
    axes: Mapping[str, np.ndarray]
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.out)

    def take(self, rows: np.ndarray) -> Table:
        """Some rows."""
        return Table(self.out[rows], {name: axis[rows] for name, axis in self.axes.items()}, self.values[rows])

    def block(self, start: int, stop: int) -> Table:
        """The rows of a block of the output, counted from its start."""
        rows = np.flatnonzero((self.out >= start) & (self.out < stop))
        found = self.take(rows)
        return dataclasses.replace(found, out=found.out - start)

    def shifted(self, offset: int) -> Table:
        """The same rows further down the output."""
        return dataclasses.replace(self, out=self.out + offset)

    def without(self, name: str) -> Table:
        """The rows without an axis, which must not be needed any more to tell them apart."""
        return dataclasses.replace(self, axes={other: axis for other, axis in self.axes.items() if other != name})


def stacked(tables: Sequence[Table], *, merge: bool = True) -> Table:
    """The sum of tables over the same axes; tables that lack an axis must be empty, as what absorbs it is.

    Args:
        tables: the summands.
        merge: whether two of them may have a coefficient at one place.
    """
    names = sorted({name for table in tables for name in table.axes})
    full = [table for table in tables if len(table)]
    if not full:
        none = np.zeros(0, np.int64)
        return Table(none, dict.fromkeys(names, none), tables[0].values[:0])
    assert all(set(table.axes) == set(names) for table in full)
    joined = Table(
        np.concatenate([table.out for table in full]),
        {name: np.concatenate([table.axes[name] for table in full]) for name in names},
        np.concatenate([table.values for table in full]),
    )
    return merged(joined) if merge and len(full) > 1 else joined


def merged(table: Table) -> Table:
    """The table with equal places added up."""
    if len(table) < 2:
        return table
    columns = [table.out, *table.axes.values()]
    order = np.lexsort(columns[::-1])
    ordered = table.take(order)
    fresh = np.zeros(len(table), bool)
    fresh[0] = True
    for column in (ordered.out, *ordered.axes.values()):
        fresh[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(fresh)
    return dataclasses.replace(ordered.take(starts), values=add_groups(ordered.values, starts))


def matches(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of two columns that hold equal numbers, as two arrays of row numbers.

    Raises:
        CajalLoweringError: there are more than `MAX_TERMS`.
    """
    order = np.argsort(right, kind="stable")
    first = np.searchsorted(right[order], left, side="left")
    counts = np.searchsorted(right[order], left, side="right") - first
    total = int(counts.sum())
    if total > MAX_TERMS:
        raise CajalLoweringError(
            f"cajal.compile: a map must have at most {MAX_TERMS} coefficients and products; this one needs {total}; "
            "use its program (`dag`) instead, or make it smaller"
        )
    rows = np.repeat(np.arange(len(left)), counts)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, order[np.repeat(first, counts) + within]


def product(
    left: Table, right: Table, on: tuple[np.ndarray, np.ndarray] | None = None, *, drop: str | None = None
) -> tuple[Table, Table, np.ndarray]:
    """Pairs of rows of two tables with disjoint axes.

    Args:
        left: a table.
        right: another.
        on: a column of each that must agree; None for all pairs.
        drop: an axis of `right` that `on` uses up.

    Returns:
        The rows of either side, and the products of their coefficients.
    """
    keys = (np.zeros(len(left), np.int64), np.zeros(len(right), np.int64)) if on is None else on
    left_rows, right_rows = matches(*keys)
    one = left.take(left_rows)
    other = (right if drop is None else right.without(drop)).take(right_rows)
    return one, other, multiply(one.values, other.values)
