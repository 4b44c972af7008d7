"""docs/kernel_bugs.md: every report has a test, and here are those that no other file has."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import ops, oracle
from riftco.pallas import dispatch
from tests.kernel_cases import BF16, FLOOR, KERNELS, OUTPUT, QUICK, assert_same_bits, worst
from tests.test_roadmap import functions

# ------------------------------------------------------------------------------------------------ pages


@pytest.mark.parametrize("how", ["blockwise", *(name for op, name in dispatch.KERNELS if op == "paged_attention")])
def test_paged_attention_in_bfloat16_is_within_the_bars(rng, how):
    """As near as the naive rule over the same pages, equal to contiguous attention, and the same bits twice."""
    rows, entries, size, groups = 2, 8, 16, 2
    pages = rows * entries + 1
    q = jnp.asarray(rng.normal(size=(rows, 3, 6, 64)), BF16)
    k, v = (jnp.asarray(rng.normal(size=(groups, pages, size, 64)), BF16) for _ in range(2))
    table = rng.permutation(pages)[: rows * entries].reshape(rows, entries).astype(np.int32)
    lengths = np.array([entries * size, 101], np.int32)

    def by(how):
        call = lambda *x: ops.paged_attention(*x, implementation=how, interpret=how in KERNELS)
        return jax.jit(call, compiler_options=QUICK)

    run, arguments = by(how), (q, k, v, lengths, table)
    out, naive = run(*arguments), by("plain")(*arguments)
    truth = oracle.paged_attention(q, k, v, lengths, table)
    assert worst(out, truth) <= min(OUTPUT[BF16], 2 * worst(naive, truth) + FLOOR)
    # Contiguous attention in float32: in bfloat16 the plain rule, which rounds its weights, is further from the truth.
    flat = (np.moveaxis(np.asarray(x, np.float32)[:, table], 0, 3).reshape(rows, -1, groups, 64) for x in (k, v))
    straight = jax.jit(ops.attention)(q.astype(jnp.float32), *flat, kv_lengths=lengths, q_offset=lengths - 3)
    straight = np.asarray(straight, np.float64)
    assert np.all(np.abs(np.asarray(out, np.float64) - straight) <= 2e-3 + 2.0**-8 * np.abs(straight))
    assert_same_bits((run(*arguments),), (out,))


# ------------------------------------------------------------------------------------------------ around the kernels

WITHOUT_ABSL = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "absl":
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocked())
import jax.numpy as jnp
from riftco import ops
from riftco.pallas import dispatch
q = jnp.ones((1, 40, 1, 16))
plain = ops.attention(q, q, q)
kernel = ops.attention(q, q, q, implementation="pallas_triton", interpret=True)
assert float(jnp.max(jnp.abs(kernel - plain))) < 1e-6
assert len(dispatch.explain()) == 3 + len(dispatch.KERNELS)
assert "absl" not in sys.modules
"""


def test_a_cpu_needs_no_absl():
    """jax's GPU plugins import it without asking for it; riftco on a CPU never comes to that."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_ABSL], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernel_bugs.md"


@pytest.mark.tiny
def test_every_report_has_a_test_that_exists():
    text = PAGE.read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")] for line in text.splitlines() if line[:3] == "| `"
    ]
    assert len(rows) == 32
    for row in rows:
        assert len(row) == 3 and (
            re.search(r"tests/[\w/]+\.py::test_\w+", row[2]) or row[2].startswith("does not apply:")
        )
    missing = {
        f"{path}::{name}"
        for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
        if name not in functions(PAGE.parent.parent / path)
    }
    assert missing == set()
