"""Samplers: the rules against their float64 twin, the draws against their distribution, the contract row by row."""

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from riftco import sampling
from riftco.errors import DomainError, DTypeError, IndexRangeError, ShapeError, domain_checks
from riftco.oracle import samplers

RULES = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# Quarters make equal logits frequent, and two different logits differ by much more than a rounding.
LOGITS = hnp.arrays(np.float32, 7, elements=st.integers(-40, 40).map(lambda n: np.float32(n / 4)))


def draws(logits, count, seed=0, vocab_size=64, **parameters):
    """`count` draws from one row of logits, at positions 0 … count − 1; padded, since few shapes compile little."""
    rows = max(count, 400)
    row = np.full(vocab_size, -np.inf, np.float32)
    row[: len(logits)] = logits
    batch = jnp.broadcast_to(jnp.asarray(row)[None], (rows, vocab_size))
    return np.asarray(sampling.sample(batch, np.full(rows, seed), np.arange(rows), **parameters))[:count]


def probabilities(logits, **parameters):
    return np.asarray(jax.nn.softmax(sampling.filter_logits(jnp.asarray(logits), **parameters), axis=-1))


def near_a_boundary(logits, temperature, top_k, top_p, min_p):
    """Whether a threshold falls within a float32 rounding of a cumulated probability or of a ratio of two."""
    row = samplers.distribution(logits, temperature=temperature, top_k=top_k, top_p=1.0, min_p=0.0)
    ordered = row[samplers.descending(row)]
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    return np.any(np.abs(sums - top_p) < 1e-5) or np.any(np.abs(ordered / ordered[0] - min_p) < 1e-5)


@RULES
@given(
    LOGITS,
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.integers(-1, 9),
    st.floats(0.0, 1.0, width=32),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32)),
)
def test_the_filtered_distribution_is_the_oracles(logits, temperature, top_k, top_p, min_p):
    assume(
        temperature == 0 or not near_a_boundary(logits, temperature, top_k, top_p, min_p) or (top_p, min_p) == (1, 0)
    )
    expected = samplers.distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    traced = {name: jnp.asarray([value]) for name, value in parameters.items()}
    for got in (probabilities(logits[None], **traced)[0], probabilities(logits, **parameters)):
        np.testing.assert_array_equal(got > 0, expected > 1e-40)
        np.testing.assert_allclose(got, expected, atol=2e-6)


@RULES
@given(
    LOGITS,
    st.lists(st.integers(0, 6), max_size=6),
    st.lists(st.integers(0, 6), max_size=6),
    st.sampled_from([0.5, 1.0, 1.5]),
    st.sampled_from([-0.5, 0.0, 1.25]),
    st.sampled_from([-0.5, 0.0, 0.75]),
)
def test_penalties_are_the_oracles(logits, prompt, output, repetition, presence, frequency):
    expected = samplers.apply_penalties(
        logits, prompt, output, repetition=repetition, presence=presence, frequency=frequency
    )
    padded = [jnp.asarray([ids + [-1] * (6 - len(ids))], jnp.int32) for ids in (prompt, output)]
    counts = [sampling.count_tokens(ids, 7) for ids in padded]
    for wrap in (float, lambda number: jnp.asarray([number], jnp.float32)):
        got = sampling.apply_penalties(
            jnp.asarray(logits[None]),
            *counts,
            repetition=wrap(repetition),
            presence=wrap(presence),
            frequency=wrap(frequency),
        )
        np.testing.assert_allclose(got[0], expected, rtol=1e-6)


def test_oracle_rules_by_hand():
    row = np.array([0.4, 0.1, 0.4, 0.1])
    np.testing.assert_allclose(samplers.keep_top_k(row, 3), [4 / 9, 1 / 9, 4 / 9, 0])
    np.testing.assert_allclose(samplers.keep_top_p(row, 0.4), [1, 0, 0, 0])
    np.testing.assert_allclose(samplers.keep_top_p(row, 0.41), [0.5, 0, 0.5, 0])
    np.testing.assert_allclose(samplers.keep_min_p(row, 0.5), [0.5, 0, 0.5, 0])
    np.testing.assert_allclose(samplers.apply_temperature([0.0, np.log(2)], 0.5), [0.2, 0.8])


