"""Flash attention for Hopper: numbers and races by Mosaic GPU's interpreter, and that it compiles for an H200.

The interpreter compiles each warpgroup of each block anew, so the grids here are small and one run shows many things.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import _compat, ops, oracle, targets
from riftco.errors import UnsupportedError
from riftco.pallas import dispatch
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash import mosaic_gpu

needs_new_jax = pytest.mark.skipif(not _compat.HAS_MOSAIC_GPU, reason="it needs jax 0.11 or newer")
TOLERANCE = {"bfloat16": (1e-2, 1e-3, 1e-2), "float16": (2e-3, 1e-3, 3e-3)}  # output, logsumexp, gradients


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


# ------------------------------------------------------------------------------------------------ numbers


@functools.cache
def program(scale, cap):
    """Forward and backward, watched for races, which raise."""
    params = _compat.mosaic_gpu().InterpretGPUParams(detect_races=True)
    options = {"scale": scale, "cap": cap, "interpret": params}

    @jax.jit
    def run(q, k, v, dout, sees):
        out, lse = mosaic_gpu.forward(q, k, v, sees, **options)
        return out, lse, *mosaic_gpu.backward(q, k, v, out, lse, dout, sees, **options)

    return run


def inputs(rng, b, t, s, h, g, width, dtype="bfloat16"):
    shapes = ((b, t, h, width), (b, s, g, width), (b, s, g, width), (b, t, h, width))
    return [jnp.asarray(rng.normal(size=x), dtype) for x in shapes]


def as_numpy(*arrays):
    return [np.asarray(x.astype(jnp.float32)) for x in arrays]


def check(arrays, sees, cap=None, scale=None):
    """Runs the kernels, holds them against the oracle fed the same numbers, and returns what they gave."""
    width = arrays[0].shape[-1]
    found = program(width**-0.5 if scale is None else scale, cap)(*arrays, sees)
    out, lse, *gradients = as_numpy(*found)
    q, k, v, dout = as_numpy(*arrays)
    options = {
        "causal": sees.causal,
        "window": sees.window,
        "q_segment_ids": sees.q_segment_ids,
        "kv_segment_ids": sees.kv_segment_ids,
        "q_offset": sees.offset if sees.offsets is None else np.asarray(sees.offsets),
        "kv_lengths": sees.kv_lengths,
        "logits_soft_cap": cap,
        "scale": scale,
    }
    at_most = TOLERANCE[arrays[0].dtype.name]
    expected_lse = oracle.attention_statistics(q, k, **options)
    empty = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], rtol=0, atol=at_most[1])
    np.testing.assert_allclose(out, oracle.attention(q, k, v, **options), rtol=0, atol=at_most[0])
    assert not out[np.swapaxes(empty, 1, 2)].any() and not gradients[0][np.swapaxes(empty, 1, 2)].any()
    for name, got, wanted in zip("qkv", gradients, oracle.attention_vjp(q, k, v, dout, **options), strict=True):
        # A query of one key has a gradient of 0, which rounding does not hit.
        error = np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-2)
        assert error <= at_most[2], f"d{name}: relative error {error:.1e}"
    return found


@needs_new_jax
def test_causal_grouped_heads_of_ragged_lengths(rng):
    # The keys are two steps forward and three backward; the queries two steps of two heads.
    check(inputs(rng, 1, 70, 130, 4, 2, 64), Visibility(offset=65))


@needs_new_jax
def test_everything_at_once_and_poison_past_the_lengths(rng):
    arrays = inputs(rng, 2, 19, 130, 1, 1, 128, "float16")
    segments = [jnp.asarray(np.sort(rng.integers(0, 2, (2, n)), axis=1), jnp.int32) for n in (19, 130)]
    sees = Visibility(*segments, jnp.asarray([40, 70]), jnp.asarray([50, 70]), window=45)
    for i in (1, 2):
        arrays[i] = arrays[i].at[0, 50:].set(jnp.nan).at[1, 70:].set(jnp.nan)
    arrays[3] = arrays[3].at[0].set(0.0)
    found = check(arrays, sees, cap=3.0, scale=0.2)
    for gradient in found[2:]:
        assert not as_numpy(gradient)[0][0].any(), "a zero cotangent gives exact zeros"


LONG = {
    "not causal, no mask but the end's": (dict(b=1, t=128, s=256, h=1, g=1, width=128), dict(causal=False)),
    "several blocks": (dict(b=1, t=300, s=300, h=1, g=1, width=64), {}),
    "one query": (dict(b=1, t=1, s=200, h=3, g=1, width=64), dict(offset=150)),
    "one key": (dict(b=1, t=130, s=1, h=1, g=1, width=64), {}),
    "queries before all keys": (dict(b=1, t=70, s=70, h=1, g=1, width=64), dict(offset=-20)),
    "eight heads to a key head": (dict(b=1, t=66, s=67, h=8, g=1, width=64), dict(causal=False)),
    "window": (dict(b=1, t=192, s=192, h=1, g=1, width=64), dict(window=65)),
    "window on both sides": (dict(b=1, t=200, s=190, h=1, g=1, width=64), dict(causal=False, window=1)),
}


@needs_new_jax
@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_shapes_and_masks(rng, name):
    shapes, options = LONG[name]
    check(inputs(rng, **shapes), Visibility(**options))


@needs_new_jax
@pytest.mark.slow
def test_lengths_of_none_and_of_all(rng):
    arrays = inputs(rng, 3, 5, 200, 1, 1, 64)
    arrays[1] = arrays[1].at[0].set(jnp.nan)
    arrays[2] = arrays[2].at[0].set(jnp.nan)
    lengths = jnp.asarray([0, 128, 999])
    found = check(arrays, Visibility(kv_lengths=lengths, causal=False))
    assert not as_numpy(found[3])[0][1, 128:].any(), "no gradient past the length"


@needs_new_jax
@pytest.mark.slow
def test_two_runs_give_the_same_bits(rng):
    arrays = inputs(rng, 1, 66, 70, 3, 1, 64)
    first, second = (program(0.125, None)(*arrays, Visibility()) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(*as_numpy(a, b))


KERNEL = {"implementation": "pallas_mosaic_gpu", "interpret": True}


@needs_new_jax
@pytest.mark.slow
def test_the_op_differentiates_and_vmaps_through_the_kernels(rng):
    q, k, v, _ = inputs(rng, 2, 9, 12, 1, 1, 64)

    def loss(q, k, v, **how):
        return ops.sum(ops.astype(ops.attention(q, k, v, causal=False, **how), jnp.float32) ** 2)

    mapped = jax.vmap(lambda q, k, v: riftco.grad(functools.partial(loss, **KERNEL), (0, 1, 2))(q, k, v))
    found = mapped(*(x[:, None] for x in (q, k, v)))
    wanted = riftco.grad(loss, (0, 1, 2))(*(x.astype(jnp.float32) for x in (q, k, v)))
    for got, want in zip(found, wanted, strict=True):
        got, want = as_numpy(got[:, 0], want)
        assert np.linalg.norm(got - want) / np.linalg.norm(want) <= 1e-2


# ------------------------------------------------------------------------------------------------ tiles


@needs_new_jax
@pytest.mark.tiny
@pytest.mark.parametrize("causal, window", list(itertools.product((True, False), (None, 1, 6, 30))))
@pytest.mark.parametrize("offset", [-9, 0, 14])
def test_the_tiles_visited_hold_all_that_is_seen(causal, window, offset):
    from riftco.pallas.flash.mosaic_gpu_tiles import Sees

    queries, keys, rows, tile = 13, 21, 8, 4
    for length in (0, 3, 17, keys):
        sees = Visibility(causal=causal, window=window, offset=offset, kv_lengths=jnp.asarray([length]))
        mask = np.asarray(sees.mask(jnp.arange(queries), jnp.arange(keys))[0])
        this = Sees(causal, window, offset, jnp.int32(length), queries)
        for first in range(0, queries, rows):
            start, stop = map(int, this.keys(jnp.int32(first), rows, tile))
            seen = np.flatnonzero(mask[first : first + rows].any(0))
            assert set(seen // tile) <= set(range(start, stop)) and 0 <= start
            assert stop - start <= len(set(seen // tile)) + 1, "no tile is visited in vain, but for an empty range's"
            for key in range(0, keys, tile):
                clear = bool(this._all_seen(jnp.int32(first), rows, jnp.int32(key), tile))
                part = mask[first : first + rows, key : key + tile]
                assert not clear or (part.all() and part.shape[1] == tile)
                assert clear or not part.all() or part.shape != (rows, tile)
        for first in range(0, keys, rows):
            start, stop = map(int, this.queries_of(jnp.int32(first), rows, tile))
            seen = np.flatnonzero(mask[:, first : first + rows].any(1))
            assert set(seen // tile) <= set(range(start, stop)) and 0 <= start
            assert stop * tile < queries + tile


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.tiny
def test_what_it_cannot_do_is_refused_with_the_reason():
    def reason(*shapes):
        return mosaic_gpu.unsupported(*shapes, Visibility(), None)

    q, k = shape(2, 9, 4, 64), shape(2, 9, 2, 64)
    if not _compat.HAS_MOSAIC_GPU:
        assert reason(q, k, k) == "it needs jax 0.11 or newer"
        return
    assert reason(q, k, k) is None
    single, wide = shape(2, 9, 2, 64, dtype=jnp.float32), shape(2, 9, 2, 256)
    assert "got float32" in str(reason(single, single, single))
    assert "64 or 128 wide; got 256" in str(reason(wide, wide, wide))
    assert "no empty arrays" in str(reason(q, shape(2, 0, 2, 64), shape(2, 0, 2, 64)))
    assert "65535 rows" in str(reason(*[shape(70000, 1, 1, 64)] * 3))


@needs_new_jax
@pytest.mark.tiny
def test_it_runs_where_it_is_named_on_hopper_and_never_by_itself():
    q = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    call = (q, q, q, Visibility(), None)
    for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", ""):
        with dispatch.target("cuda", kind):
            assert dispatch.choose("attention", "pallas_mosaic_gpu", "plain", False, (q,), *call) == "pallas_mosaic_gpu"
            assert dispatch.choose("attention", None, "plain", False, (q,), *call) != "pallas_mosaic_gpu"
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200"):
        with dispatch.target("cuda", kind):
            with pytest.raises(UnsupportedError, match="it needs a Hopper chip"):
                dispatch.choose("attention", "pallas_mosaic_gpu", "plain", False, (q,), *call)
            assert dispatch.choose("attention", "pallas_mosaic_gpu", "plain", True, (q,), *call) == "pallas_mosaic_gpu"


@needs_new_jax
@pytest.mark.tiny
@pytest.mark.parametrize("version", [None, 12060, 12080, 12090, 13000])
def test_a_toolkit_with_a_known_miscompilation_gives_a_warning(monkeypatch, version):
    monkeypatch.setattr(_compat, "cuda_runtime", lambda: version)
    if version in (12080, 12090):
        with pytest.warns(UserWarning, match=r"CUDA 12\.[89]; take 12\.9\.1"):
            mosaic_gpu._warn_of_toolkit()
    else:
        mosaic_gpu._warn_of_toolkit()


# ------------------------------------------------------------------------------------------------ other chips


def options(*names):
    """A Visibility with the named options, as shapes."""
    rows = {"offsets": shape(2, dtype=jnp.int32), "kv_lengths": shape(2, dtype=jnp.int32)}
    rows |= {"q_segment_ids": shape(2, 301, dtype=jnp.int32), "kv_segment_ids": shape(2, 333, dtype=jnp.int32)}
    taken = {name: rows[name] for name in rows if name in names or (name[-3:] == "ids" and "segments" in names)}
    return Visibility(**taken, causal="full" not in names, window=99 if "window" in names else None)


SETS = [(), ("window",), ("segments",), ("full",), ("window", "segments", "offsets", "kv_lengths"), ("full", "window")]
COMPILED = [
    (width, repeats, SETS[i % len(SETS)], *((jnp.bfloat16, None), (jnp.float16, 30.0))[(i + i // 4) % 2])
    for i, (width, repeats) in enumerate([*itertools.product((64, 128), (1, 3, 4, 8)), *[(128, 2)] * 4])
]


@pytest.mark.aot
@needs_new_jax
@pytest.mark.parametrize("width, repeats, names, dtype, cap", COMPILED)
def test_it_compiles_for_an_h200_within_its_shared_memory(width, repeats, names, dtype, cap):
    q, k = shape(2, 301, 2 * repeats, width, dtype=dtype), shape(2, 333, 2, width, dtype=dtype)
    how = {"scale": 0.1, "cap": cap, "interpret": False}

    def run(q, k, v, dout, sees):
        out, lse = mosaic_gpu.forward(q, k, v, sees, **how)
        return out, lse, *mosaic_gpu.backward(q, k, v, out, lse, dout, sees, **how)

    targets.chips("h200").compile(run, q, k, k, q, options(*names))
