"""Kernels under a mesh of simulated devices: each runs them on its own rows; the numbers are those of one device."""

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

import riftco
from riftco import _compat, ops
from riftco.models import DecoderConfig
from riftco.pallas import call, dispatch
from riftco.pallas.mesh import on_each_device
from riftco.train import TrainConfig, init_state, make_train_step, parse_mesh, place_batch
from riftco.train.step import state_shardings

MODEL = DecoderConfig(17, 8, 16, 4, 1, 16, kv_heads=2)


def _weights(q, k, scale):
    s = scale * jnp.einsum("tk,sk->ts", q, k)
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, -jnp.inf))


def _kernel(q, k, v, out, lse, *, scale):
    out[0, :, 0, :] = _weights(q[0, :, 0, :], k[0, :, 0, :], scale) @ v[0, :, 0, :]
    lse[0, 0, :] = jnp.zeros(lse.shape[2], jnp.float32)  # the backward below makes the weights anew


def _forward(q, k, v, sees, *, scale, cap, interpret):
    """Causal attention, one program for each row and head: as small as a kernel can be that XLA cannot cut."""
    (b, t, h, width), groups = q.shape, k.shape[2]
    head = lambda heads: pl.BlockSpec((1, t, 1, width), lambda i, j: (i, 0, j // (h // heads), 0))
    shapes = (call.shape_like(q.shape, q.dtype, q), call.shape_like((b, h, t), jnp.float32, q))
    return call.tpu_call(
        lambda *refs: _kernel(*refs, scale=scale), name="attention", out_shape=shapes, grid=(b, h),
        semantics=("parallel", "parallel"), interpret=True, in_specs=[head(h), head(groups), head(groups)],
        out_specs=[head(h), pl.BlockSpec((1, 1, t), lambda i, j: (i, j, 0))],
    )(q, k, v)  # fmt: skip


def _backward(q, k, v, out, lse, ct, sees, *, scale, cap, interpret):
    def plain(q, k, v):
        groups = q.shape[2] // k.shape[2]
        one = lambda q, k, v: _weights(q, k, scale) @ v
        return jax.vmap(jax.vmap(one, 1, 1))(q, *(jnp.repeat(x, groups, 2) for x in (k, v)))

    assert q.shape[0] * jax.device_count() == ROWS or not _compat.uncut_axes(jax.sharding.get_abstract_mesh()), (
        "a device got more than its rows"
    )
    return jax.vjp(plain, q, k, v)[1](ct)


ROWS = 16
STAND_IN = types.SimpleNamespace(forward=_forward, backward=_backward, unsupported=lambda *_: None)


@pytest.fixture(params=["stand-in", "flash"])
def kernel(request, monkeypatch):
    """The kernel that "pallas_tpu" means: one from above, or the real one by its interpreter."""
    module = STAND_IN
    if request.param == "flash":
        real = pytest.importorskip("riftco.pallas.flash.tpu", exc_type=ImportError)
        interpreted = lambda f: lambda *a, interpret, **options: f(*a, interpret=True, **options)
        module = types.SimpleNamespace(
            forward=interpreted(real.forward), backward=interpreted(real.backward), unsupported=real.unsupported
        )
    monkeypatch.setattr(dispatch, "kernel", lambda op, name: module)


def test_attention_over_a_mesh_in_context(kernel, rng):
    mesh = parse_mesh("data=4,fsdp=2")
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    q, ct = (rng.normal(size=(ROWS, 8, 4, 8)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(ROWS, 8, 2, 8)).astype(np.float32) for _ in range(2))

    def attend(how, interpret):
        def with_gradients(q, k, v, ct):
            out, pullback = riftco.vjp(lambda *x: ops.attention(*x, implementation=how, interpret=interpret), q, k, v)
            return out, *pullback(ct)

        return with_gradients

    def under_the_mesh(*arrays):
        with _compat.in_mesh(mesh):
            return attend("pallas_tpu", True)(*arrays)

    jitted = jax.jit(under_the_mesh, in_shardings=rows, out_shardings=rows)
    text = jitted.lower(q, k, v, ct).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text  # nothing but each device's own rows
    for got, expected in zip(jitted(q, k, v, ct), jax.jit(attend("plain", False))(q, k, v, ct), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("kernel", ["stand-in"], indirect=True)
@pytest.mark.parametrize("in_context", [True, False])
def test_explicit_axes_are_cut_too(kernel, rng, in_context):
    """As `jax.make_mesh` makes them: rows that lie otherwise are moved, and results lie as they were cut."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = PartitionSpec("data", None, "tensor")
    x = rng.normal(size=(ROWS, 8, 2, 8)).astype(np.float32)
    seen = []

    def under(x, lengths):
        cut = lambda x, lengths: (seen.append((x.shape, lengths.shape)), x + lengths[:, None, None, None])[1]
        return on_each_device(cut, ("BTHK", "B"), "BTHK")(x, lengths)

    def gradients(q):
        out, pullback = riftco.vjp(lambda q: ops.attention(q, q, q, implementation="pallas_tpu", interpret=True), q)
        return out, pullback(out)[0]

    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        for lies in (spec, PartitionSpec(None, "data")):
            out = jax.jit(under)(jax.device_put(x, NamedSharding(mesh, lies)), np.ones(ROWS, np.float32))
            assert out.sharding.spec == PartitionSpec("data", None, "tensor", None)
            np.testing.assert_array_equal(out, x + 1)
        if in_context:
            rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
            for got, expected in zip(jax.jit(gradients)(rows), plain_gradients(x), strict=True):
                np.testing.assert_allclose(got, expected, atol=2e-5)
    assert seen == [((ROWS // 4, 8, 1, 8), (ROWS // 4,))] * 2


@jax.jit
def plain_gradients(q):
    out, pullback = riftco.vjp(lambda q: ops.attention(q, q, q, implementation="plain"), q)
    return out, pullback(out)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["flash"], indirect=True)
def test_a_train_step_over_eight_devices(kernel, rng):
    ids = rng.integers(0, 17, (32, 9)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    options = TrainConfig(batch_size=16, grad_accumulation_steps=2)
    start = jax.device_get(init_state(MODEL, options))
    got = []
    for text, attention in ((None, "plain"), ("data=4,fsdp=2", "pallas_tpu")):
        config = dataclasses.replace(options, mesh=text, attention=attention)
        mesh = parse_mesh(text)
        where = jax.devices()[0] if mesh is None else state_shardings(MODEL, config, mesh)
        with dispatch.target("tpu"):
            step = make_train_step(MODEL, config, mesh)
            state, metrics = step(jax.device_put(start, where), place_batch(batch, mesh, 32), np.int32(0))
        got.append((metrics.loss, metrics.grad_norm, *jax.tree.leaves(state.optimizer.m)))
    for one, two in zip(*got, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), atol=1e-6)


@pytest.mark.tiny
def test_rows_that_do_not_divide_and_axes_that_split_nothing_leave_arrays_whole():
    mesh = _compat.automatic_mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "tensor", "other"))
    seen = []

    def note(x, tree):
        seen.append((x.shape, tree["y"].shape))
        return x + 1, tree["y"][:, 0]

    for shape in ((4, 3, 6, 5), (3, 3, 6, 5), (4, 3, 5, 5)):
        x, y = jnp.zeros(shape), jnp.ones(shape[:2])

        def under(x, y):
            with _compat.in_mesh(mesh):
                return on_each_device(note, ("BTHK", "B"), ("BTHK", "B"))(x, {"y": y, "none": None})

        out, column = jax.jit(under, in_shardings=NamedSharding(mesh, PartitionSpec()))(x, y)
        np.testing.assert_array_equal(out, np.ones(shape))
        np.testing.assert_array_equal(column, np.ones(shape[0]))
    assert seen == [((2, 3, 3, 5), (2, 3)), ((3, 3, 3, 5), (3, 3)), ((2, 3, 5, 5), (2, 3))]
    on_each_device(note, ("BTHK", "B"), ("BTHK", "B"))(jnp.zeros((4, 3, 6, 5)), {"y": jnp.ones((4, 3))})
    assert seen[-1] == ((4, 3, 6, 5), (4, 3))  # without a mesh


def test_a_users_own_shard_map_hands_the_kernel_its_rows(kernel, rng):
    mesh = parse_mesh("data=8")
    q = rng.normal(size=(ROWS, 8, 2, 8)).astype(np.float32)
    attend = lambda q: ops.attention(q, q, q, implementation="pallas_tpu", interpret=True)
    rows = PartitionSpec("data")
    got = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))(q)
    np.testing.assert_allclose(got, ops.attention(q, q, q, implementation="plain"), atol=2e-5)


@pytest.mark.tiny
def test_the_mesh_in_context_tells_the_device():
    with _compat.in_mesh(parse_mesh("data=2")):
        assert dispatch.current_target() == dispatch.Target("cpu", "cpu")
        with dispatch.target("tpu"):
            assert dispatch.current_target().platform == "tpu"