@pytest.mark.tiny
def test_the_order_is_temperature_then_top_k_then_top_p_then_min_p():
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1], np.float32))
    # top-p after top-k: within the two kept, the first holds 5/7 of the mass, so 0.7 keeps it alone.
    np.testing.assert_allclose(probabilities(logits, top_k=2, top_p=0.7), [1, 0, 0, 0], atol=1e-6)
    # temperature before top-p: at 0.5 the first holds 25/34.
    np.testing.assert_allclose(probabilities(logits, temperature=0.5, top_p=0.7), [1, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, top_p=0.7), [5 / 7, 2 / 7, 0, 0], atol=1e-6)


def test_min_p_keeps_what_is_exactly_at_the_threshold():
    np.testing.assert_array_equal(probabilities(np.zeros(4, np.float32), min_p=1.0), np.full(4, 0.25))


@pytest.mark.parametrize("top_k", [-1, 0, 8, 99])
@pytest.mark.parametrize("traced", [False, True])
def test_top_k_out_of_range_is_off(top_k, traced):
    got = draws(np.zeros(8), 400, vocab_size=8, top_k=jnp.full(400, top_k) if traced else top_k)
    assert set(got.tolist()) == set(range(8))
    np.testing.assert_array_equal(got, draws(np.zeros(8), 400, vocab_size=8))


@pytest.mark.parametrize("k", range(1, 8))
def test_exactly_k_are_kept_and_equals_go_to_the_lower_ids(k):
    logits = np.array([1, 2, 2, 2, -0.0, 0.0, 0.0, -0.0], np.float32)
    expected = [1, 2, 3, 0, 4, 5, 6, 7][:k]
    for top_k in (k, jnp.asarray(k)):
        assert sorted(expected) == np.flatnonzero(probabilities(logits, top_k=top_k)).tolist()


@pytest.mark.tiny
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-45, 1e-38, 1e-9, np.float32(0), jnp.zeros(5), jnp.full(5, 1e-9)])
def test_temperature_zero_is_greedy(temperature):
    logits = np.array([[0, 3, 3 - 1e-3, -np.inf]], np.float32).repeat(5, 0)
    ids = sampling.sample(logits, np.arange(5), np.arange(5), temperature=temperature)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, np.full(5, 1))


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([[1, 5, 5, 5], [2, 2, 2, 2], [-0.0, 0, -1, 0]], np.float32)
    np.testing.assert_array_equal(sampling.greedy(logits), [1, 0, 0])
    for options in ({"temperature": 0}, {"temperature": jnp.zeros(3)}, {"temperature": jnp.zeros(3), "top_p": 0.9}):
        np.testing.assert_array_equal(sampling.sample(logits, np.arange(3), np.arange(3), **options), [1, 0, 0])


def test_every_position_is_a_new_draw():
    assert len(set(draws(np.zeros(64), 64).tolist())) > 20


def test_every_seed_has_its_own_first_token():
    ids = sampling.sample(jnp.zeros((32, 16)), np.arange(32), np.zeros(32, int))
    assert len(set(np.asarray(ids).tolist())) > 4


def test_the_same_seed_and_position_is_the_same_draw():
    np.testing.assert_array_equal(draws(np.zeros(64), 40, seed=3), draws(np.zeros(64), 40, seed=3))
    assert np.any(draws(np.zeros(64), 40, seed=3) != draws(np.zeros(64), 40, seed=4))


def test_a_wide_or_negative_seed_keeps_its_low_32_bits():
    wide, narrow = 2**40 + 7, 7
    np.testing.assert_array_equal(draws(np.zeros(64), 40, seed=wide), draws(np.zeros(64), 40, seed=narrow))
    np.testing.assert_array_equal(draws(np.zeros(64), 40, seed=-1), draws(np.zeros(64), 40, seed=2**32 - 1))


