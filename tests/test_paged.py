"""Paged attention: each implementation beside the twin and contiguous attention, and what has gone wrong elsewhere.

The kernels run by their interpreter. The op's twin, finite differences, jax.grad and bad inputs are in test_ops.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import errors, ops, oracle
from riftco.pallas import dispatch
from riftco.pallas.paged import triton
from tests.kernel_cases import QUICK


def _there(name):
    try:
        return bool(dispatch.kernel("paged_attention", name))
    except errors.UnsupportedError:
        return False


KERNELS = [name for op, name in dispatch.KERNELS if op == "paged_attention" and _there(name)]
RULES = ["plain", "blockwise"]
jit = functools.partial(jax.jit, compiler_options=QUICK)

kernels = pytest.mark.parametrize("implementation", KERNELS)
every = pytest.mark.parametrize("implementation", [*RULES, *KERNELS])
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

ROWS, ENTRIES, SIZE, WIDTH = 3, 6, 8, 32
SLOTS = ENTRIES * SIZE
RAGGED = np.array([0, 13, SLOTS], np.int32)


def op(implementation, window=None, cap=None):
    """The op with its options; kernels are interpreted."""
    options = dict(implementation=implementation, window=window, logits_soft_cap=cap)
    return functools.partial(ops.paged_attention, interpret=implementation in KERNELS, **options)


@functools.cache
def attend(implementation, window=None, cap=None):
    """The op as one program for each shape, whatever the rows hold: compiling is what takes the time here."""
    return jit(op(implementation, window, cap))


@functools.cache
def pull_back(implementation, window):
    """The op's value, and its cotangents of q, k_pages and v_pages."""

    @jit
    def run(q, k, v, lengths, table, counts, ct):
        f = lambda q, k, v: op(implementation, window)(q, k, v, lengths, table, query_lengths=counts)
        out, pull = riftco.vjp(f, q, k, v)
        return out, pull(ct)

    return run


def value(implementation, window, q, *rest):
    """The value alone, by the program of `pull_back`."""
    counts, ct = np.full(ROWS, q.shape[1], np.int32), np.zeros(q.shape, np.float32)
    return pull_back(implementation, window)(q, *rest, counts, ct)[0]


def draw(rng, *, time=1, groups=2, repeats=2, rows=ROWS, entries=ENTRIES, size=SIZE, width=WIDTH, dtype=np.float32):
    """q, k_pages, v_pages and a table of pages that no two rows share."""
    pages = rows * entries + 3
    q = rng.normal(size=(rows, time, groups * repeats, width))
    k, v = (rng.normal(size=(groups, pages, size, width)) for _ in range(2))
    table = rng.permutation(pages)[: rows * entries].reshape(rows, entries).astype(np.int32)
    return *(jnp.asarray(x.astype(dtype)) for x in (q, k, v)), table


