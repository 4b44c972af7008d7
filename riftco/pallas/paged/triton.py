"""Paged attention for NVIDIA GPUs by Pallas Triton: each key's page is looked up in the kernel, the keys are split.

A program holds a tile of the queries of one row that share a key head, all heads of the group together, and walks over
some of the blocks of keys that they see: from the window's first key to the row's last, cut into the same number of
parts for every row, so that a short row's programs end early. Parts are added up in float32 by XLA. Whatever no query
of the tile sees is a masked load: neither its slot nor its page number is ever followed.

An interpreter checks the numbers, and ahead-of-time compilation for sm_90 that the kernel fits; neither shows that
Triton's own code is right.

Source: Kwon et al. 2023, arXiv:2309.06180; Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from riftco.pallas.call import shape_like, triton_call
from riftco.pallas.core import softmax
from riftco.pallas.core.sizes import ceil_div, power_of_two, quotient, remainder
from riftco.pallas.core.visibility import keys_seen, sees

DTYPES = ("float32", "bfloat16", "float16")
WIDEST = 256  # head width
TILE_ROWS = 64  # queries of a group in one program, at most
PROGRAMS = 264  # what keeps a chip busy: two for each of an H100's or H200's 132 processors
PAGES_OF_A_SPLIT = 4  # fewer cost more to add up than they save


class Plan(NamedTuple):
    """The static part of a call."""

    queries: int  # T
    heads: int  # H
    group: int  # query heads of a key head
    width: int  # K
    pages: int  # P
    page_size: int  # N
    entries: int  # M
    rows: int  # of a tile: queries x group
    tiles: int  # of a row of the batch
    keys: int  # of a block
    splits: int
    window: int | None
    cap: float | None
    scale: float


def unsupported(
    q: Any, k_pages: Any, v_pages: Any, page_indices: Any, window: int | None, cap: float | None
) -> str | None:
    """Why this kernel cannot run a call; None if it can. Arrays may be ShapeDtypeStruct."""
    del v_pages, window, cap  # of v_pages nothing that k_pages does not say
    if str(q.dtype) not in DTYPES or q.dtype != k_pages.dtype:
        return f"it computes in {', '.join(DTYPES)}; got {q.dtype} queries and {k_pages.dtype} pages."
    if q.shape[3] > WIDEST:
        return f"heads are at most {WIDEST} wide; got {q.shape[3]}."
    if max(k_pages.size // k_pages.shape[3], q.size // q.shape[3], page_indices.size) >= 2**31:
        return f"slots are counted in 32 bits; got k_pages {list(k_pages.shape)} and q {list(q.shape)}."
    if 0 in (*q.shape, *k_pages.shape, *page_indices.shape):
        return f"every axis needs an element; got q {list(q.shape)} and k_pages {list(k_pages.shape)}."
    return None


def plan(
    q: Any,
    k_pages: Any,
    page_indices: Any,
    *,
    window: int | None,
    cap: float | None,
    scale: float,
    splits: int | None = None,
) -> Plan:
    """Tiles and splits of a call, from shapes alone: lengths are traced."""
    batch, queries, heads, width = q.shape
    groups, pages, size, _ = k_pages.shape
    entries = page_indices.shape[1]
    group = heads // groups
    rows = min(TILE_ROWS, power_of_two(queries * group))
    tiles = ceil_div(queries * group, rows)
    # A block of keys and one of values, for each stage of the pipeline, fit in shared memory.
    keys = min(64 if power_of_two(width) * q.dtype.itemsize <= 256 else 32, power_of_two(entries * size))
    if splits is None:
        reached = entries if window is None else min(entries, ceil_div(window + queries - 1, size) + 1)
        splits = max(1, min(ceil_div(PROGRAMS, batch * groups * tiles), ceil_div(reached, PAGES_OF_A_SPLIT)))
    return Plan(queries, heads, group, width, pages, size, entries, rows, tiles, keys, splits, window, cap, scale)


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
    splits: int | None = None,
) -> Any:
    """The output [B, T, H, K] in q's dtype; `splits` None chooses from the shapes."""
    p = plan(q, k_pages, page_indices, window=window, cap=cap, scale=scale, splits=splits)
    lines = q.size // p.width
    dtype = q.dtype if p.splits == 1 else jnp.dtype(jnp.float32)
    operands = (q, k_pages, v_pages, lengths, query_lengths, page_indices)
    shapes = [shape_like((p.splits * lines, p.width), dtype, *operands)]
    if p.splits > 1:
        shapes.append(shape_like((p.splits * lines,), jnp.float32, *operands))
    # Every array is a list of lines of K numbers (or of scalars), so that one index vector finds any of them.
    lists = (jnp.reshape(x, (-1, p.width)) for x in (q, k_pages, v_pages))
    parts = triton_call(
        functools.partial(_kernel, plan=p),
        name="paged_attention",
        grid=(q.shape[0] * p.tiles, k_pages.shape[0], p.splits),
        out_shape=tuple(shapes),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
    )(*lists, lengths, query_lengths, jnp.reshape(page_indices, (-1,)))
    if p.splits == 1:
        return jnp.reshape(parts[0], q.shape)
    outs, lses = (jnp.reshape(x, (p.splits, lines, *x.shape[1:])) for x in parts)
    return jnp.reshape(softmax.combine(outs, lses)[0], q.shape).astype(q.dtype)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    lengths_ref: Any,
    query_lengths_ref: Any,
    pages_ref: Any,
    out_ref: Any,
    *lse_ref: Any,
    plan: Plan,
) -> None:
    p = plan
    row, tile = quotient(pl.program_id(0), p.tiles), remainder(pl.program_id(0), p.tiles)
    group, split = pl.program_id(1), pl.program_id(2)
    length = jnp.clip(lengths_ref[row], 0, p.entries * p.page_size)
    count = jnp.clip(query_lengths_ref[row], 0, p.queries)

    line = tile * p.rows + jnp.arange(p.rows, dtype=jnp.int32)
    t, head = quotient(line, p.group), remainder(line, p.group)
    lines = (row * p.queries + t) * p.heads + group * p.group + head
    inside = line < p.queries * p.group
    position = jnp.where(t < count, length - count + t, -1)  # before every key: what does not count sees nothing
    q = _load(q_ref, lines, inside, p.width)

    first, last = quotient(tile * p.rows, p.group), quotient(tile * p.rows + p.rows - 1, p.group) + 1
    low, high = keys_seen(
        length - count + first,
        length - count + jnp.minimum(last, count),
        length,
        causal=True,
        window=p.window,
    )
    high = jnp.where(first < count, high, low)
    start, stop = _part(low, high, split, p)

    def step(j: Any, carry: Any) -> Any:
        top, total, acc = carry
        key = j * p.keys + jnp.arange(p.keys, dtype=jnp.int32)
        seen = (key >= low) & (key < high)
        entry, slot = quotient(key, p.page_size), remainder(key, p.page_size)
        page = pltriton.load(pages_ref.at[row * p.entries + entry], mask=seen, other=0)
        slots = (group * p.pages + page) * p.page_size + slot
        s, _ = softmax.scores(_dot(q, _load(k_ref, slots, seen, p.width), transposed=True), p.scale, p.cap)
        s = softmax.masked(s, sees(position[:, None], key[None, :], causal=True, window=p.window))
        top, total, weights, factor = softmax.update(top, total, s)
        v = _load(v_ref, slots, seen, p.width)
        return top, total, acc * factor + _dot(weights.astype(v.dtype), v)

    state = (
        jnp.full((p.rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((p.rows, 1), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    out, lse = softmax.finish(*lax.fori_loop(start, stop, step, state))
    lines = lines + split * (q_ref.shape[0])
    columns, mask = _columns(lines, inside, p.width)
    pltriton.store(out_ref.at[lines[:, None], columns], out.astype(out_ref.dtype), mask=mask)
    if lse_ref:
        pltriton.store(lse_ref[0].at[lines], jnp.reshape(lse, (p.rows,)), mask=inside)


def _part(low: Any, high: Any, split: Any, p: Plan) -> tuple[Any, Any]:
    """The blocks [start, stop) of one split of the keys [low, high)."""
    start = quotient(low, p.keys)
    blocks = jnp.where(low < high, ceil_div(high, p.keys) - start, 0)
    each = ceil_div(blocks, p.splits)
    return start + split * each, start + jnp.minimum(blocks, (split + 1) * each)


def _columns(lines: Any, inside: Any, width: int) -> tuple[Any, Any]:
    """Column numbers [1, padded K], and the mask of the lines' entries that exist."""
    full = power_of_two(width)
    columns = jnp.arange(full, dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(inside[:, None], (lines.shape[0], full))
    return columns, mask if full == width else mask & (columns < width)


def _load(ref: Any, lines: Any, inside: Any, width: int) -> Any:
    """Lines [n, padded K] of a list, 0 where they are not inside."""
    columns, mask = _columns(lines, inside, width)
    return pltriton.load(ref.at[lines[:, None], columns], mask=mask, other=0.0)


def _dot(a: Any, b: Any, *, transposed: bool = False) -> Any:
    """The product a b, or a bᵀ, in float32: IEEE products for float32, where Triton would take TF32 by itself."""
    return pltriton.dot(a, b, trans_b=transposed, precision=lax.Precision.HIGHEST)
