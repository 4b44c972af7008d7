"""Multilinear maps: sparse coefficients, a program, or both; dense only on request and under a limit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from riftco.cajal import denotation, types
from riftco.cajal.core import Node
from riftco.cajal.diagnostics import CajalEncodingError, CajalLoweringError
from riftco.cajal.ranks import rank

MAX_DENSE = 2**24
"""The most elements that `to_dense` makes unless it is told a limit."""

Coefficients = tuple[np.ndarray, np.ndarray]


class MultilinearMap:
    """A map y[o] = Σ T[o, i1, …, ik] · x1[i1] · … · xk[ik].

    Made by `compile`, `from_dense` or `from_coo`; never changed.

    Attributes:
        input_dimensions: the width of each input.
        output_dimension: the width of the output.
        semiring: "natural", "boolean", "probability" or "float".
        program: the typed DAG that it was compiled from, or None for imported coefficients.
        context: variables and types of the program, in the order of the inputs; None where there is no program.
    """

    def __init__(
        self,
        input_dimensions: Sequence[int],
        output_dimension: int,
        coefficients: Callable[[], Coefficients],
        *,
        semiring: str = "float",
        program: Node | None = None,
        context: tuple[tuple[str, types.Type], ...] | None = None,
    ) -> None:
        self.input_dimensions = tuple(input_dimensions)
        self.output_dimension = output_dimension
        self.semiring, self.program, self.context = semiring, program, context
        self._make = coefficients

    @functools.cached_property
    def _coefficients(self) -> Coefficients:
        indices, values = self._make()
        order = np.lexsort(indices.T[::-1])
        indices, values = indices[order], values[order]
        indices.setflags(write=False)
        values.setflags(write=False)
        return indices, values

    @property
    def shape(self) -> tuple[int, ...]:
        """(output, input 1, …): the shape of the dense array."""
        return (self.output_dimension, *self.input_dimensions)

    @property
    def indices(self) -> np.ndarray:
        """int64[nnz, 1 + inputs]: places of the non-zero coefficients, output first, in lexicographic order."""
        return self._coefficients[0]

    @property
    def values(self) -> np.ndarray:
        """[nnz]: the coefficients, exact: int64 (objects where counts outgrow it), bool, fractions or float64."""
        return self._coefficients[1]

    @property
    def nnz(self) -> int:
        """How many coefficients are not zero."""
        return len(self.values)

    @classmethod
    def from_coo(
        cls, input_dimensions: Sequence[int], output_dimension: int, indices: ArrayLike, values: ArrayLike
    ) -> MultilinearMap:
        """A map from its non-zero coefficients; none at all is the zero map.

        Args:
            input_dimensions: the width of each input.
            output_dimension: the width of the output.
            indices: integers [N, 1 + inputs], output first; or [N], places in the flattened dense array.
            values: [N] integers or floats.

        Raises:
            CajalLoweringError: a dimension below 1, a place twice or out of range, a value that is zero or not finite.
        """
        who = "MultilinearMap.from_coo"
        shape = _shape(who, output_dimension, input_dimensions)
        where, coefficients = np.asarray(indices), np.asarray(values)
        if where.size == 0 and coefficients.size == 0:
            where, coefficients = np.zeros((0, len(shape)), np.int64), coefficients.reshape(0)
        if where.dtype.kind not in "iu":
            raise CajalLoweringError(f"{who}: indices must be integers; got {where.dtype}")
        if where.ndim == 1 and len(where) == coefficients.size:
            _refuse_outside(who, where, math.prod(shape))
            where = np.stack(np.unravel_index(where, shape), axis=1)
        if where.ndim != 2 or where.shape[1] != len(shape) or coefficients.shape != where.shape[:1]:
            raise CajalLoweringError(
                f"{who}: indices must be [N, {len(shape)}] or [N] and values [N]; got {where.shape} and "
                f"{coefficients.shape}"
            )
        for column, width in zip(where.T, shape, strict=True):
            _refuse_outside(who, column, width)
        coefficients = _numbers(who, coefficients)
        if (coefficients == 0).any():
            raise CajalLoweringError(f"{who}: values must not be zero; leave those places out")
        where = where.astype(np.int64)
        if len(np.unique(where, axis=0)) != len(where):
            raise CajalLoweringError(f"{who}: every place must be given once; one is there twice; add its values up")
        return cls(shape[1:], shape[0], lambda: (where, coefficients))

    @classmethod
    def from_dense(cls, array: ArrayLike) -> MultilinearMap:
        """A map from its dense array [output, input 1, …].

        Raises:
            CajalLoweringError: no axis, an empty axis, or a value that is not finite.
        """
        who = "MultilinearMap.from_dense"
        dense = np.asarray(array)
        if dense.ndim == 0:
            raise CajalLoweringError(f"{who}: the array must have an axis for the output; got a scalar")
        shape = _shape(who, dense.shape[0], dense.shape[1:])
        dense = _numbers(who, dense)
        where = np.argwhere(dense).astype(np.int64)
        coefficients = dense[tuple(where.T)]
        return cls(shape[1:], shape[0], lambda: (where, coefficients))

    def to_dense(self, limit: int = MAX_DENSE) -> np.ndarray:
        """The dense array [output, input 1, …]; fractions become float64, other values stay as they are.

        Raises:
            CajalLoweringError: it would have more than `limit` elements.
        """
        if (size := math.prod(self.shape)) > limit:
            raise CajalLoweringError(
                f"MultilinearMap.to_dense: at most {limit} elements are allowed; {self.shape} has {size}; pass limit="
            )
        values = self.values.astype(np.float64) if self.semiring == "probability" else self.values
        dense = np.zeros(self.shape, values.dtype)
        dense[tuple(self.indices.T)] = values
        return dense

    def apply(self, *vectors: ArrayLike) -> np.ndarray:
        """The map at a vector for each input; by its program where it has one, else by its coefficients.

        Args:
            *vectors: finite, one of each input's width.

        Returns:
            float64[output_dimension], or bool in the boolean semiring, where any non-zero counts as true.

        Raises:
            CajalEncodingError: a wrong number of vectors, a wrong width, or a value that is not finite.
        """
        if len(vectors) != len(self.input_dimensions):
            raise CajalEncodingError(
                f"MultilinearMap.apply: {len(self.input_dimensions)} vectors are required; got {len(vectors)}"
            )
        arrays = [np.asarray(vector, np.float64) for vector in vectors]
        for number, (array, width) in enumerate(zip(arrays, self.input_dimensions, strict=True)):
            if array.shape != (width,) or not np.isfinite(array).all():
                raise CajalEncodingError(
                    f"MultilinearMap.apply: vector {number} must be finite of shape {(width,)}; it has {array.shape}"
                )
        if self.semiring == "boolean":
            arrays = [(array != 0).astype(np.float64) for array in arrays]
        if self.program is not None and self.context is not None:
            inputs = {name: array for (name, _), array in zip(self.context, arrays, strict=True)}
            found = denotation.at(self.program, inputs, boolean=self.semiring == "boolean")
        else:
            terms = self.values.astype(np.float64)
            for axis, array in enumerate(arrays):
                terms = terms * array[self.indices[:, axis + 1]]
            found = np.bincount(self.indices[:, 0], weights=terms, minlength=self.output_dimension)
        return found != 0 if self.semiring == "boolean" else found

    def blocks(self, axis: int) -> list[tuple[np.ndarray, MultilinearMap]]:
        """Coordinates of one input that have equal slices, with that slice as a map of the other inputs.

        The map is Σ over blocks of (the sum of the input over the block's coordinates) × the block's map.

        Args:
            axis: the input, from 0.

        Returns:
            Pairs (int64 coordinates, map), in the order of their first coordinates; zero slices are left out.
        """
        if not 0 <= axis < len(self.input_dimensions):
            raise CajalLoweringError(
                f"MultilinearMap.blocks: axis must be below {len(self.input_dimensions)}; got {axis}"
            )
        rest = np.delete(self.indices, axis + 1, axis=1)
        grouped: dict[tuple[bytes, tuple[Any, ...]], list[int]] = {}
        first: dict[tuple[bytes, tuple[Any, ...]], Coefficients] = {}
        column = self.indices[:, axis + 1]
        for coordinate in np.unique(column):
            rows = np.flatnonzero(column == coordinate)
            key = rest[rows].tobytes(), tuple(self.values[rows].tolist())
            grouped.setdefault(key, []).append(int(coordinate))
            first.setdefault(key, (rest[rows], self.values[rows]))
        widths = self.input_dimensions[:axis] + self.input_dimensions[axis + 1 :]
        found = []
        for key, coordinates in grouped.items():
            part = first[key]
            inner = MultilinearMap(widths, self.output_dimension, lambda part=part: part, semiring=self.semiring)
            found.append((np.array(coordinates, np.int64), inner))
        return found

    def factors(self, limit: int = MAX_DENSE) -> tuple[np.ndarray, ...]:
        """The map as a sum of products, one for each coefficient: y = Σ over r of c[r] · (a1[r] · x1) · … .

        Args:
            limit: the most elements of one factor.

        Returns:
            A matrix [nnz, width] for each axis, output first; the output's rows hold the coefficients, the others 1s.

        Raises:
            CajalLoweringError: a factor would have more than `limit` elements.
        """
        if (size := self.nnz * max(self.shape)) > limit:
            raise CajalLoweringError(
                f"MultilinearMap.factors: at most {limit} elements are allowed; {size} are needed; pass limit="
            )
        found = []
        for axis, width in enumerate(self.shape):
            factor = np.zeros((self.nnz, width), self.values.dtype)
            factor[np.arange(self.nnz), self.indices[:, axis]] = 1 if axis else self.values
            found.append(factor)
        return tuple(found)

    def mode_ranks(self) -> tuple[int, ...]:
        """The exact rank of the unfolding along each axis, output first."""
        return tuple(rank(self.indices, self.values, axis) for axis in range(len(self.shape)))

    def __repr__(self) -> str:
        made = "imported" if self.program is None else "compiled"
        return f"MultilinearMap({self.input_dimensions} -> {self.output_dimension}, {self.semiring}, {made})"


def _shape(who: str, output: int, inputs: Sequence[int]) -> tuple[int, ...]:
    shape = (int(output), *(int(width) for width in inputs))
    if min(shape) < 1:
        raise CajalLoweringError(f"{who}: every dimension must be at least 1; got {shape}")
    return shape


def _refuse_outside(who: str, column: np.ndarray, width: int) -> None:
    if column.size and (int(column.min()) < 0 or int(column.max()) >= width):
        raise CajalLoweringError(
            f"{who}: indices must be from 0 to {width - 1}; got {int(column.min())} to {int(column.max())}"
        )


def _numbers(who: str, values: np.ndarray) -> np.ndarray:
    """Integers as int64, floats as float64, all finite."""
    if values.dtype.kind not in "biuf":
        raise CajalLoweringError(f"{who}: values must be integers or floats; got {values.dtype}")
    if values.dtype.kind == "u" and values.size and int(values.max()) >= 2**63:
        raise CajalLoweringError(f"{who}: integers must fit int64; got {int(values.max())}")
    if not np.isfinite(values).all():
        raise CajalLoweringError(f"{who}: values must be finite")
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
