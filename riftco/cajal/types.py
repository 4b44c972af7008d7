"""The types of Cajal: 1, sums, products and dictionaries; what each is as a vector space and as a set of values.

Types are interned: equal types are one object, so comparing them is cheap however large they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar, cast
from weakref import WeakValueDictionary

from riftco.cajal.diagnostics import CajalError

MAX_PARTS = 2**16
"""The most summands or factors of one type: what `Fin n` and `τ^n` write out."""

_MANY = 2**63  # beyond this a number of values is only known to be large

T = TypeVar("T", bound="Type")

_TABLE: WeakValueDictionary[tuple[object, ...], Type] = WeakValueDictionary()


class Type:
    """A type. Subclasses: `Unit`, `Sum`, `Product`, `Dictionary`.

    Attributes:
        dimension: coordinates of its vectors.
        is_enum: whether it is 1 or a sum of such types, so that each value is one basis vector.
        cardinality: how many values it has, 2^63 standing for anything larger; None for types that hold a dictionary,
            whose values are lists.
        depth: levels of nesting.
    """

    __slots__ = ("__weakref__", "cardinality", "depth", "dimension", "is_enum")
    dimension: int
    is_enum: bool
    cardinality: int | None
    depth: int

    def __copy__(self) -> Type:
        return self

    def __deepcopy__(self, memo: object) -> Type:
        return self

    def __repr__(self) -> str:
        return f"<{self}>"


class Unit(Type):
    """The type 1, with the one value ()."""

    __slots__ = ()

    def __new__(cls) -> Unit:
        """The one object."""
        return _interned(cls, (), lambda new: _facts(new, 1, True, 1, 0))

    def __reduce__(self) -> tuple[type[Unit], tuple[()]]:
        return Unit, ()

    def __str__(self) -> str:
        return "1"


class _Parts(Type):
    __slots__ = ("offsets", "parts")
    __match_args__ = ("parts",)
    parts: tuple[Type, ...]
    offsets: tuple[int, ...]
    """Where the coordinates of each part begin, and, last, the dimension."""

    def __reduce__(self) -> tuple[type[_Parts], tuple[tuple[Type, ...]]]:
        return type(self), (self.parts,)

    def _set(self, parts: tuple[Type, ...], enum: bool, cardinality: int | None) -> None:
        self.parts = parts
        self.offsets = (0, *itertools.accumulate(part.dimension for part in parts))
        _facts(self, self.offsets[-1], enum, cardinality, 1 + max(part.depth for part in parts))


class Sum(_Parts):
    """A sum of two or more types, or `Fin 1`, the sum of one 1."""

    __slots__ = ()

    def __new__(cls, parts: Iterable[Type]) -> Sum:
        """The one object with these summands.

        Raises:
            CajalError: no summand, too many, or a single one that is not 1.
        """
        parts = _checked("Sum", parts)
        if len(parts) == 1 and not isinstance(parts[0], Unit):
            raise CajalError(
                "Sum: a sum of one summand must be Fin 1; got a single summand that is not 1; use it as is"
            )

        def fill(new: Sum) -> None:
            sizes = [part.cardinality for part in parts]
            known = [size for size in sizes if size is not None]
            cardinality = min(sum(known), _MANY) if len(known) == len(sizes) else None
            new._set(parts, all(part.is_enum for part in parts), cardinality)

        return _interned(cls, parts, fill)

    def __str__(self) -> str:
        if all(isinstance(part, Unit) for part in self.parts):
            return f"Fin {len(self.parts)}"
        return " + ".join(_inside(part, isinstance(part, Sum | Dictionary)) for part in self.parts)


class Product(_Parts):
    """A product of one or more types."""

    __slots__ = ()

    def __new__(cls, parts: Iterable[Type]) -> Product:
        """The one object with these factors.

        Raises:
            CajalError: no factor, or too many.
        """
        parts = _checked("Product", parts)

        def fill(new: Product) -> None:
            cardinality: int | None = 1
            for part in parts:
                if cardinality is None or part.cardinality is None:
                    cardinality = None
                else:
                    cardinality = min(cardinality * part.cardinality, _MANY)
            new._set(parts, False, cardinality)

        return _interned(cls, parts, fill)

    def __str__(self) -> str:
        if all(part is self.parts[0] for part in self.parts):
            base = self.parts[0]
            return f"{_inside(base, isinstance(base, Sum | Dictionary) or _is_mixed(base))}^{len(self.parts)}"
        return " * ".join(_inside(part, isinstance(part, Sum | Dictionary) or _is_mixed(part)) for part in self.parts)


class Dictionary(Type):
    """Lists of keys with values: as a vector the matrix Σ value ⊗ key, value-major."""

    __slots__ = ("key", "value")
    __match_args__ = ("key", "value")
    key: Type
    value: Type

    def __new__(cls, key: Type, value: Type) -> Dictionary:
        """The one object with these types of keys and values."""

        def fill(new: Dictionary) -> None:
            new.key, new.value = key, value
            _facts(new, key.dimension * value.dimension, False, None, 1 + max(key.depth, value.depth))

        return _interned(cls, (key, value), fill)

    def __reduce__(self) -> tuple[type[Dictionary], tuple[Type, Type]]:
        return Dictionary, (self.key, self.value)

    def __str__(self) -> str:
        return f"{_inside(self.key, isinstance(self.key, Dictionary))} => {self.value}"


def fin(n: int) -> Sum:
    """`Fin n`, the type of n letters.

    Raises:
        CajalError: n is not from 1 to 2^16.
    """
    return Sum((Unit(),) * _count("Fin", n))


def power(base: Type, n: int) -> Product:
    """`base^n`, n of one type side by side.

    Raises:
        CajalError: n is not from 1 to 2^16.
    """
    return Product((base,) * _count("^", n))


def _count(who: str, n: int) -> int:
    if not 1 <= n <= MAX_PARTS:
        raise CajalError(f"{who}: the number must be from 1 to {MAX_PARTS}; got {n}")
    return n


def _checked(who: str, parts: Iterable[Type]) -> tuple[Type, ...]:
    parts = tuple(parts)
    if not 1 <= len(parts) <= MAX_PARTS:
        raise CajalError(f"{who}: from 1 to {MAX_PARTS} parts are allowed; got {len(parts)}")
    for part in parts:
        if not isinstance(part, Type):
            raise CajalError(f"{who}: every part must be a type; got {part!r}; build it with riftco.cajal.types")
    return parts


def _facts(new: Type, dimension: int, enum: bool, cardinality: int | None, depth: int) -> None:
    new.dimension, new.is_enum, new.cardinality, new.depth = dimension, enum, cardinality, depth


def _interned(cls: type[T], parts: tuple[Type, ...], fill: Callable[[T], None]) -> T:
    key = (cls, *parts)
    found = _TABLE.get(key)
    if found is None:
        new = object.__new__(cls)
        fill(new)
        found = _TABLE.setdefault(key, new)
    return cast(T, found)


def _is_mixed(type: Type) -> bool:
    """A product that is not written as a power."""
    return isinstance(type, Product) and any(part is not type.parts[0] for part in type.parts)


def _inside(type: Type, parenthesise: bool) -> str:
    # `Fin n` is a sum but written as one word.
    text = str(type)
    return (
        f"({text})"
        if parenthesise and not (isinstance(type, Sum) and text.startswith("Fin ") and "+" not in text)
        else text
    )
