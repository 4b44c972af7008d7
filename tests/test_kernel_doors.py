"""The doors to the kernels: what their arguments may be, what vmap, jit, meshes and jax's own derivatives do with them.

A stand-in that computes next to nothing takes a kernel's place: here nothing depends on what a kernel computes.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import riftco
from riftco import _compat, ops
from riftco.errors import ConfigError, GradError, UnsupportedError
from riftco.pallas import call, dispatch

Q = jnp.ones((1, 4, 2, 8))
PAGES = (jnp.ones((2, 3, 8, 8)), jnp.ones((2, 3, 8, 8)), np.array([4]), np.array([[1]]))
PACKED = ops.quantize_nf4(np.ones((4, 64), np.float32))
DOORS = {
    "attention": lambda **options: ops.attention(Q, Q, Q, **options),
    "empty attention": lambda **options: ops.attention(Q[:, :0], Q, Q, **options),
    "paged_attention": lambda **options: ops.paged_attention(Q, *PAGES, **options),
    "nf4_linear": lambda **options: ops.nf4_linear(jnp.ones((2, 64)), PACKED, **options),
}
every_door = pytest.mark.parametrize("door", DOORS)


# ------------------------------------------------------------------------------------------------ arguments


@pytest.mark.tiny
@every_door
def test_interpret_is_a_bool_or_an_interpreters_own_parameters(door):
    for interpret in ("yes", "", 1, 0, None, object()):
        for name in (None, "plain", "pallas_tpu"):
            with pytest.raises(ConfigError, match=r"interpret must be True, False or .*; got "):
                DOORS[door](implementation=name, interpret=interpret)
    with pytest.raises(UnsupportedError, match="another interpreter's parameters"):
        DOORS[door](implementation="pallas_triton", interpret=pltpu.InterpretParams())
    for name in (None, "plain"):
        with pytest.raises(UnsupportedError, match="nothing to interpret"):
            DOORS[door](implementation=name, interpret=True)
    with pytest.raises(ConfigError, match="implementation must be None or one of"):
        DOORS[door](implementation="fast")


@pytest.mark.tiny
@pytest.mark.parametrize("function", [ops.attention, lambda q, k, _, **options: ops.attention_weights(q, k, **options)])
def test_causal_is_a_bool_and_an_offset_an_integer(function):
    for causal in ("no", 1, 0, None, np.int32(1)):
        with pytest.raises(ConfigError, match="attention: causal must be True or False; got"):
            function(Q, Q, Q, causal=causal)
    for offset in (None, True, np.bool_(False), 1.5, "0"):
        with pytest.raises(
            ConfigError, match=r"attention: q_offset must be an integer, or an integer array \[1\]; got"
        ):
            function(Q, Q, Q, q_offset=offset)
    for number in (True, "1"):
        for option in ("scale", "logits_soft_cap"):
            with pytest.raises(ConfigError, match=f"{option} must be"):
                function(Q, Q, Q, **{option: number})
    np.testing.assert_array_equal(function(Q, Q, Q, causal=np.True_, q_offset=np.int8(0)), function(Q, Q, Q))


@pytest.mark.tiny
def test_double_quant_is_a_bool_and_a_block_size_an_integer():
    for options in ({"double_quant": "no"}, {"double_quant": 1}, {"block_size": 64.0}, {"block_size": True}):
        with pytest.raises(ConfigError, match=f"quantize_nf4: {next(iter(options))} must be"):
            ops.quantize_nf4(jnp.ones((2, 2)), **options)


# ------------------------------------------------------------------------------------------------ jax's derivatives


@pytest.mark.parametrize("door", [door for door in DOORS if " " not in door])
def test_jaxs_own_derivatives_are_refused_with_a_sentence(door):
    arguments = {"attention": (Q, Q), "paged_attention": PAGES, "nf4_linear": (PACKED,)}[door]
    x = jnp.ones((2, 64)) if door == "nf4_linear" else Q
    function = getattr(ops, door)
    loss = lambda x: ops.sum(function(x, *arguments, implementation="pallas_tpu", interpret=True))
    message = rf"{door}\[pallas_tpu\]: a kernel has no derivative by jax's own rules.*riftco.grad or riftco.vjp"
    for derivative in (jax.grad, jax.jacfwd):
        with pytest.raises(GradError, match=message):
            derivative(loss)(x)


# ------------------------------------------------------------------------------------------------ the device


@pytest.mark.tiny
def test_programs_are_cached_by_the_target():
    attend = jax.jit(lambda q: ops.attention(q, q, q))
    counts = []
    for platform in ("cpu", "tpu", "cpu", "cuda", "tpu"):
        with dispatch.target(platform):
            text = str(jax.make_jaxpr(attend)(Q))
            counts.append((text.count("pallas_call"), dispatch.current_target().platform))
    assert counts == [(0, "cpu"), (1, "tpu"), (0, "cpu"), (1, "cuda"), (1, "tpu")]
    assert "pallas_call" not in str(jax.make_jaxpr(attend)(Q))


def stand_in(seen=None, limit=None, **others):
    """A module of a kernel whose results are its arguments; it notes shapes and the target, and has a largest batch."""

    def note(x):
        if seen is not None:
            seen.append((x.shape[0], dispatch.current_target()))

    def forward(q, *arrays, **options):
        note(q)
        is_paged = "window" in options
        return q if is_paged else (q, jnp.zeros((q.shape[0], q.shape[2], q.shape[1])))

    def backward(q, k, v, *arrays, **options):
        note(q)
        return q, k, v

    def matmul(x, codes, scales, **options):
        note(x)
        return jnp.zeros((x.shape[0], codes.shape[0]), x.dtype)

    def unsupported(x, *rest):
        return "the batch is too large" if limit is not None and x.shape[0] > limit else None

    return types.SimpleNamespace(forward=forward, backward=backward, matmul=matmul, unsupported=unsupported, **others)


def test_kernels_size_their_tiles_for_the_device_of_concrete_arrays(monkeypatch):
    """Though below the rules of vmap they see tracers, and jax's default device is another."""
    seen = []
    monkeypatch.setattr(dispatch, "kernel", lambda op, name: stand_in(seen))
    monkeypatch.setattr(
        dispatch, "_default_device", lambda: types.SimpleNamespace(platform="tpu", device_kind="TPU v4")
    )
    assert dispatch.current_target() == dispatch.Target("tpu", "TPU v4")
    options = dict(implementation="pallas_triton", interpret=True)
    _, pull = riftco.vjp(lambda q: ops.attention(q, Q, Q, **options), Q)
    pull(Q)
    ops.paged_attention(Q, *PAGES, **options)
    ops.nf4_linear(jnp.ones((2, 64)), PACKED, **options)
    assert [target for _, target in seen] == [dispatch.Target("cpu", "cpu")] * 4
    with dispatch.target("cuda", "toy"):
        ops.attention(Q, Q, Q, **options)
    assert seen[-1][1] == dispatch.Target("cuda", "toy")


