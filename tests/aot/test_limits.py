"""The compilers refuse a kernel that needs more memory near the cores than there is; the other tests rest on that."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from riftco import _compat, ops
from riftco.errors import UnsupportedError
from riftco.pallas import call


def _triton_product(tile: int):
    def kernel(x: Any, y: Any, out: Any) -> None:
        def step(i: Any, acc: Any) -> Any:
            part = pl.ds(i * 64, 64)
            return acc + jax.lax.dot(x[:, part], y[part, :], preferred_element_type=jnp.float32)

        out[...] = jax.lax.fori_loop(0, 8, step, jnp.zeros(out.shape, jnp.float32))

    def product(x: Any, y: Any) -> Any:
        shape = call.shape_like((tile, tile), jnp.float32, x)
        return call.triton_call(kernel, name="product", grid=(1,), out_shape=shape, num_warps=8, num_stages=4)(x, y)

    return product


def test_shared_memory_of_the_h200(chips):
    factors = lambda tile: (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tile, 512), (512, tile)))
    chips("h200").compile(_triton_product(128), *factors(128))
    with pytest.raises(Exception, match=r"(?i)shared memory|RESOURCE_EXHAUSTED"):
        chips("h200").compile(_triton_product(512), *factors(512))


@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:1x1"])
def test_vector_memory_of_a_tpu(chips, target):
    def kernel(x: Any, out: Any, scratch: Any) -> None:
        scratch[:8] = x[...] + 1.0
        out[...] = scratch[:8]

    def add(rows: int):
        def call_it(x: Any) -> Any:
            options = {"grid": (1,), "scratch_shapes": [pltpu.VMEM((rows, 1024), jnp.float32)]}
            shape = call.shape_like(x.shape, x.dtype, x)
            limit = 256 << 20
            made = call.tpu_call(
                kernel, name="add", out_shape=shape, semantics=("parallel",), vmem_limit_bytes=limit, **options
            )
            return made(x)

        return call_it

    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    chips(target).compile(add(1024), x)  # 4 MiB
    with pytest.raises(Exception, match=r"(?i)vmem|RESOURCE_EXHAUSTED"):
        chips(target).compile(add(64 << 10), x)  # 256 MiB; there are 128


@pytest.mark.parametrize(("implementation", "batch"), [("pallas_triton", 70000), ("pallas_mosaic_gpu", 65535)])
def test_large_batches_on_the_h200(chips, implementation, batch):
    """CUDA's second and third axes end at 65535: jax folds a Triton grid that does not fit, and we refuse the other."""
    if implementation == "pallas_mosaic_gpu" and not _compat.HAS_MOSAIC_GPU:
        pytest.skip("it needs jax 0.11 or newer")
    q = jax.ShapeDtypeStruct((batch, 1, 2, 64), jnp.bfloat16)
    chips("h200").compile(functools.partial(ops.attention, implementation=implementation), q, q, q)
    if implementation == "pallas_mosaic_gpu":
        large = jax.ShapeDtypeStruct((batch + 1, 1, 2, 64), jnp.bfloat16)
        with pytest.raises(UnsupportedError, match="at most 65535 rows in the batch"):
            chips("h200").lower(functools.partial(ops.attention, implementation=implementation), large, large, large)
