"""The TPU schedule of Flash attention: its tiles, what it skips, ragged ends, races; by the interpreters.

What every implementation must do is in test_flash.py; that the kernels compile for TPUs is shown in tests/aot.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import riftco
from riftco import ops, oracle
from riftco.pallas import dispatch
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash import tpu, tpu_forward, tpu_tiles
from riftco.pallas.flash.tpu_tiles import Tiling

MIB = tpu_tiles.MIB
QUICK = {"xla_backend_optimization_level": 0}  # interpreted kernels are long programs that run for a moment


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 32 rows and 64 keys forward, 64 rows and 32 keys backward: several of each at lengths near 100."""
    monkeypatch.setattr(tpu_tiles, "INTERPRETED", (32, 64, 64, 32, 96 * MIB))
    monkeypatch.setattr(tpu_tiles, "LANES", 16)


# ------------------------------------------------------------------------------------------------ tiles

TILING = Tiling(
    queries=13, keys=21, repeats=1, row_tile=4, key_tile=8, memory=0, causal=True, window=None, offset=0,
    has_lengths=False, segmented=False,
)  # fmt: skip
OPTIONS = [
    dict(causal=causal, window=window, repeats=repeats)
    for causal, window, repeats in itertools.product((True, False), (None, 1, 6), (1, 3, 8))
]


def what_is_seen(tiling, offset, limit):
    """Boolean [row tiles, key tiles, row_tile, key_tile]: what the options say, by NumPy; and which rows there are."""
    row = np.arange(tiling.row_tiles * tiling.row_tile)[:, None]
    key = np.arange(tiling.key_tiles * tiling.key_tile)[None, :]
    position = row // tiling.repeats + offset
    seen = (row < tiling.rows) & (key < limit)
    if tiling.causal:
        seen &= key <= position
    if tiling.window is not None:
        seen &= (position - key < tiling.window) & (tiling.causal | (key - position < tiling.window))
    shape = (tiling.row_tiles, tiling.row_tile, tiling.key_tiles, tiling.key_tile)
    rows = np.broadcast_to(row < tiling.rows, seen.shape)
    return (x.reshape(shape).swapaxes(1, 2) for x in (seen, rows))


@pytest.mark.tiny
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("offset", [0, 7, 40])
def test_the_tiles_that_meet_are_those_with_something_to_see(options, offset):
    tiling = dataclasses.replace(TILING, offset=offset, **options)
    lengths = dataclasses.replace(tiling, has_lengths=True)
    traced = dataclasses.replace(lengths, offset=None)
    most_keys, most_rows = 0, 0
    for this, limit in ((tiling, 21), (lengths, 16), (lengths, 3), (lengths, 0)):
        seen, rows = what_is_seen(this, offset, limit)
        some = seen.any((2, 3))
        for i in range(this.row_tiles):
            low, count = map(int, this.keys_of(i, offset, limit))
            np.testing.assert_array_equal(np.flatnonzero(some[i]), np.arange(low, low + count))
            most_keys = max(most_keys, count)
        for j in range(this.key_tiles):
            low, count = map(int, this.rows_of(j, offset, limit))
            np.testing.assert_array_equal(np.flatnonzero(some[:, j]), np.arange(low, low + count))
            most_rows = max(most_rows, count)
        for i, j in zip(*np.nonzero(some), strict=True):
            full = (seen[i, j] | ~rows[i, j]).all()
            assert bool(this.needs_no_mask(i, j, offset, limit, False)) == full
            assert bool(this.needs_no_mask(i, j, offset, limit, True)) == seen[i, j].all()
    assert (max(1, most_keys), max(1, most_rows)) == (tiling.key_steps, tiling.row_steps)
    assert (lengths.key_steps, lengths.row_steps) == (tiling.key_steps, tiling.row_steps)
    assert traced.key_steps >= tiling.key_steps
    assert traced.row_steps >= tiling.row_steps


