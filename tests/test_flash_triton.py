"""Flash attention by Pallas Triton, interpreted: its schedule against the oracle; and how cuDNN is called."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import riftco
from riftco import ops, oracle
from riftco.errors import UnsupportedError
from riftco.pallas import dispatch
from riftco.pallas.core.sizes import power_of_two
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash import cudnn, triton, triton_tiles
from riftco.pallas.flash.triton_tiles import Row, Tiles

QUICK = {"xla_backend_optimization_level": 0}  # interpreted kernels are long programs that run for a moment
LENGTHS = (1, 7, 63, 65, 127, 192, 1000)
SMALL = {width: (Tiles(32, 16, 4, 2),) * 2 for width in (64, 128, 256)}


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles small enough that short sequences have edges and a middle."""
    monkeypatch.setattr(triton_tiles, "FORWARD", SMALL)
    monkeypatch.setattr(triton_tiles, "BACKWARD", SMALL)


def _inputs(rng, b, t, s, h, g, k, dtype):
    q, dout = (jnp.asarray(rng.normal(size=(b, t, h, k)), dtype) for _ in range(2))
    keys, values = (jnp.asarray(rng.normal(size=(b, s, g, k)), dtype) for _ in range(2))
    return q, keys, values, dout


@functools.cache
def _program(scale, cap):
    @functools.partial(jax.jit, compiler_options=QUICK)
    def program(q, k, v, dout, sees):
        options = {"scale": scale, "cap": cap, "interpret": True}
        out, lse = triton.forward(q, k, v, sees, **options)
        return out, lse, *triton.backward(q, k, v, out, lse, dout, sees, **options)

    return program


def _check(program, q, k, v, dout, sees, cap=None, scale=None):
    """Runs it, and holds what it gives against the oracle; returns what it gave."""
    options = {
        "causal": sees.causal,
        "window": sees.window,
        "q_segment_ids": sees.q_segment_ids,
        "kv_segment_ids": sees.kv_segment_ids,
        "q_offset": sees.offset if sees.offsets is None else sees.offsets,
        "kv_lengths": sees.kv_lengths,
        "logits_soft_cap": cap,
        "scale": scale,
    }
    options = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in options.items()}
    found = program(q, k, v, dout, sees)
    assert [x.dtype for x in found] == [q.dtype, jnp.float32, q.dtype, k.dtype, v.dtype]
    out, lse, *gradients = (np.asarray(x, np.float64) for x in found)
    exact = q.dtype == jnp.float32
    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    np.testing.assert_allclose(out, oracle.attention(*wide[:3], **options), atol=2e-5 if exact else 1e-2, rtol=0)
    expected = oracle.attention_statistics(*wide[:2], **options)
    np.testing.assert_allclose(lse, expected, atol=1e-5 if exact else 1e-3, rtol=1e-6)
    mask = sees.mask(jnp.arange(q.shape[1], dtype=jnp.int32), jnp.arange(k.shape[1], dtype=jnp.int32))
    mask = np.ones((1, q.shape[1], k.shape[1]), bool) if mask is None else np.asarray(mask)
    seen = np.broadcast_to(mask.any(2), q.shape[:2]), *(np.broadcast_to(mask.any(1), k.shape[:2]),) * 2
    expected = oracle.attention_vjp(*wide, **options)
    for name, x, y, some in zip(("dq", "dk", "dv"), gradients, expected, seen, strict=True):
        assert np.linalg.norm(x - y) <= (1e-5 if exact else 1e-2) * max(np.linalg.norm(y), 1.0), name
        np.testing.assert_array_equal(x[~some], 0)
    return found


def _segments(rng, *shape):
    return jnp.asarray(np.sort(rng.integers(0, 3, shape), axis=1), jnp.int32)


