"""Products with NF4 weights compile for every chip, forward and for the input's gradient, at few rows and at many."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import riftco
from riftco import aot, ops
from riftco.ops.nf4 import pack_for_kernels
from tests.aot.pairwise import label, pairwise

ROWS = pairwise(
    {
        "rows": (1, 5, 64, 65, 300),
        "block_size": (32, 64, 128),
        "shape": ((512, 512), (200, 384)),
        "double_quant": (False, True),
        "dtype": ("bfloat16", "float32"),
    }
)
ROWS.append({"rows": 3, "block_size": 4096, "shape": (64, 4096), "double_quant": True, "dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("target", "implementation"), [("v5e:2x2", "pallas_tpu"), ("v6e:2x2", "pallas_tpu"), ("h200", "pallas_triton")]
)
@pytest.mark.parametrize("row", ROWS, ids=label)
def test_nf4_linear(chips, target, implementation, row):
    out, width = row["shape"]
    dtype = jnp.dtype(row["dtype"])

    def quantize(w: Any) -> Any:
        made = ops.quantize_nf4(w, block_size=row["block_size"], double_quant=row["double_quant"])
        return pack_for_kernels(made)  # once for all calls; its compilation is not what is asked here

    weight = jax.eval_shape(quantize, jax.ShapeDtypeStruct((out, width), jnp.float32))

    def both(x: Any, ct: Any, weight: Any) -> Any:
        y, pullback = riftco.vjp(lambda x: ops.nf4_linear(x, weight, implementation=implementation), x)
        return y, pullback(ct)

    x, ct = (jax.ShapeDtypeStruct((row["rows"], n), dtype) for n in (width, out))
    program = chips(target).compile(both, x, ct, weight)
    assert sum(aot.kernels_of(program.as_text()).values()) >= 1
