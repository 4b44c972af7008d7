"""The parameters that a configuration asks for: one table, from which everything else about them derives.

`spec(config)` lists every leaf once: its dotted path in the params dict, shape, initializer and logical axes. Initial
values, validation, counts, optimizer masks, shardings, checkpoint schemas and every interchange format read it.
Block weights are stacked on a leading layer axis; linear weights are [out, in], so y = x Wᵀ + b.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from riftco.errors import DTypeError, ShapeError
from riftco.models.config import DecoderConfig
from riftco.tree import describe, named_leaves
from riftco.types import PyTree

FLOAT32 = np.dtype(np.float32)
Initializer = Literal["xavier_uniform", "embedding_uniform", "ones", "zeros"]


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """What one leaf of the params is.

    Attributes:
        name: the dotted path, such as "blocks.attention.query.weight".
        shape: with the leading layer axis where `per_layer`.
        initializer: "xavier_uniform", "embedding_uniform", "ones" or "zeros".
        axes: one logical name per axis, out of layers, vocab, context, width, heads_out (H·K), kv_out (G·K),
            head_dim, hidden.
        decay: whether weight decay applies: rank ≥ 2 before stacking.
        per_layer: whether the first axis is the layer.
        dtype: of a fresh parameter; float32.
    """

    name: str
    shape: tuple[int, ...]
    initializer: Initializer
    axes: tuple[str, ...]
    decay: bool
    per_layer: bool
    dtype: np.dtype = FLOAT32

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape that one layer has, or the whole shape of a leaf that no layer owns."""
        return self.shape[1:] if self.per_layer else self.shape

    @property
    def size(self) -> int:
        """How many scalars the leaf holds, all layers together."""
        return math.prod(self.shape)


@functools.lru_cache(maxsize=256)
def spec(config: DecoderConfig) -> Mapping[str, LeafSpec]:
    """Every leaf of the params by dotted path, in the reference order of `named`.

    Args:
        config: the decoder.

    Returns:
        A read-only mapping from "blocks.attention.query.weight" and the like to `LeafSpec`.
    """
    size = {
        "vocab": config.vocab_size,
        "context": config.context,
        "width": config.width,
        "hidden": config.hidden,
        "heads_out": config.heads * config.head_dim,
        "kv_out": config.kv_heads * config.head_dim,
        "head_dim": config.head_dim,
        "layers": config.layers,
    }
    leaves: dict[str, LeafSpec] = {}
    for name, initializer, axes in _rows(config):
        per_layer = name.startswith("blocks.")
        axes_stacked = ("layers", *axes) if per_layer else axes
        shape = tuple(size[axis] for axis in axes_stacked)
        leaves[name] = LeafSpec(name, shape, initializer, axes_stacked, len(axes) >= 2, per_layer)
    return types.MappingProxyType(leaves)


Row = tuple[str, Initializer, tuple[str, ...]]


def _rows(config: DecoderConfig) -> Iterator[Row]:
    """(path, initializer, axes without the layer axis) of every leaf, in the reference order."""
    yield "token_embedding.weight", "embedding_uniform", ("vocab", "width")
    if config.position == "learned":
        yield "position_embedding.weight", "embedding_uniform", ("context", "width")
    yield from _norm("blocks.attention_norm", config)
    yield from _linear("blocks.attention.query", "heads_out", "width", config.qkv_bias)
    yield from _linear("blocks.attention.key", "kv_out", "width", config.qkv_bias)
    yield from _linear("blocks.attention.value", "kv_out", "width", config.qkv_bias)
    yield from _linear("blocks.attention.output", "width", "heads_out", config.bias)
    if config.qk_norm:
        yield "blocks.attention.query_norm.scale", "ones", ("head_dim",)
        yield "blocks.attention.key_norm.scale", "ones", ("head_dim",)
    yield from _norm("blocks.feed_forward_norm", config)
    if config.mlp == "swiglu":
        yield from _linear("blocks.feed_forward.gate", "hidden", "width", config.bias)
        yield from _linear("blocks.feed_forward.up", "hidden", "width", config.bias)
        yield from _linear("blocks.feed_forward.down", "width", "hidden", config.bias)
    else:
        yield from _linear("blocks.feed_forward.expand", "hidden", "width", config.bias)
        yield from _linear("blocks.feed_forward.project", "width", "hidden", config.bias)
    yield from _norm("final_norm", config)
    if not config.tie_embeddings:
        yield "language_model_head.weight", "xavier_uniform", ("vocab", "width")
    if config.head_bias:
        yield "language_model_head.bias", "zeros", ("vocab",)


