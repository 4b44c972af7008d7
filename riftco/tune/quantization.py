"""4-bit bases: a model whose linear weights are packed, and what it weighs.

A packed model is params like any other, with an `ops.NF4Array` where a linear layer has its weight; blocks are stacked
on the leading layer axis of its arrays. The arithmetic is in riftco/ops/nf4.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from riftco import ops
from riftco.errors import ConfigError
from riftco.models.adapters import HEAD, projections
from riftco.models.config import DecoderConfig
from riftco.models.packed import LAYOUTS, is_packed, layer_of, replaced, stacked, weight_of, with_layout
from riftco.models.specification import check_params, spec
from riftco.ops import NF4Array
from riftco.tree import byte_count, scalar_count
from riftco.types import PyTree


def quantize(
    params: PyTree,
    config: DecoderConfig,
    *,
    block_size: int = 64,
    double_quant: bool = True,
    layout: str | None = None,
) -> PyTree:
    """Pack every linear weight of a model in 4 bits; embeddings, norms and biases stay as they are.

    A tied head is the token embedding and stays unpacked with it. The result goes wherever params go that are not
    trained: `models.forward`, `models.loss`, `riftco.generate`, `generation.Session`.

    Args:
        params: plain floating weights; packed one layer's matrix at a time.
        config: their configuration.
        block_size: entries that share a maximum; a power of two from 32 to 4096.
        double_quant: whether the maxima are quantised as well (about 4.13 bits a weight instead of 4.5).
        layout: of the codes, "linear" or "halves" (what kernels read); None takes "halves" where a kernel will run.

    Returns:
        Params with `ops.NF4Array` weights.

    Raises:
        ConfigError: for params that are packed already, or an option out of range. ShapeError, DTypeError: for params
            that are not the configuration's. DomainError: for a weight that is not finite.

    Source:
        Dettmers et al. 2023, arXiv:2305.14314, section 3.
    """
    if is_packed(params):
        raise ConfigError("quantize: params must be plain weights; these are packed already; use them as they are")
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"quantize: layout must be None, 'linear' or 'halves'; got {layout!r}")
    check_params(params, config)
    packed = params
    for name in projections(config):
        weight = weight_of(params, name)
        pack = lambda w: ops.quantize_nf4(w, block_size=block_size, double_quant=double_quant)
        layers = [pack(jnp.asarray(weight))] if name == HEAD else [pack(jnp.asarray(layer)) for layer in weight]
        packed = replaced(packed, name, layers[0] if name == HEAD else stacked(layers))
    return with_layout(packed, config, layout)


def dequantize(packed: PyTree, config: DecoderConfig, dtype: Any = jnp.float32) -> PyTree:
    """Plain params again: each packed weight decoded to `dtype`, one layer's matrix at a time.

    Args:
        packed: from `quantize`; plain weights among them stay as they are.
        config: their configuration.
        dtype: a floating dtype.
    """
    plain = packed
    for name in projections(config):
        weight = weight_of(packed, name)
        if isinstance(weight, NF4Array):
            plain = replaced(plain, name, decoded(weight, name, config, dtype))
    return plain


def decoded(weight: NF4Array, projection: str, config: DecoderConfig, dtype: Any = jnp.float32) -> Any:
    """One projection's weight, decoded: [L, out, in], or [out, in] for the head."""
    if projection == HEAD:
        return ops.dequantize_nf4(weight, dtype)
    return jnp.stack([ops.dequantize_nf4(layer_of(weight, index), dtype) for index in range(config.layers)])


# ------------------------------------------------------------------------------------------------ memory


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What a packed model weighs, in bytes.

    Attributes:
        packed_weights: how many weights are packed.
        packed_bytes: codes, maxima and offsets of the packed ones.
        unpacked_weights: how many scalars are not packed: embeddings, norms, biases.
        unpacked_bytes: their bytes.
        float32_bytes: what the whole model would weigh in float32.
        tied_head: whether the head is the token embedding, and unpacked with it.
    """

    packed_weights: int
    packed_bytes: int
    unpacked_weights: int
    unpacked_bytes: int
    float32_bytes: int
    tied_head: bool

    @property
    def bits_per_weight(self) -> float:
        """Of the packed weights, everything that they need included."""
        return 8.0 * self.packed_bytes / self.packed_weights if self.packed_weights else 0.0

    @property
    def total_bytes(self) -> int:
        """Packed and unpacked together."""
        return self.packed_bytes + self.unpacked_bytes

    def __str__(self) -> str:
        head = "tied to the embedding, so not packed" if self.tied_head else "packed"
        return "\n".join(
            (
                f"packed linears   {_mib(self.packed_bytes)}  {self.packed_weights:,} weights, "
                f"{self.bits_per_weight:.3f} bits each",
                f"unpacked leaves  {_mib(self.unpacked_bytes)}  {self.unpacked_weights:,} scalars; head: {head}",
                f"total            {_mib(self.total_bytes)}  {self.total_bytes / self.float32_bytes:.1%} of float32",
            )
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:9.2f} MiB"


def memory_report(packed: PyTree, config: DecoderConfig) -> MemoryReport:
    """What a packed model weighs: packed linears, leaves that stay as they were, and both together.

    Args:
        packed: from `quantize`.
        config: its configuration.
    """
    leaves = _leaves(packed)
    codes = [leaf for leaf in leaves if isinstance(leaf, NF4Array)]
    rest = [leaf for leaf in leaves if not isinstance(leaf, NF4Array)]
    every = sum(leaf.size for leaf in spec(config).values())
    unpacked = scalar_count(rest)
    return MemoryReport(
        packed_weights=every - unpacked,
        packed_bytes=sum(leaf.nbytes for leaf in codes),
        unpacked_weights=unpacked,
        unpacked_bytes=byte_count(rest),
        float32_bytes=4 * every,
        tied_head=config.tie_embeddings,
    )


def _leaves(params: PyTree) -> list[Any]:
    return jax.tree_util.tree_leaves(params, is_leaf=lambda node: isinstance(node, NF4Array))