CASES = {
    # (B, T, S, H, G, K), dtype, options, cap
    "causal": ((1, 65, 65, 2, 1, 32), "float32", {}, None),
    "window": ((1, 127, 192, 4, 2, 80), "float32", {"window": 37, "offset": 65}, None),
    "window, first keys unseen": ((1, 63, 127, 3, 1, 40), "float32", {"window": 5, "offset": 60}, 2.0),
    "window on both sides": ((2, 70, 63, 3, 1, 64), "bfloat16", {"window": 40, "causal": False}, None),
    "more queries than keys": ((1, 100, 40, 2, 2, 32), "float32", {"window": 30}, None),
    "before the keys": ((1, 40, 40, 2, 2, 32), "float32", {"offset": -20}, None),
    "all keys": ((1, 33, 64, 5, 1, 192), "float32", {"causal": False}, 5.0),
    "one query": ((2, 1, 65, 8, 1, 256), "bfloat16", {"offset": 64}, None),
    "one key": ((1, 7, 1, 2, 2, 96), "float16", {"causal": False}, None),
}
SLOW = ("window on both sides", "more queries than keys", "before the keys", "one key")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_forward_and_backward_are_the_oracles(rng, name):
    shape, dtype, options, cap = CASES[name]
    scale = 0.21
    _check(_program(scale, cap), *_inputs(rng, *shape, dtype), Visibility(**options), cap, scale)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_with_their_own_offset_length_and_segments(rng, causal):
    shape = (3, 63, 130, 4, 2, 48)
    q, k, v, dout = _inputs(rng, *shape, "float32")
    lengths = jnp.asarray([75, 0, 130], jnp.int32)
    sees = Visibility(
        _segments(rng, 3, 63),
        _segments(rng, 3, 130),
        jnp.asarray([60, 3, 100], jnp.int32),
        lengths,
        causal=causal,
        window=70,
    )
    program = _program(0.2, 5.0)
    clean = _check(program, q, k, v, dout, sees, 5.0, 0.2)
    assert np.isneginf(clean[1][1]).all()
    unused = jnp.arange(130)[None, :, None, None] >= lengths[:, None, None, None]
    for clean_one, x in zip(
        clean, program(q, *(jnp.where(unused, jnp.nan, x) for x in (k, v)), dout, sees), strict=True
    ):
        np.testing.assert_array_equal(x, clean_one)
    for zero in program(q, k, v, jnp.zeros_like(dout), sees)[2:]:
        np.testing.assert_array_equal(zero, 0)


@pytest.mark.usefixtures("small_tiles")
def test_lengths_alone_with_the_middle_whole(rng):
    q, k, v, dout = _inputs(rng, 2, 64, 100, 2, 1, 32, "float32")
    lengths = jnp.asarray([70, 17], jnp.int32)
    program = _program(0.2, None)
    sees = Visibility(kv_lengths=lengths, causal=False)
    clean = _check(program, q, k, v, dout, sees, None, 0.2)
    unused = jnp.arange(100)[None, :, None, None] >= lengths[:, None, None, None]
    # A key that the row's length hides must not blow up what its tile gives the others.
    for filler in (jnp.nan, 1e30):
        found = program(q, *(jnp.where(unused, filler, x) for x in (k, v)), dout, sees)
        for clean_one, x in zip(clean, found, strict=True):
            np.testing.assert_array_equal(x, clean_one)


