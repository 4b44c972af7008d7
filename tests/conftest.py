"""Switches for the whole suite, set before jax starts: 8 simulated CPU devices, strict promotion, fixed seeds."""

import os
import warnings

# The suite runs on the CPU. To check real devices: RIFTCO_REQUIRE_ACCELERATOR=1 python -m pytest -m gpu (or -m tpu).
REQUIRE_ACCELERATOR = os.environ.get("RIFTCO_REQUIRE_ACCELERATOR") == "1"
if not REQUIRE_ACCELERATOR:
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this jax cannot have."""
    if not hasattr(jax, "shard_map"):
        for item in items:
            if item.get_closest_marker("shard_map"):
                item.add_marker(pytest.mark.skip(reason=f"jax {jax.__version__} has no shard_map"))


@pytest.fixture(autouse=True)
def device_that_the_test_needs(request: pytest.FixtureRequest) -> None:
    """Skip a test marked `gpu` or `tpu` where there is none; with RIFTCO_REQUIRE_ACCELERATOR=1 fail it."""
    for mark in ("gpu", "tpu"):
        if request.node.get_closest_marker(mark) and jax.default_backend() != mark:
            reason = f"needs a {mark.upper()}; jax runs on {jax.default_backend()}"
            (pytest.fail if REQUIRE_ACCELERATOR else pytest.skip)(reason)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name, so that no test depends on the order of the others."""
    return np.random.default_rng(sum(request.node.name.encode()))
