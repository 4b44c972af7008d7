"""Attention over keys and values kept in pages of a pool, and its XLA rule.

The rule gathers each row's pages to contiguous keys and values, attends to those by the rules of attend.py, and adds
the cotangents back to the pages. The kernels are behind pallas/dispatch.py; their backward pass is the XLA rule.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from riftco.autodiff.box import Box, unbox
from riftco.autodiff.bridge import without_jax_derivatives
from riftco.autodiff.tape import Op
from riftco.errors import IndexRangeError
from riftco.ops import attend, validate
from riftco.ops.elementwise import where
from riftco.ops.masks import Visibility, window_of
from riftco.pallas import dispatch
from riftco.types import Array

# ------------------------------------------------------------------------------------------------ rows


class Rows(NamedTuple):
    """What each row holds, safe to follow: a faulty row has length 0, an entry that is not used names page 0."""

    lengths: Any  # int32 [B]
    query_lengths: Any  # int32 [B]
    pages: Any  # int32 [B, M]
    faulty: Any  # bool [B]

    def real(self, queries: int) -> Any:
        """Boolean [B, T]: the queries that count and stand at a position."""
        t = jnp.arange(queries, dtype=jnp.int32)[None, :]
        n = self.query_lengths[:, None]
        return (t < n) & (self.lengths[:, None] - n + t >= 0)

    def no_cotangents(self) -> "Rows":
        """Their share of the cotangents."""
        return Rows(None, None, None, None)


def _reach(lengths: Any, query_lengths: Any, window: int | None, xp: Any = jnp) -> tuple[Any, Any]:
    """The keys [low, high) of each row that some query of it sees."""
    high = xp.where(query_lengths > 0, lengths, 0)
    low = xp.zeros_like(lengths) if window is None else xp.maximum(0, lengths - query_lengths - window + 1)
    return low, high


def _rows(
    who: str, lengths: Any, query_lengths: Any, pages: Any, queries: int, pool: tuple[int, int], window: int | None
) -> Rows:
    """The rows, checked: concrete ones raise, traced ones that are out of range become faulty."""
    count, size = pool
    pages = validate.wide_integer(pages)
    validate.in_range(who, "lengths", lengths, pages.shape[1] * size + 1)
    validate.in_range(who, "query_lengths", query_lengths, queries + 1)
    values = [validate.concrete(x) for x in (lengths, query_lengths, pages)]
    xp: Any = jnp
    if all(x is not None for x in values):  # NumPy looks at them without compiling anything, and inside jit as well
        xp = np
        lengths, query_lengths, pages = map(np.asarray, values)
    # Compared before they are made int32, which may turn a huge number into an acceptable one.
    bad = (lengths < 0) | (lengths > pages.shape[1] * size) | (query_lengths < 0) | (query_lengths > queries)
    lengths, query_lengths = (xp.where(bad, 0, x).astype(np.int32) for x in (lengths, query_lengths))
    low, high = (x[:, None] for x in _reach(lengths, query_lengths, window, xp))
    first = xp.arange(pages.shape[1], dtype=np.int32)[None, :] * size
    used = (first < high) & (first + size > low)
    strays = used & ((pages < 0) | (pages >= count))
    if isinstance(strays, np.ndarray) and strays.any():
        place = tuple(int(i) for i in np.argwhere(strays)[0])
        raise IndexRangeError(
            f"{who}: the page_indices that a row's keys use must be in [0, {count}); got {pages[place]} at index "
            f"{list(place)}."
        )
    faulty = bad | xp.any(strays, axis=1)
    pages = xp.where(used & ~faulty[:, None], pages, 0).astype(np.int32)
    rows = Rows(xp.where(faulty, 0, lengths), xp.where(faulty, 0, query_lengths), pages, faulty)
    return jax.tree_util.tree_map(jnp.asarray, rows)


# ------------------------------------------------------------------------------------------------ pages
# `used` is boolean [B, S], S = M N: slots that are not used read as 0, for they may hold NaN, and get cotangent 0.


def _gather_impl(pool: Any, pages: Any, used: Any, count: int) -> Any:
    groups, _, size, width = pool.shape
    rows = pool.at[:, pages].get(mode="promise_in_bounds")  # [G, B, M, N, K]
    rows = jnp.reshape(jnp.moveaxis(rows, 0, 3), (pages.shape[0], pages.shape[1] * size, groups, width))
    return jnp.where(used[:, :, None, None], rows, jnp.zeros((), rows.dtype))


def _scatter_impl(ct: Any, pages: Any, used: Any, count: int) -> Any:
    batch, keys, groups, width = ct.shape
    ct = jnp.where(used[:, :, None, None], ct, jnp.zeros((), ct.dtype))
    rows = jnp.moveaxis(jnp.reshape(ct, (batch, pages.shape[1], -1, groups, width)), 3, 0)
    pool = jnp.zeros((groups, count, keys // pages.shape[1], width), ct.dtype)
    return pool.at[:, pages].add(rows, mode="promise_in_bounds")


_gather = Op(
    "gather_pages",
    impl=_gather_impl,
    fwd=lambda pool, pages, used, count: (_gather(pool, pages, used, count=count), (pages, used)),
    bwd=lambda saved, ct, count: (_scatter(ct, *saved, count=count), None, None),
)
_scatter = Op(
    "scatter_pages",
    impl=_scatter_impl,
    fwd=lambda ct, pages, used, count: (_scatter(ct, pages, used, count=count), (pages, used)),
    bwd=lambda saved, pool, count: (_gather(pool, *saved, count=count), None, None),
)


# ------------------------------------------------------------------------------------------------ the op


class PagedCall(NamedTuple):
    """The static part of one call of `paged_attention`."""

    window: int | None
    cap: float | None
    scale: float
    pages: int  # P
    size: int  # N
    how: str
    interpret: Any = False


class XLAResiduals(NamedTuple):
    """What the XLA rule saves: the attention's own residuals over the gathered keys, and the rows."""

    attention: Any
    rows: Rows


