import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from riftco import optim
from riftco.errors import ConfigError, DTypeError, ShapeError
from riftco.oracle import optim as oracle

FLOAT32_MAX = float(np.finfo(np.float32).max)


def f32(*values):
    return jnp.asarray(values, jnp.float32)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def trajectory(gradients, params, **options):
    """Parameters and stats after each update with the given gradients."""
    rate = options.pop("learning_rate")
    init, update = jitted(rate, **options)
    state, out = init(params), []
    for gradient in gradients:
        params, state, stats = update(gradient, state, params)
        out.append((params, stats))
    return out


@functools.cache
def jitted(learning_rate, **options):
    """Adam with a jitted update, one for all tests with these options: they then share what is compiled."""
    init, update = optim.adam(learning_rate, **options)
    return init, jax.jit(update)


def random_tree(rng, scale=1.0):
    array = lambda *shape: jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)
    return {"embedding": array(7, 3), "blocks": {"weight": array(2, 3, 5), "bias": array(2, 5)}, "gain": array()}


# Hand cases: each number is the Adam recurrence worked out on paper.


@pytest.mark.tiny
def test_hand_case_with_a_vanishing_gradient():
    out = trajectory([f32(2), f32(1), f32(0)], f32(1), learning_rate=0.1, b1=0.5, b2=0.5, eps=1.0, max_grad_norm=100.0)
    got = [float(params[0]) for params, _ in out]
    np.testing.assert_allclose(got, [0.9333333, 0.8781048583502540, 0.8484328982592746], rtol=2e-6, atol=2e-6)
    assert [int(stats.step) for _, stats in out] == [1, 2, 3]


def test_hand_case_of_a_constant_gradient():
    gradients = [f32(2, -3)] * 4
    out = trajectory(gradients, f32(1, -1), learning_rate=0.1, b1=0.8, b2=0.9, eps=1.0, max_grad_norm=100.0)
    for t, (params, _) in enumerate(out, start=1):
        np.testing.assert_allclose(params, [1 - t / 15, -1 + 0.075 * t], rtol=2e-6, atol=2e-6)


def test_hand_case_of_a_clipped_norm_over_three_leaves():
    params, gradient = (f32(10), f32(20), f32(30)), (f32(3), f32(4), f32(12))
    ((params, stats),) = trajectory([gradient], params, learning_rate=0.1, b1=0.5, b2=0.5, eps=1.0, max_grad_norm=6.5)
    assert float(stats.grad_norm) == pytest.approx(13, rel=1e-6) and float(stats.clip_scale) == 0.5
    np.testing.assert_allclose(jnp.concatenate(params), [9.94, 19.9333333, 29.9142857], rtol=2e-6)


@pytest.mark.parametrize("unit", [1.0, 2.0**80, 2.0**-110])
def test_a_norm_at_the_limit_is_not_clipped(unit):
    options = {"learning_rate": 0.1, "b1": 0.5, "b2": 0.5, "eps": unit, "max_grad_norm": 5 * unit}
    gradient, zeros = (f32(3 * unit), f32(4 * unit)), (f32(0), f32(0))
    ((params, stats),) = trajectory([gradient], zeros, **options)
    assert float(stats.clip_scale) == 1.0 and float(stats.grad_norm) == 5 * unit
    if 1e-15 < unit < 1e19:  # beyond, (3·unit)² is no float32
        np.testing.assert_allclose(jnp.concatenate(params), [-0.075, -0.08], rtol=2e-6)
    ((_, stats),) = trajectory([(gradient[0], gradient[1] * (1 + 2e-6))], zeros, **options)
    assert float(stats.clip_scale) < 1.0


@pytest.mark.parametrize("size", [1e20, 3e38, 1e-30])
def test_the_norm_survives_overflow_and_underflow(size):
    gradient = {"a": f32(size, -size), "b": jnp.full((3, 2), -size, jnp.float32)}
    ((params, stats),) = trajectory([gradient], jax.tree.map(jnp.zeros_like, gradient), learning_rate=0.1)
    wanted = min(oracle.global_norm(jax.tree.leaves(gradient)), FLOAT32_MAX)
    assert float(stats.grad_norm) == pytest.approx(wanted, rel=1e-6)
    assert float(optim.global_norm(gradient)) == pytest.approx(wanted, rel=1e-6)
    assert bool(stats.ok) and math.isfinite(float(stats.clip_scale))
    assert float(stats.clip_scale) == pytest.approx(min(1.0, 1.0 / wanted), rel=1e-6, abs=3e-38)
    if size > 1:  # clipped to 1/√8 each: the first update is −lr·sign to rounding
        np.testing.assert_allclose(params["b"], 0.1, rtol=1e-5)
        np.testing.assert_allclose(params["a"], [-0.1, 0.1], rtol=1e-5)