@pytest.mark.tiny
def test_a_chip_that_will_not_do_is_said_so(monkeypatch):
    module = stand_in(unfit=lambda kind: f"it needs another chip than {kind}" if kind == "old" else None)
    monkeypatch.setattr(dispatch, "kernel", lambda op, name: module)
    for kind, said in (("old", "it needs another chip than old"), ("new", "taken where it supports the call")):
        rows = dispatch.explain(dispatch.Target("cuda", kind))
        assert ("attention", "pallas_triton", said) in rows


# ------------------------------------------------------------------------------------------------ vmap


@pytest.mark.parametrize("limit, most", [(6, 6), (5, 2)])
def test_vmap_folds_as_far_as_the_kernel_goes(monkeypatch, rng, limit, most):
    """The limits hold for the folded batch: beyond them vmap's axis is a loop."""
    seen = []
    monkeypatch.setattr(dispatch, "kernel", lambda op, name: stand_in(seen, limit))
    q = jnp.asarray(rng.normal(size=(3, 2, 4, 2, 8)), jnp.float32)
    options = dict(implementation="pallas_triton", interpret=True)

    def both(q, lengths):
        out, pull = riftco.vjp(lambda q: ops.attention(q, Q2, Q2, kv_lengths=lengths, **options), q)
        return out, pull(out)[0]

    Q2 = jnp.ones((2, 4, 2, 8))
    for lengths, axis in ((jnp.array([1, 2]), None), (jnp.ones((3, 2), jnp.int32), 0)):
        for out in jax.vmap(both, (0, axis))(q, lengths):
            np.testing.assert_array_equal(out, q)
    table, lengths = np.zeros((2, 1), np.int32), np.array([4, 4])
    pages = jnp.ones((3, 2, 3, 8, 8))
    for pool, axis in ((pages[0], None), (pages, 0)):
        attend = lambda q, pool: ops.paged_attention(q, pool, pool, lengths, table, **options)
        np.testing.assert_array_equal(jax.vmap(attend, (0, axis))(q, pool), q)
    assert max(rows for rows, _ in seen) == most