class KernelResiduals(NamedTuple):
    """What a kernel saves: nothing that is not an argument."""

    q: Any
    k_pages: Any
    v_pages: Any
    rows: Rows


def _used(rows: Rows, call: PagedCall) -> Any:
    """Boolean [B, S]: the slots that some query of the row sees."""
    low, high = (x[:, None] for x in _reach(rows.lengths, rows.query_lengths, call.window))
    s = jnp.arange(rows.pages.shape[1] * call.size, dtype=jnp.int32)[None, :]
    return (low <= s) & (s < high)


def _per_query(rows: Rows, x: Any) -> Any:
    """`Rows.real`, of x's shape [B, T, H, K]."""
    return jnp.broadcast_to(rows.real(x.shape[1])[:, :, None, None], x.shape)


def _attention_call(call: PagedCall, queries: int) -> attend.AttentionCall:
    how = call.how if call.how in dispatch.XLA else dispatch.attention_rule(queries)
    return attend.AttentionCall(call.scale, call.cap, how)


def _attend_gathered(q: Any, k_pages: Any, v_pages: Any, rows: Rows, call: PagedCall) -> tuple[Any, Any]:
    """The XLA rule: the output, and what its backward pass needs."""
    used = _used(rows, call)
    k, v = (_gather(x, rows.pages, used, count=call.pages) for x in (k_pages, v_pages))
    # Keys past a row's length lie after its last query, so the causal mask hides them.
    sees = Visibility(offsets=rows.lengths - rows.query_lengths, causal=True, window=call.window)
    # A query that does not count may hold anything, and would reach the keys' cotangents as 0 times NaN.
    q = where(_per_query(rows, q), q, 0.0)
    out, saved = attend.attention_fwd(q, k, v, sees, call=_attention_call(call, q.shape[1]))
    return out, XLAResiduals(saved, rows)


def _fwd(q: Any, k_pages: Any, v_pages: Any, rows: Rows, *, call: PagedCall) -> tuple[Any, Any]:
    # Under an outer derivative the rule must be made of ops; kernels are not.
    if call.how in dispatch.XLA or any(isinstance(x, Box) for x in (q, k_pages, v_pages)):
        out, saved = _attend_gathered(q, k_pages, v_pages, rows, call)
    else:

        def kernel(q: Any, k_pages: Any, v_pages: Any, lengths: Any, query_lengths: Any, pages: Any) -> Any:
            arrays = (q, k_pages, v_pages, lengths, query_lengths, pages)
            return dispatch.paged_attention(call.how, *arrays, call.window, call.cap, call.scale, call.interpret)

        refusing = without_jax_derivatives(kernel, f"paged_attention[{call.how}]")
        out = refusing(q, k_pages, v_pages, rows.lengths, rows.query_lengths, rows.pages)
        saved = KernelResiduals(q, k_pages, v_pages, rows)
    blank = jnp.where(rows.faulty, jnp.nan, 0.0).astype(out.dtype)
    blank = jnp.broadcast_to(blank[:, None, None, None], out.shape)
    return where(_per_query(rows, out), out, blank), saved


def _bwd(saved: Any, ct: Any, *, call: PagedCall) -> tuple[Any, ...]:
    if isinstance(saved, KernelResiduals):
        _, saved = _attend_gathered(*saved, call)
    rows = saved.rows
    ct = where(_per_query(rows, ct), ct, 0.0)
    dq, dk, dv, _ = attend.attention_bwd(saved.attention, ct, call=_attention_call(call, ct.shape[1]))
    used = _used(rows, call)
    dk_pages, dv_pages = (_scatter(x, rows.pages, used, count=call.pages) for x in (dk, dv))
    return where(_per_query(rows, dq), dq, 0.0), dk_pages, dv_pages, rows.no_cotangents()


