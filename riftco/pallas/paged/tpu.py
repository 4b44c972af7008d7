"""Paged attention on TPU: while a block of pages is computed, the next one is copied to VMEM.

The grid goes over batch rows, key heads and tiles of queries, in order. A tile holds the queries of one key head's
whole group, and loops over the blocks of pages that it sees: from the window's first page to the length's last. While
it computes its last block, the first block of the next tile that has any is on its way. Only pages that hold a seen
key are copied, and only their entries of the table are looked at.

The pages are read where they lie, row-major. That is also the layout that XLA gives an argument if K is a multiple of
128. It may keep pools of other widths in another, and then copies them whole for each program that calls this kernel,
unless they come in a row-major layout (`jax.experimental.layout`). Inside a loop, tokens written to the pool by a
scatter over its flat rows [G P N, K] leave it row-major.

Source: Kwon et al. 2023, arXiv:2309.06180; Dao 2023, arXiv:2307.08691, algorithm 1.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from riftco.pallas import call
from riftco.pallas.core import softmax
from riftco.pallas.core.sizes import ceil_div, quotient, remainder, round_up
from riftco.pallas.core.visibility import keys_seen, keys_seen_by_all, sees

SUBLANES = {"float32": 8, "bfloat16": 16}  # rows of one tile of VMEM: what a page must be a multiple of
WIDEST = 256  # head width
BLOCK_KEYS = 256  # keys copied and computed at a time
TILE_ROWS = 512  # rows of queries that share a block: enough to be bound by arithmetic when there are as many
PAGE_KEYS, PAGE_BYTES = 1024, 1 << 20  # the largest page of one head; four of them lie in VMEM at a time
TABLE_ENTRIES = 192 * 1024  # of the page table: three quarters of SMEM


class Plan(NamedTuple):
    """The static part of a call."""

    heads: int  # G
    tiles: int  # of queries, for one row
    queries: int  # of a tile
    group: int  # query heads of a key head
    rows: int  # of a tile: queries x group, padded
    pages: int  # of a block
    page_size: int  # N
    width: int  # M
    window: int | None
    cap: float | None
    scale: float
    precision: Any

    @property
    def keys(self) -> int:
        """Of a block."""
        return self.pages * self.page_size


class Work(NamedTuple):
    """What one grid step does: traced int32 scalars."""

    row: Any
    head: Any
    queries: Any  # real ones
    first: Any  # position of the first
    low: Any  # the keys [low, high) are seen by some query
    high: Any
    all_low: Any  # the keys [all_low, all_high) are seen by every one
    all_high: Any
    page: Any  # number, within the row, of the first page to visit
    pages: Any  # to visit
    blocks: Any


def unsupported(
    q: Any, k_pages: Any, v_pages: Any, page_indices: Any, window: int | None, cap: float | None
) -> str | None:
    """Why this kernel cannot run a call; None if it can. Arrays may be ShapeDtypeStruct."""
    del window, cap
    dtype, page_size, width = str(k_pages.dtype), k_pages.shape[2], k_pages.shape[3]
    if dtype not in SUBLANES or not (q.dtype == k_pages.dtype == v_pages.dtype):
        return (
            "queries and pages must be all float32 or all bfloat16; "
            f"got {q.dtype}, {k_pages.dtype} and {v_pages.dtype}."
        )
    if width > WIDEST:
        return f"heads are at most {WIDEST} wide; got {width}."
    if 0 in (*q.shape, *k_pages.shape, *page_indices.shape):
        return f"every axis needs an element; got q {list(q.shape)} and k_pages {list(k_pages.shape)}."
    if page_size % SUBLANES[dtype]:
        return f"a page of {dtype} must hold a multiple of {SUBLANES[dtype]} keys; got {page_size}."
    if page_size > PAGE_KEYS or page_size * width * k_pages.dtype.itemsize > PAGE_BYTES:
        return (
            f"one head's page must hold at most {PAGE_KEYS} keys and {PAGE_BYTES} bytes; got {page_size} keys of width "
            f"{width} in {dtype}."
        )
    rows, columns = page_indices.shape
    if rows * columns > TABLE_ENTRIES:
        return f"the page table must have at most {TABLE_ENTRIES} entries; got {rows} x {columns}."
    return None


def forward(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    lengths: Any,
    query_lengths: Any,
    page_indices: Any,
    *,
    window: int | None,
    cap: float | None,
    scale: float,
    interpret: Any,
) -> Any:
    """The output [B, T, H, K] in q's dtype; rows past `query_lengths` and rows that see nothing are 0.

    Args:
        q: queries [B, T, H, K]; those before `query_lengths[b]` stand at the last positions of row b's keys.
        k_pages: keys [G, P, N, K], float32 (computed in float32) or bfloat16 (products in bfloat16, sums in float32).
        v_pages: values [G, P, N, K].
        lengths: int32 [B], keys of each row.
        query_lengths: int32 [B], queries of each row.
        page_indices: int32 [B, M]; entries past a row's last page are not read.
        window: keys that a query sees, its own included; None for all.
        cap: of the scores, c tanh(score / c), or None.
        scale: of the products q·k.
        interpret: as in `tpu_call`.
    """
    plan = _plan(q, k_pages, page_indices, window, cap, scale)
    packed = _pack(q, plan)
    width = q.shape[3]
    block = pl.BlockSpec((None, None, None, plan.rows, width), lambda b, g, i, *_: (b, g, i, 0, 0))
    pool = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, plan.pages, plan.page_size, width), k_pages.dtype)
    run = call.tpu_call(
        functools.partial(_kernel, plan=plan),
        name="paged_attention",
        out_shape=call.shape_like(packed.shape, q.dtype, q, k_pages, v_pages, lengths, query_lengths, page_indices),
        # In order, because a step starts the copies of a later one.
        semantics=("arbitrary", "arbitrary", "arbitrary"),
        interpret=interpret,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(q.shape[0], plan.heads, plan.tiles),
            in_specs=[block, pool, pool],
            out_specs=block,
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.VMEM((plan.rows, 1), jnp.float32),
                pltpu.VMEM((plan.rows, 1), jnp.float32),
                pltpu.VMEM((plan.rows, width), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
    )
    # The table is flat: SMEM pads the last axis of an array to 128 words.
    out = run(lengths, query_lengths, jnp.reshape(page_indices, (-1,)), packed, k_pages, v_pages)
    return _unpack(out, q.shape, plan)


def _plan(q: Any, k_pages: Any, page_indices: Any, window: int | None, cap: float | None, scale: float) -> Plan:
    _, t, h, _ = q.shape
    heads, _, page_size, _ = k_pages.shape
    group = h // heads
    tiles = ceil_div(t, max(1, TILE_ROWS // group))
    queries = ceil_div(t, tiles)
    sublanes = SUBLANES[str(q.dtype)]
    width = page_indices.shape[1]
    return Plan(
        heads=heads,
        tiles=tiles,
        queries=queries,
        group=group,
        rows=round_up(queries * group, sublanes),
        pages=max(1, min(BLOCK_KEYS // page_size, width)),
        page_size=page_size,
        width=width,
        window=window,
        cap=cap,
        scale=scale,
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
    )


def _pack(q: Any, plan: Plan) -> Any:
    """[B, T, H, K] to [B, G, tiles, rows, K]: rows are queries, and within a query the heads of the group."""
    b, t, _, k = q.shape
    q = jnp.pad(q, ((0, 0), (0, plan.tiles * plan.queries - t), (0, 0), (0, 0)))
    q = jnp.reshape(q, (b, plan.tiles, plan.queries, plan.heads, plan.group, k))
    q = jnp.reshape(jnp.transpose(q, (0, 3, 1, 2, 4, 5)), (b, plan.heads, plan.tiles, -1, k))
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, plan.rows - q.shape[3]), (0, 0)))


def _unpack(out: Any, shape: tuple[int, ...], plan: Plan) -> Any:
    b, t, h, k = shape
    out = out[:, :, :, : plan.queries * plan.group]
    out = jnp.reshape(out, (b, plan.heads, plan.tiles, plan.queries, plan.group, k))
    return jnp.reshape(jnp.transpose(out, (0, 2, 3, 1, 4, 5)), (b, -1, h, k))[:, :t]


# ------------------------------------------------------------------------------------------------ inside the kernel


def _work(step: Any, lengths: Any, query_lengths: Any, plan: Plan) -> Work:
    row, rest = quotient(step, plan.heads * plan.tiles), remainder(step, plan.heads * plan.tiles)
    head, tile = quotient(rest, plan.tiles), remainder(rest, plan.tiles)
    length = lengths[row]
    n = query_lengths[row]
    start = tile * plan.queries
    queries = jnp.clip(n - start, 0, plan.queries)
    first = length - n + start
    # A length that the table cannot hold must not lead past its end.
    keys = jnp.minimum(length, plan.width * plan.page_size)
    low, high = keys_seen(first, first + queries, keys, causal=True, window=plan.window)
    all_low, all_high = keys_seen_by_all(first, first + queries, keys, causal=True, window=plan.window)
    page = quotient(low, plan.page_size)
    pages = ceil_div(high, plan.page_size) - page
    pages = jnp.where((queries > 0) & (high > low), pages, 0)
    blocks = ceil_div(pages, plan.pages)
    return Work(row, head, queries, first, low, high, all_low, all_high, page, pages, blocks)


def _kernel(
    lengths: Any,
    query_lengths: Any,
    table: Any,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    out: Any,
    k_buffer: Any,
    v_buffer: Any,
    top: Any,
    total: Any,
    acc: Any,
    state: Any,
    arrived: Any,
    *,
    plan: Plan,
) -> None:
    steps = pl.num_programs(0) * plan.heads * plan.tiles
    step = (pl.program_id(0) * plan.heads + pl.program_id(1)) * plan.tiles + pl.program_id(2)
    work = _work(step, lengths, query_lengths, plan)

    # state: whether the first block of this step's work is on its way, and the buffer that it goes to.
    @pl.when(step == 0)
    def _() -> None:
        state[0] = jnp.int32(0)
        state[1] = jnp.int32(0)

    def each_page(which: int, work: Work, block: Any, slot: Any, act: Any) -> None:
        pages, buffer = (k_pages, k_buffer) if which == 0 else (v_pages, v_buffer)
        start = work.row * plan.width + work.page + block * plan.pages

        def one(j: Any, carry: Any) -> Any:
            source = pages.at[work.head, table[start + j]]
            act(pltpu.make_async_copy(source, buffer.at[slot, j], arrived.at[slot, which]))
            return carry

        lax.fori_loop(0, jnp.minimum(plan.pages, work.pages - block * plan.pages), one, None)

    def fetch(work: Work, block: Any, slot: Any) -> None:
        for which in (0, 1):
            each_page(which, work, block, slot, lambda copy: copy.start())

    def following(step: Any) -> Any:
        """The next step that has work, or `steps`."""

        def look(carry: Any) -> Any:
            at = carry[0] + 1
            last = jnp.minimum(at, steps - 1)
            return at, (at < steps) & (_work(last, lengths, query_lengths, plan).blocks == 0)

        return lax.while_loop(lambda carry: carry[1], look, (step, jnp.bool_(True)))[0]

    def compute(block: Any, slot: Any, is_ragged: bool) -> None:
        base = (work.page + block * plan.pages) * plan.page_size
        each_page(0, work, block, slot, lambda copy: copy.wait())
        k = _block(k_buffer, slot, plan)
        if is_ragged:
            k = _silence(k, base, work)
        product = lax.dot_general(
            q[...], k, (((1,), (1,)), ((), ())), precision=plan.precision, preferred_element_type=jnp.float32
        )
        s, _ = softmax.scores(product, plan.scale, plan.cap)
        if is_ragged:
            position = work.first + quotient(lax.broadcasted_iota(jnp.int32, s.shape, 0), plan.group)
            key = base + lax.broadcasted_iota(jnp.int32, s.shape, 1)
            s = softmax.masked(s, sees(position, key, causal=True, window=plan.window, length=work.high))
        top[...], total[...], p, factor = softmax.update(top[...], total[...], s)
        each_page(1, work, block, slot, lambda copy: copy.wait())
        v = _block(v_buffer, slot, plan)
        if is_ragged:
            v = _silence(v, base, work)
        product = lax.dot_general(
            p.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=plan.precision, preferred_element_type=jnp.float32
        )
        acc[...] = acc[...] * factor + product

    @pl.when(work.blocks == 0)
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(work.blocks > 0)
    def _() -> None:
        slot = state[1]

        @pl.when(state[0] == 0)
        def _() -> None:
            fetch(work, 0, slot)

        top[...] = jnp.full(top.shape, -jnp.inf, top.dtype)
        total[...] = jnp.zeros(total.shape, total.dtype)
        acc[...] = jnp.zeros(acc.shape, acc.dtype)

        def body(block: Any, slot: Any) -> Any:
            @pl.when(block + 1 < work.blocks)
            def _() -> None:
                fetch(work, block + 1, 1 - slot)

            @pl.when(block + 1 == work.blocks)
            def _() -> None:
                after = following(step)

                @pl.when(after < steps)
                def _() -> None:
                    fetch(_work(after, lengths, query_lengths, plan), 0, 1 - slot)

            first_key = (work.page + block * plan.pages) * plan.page_size
            is_whole = (first_key >= work.all_low) & (first_key + plan.keys <= work.all_high)
            pl.when(is_whole)(lambda: compute(block, slot, False))
            pl.when(jnp.logical_not(is_whole))(lambda: compute(block, slot, True))
            return 1 - slot

        state[1] = lax.fori_loop(0, work.blocks, body, slot)
        state[0] = jnp.int32(1)
        y, _ = softmax.finish(top[...], total[...], acc[...])
        real = lax.broadcasted_iota(jnp.int32, y.shape, 0) < work.queries * plan.group
        out[...] = jnp.where(real, y, 0.0).astype(out.dtype)


def _block(buffer: Any, slot: Any, plan: Plan) -> Any:
    block = buffer[slot]
    return jnp.reshape(block, (plan.keys, block.shape[2]))


def _silence(x: Any, base: Any, work: Work) -> Any:
    """Keys or values with those that no query of the tile sees zeroed: 0 times what a stale slot holds may be NaN."""
    key = base + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((key >= work.low) & (key < work.high), x, jnp.zeros((), x.dtype))
