"""The battery: what every implementation of attention has to pass, through the public ops and riftco's own vjp.

Kernels run by their interpreters with small tiles. What a schedule does inside is in its own test file; which report of
a bug elsewhere is covered by which test is in docs/kernel_bugs.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import errors, ops, oracle
from riftco.ops import blockwise
from riftco.pallas import dispatch
from riftco.pallas.core.visibility import Visibility
from tests import kernel_cases
from tests.kernel_cases import (
    BF16,
    F32,
    KERNELS,
    LOGSUMEXP,
    LONG_SIZES,
    MIXED,
    OFFSETS,
    QUICK,
    RAGGED,
    ROWS,
    SIZES,
    WINDOWS,
    Case,
    assert_same_bits,
    assert_within_bars,
    draw,
    dtype_for,
    every,
    integers,
    mixed_rows,
    program,
    seen,
    skip_unless_supported,
    twin,
    worst,
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    kernel_cases.small_tiles(monkeypatch)


def run(rng, how, case, arrays, dtype=F32):
    """Inputs, what the implementation gives for them, the naive rule, and the twin."""
    dtype = dtype_for(how, dtype)
    skip_unless_supported(how, case, dtype)
    inputs = draw(rng, case, dtype)
    got, naive = (program(name, case)(*inputs, arrays) for name in (how, "plain"))
    return inputs, got, naive, twin(case, inputs, arrays)


def check(rng, how, case, arrays, dtype=F32):
    """Runs and holds against the bars; returns inputs and results."""
    inputs, got, naive, truth = run(rng, how, case, arrays, dtype)
    assert_within_bars(how, got, naive, truth, inputs[3])
    mask = seen(case, arrays)
    row, key = (~mask.any(axis) for axis in (2, 1))
    for x, unseen in zip(got, (row, row, key, key), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[unseen], 0)
    return inputs, got


# ------------------------------------------------------------------------------------------------ the bars


@every()
@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.slow)], ids=str)
def test_within_the_bars(rng, how, dtype):
    if dtype == F32 and how == "pallas_mosaic_gpu":
        pytest.skip("it multiplies no float32")
    check(rng, how, RAGGED, ROWS, dtype)


@every()
def test_within_the_bars_with_every_option_and_ranges_of_each_rows_own(rng, how):
    check(rng, how, MIXED, mixed_rows())


@every("blockwise", *KERNELS)
@pytest.mark.parametrize("case, arrays", [(RAGGED, ROWS), (MIXED, mixed_rows())], ids=["ragged", "mixed"])
def test_logsumexp_is_the_twins(rng, how, case, arrays):
    dtype = dtype_for(how)
    skip_unless_supported(how, case, dtype)
    q, k, v, _ = draw(rng, case, dtype)
    sees = Visibility(
        arrays.get("q_segment_ids"),
        arrays.get("kv_segment_ids"),
        arrays["q_offset"],
        arrays["kv_lengths"],
        causal=case.causal,
        window=case.window,
    )

    def statistics(q, k, v, sees):
        if how == "blockwise":
            return blockwise.forward(q, k, v, sees, 0.125, case.cap)[1].lse
        return dispatch.attention(how, q, k, v, sees, 0.125, case.cap, True)[1]

    lse = np.asarray(jax.jit(statistics, compiler_options=QUICK)(q, k, v, sees))
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    truth = oracle.attention_statistics(q, k, **case.static, **{n: np.asarray(x) for n, x in arrays.items()})
    assert lse.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(truth))
    some = np.isfinite(truth)
    np.testing.assert_array_equal(some, np.repeat(np.any(seen(case, arrays), axis=2)[:, None], q.shape[2], 1))
    assert worst(lse[some], truth[some]) <= LOGSUMEXP[dtype]


@every()
def test_no_cotangent_no_gradient(rng, how):
    dtype = dtype_for(how)
    skip_unless_supported(how, RAGGED, dtype)
    q, k, v, ct = draw(rng, RAGGED, dtype)
    for gradient in program(how, RAGGED)(q, k, v, jnp.zeros_like(ct), ROWS)[1:]:
        np.testing.assert_array_equal(gradient, 0)
    # Of one query head and one row only: nothing for other rows, other heads, and other key heads.
    ct = jnp.zeros_like(ct).at[0, :, 3].set(ct[0, :, 3])
    dq, dk, dv = program(how, RAGGED)(q, k, v, ct, ROWS)[1:]
    for x, own in ((dq, np.s_[0, :, 3]), (dk, np.s_[0, :, 1]), (dv, np.s_[0, :, 1])):
        x = np.array(x)
        assert np.any(x[own])
        x[own] = 0
        np.testing.assert_array_equal(x, 0)


# Mosaic GPU's interpreter multiplies by NumPy, which warns of the infinities that the mask then hides.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@every()
@pytest.mark.parametrize("case, arrays", [(RAGGED, ROWS), (MIXED, mixed_rows())], ids=["ragged", "mixed"])
def test_poison_past_the_lengths_changes_no_bit_and_runs_repeat(rng, how, case, arrays):
    dtype = dtype_for(how)
    skip_unless_supported(how, case, dtype)
    q, k, v, ct = draw(rng, case, dtype)
    clean = program(how, case)(q, k, v, ct, arrays)
    unused = (jnp.arange(case.shape[2])[None, :] >= arrays["kv_lengths"][:, None])[:, :, None, None]
    for poison in (np.nan, np.inf):
        dirty = (jnp.where(unused, jnp.asarray(poison, dtype), x) for x in (k, v))
        assert_same_bits(program(how, case)(q, *dirty, ct, arrays), clean)
    assert_same_bits(program(how, case)(q, k, v, ct, arrays), clean)
    assert all(np.all(np.isfinite(x)) for x in clean)


@every()
def test_rows_that_see_nothing_are_zeros_whatever_the_others_are(rng, how):
    """Output and every gradient exactly 0 where a length is 0, and where the queries stand before all keys."""
    dtype = dtype_for(how)
    skip_unless_supported(how, RAGGED, dtype)
    nothing = integers(q_offset=[0, -49, -50], kv_lengths=[0, 100, 50])
    for x in program(how, RAGGED)(*draw(rng, RAGGED, dtype), nothing):
        np.testing.assert_array_equal(x, 0)


# ------------------------------------------------------------------------------------------------ sizes


@every()
@pytest.mark.slow
@pytest.mark.parametrize("name", [*SIZES, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG_SIZES)])
def test_lengths_and_head_widths(rng, how, name):
    case, arrays, dtype = {**SIZES, **LONG_SIZES}[name]
    check(rng, how, case, arrays, dtype)


@every()
@pytest.mark.slow
def test_more_queries_than_keys_stand_where_the_offset_says(rng, how):
    """Aligned with the first key every query sees one; aligned with the last, those before the first key see none."""
    case, arrays, _ = SIZES["127-65"]
    dtype = dtype_for(how)
    skip_unless_supported(how, case, dtype)
    q, k, _, ct = draw(rng, case, dtype)
    out, dq, *_ = program(how, case)(q, k, jnp.ones_like(k), ct, arrays)
    expected = np.ones(out.shape)
    expected[1, : 127 - 65] = 0
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=1e-6 if dtype == F32 else 1e-2)
    np.testing.assert_array_equal(np.asarray(out)[1, : 127 - 65], 0)
    np.testing.assert_array_equal(np.asarray(dq)[1, : 127 - 65], 0)


@every()
@pytest.mark.slow
def test_key_lengths_alone_count(rng, how):
    """Nothing but the lengths is given, and a row is that of its keys cut off."""
    case, arrays, _ = SIZES["7-63"]
    dtype = dtype_for(how)
    skip_unless_supported(how, case, dtype)
    q, k, v, ct = draw(rng, case, dtype)
    out = program(how, case)(q, k, v, ct, arrays)[0]
    whole = program(how, case)(q, k, v, ct, integers(kv_lengths=[63, 63]))[0]
    assert np.all(np.any(np.asarray(out[0] != whole[0]), axis=-1))
    np.testing.assert_array_equal(out[1], whole[1])
    cut = oracle.attention(*(np.asarray(x, np.float64) for x in (q[:1], k[:1, :40], v[:1, :40])), causal=False)
    assert worst(out[:1], cut) <= kernel_cases.OUTPUT[dtype]


# ------------------------------------------------------------------------------------------------ scores far below 0


@every()
@pytest.mark.slow
@pytest.mark.parametrize("keys", [64, pytest.param(192, marks=pytest.mark.slow), 704])
def test_scores_near_minus_100_behind_a_mask(rng, how, keys):
    case = Case((1, 48, keys, 2, 1, 64), ("kv_lengths",), offset=keys - 48)
    arrays = integers(kv_lengths=[keys - 5])
    assert_far_below(rng, how, case, arrays, -100.0)


@every()
def test_one_query_with_scores_near_minus_128(rng, how):
    assert_far_below(rng, how, Case((2, 1, 192, 4, 2, 64), offset=191), {}, -128.0)


def assert_far_below(rng, how, case, arrays, shift):
    """All logits moved by one number, so that exp of them alone is 0: softmax and its gradients stay what they were."""
    dtype = dtype_for(how)
    skip_unless_supported(how, case, dtype)
    q, k, v, ct = draw(rng, case, dtype)
    size = (-shift * 64**0.5) ** 0.5
    q, k = q.at[..., 0].set(size), k.at[..., 0].set(-size)
    got, naive = (program(name, case)(q, k, v, ct, arrays) for name in (how, "plain"))
    truth = twin(case, (q, k, v, ct), arrays)
    for x, rule, exact in zip(got, naive, truth, strict=True):
        # A logit near -100 is known to 1e-5 and no better, in any implementation.
        bar = 3 * worst(rule, exact) + (1e-4 if dtype == F32 else 2e-2) * np.max(np.abs(exact))
        assert worst(x, exact) <= bar


# ------------------------------------------------------------------------------------------------ windows


@every()
@pytest.mark.parametrize("name", ["back", pytest.param("both", marks=pytest.mark.slow)])
def test_a_window_holds_exactly_its_keys(rng, how, name):
    """Values that name their keys: every query's output is the mean of the keys that it saw, and of no other."""
    case = WINDOWS[name]
    dtype = dtype_for(how)
    skip_unless_supported(how, case, dtype)
    q, k, v, ct = draw(rng, case, dtype)
    one_hot = jnp.broadcast_to(jnp.eye(110, 128, dtype=dtype)[None, :, None, :], v.shape)
    for offsets in OFFSETS:
        arrays = integers(q_offset=offsets)
        out = np.asarray(program(how, case)(jnp.zeros_like(q), k, one_hot, ct, arrays)[0], np.float64)
        mask = seen(case, arrays)
        for b, t in np.ndindex(out.shape[:2]):
            position = offsets[b] + t
            low, high = max(0, position - case.window + 1), position + (1 if case.causal else case.window)
            assert set(np.flatnonzero(out[b, t, 0])) == set(range(low, min(high, 110))), (b, t)
        mean = mask / np.maximum(mask.sum(2, keepdims=True), 1)
        assert worst(out[:, :, 0, :110], mean) <= (1e-6 if dtype == F32 else 1e-3)
        np.testing.assert_array_equal(out[:, :, 0], out[:, :, 1])