def test_batch_mates_and_the_place_in_the_batch_change_nothing(rng):
    logits = rng.normal(size=(8, 50)).astype(np.float32)
    seeds, positions = np.arange(8) + 10, np.arange(8) * 3
    parameters = {
        "temperature": np.linspace(0, 2, 8).astype(np.float32),
        "top_k": np.array([0, 3, 50, -1, 5, 1, 7, 20], np.int32),
        "top_p": np.linspace(1, 0.3, 8).astype(np.float32),
        "min_p": np.linspace(0, 0.1, 8).astype(np.float32),
    }
    together = np.asarray(sampling.sample(logits, seeds, positions, **parameters))
    for order in (np.arange(8)[::-1], *[np.array([row]) for row in range(8)]):
        some = sampling.sample(
            logits[order], seeds[order], positions[order], **{name: value[order] for name, value in parameters.items()}
        )
        np.testing.assert_array_equal(some, together[order])


def test_numbers_and_arrays_and_jit_draw_the_same(rng):
    logits = rng.normal(size=(6, 40)).astype(np.float32)
    seeds, positions = np.arange(6), np.arange(6)
    jitted = jax.jit(sampling.sample)
    for temperature, top_k, top_p, min_p in [
        (0, 5, 0.8, 0.0),
        (0.7, 0, 1.0, 0.0),
        (0.7, 5, 0.8, 0.2),
        (1.3, 0, 0.9, 0.0),
    ]:
        numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        arrays = {name: jnp.full(6, value) for name, value in numbers.items()}
        expected = sampling.sample(logits, seeds, positions, **numbers)
        np.testing.assert_array_equal(sampling.sample(logits, seeds, positions, **arrays), expected)
        traced = jitted(logits, seeds, positions, **arrays)
        np.testing.assert_array_equal(traced, expected)


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 2.0},
        {"top_p": 0.75},
        {"temperature": 0.5, "top_k": 4, "top_p": 0.95, "min_p": 0.01},
    ],
)
def test_frequencies_follow_the_distribution(parameters):
    logits = np.array([1.0, 0.5, 0.5, 0.0, -1.0, -3.0], np.float32)
    count = 8_000
    observed = np.bincount(draws(logits, count, seed=1, **parameters), minlength=6)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters
    expected = samplers.distribution(logits, **full) * count
    assert np.all(observed[expected == 0] == 0)
    kept = expected > 0
    # Five standard deviations of a multinomial count.
    assert np.all(np.abs(observed - expected)[kept] <= 5 * np.sqrt(expected * (1 - expected / count))[kept] + 1e-9)


def test_banned_tokens_are_never_drawn():
    logits = np.array([0, -np.inf, 0, -np.inf], np.float32)
    for parameters in ({}, {"top_k": 3}, {"min_p": jnp.zeros(400)}):
        assert set(draws(logits, 200, **parameters).tolist()) == {0, 2}


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_row_without_a_finite_maximum_raises_and_is_minus_one_under_jit(parameters):
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2], logits[2, 0] = np.nan, np.inf
    arguments = (logits, np.arange(3), np.arange(3))
    with pytest.raises(DomainError, match=r"rows \[1, 2\]"):
        sampling.sample(*arguments, **parameters)
    under_jit = np.asarray(jax.jit(lambda *a: sampling.sample(*a, **parameters))(*arguments))
    with domain_checks(False):
        unchecked = np.asarray(sampling.sample(*arguments, **parameters))
    np.testing.assert_array_equal(under_jit, unchecked)
    assert under_jit[0] >= 0 and under_jit.tolist()[1:] == [-1, -1]
    assert np.all(np.isnan(sampling.filter_logits(jnp.asarray(logits), **parameters)[1:]))
    np.testing.assert_array_equal(sampling.greedy(jnp.asarray(logits)), [0, -1, -1])


def test_a_row_of_minus_infinity_has_nothing_to_draw():
    with pytest.raises(DomainError):
        draws([-np.inf, -np.inf], 1)


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": -1.0}, {"top_p": 1.5}, {"top_p": float("nan")}, {"min_p": -0.1}, {"temperature": np.inf}],
)
def test_parameters_out_of_range(parameters):
    with pytest.raises(DomainError):
        draws([0, 0], 2, **parameters)
    arrays = {name: jnp.asarray([value, 0.5], jnp.float32) for name, value in parameters.items()}
    ids = jax.jit(sampling.sample)(jnp.zeros((2, 3)), np.arange(2), np.arange(2), **arrays)
    assert np.asarray(ids).tolist()[0] == -1 and np.asarray(ids)[1] >= 0
    with pytest.raises(DomainError, match=r"rows \[0\]"):
        sampling.sample(jnp.zeros((2, 3)), np.arange(2), np.arange(2), **arrays)