@pytest.mark.tiny
@pytest.mark.parametrize("repeats", [1, 3, 8, 71])
@pytest.mark.parametrize("row_axis", [0, 1])
def test_the_mask_of_a_tile_is_what_the_options_say(repeats, row_axis):
    tiling = dataclasses.replace(TILING, queries=600, repeats=repeats, row_tile=48, window=6, has_lengths=True)
    last = tiling.row_tiles - 1
    seen, _ = what_is_seen(tiling, 3 - tiling.queries + 10, 17)
    for i, j in itertools.product((0, 1, last // 2, last), range(3)):
        mask = tiling.mask(i, j, 3 - tiling.queries + 10, 17, None, None, row_axis=row_axis, rows=True)
        mask = np.asarray(mask) if row_axis == 0 else np.asarray(mask).T
        np.testing.assert_array_equal(mask, seen[i, j])
    assert seen[last].any()


@pytest.mark.tiny
def test_a_window_bounds_the_tiles_visited_whatever_the_length_and_the_offsets():
    for offset in (0, None):
        tiling = dataclasses.replace(
            TILING, queries=4096, keys=4096, row_tile=512, key_tile=512, window=512, offset=offset
        )
        assert tiling.key_steps <= 3 and tiling.row_steps <= 3
        assert dataclasses.replace(tiling, window=None).key_steps == 8
        assert dataclasses.replace(tiling, causal=False).key_steps <= 4


@pytest.mark.tiny
@pytest.mark.parametrize("limit", [0, 100, 512])
def test_steps_past_the_reach_copy_nothing(limit):
    tiling = dataclasses.replace(TILING, queries=512, keys=512, row_tile=64, key_tile=32, window=70, has_lengths=True)
    scalars = (np.zeros(1, np.int32), np.full(1, limit, np.int32))
    keys = tpu_forward.row_specs(tiling, 8)[1].index_map
    for i in range(tiling.row_tiles):
        visited = [int(keys(0, 0, i, step, *scalars)[2]) for step in range(tiling.key_steps)]
        low, count = map(int, tiling.keys_of(i, 0, limit))
        steps = np.arange(tiling.key_steps)
        assert visited == list(np.minimum(low + np.minimum(steps, max(count - 1, 0)), tiling.key_tiles - 1))


@pytest.mark.tiny
def test_tiles_follow_the_chip_and_shrink_to_the_length(monkeypatch):
    monkeypatch.undo()
    shape = lambda length, heads, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, length, heads, 64), dtype)

    def tiles(kind, queries, keys, heads=1, dtype=jnp.bfloat16):
        with dispatch.target("tpu", kind):
            tiling = Tiling.of(shape(queries, heads, dtype), shape(keys, 1, dtype), Visibility())
        return tiling.row_tile, tiling.key_tile

    assert tiles("TPU v5 lite", 4096, 4096) == (512, 512)
    assert tiles("TPU v6 lite", 4096, 4096) == (1024, 1024)
    assert tiles("TPU v6 lite", 4096, 4096, dtype=jnp.float32) == (512, 512)
    assert tiles("TPU v5 lite", 640, 1000) == (384, 512), "cut evenly"
    assert tiles("TPU v5 lite", 1, 200, heads=8) == (16, 256)
    assert tiles("a chip of tomorrow", 4096, 4096) == (512, 512)


# ------------------------------------------------------------------------------------------------ numbers


def inputs(rng, shape, dtype=jnp.float32):
    batch, queries, keys, heads, groups, width = shape
    q, ct = (jnp.asarray(rng.normal(size=(batch, queries, heads, width)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(batch, keys, groups, width)), dtype) for _ in range(2))
    return q, k, v, ct


@functools.cache
def program(causal=True, window=None, cap=None, offset=0, interpret=True):
    """The output, the logsumexp and the three cotangents; cached, since to compile takes far longer than to run."""

    def run(q, k, v, ct, arrays):
        sees = Visibility(**arrays, causal=causal, window=window, offset=offset)
        options = dict(scale=q.shape[3] ** -0.5, cap=cap, interpret=interpret)
        assert tpu.unsupported(q, k, v, sees, cap) is None
        out, lse = tpu.forward(q, k, v, sees, **options)
        return out, lse, *tpu.backward(q, k, v, out, lse, ct, sees, **options)

    return jax.jit(run, compiler_options=QUICK)


def expected(q, k, v, ct, arrays, causal=True, window=None, cap=None, offset=0):
    """The same by the oracle."""
    q, k, v, ct = (np.asarray(x, np.float64) for x in (q, k, v, ct))
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    options = dict(causal=causal, window=window, logits_soft_cap=cap, q_offset=arrays.pop("offsets", offset), **arrays)
    statistics = oracle.attention_statistics(q, k, **options)
    return oracle.attention(q, k, v, **options), statistics, *oracle.attention_vjp(q, k, v, ct, **options)