def test_tiny_gradients_follow_the_eps_outside_the_root():
    gradient = f32(1e-8, -3e-8)
    ((params, _),) = trajectory([gradient], f32(0, 0), learning_rate=0.1)
    np.testing.assert_allclose(params, [-0.1 * 1 / 2, 0.1 * 3 / 4], rtol=1e-5)


# Against the oracle, and against optax.


@pytest.mark.parametrize("page_size, limit, decay", [(None, 0.5, 0.1), (3, None, 0.0)])
def test_many_steps_equal_the_oracle(rng, page_size, limit, decay):
    params = random_tree(rng)
    mask = {"embedding": True, "blocks": {"weight": True, "bias": False}, "gain": False}
    rate = optim.warmup_cosine(1e-2, 3, 12, 1e-3)
    init, update = optim.adam(
        rate, b2=0.95, max_grad_norm=limit, weight_decay=decay, decay_mask=mask, page_size=page_size
    )
    update = jax.jit(update)
    state, theirs = init(params), [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
    their_state, decays = oracle.adam_init(theirs), jax.tree.leaves(mask)
    their_rate = lambda t: oracle.learning_rate("cosine", t, peak=1e-2, warmup_steps=3, total_steps=12, min_lr=1e-3)
    for _ in range(14):
        gradient = random_tree(rng)
        params, state, stats = update(gradient, state, params)
        theirs, their_state, their_stats = oracle.adam_step(
            jax.tree.leaves(gradient),
            their_state,
            theirs,
            learning_rate=their_rate,
            b2=float(np.float32(0.95)),
            b1=float(np.float32(0.9)),
            max_grad_norm=limit,
            weight_decay=decay,
            decays=decays,
        )
        np.testing.assert_allclose(stats.grad_norm, their_stats.grad_norm, rtol=1e-6)
        np.testing.assert_allclose(stats.clip_scale, their_stats.clip_scale, rtol=1e-6)
        assert bool(stats.ok) and int(stats.step) == their_stats.step
    logical = optim.logical_state(state, params)
    for ours, wanted in zip(jax.tree.leaves(params), theirs, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-6, atol=2e-6)
    for ours, wanted in zip(jax.tree.leaves((logical.m, logical.v)), their_state.m + their_state.v, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=3e-6, atol=1e-7)


def test_equal_to_optax_adamw(rng):
    gradients, theirs = [random_tree(rng) for _ in range(20)], random_tree(rng)
    ours = trajectory(gradients, theirs, learning_rate=0.1, weight_decay=0.1)[-1][0]
    with jax.numpy_dtype_promotion("standard"):
        peer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.1))
        their_state = peer.init(theirs)
        for gradient in gradients:
            updates, their_state = jax.jit(peer.update)(gradient, their_state, theirs)
            theirs = optax.apply_updates(theirs, updates)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, theirs)


def test_the_bias_correction_keeps_its_digits():
    # With a constant gradient, m/(1 − b1^t) is g and v/(1 − b2^t) is g² at every t: each update is −lr·sign(g).
    # A float32 power would lose four digits of 1 − b2^t at t = 1 for b2 = 0.9999.
    init, update = jitted(1.0, b1=0.99, b2=0.9999, eps=1e-30)
    params, state = f32(0), init(f32(0))
    for t in range(1, 4):
        params, state, _ = update(f32(0.5), state, params)
        assert float(params[0]) == pytest.approx(-t, rel=2e-6)
    later = optim.AdamState(jnp.int32(10**6), f32(0.5), f32(0.25))
    params, _, _ = update(f32(0.5), later, f32(0))
    assert float(params[0]) == pytest.approx(-1, rel=2e-6)


def test_b1_and_b2_of_zero_are_sign_descent():
    ((params, _),) = trajectory([f32(0.3, -0.2)], f32(1, 1), learning_rate=0.5, b1=0.0, b2=0.0)
    np.testing.assert_allclose(params, [0.5, 1.5], rtol=1e-6)


# The whole-step commit.


