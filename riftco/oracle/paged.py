"""Attention over keys and values kept in pages, in NumPy float64: each row's keys are looked up one by one.

Key s of row b lies in slot s mod N of page `page_indices[b, s // N]`. Only the keys that a query may see are looked up,
so that neither an unused slot nor an unused page id matters.
"""

import numpy as np

from riftco.errors import ShapeError
from riftco.oracle.attend import attention, attention_vjp
from riftco.oracle.elementwise import as_float64


def _rows(q, lengths, page_indices, page_size, query_lengths, window):
    """Yields (b, queries, first position, low, pages, slots) of each row; its keys are those from `low` on."""
    for b in range(q.shape[0]):
        length = int(lengths[b])
        queries = q.shape[1] if query_lengths is None else int(query_lengths[b])
        if length == 0 or queries == 0:
            continue
        first = length - queries
        low = 0 if window is None else max(0, first - window + 1)
        pages = [int(page_indices[b][s // page_size]) for s in range(low, length)]
        slots = [s % page_size for s in range(low, length)]
        yield b, queries, first, low, pages, slots


def _inputs(q, k_pages, v_pages):
    q, k, v = (as_float64(x) for x in (q, k_pages, v_pages))
    if not q.ndim == k.ndim == 4 or k.shape != v.shape or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[0]:
        raise ShapeError(
            "paged_attention: q[B, T, H, K] needs k_pages and v_pages [G, P, N, K] with G dividing H; got "
            f"{q.shape}, {k.shape}, {v.shape}. Check the number of key/value heads."
        )
    return q, k, v


@np.errstate(all="ignore")
def paged_attention(q, k_pages, v_pages, lengths, page_indices, *, query_lengths=None, window=None, **options):
    """Softmax(scale · q kᵀ) v over the pages of each row.

    Args:
        q: queries [B, T, H, K].
        k_pages: keys [G, P, N, K], G dividing H.
        v_pages: values [G, P, N, K].
        lengths: int [B], keys of each row; the row's last query stands at position `lengths - 1`.
        page_indices: int [B, M], the page of each N keys.
        query_lengths: int [B], how many of a row's T queries are real; all when None.
        window: keys that a query sees, its own included; all before it when None.
        options: `logits_soft_cap` and `scale`, as in `oracle.attention`.

    Returns:
        Contexts [B, T, H, K]; 0 where a query is not real or sees nothing.
    """
    q, k_pages, v_pages = _inputs(q, k_pages, v_pages)
    out = np.zeros_like(q)
    for b, n, first, low, pages, slots in _rows(q, lengths, page_indices, k_pages.shape[2], query_lengths, window):
        k, v = (np.moveaxis(pool[:, pages, slots], 0, 1)[None] for pool in (k_pages, v_pages))  # [1, S, G, K]
        out[b, :n] = attention(q[b : b + 1, :n], k, v, q_offset=first - low, window=window, **options)[0]
    return out


@np.errstate(all="ignore")
def paged_attention_vjp(q, k_pages, v_pages, lengths, page_indices, dy, *, query_lengths=None, window=None, **options):
    """Cotangents (dq, dk_pages, dv_pages, None, None): a page that rows share gets the sum of their shares."""
    q, k_pages, v_pages = _inputs(q, k_pages, v_pages)
    dy = as_float64(dy)
    dq, dk_pages, dv_pages = (np.zeros_like(x) for x in (q, k_pages, v_pages))
    for b, n, first, low, pages, slots in _rows(q, lengths, page_indices, k_pages.shape[2], query_lengths, window):
        k, v = (np.moveaxis(pool[:, pages, slots], 0, 1)[None] for pool in (k_pages, v_pages))
        sight = {"q_offset": first - low, "window": window}
        dq_row, dk, dv = attention_vjp(q[b : b + 1, :n], k, v, dy[b : b + 1, :n], **sight, **options)
        dq[b, :n] = dq_row[0]
        for s, (page, slot) in enumerate(zip(pages, slots, strict=True)):
            dk_pages[:, page, slot] += dk[0, s]
            dv_pages[:, page, slot] += dv[0, s]
    return dq, dk_pages, dv_pages, None, None
