"""4-bit weights: bits beside the NumPy twin, the linear layer and its derivatives, transforms, refusals.

Tests that name a row check a fault that was reported against another library.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import ops, oracle
from riftco.errors import ConfigError, DomainError, DTypeError, GradError, ShapeError, UnsupportedError
from riftco.ops.nf4 import NF4Array, pack_for_kernels, unpack_from_kernels
from riftco.ops.nf4_blocks import dynamic_map, exact_sum
from riftco.oracle.nf4 import CODES, absmax_values
from riftco.oracle.nf4 import dynamic_map as oracle_map
from riftco.pallas import dispatch

FIELDS = ("codes", "absmax", "absmax_codes", "nested_absmax", "offset")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def weight(rng, shape):
    """Rows of different sizes, so that blocks differ."""
    return (rng.standard_normal(shape) * rng.uniform(0.02, 1.0, (shape[0], 1))).astype(np.float32)


def assert_same_bits(q, twin):
    for name in FIELDS:
        ours, theirs = getattr(q, name), getattr(twin, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


decode = jax.jit(lambda q: (q.absmax_values(), *(ops.dequantize_nf4(q, dtype) for dtype in DTYPES)))


# ------------------------------------------------------------------------------------------------ the format


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize(("shape", "block_size"), [((33, 33), 32), ((1, 1), 64), ((300, 57), 32)])
def test_codes_maxima_and_decoded_weights_are_the_twins_to_the_bit(rng, shape, block_size, double_quant):
    w = weight(rng, shape)
    q = ops.quantize_nf4(w, block_size=block_size, double_quant=double_quant)
    twin = oracle.quantize_nf4(w, block_size=block_size, double_quant=double_quant)
    assert_same_bits(q, twin)
    assert (q.shape, q.block_size, q.layout, q.double_quant) == (shape, block_size, "linear", double_quant)
    assert q.nbytes == sum(x.nbytes for x in twin[:5] if x is not None)
    maxima, *decoded = decode(q)
    np.testing.assert_array_equal(maxima, absmax_values(twin))
    for dtype, ours in zip(DTYPES, decoded, strict=True):
        np.testing.assert_array_equal(ours, oracle.dequantize_nf4(twin, dtype))


def test_eager_calls_give_the_same_bits(rng):
    q = ops.quantize_nf4(weight(rng, (33, 33)), block_size=32)
    np.testing.assert_array_equal(q.absmax_values(), absmax_values(q))
    np.testing.assert_array_equal(ops.dequantize_nf4(q), oracle.dequantize_nf4(q))


@pytest.mark.parametrize("block_size", [64, 4096, *map(slow, (32, 128, 256, 512, 1024, 2048))])
def test_row_26_large_blocks_are_not_misquantised(rng, block_size):
    w = weight(rng, (70, 61))
    q = ops.quantize_nf4(w, block_size=block_size)
    assert_same_bits(q, oracle.quantize_nf4(w, block_size=block_size))
    maxima = np.repeat(np.asarray(q.absmax_values()), block_size)[: w.size].reshape(w.shape)
    # No entry is further from its code than half of the widest gap, and what 8 bits did to the maximum.
    true = np.repeat([np.abs(b).max() for b in np.split(w.ravel(), range(block_size, w.size, block_size))], block_size)
    slack = np.abs(maxima - true[: w.size].reshape(w.shape))
    widest = np.diff(CODES).max() / 2
    assert (np.abs(ops.dequantize_nf4(q) - w) <= widest * maxima + slack + 1e-6).all()


def test_row_27_more_than_two_to_the_31_entries_are_counted_right():
    shape = (2**16 + 1, 2**15)
    count = shape[0] * shape[1]
    w = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q = jax.eval_shape(ops.quantize_nf4, w)
    blocks = count // 64
    assert [x.shape for x in jax.tree_util.tree_leaves(q)] == [(count // 2,), (blocks,), (-(-blocks // 256),), ()]
    plain = jax.eval_shape(lambda w: ops.quantize_nf4(w, block_size=32, double_quant=False), w)
    assert plain.absmax.shape == (count // 32,)
    assert jax.eval_shape(lambda q: ops.dequantize_nf4(q, jnp.bfloat16), q).shape == shape
    x = jax.ShapeDtypeStruct((2, shape[1]), jnp.bfloat16)

    def through(x, q):
        out, pull = riftco.vjp(lambda x: ops.nf4_linear(x, q), x)
        return out, pull(out)[0]

    out, dx = jax.eval_shape(through, x, q)
    assert out.shape == (2, shape[0]) and dx.shape == x.shape
    # Indices of entries never appear: every gather reads a table by a code.
    text = str(jax.make_jaxpr(through)(x, q))
    assert f"iota[dtype=int32 dimension=0 shape=({count}" not in text


@pytest.mark.parametrize("shape", [(5, 13), (3, 43), (9, 7)])
def test_row_28_a_size_that_blocks_do_not_divide_keeps_its_maxima(rng, shape):
    w = weight(rng, shape)
    assert w.size % 64
    q = ops.quantize_nf4(w, double_quant=False)
    flat = w.ravel()
    expected = [np.abs(flat[i : i + 64]).max() for i in range(0, w.size, 64)]
    np.testing.assert_array_equal(q.absmax, expected)
    largest = np.abs(flat[-(w.size % 64) :]).argmax() + w.size - w.size % 64
    assert np.asarray(ops.dequantize_nf4(q)).ravel()[largest] == flat[largest]
    assert w.size % 2 == 0 or int(q.codes[-1]) & 15 == 7  # the spare nibble codes 0


def test_row_29_bfloat16_errs_by_its_rounding_and_no_more(rng):
    w = weight(rng, (48, 96))
    q = ops.quantize_nf4(w)
    exact = oracle.dequantize_nf4(q)
    for dtype, unit in ((jnp.bfloat16, 2.0**-8), (jnp.float16, 2.0**-11), (jnp.float32, 2.0**-24)):
        x = jnp.asarray(rng.standard_normal((16, 96)), dtype)
        decoded = np.asarray(ops.dequantize_nf4(q, dtype), np.float64)
        assert (np.abs(decoded - exact) <= unit * np.abs(exact) + 2.0**-25).all()  # float16's smallest step
        out, pull = riftco.vjp(lambda x: ops.nf4_linear(x, q), x)
        ct = jnp.asarray(rng.standard_normal(out.shape), dtype)
        pairs = ((out, oracle.nf4_linear(x, q)), (pull(ct)[0], oracle.nf4_linear_vjp(x, q, ct)[0]))
        for ours, twin in pairs:
            error = np.linalg.norm(np.asarray(ours, np.float64) - twin) / np.linalg.norm(twin)
            assert error <= max(unit, 2e-7), dtype  # the weight's rounding and the result's, in quadrature


def test_blocks_of_zeros_decode_to_zeros():
    w = np.zeros((3, 33), np.float32)
    w[2, 32] = -2.0
    for double_quant in (True, False):
        q = ops.quantize_nf4(w, block_size=32, double_quant=double_quant)
        assert_same_bits(q, oracle.quantize_nf4(w, block_size=32, double_quant=double_quant))
        assert (np.asarray(q.codes)[:-2] == 0x77).all()
    np.testing.assert_array_equal(ops.dequantize_nf4(q), w)
    assert q.absmax.tolist() == [0.0, 0.0, 0.0, 2.0]


def test_equal_maxima_decode_exactly(rng):
    w = np.where(rng.random((64, 64)) < 0.5, -1.5, 1.5).astype(np.float32)
    q = ops.quantize_nf4(w)
    np.testing.assert_array_equal(ops.dequantize_nf4(q), w)
    assert_same_bits(q, oracle.quantize_nf4(w))


@pytest.mark.tiny
def test_the_first_entry_is_in_the_high_nibble_and_ties_take_the_lower_code():
    q = ops.quantize_nf4(jnp.asarray(CODES)[None], double_quant=False)
    assert bytes(np.asarray(q.codes)).hex() == "0123456789abcdef"
    np.testing.assert_array_equal(ops.dequantize_nf4(q), CODES[None])
    middles = np.append((CODES[:-1] + CODES[1:]) / np.float32(2), np.float32(1))
    q = ops.quantize_nf4(middles[None], double_quant=False)
    assert bytes(np.asarray(q.codes)).hex() == "0123456789abcdef"


def test_the_dynamic_map():
    table = dynamic_map()
    np.testing.assert_array_equal(table, oracle_map())
    assert table.shape == (256,) and (np.diff(table) > 0).all() and table[127] == 0 and table[255] == 1
    np.testing.assert_array_equal(table[1:127], -table[253:127:-1])


def test_the_mean_does_not_depend_on_an_order(rng):
    """A sum that is rounded once, whatever is in it."""
    total = jax.jit(exact_sum)
    for size in (1, 3, 257):
        x = (rng.standard_normal(size) * 10.0 ** rng.uniform(-6, 6, size)).astype(np.float32)
        expected = np.float32(np.sum(x.astype(np.longdouble)))
        assert np.asarray(total(x)) == expected
    assert float(total(np.float32([1e8, 1.0, -1e8, 1.0]))) == 2.0


# ------------------------------------------------------------------------------------------------ the linear layer


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(5)
    w, x = weight(rng, (7, 64)), rng.standard_normal((2, 3, 64)).astype(np.float32)
    return x, ops.quantize_nf4(w, block_size=32), rng.standard_normal(7).astype(np.float32)


def value_and_cotangents(x, q, bias, ct, **options):
    out, pull = riftco.vjp(lambda x, bias: ops.nf4_linear(x, q, bias, **options), x, bias)
    return out, *pull(ct)


@pytest.mark.parametrize("layout", ["linear", "halves"])
@pytest.mark.parametrize("how", ["plain", "pallas_triton", "pallas_tpu"])
def test_every_implementation_is_the_twin(case, how, layout):
    x, q, bias = case
    q = pack_for_kernels(q) if layout == "halves" else q
    ct = np.cos(np.arange(42, dtype=np.float32)).reshape(2, 3, 7)
    run = functools.partial(value_and_cotangents, implementation=how, interpret=how != "plain")
    ours = jax.jit(run)(x, q, bias, ct)
    dx, _, dbias = oracle.nf4_linear_vjp(x, case[1], bias, ct)
    for got, expected in zip(ours, (oracle.nf4_linear(x, case[1], bias), dx, dbias), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_a_kernel_runs_at_every_order_and_under_vmap(case, monkeypatch):
    """Derivatives of derivatives re-enter the kernel, which is linear; nothing falls back behind the caller."""
    x, q, _ = case
    calls = []
    for name in ("nf4_matmul", "nf4_input_gradient"):
        true = getattr(dispatch, name)
        monkeypatch.setattr(dispatch, name, lambda *args, name=name, true=true: (calls.append(name), true(*args))[1])

    def loss(x, **options):
        y = ops.nf4_linear(x, q, **options)
        return ops.sum(y * y * y)

    def second(x, **options):
        return riftco.grad(lambda x: ops.sum(riftco.grad(functools.partial(loss, **options))(x) ** 2))(x)

    kernel = jax.jit(jax.vmap(functools.partial(second, implementation="pallas_triton", interpret=True)))(x)
    assert set(calls) == {"nf4_matmul", "nf4_input_gradient"}
    np.testing.assert_allclose(kernel, jax.jit(second)(x), rtol=2e-4, atol=2e-3)


@pytest.mark.tiny
def test_only_the_packed_weight_is_saved(case):
    x, q, bias = case
    _, pull = riftco.vjp(lambda x, bias: ops.nf4_linear(x, q, bias), x, bias)
    assert pull.residual_bytes() == q.nbytes
    shapes = {leaf.shape for leaf in jax.tree_util.tree_leaves(pull)}
    assert shapes == {leaf.shape for leaf in jax.tree_util.tree_leaves(q)}
    # To second order too: neither trace keeps a decoded weight.
    _, outer = riftco.vjp(lambda x: riftco.grad(lambda x: ops.sum(ops.nf4_linear(x, q) ** 2))(x), x)
    assert (7, 64) not in {leaf.shape for leaf in jax.tree_util.tree_leaves(outer)}


@pytest.mark.parametrize("layout", ["linear", "halves"])
def test_layers_stacked_under_scan_vmap_and_checkpoint(rng, layout):
    layers = [ops.quantize_nf4(weight(rng, (9, 9)), block_size=32) for _ in range(3)]
    if layout == "halves":
        layers = [pack_for_kernels(q) for q in layers]
    stack = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *layers)
    assert isinstance(stack, NF4Array) and stack.shape == (9, 9) and stack.layout == layout
    np.testing.assert_array_equal(stack.absmax_values(), np.stack([q.absmax_values() for q in layers]))
    x = jnp.asarray(rng.standard_normal((4, 9)), jnp.float32)

    def layer(x, q):
        return ops.tanh(ops.nf4_linear(x, q))

    def looped(x):
        for q in layers:
            x = layer(x, q)
        return ops.sum(x * x)

    def scanned(x, stack, wrap):
        out, _ = riftco.scan(lambda x, q: (wrap(layer)(x, q), ()), x, stack)
        return ops.sum(out * out)

    expected = jax.jit(riftco.value_and_grad(looped))(x)
    for wrap in (lambda f: f,) if layout == "halves" else (lambda f: f, riftco.checkpoint):
        ours = jax.jit(riftco.value_and_grad(functools.partial(scanned, wrap=wrap)))(x, stack)
        jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), ours, expected)
    # The stack is read again in the backward loop; no step saves its weight.
    _, pull = jax.eval_shape(lambda x, stack: riftco.vjp(lambda x: scanned(x, stack, lambda f: f), x), x, stack)
    assert (3, 9, 9) not in {leaf.shape for leaf in jax.tree_util.tree_leaves(pull)}
    mapped = jax.jit(jax.vmap(lambda q: ops.nf4_linear(x, q)))(stack)
    np.testing.assert_allclose(mapped, np.stack([ops.nf4_linear(x, q) for q in layers]), rtol=2e-6, atol=2e-6)


def test_float64_is_the_twin(case):
    x, q, _ = case
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64)
        out = ops.nf4_linear(wide, q)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, oracle.nf4_linear(x, q), rtol=1e-13, atol=1e-13)
        assert_same_bits(ops.quantize_nf4(wide.reshape(6, 64)), oracle.quantize_nf4(x.reshape(6, 64)))


@pytest.mark.parametrize(("shape", "block_size"), [((5, 300), 32), ((7, 9), 64)])
def test_the_kernels_order_is_a_permutation(rng, shape, block_size):
    q = ops.quantize_nf4(weight(rng, shape), block_size=block_size)
    packed = pack_for_kernels(q)
    assert packed.layout == "halves" and packed.codes.shape[0] == shape[0]
    np.testing.assert_array_equal(ops.dequantize_nf4(packed), ops.dequantize_nf4(q))
    back = unpack_from_kernels(packed)
    assert back.layout == "linear"
    np.testing.assert_array_equal(back.codes, q.codes)


# ------------------------------------------------------------------------------------------------ choosing, refusing


@pytest.mark.tiny
def test_implementations_are_chosen_or_refused(case):
    x, q, _ = case
    expected = ops.nf4_linear(x, q, implementation="plain")
    np.testing.assert_array_equal(ops.nf4_linear(x, q), expected)
    for options, error, fragment in (
        ({"implementation": "blockwise"}, UnsupportedError, r"nf4_linear\[blockwise\]"),
        ({"implementation": "cudnn"}, UnsupportedError, r"nf4_linear\[cudnn\]"),
        ({"implementation": "pallas_tpu"}, UnsupportedError, "needs a tpu device"),
        ({"implementation": "fast"}, ConfigError, "must be None or one of"),
        ({"interpret": True}, UnsupportedError, "nothing to interpret"),
    ):
        with pytest.raises(error, match=fragment):
            ops.nf4_linear(x, q, **options)


def test_none_takes_the_kernel_of_the_device_that_a_trace_is_for(case):
    x, q, _ = case
    odd = ops.quantize_nf4(np.ones((3, 5), np.float32))
    for platform, kind in (("tpu", "TPU v5 lite"), ("cuda", "NVIDIA H200")):
        with dispatch.target(platform, kind):
            assert "pallas_call" in str(jax.make_jaxpr(ops.nf4_linear)(x, q))
            # Blocks that cross rows: no kernel has them, and None says nothing about it.
            assert "pallas_call" not in str(jax.make_jaxpr(ops.nf4_linear)(x[..., :5], odd))


@pytest.mark.tiny
@pytest.mark.parametrize(
    ("w", "options", "error", "fragment"),
    [
        (np.float32([[1, np.nan]]), {}, DomainError, "finite"),
        (np.float32([[1, -np.inf]]), {}, DomainError, "finite"),
        (np.float32([[2e38, 0]]), {}, DomainError, "at most 2\\^126"),
        (np.ones((2, 2), np.float32), {"block_size": 16}, ConfigError, "power of two from 32 to 4096; got 16"),
        (np.ones((2, 2), np.float32), {"block_size": 96}, ConfigError, "got 96"),
        (np.ones((2, 2), np.float32), {"block_size": 8192}, ConfigError, "got 8192"),
        (np.ones((2, 0), np.float32), {}, ShapeError, "not empty"),
        (np.ones(4, np.float32), {}, ShapeError, "w must be \\[out, in\\]"),
        (np.ones((2, 2), np.int32), {}, DTypeError, "floating"),
    ],
)
def test_weights_that_cannot_be_packed(w, options, error, fragment):
    with pytest.raises(error, match=fragment):
        ops.quantize_nf4(jnp.asarray(w), **options)
    if error is not DTypeError:
        with pytest.raises(error):
            oracle.quantize_nf4(w, **options)


@pytest.mark.tiny
def test_a_packed_weight_is_not_trainable(case):
    x, q, _ = case
    loss = lambda q: ops.sum(ops.nf4_linear(x, q))
    with pytest.raises(GradError, match=r"codes.*packed weights"):
        riftco.grad(loss)(q)
    single = ops.quantize_nf4(np.ones((7, 64), np.float32), double_quant=False)
    with pytest.raises(GradError, match="packed weight cannot be differentiated"):
        riftco.grad(lambda absmax: loss(dataclasses.replace(single, absmax=absmax)))(single.absmax)
    with pytest.raises(GradError, match="cannot be quantised"):
        riftco.grad(lambda w: ops.sum(ops.dequantize_nf4(ops.quantize_nf4(w))))(jnp.ones((2, 2)))


@pytest.mark.tiny
def test_arrays_that_do_not_fit_the_shape(case):
    x, q, _ = case
    stack = jax.tree_util.tree_map(lambda leaf: jnp.stack([leaf, leaf]), q)
    for bad in (
        stack,
        dataclasses.replace(q, codes=q.codes[:-1]),
        dataclasses.replace(q, offset=None),
        dataclasses.replace(q, codes=q.codes.astype(jnp.int32)),
        dataclasses.replace(q, layout="halves"),
    ):
        with pytest.raises(ShapeError, match="the arrays of q must be"):
            ops.nf4_linear(x, bad)
    with pytest.raises(DTypeError, match="dtype must be floating"):
        ops.dequantize_nf4(q, jnp.int32)
    with pytest.raises(DTypeError, match="q must be an NF4Array"):
        ops.dequantize_nf4(jnp.ones((2, 2)))