def test_zero_gradients_on_a_fresh_state_change_no_bit(rng):
    signed = jnp.tile(f32(-0.0, 0.0, 1e-40, FLOAT32_MAX, -1e-40, -FLOAT32_MAX, 1.0)[:, None], 3)
    params = {**random_tree(rng), "embedding": signed}
    zero = jax.tree.map(jnp.zeros_like, params)
    ((after, stats),) = trajectory([zero], params, learning_rate=0.1)
    assert bits(after) == bits(params)
    assert int(stats.step) == 1 and float(stats.grad_norm) == 0 and float(stats.clip_scale) == 1 and bool(stats.ok)


def test_zero_gradients_after_momentum_still_move(rng):
    params = random_tree(rng)
    first, second = trajectory([random_tree(rng), jax.tree.map(jnp.zeros_like, params)], params, learning_rate=0.1)
    for before, after in zip(jax.tree.leaves(first[0]), jax.tree.leaves(second[0]), strict=True):
        assert np.all(np.asarray(before) != np.asarray(after))


def test_rows_without_gradient_keep_their_bits(rng):
    params = random_tree(rng)
    gradient = jax.tree.map(jnp.zeros_like, params)
    gradient["embedding"] = jnp.asarray(np.eye(7, 3, k=-4), jnp.float32)  # rows 4, 5 and 6
    after = trajectory([gradient] * 3, params, learning_rate=0.1)[-1][0]
    before, after = (np.asarray(tree["embedding"]) for tree in (params, after))
    assert bits(after[:4]) == bits(before[:4]) and (after[4:] != before[4:]).any(1).all()


def poisoned(kind, rng):
    """(gradients, state, params, options) whose last leaf, in leaf order, spoils an update."""
    params = {"a": f32(1, 2), "z": f32(1, 2, 3)}
    gradient, options = {"a": f32(1, 1), "z": f32(1, 1, 1)}, {"learning_rate": 0.1, "max_grad_norm": None}
    state = optim.AdamState(jnp.int32(3), {"a": f32(0.1, 0.2), "z": f32(0, 0, 0)}, {"a": f32(1, 1), "z": f32(1, 1, 1)})
    match kind:
        case "infinite gradient":
            gradient["z"] = f32(1, 1, math.inf)
        case "negative infinite gradient, clipped":
            gradient["z"], options["max_grad_norm"] = f32(1, 1, -math.inf), 1.0
        case "nan gradient":
            gradient["z"] = f32(1, math.nan, 1)
        case "overflowing second moment":
            gradient["z"] = f32(1, 1, 3e38)
        case "infinite first moment":
            state.m["z"] = f32(0, 0, math.inf)
        case "infinite second moment":
            state.v["z"] = f32(0, 0, math.inf)
        case "overflowing parameter":
            params["z"], options["learning_rate"] = f32(1, 1, -FLOAT32_MAX), 1e38
        case "nan parameter":
            params["z"] = f32(1, 1, math.nan)
        case "infinite rate from the schedule":
            options["learning_rate"] = lambda step: jnp.where(step == 3, math.inf, 0.1)
    return gradient, state, params, options


POISONS = (
    "infinite gradient",
    "negative infinite gradient, clipped",
    "nan gradient",
    "overflowing second moment",
    "infinite first moment",
    "infinite second moment",
    "overflowing parameter",
    "nan parameter",
    "infinite rate from the schedule",
)


@functools.cache
def donating(**options):
    """An update that gives its buffers away; one for all poisons with these options."""
    _, update = optim.adam(**options)
    return jax.jit(lambda params, state, gradient: update(gradient, state, params), donate_argnums=(0, 1))


@pytest.mark.parametrize(
    "kind, page_size", [*((kind, None) for kind in POISONS), *((kind, 2) for kind in POISONS if "overflow" in kind)]
)
def test_a_spoilt_update_changes_no_bit_even_of_donated_buffers(kind, page_size, rng):
    gradient, state, params, options = poisoned(kind, rng)
    if page_size:
        pages = lambda tree: jax.tree.map(lambda leaf: optim.pages.to_pages(leaf, page_size), tree)
        state = optim.AdamState(state.step, pages(state.m), pages(state.v))
    step = donating(page_size=page_size, **options)
    before = bits((params, state))
    handed_in = jax.tree.leaves((params, state))
    params, state, stats = step(params, state, gradient)
    assert not bool(stats.ok) and int(stats.step) == 3
    assert bits((params, state)) == before
    assert all(leaf.is_deleted() for leaf in handed_in), "the buffers were not donated, so this shows nothing"


