"""Flash attention compiles for the H200 with every pair of its options, to machine code that fits its shared memory."""

import jax
import pytest

from riftco import _compat
from tests.aot.attention_rows import HALF_ROWS, ROWS, compile_row
from tests.aot.pairwise import label

MOSAIC = pytest.mark.skipif(not _compat.HAS_MOSAIC_GPU, reason=f"Mosaic GPU needs jax 0.11; this is {jax.__version__}")


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_attention_by_triton(chips, row):
    kernels = compile_row(chips("h200"), "pallas_triton", row)
    assert sum(kernels.values()) == 3, kernels


@MOSAIC
@pytest.mark.parametrize("row", HALF_ROWS, ids=label)
def test_attention_by_mosaic_gpu(chips, row):
    kernels = compile_row(chips("h200"), "pallas_mosaic_gpu", row)
    assert sum(kernels.values()) == 3, kernels
