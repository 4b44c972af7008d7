"""Every public op: its twin, finite differences, jax.grad, jit, vmap, scan, bfloat16, bad inputs, planted errors."""

import functools
import importlib
import pathlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import _compat, errors, ops
from riftco.autodiff import Op, vjp
from riftco.ops import blockwise
from riftco.ops import check as checking
from riftco.ops.check import Moving, check_bad_input, check_op, cotangent_like, error_between, value_and_cotangents
from riftco.ops.spec import EXEMPT, REGISTRY, gaps, ops_table

CASES = [(spec, sample) for spec in REGISTRY.values() for sample in spec.samples]
BAD = [(spec, bad) for spec in REGISTRY.values() for bad in spec.bad_inputs]


def named(cases):
    return [pytest.param(*case, id=f"{case[0].name}-{case[1].name}".replace(" ", "_")) for case in cases]


# ------------------------------------------------------------------------------------------------ the registry


@pytest.mark.tiny
def test_the_registry_is_complete():
    assert gaps() == []


def test_a_missing_part_is_noticed(monkeypatch):
    monkeypatch.delitem(REGISTRY, "tanh")
    monkeypatch.setattr(ops, "__all__", [*ops.__all__, "cosh"])
    assert gaps() == ["cosh: not in the registry", "tanh: not in the registry"]


def test_a_missing_oracle_is_noticed(monkeypatch):
    spec = REGISTRY["exp"]
    monkeypatch.setitem(REGISTRY, "exp", type(spec)("exp", "elementwise", (), (), forward=lambda x: x))
    assert "exp: lacks samples" in gaps()
    nameless = type(spec)("cosh", "elementwise", spec.samples, spec.bad_inputs)
    monkeypatch.setitem(REGISTRY, "exp", nameless)
    assert "cosh: lacks an oracle" in gaps() and "cosh: lacks an oracle for its cotangents" in gaps()


@pytest.mark.tiny
def test_docs_are_current():
    page = pathlib.Path(riftco.__file__).parents[1] / "docs" / "ops.md"
    if not page.parent.exists():
        pytest.skip("the documentation is not beside an installed package")
    assert page.read_text(encoding="utf-8") == ops_table(), "write riftco.ops.spec.ops_table() to docs/ops.md"


# ------------------------------------------------------------------------------------------------ the checks


@pytest.mark.parametrize(("spec", "sample"), named(CASES))
def test_op(spec, sample):
    results = check_op(spec, sample)
    assert results
    assert [r for r in results if not r.passed] == []


@pytest.mark.tiny
@pytest.mark.parametrize("name", ["mul", "tanh", "matmul"])
def test_op_smoke(name):
    spec = REGISTRY[name]
    assert all(r.passed for r in check_op(spec, spec.samples[0]))


@pytest.mark.parametrize(("spec", "bad"), named(BAD))
def test_bad_input(spec, bad):
    result = check_bad_input(spec, bad)
    assert result.passed, result.message


def test_a_wrong_check_fails():
    """The comparisons themselves: shapes, NaN, infinities and sizes are all seen."""
    assert error_between([1.0, np.nan], [1.0, np.nan]) == 0.0
    assert error_between([1.0, np.nan], [1.0, 2.0]) == np.inf
    assert error_between([1.0, 2.0], [1.0, np.nan]) == np.inf
    assert error_between([-np.inf], [np.inf]) == np.inf
    assert error_between([[1.0]], [1.0]) == np.inf
    assert error_between([100.0, 1.0], [101.0, 1.0]) == pytest.approx(1 / 101)
    spec = REGISTRY["exp"]
    wrong = type(spec)("exp", "elementwise", spec.samples, spec.bad_inputs, run=lambda x: ops.exp(x) * 1.01)
    assert not any(r.passed for r in check_op(wrong, spec.samples[0], checks=["float64", "float32"]))
    narrow = type(spec)(
        "exp", "elementwise", spec.samples, spec.bad_inputs, run=lambda x: ops.astype(ops.exp(x), jnp.float16)
    )
    assert not any(r.passed for r in check_op(narrow, spec.samples[0], checks=["float64", "float32"]))


# ------------------------------------------------------------------------------------------------ transformations


EAGER = ("mul", "softmax", "take", "layer_norm", "cross_entropy")