def test_a_retry_after_a_refusal_is_the_first_step(rng):
    params, gradient = random_tree(rng), random_tree(rng)
    bad = {**gradient, "gain": f32(math.inf).reshape(())}
    init, update = jitted(0.1)
    kept, state, refused = update(bad, init(params), params)
    assert not bool(refused.ok) and math.isinf(float(refused.grad_norm))
    assert bits(update(gradient, state, kept)) == bits(update(gradient, init(params), params))


def test_the_step_counter_does_not_wrap():
    init, update = jitted(0.1)
    full = init(f32(1, 2))._replace(step=jnp.int32(2**31 - 1))
    params, state, stats = update(f32(1, 1), full, f32(1, 2))
    assert not bool(stats.ok) and int(state.step) == 2**31 - 1 and params.tolist() == [1, 2]


def test_large_finite_values_that_no_bound_admits_are_still_committed():
    # Sums of squares overflow here, so the candidates themselves are looked at.
    ((params, stats),) = trajectory([f32(1, 1)], f32(1e30, -1e25), learning_rate=1e24)
    assert bool(stats.ok)
    np.testing.assert_allclose(params, [1e30 - 1e24, -1.1e25], rtol=1e-6)


def test_a_float16_parameter_that_would_overflow_is_refused():
    params = jnp.asarray([60000.0], jnp.float16)
    ((after, stats),) = trajectory([jnp.asarray([-1.0], jnp.float16)], params, learning_rate=30000.0)
    assert not bool(stats.ok) and bits(after) == bits(params)


# Buffers, dtypes, layouts.


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_no_two_leaves_share_a_buffer(rng, page_size, wrap):
    params = random_tree(rng)
    leaves = jax.tree.leaves((params, wrap(optim.adam(0.1, page_size=page_size)[0])(params)))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    assert len(set(pointers)) == len(pointers)


def test_bfloat16_parameters_keep_float32_moments(rng):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_tree(rng))
    gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_tree(rng))
    init, update = jitted(0.1, weight_decay=0.1)
    after, state, stats = update(gradient, init(params), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves((state.m, state.v))} == {jnp.dtype(jnp.float32)}
    wide = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    exact, _, _ = update(wide(gradient), init(wide(params)), wide(params))
    assert bits(after) == bits(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), exact))
    assert stats.grad_norm.dtype == jnp.float32 and stats.step.dtype == jnp.int32


@pytest.mark.parametrize("page_size", [3, 1000])
def test_paged_equals_contiguous(rng, page_size):
    params, gradients = random_tree(rng), [random_tree(rng, 10.0) for _ in range(3)]
    contiguous = trajectory(gradients, params, learning_rate=0.1, weight_decay=0.1)
    paged = trajectory(gradients, params, learning_rate=0.1, weight_decay=0.1, page_size=page_size)
    for (ours, _), (wanted, _) in zip(paged, contiguous, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), ours, wanted)


def test_pages_are_bounded():
    state = optim.adam(0.1, page_size=3)[0]({"seven": jnp.zeros(7), "one": jnp.zeros(())})
    assert state.m["seven"].shape == (3, 3) and state.v["one"].shape == (1, 3)


def test_a_run_can_change_its_layout(rng):
    params, gradients = random_tree(rng), [random_tree(rng) for _ in range(2)]
    expected = trajectory(gradients, params, learning_rate=0.1, weight_decay=0.1)[-1][0]
    page_size = None
    logical = optim.logical_state(optim.adam(0.1)[0](params), params)
    for t, gradient in enumerate(gradients):
        page_size = (3, None)[t]
        state = optim.from_logical_state(logical, params, page_size=page_size)
        _, update = jitted(0.1, weight_decay=0.1, **({"page_size": page_size} if page_size else {}))
        params, state, _ = update(gradient, state, params)
        logical = optim.logical_state(state, params)
        assert jax.tree.map(jnp.shape, logical.m) == jax.tree.map(jnp.shape, params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), params, expected)


