"""Which implementation runs, the reasons for it, and the tile maths that every kernel shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco.errors import ConfigError, UnsupportedError
from riftco.pallas import dispatch
from riftco.pallas.core import softmax
from riftco.pallas.core.visibility import (
    Visibility,
    keys_seen,
    keys_seen_by_all,
    queries_seeing,
    queries_seeing_all,
    sees,
)

ROWS, KEYS = 7, 11
OPTIONS = [dict(causal=causal, window=window) for causal in (True, False) for window in (None, 1, 3, 20)]


@pytest.mark.tiny
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("offset", [0, 4, 30])
@pytest.mark.parametrize("traced", [False, True])
def test_tile_bounds_are_what_the_mask_says(options, offset, traced):
    mask = np.ones((ROWS, KEYS), bool)
    position, key = np.arange(ROWS)[:, None] + offset, np.arange(KEYS)[None, :]
    seen = sees(position, key, **options)
    mask = mask if seen is None else np.broadcast_to(seen, mask.shape)
    number = jnp.int32 if traced else int
    for first in range(ROWS):
        for last in range(first + 1, ROWS + 1):
            part = mask[first:last]
            bounds = (number(offset + first), number(offset + last), number(KEYS))
            low, high = map(int, keys_seen(*bounds, **options))
            some = np.flatnonzero(part.any(0))
            assert (low, high) == ((some[0], some[-1] + 1) if some.size else (low, low))
            low, high = map(int, keys_seen_by_all(*bounds, **options))
            every = np.flatnonzero(part.all(0))
            assert (low, high) == ((every[0], every[-1] + 1) if every.size else (low, low))
    for first in range(KEYS):
        for last in range(first + 1, KEYS + 1):
            bounds = (number(first), number(last), number(offset), number(offset + ROWS))
            low, high = map(int, queries_seeing(*bounds, **options))
            some = np.flatnonzero(mask[:, first:last].any(1)) + offset
            assert (low, high) == ((some[0], some[-1] + 1) if some.size else (low, low))
            low, high = map(int, queries_seeing_all(*bounds, **options))
            every = np.flatnonzero(mask[:, first:last].all(1)) + offset
            assert (low, high) == ((every[0], every[-1] + 1) if every.size else (low, low))


def test_the_running_softmax_over_tiles_is_the_softmax(rng):
    q, k, v = (rng.normal(size=(n, 8)).astype(np.float32) for n in (5, 12, 12))
    mask = rng.random((5, 12)) < 0.5
    mask[2], mask[3, :6] = False, False
    top, total, acc = jnp.full((5, 1), -jnp.inf), jnp.zeros((5, 1)), jnp.zeros((5, 8))
    for first in range(0, 12, 3):
        part = np.s_[first : first + 3]
        s, _ = softmax.scores(q @ k[part].T, 0.3, 2.0)
        top, total, p, factor = softmax.update(top, total, softmax.masked(s, mask[:, part]))
        acc = acc * factor + p @ v[part]
    out, lse = softmax.finish(top, total, acc)
    scores = np.where(mask, 2.0 * np.tanh(q @ k.T * 0.3 / 2.0), -np.inf)
    with np.errstate(all="ignore"):
        p = np.exp(scores - np.max(scores, 1, keepdims=True))
        expected = p / p.sum(1, keepdims=True)
        expected_lse = np.log(np.exp(scores).sum(1, keepdims=True))
    expected[2] = 0.0
    np.testing.assert_allclose(out, expected @ v, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)
    s, _ = softmax.scores(q @ k.T, 0.3, 2.0)
    np.testing.assert_allclose(softmax.weights(softmax.masked(s, mask), lse), expected, atol=2e-6)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_over_disjoint_keys_combine(rng, parts):
    scores, v = rng.normal(size=(4, 12)), rng.normal(size=(12, 8))
    scores[1, :4], scores[2] = -np.inf, -np.inf
    outs, lses = [], []
    for s, values in zip(np.split(scores, parts, 1), np.split(v, parts), strict=True):
        w = np.exp(s)
        total = w.sum(1, keepdims=True)
        outs.append(np.where(total == 0, np.nan, w @ values / np.where(total == 0, 1, total)))
        with np.errstate(divide="ignore"):
            lses.append(np.log(total[:, 0]))
    out, lse = softmax.combine(jnp.asarray(np.stack(outs), jnp.float32), jnp.asarray(np.stack(lses), jnp.float32))
    w = np.exp(scores)
    total = w.sum(1, keepdims=True)
    np.testing.assert_allclose(out, np.where(total == 0, 0, w @ v / np.where(total == 0, 1, total)), atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(total[:, 0]), atol=1e-6)


def test_a_part_that_saw_nothing_may_hold_anything():
    out = jnp.stack([jnp.full((2, 3), 0.5), jnp.full((2, 3), jnp.nan)])
    lse = jnp.asarray([[0.25, -jnp.inf], [-jnp.inf, -jnp.inf]])
    combined, total = softmax.combine(out, lse)
    np.testing.assert_array_equal(combined, [[0.5] * 3, [0.0] * 3])
    np.testing.assert_array_equal(total, [0.25, -np.inf])


@pytest.mark.tiny
def test_none_takes_an_xla_rule_on_a_cpu_and_names_are_honoured_or_refused():
    q = jnp.ones((1, 64, 2, 16))
    call = (q, q, q, Visibility(), None)
    assert dispatch.choose("attention", None, "blockwise", False, (q,), *call) == "blockwise"
    assert dispatch.choose("attention", "plain", "blockwise", False, (q,), *call) == "plain"
    for name in ("pallas_tpu", "pallas_triton", "pallas_mosaic_gpu", "cudnn"):
        with pytest.raises(UnsupportedError, match=rf"attention\[{name}\]"):
            dispatch.choose("attention", name, "blockwise", False, (q,), *call)
    with pytest.raises(ConfigError, match="implementation must be None or one of"):
        dispatch.choose("attention", "fast", "blockwise", False, (q,), *call)
    for name in (None, "plain"):
        with pytest.raises(UnsupportedError, match="nothing to interpret"):
            dispatch.choose("attention", name, "blockwise", True, (q,), *call)


@pytest.mark.tiny
def test_the_target_of_a_trace():
    assert dispatch.current_target().platform == "cpu"
    with dispatch.target("GPU", "NVIDIA H200") as outer:
        assert dispatch.current_target(jnp.ones(2)) == outer == dispatch.Target("cuda", "NVIDIA H200")
        with dispatch.target("tpu"):
            assert dispatch.current_target().platform == "tpu"
        assert dispatch.current_target() == outer
    device = jax.devices()[3]
    with jax.default_device(device):
        assert dispatch.current_target().platform == "cpu"
    assert {row[0] for row in dispatch.explain()} == {"attention", "paged_attention", "nf4_linear"}


def test_what_is_said_of_a_kernel_is_what_naming_it_does():
    """No kernel is said to run by its interpreter that its module cannot run on this jax."""
    said = {name: reason for op, name, reason in dispatch.explain(dispatch.Target("cpu")) if op == "attention"}
    q = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    for name in ("pallas_tpu", "pallas_triton", "pallas_mosaic_gpu", "cudnn"):
        refused = dispatch.refusal("attention", name, dispatch.Target("cpu"), True, q, q, q, Visibility(), None)
        assert ("interpret=True" in said[name]) == (refused is None), (name, said[name], refused)
