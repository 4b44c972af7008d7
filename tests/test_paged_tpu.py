"""The TPU schedule of paged attention: its blocks, tiles and copies, by the HLO interpreter and by the TPU one.

What every implementation must do is in test_paged.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from riftco import ops, oracle
from riftco.pallas import dispatch
from riftco.pallas.paged import tpu
from tests.kernel_cases import QUICK

# Every race is looked for, what was not written reads as NaN, what is out of bounds raises, and a copy arrives only
# when it is waited for.
STRICT = pltpu.InterpretParams(detect_races=True)
BLOCK = 32
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
jit = functools.partial(jax.jit, compiler_options=QUICK)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tpu, "BLOCK_KEYS", BLOCK)
    monkeypatch.setattr(tpu, "TILE_ROWS", 24)


@functools.cache
def program(window=None, cap=None, scale=0.3, interpret=True):
    return jit(functools.partial(tpu.forward, window=window, cap=cap, scale=scale, interpret=interpret))


def call(rng, lengths, counts, *, queries, group, heads=2, width=16, size=8, entries=9, dtype=np.float32):
    """Queries, pools, lengths, query lengths and a table whose pages stand in a random order."""
    batch = len(lengths)
    pages = batch * entries + 2
    q = rng.normal(size=(batch, queries, heads * group, width)).astype(dtype)
    k, v = (rng.normal(size=(heads, pages, size, width)).astype(dtype) for _ in range(2))
    table = rng.permutation(pages)[: batch * entries].reshape(batch, entries).astype(np.int32)
    return q, k, v, np.array(lengths, np.int32), np.array(counts, np.int32), table


def expected(args, window=None, cap=None, scale=0.3):
    q, k, v, lengths, counts, table = args
    options = {"window": window, "logits_soft_cap": cap, "scale": scale}
    return oracle.paged_attention(q, k, v, lengths, table, query_lengths=counts, **options)


def unused(args, window=None):
    """Boolean [P, N], the slots that no query sees; [B, M], the table's entries for them."""
    _, k, _, lengths, counts, table = args
    size = k.shape[2]
    slots, entries = np.ones((k.shape[1], size), bool), np.ones(table.shape, bool)
    for b, (length, n) in enumerate(zip(lengths, counts, strict=True)):
        low = 0 if window is None else max(0, length - n - window + 1)
        for s in range(low, length if n else low):
            slots[table[b, s // size], s % size] = False
            entries[b, s // size] = False
    return slots, entries


def poisoned(args, window=None):
    """The same call with NaN in every slot and query that is not used, and wild entries in the table."""
    q, k, v, lengths, counts, table = (x.copy() for x in args)
    slots, entries = unused(args, window)
    k[:, slots], v[:, slots] = np.nan, np.nan
    table[entries] = np.resize(np.array([-1, 2**31 - 1, -(2**31), k.shape[1]]), entries.sum())
    for b, n in enumerate(counts):
        q[b, n:] = np.nan
    return q, k, v, lengths, counts, table


# The table ends in part of a block and so do rows; a row has no keys or no queries. A window of 37 from the first of 5
# queries at 52 begins with a page, so that a whole block is copied of which the last query does not see all.
CASES = {
    "decode": (dict(lengths=(70, 0, 13, 33), counts=(1, 1, 1, 1), queries=1, group=8), {}),
    "decode-window": (dict(lengths=(70, 0, 64, 7), counts=(1, 0, 1, 1), queries=1, group=1), dict(window=11)),
    "chunk-cap": (dict(lengths=(37, 64, 5, 71), counts=(5, 0, 5, 1), queries=5, group=3, width=80), dict(cap=2.0)),
    "chunk-window": (dict(lengths=(57, 0, 72, 3), counts=(5, 0, 2, 3), queries=5, group=3, size=16), dict(window=37)),
    "tiles": (dict(lengths=(61, 17, 0, 30), counts=(17, 17, 0, 3), queries=17, group=4, width=64), {}),
    "tiles-window": (
        dict(lengths=(72, 20, 0, 30), counts=(17, 9, 0, 1), queries=17, group=4, heads=1),
        dict(window=10, cap=3.0),
    ),
}


SLOW = ("decode-window", "chunk-cap")


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in CASES])
def test_the_kernel_is_the_oracle(rng, name):
    shapes, options = CASES[name]
    args = call(rng, **shapes)
    clean = program(**options)(*args)
    assert clean.dtype == jnp.float32
    np.testing.assert_allclose(clean, expected(args, **options), atol=2e-6, rtol=0)
    # Pages elsewhere in the pool: the same bits.
    q, k, v, lengths, counts, table = args
    order = rng.permutation(k.shape[1])
    place = np.argsort(order).astype(np.int32)
    np.testing.assert_array_equal(clean, program(**options)(q, k[:, order], v[:, order], lengths, counts, place[table]))
    # Slots, pages, queries and entries that nothing may read: the same bits.
    np.testing.assert_array_equal(clean, program(**options)(*poisoned(args, options.get("window"))))


@pytest.mark.parametrize(
    "shapes, options",
    [
        (dict(lengths=(0, 40, 0, 0, 9), counts=(1, 1, 1, 0, 1), queries=1, group=3, heads=2, entries=5), {}),
        slow(dict(lengths=(60, 0, 17), counts=(9, 0, 3), queries=9, group=4, heads=1, entries=9), dict(window=20)),
    ],
)
def test_no_race_and_nothing_read_that_is_not_there(rng, capfd, shapes, options):
    args = call(rng, **shapes)
    out = program(**options, interpret=STRICT)(*poisoned(args, options.get("window")))
    np.testing.assert_allclose(out, expected(args, **options), atol=2e-6, rtol=0)
    assert "RACE" not in "".join(capfd.readouterr())


def test_rows_of_every_length_around_a_block(rng):
    lengths = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 72)
    args = call(rng, lengths, (1,) * 8, queries=1, group=3, heads=1)
    np.testing.assert_allclose(program()(*args), expected(args), atol=2e-6, rtol=0)
    for shift in range(3):
        q, k, v, lengths, counts, table = args
        rolled = (q, k, v, np.roll(lengths, shift + 1), np.roll(counts, shift), table)
        np.testing.assert_allclose(program()(*rolled), expected(rolled), atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [9, slow(32)])
