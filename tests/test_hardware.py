"""The compiled kernels on a real GPU or TPU, against the twin: small, quick, and skipped where there is no such chip.

    RIFTCO_REQUIRE_ACCELERATOR=1 python -m pytest -n0 -m gpu tests/test_hardware.py   # or -m tpu

One process, since each takes most of the chip's memory. With the variable a missing chip is a failure, not a skip. What
the interpreters have checked on a CPU is the schedule; here it is the code that the chip's compiler makes of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import errors, ops, oracle

BF16, F16, F32 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))
OUTPUT = {F32: 2e-5, F16: 2e-3, BF16: 1e-2}
GRADIENT = {F32: 1e-5, F16: 3e-3, BF16: 1e-2}


def on(chip: str, *names: str) -> list[Any]:
    """Parameters for kernels that need this chip."""
    return [pytest.param(name, marks=getattr(pytest.mark, chip)) for name in names]


FLASH = [*on("gpu", "pallas_triton", "pallas_mosaic_gpu", "cudnn"), *on("tpu", "pallas_tpu")]
OTHERS = [*on("gpu", "pallas_triton"), *on("tpu", "pallas_tpu")]


def normal(rng, *shape, dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)


def compiled(run, *arguments):
    """Runs a program twice: the same bits, or it fails. A kernel that refuses the call skips the test, and says why."""
    program = jax.jit(run)
    try:
        first = program(*arguments)
    except errors.UnsupportedError as refused:
        pytest.skip(str(refused))
    for a, b in zip(jax.tree_util.tree_leaves(first), jax.tree_util.tree_leaves(program(*arguments)), strict=True):
        np.testing.assert_array_equal(a, b)
    return first


def relative(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


# ------------------------------------------------------------------------------------------------ attention

# (B, T, S, H, G, K), static options, arrays. Lengths that no tile divides, and every kind of mask.
ATTENTION = {
    "causal": ((2, 300, 300, 4, 2, 64), {}, {}),
    "wide": ((1, 200, 333, 4, 1, 128), {"q_offset": 133}, {}),
    "window": ((1, 300, 420, 2, 1, 64), {"window": 90, "q_offset": 100}, {}),
    "one query": ((3, 1, 257, 8, 2, 64), {}, {"q_offset": [256, 100, 0], "kv_lengths": [257, 101, 1]}),
    "rows": (
        (2, 130, 200, 3, 3, 128),
        {"causal": False, "window": 70, "logits_soft_cap": 20.0},
        {"q_offset": [70, 3], "kv_lengths": [200, 0]},
    ),
}


def attention(rng, how, name, dtype):
    """Inputs, results (output, dq, dk, dv) and options of a case."""
    (b, t, s, h, g, k), static, arrays = ATTENTION[name]
    arrays = {key: jnp.asarray(value, jnp.int32) for key, value in arrays.items()}
    q, ct = (normal(rng, b, t, h, k, dtype=dtype) for _ in range(2))
    keys, values = (normal(rng, b, s, g, k, dtype=dtype) for _ in range(2))

    def run(q, k, v, ct, arrays):
        attend = functools.partial(ops.attention, implementation=how, **static, **arrays)
        out, pull = riftco.vjp(attend, q, k, v)
        return out, *pull(ct)

    got = compiled(run, q, keys, values, ct, arrays)
    return (q, keys, values, ct), got, {**static, **{key: np.asarray(value) for key, value in arrays.items()}}


@pytest.mark.parametrize("how", FLASH)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, dtype) for name in ATTENTION for dtype in (BF16, F32)), ("causal", F16)], ids=str
)
def test_attention_and_its_gradients(rng, how, name, dtype):
    inputs, (out, *gradients), options = attention(rng, how, name, dtype)
    q, k, v, ct = (np.asarray(x, np.float64) for x in inputs)
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle.attention(q, k, v, **options), atol=OUTPUT[dtype])
    for got, wanted in zip(gradients, oracle.attention_vjp(q, k, v, ct, **options), strict=True):
        assert relative(got, wanted) <= GRADIENT[dtype]


@pytest.mark.parametrize("how", FLASH)
def test_poison_empty_rows_and_no_cotangent(rng, how):
    """In the cases of ptxas and cuDNN gone wrong: scores near -100, a masked end, one row without any key."""
    dtype = BF16
    q, ct = (normal(rng, 2, 192, 2, 64, dtype=dtype) for _ in range(2))
    k, v = (normal(rng, 2, 192, 1, 64, dtype=dtype) for _ in range(2))
    q, k = q.at[..., 0].set(28.0), k.at[..., 0].set(-28.0)
    lengths = jnp.asarray([180, 0], jnp.int32)
    stale = (jnp.arange(192)[None, :] >= lengths[:, None])[:, :, None, None]

    def run(q, k, v, ct, lengths):
        attend = functools.partial(ops.attention, implementation=how, kv_lengths=lengths)
        out, pull = riftco.vjp(attend, q, k, v)
        return out, *pull(ct)

    clean = compiled(run, q, k, v, ct, lengths)
    assert all(np.all(np.isfinite(x)) for x in clean)
    assert not any(np.any(x[1]) for x in clean)
    k_stale, v_stale = (jnp.where(stale, jnp.asarray(np.nan, dtype), x) for x in (k, v))
    poisoned = compiled(run, q, k_stale, v_stale, ct, lengths)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not any(np.any(x) for x in compiled(run, q, k, v, jnp.zeros_like(ct), lengths)[1:])
    wide = [np.asarray(x, np.float64) for x in (q, k, v, ct)]
    for got, wanted in zip(clean[1:], oracle.attention_vjp(*wide, kv_lengths=np.asarray(lengths)), strict=True):
        assert relative(got, wanted) <= 3e-2


# ------------------------------------------------------------------------------------------------ pages


@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    ("queries", "width", "options"), [(1, 64, {}), (1, 128, {"window": 50}), (5, 128, {"logits_soft_cap": 10.0})]
)
def test_paged_attention(rng, how, dtype, queries, width, options):
    rows, groups, repeats, size, entries = 4, 2, 4, 16, 13
    pages = rows * entries + 3
    q = normal(rng, rows, queries, groups * repeats, width, dtype=dtype)
    lengths = np.array([size * entries, 100, queries, 0], np.int32)
    table = rng.permutation(pages)[: rows * entries].reshape(rows, entries).astype(np.int32)
    used = np.zeros((pages, size), bool)
    for row, length in zip(table, lengths, strict=True):
        for i in range(length):
            used[row[i // size], i % size] = True
    # Nothing but the rows' own slots may be read, and beyond a row's last page the table need not hold pages.
    pools = (np.where(used[None, :, :, None], rng.normal(size=(groups, pages, size, width)), np.nan) for _ in range(2))
    k, v = (jnp.asarray(x, dtype) for x in pools)
    wild = np.where(np.arange(entries)[None, :] * size < lengths[:, None], table, 2**31 - 1)
    run = functools.partial(ops.paged_attention, implementation=how, **options)
    out = compiled(run, q, k, v, lengths, wild)
    clean_k, clean_v = (np.nan_to_num(np.asarray(x, np.float64)) for x in (k, v))
    expected = oracle.paged_attention(np.asarray(q, np.float64), clean_k, clean_v, lengths, table, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=OUTPUT[dtype])
    assert not np.any(out[3])


# ------------------------------------------------------------------------------------------------ NF4


@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_products_with_nf4_weights(rng, how, dtype, rows):
    packed = ops.quantize_nf4(normal(rng, 200, 576, dtype=F32))
    x, ct = normal(rng, rows, 576, dtype=dtype), normal(rng, rows, 200, dtype=dtype)

    def run(x, ct, packed):
        out, pull = riftco.vjp(lambda x: ops.nf4_linear(x, packed, implementation=how), x)
        return out, pull(ct)[0]

    out, dx = compiled(run, x, ct, packed)
    weight = np.asarray(ops.dequantize_nf4(packed, dtype), np.float64)
    bar = 1e-5 if dtype == F32 else 4e-3
    assert relative(out, np.asarray(x, np.float64) @ weight.T) <= bar
    assert relative(dx, np.asarray(ct, np.float64) @ weight) <= bar


@pytest.mark.parametrize("how", OTHERS)
def test_one_hot_rows_read_an_nf4_weight_to_the_bit(rng, how):
    packed = ops.quantize_nf4(normal(rng, 96, 256, dtype=F32))
    run = lambda x: ops.nf4_linear(x, packed, implementation=how)
    out = compiled(run, jnp.eye(256, dtype=BF16))
    np.testing.assert_array_equal(out, np.asarray(ops.dequantize_nf4(packed, BF16)).T)
