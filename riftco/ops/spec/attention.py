"""Attention, by each rule that runs without a kernel."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco import ops, oracle
from riftco.errors import ConfigError, DTypeError, IndexRangeError, ShapeError
from riftco.ops.spec.kinds import BadInput, Call, Draw, OpSpec, Sample, call


# One shape for nearly every case: eager calls then share what they compile.
def _qkv(draw: Draw, *, time: int = 3, keys: int = 3, heads: int = 4, groups: int = 2, **options: Any) -> Call:
    batch, width = (2, 4) if time < 32 else (1, 2)
    q = draw.normal(batch, time, heads, width)
    k, v = (draw.normal(batch, keys, groups, width) for _ in range(2))
    return call(q, k, v, **options)


def _without_implementation(options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "implementation"}


_PACKED = np.array([[1, 1, 2], [3, 4, 4]], np.int32)
_UNSEEN = np.array([[1, 1, 2], [9, 9, 9]], np.int32)

# What is worth trying, whichever rule runs: (name, shapes and options).
_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("causal, grouped heads", {}),
    ("one shared head, everything seen", {"heads": 3, "groups": 1, "causal": False, "keys": 5}),
    ("window", {"window": 2}),
    ("window on both sides", {"window": 2, "causal": False}),
    ("segments, and rows that see nothing", {"q_segment_ids": _UNSEEN, "kv_segment_ids": _PACKED}),
    ("offset", {"keys": 5, "q_offset": 2}),
    (
        "an offset and a length a row",
        {"keys": 5, "q_offset": np.array([0, 2], np.int32), "kv_lengths": np.array([2, 5], np.int32)},
    ),
    ("a row of length 0", {"kv_lengths": np.array([0, 2], np.int32), "causal": False}),
    ("soft cap and scale", {"logits_soft_cap": 2.0, "scale": 0.7}),
    ("everything before the keys", {"q_offset": -2}),
)


def _samples(implementation: str, thorough: tuple[str, ...]) -> tuple[Sample, ...]:
    def sample(name: str, options: dict[str, Any]) -> Sample:
        return Sample(
            f"{implementation}: {name}",
            lambda draw: _qkv(draw, implementation=implementation, **options),
            thorough=name.startswith(thorough),
        )

    return tuple(sample(name, options) for name, options in _CASES)


_Q = jnp.ones((2, 3, 2, 4))


def _bad(function: Any, arrays: int) -> tuple[BadInput, ...]:
    def run(q: Any = _Q, k: Any = _Q, v: Any = _Q, **options: Any) -> Any:
        return function(*(q, k, v)[:arrays], **options)

    wrong_heads = jnp.ones((2, 3, 3, 4))
    ids = jnp.zeros((2, 3), jnp.int32)
    return (
        BadInput("heads", lambda: run(k=wrong_heads, v=wrong_heads), ShapeError, "G dividing H"),
        BadInput("rank", lambda: run(q=_Q[0]), ShapeError, "q must be [B, T, H, K]"),
        BadInput("two dtypes", lambda: run(k=_Q.astype(jnp.bfloat16)), DTypeError, "one dtype"),
        BadInput("window 0", lambda: run(window=0), ConfigError, "window must be a positive integer"),
        BadInput("one kind of segments", lambda: run(q_segment_ids=ids), ConfigError, "given together"),
        BadInput(
            "segments' shape",
            lambda: run(q_segment_ids=ids[:, :2], kv_segment_ids=ids),
            ShapeError,
            "q_segment_ids must be [2, 3]",
        ),
        BadInput("lengths", lambda: run(kv_lengths=jnp.zeros(3, jnp.int32)), ShapeError, "kv_lengths must be [2]"),
        BadInput("soft cap", lambda: run(logits_soft_cap=0.0), ConfigError, "logits_soft_cap must be positive"),
    )


_ATTENTION = OpSpec(
    "attention",
    "attention",
    (
        *_samples("plain", ("segments", "an offset and", "soft cap")),
        *_samples("blockwise", ("causal",)),
        Sample(
            "blockwise: two blocks",
            lambda draw: _qkv(draw, time=70, keys=70, heads=1, groups=1, window=9, implementation="blockwise"),
        ),
    ),
    (
        *_bad(ops.attention, 3),
        BadInput("no such rule", lambda: ops.attention(_Q, _Q, _Q, implementation="fast"), ConfigError, "one of plain"),
    ),
    forward=lambda q, k, v, **options: oracle.attention(q, k, v, **_without_implementation(options)),
    backward=lambda args, dy, options: oracle.attention_vjp(
        args[0], args[1], args[2], dy, **_without_implementation(options)
    ),
)


def _without_values(made: Call) -> Call:
    return Call(made.args[:2], made.kwargs)


# The scores and masks are those of the plain rule; these cases show that they are handed on.
_FOR_WEIGHTS = ("causal", "window on both", "segments", "an offset and", "soft cap")


def _weights_sample(name: str, options: dict[str, Any]) -> Sample:
    return Sample(name, lambda draw: _without_values(_qkv(draw, **options)))


_WEIGHTS = OpSpec(
    "attention_weights",
    "attention",
    tuple(_weights_sample(*case) for case in _CASES if case[0].startswith(_FOR_WEIGHTS)),
    _bad(ops.attention_weights, 2),
)

# ------------------------------------------------------------------------------------------------ pages

# Rows 1 and 2 share page 4; entries past a row's last key are no pages at all.
_TABLE = np.array([[2, -7, 99], [4, 0, 1], [4, 5, 2**30]], np.int32)
_RAGGED = np.array([3, 8, 4], np.int32)


def _paged(draw: Draw, *, time: int = 2, heads: int = 4, groups: int = 2, **options: Any) -> Call:
    q = draw.normal(3, time, heads, 4)
    k, v = (draw.normal(groups, 6, 3, 4) for _ in range(2))
    return call(q, k, v, options.pop("lengths", _RAGGED), options.pop("table", _TABLE), **options)


_PAGED_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ragged rows that share a page", {}),
    ("one shared head, one token", {"time": 1, "heads": 3, "groups": 1}),
    ("an empty row, and one shorter than its queries", {"lengths": np.array([0, 8, 1], np.int32)}),
    ("a chunk of each row's own length", {"time": 4, "query_lengths": np.array([3, 0, 2], np.int32)}),
    ("window, its first page no page", {"window": 2, "table": np.array([[2, -7, 99], [-9, 0, 1], [4, 5, 8]])}),
    ("soft cap and scale", {"logits_soft_cap": 2.0, "scale": 0.7}),
)


def _paged_sample(implementation: str, name: str, options: dict[str, Any]) -> Sample:
    return Sample(
        f"{implementation}: {name}", lambda draw: _paged(draw, implementation=implementation, **dict(options))
    )


_POOL = jnp.ones((2, 6, 3, 4))


def _bad_paged(name: str, error: type[Exception], fragment: str, **changed: Any) -> BadInput:
    def run() -> Any:
        arrays = {"q": jnp.ones((3, 2, 4, 4)), "k_pages": _POOL, "v_pages": _POOL, "lengths": _RAGGED}
        return ops.paged_attention(**{**arrays, "page_indices": _TABLE, **changed})

    return BadInput(name, run, error, fragment)


_PAGED = OpSpec(
    "paged_attention",
    "attention",
    (
        *(_paged_sample("plain", *case) for case in _PAGED_CASES),
        *(_paged_sample("blockwise", *case) for case in _PAGED_CASES[3:5]),
    ),
    (
        _bad_paged("heads", ShapeError, "G dividing H", q=jnp.ones((3, 2, 3, 4))),
        _bad_paged("pools", ShapeError, "[G, P, N, K]", v_pages=_POOL[:, :5]),
        _bad_paged("two dtypes", DTypeError, "one dtype", v_pages=_POOL.astype(jnp.bfloat16)),
        _bad_paged("table", ShapeError, "page_indices must be [3, M]", page_indices=_TABLE[:2]),
        _bad_paged("floating lengths", DTypeError, "lengths must have an integer dtype", lengths=jnp.ones(3)),
        _bad_paged("lengths' shape", ShapeError, "lengths must be [3]", lengths=_RAGGED[:2]),
        _bad_paged("a length", IndexRangeError, "lengths must be in [0, 10)", lengths=np.array([3, 10, 4])),
        _bad_paged("query lengths", IndexRangeError, "query_lengths must be in [0, 3)", query_lengths=_RAGGED),
        _bad_paged("a page", IndexRangeError, "must be in [0, 6); got -7 at index [0, 1]", lengths=_RAGGED + 1),
        _bad_paged("window 0", ConfigError, "window must be a positive integer", window=0),
        _bad_paged("soft cap", ConfigError, "logits_soft_cap must be positive", logits_soft_cap=-1.0),
        _bad_paged("no such rule", ConfigError, "one of plain", implementation="fast"),
    ),
    forward=lambda q, k, v, lengths, table, **options: oracle.paged_attention(
        q, k, v, lengths, table, **_without_implementation(options)
    ),
    backward=lambda args, dy, options: oracle.paged_attention_vjp(
        args[0], args[1], args[2], args[3], args[4], dy, **_without_implementation(options)
    ),
)

SPECS = (_ATTENTION, _WEIGHTS, _PAGED)