@every()
@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_windows_with_offsets_have_the_twins_outputs_and_gradients(rng, how, name, offsets):
    """The first tile visited is not the first, and the last queries are past the reach of every key."""
    check(rng, how, WINDOWS[name], integers(q_offset=offsets))


# ------------------------------------------------------------------------------------------------ grouped heads


@every()
def test_a_key_head_reaches_its_own_query_heads_and_no_other(rng, how):
    """Two key heads for six query heads, in rows with ranges of their own."""
    arrays, dtype = mixed_rows(), dtype_for(how)
    skip_unless_supported(how, MIXED, dtype)
    q, k, v, ct = draw(rng, MIXED, dtype)
    clean = program(how, MIXED)(q, k, v, ct, arrays)
    for head, own, others in ((0, np.s_[:3], np.s_[3:]), (1, np.s_[3:], np.s_[:3])):
        changed = program(how, MIXED)(q, k, v.at[:, :, head].add(1.0), ct, arrays)
        assert_same_bits((changed[0][:, :, others],), (clean[0][:, :, others],))
        sees_some = seen(MIXED, arrays).any(2)
        assert np.all(np.any(np.asarray(changed[0] != clean[0])[:, :, own], axis=3)[sees_some])


# ------------------------------------------------------------------------------------------------ transformations

