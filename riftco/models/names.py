"""Per-layer names: the flat view of the params that files, tables and other projects use.

`named` gives one entry per layer (`blocks.0.attention.query.weight`), in registration order: embeddings, block after
block, final norm, head. `from_named` stacks them back.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco.errors import ShapeError
from riftco.models.config import DecoderConfig
from riftco.models.specification import LeafSpec, flatten, spec, unflatten
from riftco.tree import describe
from riftco.types import Array, PyTree

_BLOCKS = "blocks."


def layer_name(name: str, layer: int) -> str:
    """`blocks.attention.query.weight` of layer 3 is `blocks.3.attention.query.weight`."""
    return f"{_BLOCKS}{layer}.{name.removeprefix(_BLOCKS)}"


def named_spec(config: DecoderConfig) -> dict[str, tuple[LeafSpec, int | None]]:
    """Every dotted per-layer name in reference order, with its leaf and its layer (None outside the blocks)."""
    leaves = list(spec(config).values())
    first_block = next(index for index, leaf in enumerate(leaves) if leaf.per_layer)
    block = [leaf for leaf in leaves if leaf.per_layer]
    entries: dict[str, tuple[LeafSpec, int | None]] = {leaf.name: (leaf, None) for leaf in leaves[:first_block]}
    for layer in range(config.layers):
        entries.update({layer_name(leaf.name, layer): (leaf, layer) for leaf in block})
    entries.update({leaf.name: (leaf, None) for leaf in leaves[first_block + len(block) :]})
    return entries


def named(params: PyTree, config: DecoderConfig) -> dict[str, Array]:
    """The params as one flat dict with an entry per layer.

    Args:
        params: nested dicts with blocks stacked on a leading layer axis.
        config: the decoder they belong to.

    Returns:
        {dotted name: array}, in registration order; linear weights [out, in]. A tied head has no entry.

    Raises:
        ShapeError: where a leaf is missing, additional or has the wrong shape; it is named.
    """
    leaves = flatten(params, config)
    for name, leaf in leaves.items():
        _check_shape("named", name, leaf, spec(config)[name].shape)
    return {
        name: leaves[leaf.name] if layer is None else leaves[leaf.name][layer]
        for name, (leaf, layer) in named_spec(config).items()
    }


def from_named(mapping: Mapping[str, Array], config: DecoderConfig) -> PyTree:
    """The params that `named` flattened; the inverse, bit for bit.

    Args:
        mapping: {dotted name: array (NumPy or jax)}, exactly the names of `named`, in any order.
        config: the decoder they belong to.

    Returns:
        Nested dicts of jax arrays, with the dtypes that came.

    Raises:
        ShapeError: where a name is missing, additional, has the wrong shape, or a dtype unlike its other layers'.
    """
    wanted = named_spec(config)
    if missing := [name for name in wanted if name not in mapping]:
        raise ShapeError(f"from_named: every parameter must be given; {_few(missing)} missing; add them")
    if extra := [name for name in mapping if name not in wanted]:
        raise ShapeError(f"from_named: only the configuration's parameters may be given; got {_few(extra)}; drop them")
    for name, (leaf, _) in wanted.items():
        _check_shape("from_named", name, mapping[name], leaf.layer_shape)
    leaves = {}
    for name, leaf in spec(config).items():
        if not leaf.per_layer:
            leaves[name] = jnp.asarray(mapping[name])
            continue
        layers = [mapping[layer_name(name, layer)] for layer in range(config.layers)]
        for layer, array in enumerate(layers):
            if array.dtype != layers[0].dtype:
                raise ShapeError(
                    f"from_named: all layers of a parameter must share a dtype, since they are stacked; "
                    f"{layer_name(name, layer)} is {array.dtype}, layer 0 is {layers[0].dtype}; cast one"
                )
        on_host = all(isinstance(array, np.ndarray) for array in layers)
        leaves[name] = jnp.asarray(np.stack(layers)) if on_host else jnp.stack(layers)
    return unflatten(leaves)


def _check_shape(who: str, name: str, leaf: Any, shape: tuple[int, ...]) -> None:
    if tuple(getattr(leaf, "shape", ())) != shape or not hasattr(leaf, "dtype"):
        raise ShapeError(f"{who}: {name} must be {list(shape)}; got {describe(leaf)}; check the configuration")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
