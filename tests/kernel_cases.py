"""What the battery asks of every implementation of attention: inputs, programs, the twin's answers, and the bars.

A program is compiled once for each set of static options and shapes and serves every test that can use it: offsets,
lengths and segments are traced. Compiling is what takes the time here.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import ops, oracle
from riftco.pallas import dispatch
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash import tpu_tiles, triton_tiles
from riftco.pallas.flash.triton_tiles import Tiles

QUICK = {"xla_backend_optimization_level": 0}  # interpreted kernels are long programs that run for a moment
BF16 = jnp.dtype("bfloat16")
F32 = jnp.dtype("float32")

RULES = ("plain", "blockwise")
KERNELS = ("pallas_tpu", "pallas_triton", "pallas_mosaic_gpu")


def every(*names: str, mosaic_is_quick: bool = False) -> pytest.MarkDecorator:
    """Parametrises by implementation. Mosaic GPU's interpreter takes long, so that most of its tests are slow ones."""
    marks = () if mosaic_is_quick else (pytest.mark.slow,)
    last = KERNELS[-1]
    return pytest.mark.parametrize(
        "how", [pytest.param(name, marks=marks) if name == last else name for name in names or (*RULES, *KERNELS)]
    )


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 to 32, so that lengths near 100 have first, middle and last tiles, and tiles that are skipped."""
    small = {width: (Tiles(32, 16, 4, 2),) * 2 for width in (64, 128, 256)}
    monkeypatch.setattr(triton_tiles, "FORWARD", small)
    monkeypatch.setattr(triton_tiles, "BACKWARD", small)
    monkeypatch.setattr(tpu_tiles, "INTERPRETED", (32, 32, 32, 32, 96 * tpu_tiles.MIB))
    monkeypatch.setattr(tpu_tiles, "LANES", 16)


# ------------------------------------------------------------------------------------------------ cases


class Case(NamedTuple):
    """The static part of a call: sizes, options, and which of its arrays it takes."""

    shape: tuple[int, int, int, int, int, int]  # B, T, S, H, G, K
    arrays: tuple[str, ...] = ()
    causal: bool = True
    window: int | None = None
    cap: float | None = None
    offset: int = 0

    @property
    def static(self) -> dict[str, Any]:
        """The options of `ops.attention` and of the twin that are not arrays."""
        options = {"causal": self.causal, "window": self.window, "logits_soft_cap": self.cap}
        return options if "q_offset" in self.arrays else {**options, "q_offset": self.offset}


def dtype_for(how: str, dtype: Any = F32) -> Any:
    """The dtype that a test runs an implementation in: bfloat16 for what multiplies no float32."""
    return BF16 if how == "pallas_mosaic_gpu" else jnp.dtype(dtype)


def skip_unless_supported(how: str, case: Case, dtype: Any) -> None:
    """Skips the test, with the kernel's own reason, where it does not take such a call."""
    if how in RULES:
        return
    b, t, s, h, g, k = case.shape
    q, keys = jax.ShapeDtypeStruct((b, t, h, k), dtype), jax.ShapeDtypeStruct((b, s, g, k), dtype)
    reason = dispatch.refusal(
        "attention", how, dispatch.current_target(), True, q, keys, keys, Visibility(causal=case.causal), case.cap
    )
    if reason is not None:
        pytest.skip(reason)


def draw(rng: np.random.Generator, case: Case, dtype: Any) -> list[Any]:
    """q, k, v and the output's cotangent, unit normal."""
    b, t, s, h, g, k = case.shape
    shapes = ((b, t, h, k), (b, s, g, k), (b, s, g, k), (b, t, h, k))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def integers(**arrays: Any) -> dict[str, Any]:
    """int32 arrays by name."""
    return {name: jnp.asarray(value, jnp.int32) for name, value in arrays.items()}


# Rows of one call: all keys in reach, no key at all, and queries that stand before the first key.
RAGGED = Case((3, 49, 100, 4, 2, 64), ("kv_lengths", "q_offset"))
ROWS = integers(q_offset=[51, 20, -10], kv_lengths=[100, 0, 30])
# Everything at once: ranges and segments of each row's own, two key heads for six query heads, a cap, both sides.
MIXED = Case((2, 40, 70, 6, 2, 64), ("kv_lengths", "kv_segment_ids", "q_offset", "q_segment_ids"), False, 33, 4.0)


