"""Small leaves side by side in one vector while they are updated.

A transformer has a few large leaves and many small ones (biases, scales). One update of one vector compiles and runs
faster than many updates of short ones. The state keeps its leaves; this is inside the update alone.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from riftco.types import Array

_SMALL = 2**16


class Packing:
    """Which leaves go together: those of at most 2^16 scalars with equal dtypes and an equal decay flag.

    Args:
        leaves: the parameters.
        gradients: their gradients.
        decays: whether each decays.
        page_size: with pages nothing is packed, since moments are not shaped as the parameters.
    """

    def __init__(
        self, leaves: Sequence[Array], gradients: Sequence[Array], decays: Sequence[bool], page_size: int | None
    ) -> None:
        groups: dict[Any, list[int]] = {}
        for i, (leaf, gradient, decay) in enumerate(zip(leaves, gradients, decays, strict=True)):
            small = page_size is None and leaf.size <= _SMALL
            key = (leaf.dtype, gradient.dtype, decay) if small else i
            groups.setdefault(key, []).append(i)
        self._groups = list(groups.values())

    def pack(self, side: Sequence[Array]) -> list[Array]:
        """One array for each group; a group of one is the leaf itself."""
        return [
            side[group[0]] if len(group) == 1 else jnp.concatenate([jnp.ravel(side[i]) for i in group])
            for group in self._groups
        ]

    def is_packed(self, index: int) -> bool:
        """Whether this packed array holds several leaves."""
        return len(self._groups[index]) > 1

    def first_of_each(self, values: Sequence[Any]) -> list[Any]:
        """The value that the leaves of each group have in common."""
        return [values[group[0]] for group in self._groups]

    def unpack(self, packed: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """The leaves again, in their own order."""
        out: list[Any] = [None] * len(shapes)
        for group, array in zip(self._groups, packed, strict=True):
            if len(group) == 1:
                out[group[0]] = array
                continue
            start = 0
            for i in group:
                size = math.prod(shapes[i])
                out[i] = jnp.reshape(array[start : start + size], shapes[i])
                start += size
        return out
