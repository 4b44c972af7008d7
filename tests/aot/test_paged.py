"""Attention over pages compiles for every chip, over page sizes, groups, widths and queries of a row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from riftco import aot, ops
from tests.aot.pairwise import label, pairwise

BATCH, GROUPS, PAGES, COLUMNS = 3, 2, 40, 7
ROWS = pairwise(
    {
        "repeats": (1, 3, 4, 8),
        "page_size": (16, 32, 64, 128),
        "width": (64, 128),
        "queries": (1, 5, 70),
        "ragged": (False, True),
        "window": (None, 100),
        "cap": (None, 30.0),
        "dtype": ("bfloat16", "float32"),
    }
)


@pytest.mark.parametrize(
    ("target", "implementation"), [("v5e:2x2", "pallas_tpu"), ("v6e:2x2", "pallas_tpu"), ("h200", "pallas_triton")]
)
@pytest.mark.parametrize("row", ROWS, ids=label)
def test_paged_attention(chips, target, implementation, row):
    dtype = jnp.dtype(row["dtype"])
    q = jax.ShapeDtypeStruct((BATCH, row["queries"], GROUPS * row["repeats"], row["width"]), dtype)
    pages = jax.ShapeDtypeStruct((GROUPS, PAGES, row["page_size"], row["width"]), dtype)
    table, lengths = jax.ShapeDtypeStruct((BATCH, COLUMNS), jnp.int32), jax.ShapeDtypeStruct((BATCH,), jnp.int32)

    def attend(q: Any, k: Any, v: Any, lengths: Any, table: Any, counts: Any) -> Any:
        options = {"query_lengths": counts if row["ragged"] else None, "window": row["window"]}
        return ops.paged_attention(
            q, k, v, lengths, table, logits_soft_cap=row["cap"], implementation=implementation, **options
        )

    program = chips(target).compile(attend, q, pages, pages, lengths, table, lengths)
    assert sum(aot.kernels_of(program.as_text()).values()) >= 1


@pytest.mark.parametrize(("target", "implementation"), [("v5e:2x2", "pallas_tpu"), ("h200", "pallas_triton")])
@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 5, 7, 8, 16])
def test_small_and_odd_groups(chips, target, implementation, repeats):
    q, pages = ((4, 1, GROUPS * repeats, 128), (GROUPS, PAGES, 16, 128))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, pages, pages)]
    rows = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4,), (4, 33))]
    attend = functools.partial(ops.paged_attention, implementation=implementation)
    assert sum(aot.kernels_of(chips(target).compile(attend, *arrays, *rows).as_text()).values()) >= 1