LOOPED = Case((2, 12, 40, 2, 1, 64), ("kv_lengths", "kv_segment_ids", "q_offset", "q_segment_ids"), window=25)
STEPS = 3


def rows_of_step(step, xp=jnp):
    """Offsets, lengths and segments that follow from the number of a step, traced or not."""
    t, s = xp.arange(12, dtype=xp.int32)[None], xp.arange(40, dtype=xp.int32)[None]
    q = xp.concatenate([(t + 3 * step) // 9, (t + step) // 20])
    k = xp.concatenate([s // 9, s // 20])
    first = xp.asarray([3, 20], xp.int32)
    return {
        "q_offset": first + 4 * step,
        "kv_lengths": xp.asarray([15, 40], xp.int32) - 3 * step,
        "q_segment_ids": q,
        "kv_segment_ids": k,
    }


def expected_of_steps(inputs):
    steps = [twin(LOOPED, inputs, rows_of_step(np.int32(i), np)) for i in range(STEPS)]
    return [np.stack(x) for x in zip(*steps, strict=True)]


@every()
@pytest.mark.slow
def test_traced_lengths_and_masks_in_a_while_loop(rng, how):
    """Forward and backward in the body, with everything that masks made from the loop's own counter."""
    dtype = dtype_for(how)
    skip_unless_supported(how, LOOPED, dtype)
    inputs = draw(rng, LOOPED, dtype)

    def loop(q, k, v, ct):
        def body(state):
            step, *stacks = state
            found = kernel_cases.results(how, LOOPED, q, k, v, ct, rows_of_step(step))
            return step + 1, *(stack.at[step].set(x) for stack, x in zip(stacks, found, strict=True))

        stacks = [jnp.zeros((STEPS, *x.shape), x.dtype) for x in (q, q, k, v)]
        return jax.lax.while_loop(lambda state: state[0] < STEPS, body, (jnp.int32(0), *stacks))[1:]

    for x, exact in zip(jax.jit(loop, compiler_options=QUICK)(*inputs), expected_of_steps(inputs), strict=True):
        assert worst(x, exact) <= (3e-5 if dtype == F32 else 5e-2)


@every()
@pytest.mark.slow
def test_traced_lengths_and_masks_in_a_differentiated_scan(rng, how):
    dtype = dtype_for(how)
    skip_unless_supported(how, LOOPED, dtype)
    inputs = draw(rng, LOOPED, dtype)

    def steps(q, k, v):
        def body(carry, step, q, k, v):
            options = dict(implementation=how, interpret=how in KERNELS, window=LOOPED.window)
            return carry, ops.attention(q, k, v, **options, **rows_of_step(step))

        return riftco.scan(body, jnp.int32(0), jnp.arange(STEPS, dtype=jnp.int32), q, k, v)[1]

    def both(q, k, v, ct):
        out, pull = riftco.vjp(steps, q, k, v)
        return out, *pull(jnp.broadcast_to(ct[None], out.shape))

    out, *gradients = jax.jit(both, compiler_options=QUICK)(*inputs)
    exact_out, *exact = expected_of_steps(inputs)
    assert worst(out, exact_out) <= kernel_cases.OUTPUT[dtype]
    for x, exact_x in zip(gradients, exact, strict=True):
        assert kernel_cases.distance(x, exact_x.sum(0), inputs[3]) <= kernel_cases.GRADIENT[dtype]


@every()
@pytest.mark.slow
def test_with_and_without_jit(rng, how):
    case, arrays = Case((1, 5, 19, 1, 1, 64), ("kv_lengths",), offset=10), integers(kv_lengths=[14])
    dtype = dtype_for(how)
    skip_unless_supported(how, case, dtype)
    q, k, v, ct = draw(rng, case, dtype)
    options = dict(implementation=how, interpret=how in KERNELS, **case.static, **arrays)
    out, pull = riftco.vjp(lambda *qkv: ops.attention(*qkv, **options), q, k, v)
    for a, b in zip((out, *pull(ct)), program(how, case)(q, k, v, ct, arrays), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=2e-6 if dtype == F32 else 1e-2
        )


# ------------------------------------------------------------------------------------------------ dtypes


@every(mosaic_is_quick=True)
def test_mixed_dtypes_are_refused(how):
    q = jnp.ones((1, 4, 1, 64), BF16)
    for arrays in ((q.astype(F32), q, q), (q, q.astype(F32), q), (q, q, q.astype(F32))):
        with pytest.raises(errors.DTypeError, match=r"attention: .*float32"):
            ops.attention(*arrays, implementation=how, interpret=how in KERNELS)


@every()
def test_float16_runs_or_is_refused_with_the_reason(rng, how):
    case, dtype = Case((1, 33, 40, 2, 1, 64), offset=7), jnp.dtype("float16")
    q, k, v, ct = inputs = draw(rng, case, dtype)
    if how == "pallas_tpu":
        with pytest.raises(errors.UnsupportedError, match=r"attention\[pallas_tpu\].*float16"):
            program(how, case)(q, k, v, ct, {})
        return
    skip_unless_supported(how, case, dtype)
    got, naive = (program(name, case)(*inputs, {}) for name in (how, "plain"))
    assert_within_bars(how, got, naive, twin(case, inputs, {}), ct)