def test_a_damaged_logical_state_is_refused(rng):
    params = random_tree(rng)
    good = optim.logical_state(optim.adam(0.1)[0](params), params)
    optim.from_logical_state(good, params)
    with pytest.raises(ConfigError, match="step must be >= 0"):
        optim.from_logical_state(good._replace(step=jnp.int32(-1)), params)
    with pytest.raises(ShapeError, match=r"m must be float32.*gain: only on the right"):
        optim.from_logical_state(good._replace(m={k: v for k, v in good.m.items() if k != "gain"}), params)
    with pytest.raises(ConfigError, match=r"v\.embedding is not"):
        optim.from_logical_state(good._replace(v={**good.v, "embedding": good.v["embedding"] - 1}), params)
    with pytest.raises(ConfigError, match=r"m\.gain is not"):
        optim.from_logical_state(good._replace(m={**good.m, "gain": jnp.float32(math.nan)}), params)


# Under jax's transformations.


def test_scan_equals_a_loop(rng):
    params, gradients = random_tree(rng), [random_tree(rng) for _ in range(5)]
    expected = trajectory(gradients, params, learning_rate=0.1)
    init, update = jitted(0.1)

    def body(carry, gradient):
        params, state, stats = update(gradient, carry[1], carry[0])
        return (params, state), stats

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
    (after, state), stats = jax.jit(lambda p, s, g: jax.lax.scan(body, (p, s), g))(params, init(params), stacked)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), after, expected[-1][0])
    assert stats.step.tolist() == [1, 2, 3, 4, 5] and int(state.step) == 5 and bool(jnp.all(stats.ok))


def test_vmap_commits_each_member_by_itself(rng):
    params, gradient = f32(*rng.normal(size=6)).reshape(3, 2), f32(*rng.normal(size=6)).reshape(3, 2)
    gradient = gradient.at[1, 0].set(math.nan).at[2].set(1e25)
    init, update = jitted(0.1)
    after, state, stats = jax.vmap(update)(gradient, jax.vmap(init)(params), params)
    assert stats.ok.tolist() == [True, False, True] and state.step.tolist() == [1, 0, 1]
    for i in range(3):
        alone, _, one = update(gradient[i], init(params[i]), params[i])
        np.testing.assert_allclose(after[i], alone, rtol=1e-6)
        np.testing.assert_allclose(stats.grad_norm[i], one.grad_norm, rtol=1e-6)


@pytest.mark.shard_map
@pytest.mark.parametrize("check_vma, varying", [(True, True), (True, False), (False, False)])
def test_shard_map(rng, check_vma, varying):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    init, update = jitted(0.1, weight_decay=0.1)
    params, gradients = random_tree(rng), [random_tree(rng) for _ in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
    mean = jax.tree.map(lambda leaf: leaf.mean(0), stacked)

    def replicated(gradient, params):
        gradient = jax.tree.map(lambda leaf: jax.lax.pmean(leaf[0], "data"), gradient)
        return update(gradient, init(params), params)

    def member(gradient, params):  # an ensemble: each device its own parameters and decision
        gradient = jax.tree.map(lambda leaf: leaf[0], gradient)
        params, _, stats = update(gradient, init(gradient), jax.tree.map(lambda leaf: leaf + 0, params))
        return jax.tree.map(lambda leaf: leaf[None], (params, stats))

    if varying:
        mapped = jax.shard_map(member, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)
        stacked["gain"] = stacked["gain"].at[2].set(math.inf)
        after, stats = jax.jit(mapped)(stacked, params)
        assert stats.ok.tolist() == [True, True, False, True]
        alone, _, _ = update(gradients[3], init(params), params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[3], b, rtol=1e-6, atol=1e-7), after, alone)
    else:
        mapped = jax.shard_map(replicated, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=check_vma)
        after, _, stats = jax.jit(mapped)(stacked, params)
        alone, _, expected = update(mean, init(params), params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), after, alone)
        np.testing.assert_allclose(stats.grad_norm, expected.grad_norm, rtol=1e-6)


def test_sharded_parameters_under_jit_have_a_global_norm_and_sharded_moments(rng):
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    sharding = NamedSharding(mesh, P("fsdp"))
    params, gradient = (jnp.asarray(rng.normal(size=(8, 3)), jnp.float32) for _ in range(2))
    init, update = jitted(0.1)
    alone, _, expected = update(gradient, init(params), params)
    sharded = jax.device_put(params, sharding)
    state = init(sharded)
    assert state.m.sharding.is_equivalent_to(sharding, 2)
    after, state, stats = update(jax.device_put(gradient, sharding), state, sharded)
    np.testing.assert_allclose(stats.grad_norm, expected.grad_norm, rtol=1e-6)
    np.testing.assert_allclose(after, alone, rtol=1e-6)
    assert after.sharding.is_equivalent_to(sharding, 2) and state.v.sharding.is_equivalent_to(sharding, 2)


