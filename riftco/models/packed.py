"""Packed params: an `ops.NF4Array` where a linear layer has its weight, everything else as in plain params.

The weights of blocks are one `NF4Array` whose arrays are stacked on the leading layer axis, so that a scan over layers
slices them. Making and measuring them is in riftco/tune/quantization.py, files in riftco/bundle/packed.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from riftco.errors import ConfigError, DTypeError, ShapeError
from riftco.models.adapters import HEAD, path_of, projections
from riftco.models.config import DecoderConfig
from riftco.models.specification import check_params
from riftco.ops import NF4Array
from riftco.ops.nf4 import pack_for_kernels, unpack_from_kernels
from riftco.ops.nf4_blocks import hidden_zero
from riftco.pallas import dispatch
from riftco.tree import with_value
from riftco.types import Array, PyTree

LAYOUTS = ("linear", "halves")


def is_packed(params: PyTree) -> bool:
    """Whether any weight is packed."""
    leaves = jax.tree_util.tree_leaves(params, is_leaf=lambda node: isinstance(node, NF4Array))
    return any(isinstance(leaf, NF4Array) for leaf in leaves)


def weight_of(params: PyTree, projection: str) -> Any:
    """The weight of a projection: [L, out, in] or a stacked `NF4Array` in blocks, a single one for the head."""
    node = params
    for part in path_of(projection):
        node = node[part]
    return node["weight"]


def replaced(params: PyTree, projection: str, weight: Any) -> PyTree:
    """The params with another weight for one projection; nothing is copied."""
    return with_value(params, (*path_of(projection), "weight"), weight)


def stacked(layers: list[NF4Array]) -> NF4Array:
    """Weights of several layers as one, its arrays stacked."""
    return jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *layers)


def layer_of(weight: NF4Array, index: int) -> NF4Array:
    """One layer's weight out of a stack."""
    return jax.tree_util.tree_map(lambda leaf: leaf[index], weight)


def held_back(params: PyTree, x: Array) -> PyTree:
    """The params, whose packed weights a compiler cannot decode before `x` is there.

    Where layers are laid out one after another, nothing but the order of decoding keeps all of them from being held in
    a wide form at once. A CPU drops optimization barriers before it orders operations, so a zero that depends on x is
    added to the codes. Weights in the kernels' layout are decoded tile by tile and stay as they are.
    """
    if not is_packed(params):
        return params
    # The sign of a magnitude: 0 whatever x holds, so that one row's overflow is not another's.
    zero = hidden_zero(jnp.abs(jnp.ravel(x)[0]).astype(jnp.float32)).astype(jnp.uint8)

    def hold(leaf: Any) -> Any:
        if not isinstance(leaf, NF4Array) or leaf.layout != "linear":
            return leaf
        return dataclasses.replace(leaf, codes=leaf.codes + zero)

    return jax.tree_util.tree_map(hold, params, is_leaf=lambda node: isinstance(node, NF4Array))


def check_packed(params: PyTree, config: DecoderConfig) -> None:
    """Refuse params that are not the configuration's packed ones: every linear weight packed, the rest floating.

    Raises:
        ShapeError, DTypeError: for a leaf that is missing, additional, of another shape, or not packed; it is named.
    """
    plain = params
    for name, (out, width) in projections(config).items():
        try:
            weight = weight_of(params, name)
        except (KeyError, TypeError):
            raise ShapeError(f"packed params: {name} must have a weight; it has none") from None
        if not isinstance(weight, NF4Array):
            raise DTypeError(f"packed params: every linear weight must be packed; {name} is not; use tune.quantize")
        stack = () if name == HEAD else (config.layers,)
        leading = {tuple(leaf.shape[: len(stack)]) for leaf in jax.tree_util.tree_leaves(weight)}
        if tuple(weight.shape) != (out, width) or leading != {stack}:
            raise ShapeError(
                f"packed params: {name} must be {[*stack, out, width]}; got {[*min(leading), *weight.shape]}; use the "
                "configuration that it was packed for"
            )
        plain = replaced(plain, name, jax.ShapeDtypeStruct((*stack, out, width), jnp.float32))
    check_params(plain, config)


def with_layout(packed: PyTree, config: DecoderConfig, layout: str | None = None) -> PyTree:
    """The packed params with their codes in some order; the weights are the same.

    Args:
        packed: from `riftco.tune.quantize`.
        config: their configuration.
        layout: "linear", the canonical order of files; "halves", what kernels read; None for "halves" where a kernel
            supports the weight on this device, "linear" elsewhere.

    Raises:
        ConfigError: for another layout. DTypeError: for a linear weight that is not packed.
    """
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"with_layout: layout must be None, 'linear' or 'halves'; got {layout!r}")
    for name in projections(config):
        weight = weight_of(packed, name)
        if not isinstance(weight, NF4Array):
            raise DTypeError(f"with_layout: every linear weight must be packed; {name} is not; use tune.quantize")
        wanted = layout or ("halves" if _kernel_runs(weight) else "linear")
        if weight.layout != wanted:
            change = pack_for_kernels if wanted == "halves" else unpack_from_kernels
            packed = replaced(packed, name, change(weight) if name == HEAD else jax.vmap(change)(weight))
    return packed


def _kernel_runs(weight: NF4Array) -> bool:
    """Whether a product with this weight would go to a kernel on the device that holds it."""
    probe = jax.ShapeDtypeStruct((1, weight.shape[1]), jnp.float32)
    arguments = (probe, weight.shape, weight.block_size)
    return dispatch.choose("nf4_linear", None, "plain", False, (weight.codes,), *arguments) != "plain"