@pytest.mark.parametrize("name", REGISTRY)
def test_equals_jax_and_transforms(name):
    """One compiled program: riftco's cotangents beside jax's, under vmap beside one by one, and inside a scan."""
    spec = REGISTRY[name]
    sample = spec.samples[0]
    moving = Moving(spec, spec.draw(sample))
    with _compat.enable_x64(True):
        values = [jnp.asarray(x) for x in moving.values(np.float64)]
        pair = [jnp.stack([x, x * 1.25]) for x in values]
        cotangent = jax.tree_util.tree_map(
            jnp.asarray, cotangent_like(spec.forward(*moving.call.args, **moving.call.kwargs))
        )
        run = functools.partial(value_and_cotangents, moving)

        def through_scan(*pair):
            def body(carry, xs):
                return carry, moving(*xs)

            return riftco.scan(body, (), pair)[1]

        @jax.jit
        def others(values, pair, cotangent):
            out, pull = jax.vjp(moving, *values)
            theirs = pull(jax.tree_util.tree_map(lambda c, y: c.astype(y.dtype), cotangent, out))
            twice = jax.tree_util.tree_map(lambda c: jnp.stack([c, c]), cotangent)
            batched = jax.vmap(lambda values: run(values, cotangent))(pair)
            return (out, theirs), batched, value_and_cotangents(through_scan, pair, twice)

        theirs, batched, looped = others(values, pair, cotangent)
        compiled = jax.jit(run)
        singles = [compiled([x[i] for x in pair], cotangent) for i in range(2)]
        stacked = jax.tree_util.tree_map(lambda *both: np.stack(both), *singles)
        assert _largest_error(theirs, singles[0]) <= 1e-12
        if name in EAGER:
            assert _largest_error(run(values, cotangent), singles[0]) <= 1e-12
    for other in (batched, looped):
        assert _largest_error(other, stacked) <= 1e-12


def _largest_error(tree, expected):
    leaves, others = jax.tree_util.tree_leaves(tree), jax.tree_util.tree_leaves(expected)
    assert len(leaves) == len(others) > 0
    return max(error_between(a, b) for a, b in zip(leaves, others, strict=True))


# ------------------------------------------------------------------------------------------------ planted errors


def _all_ops():
    """Every Op object of riftco.ops, by a name that says where it lives."""
    found = {}
    for module in pkgutil.iter_modules(ops.__path__, "riftco.ops."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Op) and value.name != "stop_gradient":
                found.setdefault(id(value), (f"{module.name.removeprefix('riftco.ops.')}.{name}", value))
    return dict(found.values())


OPS = _all_ops()