# Options and mistakes.


@pytest.mark.parametrize(
    "options, name",
    [
        ({"learning_rate": -0.1}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"b1": 1.0}, "b1"),
        ({"b2": 1.0 - 1e-9}, "b2"),  # is 1 in float32
        ({"eps": 0.0}, "eps"),
        ({"eps": 1e-50}, "eps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": math.inf}, "max_grad_norm"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"page_size": 0}, "page_size"),
    ],
)
def test_options_out_of_range_are_named(options, name):
    with pytest.raises(ConfigError, match=f"adam: {name} must be"), np.errstate(under="ignore"):
        optim.adam(**{"learning_rate": 0.1, **options})


def test_mismatches_are_named(rng):
    params = random_tree(rng)
    init, update = optim.adam(0.1)
    state = init(params)
    with pytest.raises(ShapeError, match=r"gradients must match.*gain: only on the right"):
        update({k: v for k, v in params.items() if k != "gain"}, state, params)
    with pytest.raises(ShapeError, match=r"gain: float32\[1\] against float32\[\]"):
        update({**params, "gain": jnp.zeros(1)}, state, params)
    with pytest.raises(ShapeError, match=r"first moments must match"):
        update(params, optim.adam(0.1, page_size=4)[0](params), params)
    with pytest.raises(ShapeError, match="containers"):
        update((f32(1), f32(2)), init([f32(1), f32(2)]), [f32(1), f32(2)])
    with pytest.raises(DTypeError, match=r"ids is int32\[2\]"):
        init({"ids": jnp.zeros(2, jnp.int32)})


def test_the_decay_mask_may_be_a_function_and_must_fit(rng):
    params = random_tree(rng)
    zero = jax.tree.map(jnp.zeros_like, params)
    matrices = lambda tree: jax.tree.map(lambda leaf: leaf.ndim >= 2, tree)
    ((after, _),) = trajectory([zero], params, learning_rate=0.5, weight_decay=0.5, decay_mask=matrices)
    np.testing.assert_allclose(after["embedding"], 0.75 * params["embedding"], rtol=1e-6)
    assert bits(after["gain"]) == bits(params["gain"])
    ((after, _),) = trajectory([zero], params, learning_rate=0.1, weight_decay=0.1)
    np.testing.assert_allclose(after["gain"], 0.99 * params["gain"], rtol=1e-6)
    with pytest.raises(ConfigError, match=r"decay_mask .* not at blocks\.bias, blocks\.weight, gain"):
        trajectory([zero], params, learning_rate=0.5, weight_decay=0.5, decay_mask=lambda tree: {"embedding": True})


# Schedules.