def _norm(path: str, config: DecoderConfig) -> Iterator[Row]:
    yield f"{path}.scale", "ones", ("width",)
    if config.norm == "layer":
        yield f"{path}.bias", "zeros", ("width",)


def _linear(path: str, rows: str, columns: str, has_bias: bool) -> Iterator[Row]:
    yield f"{path}.weight", "xavier_uniform", (rows, columns)
    if has_bias:
        yield f"{path}.bias", "zeros", (rows,)


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from dotted paths."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def flatten(params: PyTree, config: DecoderConfig) -> dict[str, Any]:
    """The leaves of `params` by dotted path, in spec order (a pytree's own order is alphabetical).

    Raises:
        ShapeError: where a leaf is missing or is not one of the configuration's; it is named.
        DTypeError: for a packed weight; it is named.
    """
    found, wanted = dict(named_leaves(params)), spec(config)
    if packed := [name for name in wanted if f"{name}.codes" in found]:
        raise DTypeError(
            f"params: every leaf must be plain floating weights; {packed[0]} is packed in 4 bits; decode them first "
            "(riftco.tune.dequantize)"
        )
    if missing := [name for name in wanted if name not in found]:
        raise ShapeError(f"params: every leaf of the configuration must be there; {', '.join(missing)} missing")
    if extra := [name for name in found if name not in wanted]:
        raise ShapeError(
            f"params: only leaves of the configuration may be there; got {', '.join(extra)}; remove "
            "or merge them, or use the configuration that these params were made for"
        )
    return {name: found[name] for name in wanted}


def check_params(params: PyTree, config: DecoderConfig) -> None:
    """Refuse params that are not the configuration's: structure, shapes, and a floating dtype.

    Args:
        params: nested dicts of arrays, tracers or `jax.ShapeDtypeStruct`.
        config: the decoder they are meant for.

    Raises:
        ShapeError: for a missing, additional or wrongly shaped leaf, by name.
        DTypeError: for a leaf that is not floating, by name.
    """
    for name, leaf in flatten(params, config).items():
        wanted = spec(config)[name]
        if tuple(jnp.shape(leaf)) != wanted.shape:
            raise ShapeError(
                f"params: {name} must be {list(wanted.shape)}; got {describe(leaf)}; use the configuration that "
                "these params were made for"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise DTypeError(f"params: {name} must be floating; got {describe(leaf)}; cast it, or dequantize it first")


def parameter_count(config: DecoderConfig) -> int:
    """How many scalars the params hold."""
    return sum(leaf.size for leaf in spec(config).values())


def abstract(config: DecoderConfig, dtype: Any = jnp.float32) -> PyTree:
    """The params as `jax.ShapeDtypeStruct` leaves of `dtype`: a target for restoring, lowering and sharding."""
    return unflatten({name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in spec(config).items()})


def logical_axes(config: DecoderConfig) -> PyTree:
    """The params' logical axis names, one `PartitionSpec` per leaf, to be mapped onto a mesh's axes."""
    return unflatten({name: PartitionSpec(*leaf.axes) for name, leaf in spec(config).items()})


def decay_mask(config: DecoderConfig) -> PyTree:
    """A bool per leaf: whether weight decay applies to it (rank ≥ 2 before stacking)."""
    return unflatten({name: leaf.decay for name, leaf in spec(config).items()})
