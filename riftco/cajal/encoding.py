"""Values as vectors, vectors as values, and the list of all values of a type."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from riftco.cajal import types, values
from riftco.cajal.diagnostics import CajalEncodingError
from riftco.cajal.values import Suspended, Value

TOLERANCE = 1e-9


def encode(value: Value, type: types.Type) -> np.ndarray:
    """A value as a vector.

    () is [1]; a summand stands in its block, zeros elsewhere; components stand side by side; a dictionary is the matrix
    Σ value ⊗ key, value-major; `error` is zero. A component with several results is the sum of their vectors.

    Args:
        value: the value.
        type: its type.

    Returns:
        float64[type.dimension].

    Raises:
        CajalEncodingError: the value has another type.
    """
    if not isinstance(value, Value) or value.type is not type:
        found = value.type if isinstance(value, Value) else repr(value)
        raise CajalEncodingError(f"cajal.encode: the value must have the type {type}; it has {found}")
    vector = np.zeros(type.dimension)
    _add(value, vector)
    return vector


def _add(value: Value, vector: np.ndarray) -> None:
    """Add a value to a vector of its own width."""
    match value:
        case values.Unit():
            vector += 1
        case values.Inject(type=types.Sum() as sum, index=index, value=payload):
            _add(payload, vector[sum.offsets[index] : sum.offsets[index + 1]])
        case values.Tuple(type=types.Product() as product, components=components):
            for component, start, stop in zip(components, product.offsets, product.offsets[1:], strict=False):
                for result in component.results():
                    _add(result, vector[start:stop])
        case values.Dictionary(entries=entries):
            for key, held in entries:
                vector += np.outer(_total(held), _total(key)).reshape(-1)


def _total(part: Suspended) -> np.ndarray:
    vector = np.zeros(part.type.dimension)
    for result in part.results():
        _add(result, vector)
    return vector


def decode(vector: ArrayLike, type: types.Type, *, tolerance: float = TOLERANCE) -> Value:
    """The value that a vector encodes.

    Args:
        vector: [type.dimension], finite.
        type: a type without dictionaries, since several lists share one matrix.
        tolerance: how far a coordinate may be from 0 or 1; positive.

    Raises:
        CajalEncodingError: the vector is not the code of one value.
    """
    array = np.asarray(vector, np.float64)
    if array.shape != (type.dimension,) or not np.isfinite(array).all():
        raise CajalEncodingError(
            f"cajal.decode: the vector must be finite of shape {(type.dimension,)} for {type}; it has {array.shape}"
        )
    if not tolerance > 0:
        raise CajalEncodingError(f"cajal.decode: tolerance must be positive; got {tolerance}")
    return _decoded(array, type, tolerance)


def _decoded(vector: np.ndarray, type: types.Type, tolerance: float) -> Value:
    match type:
        case types.Unit():
            if abs(vector[0] - 1) > tolerance:
                raise CajalEncodingError(f"cajal.decode: () must be coded by 1; got {vector[0]}")
            return values.Unit()
        case types.Sum(parts):
            blocks = [vector[start:stop] for start, stop in zip(type.offsets, type.offsets[1:], strict=False)]
            active = [index for index, block in enumerate(blocks) if np.abs(block).max() > tolerance]
            if len(active) != 1:
                found = "no summand is active" if not active else f"summands {active[0]} and {active[1]} are active"
                raise CajalEncodingError(f"cajal.decode: exactly one summand of {type} must be active; {found}")
            return values.Inject(type, active[0], _decoded(blocks[active[0]], parts[active[0]], tolerance))
        case types.Product(parts):
            blocks = [vector[start:stop] for start, stop in zip(type.offsets, type.offsets[1:], strict=False)]
            found = (_decoded(block, part, tolerance) for block, part in zip(blocks, parts, strict=True))
            return values.Tuple(type, tuple(found))
    raise CajalEncodingError(f"cajal.decode: several dictionaries share one matrix, so {type} cannot be decoded")


def enumerate_values(type: types.Type, limit: int = 4096) -> list[Value]:
    """Every value of a type: summands in order, products with the last component running fastest.

    Args:
        type: a type without dictionaries.
        limit: the most values to list.

    Raises:
        CajalEncodingError: the type holds a dictionary, or has more values.
    """
    if type.cardinality is None:
        raise CajalEncodingError(f"cajal.enumerate_values: dictionaries are lists of any length, so {type} has no end")
    if type.cardinality > limit:
        raise CajalEncodingError(
            f"cajal.enumerate_values: {type} must have at most {limit} values; it has {type.cardinality}; raise limit"
        )
    return list(_every(type))


def _every(type: types.Type) -> Iterator[Value]:
    match type:
        case types.Unit():
            yield values.Unit()
        case types.Sum(parts):
            for index, part in enumerate(parts):
                for payload in _every(part):
                    yield values.Inject(type, index, payload)
        case types.Product(parts):
            rows: list[tuple[Value, ...]] = [()]
            for part in parts:
                these = list(_every(part))
                rows = [(*row, value) for row in rows for value in these]
            for row in rows:
                yield values.Tuple(type, row)