@pytest.mark.parametrize("name", ["cosine", "constant", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedules_equal_the_oracle(name, warmup):
    options = {"peak": 3e-3, "total_steps": 40, "warmup_steps": warmup, "min_lr": 1e-4, "decay_steps": 9}
    rate = optim.schedule(name, **options)
    steps = range(45)
    wanted = [oracle.learning_rate(name, t, **options) for t in steps]
    np.testing.assert_allclose([rate(t) for t in steps], wanted, rtol=2e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(rate))(jnp.arange(45)), wanted, rtol=2e-6)
    assert rate(3).dtype == jnp.float32


def test_schedule_landmarks():
    rate = optim.warmup_cosine(1.0, 4, 24, 0.25)
    assert [float(rate(t)) for t in (0, 3, 4, 24, 1000)] == pytest.approx([0.2, 0.8, 1.0, 0.25, 0.25])
    assert float(rate(4)) == 1.0 and float(rate(24)) == 0.25 and float(rate(14)) == pytest.approx(0.625)
    plateau = optim.warmup_stable_decay(1.0, 2, 20)
    assert [float(plateau(t)) for t in (2, 16)] == [1.0, 1.0] and float(plateau(18)) == 0.5 and float(plateau(20)) == 0
    assert float(optim.constant(0.5)(10**9)) == 0.5


def test_the_first_update_uses_the_rate_at_zero():
    ((params, _),) = trajectory([f32(1)], f32(0), learning_rate=lambda step: jnp.where(step == 0, 0.25, 100.0))
    assert float(params[0]) == pytest.approx(-0.25)


def test_bad_schedules_are_refused():
    with pytest.raises(ConfigError, match="must be one of cosine, constant, linear, wsd; got 'poly'"):
        optim.schedule("poly", peak=1.0, total_steps=5)
    with pytest.raises(ConfigError, match="warmup_steps"):
        optim.warmup_cosine(1.0, 5, 5)
    with pytest.raises(ConfigError, match="min_lr <= peak"):
        optim.linear(1.0, 0, 5, 2.0)
    with pytest.raises(ConfigError, match="decay_steps"):
        optim.warmup_stable_decay(1.0, 2, 5, decay_steps=4)


# Accumulation.


def token_loss(params, batch):
    """A summed loss over counted tokens, its count, and its gradient, for any weights in {0, 1}."""

    def total(params):
        predicted = jnp.tanh(batch["x"] @ params["w"]) @ params["u"]
        return jnp.sum(batch["mask"] * (predicted - batch["y"]) ** 2), jnp.sum(batch["mask"])

    return jax.value_and_grad(total, has_aux=True)(params)


def answers(rng, lengths, width=100):
    """One row per answer; of row i the first lengths[i] tokens count."""
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    mask = jnp.asarray(np.arange(width) < np.array(lengths)[:, None], jnp.float32)
    params = {"w": array(4, 5), "u": array(5)}
    return params, {"x": array(len(lengths), width, 4), "y": array(len(lengths), width), "mask": mask}


def test_accumulation_is_exact_for_answers_of_1_and_99_tokens(rng):
    params, batch = answers(rng, [1, 99])
    (loss, count), gradient = jax.jit(token_loss)(params, batch)
    micro = jax.tree.map(lambda leaf: leaf[:, None], batch)
    out = jax.jit(lambda p, b: optim.accumulate(token_loss, p, b))(params, micro)
    assert float(out.count) == 100 == float(count)
    np.testing.assert_allclose(out.loss, loss / count, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b / count, atol=1e-6), out.gradients, gradient)
    means = [jax.jit(token_loss)(params, jax.tree.map(lambda leaf, i=i: leaf[i], micro)) for i in range(2)]
    mean_of_means = 0.5 * sum(g["u"] / c for (_, c), g in means)
    assert not np.allclose(mean_of_means, out.gradients["u"], atol=1e-3), "the case does not tell the two apart"


@pytest.mark.shard_map
@pytest.mark.parametrize("check_vma", [True, False])
def test_accumulation_over_devices(rng, check_vma):
    params, batch = answers(rng, [1, 99, 3, 50])
    (_, count), gradient = jax.jit(token_loss)(params, batch)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = lambda leaf: leaf.reshape(2, 2, 1, *leaf.shape[1:])  # [micro-batches, devices, rows, ...]

    def local(params, batch):
        # Inside shard_map jax.grad would reduce over devices by itself; the pcast keeps the sums local.
        vary = lambda leaf: jax.lax.pcast(leaf, "data", to="varying") if check_vma else leaf
        params = jax.tree.map(vary, params)
        return optim.accumulate(token_loss, params, jax.tree.map(lambda leaf: leaf[:, 0], batch), axis_name="data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=check_vma)
    out = jax.jit(mapped)(params, jax.tree.map(split, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b / count, atol=1e-6), out.gradients, gradient)


def test_accumulation_of_nothing_counted_is_zero_and_shapes_are_checked(rng):
    params, batch = answers(rng, [0, 0])
    out = jax.jit(lambda p, b: optim.accumulate(token_loss, p, b))(
        params, jax.tree.map(lambda leaf: leaf[:, None], batch)
    )
    assert float(out.loss) == 0 and float(out.count) == 0 and not any(leaf.any() for leaf in jax.tree.leaves(out))
    with pytest.raises(ShapeError, match="accumulate: arrays must lead with one number"):
        optim.accumulate(token_loss, params, {**batch, "y": batch["y"][:1]})


def test_add_scaled_sums_in_the_total(rng):
    tree = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.full((2,), 2.0)}
    total = optim.add_scaled(optim.add_scaled(optim.zeros_like(tree), tree), tree, 0.5)
    assert total["a"].dtype == jnp.float32
    np.testing.assert_array_equal(total["a"], 1.5)
    np.testing.assert_array_equal(total["b"], 3.0)


def test_a_rate_beyond_float32_is_refused_without_a_word_from_numpy():
    with pytest.raises(ConfigError, match="learning_rate"):  # warnings are errors here
        optim.adam(1e40)