def poisoned(pool, table, low, high, poison):
    """The pool with `poison` in every slot but those of the keys [low, high) of each row."""
    pool, size = np.asarray(pool), pool.shape[2]
    out = np.full_like(pool, poison)
    for row, first, last in zip(table, low, high, strict=True):
        for s in range(first, last):
            out[:, row[s // size], s % size] = pool[:, row[s // size], s % size]
    return jnp.asarray(out)


def strayed(table, low, high, size):
    """The table with numbers that are no pages wherever a row has no key that is seen."""
    wild = np.array([-1, 2**31 - 1, -(2**31), 10**6], np.int32)
    first = np.arange(table.shape[1]) * size
    used = (first[None, :] < np.asarray(high)[:, None]) & (first[None, :] + size > np.asarray(low)[:, None])
    return np.where(used, table, np.resize(wild, table.shape))


# ------------------------------------------------------------------------------------------------ beside the twin

# (queries, groups, query heads of each, window, cap): every value with several of the others.
SHAPES = [
    (1, 2, 1, None, 2.0),
    slow(1, 1, 3, 11, None),
    slow(5, 2, 4, 3, 1.5),
    slow(5, 1, 8, None, None),
    slow(17, 1, 3, 20, None),
    (17, 2, 8, 9, 2.0),  # several tiles of queries
]


@kernels
@pytest.mark.parametrize(("time", "groups", "repeats", "window", "cap"), SHAPES)
def test_a_kernel_is_the_twin(rng, implementation, time, groups, repeats, window, cap):
    q, k, v, table = draw(rng, time=time, groups=groups, repeats=repeats)
    run = attend(implementation, window, cap)
    for lengths, counts in (
        (RAGGED, None),
        (np.array([SLOTS - 1, 19, 7]), np.array([time, time // 2, min(time, 3)])),
        (np.array([1, 0, 40]), np.array([0, time, 1])),
    ):
        counts = np.full(ROWS, time) if counts is None else counts
        out = run(q, k, v, lengths, table, query_lengths=counts)
        options = dict(query_lengths=counts, window=window, logits_soft_cap=cap)
        np.testing.assert_allclose(out, oracle.paged_attention(q, k, v, lengths, table, **options), atol=2e-5)


@kernels
@pytest.mark.parametrize(
    ("dtype", "size", "width"),
    [slow("bfloat16", 16, 64), ("float32", 5, 80), slow("float16", 24, 80), slow("float32", 256, 32)],
)
def test_dtypes_page_sizes_and_head_widths(rng, implementation, dtype, size, width):
    q, k, v, table = draw(rng, time=2, entries=3, size=size, width=width, dtype=jnp.dtype(dtype))
    module = dispatch.kernel("paged_attention", implementation)
    if module.unsupported(q, k, v, table, None, None):
        with pytest.raises(errors.UnsupportedError, match=implementation):
            attend(implementation)(q, k, v, RAGGED, table)
        return
    lengths = np.array([1, size + 1, 3 * size])
    out = attend(implementation)(q, k, v, lengths, table)
    assert out.dtype == q.dtype
    expected = oracle.paged_attention(q, k, v, lengths, table)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=2e-5 if dtype == "float32" else 1e-2)


@every
def test_pages_are_contiguous_attention_in_any_order(rng, implementation):
    """Where the pages lie changes no bit, and contiguous attention agrees to 1e-6."""
    q, k, v, table = draw(rng, time=5)
    lengths = np.array([5, 13, SLOTS], np.int32)
    out = value(implementation, None, q, k, v, lengths, table)
    order = rng.permutation(k.shape[1])
    moved = [np.asarray(x)[:, np.argsort(order)] for x in (k, v)]
    again = value(implementation, None, q, *moved, lengths, order[table].astype(np.int32))
    np.testing.assert_array_equal(again, out)
    flat = [np.moveaxis(np.asarray(x)[:, table], 0, 3).reshape(ROWS, SLOTS, 2, WIDTH) for x in (k, v)]
    straight = jit(ops.attention)(q, *flat, kv_lengths=lengths, q_offset=lengths - 5)
    np.testing.assert_allclose(out, straight, atol=1e-6)


# ------------------------------------------------------------------------------------------------ what is not read


@every
@pytest.mark.parametrize("window", [None, 9])
def test_unused_slots_and_pages_never_reach_the_output(rng, implementation, window):
    """Stale NaN, infinities, and ids that are no pages: the values and all cotangents keep every bit."""
    time, counts = 5, np.array([2, 0, 5], np.int32)
    q, k, v, table = draw(rng, time=time)
    lengths = np.array([13, 30, 43], np.int32)
    low = np.zeros(ROWS, int) if window is None else np.maximum(0, lengths - counts - window + 1)
    high = np.where(counts > 0, lengths, 0)
    run, ct = pull_back(implementation, window), jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    clean = [poisoned(x, table, low, high, 0.0) for x in (k, v)]
    expected = run(q, *clean, lengths, table, counts, ct)
    assert np.isfinite(expected[0]).all()
    ids = strayed(table, low, high, SIZE)
    counted = (np.arange(time)[None, :] < counts[:, None])[:, :, None, None]
    for poison in (np.nan, np.inf):
        dirty = [poisoned(x, table, low, high, poison) for x in (k, v)]
        blotted = lambda x, poison=poison: np.where(counted, np.asarray(x), np.float32(poison))
        jax.tree_util.tree_map(
            np.testing.assert_array_equal,
            run(blotted(q), *dirty, lengths, ids, counts, blotted(ct)),
            expected,
        )


@kernels
@pytest.mark.parametrize("window", [slow(7), 65])
def test_the_first_visited_block_is_not_the_first(rng, implementation, window):
    """Windows that begin in a later block, are no multiple of one, and hide slots of blocks that are read."""
    entries, lengths = 40, np.array([300, 129, 60], np.int32)
    q, k, v, table = draw(rng, entries=entries)
    low = np.maximum(0, lengths - window)
    pools = [poisoned(x, table, low, lengths, np.nan) for x in (k, v)]
    out = attend(implementation, window)(q, *pools, lengths, strayed(table, low, lengths, SIZE))
    np.testing.assert_allclose(out, oracle.paged_attention(q, k, v, lengths, table, window=window), atol=2e-5)


@every
def test_a_window_holds_its_number_of_keys(rng, implementation):
    """With equal scores each output is the mean of the values seen: here, of the positions of exactly 9 keys."""
    time, window, lengths = 5, 9, np.array([3, 11, 40], np.int32)
    q, k, v, table = draw(rng, time=time)
    position = np.zeros(v.shape[1:3])
    for row in table:
        position[row] = np.arange(SLOTS).reshape(ENTRIES, SIZE)
    v = np.broadcast_to(position[None, :, :, None], v.shape).astype(np.float32)
    out = np.asarray(value(implementation, window, np.zeros(q.shape, np.float32), k, v, lengths, table))[..., 0]
    for b, t in np.ndindex(ROWS, time):
        last = lengths[b] - time + t
        expected = np.mean(range(max(0, last - window + 1), last + 1)) if last >= 0 else 0.0
        np.testing.assert_allclose(out[b, t], expected, atol=1e-5)


@kernels
@pytest.mark.parametrize("entries", [slow(1), slow(7)])
def test_table_widths_that_no_block_or_split_divides(rng, implementation, entries):
    q, k, v, table = draw(rng, entries=entries)
    lengths = np.array([entries * SIZE, entries * SIZE - 1, 1], np.int32)
    ids = strayed(table, np.zeros(ROWS), lengths, SIZE)
    out = attend(implementation)(q, k, v, lengths, ids)
    np.testing.assert_allclose(out, oracle.paged_attention(q, k, v, lengths, table), atol=2e-5)


@kernels
def test_outputs_that_begin_as_nan_are_all_written(rng, implementation):
    """The interpreter hands kernels memory of NaN: what sees nothing must be written as 0, without the op's help."""
    q, k, v, table = draw(rng, time=17, repeats=3)
    forward = dispatch.kernel("paged_attention", implementation).forward
    forward = functools.partial(forward, window=None, cap=None, scale=0.2, interpret=True)
    lengths, counts = np.array([0, 30, 4], np.int32), np.array([17, 0, 2], np.int32)
    out = np.asarray(jit(forward)(q, k, v, lengths, counts, table))
    assert np.isfinite(out).all() and (out[:2] == 0).all() and (out[2, 2:] == 0).all() and (out[2, :2] != 0).all()


# ------------------------------------------------------------------------------------------------ splits


def test_splits_add_up_to_one(rng):
    """Several blocks in one split, more splits than a short row has blocks, with and without jit around the sum."""
    q, k, v, table = draw(rng, time=2, entries=25)
    rows = np.array([200, 65, 0], np.int32), np.array([2, 1, 2], np.int32), table
    forward = functools.partial(triton.forward, window=None, cap=None, scale=0.2, interpret=True)
    whole = forward(q, k, v, *rows, splits=1)
    expected = oracle.paged_attention(q, k, v, rows[0], table, query_lengths=rows[1], scale=0.2)
    np.testing.assert_allclose(whole, expected, atol=2e-5)
    np.testing.assert_allclose(jit(functools.partial(forward, splits=7))(q, k, v, *rows), whole, atol=1e-6)
    narrow = [np.asarray(x).astype(jnp.bfloat16) for x in (q, k, v)]
    difference = np.asarray(forward(*narrow, *rows, splits=3), np.float32) - whole
    assert 0 < np.abs(difference).max() <= 1e-2


@pytest.mark.tiny
def test_the_number_of_splits():
    def splits(rows, groups, entries, window=None, time=1):
        q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, time, groups, 64), (groups, 9, 16, 64)))
        table = jax.ShapeDtypeStruct((rows, entries), jnp.int32)
        return triton.plan(q, k, table, window=window, cap=None, scale=1.0).splits

    assert splits(1, 8, 2048) == 33  # 33 programs for each of 8 heads
    assert splits(1, 8, 10) == 3  # no fewer than 4 pages each
    assert splits(64, 8, 2048) == 1
    assert splits(1, 1, 2048, window=100) == 2  # 8 pages hold what is seen
    assert splits(1, 1, 2048, time=128) == 132  # two tiles of queries


# ------------------------------------------------------------------------------------------------ transformations


@kernels
@pytest.mark.parametrize(("rows", "pools"), [(True, True), slow(True, False), slow(False, True)])
def test_vmap(rng, implementation, rows, pools):
    one, two = draw(rng), draw(rng)
    pick = lambda mapped, i: np.stack([one[i], two[i]]) if mapped else one[i]
    q, k, v, table = pick(rows, 0), pick(pools, 1), pick(pools, 2), pick(rows, 3)
    lengths = np.stack([RAGGED, RAGGED[::-1]]) if rows else RAGGED
    r, p = (0 if rows else None), (0 if pools else None)
    out = jit(jax.vmap(op(implementation), in_axes=(r, p, p, r, r)))(q, k, v, lengths, table)
    at = lambda x, mapped, i: x[i] if mapped else x
    for i in range(2):
        arrays = ((q, rows), (k, pools), (v, pools), (lengths, rows), (table, rows))
        expected = oracle.paged_attention(*(at(x, mapped, i) for x, mapped in arrays))
        np.testing.assert_allclose(out[i], expected, atol=2e-5)


@kernels
def test_gradients_of_a_kernel(rng, implementation):
    """By the XLA rule from the pages, windows included; rows that share pages add up; no cotangent, no gradient."""
    window, counts, lengths = 9, np.array([3, 0, 5], np.int32), np.array([7, 20, 21], np.int32)
    q, k, v, table = draw(rng, time=5)
    table[1:, 0] = table[0, 0]
    ct = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    _, ours = pull_back(implementation, window)(q, k, v, lengths, table, counts, ct)
    theirs = oracle.paged_attention_vjp(q, k, v, lengths, table, ct, query_lengths=counts, window=window)
    for a, b in zip(ours, theirs, strict=False):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    zeros = pull_back(implementation, window)(q, k, v, lengths, table, counts, ct * 0)[1]
    assert all((np.asarray(x) == 0).all() for x in zeros)


@functools.cache
def second_derivative(implementation):
    """A scalar made of the first derivative by q, differentiated by q."""

    @jit
    def run(q, k, v, lengths, table):
        f = lambda q: ops.sum(ops.tanh(op(implementation)(q, k, v, lengths, table)))
        return riftco.grad(lambda q: ops.sum(ops.tanh(riftco.grad(f)(q))))(q)

    return run


@pytest.mark.slow
@kernels
def test_second_derivatives_of_a_kernel_are_the_plain_rule_s(rng, implementation):
    q, k, v, table = draw(rng, entries=1, width=4)
    lengths = np.array([7, 3, 8], np.int32)

    second = [second_derivative(name)(q, k, v, lengths, table) for name in (implementation, "plain")]
    assert np.abs(second[1]).max() > 1e-3
    np.testing.assert_allclose(*second, atol=1e-6)


@pytest.mark.slow
@kernels
def test_lengths_that_grow_in_a_scan(rng, implementation):
    """Decoding: the length of each step is traced, and nothing but it hides what is not written yet."""
    q, k, v, table = draw(rng)
    steps, start = 12, np.array([0, 9, 30], np.int32)

    @jit
    def loop(q, k, v):
        def body(lengths, _):
            lengths = lengths + 1
            return lengths, op(implementation)(q, k, v, lengths, table)

        return jax.lax.scan(body, jnp.asarray(start), length=steps)[1]

    out = loop(q, k, v)
    for i in (0, 7, 11):
        expected = oracle.paged_attention(q, k, v, start + i + 1, table)
        np.testing.assert_allclose(out[i], expected, atol=2e-5)


# ------------------------------------------------------------------------------------------------ faults


@every
def test_a_faulty_row_is_nan_under_jit_and_no_other_is(rng, implementation):
    q, k, v, table = draw(rng, time=5)
    ct, counts, lengths = np.ones(q.shape, np.float32), np.full(ROWS, 5, np.int32), np.full(ROWS, 20, np.int32)
    run = pull_back(implementation, None)
    clean, (dq, *_) = run(q, k, v, lengths, table, counts, ct)
    stray = lambda page: np.where(np.arange(ROWS * ENTRIES).reshape(table.shape) == ENTRIES + 2, page, table)
    first = lambda x, value: np.array([x[0], value, x[2]], np.int32)
    for changed in (
        dict(table=stray(-1)),
        dict(table=stray(k.shape[1])),
        dict(lengths=first(lengths, SLOTS + 1)),
        dict(lengths=first(lengths, -1)),
        dict(counts=first(counts, 6)),
    ):
        rows = {"lengths": lengths, "table": table, "counts": counts, **changed}
        out, cotangents = run(q, k, v, rows["lengths"], rows["table"].astype(np.int32), rows["counts"], ct)
        assert np.isnan(out[1]).all()
        np.testing.assert_array_equal(out[::2], clean[::2])
        assert all(np.isfinite(x).all() for x in cotangents) and (np.asarray(cotangents[0][1]) == 0).all()
        np.testing.assert_array_equal(cotangents[0][::2], dq[::2])


@pytest.mark.tiny
def test_faults_in_concrete_rows_raise(rng):
    q, k, v, table = draw(rng, width=4)
    run = functools.partial(ops.paged_attention, q, k, v)
    with pytest.raises(errors.IndexRangeError, match=r"page_indices .* in \[0, 21\); got 21 at index \[2, 1\]"):
        run(np.array([0, 1, 9]), np.where(np.arange(ENTRIES) == 1, 21, table))
    with pytest.raises(errors.IndexRangeError, match=r"lengths must be in \[0, 49\)"):
        run(np.array([0, 1, 49]), table)
    with pytest.raises(errors.IndexRangeError, match=r"query_lengths must be in \[0, 2\)"):
        run(RAGGED, table, query_lengths=np.array([0, 2, 1]))
    assert not np.isnan(run(np.array([0, 1, 8]), np.where(np.arange(ENTRIES) == 1, -5, table))).any()


@pytest.mark.tiny
def test_a_named_implementation_is_honoured_or_refused(rng):
    q, k, v, table = draw(rng, width=4)
    run = functools.partial(ops.paged_attention, q, k, v, RAGGED, table)
    for name in KERNELS:
        with pytest.raises(errors.UnsupportedError, match=rf"paged_attention\[{name}\]: it needs a \w+ device"):
            run(implementation=name)
    for name in ("pallas_mosaic_gpu", "cudnn"):
        with pytest.raises(errors.UnsupportedError, match="there is no such kernel"):
            run(implementation=name)
    with pytest.raises(errors.UnsupportedError, match="nothing to interpret"):
        run(implementation="plain", interpret=True)
    np.testing.assert_array_equal(run(), run(implementation="plain"))
    wide = jax.ShapeDtypeStruct((3, 1, 2, 320), jnp.float32)
    pool = jax.ShapeDtypeStruct((2, 21, 8, 320), jnp.float32)
    assert "at most 256 wide; got 320" in str(triton.unsupported(wide, pool, pool, table, None, None))
    double = jax.ShapeDtypeStruct(q.shape, np.float64)
    assert "got float64" in str(triton.unsupported(double, k, v, table, None, None))
