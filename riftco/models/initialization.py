"""Initial parameters: drawn by jax.random for training, or bit for bit as the reference implementation draws them.

Both use the same distributions: Xavier-uniform linears U(±√(6/(in+out))) (Glorot and Bengio 2010), embeddings
U(±1/√D), norms 1, biases 0.
"""

import math
import operator
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco.errors import ConfigError
from riftco.models.config import DecoderConfig
from riftco.models.names import from_named, named_spec
from riftco.models.specification import LeafSpec, spec, unflatten
from riftco.types import Array, Key, PyTree


def bound(leaf: LeafSpec) -> float:
    """The a of a leaf's U(−a, a), in double precision."""
    rows, columns = leaf.layer_shape
    return math.sqrt(6.0 / (rows + columns)) if leaf.initializer == "xavier_uniform" else 1.0 / math.sqrt(columns)


def init(key: Key, config: DecoderConfig) -> PyTree:
    """Fresh params in float32.

    Every leaf and every layer draws from a key folded from its own name, so a change to one leaf, or one more layer,
    leaves the others as they were. Pure: under `jax.jit` with `config` static it can be given output shardings.

    Args:
        key: a jax random key.
        config: the decoder.

    Returns:
        Nested dicts as `spec(config)` lists them.
    """
    return unflatten({name: _draw(key, leaf) for name, leaf in spec(config).items()})


def _draw(key: Key, leaf: LeafSpec) -> Array:
    if leaf.initializer == "ones":
        return jnp.ones(leaf.shape, leaf.dtype)
    if leaf.initializer == "zeros":
        return jnp.zeros(leaf.shape, leaf.dtype)
    key, limit = jax.random.fold_in(key, zlib.crc32(leaf.name.encode())), bound(leaf)

    def draw(key: Any) -> Array:
        return jax.random.uniform(key, leaf.layer_shape, leaf.dtype, -limit, limit)

    if not leaf.per_layer:
        return draw(key)
    return jax.vmap(lambda layer: draw(jax.random.fold_in(key, layer)))(jnp.arange(leaf.shape[0], dtype=jnp.uint32))


def reference_init(config: DecoderConfig, seed: int = 5489) -> PyTree:
    """The reference implementation's initial weights for `seed`, bit for bit.

    One MT19937 stream runs through the drawn tensors in registration order. Each scalar takes one 32-bit draw d:
    float32(d) / 2³², clamped below 1, times float32(hi − lo), plus lo, every step rounded to float32.

    Args:
        config: the decoder. The reference has two topologies (the GPT form with a head bias, the bias-free untied
            Llama form); for others the same rule runs over their own parameters.
        seed: 0 .. 2**32 − 1; the reference's default is 5489.

    Returns:
        Nested dicts of float32 arrays.

    Raises:
        ConfigError: for a seed outside that range.
    """
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = None
    if number is None or not 0 <= number < 2**32:
        raise ConfigError(f"reference_init: seed must be an integer in 0 .. 2**32 - 1; got {seed!r}")
    # The old generator's integer seeding is MT19937's init_genrand, and a full-range draw is the raw 32-bit output.
    stream = np.random.RandomState(number)
    values: dict[str, np.ndarray] = {}
    for name, (leaf, _) in named_spec(config).items():
        shape = leaf.layer_shape
        if leaf.initializer in ("ones", "zeros"):
            values[name] = np.full(shape, leaf.initializer == "ones", np.float32)
            continue
        draws = stream.randint(0, 2**32, size=math.prod(shape), dtype=np.uint32)
        unit = np.minimum(draws.astype(np.float32) / np.float32(2**32), np.nextafter(np.float32(1), np.float32(0)))
        high = np.float32(bound(leaf))
        values[name] = (unit * (high + high) - high).reshape(shape)
    return from_named(values, config)
