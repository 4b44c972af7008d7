"""The blockwise rule on long sequences: equal to the plain one, and linear in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import ops
from riftco.ops import blockwise
from riftco.ops.masks import Visibility

LOOP = (1100, 1300)  # queries, keys: past UNROLLED_QUERIES, no multiple of a block
UNROLLED = (512, 530)  # with narrow heads, the weights are larger than q, k and v and are made again


def segments(length):
    # Three documents, and a tail of queries that belong to one without keys.
    edges = np.arange(length)
    return jnp.asarray(np.stack([edges // 400, np.where(edges > 1000, 9, edges // 70)]))


CASES = {
    "loop: causal, grouped heads": (LOOP, {}),
    "loop: all keys, soft cap": (LOOP, {"causal": False, "logits_soft_cap": 2.0}),
    "loop: window on both sides, lengths": (
        LOOP,
        {"window": 40, "causal": False, "kv_lengths": jnp.asarray([700, 1300])},
    ),
    "loop: offset and length a row, soft cap": (
        LOOP,
        {"q_offset": jnp.asarray([0, 200]), "kv_lengths": jnp.asarray([1300, 900]), "logits_soft_cap": 2.0},
    ),
    "loop: window, offset, segments": (
        LOOP,
        {
            "window": 300,
            "q_offset": 150,
            "q_segment_ids": segments(LOOP[0]),
            "kv_segment_ids": segments(LOOP[1]) % 9,
        },
    ),
    "unrolled: causal, grouped heads": (UNROLLED, {}),
    "unrolled: window on both sides, soft cap": (UNROLLED, {"causal": False, "window": 90, "logits_soft_cap": 2.0}),
    "unrolled: offset and length a row, segments": (
        UNROLLED,
        {
            "q_offset": jnp.asarray([0, 18]),
            "kv_lengths": jnp.asarray([530, 300]),
            "q_segment_ids": segments(UNROLLED[0]),
            "kv_segment_ids": segments(UNROLLED[1]),
        },
    ),
}


def of_arrays(implementation, options):
    """A jitted function of q, k, v and a cotangent: the output and the three gradients."""

    @jax.jit
    def run(q, k, v, ct):
        out, pull = riftco.vjp(lambda *qkv: ops.attention(*qkv, implementation=implementation, **options), q, k, v)
        return out, *pull(ct)

    return run


@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_rule(rng, name):
    (queries, keys), options = CASES[name]
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = array(2, queries, 2, 4), array(2, keys, 1, 4), array(2, keys, 1, 4)
    ct = array(2, queries, 2, 4)
    plain, ours = (of_arrays(how, options)(q, k, v, ct) for how in ("plain", "blockwise"))
    for wanted, got in zip(plain, ours, strict=True):
        # Keys gather sums over all queries: the error of a sum grows with its size.
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-6 * float(jnp.max(jnp.abs(wanted))) + 1e-6)


def shapes(length, heads=2, groups=2, width=8):
    return [jax.ShapeDtypeStruct((1, length, n, width), jnp.float32) for n in (heads, groups, groups)]


def saved_bytes(length, implementation):
    """What the backward pass is handed, in bytes; nothing is computed."""
    pull = jax.eval_shape(
        lambda *qkv: riftco.vjp(lambda *x: ops.attention(*x, implementation=implementation), *qkv)[1], *shapes(length)
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


@pytest.mark.parametrize(("short", "long"), [(256, 1024), (2048, 8192)])
def test_what_is_saved_grows_linearly(short, long):
    assert long > blockwise.UNROLLED_QUERIES or short <= blockwise.UNROLLED_QUERIES
    assert saved_bytes(long, "blockwise") == 4 * saved_bytes(short, "blockwise")
    assert saved_bytes(long, "plain") > 10 * saved_bytes(short, "plain"), "the measure does not tell the two apart"


@pytest.mark.parametrize(
    ("length", "sizes", "cap", "kept"),
    [
        (64, {}, None, False),
        (64, {"width": 32}, None, True),
        (64, {"width": 32}, 5.0, False),
        (64, {"width": 32, "heads": 4}, None, True),  # a row of 64 weights; q, and half of k and of v, have 64 as well
        (64, {"width": 32, "heads": 8}, None, False),  # with a quarter of k and of v it is 48
        (512, {}, None, False),
        (2048, {"width": 2048}, None, False),
    ],
)
def test_weights_are_kept_only_where_no_larger_than_q_k_and_v_together(length, sizes, cap, kept):
    q, k, v = shapes(length, **sizes)
    saved = jax.eval_shape(lambda q, k, v: blockwise.forward(q, k, v, Visibility(), 1.0, cap)[1], q, k, v)
    assert (saved.weights is not None) == kept
    if kept:
        assert sum(w.size for w in saved.weights) <= q.size + k.size + v.size
    assert (saved.out is not None) == (length > blockwise.UNROLLED_QUERIES)


def test_a_long_step_needs_far_less_memory_than_all_scores():
    def temporary(implementation):
        q, k, v = shapes(4096)
        return of_arrays(implementation, {}).lower(q, k, v, q).compile().memory_analysis().temp_size_in_bytes

    plain, ours = temporary("plain"), temporary("blockwise")
    assert plain > 4 * 2 * 4096**2, "the plain rule holds the scores of both heads"
    assert ours < plain / 10
