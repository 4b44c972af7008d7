"""Names for the things that cross function boundaries; no logic."""

from typing import Any, TypeAlias

import jax

Array: TypeAlias = Any
"""A `jax.Array`, a tracer of jax's, or a `riftco.autodiff.Box` while a derivative is being recorded."""

PyTree: TypeAlias = Any
Key: TypeAlias = jax.Array
