"""Exact ranks of the unfoldings of a sparse tensor, by elimination over fractions."""

from fractions import Fraction

import numpy as np


def rank(indices: np.ndarray, values: np.ndarray, axis: int) -> int:
    """The rank over the rationals of the matrix whose rows are the slices along an axis.

    Args:
        indices: int64[N, axes], places of the non-zero values.
        values: [N] integers, bools, fractions or floats, each taken exactly.
        axis: which axis numbers the rows.
    """
    places = np.delete(indices, axis, axis=1)
    columns = (
        np.unique(places, axis=0, return_inverse=True)[1].reshape(-1) if places.shape[1] else np.zeros(len(values), int)
    )
    rows: dict[int, dict[int, Fraction]] = {}
    for row, column, value in zip(indices[:, axis].tolist(), columns.tolist(), values.tolist(), strict=True):
        rows.setdefault(row, {})[column] = Fraction(value)
    distinct = {tuple(sorted(row.items())): row for row in rows.values()}
    pivots: dict[int, dict[int, Fraction]] = {}
    for row in distinct.values():
        left = dict(row)
        while left:
            column = min(left)
            pivot = pivots.get(column)
            if pivot is None:
                pivots[column] = {place: value / left[column] for place, value in left.items()}
                break
            factor = left[column]
            for place, value in pivot.items():
                changed = left.get(place, Fraction(0)) - factor * value
                if changed:
                    left[place] = changed
                else:
                    left.pop(place, None)
    return len(pivots)