def test_nested_vmap_folds_as_far_as_the_kernel_goes(monkeypatch):
    seen = []
    monkeypatch.setattr(dispatch, "kernel", lambda op, name: stand_in(seen, 4))
    attend = lambda q: ops.attention(q, Q, Q, implementation="pallas_triton", interpret=True)
    q = jnp.arange(5 * 3 * 64.0).reshape(5, 3, 1, 4, 2, 8)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(attend))(q), q)
    assert max(rows for rows, _ in seen) == 3


# ------------------------------------------------------------------------------------------------ calls


@pytest.mark.tiny
def test_the_first_axis_of_a_mosaic_gpu_grid_is_cudas_first(monkeypatch):
    """Pallas turns a grid around: its last axis is x, and only x may have more than 65535 blocks."""
    made = {}
    fake = types.SimpleNamespace(
        kernel=lambda body, **options: made.update(options), CompilerParams=lambda **_: None, InterpretGPUParams=object
    )
    monkeypatch.setattr(_compat, "mosaic_gpu", lambda: fake)
    grid = {"head": 5, "block": 7, "batch": 9}
    call.mosaic_gpu_call(print, name="x", grid=grid, warpgroups=1, out_shape=None, scratch=None)
    assert (made["grid"], made["grid_names"]) == ((9, 7, 5), ("batch", "block", "head"))


SPREAD = pytest.mark.parametrize("how", ["pallas_triton", "pallas_mosaic_gpu", "pallas_tpu"])


@SPREAD
@pytest.mark.parametrize("varying", ["kv_lengths", "q_offset", "q_segment_ids", "kv_segment_ids"])
def test_a_result_varies_over_a_mesh_as_any_operand_does(how, varying):
    if how == "pallas_mosaic_gpu" and not _compat.HAS_MOSAIC_GPU:
        pytest.skip("it needs jax 0.11 or newer")
    shape = (8,) if varying in ("kv_lengths", "q_offset") else (8, 4)
    options = {varying: jnp.ones(shape, jnp.int32)}
    if varying.endswith("ids"):
        options = {
            "q_segment_ids": jnp.ones((1, 4), jnp.int32),
            "kv_segment_ids": jnp.ones((1, 4), jnp.int32),
        } | options
    mesh = _compat.automatic_mesh(np.array(jax.devices()), ("data",))
    rows = jax.sharding.PartitionSpec("data")
    specs = {name: rows if name == varying else jax.sharding.PartitionSpec() for name in options}
    q = jnp.ones((1, 4, 2, 64), jnp.bfloat16)

    def run(q, options):
        out, pull = riftco.vjp(lambda q: ops.attention(q, q, q, implementation=how, **options), q)
        return out, pull(out)[0]

    spread = jax.shard_map(run, mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), specs), out_specs=rows)
    with dispatch.target("tpu" if how == "pallas_tpu" else "cuda"):
        jax.jit(spread).trace(q, options)


def test_paged_and_packed_results_vary_as_their_operands_do():
    mesh = _compat.automatic_mesh(np.array(jax.devices()), ("data",))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    spread = functools.partial(jax.shard_map, mesh=mesh, out_specs=rows)
    for platform in ("cuda", "tpu"):
        with dispatch.target(platform):
            attend = lambda lengths, table: ops.paged_attention(Q, *PAGES[:2], lengths, table)
            one = jnp.ones((8, 1), jnp.int32)
            jax.jit(spread(attend, in_specs=(rows, whole))).trace(one[:, 0], one[:1])
            jax.jit(spread(attend, in_specs=(whole, rows))).trace(one[:1, 0], one)
            scaled = lambda offset: ops.nf4_linear(jnp.ones((2, 64)), with_offset(offset[0]))
            jax.jit(spread(scaled, in_specs=rows)).trace(jnp.ones(8))


def with_offset(offset):
    """`PACKED` with another mean of its maxima."""
    leaves, tree = jax.tree_util.tree_flatten(PACKED)
    return tree.unflatten([*leaves[:-1], offset])