_paged_attention = Op("paged_attention", lambda *args, call: _fwd(*args, call=call)[0], _fwd, _bwd)


def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    lengths: Array,
    page_indices: Array,
    *,
    query_lengths: Array | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """Causal attention of each row's last queries over keys and values kept in pages, grouped heads.

    Key s of row b lies in slot s mod N of page `page_indices[b, s // N]`, for s < `lengths[b]`. The row's queries are
    its last positions: with n of them, query t stands at `lengths[b] - n + t`, and sees the keys up to its own, less
    than `window` positions away. Rows may share pages. A query that does not count or sees nothing gets output 0.
    Slots and pages that no query sees may hold anything, NaN included, and the page ids past the last key (with a
    window, before the first one too) may be any numbers: neither is followed.

    Args:
        q: queries [B, T, H, K], the rows' own new tokens, whose keys and values are in the pages already.
        k_pages: keys [G, P, N, K]: P pages of N tokens; query head h reads key head h // (H / G).
        v_pages: values [G, P, N, K].
        lengths: int [B], keys of each row, its own new ones included; 0 to M N.
        page_indices: int [B, M], where each row's pages are.
        query_lengths: int [B], 0 to T: only the first so many queries of a row count; None for all T.
        window: a query sees `window` keys, its own included; None for all.
        logits_soft_cap: c, for scores `c tanh(score / c)`; or None.
        scale: None for 1/sqrt(K).
        implementation: "plain" and "blockwise" gather the pages and are those rules of `attention`; "pallas_tpu" and
            "pallas_triton" are kernels that read the pages where they lie. None takes the device's
            preferred one that supports the call (`riftco doctor --kernels`).
        interpret: True runs a kernel by its interpreter, on any device; an interpreter's own parameters are handed
            to it. The XLA rules have none and refuse it.

    Returns:
        [B, T, H, K] in q's dtype; softmax in float32 or wider.

    Raises:
        ShapeError, DTypeError, ConfigError: if arguments do not fit. IndexRangeError: if a concrete length or a page
        id in use is out of range; under jit its row is NaN, with cotangent 0. UnsupportedError (a
        NotImplementedError): if a named implementation cannot run the call here, with the reason.

    Gradient:
        of q, k_pages and v_pages, as `attention`'s over the gathered keys and values; a page that rows share gets the
        sum. The XLA rules save what `attention` saves, gathered keys included. A kernel saves its arguments, and its
        backward pass is the XLA rule, run from them. Any order (beyond the first by the plain rule).

    Source:
        Kwon et al. 2023, arXiv:2309.06180; Vaswani et al. 2017, arXiv:1706.03762, eq. 1.
    """
    who = "paged_attention"
    q, k_pages, v_pages = _checked_arrays(who, q, k_pages, v_pages)
    batch, queries, _, width = q.shape
    pool = k_pages.shape[1], k_pages.shape[2]
    table = validate.integer(who, "page_indices", unbox(page_indices))
    fits = table.ndim == 2 and table.shape[0] == batch and table.shape[1] > 0
    validate.require(who, fits, f"page_indices must be [{batch}, M]", list(table.shape))
    lengths = _per_row(who, "lengths", lengths, batch)
    if query_lengths is None:
        query_lengths = np.full((batch,), queries, np.int32)
    query_lengths = _per_row(who, "query_lengths", query_lengths, batch)
    window = window_of(who, window)
    cap = None if logits_soft_cap is None else validate.finite(who, "logits_soft_cap", logits_soft_cap, positive=True)
    factor = width**-0.5 if scale is None else validate.finite(who, "scale", scale)
    arrays = unbox(q), unbox(k_pages), unbox(v_pages)
    rule = dispatch.attention_rule(queries)
    how = dispatch.choose(who, implementation, rule, interpret, arrays, *arrays, table, window, cap)
    rows = _rows(who, lengths, query_lengths, table, queries, pool, window)
    return _paged_attention(q, k_pages, v_pages, rows, call=PagedCall(window, cap, factor, *pool, how, interpret))


def _checked_arrays(who: str, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    q, k, v = (validate.floating(who, name, x) for name, x in (("q", q), ("k_pages", k), ("v_pages", v)))
    validate.same_dtype(who, q, k, v)
    fits = q.ndim == k.ndim == 4 and tuple(k.shape) == tuple(v.shape) and q.shape[3] == k.shape[3]
    validate.require(
        who,
        fits and k.size > 0 and q.shape[2] % k.shape[0] == 0,
        "q must be [B, T, H, K], k_pages and v_pages [G, P, N, K] with G dividing H",
        f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}",
    )
    return q, k, v


def _per_row(who: str, name: str, x: Any, batch: int) -> Any:
    x = validate.wide_integer(validate.integer(who, name, unbox(x)))
    validate.require(who, tuple(x.shape) == (batch,), f"{name} must be [{batch}]", list(x.shape))
    return x