def assert_close(got, wanted, ct, dtype):
    exact = dtype == jnp.float32
    got = [np.asarray(x, np.float64) for x in got]
    np.testing.assert_allclose(got[0], wanted[0], rtol=0, atol=2e-5 if exact else 1e-2)
    np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=1e-5 if exact else 1e-3)
    for name, ours, theirs in zip("qkv", got[2:], wanted[2:], strict=True):
        # Of one key, the gradient of its score is nothing but what rounding leaves.
        error = np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 0.1 * np.linalg.norm(ct))
        assert error <= (1e-5 if exact else 1e-2), f"d{name}: {error}"
    # A row that sees nothing.
    empty = np.isneginf(wanted[1]).swapaxes(1, 2)
    assert not np.any(got[0][empty]) and not np.any(got[2][empty])


def integers(*values):
    return jnp.asarray(values, jnp.int32)


def segments(length, edges):
    return jnp.asarray([np.searchsorted(row, np.arange(length), side="right") for row in edges], jnp.int32)


# (B, T, S, H, G, K), static options, traced ones, dtype. Together: every option with and without a ragged end, every
# group size from 1 to 8, and rows that see nothing (past a length of 0, and of segments without a key).
CASES = {
    "one": ((1, 1, 1, 1, 1, 32), {}, {}, jnp.float32),
    "decode": ((2, 1, 192, 8, 1, 64), dict(), dict(offsets=(150, 191), kv_lengths=(151, 192)), jnp.bfloat16),
    "causal": ((1, 127, 127, 3, 1, 40), {}, {}, jnp.float32),
    "short-long": ((1, 7, 192, 4, 2, 32), dict(causal=False, cap=2.0), {}, jnp.float32),
    "long-short": ((1, 192, 65, 2, 2, 32), dict(window=9), {}, jnp.bfloat16),
    "window": ((1, 64, 320, 2, 1, 32), dict(window=20, cap=3.0, offset=100), {}, jnp.float32),
    "window-both": ((2, 63, 192, 4, 1, 32), dict(window=33, causal=False, offset=100), {}, jnp.float32),
    "traced": ((2, 65, 127, 5, 1, 32), dict(window=20), dict(offsets=(60, 3), kv_lengths=(100, 0)), jnp.float32),
    "segments": (
        (2, 65, 63, 8, 1, 32),
        dict(causal=False),
        dict(kv_lengths=(63, 30), q_segment_ids=((9, 40), (33, 50)), kv_segment_ids=((9, 20), (2, 31))),
        jnp.bfloat16,
    ),
    "segments-causal": (
        (1, 127, 127, 1, 1, 80),
        dict(cap=5.0),
        dict(q_segment_ids=((9, 60, 70),), kv_segment_ids=((9, 60, 70),)),
        jnp.float32,
    ),
}
SLOW = ("one", "short-long", "long-short", "segments-causal")


def traced_options(shape, values):
    lengths = {"q_segment_ids": shape[1], "kv_segment_ids": shape[2]}
    return {
        name: segments(lengths[name], value) if name in lengths else integers(*value) for name, value in values.items()
    }


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_equals_the_oracle(rng, name):
    shape, static, values, dtype = CASES[name]
    arrays = traced_options(shape, values)
    arguments = inputs(rng, shape, dtype)
    got = program(**static)(*arguments, arrays)
    assert [x.dtype for x in got] == [dtype, jnp.float32, dtype, dtype, dtype]
    assert_close(got, expected(*arguments, arrays, **static), arguments[3], dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "dtype"), [(1000, 1000, jnp.float32), (192, 1000, jnp.bfloat16), (1000, 65, jnp.bfloat16)]
)
def test_equals_the_oracle_at_tiles_that_a_chip_takes(rng, monkeypatch, queries, keys, dtype):
    monkeypatch.undo()
    arrays = dict(kv_lengths=integers(keys - 3))
    arguments = inputs(rng, (1, queries, keys, 2, 1, 64), dtype)
    with dispatch.target("tpu", "TPU v5 lite"):
        got = program.__wrapped__(window=300)(*arguments, arrays)
    assert_close(got, expected(*arguments, arrays, window=300), arguments[3], dtype)


