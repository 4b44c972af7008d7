"""What the coefficients of a map are: counts, truth values, probabilities or floats; and their exact arithmetic.

Counts are int64 while they provably fit and Python integers beyond; probabilities are fractions. Nothing is rounded.
"""

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np

from riftco.cajal.diagnostics import CajalLoweringError


@dataclasses.dataclass(frozen=True)
class Semiring:
    """A commutative semiring.

    Attributes:
        name: what `compile` calls it.
        dtype: of its arrays; counts that outgrow int64 are held as objects.
        one: its 1.
        weighted: whether `<p/q>` has a meaning in it; where it has, plain `<|>` has none.
    """

    name: str
    dtype: np.dtype[Any]
    one: Any
    weighted: bool = False

    def ones(self, count: int) -> np.ndarray:
        """An array of 1s."""
        return np.full(count, self.one, self.dtype)


SEMIRINGS = {
    semiring.name: semiring
    for semiring in (
        Semiring("natural", np.dtype(np.int64), 1),
        Semiring("boolean", np.dtype(bool), True),
        Semiring("probability", np.dtype(object), Fraction(1), weighted=True),
        Semiring("float", np.dtype(np.float64), 1.0),
    )
}


def named(name: str) -> Semiring:
    """The semiring of a name.

    Raises:
        CajalLoweringError: there is none.
    """
    if name not in SEMIRINGS:
        raise CajalLoweringError(f"cajal.compile: semiring must be one of {', '.join(SEMIRINGS)}; got {name!r}")
    return SEMIRINGS[name]


def multiply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Elementwise products; bools multiply by `and`."""
    if left.dtype == np.int64 and right.dtype == np.int64 and left.size and _most(left) * _most(right) >= 2**63:
        left = left.astype(object)
    return left * right


def add_groups(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The sum of each run of values that begins at one of the starts; bools add by `or`."""
    if values.dtype == bool:
        return np.logical_or.reduceat(values, starts)
    if values.dtype == np.int64 and _most(values) * int(np.diff(starts, append=len(values)).max()) >= 2**63:
        values = values.astype(object)
    return np.add.reduceat(values, starts)


def _most(values: np.ndarray) -> int:
    return max(abs(int(values.max())), abs(int(values.min())))
