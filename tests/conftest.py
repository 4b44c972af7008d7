"""Switches for the whole suite, set before jax starts: 8 simulated CPU devices, strict promotion, fixed seeds."""

import os
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jax

import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name, so that no test depends on the order of the others."""
    return np.random.default_rng(sum(request.node.name.encode()))