def test_stale_slots_zero_cotangents_and_repeated_runs(rng):
    shape, static, values, _ = CASES["traced"]
    arrays = traced_options(shape, values)
    q, k, v, ct = inputs(rng, shape)
    run = program(**static)
    clean = run(q, k, v, ct, arrays)
    stale = (jnp.arange(shape[2])[None, :] >= arrays["kv_lengths"][:, None])[:, :, None, None]
    for poison in (np.nan, np.inf, -np.inf):
        poisoned = run(q, jnp.where(stale, poison, k), jnp.where(stale, poison, v), ct, arrays)
        for a, b in zip(clean, poisoned, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(clean, run(q, k, v, ct, arrays), strict=True):
        np.testing.assert_array_equal(a, b)
    for gradient in run(q, k, v, jnp.zeros_like(ct), arrays)[2:]:
        assert not np.any(gradient)


def test_tiles_outside_the_reach_are_not_computed(rng):
    shape, static, _, _ = CASES["window"]
    q, k, v, ct = inputs(rng, shape)
    run = program(**static)
    # The queries stand at 100 to 163 and see the keys 81 to 163. A tile that no row sees is not multiplied at all, so
    # that not even a NaN gets through.
    unseen = (np.abs(np.arange(shape[2]) - 127.5) > 64)[None, :, None, None]
    poisoned = run(q, jnp.where(unseen, np.nan, k), jnp.where(unseen, np.nan, v), ct, {})
    for a, b in zip(run(q, k, v, ct, {}), poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------ races


@pytest.mark.slow
@pytest.mark.parametrize("name", ["traced", "segments"])
def test_no_race_and_nothing_read_that_is_not_there(rng, capfd, name):
    (batch, queries, keys, heads, groups, _), static, values, dtype = CASES[name]
    shape = (batch, queries, keys, heads, groups, 16)
    arrays = traced_options(shape, values)
    arguments = inputs(rng, shape, dtype)
    strict = pltpu.InterpretParams(detect_races=True)  # what was not written reads as NaN, too
    got = program(**static, interpret=strict)(*arguments, arrays)
    assert "RACE" not in "".join(capfd.readouterr())
    assert_close(got, expected(*arguments, arrays, **static), arguments[3], dtype)


# ------------------------------------------------------------------------------------------------ the op

OP = dict(implementation="pallas_tpu", interpret=True, window=20)


def of_op(**options):
    """The output and the three cotangents by the op and riftco's own vjp."""

    def run(q, k, v, ct):
        out, pull = riftco.vjp(lambda *qkv: ops.attention(*qkv, **options), q, k, v)
        return out, *pull(ct)

    return run


@pytest.fixture(scope="module")
def plain():
    """Inputs of the op [8, 24, 2, 16], and its results by the plain rule."""
    arguments = inputs(np.random.default_rng(0), (8, 24, 24, 2, 1, 16))
    return arguments, jax.jit(of_op(window=20), compiler_options=QUICK)(*arguments)


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_under_vmap(plain):
    arguments, wanted = plain
    # Rows apart, as a batch of batches of one.
    apart = [x[:, None] for x in arguments]
    got = jax.jit(jax.vmap(of_op(**OP)), compiler_options=QUICK)(*apart)
    assert_same([x[:, 0] for x in got], wanted)


def test_under_scan_and_checkpoint(plain):
    (q, k, v, ct), wanted = plain

    def run(q, k, v, ct):
        attend = riftco.checkpoint(lambda q, k, v: ops.attention(q, k, v, **OP))
        body = lambda carry, row: (carry, attend(*row))
        apart = lambda *x: riftco.scan(body, jnp.zeros(()), tuple(y[:, None] for y in x))[1]
        out, pull = riftco.vjp(apart, q, k, v)
        return out[:, 0], *pull(ct[:, None])

    assert_same(jax.jit(run, compiler_options=QUICK)(q, k, v, ct), wanted)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_under_shard_map(plain, check_vma):
    arguments, wanted = plain
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(of_op(**OP), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    assert_same(jax.jit(sharded, compiler_options=QUICK)(*arguments), wanted)


@pytest.mark.tiny
def test_what_it_refuses_is_said(rng):
    q, k, v, _ = inputs(rng, (1, 4, 4, 1, 1, 8))

    def reason(q=q, k=k, v=v, sees=None):
        return tpu.unsupported(q, k, v, sees or Visibility(), None)

    assert reason() is None
    assert "float16" in reason(q=q.astype(jnp.float16))
    assert "at most 256" in reason(q=jnp.zeros((1, 4, 1, 512)))
    assert "at least one" in reason(k=k[:, :0])
    wide = jax.ShapeDtypeStruct((1, 4), jnp.dtype("int64"))
    assert "32 bits" in reason(sees=Visibility(q_segment_ids=wide, kv_segment_ids=wide))
