"""Flash attention compiles for TPU with every pair of its options, forward and backward."""

import pytest

from tests.aot.attention_rows import ROWS, compile_row
from tests.aot.pairwise import label


@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("row", ROWS, ids=label)
def test_attention(chips, target, row):
    kernels = compile_row(chips(target), "pallas_tpu", row)
    assert sum(kernels.values()) == 3 and all(name.startswith("flash_attention") for name in kernels), kernels
