"""Several low-rank adapters in one program: each row of a batch says which is its own.

Adapters of all names are stacked, with zeros where one has no such projection or a smaller rank; number 0 is zeros
throughout and stands for the base alone. So rows with different adapters, or none, go through the same operations.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from riftco.models.adapters import HEAD, Adapters, check_adapters, path_of, projections
from riftco.models.config import DecoderConfig
from riftco.tree import with_value
from riftco.types import Array, PyTree


@functools.partial(jax.tree_util.register_dataclass, data_fields=["lora_a", "lora_b", "scale", "index"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class StackedBranch:
    """One layer's adapters: A [M, R, in], B transposed [M, R, out], scales [M], and the rows' numbers [B] or None."""

    lora_a: Any
    lora_b: Any
    scale: Any
    index: Any = None

    def __call__(self, x: Array) -> Array:
        """[B, T, in] to [B, T, out], each row by its own adapter."""
        a, b, scale = (jnp.take(array, self.index, axis=0) for array in (self.lora_a, self.lora_b, self.scale))
        narrow = jnp.einsum("bti,bri->btr", x, a)
        narrow = narrow * jnp.broadcast_to(scale[:, None, None], narrow.shape)
        return jnp.einsum("btr,bro->bto", narrow, b)


def attach_stacked(params: PyTree, adapters: Mapping[str, Adapters], config: DecoderConfig) -> PyTree:
    """The params with a `StackedBranch` beside each weight that some adapter has; number i + 1 is the i-th name's.

    Raises:
        ShapeError, DTypeError: for adapters that are not the configuration's.
    """
    if not adapters:
        return params
    pairs = []
    for each in adapters.values():
        check_adapters(each, config)
        pairs.append({target: (a, b) for target, a, b in each.pairs()})
    dtype = params["token_embedding"]["weight"].dtype
    rank = max(each.rank for each in adapters.values())
    for target, (out, width) in projections(config).items():
        if not any(target in pair for pair in pairs):
            continue
        stack = () if target == HEAD else (config.layers,)
        members = [(jnp.zeros((*stack, rank, width), dtype), jnp.zeros((*stack, rank, out), dtype))]
        scales = [0.0]
        for each, pair in zip(adapters.values(), pairs, strict=True):
            if target in pair:
                a, b = (jnp.asarray(array).astype(dtype) for array in pair[target])
                missing = [(0, 0)] * len(stack) + [(0, rank - each.rank), (0, 0)]
                members.append((jnp.pad(a, missing), jnp.pad(jnp.swapaxes(b, -1, -2), missing)))
            else:
                members.append(members[0])
            scales.append(each.scale)
        a, b = (jnp.stack(arrays, axis=len(stack)) for arrays in zip(*members, strict=True))
        branch = StackedBranch(a, b, jnp.broadcast_to(jnp.asarray(scales, dtype), (*stack, len(scales))))
        params = with_value(params, (*path_of(target), "adapter"), branch)
    return params


def choose_adapters(params: PyTree, index: Array) -> PyTree:
    """The params with the rows' adapter numbers [B] in every `StackedBranch`."""

    def put(node: Any) -> Any:
        return dataclasses.replace(node, index=index) if isinstance(node, StackedBranch) else node

    return jax.tree_util.tree_map(put, params, is_leaf=lambda node: isinstance(node, StackedBranch))