@pytest.mark.slow
def test_scores_far_below_zero(rng):
    q, k, v, dout = _inputs(rng, 1, 64, 64, 1, 1, 32, "float32")
    q, k = q.at[..., 0].set(22.5), k.at[..., 0].set(-22.5)  # all logits near -101: exp of them alone is 0
    _check(_program(0.2, None), q, k, v, dout, Visibility(), None, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("t,s", [(LENGTHS[i], LENGTHS[i - more]) for i in range(7) for more in (0, 1, 4)])
def test_any_lengths_with_the_tiles_of_the_chip(rng, t, s):
    dtype = "float32" if (t + s) % 2 else "bfloat16"
    sees = Visibility(causal=t <= s, offset=max(0, s - t), window=None if s > 200 else 50)
    _check(_program(0.2, None), *_inputs(rng, 1, t, s, 2, 1, 32, dtype), sees, None, 0.2)


# ------------------------------------------------------------------------------------------------ which tiles


@pytest.mark.tiny
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize("offset", [0, 14, -9])
def test_loops_visit_what_is_seen_and_leave_unmasked_only_what_is_whole(causal, window, offset):
    options = {"causal": causal, "window": window}
    tiles, queries, total = Tiles(8, 4, 4, 2), 30, 41
    for keys in (total, 40, 17, 0):
        traced = keys != total  # a row's length is known in the kernel alone
        row = Row(0, Visibility(offset=offset, **options), offset, jnp.int32(keys) if traced else keys, total)
        mask = np.asarray(
            Visibility(offset=offset, kv_lengths=jnp.asarray([keys]), **options).mask(
                jnp.arange(queries), jnp.arange(total)
            )
        )[0]
        for first in range(0, queries, tiles.queries):
            parts = triton_tiles.key_parts(row, jnp.int32(first), tiles.queries, queries, tiles.keys)
            _check_parts(parts, mask[first : first + tiles.queries], tiles.keys)
        for first in range(0, total, tiles.keys):
            # Past the row's length the store masks, so that part of a tile is free.
            part = mask[:, first : min(first + tiles.keys, keys)].T
            parts = triton_tiles.query_parts(row, jnp.int32(first), tiles.keys, queries, tiles.queries)
            if part.size:
                _check_parts(parts, part, tiles.queries)
            else:
                assert all(int(p.stop) <= int(p.start) for p in parts)


def _check_parts(parts, mask, block):
    parts = [(int(p.start), int(p.stop), p.is_masked) for p in parts]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    visited = {tile: is_masked for start, stop, is_masked in parts for tile in range(start, stop)}
    if not mask.any():
        assert not any(not is_masked for is_masked in visited.values()) and len(visited) <= 1
        return
    for tile in range(-(-mask.shape[1] // block)):
        seen = mask[:, tile * block : (tile + 1) * block]
        assert (tile in visited) == bool(seen.any())
        if tile in visited:
            assert visited[tile] == (seen.shape[1] < block or not seen.all())
    assert all(0 <= tile < -(-mask.shape[1] // block) for tile in visited)


@pytest.mark.tiny
def test_tiles_fit_the_call_and_products_are_exact():
    q = jax.ShapeDtypeStruct((1, 20, 2, 80), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 3, 1, 80), jnp.float32)
    tiles = triton_tiles.choose(triton_tiles.FORWARD, q, k)
    assert tiles[:2] == (32, 16)
    call = functools.partial(triton.forward, scale=1.0, cap=None, interpret=True)
    jaxpr = str(jax.make_jaxpr(call)(q, k, k, Visibility()))
    exact = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    assert jaxpr.count("dot_general") == jaxpr.count(exact) > 0
    assert power_of_two(80) == 128 and power_of_two(256) == 256 and power_of_two(1) == 16


@pytest.mark.tiny
def test_what_triton_refuses():
    def reason(shape, dtype):
        q = jax.ShapeDtypeStruct(shape, dtype)
        return triton.unsupported(q, q, q, Visibility(), None)

    assert reason((1, 5, 2, 200), jnp.float16) is None
    assert "at most 256" in reason((1, 5, 2, 257), jnp.float32)
    assert "computes in" in reason((1, 5, 2, 64), jnp.int8)
    assert "needs an element" in reason((1, 0, 2, 64), jnp.float32)


# ------------------------------------------------------------------------------------------------ the op


def _attend(q, k, v, interpret=True):
    return ops.attention(q, k, v, window=20, implementation="pallas_triton", interpret=interpret)


def _gradients(attend, q, k, v, dout):
    out, pullback = riftco.vjp(attend, q, k, v)
    return out, *pullback(dout)


def _reference(q, k, v, dout):
    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    return oracle.attention(*wide[:3], window=20), *oracle.attention_vjp(*wide, window=20)


def _agree(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert np.linalg.norm(np.asarray(x, np.float64) - y) <= 1e-5 * np.linalg.norm(y)


SHAPE = (8, 24, 24, 2, 1, 32)


def test_the_op_under_vmap_and_shard_map(rng):
    arguments = _inputs(rng, *SHAPE, "float32")
    expected = _reference(*arguments)
    call = functools.partial(_gradients, _attend)
    folded = (jnp.reshape(x, (4, 2, *x.shape[1:])) for x in arguments)
    found = jax.jit(jax.vmap(call), compiler_options=QUICK)(*folded)
    _agree([jnp.reshape(x, (8, *x.shape[2:])) for x in found], expected)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    spread = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    # jax's interpreter does not know what varies over a mesh; the kernels do.
    _agree(jax.jit(spread(call, check_vma=False), compiler_options=QUICK)(*arguments), expected)
    with dispatch.target("cuda"):
        jax.jit(spread(functools.partial(_gradients, functools.partial(_attend, interpret=False)))).trace(*arguments)


def test_the_op_in_a_checkpointed_scan(rng):
    q, k, v, dout = _inputs(rng, *SHAPE, "float32")

    def twice(attend, q, k, v):
        def body(x, _, k, v):
            return attend(x, k, v), None

        return riftco.scan(riftco.checkpoint(body), q, None, k, v, length=2)[0]

    both = functools.partial(_gradients, functools.partial(twice, _attend))
    kernel = jax.jit(both, compiler_options=QUICK)(q, k, v, dout)
    plain = functools.partial(ops.attention, window=20, implementation="plain")
    _agree(kernel, [np.asarray(x, np.float64) for x in _gradients(functools.partial(twice, plain), q, k, v, dout)])


# ------------------------------------------------------------------------------------------------ cuDNN


def _kernel_shapes(t=128, s=128, k=64, dtype=jnp.bfloat16):
    q, keys = jax.ShapeDtypeStruct((2, t, 8, k), dtype), jax.ShapeDtypeStruct((2, s, 2, k), dtype)
    return q, keys, keys


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"causal": False}])
def test_cudnn_lowers_forward_and_backward(options):
    def call(q, k, v, dout):
        return _gradients(lambda *x: ops.attention(*x, implementation="cudnn", **options), q, k, v, dout)

    q, k, v = _kernel_shapes()
    with dispatch.target("cuda", "NVIDIA H200"):
        text = jax.jit(call).trace(q, k, v, q).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    mask = "NO_MASK" if options.get("causal") is False else "CAUSAL"
    assert f"mask_type\\22: \\22{mask}\\22" in text
    assert (f"sliding_window_length\\22: {options.get('window', 0)}," in text) or "window" not in options


@pytest.mark.tiny
def test_what_cudnn_refuses():
    ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    row = jax.ShapeDtypeStruct((2,), jnp.int32)
    for reason, shapes, options, cap in [
        ("computes in", {"dtype": jnp.float32}, {}, None),
        ("multiple of 8", {"k": 60}, {}, None),
        ("multiple of 8", {"k": 264}, {}, None),
        ("needs an element", {"s": 0}, {}, None),
        ("soft cap", {}, {}, 5.0),
        ("segment ids", {}, {"q_segment_ids": ids, "kv_segment_ids": ids}, None),
        ("past a row's length", {}, {"kv_lengths": row}, None),
        ("position 0", {}, {"offset": 3}, None),
        ("position 0", {}, {"offsets": row}, None),
        ("looks back only", {}, {"window": 4, "causal": False}, None),
        ("no more queries than keys", {"t": 200}, {"window": 4}, None),
        ("single query", {"t": 1}, {}, None),
    ]:
        assert reason in cudnn.unsupported(*_kernel_shapes(**shapes), Visibility(**options), cap)
    assert cudnn.unsupported(*_kernel_shapes(), Visibility(window=4), None) is None
    q = jnp.ones((1, 8, 1, 8), jnp.bfloat16)
    for interpret in (False, True):
        with pytest.raises(UnsupportedError, match=r"attention\[cudnn\]"):
            ops.attention(q, q, q, implementation="cudnn", interpret=interpret)
    # Nor where there is a GPU.
    with dispatch.target("cuda"), pytest.raises(UnsupportedError, match="no interpreter"):
        ops.attention(q, q, q, implementation="cudnn", interpret=True)
