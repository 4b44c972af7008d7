"""Fresh low-rank adapters. How they are applied is in riftco/models/adapters.py."""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco.errors import ConfigError, DTypeError
from riftco.models.adapters import HEAD, Adapters, check_options, match_targets, path_of, projections
from riftco.models.config import DecoderConfig
from riftco.models.specification import unflatten
from riftco.ops import NF4Array
from riftco.tree import describe
from riftco.types import Array, Key, PyTree


def lora_init(
    key: Key,
    params: PyTree,
    config: DecoderConfig,
    *,
    targets: Sequence[str],
    rank: int,
    alpha: float,
    rslora: bool = False,
    dropout: float = 0.0,
) -> Adapters:
    """Fresh adapters for some projections of a model: A Xavier-uniform, B zero, both float32.

    With B zero a model answers with its adapters as it does without, bit for bit. Each projection and each layer draws
    from a key folded from its own name, so another target leaves the others as they were.

    Args:
        key: a jax random key.
        params: the base, plain or packed (`quantize`); not changed.
        config: its configuration.
        targets: names of projections by whole dotted segments: "attention.query", "feed_forward", "query",
            "language_model_head". A tied head has no weight of its own and cannot be adapted.
        rank: R, at most the smaller side of each adapted weight.
        alpha: the scale is `alpha / rank`, or `alpha / √rank` with `rslora`.
        rslora: see `alpha`.
        dropout: rate on the adapters' input when `models.loss` is given a dropout key, in [0, 1).

    Returns:
        `riftco.models.Adapters`, a pytree for `models.forward(…, adapters=)`, `riftco.grad` and `riftco.optim.adam`.

    Raises:
        ConfigError: for targets that match nothing, a rank too large, or an option out of range. DTypeError: for params
            that lack an adapted projection.

    Source:
        Hu et al. 2021, arXiv:2106.09685, section 4.1; Kalajdzievski 2023, arXiv:2312.03732.
    """
    rank, alpha, rslora, dropout = check_options(rank, alpha, rslora, dropout)
    chosen = match_targets(targets, config)
    leaves: dict[str, Array] = {}
    for name in chosen:
        out, width = projections(config)[name]
        if rank > min(out, width):
            raise ConfigError(
                f"lora_init: rank must be at most {min(out, width)}, the smaller side of {name}; got {rank}; lower it "
                "or leave that projection out"
            )
        _check_base(params, name)
        stack = () if name == HEAD else (config.layers,)
        path = ".".join(path_of(name))
        digest = np.uint32(zlib.crc32(f"{path}.lora_a".encode()))
        leaves[f"{path}.lora_a"] = _xavier(key, digest, stack=stack, rank=rank, width=width)
        leaves[f"{path}.lora_b"] = jnp.zeros((*stack, out, rank), jnp.float32)
    return Adapters(unflatten(leaves), rank, alpha, chosen, rslora, dropout)


@functools.partial(jax.jit, static_argnames=("stack", "rank", "width"))
def _xavier(key: Key, digest: Array, stack: tuple[int, ...], rank: int, width: int) -> Array:
    key, limit = jax.random.fold_in(key, digest), math.sqrt(6.0 / (rank + width))
    draw = lambda key: jax.random.uniform(key, (rank, width), jnp.float32, -limit, limit)
    if not stack:
        return draw(key)
    return jax.vmap(lambda layer: draw(jax.random.fold_in(key, layer)))(jnp.arange(stack[0], dtype=jnp.uint32))


def _check_base(params: PyTree, projection: str) -> None:
    node: Any = params
    for part in (*path_of(projection), "weight"):
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, NF4Array) and getattr(node, "dtype", None) is None:
        raise DTypeError(
            f"lora_init: params must hold a weight for {projection}; got {describe(node)}; use the configuration that "
            "the params were made for"
        )