def mixed_rows() -> dict[str, Any]:
    """The arrays of `MIXED`."""
    t, s = np.arange(40), np.arange(70)
    return integers(
        q_offset=[0, 28],
        kv_lengths=[70, 41],
        q_segment_ids=[t // 15, np.where(t > 30, 9, t // 25)],  # the last queries' segment has no key
        kv_segment_ids=[s // 19, s // 36],
    )


# Every length as T and as S, every head width, more queries than keys and fewer, causal and not.
SIZES = {
    "1-7": (Case((2, 1, 7, 2, 1, 32), offset=6), {}, BF16),
    "7-63": (Case((2, 7, 63, 4, 2, 64), ("kv_lengths",), causal=False), integers(kv_lengths=[40, 63]), F32),
    "63-1": (Case((1, 63, 1, 2, 2, 80)), {}, F32),
    "65-192": (Case((1, 65, 192, 2, 1, 96), offset=127), {}, F32),
    "127-65": (Case((2, 127, 65, 1, 1, 128), ("q_offset",)), integers(q_offset=[0, 65 - 127]), F32),
    "192-127": (Case((1, 192, 127, 2, 1, 192), causal=False), {}, BF16),
    "65-65": (Case((1, 65, 65, 1, 1, 256)), {}, F32),
}
LONG_SIZES = {
    "1000-1023": (Case((1, 1000, 1023, 2, 1, 64), offset=23), {}, F32),
    "1023-1000": (Case((1, 1023, 1000, 1, 1, 128), causal=False), {}, BF16),
    "1-1000": (Case((1, 1, 1000, 4, 2, 64), offset=999), {}, F32),
    "1023-7": (Case((1, 1023, 7, 1, 1, 64), causal=False), {}, F32),
}

# No multiple of any tile; the second row's first key is in a later tile.
WINDOWS = {
    "back": Case((2, 64, 110, 2, 1, 128), ("q_offset",), window=37),
    "both": Case((2, 64, 110, 2, 1, 128), ("q_offset",), causal=False, window=13),
}
OFFSETS = [(0, 43), (67, 109)]  # the first key seen from 43 (both sides) and from 67 (back) is the last of its tile


# ------------------------------------------------------------------------------------------------ programs


def results(how: str, case: Case, q: Any, k: Any, v: Any, ct: Any, arrays: dict[str, Any]) -> Any:
    """The output and the cotangents of q, k and v, by the public op and riftco.vjp."""
    assert sorted(arrays) == sorted(case.arrays)
    options = dict(implementation=how, interpret=how in KERNELS, **case.static, **arrays)
    out, pull = riftco.vjp(lambda *qkv: ops.attention(*qkv, **options), q, k, v)
    return out, *pull(ct)


@functools.cache
def program(how: str, case: Case) -> Any:
    """`results` compiled, of (q, k, v, ct, arrays)."""
    return jax.jit(functools.partial(results, how, case), compiler_options=QUICK)


def twin(case: Case, inputs: Any, arrays: dict[str, Any]) -> list[np.ndarray]:
    """The same by NumPy in float64, fed the same rounded numbers."""
    q, k, v, ct = (np.asarray(x, np.float64) for x in inputs)
    options = {**case.static, **{name: np.asarray(x) for name, x in arrays.items()}}
    return [oracle.attention(q, k, v, **options), *oracle.attention_vjp(q, k, v, ct, **options)]


def seen(case: Case, arrays: dict[str, Any]) -> np.ndarray:
    """Boolean [B, T, S] by NumPy alone: which query sees which key."""
    b, t, s, *_ = case.shape
    offset = np.asarray(arrays.get("q_offset", case.offset)).reshape(-1, 1, 1)
    position, key = offset + np.arange(t)[None, :, None], np.arange(s)[None, None, :]
    mask = np.ones((b, t, s), bool)
    if case.causal:
        mask &= key <= position
    if case.window is not None:
        mask &= (position - key < case.window) & (case.causal | (key - position < case.window))
    if "kv_lengths" in arrays:
        mask &= key < np.asarray(arrays["kv_lengths"])[:, None, None]
    if "q_segment_ids" in arrays:
        mask &= np.asarray(arrays["q_segment_ids"])[:, :, None] == np.asarray(arrays["kv_segment_ids"])[:, None, :]
    return mask


# ------------------------------------------------------------------------------------------------ bars

FLOOR = 1e-5  # what rounding may do to an implementation when the naive one was lucky
OUTPUT = {F32: 2e-5, BF16: 1e-2, jnp.dtype("float16"): 2e-3}
LOGSUMEXP = {F32: 1e-5, BF16: 1e-3}
GRADIENT = {F32: 1e-5, BF16: 1e-2, jnp.dtype("float16"): 3e-3}


def worst(got: Any, truth: np.ndarray) -> float:
    """The largest error; infinite if anything is not finite."""
    error = np.abs(np.asarray(got, np.float64) - truth)
    return float(np.max(error)) if np.all(np.isfinite(error)) else math.inf


def distance(got: Any, truth: np.ndarray, ct: Any) -> float:
    """The relative L2 error. Of a row with one key dq is 0 in truth, so that the cotangent's size counts as well."""
    error = np.asarray(got, np.float64) - truth
    if not np.all(np.isfinite(error)):
        return math.inf
    size = max(np.linalg.norm(truth), 0.1 * np.linalg.norm(np.asarray(ct, np.float64)))
    return float(np.linalg.norm(error) / size) if size else float(np.linalg.norm(error))


def assert_within_bars(how: str, got: Any, naive: Any, truth: list[np.ndarray], ct: Any) -> None:
    """Output and gradients: near the twin, and not much further from it than the naive rule in the same precision."""
    dtype = got[0].dtype
    assert {x.dtype for x in got} == {dtype}
    # The XLA rules round a weight near 1 as well as an output of up to 4.
    near = OUTPUT[dtype] * (2 if how in RULES and dtype != F32 else 1)
    error, bar = worst(got[0], truth[0]), min(near, 2 * worst(naive[0], truth[0]) + FLOOR)
    assert error <= bar, f"output: {error:.2e} > {bar:.2e}"
    for name, ours, theirs, exact in zip("qkv", got[1:], naive[1:], truth[1:], strict=True):
        assert distance(ours, exact, ct) <= GRADIENT[dtype], f"d{name}: {distance(ours, exact, ct):.2e}"
        bar = 3 * worst(theirs, exact) + FLOOR * max(1.0, float(np.max(np.abs(exact))))
        assert worst(ours, exact) <= bar, f"d{name}: {worst(ours, exact):.2e} > {bar:.2e}"


def assert_same_bits(got: Any, wanted: Any) -> None:
    """Every number equal, in order."""
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
