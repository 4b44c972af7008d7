"""Under jax's own transformations: jit, vmap, scan and shard_map, in several threads, without a leak or a retrace."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import riftco
from riftco import _compat, ops
from riftco.autodiff import to_jax


def close(ours, theirs, tolerance=1e-5):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32)


def block(c, p):
    return c + ops.linear(ops.tanh(ops.linear(c, p["up"])), p["down"])


def net(params, x, block=block):
    return ops.mean(riftco.scan(lambda c, p: (block(c, p), ()), x, params)[0])


def twin(params, x):
    block = lambda c, p: c + jnp.tanh(c @ p["up"].T) @ p["down"].T
    return jnp.mean(jax.lax.scan(lambda c, p: (block(c, p), ()), x, params)[0])


twin_gradients = jax.jit(jax.grad(twin, (0, 1)))
twin_gradients_of_each = jax.jit(jax.vmap(jax.grad(twin, (0, 1)), (None, 0)))


@pytest.fixture
def params(rng):
    return {"up": normal(rng, 3, 6, 4), "down": normal(rng, 3, 4, 6)}


# ------------------------------------------------------------------------------------------------ jit


checkpointed = riftco.checkpoint(block)


@pytest.mark.parametrize("layer", [block, checkpointed], ids=["plain", "checkpoint"])
def test_forward_and_backward_jitted_apart_trace_once(rng, params, layer):
    traces = []

    @jax.jit
    def forward(params, x):
        traces.append("forward")
        return riftco.vjp(lambda p, x: net(p, x, layer), params, x)

    @jax.jit
    def backward(pull, ct):
        traces.append("backward")
        return pull(ct)

    for _ in range(2):
        x = normal(rng, 5, 4)
        _, pull = forward(params, x)
        gradients = backward(pull, jnp.ones(()))
        close(gradients, twin_gradients(params, x))
    assert traces == ["forward", "backward"]

    # A second trace of the same program is equal to the first, so the backward pass need not be traced again.
    again = jax.jit(lambda p, x: riftco.vjp(lambda p, x: net(p, x, layer), p, x))(params, x)[1]
    eager = riftco.vjp(lambda p, x: net(p, x, layer), params, x)[1]
    assert jax.tree.structure(again) == jax.tree.structure(pull) == jax.tree.structure(eager)
    backward(again, jnp.ones(()))
    backward(eager, jnp.ones(()))
    assert traces == ["forward", "backward"]


@pytest.mark.parametrize("looped", [True, False])
def test_compiling_forward_and_backward_together_or_apart_changes_no_bit(rng, looped):
    params = {"up": normal(rng, 3, 16, 8), "down": normal(rng, 3, 8, 16)}

    def f(p, x):
        layer = lambda c, p: c + ops.linear(ops.gelu(ops.linear(c, p["up"])), p["down"])
        if looped:
            return ops.mean(riftco.scan(lambda c, p: (layer(c, p), ()), x, p)[0])
        for i in range(3):
            x = layer(x, {name: leaf[i] for name, leaf in p.items()})
        return ops.mean(x)

    x = normal(rng, 5, 8)
    together = jax.jit(riftco.value_and_grad(f, (0, 1)))(params, x)
    value, pull = jax.jit(lambda p, x: riftco.vjp(f, p, x))(params, x)
    apart = (value, jax.jit(lambda pull: pull(jnp.ones(())))(pull))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_vjp_crosses_a_scan_and_a_loop_over_microbatches(rng, params):
    xs = normal(rng, 4, 5, 4)

    @jax.jit
    def stacked(params, xs):
        _, pulls = jax.lax.scan(lambda _, x: ((), riftco.vjp(net, params, x)[1]), (), xs)
        _, gradients = jax.lax.scan(lambda _, pull: ((), pull(jnp.ones(()))), (), pulls)
        return gradients

    close(stacked(params, xs), twin_gradients_of_each(params, xs))


def test_nothing_leaks(rng, params):
    x = normal(rng, 5, 4)
    with jax.checking_leaks():
        f = lambda p, x: net(p, x, checkpointed)
        jax.jit(riftco.value_and_grad(f))(params, x)
        _, pull = jax.jit(lambda p, x: riftco.vjp(f, p, x))(params, x)
        jax.jit(lambda pull: pull(jnp.ones(())))(pull)
        second = lambda x: ops.sum(riftco.grad(lambda x: net(params, x, checkpointed))(x))
        jax.jit(riftco.grad(second))(x)
        with pytest.raises(riftco.errors.GradError):
            jax.jit(riftco.grad(lambda x: ops.sum(riftco.scan(lambda c, _: (c * x, ()), x, None, length=2)[0])))(x)
        jax.jit(riftco.value_and_grad(net))(params, x)


# ------------------------------------------------------------------------------------------------ vmap


def test_gradients_of_single_examples_by_vmap(rng, params):
    xs = normal(rng, 7, 5, 4)
    for layer in (block, checkpointed):
        ours = jax.jit(jax.vmap(riftco.grad(lambda p, x, layer=layer: net(p, x, layer), (0, 1)), (None, 0)))
        close(ours(params, xs), twin_gradients_of_each(params, xs))


def test_vmap_over_a_vjp(rng, params):
    xs, cts = normal(rng, 7, 5, 4), normal(rng, 7)
    _, pulls = jax.jit(jax.vmap(lambda x: riftco.vjp(net, params, x)))(xs)
    got = jax.jit(jax.vmap(lambda pull, ct: pull(ct)[1]))(pulls, cts)
    close(got, twin_gradients_of_each(params, xs)[1] * cts[:, None, None])


def test_jvp_of_our_gradient_and_hessian_rows(rng, params):
    x = normal(rng, 2, 4)
    ours = lambda x: riftco.grad(net, 1)(params, x)
    hessian = jax.jit(jax.hessian(lambda x: twin(params, x)))(x)
    pushed = jax.jit(lambda x: jax.jvp(ours, (x,), (x,))[1])(x)
    close(pushed, jnp.einsum("ijkl,kl->ij", hessian, x))
    rows = jax.jit(lambda x: jax.vmap(riftco.vjp(ours, x)[1])(jnp.eye(8).reshape(8, 2, 4))[0])(x)
    close(rows.reshape(2, 4, 2, 4), hessian)


def test_to_jax_under_vmap_jit_and_checkpoint(rng, params):
    xs = normal(rng, 3, 5, 4)
    f = jax.checkpoint(to_jax(net))
    got = jax.jit(jax.vmap(jax.grad(f), (None, 0)))(params, xs)
    close(got, twin_gradients_of_each(params, xs)[0])


# ------------------------------------------------------------------------------------------------ shard_map


DEVICES = 4


@pytest.fixture
def mesh():
    return _compat.automatic_mesh(np.array(jax.devices()[:DEVICES]), ("data",))


def recurrent(p, x):
    """A scan with a carry of zeros, a shared weight, per-step inputs, an output, and a second scan by length only."""

    def body(c, x, w):
        c = ops.tanh(ops.linear(c, w) + x)
        return c, c * x

    zeros = jnp.zeros((x.shape[1], 4), x.dtype)
    c, ys = riftco.scan(riftco.checkpoint(body), zeros, x, p["w"], reverse=True)
    total, _ = riftco.scan(lambda t, _, c: (t + ops.sum(c * c), ()), jnp.zeros(()), None, c, length=2)
    return ops.sum(ys * ys) + total + ops.sum(p["b"] * 2.0)


def recurrent_twin(p, x):
    def body(c, x):
        c = jnp.tanh(c @ p["w"].T + x)
        return c, c * x

    c, ys = jax.lax.scan(body, jnp.zeros((x.shape[1], 4)), x, reverse=True)
    return (ys * ys).sum() + 2.0 * (c * c).sum() + (p["b"] * 2.0).sum()


@pytest.mark.shard_map
@pytest.mark.parametrize(
    ("check_vma", "order"), [(True, 1), (False, 1), (True, 2), pytest.param(False, 2, marks=pytest.mark.slow)]
)
def test_gradients_inside_shard_map_are_the_devices_own(rng, mesh, check_vma, order):
    p = {"w": normal(rng, 4, 4), "b": normal(rng, 3)}
    x = normal(rng, 5, 2 * DEVICES, 4)
    if order == 1:
        ours, theirs = riftco.grad(recurrent, (0, 1)), jax.grad(recurrent_twin, (0, 1))
    else:
        square = lambda lib, g, f: lambda p, x: lib.sum(g(f, 1)(p, x) * x) + lib.sum(g(f, 0)(p, x)["w"] * p["w"])
        ours = riftco.grad(square(ops, riftco.grad, recurrent), (0, 1))
        theirs = jax.grad(square(jnp, jax.grad, recurrent_twin), (0, 1))

    def local(p, x):
        d_p, d_x = ours(p, x)
        return jax.tree.map(lambda g: g[None], d_p), d_x, jax.lax.psum(d_p, "data")

    specs = (P(), P(None, "data"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P("data"), specs[1], P()), check_vma=check_vma)
    own, d_x, summed = jax.jit(sharded)(p, x)
    theirs = jax.jit(theirs)
    parts = [theirs(p, part) for part in jnp.split(x, DEVICES, axis=1)]
    close(d_x, jnp.concatenate([part[1] for part in parts], axis=1), 1e-4)
    close(own, jax.tree.map(lambda *gs: jnp.stack(gs), *(part[0] for part in parts)), 1e-4)
    close(summed, jax.tree.map(lambda *gs: sum(gs), *(part[0] for part in parts)), 1e-4)


@pytest.mark.shard_map
def test_a_vjp_crosses_shard_map(rng, mesh):
    p = {"w": normal(rng, 4, 4), "b": normal(rng, 3)}
    x = normal(rng, 5, 2 * DEVICES, 4)
    # Residuals have no common axis to be split along, so each device's own gets a new leading one.
    forward = lambda p, x: jax.tree.map(lambda r: r[None], riftco.vjp(recurrent, p, x)[1])
    backward = lambda pull: jax.lax.psum(jax.tree.map(lambda r: r[0], pull)(jnp.ones(()))[0], "data")
    over = lambda f, ins, outs: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))
    pull = over(forward, (P(), P(None, "data")), P("data"))(p, x)
    close(over(backward, (P("data"),), P())(pull)["w"], jax.grad(recurrent_twin)(p, x)["w"], 1e-4)


# ------------------------------------------------------------------------------------------------ threads


def test_two_threads_differentiate_at_once(rng, params):
    x = normal(rng, 5, 4)
    third = lambda x: riftco.grad(lambda x: riftco.grad(lambda y: x * ops.exp(y) * y)(x) * x)(x)
    want = (riftco.grad(net)(params, x), third(jnp.asarray(0.5)))
    start, results, errors = threading.Barrier(3), [], []

    def work():
        try:
            start.wait()
            results.append((riftco.grad(net)(params, x), third(jnp.asarray(0.5))))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 3
    for result in results:
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_derivative_taken_in_another_thread_of_a_function_being_differentiated():
    # The level of the inner derivative lies above the outer one's although another thread opens it.
    def f(x):
        results = []
        inner = lambda: results.append(riftco.grad(lambda y: x * y * y)(jnp.asarray(3.0)))
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        return results[0] * x  # 6 x²

    assert float(riftco.grad(f)(jnp.asarray(2.0))) == 24.0
