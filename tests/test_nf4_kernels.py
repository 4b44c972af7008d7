"""The kernels that multiply by NF4 weights, and the order in which they read codes; by the interpreters."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from riftco.oracle.nf4 import CODES
from riftco.pallas import dispatch
from riftco.pallas.core import nf4
from riftco.pallas.nf4 import layout
from tests.kernel_cases import QUICK

SCHEDULES = ("tpu", "triton")
jit = functools.partial(jax.jit, compiler_options=QUICK)
# M, N, K, block size, dtype. On NVIDIA sums over N=520 and K=2048 are parted, and more than 64 rows decode first.
CASES = [
    (1, 520, 64, 32, jnp.bfloat16),
    (16, 200, 576, 64, jnp.bfloat16),
    (64, 48, 2048, 1024, jnp.float32),  # a block spans tiles, a row spans blocks
    (65, 200, 576, 32, jnp.float32),
]
SLOW_CASES = [
    (3, 96, 192, 64, jnp.float32),
    (200, 8, 128, 128, jnp.float32),
    (64, 256, 1024, 256, jnp.bfloat16),
    (65, 256, 1024, 64, jnp.bfloat16),
    (1, 96, 4096, 4096, jnp.float32),
    (16, 96, 1024, 512, jnp.float16),
    (200, 8, 64, 64, jnp.float16),
]
BARS = {jnp.float32: 1e-5, jnp.bfloat16: 2e-3, jnp.float16: 1e-3}


def schedule(name):
    return importlib.import_module(f"riftco.pallas.nf4.{name}")


@functools.cache
def both(name, width, block_size, interpret=True):
    """The product and the input gradient of one kind of chip, compiled together."""
    module = schedule(name)

    @jit
    def run(x, dy, codes, scales):
        y = module.matmul(x, codes, scales, block_size=block_size, interpret=interpret)
        dx = module.input_gradient(dy, codes, scales, width=width, block_size=block_size, interpret=interpret)
        return y, dx

    return run


def pack(codes):
    """Codes [N, K] in canonical order."""
    flat = np.append(codes.reshape(-1), np.full(codes.size % 2, 7, np.uint8))
    return flat[::2] << 4 | flat[1::2]


def weight(rng, n, k, block_size):
    """Codes in the kernels' order, scales, and the decoded float32 [N, K]."""
    codes = rng.integers(0, 16, (n, k), np.uint8)
    scales = rng.uniform(0.01, 1.0, (n, k // block_size)).astype(np.float32)
    return layout.to_halves(pack(codes), n, k), scales, CODES[codes] * np.repeat(scales, block_size, 1)


def normal(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def assert_near(got, expected, dtype):
    assert got.dtype == dtype and got.shape == expected.shape
    got = np.asarray(got, np.float64)
    # So few roundings to 8 bits as there are in one row need not be average ones.
    bar = 2.0**-8 if got.size < 100 and dtype == jnp.bfloat16 else BARS[dtype]
    assert np.linalg.norm(got - expected) <= bar * np.linalg.norm(expected)


# ------------------------------------------------------------------------------------------------ order and decoding


@pytest.mark.tiny
@pytest.mark.parametrize(("out", "width"), [(1, 1), (3, 5), (7, 255), (2, 256), (5, 257), (3, 576), (2, 1024)])
def test_order_of_the_kernels_is_a_permutation_and_back(rng, out, width):
    codes = rng.integers(0, 16, (out, width), np.uint8)
    halves = np.asarray(layout.to_halves(pack(codes), out, width))
    assert halves.shape == (out, layout.padded(width) // 2) and halves.dtype == np.uint8
    for column in range(layout.padded(width)):
        tile, inside = divmod(column, 256)
        byte = halves[:, tile * 128 + inside % 128]
        expected = codes[:, column] if column < width else 7
        np.testing.assert_array_equal(byte >> 4 if inside < 128 else byte & 15, expected)
    np.testing.assert_array_equal(layout.from_halves(halves, out, width), pack(codes))


@pytest.mark.tiny
def test_every_lookup_decodes_every_byte():
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    np.testing.assert_array_equal(nf4.CODES, CODES)
    table = jnp.asarray(CODES)
    for lookup in (nf4.lane_gather(jnp.asarray(nf4.lane_table())), nf4.ref_gather(table)):
        high, low = nf4.decode(jnp.asarray(packed), lookup)
        assert high.dtype == low.dtype == jnp.float32
        np.testing.assert_array_equal(high, CODES[packed >> 4])
        np.testing.assert_array_equal(low, CODES[packed & 15])


# ------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("m", "n", "k", "block_size", "dtype"), CASES + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_CASES]
)
def test_product_and_input_gradient_are_those_of_the_decoded_weight(rng, name, m, n, k, block_size, dtype):
    codes, scales, w = weight(rng, n, k, block_size)
    w = np.asarray(jnp.asarray(w, dtype), np.float64)
    x, dy = normal(rng, (m, k), dtype), normal(rng, (m, n), dtype)
    if schedule(name).unsupported(x, (n, k), block_size):
        assert (name, dtype) == ("tpu", jnp.float16)
        return
    y, dx = both(name, k, block_size)(x, dy, codes, scales)
    assert_near(y, np.asarray(x, np.float64) @ w.T, dtype)
    assert_near(dx, np.asarray(dy, np.float64) @ w, dtype)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_hot_rows_read_the_weight_to_the_bit(rng, name):
    # One product by 1 and one rounding: a nibble, a scale or a column from elsewhere shows, as does rounding twice.
    m, n, k, block_size, dtype = CASES[1]
    codes, scales, w = weight(rng, n, k, block_size)
    expected = np.asarray(jnp.asarray(w, dtype))
    twice = jnp.asarray(
        np.repeat(scales, block_size, 1)
        * np.asarray(jnp.asarray(w / np.repeat(scales, block_size, 1), dtype), np.float32),
        dtype,
    )
    assert np.any(expected != np.asarray(twice))
    x, dy = np.zeros((k, k), np.float32), np.zeros((k, n), np.float32)
    np.fill_diagonal(x, 1)
    np.fill_diagonal(dy, 1)
    for first in range(0, k, m):
        rows = slice(first, first + m)
        y, dx = both(name, k, block_size)(jnp.asarray(x[rows], dtype), jnp.asarray(dy[rows], dtype), codes, scales)
        np.testing.assert_array_equal(y, expected[:, rows].T)
        here = expected[rows]
        np.testing.assert_array_equal(dx[: len(here)], here)
        assert not np.any(dx[len(here) :])


def test_a_weight_decoded_in_one_pass_is_rounded_once(rng):
    n, k, block_size = 200, 576, 32
    codes, scales, w = weight(rng, n, k, block_size)
    call = functools.partial(schedule("triton").dequantize, width=k, block_size=block_size, interpret=True)
    got = jit(functools.partial(call, dtype=jnp.bfloat16))(codes, scales)
    np.testing.assert_array_equal(got, jnp.asarray(w, jnp.bfloat16))


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("case", [CASES[1], CASES[3]])
def test_padding_is_not_read_zeros_stay_zero_and_runs_repeat(rng, name, case):
    # Past the edge the interpreters give NaN; codes of padding are arbitrary here.
    m, n, k, block_size, dtype = case
    codes, scales, _ = weight(rng, n, k, block_size)
    run = both(name, k, block_size)
    x, dy = normal(rng, (m, k), dtype), normal(rng, (m, n), dtype)
    clean = run(x, dy, codes, scales)
    byte = np.arange(codes.shape[1])
    column = byte // 128 * 256 + byte % 128
    stale = np.where(column >= k, 0xF0, 0) | np.where(column + 128 >= k, 0x0F, 0)
    assert stale.any()
    for a, b in zip(clean, run(x, dy, np.asarray(codes) | stale.astype(np.uint8), scales), strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_array_equal(a, b)
    for a, b in zip(clean, run(x, dy, codes, scales), strict=True):
        np.testing.assert_array_equal(a, b)
    for zero in run(jnp.zeros_like(x), jnp.zeros_like(dy), codes, scales):
        assert not np.any(zero)
    bad = run(x.at[0].set(jnp.nan), dy.at[0].set(jnp.nan), codes, scales)
    for a, b in zip(clean, bad, strict=True):
        assert np.all(np.isnan(b[0]))
        np.testing.assert_array_equal(a[1:], b[1:])


def test_rows_in_chunks_and_tiles_past_the_end_on_tpu(rng, monkeypatch):
    tpu = schedule("tpu")
    monkeypatch.setattr(tpu, "ROWS", 16)
    monkeypatch.setitem(tpu.MAX_ROWS, "toy", 48)
    with dispatch.target("tpu", "toy"):
        # Chunks of 48 rows for 100: the last has a tile cut short and one with nothing in it.
        assert tpu._tiles(100, 300, 576, 64)[:4] == (16, 48, 384, 256)
        codes, scales, w = weight(rng, 300, 576, 64)
        x, dy = normal(rng, (100, 576), jnp.float32), normal(rng, (100, 300), jnp.float32)
        y, dx = both.__wrapped__("tpu", 576, 64)(x, dy, codes, scales)
    assert_near(y, np.asarray(x, np.float64) @ w.T, jnp.float32)
    assert_near(dx, np.asarray(dy, np.float64) @ w, jnp.float32)


@pytest.mark.tiny
def test_tiles_fit_and_pad_little_on_tpu():
    tpu = schedule("tpu")
    for kind in ("TPU v4", "TPU v5 lite", "TPU v6 lite"):
        with dispatch.target("tpu", kind):
            for m, out, width in [(1, 576, 576), (64, 49152, 576), (4096, 4096, 14336), (5000, 1536, 576)]:
                tiles = tpu._tiles(m, out, width, 64)
                kept = max(tiles.out, tiles.width)
                wide = 4  # float32: the output is kept twice, as are the tiles of x
                used = wide * (3 * tiles.chunk * kept + 2 * tiles.rows * kept + tiles.out * tiles.width)
                assert used <= (12 if kind == "TPU v4" else 48) * 2**20
                assert tiles.chunk % tiles.rows == 0 and tiles.rows % 16 == 0
                assert pl.cdiv(m, tiles.chunk) * tiles.chunk - m < max(256, m)
                assert pl.cdiv(out, tiles.out) * tiles.out - out < max(256, out // 2)


@pytest.mark.tiny
def test_few_rows_are_fused_and_many_decode_first_on_nvidia(monkeypatch):
    triton = schedule("triton")
    monkeypatch.setitem(triton.FUSED_ROWS, "toy", 8)
    codes, scales = jnp.zeros((96, 128), jnp.uint8), jnp.zeros((96, 4))

    def kernels(m, kind):
        with dispatch.target("cuda", kind):
            x, dy = jnp.zeros((m, 256)), jnp.zeros((m, 96))
            return (
                str(jax.make_jaxpr(functools.partial(triton.matmul, block_size=64))(x, codes, scales)),
                str(
                    jax.make_jaxpr(functools.partial(triton.input_gradient, width=256, block_size=64))(
                        dy, codes, scales
                    )
                ),
            )

    for m, kind, fused in [(64, "NVIDIA H200", 1), (65, "NVIDIA H200", 0), (8, "toy", 1), (9, "toy", 0), (64, "", 1)]:
        for text, name in zip(kernels(m, kind), ("nf4_matmul", "nf4_input_gradient"), strict=True):
            assert (name in text, "nf4_dequantize" in text) == (bool(fused), not fused)


@pytest.mark.tiny
def test_a_sum_is_parted_only_where_the_chip_is_not_full():
    triton = schedule("triton")
    with dispatch.target("cuda", "NVIDIA H200"):
        assert triton._parts(64, 32) == (4, 8)  # 4096 x 4096: 64 tiles of rows
        assert triton._parts(9, 12) == (3, 4)  # 576 x 576: a part has four steps at least
        assert triton._parts(500, 32) == (1, 32)
        assert triton._parts(1, 1) == (1, 1)
        for programs in (1, 5, 70):
            for steps in range(1, 80):
                parts, each = triton._parts(programs, steps)
                assert (parts - 1) * each < steps <= parts * each


@pytest.mark.tiny
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_the_kernels_do_not_multiply(name):
    unsupported = schedule(name).unsupported
    x = jax.ShapeDtypeStruct((2, 3, 192), jnp.bfloat16)
    assert unsupported(x, (8, 192), 64) is None
    assert unsupported(jax.ShapeDtypeStruct((3, 4096), jnp.float32), (8, 4096), 4096) is None
    assert "power of two" in unsupported(x, (8, 192), 96)
    assert "no multiple of 128" in unsupported(x, (8, 192), 128)
    assert "nothing to multiply" in unsupported(jax.ShapeDtypeStruct((0, 192), jnp.float32), (8, 192), 64)
    assert "2^31" in unsupported(jax.ShapeDtypeStruct((1, 2**16), jnp.float32), (2**15, 2**16), 64)
    assert "x must be" in unsupported(jax.ShapeDtypeStruct((2, 192), jnp.float64), (8, 192), 64)


@pytest.mark.slow
def test_no_race_and_nothing_read_that_is_not_there(rng, capfd):
    n, k, block_size = 200, 576, 64
    codes, scales, w = weight(rng, n, k, block_size)
    x, dy = normal(rng, (40, k), jnp.float32), normal(rng, (40, n), jnp.float32)
    strict = pltpu.InterpretParams(detect_races=True)  # what was not written reads as NaN, too
    y, dx = both("tpu", k, block_size, strict)(x, dy, codes, scales)
    assert "RACE" not in "".join(capfd.readouterr())
    assert_near(y, np.asarray(x, np.float64) @ w.T, jnp.float32)
    assert_near(dx, np.asarray(dy, np.float64) @ w, jnp.float32)


# ------------------------------------------------------------------------------------------------ through the door


def test_vmap_folds_rows_and_takes_weights_one_by_one(rng):
    n, k, block_size = 8, 64, 64
    weights = [weight(rng, n, k, block_size) for _ in range(2)]
    codes, scales, w = (np.stack([np.asarray(one[i]) for one in weights]) for i in range(3))
    x, dy = normal(rng, (2, 3, k), jnp.float32), normal(rng, (2, 3, n), jnp.float32)
    product = lambda x, codes, scales: dispatch.nf4_matmul("pallas_tpu", x, codes, scales, block_size, True)
    gradient = lambda dy, codes, scales: dispatch.nf4_input_gradient(
        "pallas_tpu", dy, codes, scales, k, block_size, True
    )
    y = jit(jax.vmap(product))(x, codes, scales)
    dx = jit(jax.vmap(gradient, (0, None, None)))(dy, codes[0], scales[0])
    np.testing.assert_allclose(y, np.einsum("bmk,bnk->bmn", x, w), atol=1e-4)
    np.testing.assert_allclose(dx, np.einsum("bmn,nk->bmk", dy, w[0]), atol=1e-4)