def test_a_window_counts_keys(rng, window):
    """With the values that tell keys apart, every query's output names the keys that it saw."""
    q, k, v, lengths, counts, table = call(rng, (70, 33), (1, 1), queries=1, group=1, heads=1, width=80)
    q, v = np.zeros_like(q), np.zeros_like(v)
    for b in range(2):
        for s in range(72):
            v[0, table[b, s // 8], s % 8, s] = 1.0
    out = np.asarray(program(window=window)(q, k, v, lengths, counts, table))[:, 0, 0]
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(np.flatnonzero(out[b]), np.arange(max(0, length - window), length))


@pytest.mark.slow
def test_bfloat16_is_as_near_as_a_plain_rule(rng):
    args = call(rng, (128, 0, 50), (5, 0, 3), queries=5, group=4, width=64, size=16, dtype=jnp.bfloat16)
    truth = expected(args)
    out = program()(*args)
    assert out.dtype == jnp.bfloat16
    q, k, v, lengths, counts, table = args
    rule = jit(functools.partial(ops.paged_attention, scale=0.3, implementation="plain"))
    plain = rule(q, k, v, lengths, table, query_lengths=counts)
    error, bar = (np.abs(np.asarray(x, np.float64) - truth).max() for x in (out, plain))
    assert error <= min(1e-2, 2 * bar + 1e-5)


@pytest.mark.slow
def test_it_is_attention_over_the_gathered_pages(rng):
    args = call(rng, (70, 9, 40), (5, 5, 2), queries=5, group=3)
    q, k, v, lengths, counts, table = args
    k, v = (np.moveaxis(x[:, table].reshape(x.shape[0], 3, -1, x.shape[3]), 0, 2) for x in (k, v))
    rule = jit(functools.partial(ops.attention, scale=0.3, implementation="plain"))
    whole = rule(q, k, v, kv_lengths=lengths, q_offset=lengths - counts)
    whole = np.where(np.arange(5)[None, :, None, None] < counts[:, None, None, None], whole, 0.0)
    np.testing.assert_allclose(program()(*args), whole, atol=1e-6, rtol=0)


@pytest.mark.tiny
def test_what_it_refuses_and_why():
    def reason(page=(2, 9, 16, 64), dtype="float32", q_dtype=None, table=(3, 4), queries=1):
        pool = jax.ShapeDtypeStruct(page, dtype)
        q = jax.ShapeDtypeStruct((table[0], queries, 4, page[3]), q_dtype or dtype)
        return tpu.unsupported(q, pool, pool, jax.ShapeDtypeStruct(table, "int32"), 5, 2.0)

    assert reason() is None and reason((2, 9, 16, 64), "bfloat16") is None and reason((2, 9, 8, 80)) is None
    assert reason((2, 9, 1024, 256)) is None and reason(table=(256, 768)) is None
    for text, call in {
        "all float32 or all bfloat16; got float16": dict(dtype="float16"),
        "got bfloat16, float32 and float32": dict(q_dtype="bfloat16"),
        "a multiple of 8 keys; got 12": dict(page=(2, 9, 12, 64)),
        "a multiple of 16 keys; got 8": dict(page=(2, 9, 8, 64), dtype="bfloat16"),
        "at most 1024 keys": dict(page=(2, 9, 2048, 64)),
        "heads are at most 256 wide; got 320": dict(page=(2, 9, 16, 320)),
        "at most 196608 entries; got 256 x 769": dict(table=(256, 769)),
        "every axis needs an element": dict(queries=0),
    }.items():
        assert text in (reason(**call) or "")
    call = (jnp.ones((1, 1, 2, 64)), *[jnp.ones((1, 2, 12, 64))] * 2, jnp.zeros((1, 1), jnp.int32), None, None)
    sentence = dispatch.refusal("paged_attention", "pallas_tpu", dispatch.Target("tpu"), False, *call)
    assert sentence == "paged_attention[pallas_tpu]: a page of float32 must hold a multiple of 8 keys; got 12."
