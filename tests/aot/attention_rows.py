"""Attention, forward and backward, with any of its options, as a program to compile."""

from typing import Any

import jax
import jax.numpy as jnp

import riftco
from riftco import aot, ops
from riftco.targets import Chips
from tests.aot.pairwise import pairwise

BATCH, QUERIES, KEYS, GROUPS = 2, 200, 264, 2  # no multiples of any tile
FACTORS: dict[str, tuple[Any, ...]] = {
    "repeats": (1, 3, 4, 8),
    "offset": (0, 64, "traced"),
    "width": (64, 128),
    "causal": (True, False),
    "window": (None, 48),
    "segments": (False, True),
    "lengths": (False, True),
    "cap": (None, 30.0),
    "dtype": ("bfloat16", "float32"),
}
ROWS = pairwise(FACTORS)
HALF_ROWS = pairwise({**FACTORS, "dtype": ("bfloat16",)})  # for what multiplies no float32


def compile_row(place: Chips, implementation: str, row: dict[str, Any]) -> dict[str, int]:
    """The kernels of the compiled program, by name."""
    dtype, heads = jnp.dtype(row["dtype"]), GROUPS * row["repeats"]
    array = lambda length, heads: jax.ShapeDtypeStruct((BATCH, length, heads, row["width"]), dtype)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    arrays: dict[str, Any] = {}
    if row["segments"]:
        arrays |= {"q_segment_ids": integers(BATCH, QUERIES), "kv_segment_ids": integers(BATCH, KEYS)}
    if row["lengths"]:
        arrays["kv_lengths"] = integers(BATCH)
    static = {"causal": row["causal"], "window": row["window"], "logits_soft_cap": row["cap"]}
    if row["offset"] == "traced":
        arrays["q_offset"] = integers(BATCH)
    else:
        static["q_offset"] = row["offset"]

    def attend(q: Any, k: Any, v: Any, ct: Any, arrays: dict[str, Any]) -> Any:
        call = lambda q, k, v: ops.attention(q, k, v, **static, **arrays, implementation=implementation)
        out, pullback = riftco.vjp(call, q, k, v)
        return out, pullback(ct)

    q, k = array(QUERIES, heads), array(KEYS, GROUPS)
    return aot.kernels_of(place.compile(attend, q, k, k, q, arrays).as_text())