def test_wrong_shapes_and_dtypes():
    logits, index = jnp.zeros((2, 4)), np.arange(2)
    for wrong in (jnp.zeros(4), jnp.zeros((1, 2, 4)), jnp.zeros((2, 0))):
        with pytest.raises(ShapeError, match="logits"):
            sampling.sample(wrong, index, index)
    with pytest.raises(DTypeError, match="floating"):
        sampling.sample(jnp.zeros((2, 4), jnp.int32), index, index)
    with pytest.raises(ShapeError, match="seeds"):
        sampling.sample(logits, np.arange(3), index)
    with pytest.raises(DTypeError, match="positions"):
        sampling.sample(logits, index, np.zeros(2))
    with pytest.raises(ShapeError, match="top_p"):
        sampling.sample(logits, index, index, top_p=jnp.ones(3))
    for top_k in (2.0, jnp.ones(2)):
        with pytest.raises(DTypeError, match="top_k"):
            sampling.sample(logits, index, index, top_k=top_k)
    with pytest.raises(ShapeError, match="prompt_counts"):
        sampling.apply_penalties(logits, jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(DomainError, match="repetition"):
        sampling.apply_penalties(logits, jnp.zeros((2, 4), int), jnp.zeros((2, 4), int), repetition=0.0)


def test_low_precision_logits_are_filtered_in_float32():
    logits = jnp.asarray([[0.0, 1.0, 2.0]], jnp.bfloat16)
    filtered = sampling.filter_logits(logits, temperature=0.3, top_p=0.99)
    assert filtered.dtype == jnp.float32
    expected = samplers.distribution([0, 1, 2], temperature=0.3, top_k=0, top_p=0.99, min_p=0.0)
    np.testing.assert_allclose(jax.nn.softmax(filtered[0]), expected, atol=1e-6)


def test_no_vocabulary_is_sorted_and_what_is_off_costs_nothing():
    logits, index = jnp.zeros((2, 50)), jnp.arange(2)

    def program(**parameters):
        return str(jax.make_jaxpr(lambda x: sampling.sample(x, index, index, **parameters))(logits))

    assert " sort" not in program(top_k=jnp.ones(2, int), top_p=0.5)
    assert " while" in program(top_p=0.5) or " scan" in program(top_p=0.5)
    for parameters in ({}, {"top_k": 0}, {"top_k": 50}, {"temperature": jnp.ones(2)}, {"temperature": 0, "top_p": 0.5}):
        text = program(**parameters)
        assert " while" not in text and " scan" not in text
    assert "threefry" not in program(temperature=0) and "random" not in program(temperature=0)
    assert "random" in program()


def test_a_new_number_compiles_nothing_new():
    arguments = (jnp.zeros((2, 9)), np.arange(2), np.arange(2))
    sampling.sample(*arguments, temperature=0.5, top_p=0.5)
    before = sampling._sample._cache_size()
    sampling.sample(*arguments, temperature=0.6, top_p=0.7)
    assert sampling._sample._cache_size() == before


def test_count_tokens_ignores_padding():
    ids = jnp.asarray([[0, 1, 1, -1], [3, 3, 3, 2]], jnp.int32)
    np.testing.assert_array_equal(sampling.count_tokens(ids, 3), [[1, 2, 0], [0, 0, 1]])
    np.testing.assert_array_equal(
        sampling.count_tokens(ids, 4, lengths=jnp.asarray([1, 3])), [[1, 0, 0, 0], [0, 0, 0, 3]]
    )


def test_logit_bias():
    vector = sampling.logit_bias_vector({1: -np.inf, 2: 100}, 4)
    np.testing.assert_array_equal(vector, np.array([0, -np.inf, 100, 0], np.float32))
    assert set(draws(vector, 50).tolist()) == {2}
    with pytest.raises(IndexRangeError, match="0 … 3"):
        sampling.logit_bias_vector({4: 1.0}, 4)
    with pytest.raises(DomainError):
        sampling.logit_bias_vector({0: float("nan")}, 4)