def _reached(order):
    """For every Op, the first sample whose derivative of this order calls its backward rule; traced, never run."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        current = []

        def watch(name, rule):
            def watched(*args, **static):
                found.setdefault(name, current[0])
                return rule(*args, **static)

            return watched

        for name, op in OPS.items():
            patch.setattr(op, "bwd", watch(name, op.bwd))
        for spec, sample in CASES:
            if sample.jit_only or (order == 2 and not spec.applies(sample, "second order")):
                continue
            current[:] = [(spec, sample)]
            moving = Moving(spec, spec.draw(sample))
            cotangent = cotangent_like(spec.forward(*moving.call.args, **moving.call.kwargs))
            values = [jnp.asarray(x, jnp.float32) for x in moving.values(np.float64)]

            def first(*values, moving=moving, cotangent=cotangent):
                return value_and_cotangents(moving, list(values), cotangent)[1]

            def second(values, cotangent, moving=moving):
                out, pull = vjp(lambda values, c: vjp(moving, *values)[1](c), values, cotangent)
                return pull(out)

            if order == 1:
                jax.eval_shape(first, *values)
            else:
                narrow = jax.tree_util.tree_map(lambda c: jnp.asarray(c, jnp.float32), cotangent)
                jax.eval_shape(second, values, narrow)
    return found


@pytest.fixture(scope="module")
def reached():
    return {1: _reached(1), 2: _reached(2)}


def test_every_backward_rule_is_reached(reached):
    assert sorted(set(OPS) - set(reached[1]) - set(reached[2])) == []


def _planted(rule):
    """The rule with its first cotangent 1 % too large."""

    def planted(*args, **static):
        results = rule(*args, **static)
        leaves, tree = jax.tree_util.tree_flatten(results)
        return jax.tree_util.tree_unflatten(tree, [leaves[0] * 1.01, *leaves[1:]])

    return planted


@pytest.mark.parametrize("name", OPS)
def test_a_planted_error_is_caught(name, reached, monkeypatch):
    order = 1 if name in reached[1] else 2
    spec, sample = reached[order][name]
    monkeypatch.setattr(OPS[name], "bwd", _planted(OPS[name].bwd))
    (result,) = check_op(spec, sample, checks=["float64" if order == 1 else "second order"])
    assert not result.passed
    assert result.message == ""  # it failed by its error, not by an exception


# ------------------------------------------------------------------------------------------------ facts about data


@pytest.mark.tiny
def test_stop_gradient():
    assert set(ops.__all__) - set(REGISTRY) == EXEMPT
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(riftco.grad(lambda x: ops.sum(x * ops.stop_gradient(x)))(x), x)


@pytest.mark.tiny
def test_data_dependent_errors_are_eager_and_nan_under_jit():
    table, ids = jnp.ones((3, 2)), jnp.array([0, 3, -1])
    with pytest.raises(errors.IndexRangeError):
        ops.take(table, ids)
    rows = jax.jit(ops.take)(table, ids)
    assert jnp.isnan(rows[1:]).all() and not jnp.isnan(rows[0]).any()
    with errors.domain_checks(False):
        np.testing.assert_array_equal(ops.take(table, ids), rows)
    assert jnp.isnan(jax.jit(ops.cross_entropy)(table[:, :2], jnp.array([0, 1, 2])))
    with errors.domain_checks(False):
        assert jnp.isinf(ops.div(jnp.ones(1), jnp.zeros(1))).all()


def test_the_gradient_of_a_bad_id_is_not_finite_under_jit():
    logits, ids = jnp.ones((3, 2)), jnp.array([0, 1, 2])
    gradient = jax.jit(riftco.grad(ops.cross_entropy))(logits, ids)
    assert jnp.isnan(gradient[2]).all() and jnp.isfinite(gradient[:2]).all()


def test_dropped_places_and_scale_agree():
    x, key = jnp.ones((64, 64)), jax.random.key(0)
    out = ops.dropout(x, key, 0.25)
    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    assert abs(float(jnp.mean(out == 0)) - 0.25) < 0.03
    np.testing.assert_array_equal(riftco.grad(lambda x: ops.sum(ops.dropout(x, key, 0.25)))(x), out)


# ------------------------------------------------------------------------------------------------ attention


def _qkv(time=5, keys=5, heads=4, groups=2, batch=2, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (batch, time, heads, 4), (batch, keys, groups, 4), (batch, keys, groups, 4)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
def test_stale_slots_past_the_length_are_never_read(implementation):
    """Whatever lies past a row's length, NaN and infinity included, changes no bit of the value or a gradient."""
    q, k, v = _qkv()
    lengths = jnp.array([2, 4], jnp.int32)
    stale = (jnp.arange(5)[None, :] >= lengths[:, None])[:, :, None, None]

    @jax.jit
    def run(q, k, v):
        f = functools.partial(ops.attention, causal=False, kv_lengths=lengths, implementation=implementation)
        out, pull = riftco.vjp(f, q, k, v)
        return out, pull(jnp.ones_like(out))

    clean = run(q, jnp.where(stale, 0.0, k), jnp.where(stale, 0.0, v))
    for poison in (jnp.nan, jnp.inf, -1e30):
        dirty = run(q, jnp.where(stale, poison, k), jnp.where(stale, poison, v))
        jax.tree_util.tree_map(np.testing.assert_array_equal, dirty, clean)
    assert (np.asarray(clean[1][1])[np.broadcast_to(stale, k.shape)] == 0.0).all()


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
def test_the_future_contributes_exactly_nothing(implementation):
    q, k, v = _qkv()

    @jax.jit
    def run(q, k, v):
        f = functools.partial(ops.attention, implementation=implementation)
        out, pull = riftco.vjp(lambda q, k, v: ops.slice(f(q, k, v), (0, 0, 0, 0), (2, 3, 4, 4)), q, k, v)
        return out, pull(jnp.ones_like(out))

    out, (dq, dk, dv) = run(q, k, v)
    later = run(q, k.at[:, 3:].add(7.0), v.at[:, 3:].mul(-3.0))[0]
    np.testing.assert_array_equal(out, later)
    for gradient in (dq, dk, dv):
        assert (np.asarray(gradient[:, 3:]) == 0.0).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"causal": False}, {"logits_soft_cap": 1.5}, {"q_offset": 2, "kv_lengths": np.array([5, 9])}],
    ids=["causal", "window", "everything", "cap", "offset"],
)
def test_the_loops_of_the_blockwise_rule(options, monkeypatch):
    """The form that long sequences take, made to run on short ones: several blocks, the last ones short."""
    monkeypatch.setattr(blockwise, "UNROLLED_QUERIES", 0)
    monkeypatch.setattr(blockwise, "LOOP_QUERIES", 4)
    monkeypatch.setattr(blockwise, "LOOP_KEYS", 4)
    spec = REGISTRY["attention"]
    q, k, v = (np.asarray(x, np.float64) for x in _qkv(7, 9))
    options = {name: np.asarray(x, np.int32) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    sample = checking.Sample("loops", lambda _: checking.Call((q, k, v), {"implementation": "blockwise", **options}))
    with _compat.enable_x64(True):
        moving = Moving(spec, spec.draw(sample))
        out, cotangent, cts = checking.expected(spec, moving, [q, k, v])
        ours, our_cts = jax.jit(functools.partial(value_and_cotangents, moving))([q, k, v], cotangent)
    assert error_between(ours, out) <= 1e-13
    assert max(map(error_between, our_cts, cts)) <= 1e-13


def test_weights_sum_to_one_or_nothing():
    q, k, _ = _qkv()
    lengths = jnp.array([0, 5], jnp.int32)
    sums = np.asarray(jnp.sum(ops.attention_weights(q, k, kv_lengths=lengths), axis=-1))
    np.testing.assert_array_equal(sums[0], 0.0)
    np.testing.assert_allclose(sums[1], 1.0, atol=1e-6)
