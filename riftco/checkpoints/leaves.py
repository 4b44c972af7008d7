"""How the leaves of a state are stored and come back: typed keys as their words, NumPy scalars as arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_typed_key(leaf: Any) -> bool:
    """Whether a leaf is an array of `jax.random.key`s."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(np.float32)), jax.dtypes.prng_key)


def storable(leaf: Any) -> Any:
    """The leaf as it is written."""
    if is_typed_key(leaf):
        return jax.random.key_data(leaf)
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def target(leaf: Any) -> Any:
    """What to restore a leaf as: a NumPy array, or a shape with a place."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(leaf)
    # A key's words have one axis more than the key, after the others, so its sharding fits them too.
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    words = jax.eval_shape(jax.random.key_data, leaf) if is_typed_key(leaf) else leaf
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)


def restored(leaf: Any, like: Any) -> Any:
    """What was read, as what `like` is."""
    return jax.random.wrap_key_data(leaf, impl=_key_kind(like)) if is_typed_key(like) else leaf


def _key_kind(key: Any) -> Any:
    """The generator of a typed key, or of one that is only a shape: tracing gives it the rest."""
    found = []
    jax.eval_shape(lambda traced: found.append(jax.random.key_impl(traced)) or jax.random.key_data(traced), key)
    return found[0]
