"""Ops at the edges of what they accept: narrow integers, NumPy scalars, NaN, odd indices, what is not built."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import _compat, models, ops
from riftco.errors import DomainError, DTypeError, IndexRangeError, RiftcoError, ShapeError, UnsupportedError

# ------------------------------------------------------------------------------------------------ narrow integers


def plain_loss(x, weight, targets):
    return ops.cross_entropy(ops.linear(x, weight), targets, ignore_index=-100)


def fused_loss(x, weight, targets):
    return ops.linear_cross_entropy(x, weight, targets, chunk_size=2, ignore_index=-100)


@pytest.mark.parametrize(("dtype", "size"), [(np.uint8, 256), (np.uint8, 300), (np.int8, 128), (np.int8, 200)])
@pytest.mark.parametrize("loss", [plain_loss, fused_loss])
def test_targets_of_a_narrow_dtype_count_as_wide_ones(rng, dtype, size, loss):
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 4), (size, 4)))
    targets = np.array([0, 5, np.iinfo(dtype).max], dtype)
    derivative = riftco.value_and_grad(loss, (0, 1))
    wide, narrow = derivative(x, weight, targets.astype(np.int32)), derivative(x, weight, targets)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(narrow))
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)
    with pytest.raises(IndexRangeError):
        loss(x, weight[: targets.max()], targets)


def test_bytes_as_tokens_and_targets_have_a_finite_loss():
    config = models.DecoderConfig(256, 8, 8, 2, 1, 16)
    params = models.init(jax.random.key(0), config)
    text = np.array([[0, 127, 128, 255, 7]], np.uint8)
    value = models.loss(params, text, text, config)
    assert float(value) == float(models.loss(params, text.astype(np.int32), text.astype(np.int32), config))
    assert np.isfinite(float(value))


# ------------------------------------------------------------------------------------------------ NumPy scalars

HALF = jnp.asarray([0.5, 2.0], jnp.bfloat16)
BINARY = [ops.add, ops.sub, ops.mul, ops.div, ops.maximum, ops.minimum]


@pytest.mark.parametrize("scalar", [np.float64(2), np.float32(2), np.float16(2), np.int64(2), np.uint8(2)], ids=repr)
def test_a_numpy_scalar_takes_the_arrays_dtype(scalar):
    for op in BINARY:
        for f in (lambda x, c, op=op: op(x, c), lambda x, c, op=op: op(c, x)):
            got, wanted = (riftco.value_and_grad(lambda x, c=c, f=f: ops.sum(f(x, c)))(HALF) for c in (scalar, 2))
            assert [x.dtype for x in got] == [jnp.bfloat16, jnp.bfloat16]
            jax.tree.map(np.testing.assert_array_equal, got, wanted)
    keep = jnp.asarray([True, False])
    assert ops.where(keep, HALF, scalar).tolist() == [0.5, 2.0]
    assert ops.pow(HALF, scalar).dtype == jnp.bfloat16
    assert riftco.grad(lambda x: ops.sum(x * scalar + scalar))(HALF).dtype == jnp.bfloat16
    # Options that are numbers are no different.
    assert ops.dropout(HALF, jax.random.key(0), np.float64(0.5)).dtype == jnp.bfloat16
    q = jnp.ones((1, 40, 2, 4), jnp.bfloat16)
    for how in ("plain", "blockwise"):
        out = ops.attention(q, q, q, logits_soft_cap=scalar, scale=scalar, window=int(scalar), implementation=how)
        assert out.dtype == jnp.bfloat16


def test_two_numpy_scalars_are_arrays_and_a_bool_is_none():
    assert float(ops.add(np.float32(1), np.float32(2))) == 3
    with pytest.raises(DTypeError):
        ops.mul(HALF, np.bool_(True))


# ------------------------------------------------------------------------------------------------ NaN flows on


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_largest_of_nan_is_nan_and_so_is_its_gradient(axis):
    x = jnp.asarray([[1.0, jnp.nan], [3.0, 2.0]])
    value, gradient = riftco.value_and_grad(lambda x: ops.sum(ops.max(x, axis)))(x)
    assert np.isnan(value) and np.isnan(gradient[0, 1])
    wanted = {None: [0, 0, 0], 0: [0, 1, 0], 1: [0, 1, 0]}[axis]
    assert [float(gradient[i]) for i in ((0, 0), (1, 0), (1, 1))] == wanted


@pytest.mark.parametrize("op", [ops.maximum, ops.minimum])
def test_an_extremum_with_nan_gives_nan_to_both(op):
    x, y = jnp.asarray([jnp.nan, 1.0, 1.0, 3.0]), jnp.asarray([1.0, jnp.nan, 1.0, 2.0])
    gradients = riftco.grad(lambda x, y: ops.sum(op(x, y)), (0, 1))(x, y)
    for gradient, last in zip(gradients, (1.0, 0.0) if op is ops.maximum else (0.0, 1.0), strict=True):
        assert np.isnan(gradient[:2]).all()
        assert gradient[2:].tolist() == [0.5, last]


# ------------------------------------------------------------------------------------------------ indices and axes


def test_integers_of_any_kind_index_and_bools_do_not():
    x = jnp.arange(6.0).reshape(2, 3)
    pick = lambda index: riftco.value_and_grad(lambda x: ops.sum(x[index]))(x)
    for one in (1, np.int64(1), np.uint8(1), np.array(1), jnp.int32(1)):
        jax.tree.map(np.testing.assert_array_equal, pick(one), pick(1))
        jax.tree.map(np.testing.assert_array_equal, pick((..., one)), pick((..., 1)))
        assert ops.sum(x, one).tolist() == [3.0, 12.0]
    for refused in (True, np.bool_(False), np.array([1]), jnp.array([True, False]), 1.0, "x"):
        with pytest.raises(ShapeError, match=r"\[\]: only integers"):
            pick(refused)
    with pytest.raises(ShapeError, match="axis must be an integer"):
        ops.sum(x, True)


# ------------------------------------------------------------------------------------------------ what is not built


def test_a_kernel_that_cannot_run_is_refused_as_riftcos_own_error():
    q = jnp.ones((1, 2, 1, 4))
    for options, match in (
        ({"implementation": "cudnn"}, "cuda device|cannot load"),
        ({"implementation": "pallas_tpu"}, "tpu device|cannot load"),
        ({"interpret": True}, "not a kernel"),
    ):
        with pytest.raises(UnsupportedError, match=match) as caught:
            ops.attention(q, q, q, **options)
        assert isinstance(caught.value, RiftcoError) and isinstance(caught.value, NotImplementedError)


def test_a_constant_may_be_checked_inside_jit_scan_and_vmap() -> None:
    a = jnp.ones(3)
    assert np.array_equal(jax.jit(lambda k: k * ops.log(a))(jnp.ones(3)), np.zeros(3))
    grad = jax.jit(riftco.grad(lambda w: ops.sum(ops.mul(w, ops.softmax(a)))))(a)
    np.testing.assert_allclose(grad, np.full(3, 1 / 3), rtol=1e-6)
    carry, _ = riftco.scan(lambda c, x: (ops.add(c, ops.log(a)), ()), a, jnp.ones(2))
    assert np.array_equal(carry, np.ones(3))
    assert jax.vmap(lambda k: ops.sum(ops.sqrt(a)) * k)(jnp.ones(2)).tolist() == [3.0, 3.0]
    negative = -a
    with pytest.raises(DomainError):
        jax.jit(lambda k: k * ops.log(negative))(jnp.ones(3))


# ------------------------------------------------------------------------------------------------ attention's arguments


@pytest.mark.parametrize(
    "shapes", [((0, 3, 2, 4), (0, 3, 1, 4)), ((1, 0, 2, 4), (1, 3, 1, 4)), ((1, 40, 2, 4), (1, 0, 1, 4))]
)
@pytest.mark.parametrize("implementation", [None, "plain", "blockwise"])
def test_where_there_is_nothing_to_attend_attention_is_zeros(shapes, implementation):
    q, k = (jnp.ones(shape) for shape in shapes)
    out, pull = riftco.vjp(lambda q, k, v: ops.attention(q, k, v, implementation=implementation), q, k, k)
    assert out.shape == q.shape and not np.any(out)
    assert [g.shape for g in pull(out)] == [q.shape, k.shape, k.shape] and not any(np.any(g) for g in pull(out))
    assert ops.attention_weights(q, k).shape == (q.shape[0], 2, q.shape[1], k.shape[1])


def test_numbers_that_attention_cannot_use_are_refused():
    q = jnp.ones((1, 4, 1, 8))
    for options in (
        {"logits_soft_cap": np.inf}, {"logits_soft_cap": 0.0}, {"scale": np.nan}, {"scale": "x"}, {"q_offset": 2**31},
    ):  # fmt: skip
        with pytest.raises(RiftcoError, match=r"attention: .* must"):
            ops.attention(q, q, q, **options)
    with pytest.raises(RiftcoError, match="scale must be finite"):
        jax.jit(lambda scale: ops.attention(q, q, q, scale=scale))(0.5)
    with pytest.raises(ShapeError, match="G dividing H"):
        ops.attention(q, q, q[..., :4])
    with pytest.raises(ShapeError, match="G dividing H"):
        ops.attention(q, q[:, :, :0], q[:, :, :0])


def test_windows_offsets_and_lengths_past_int32_are_what_they_say():
    q = jnp.arange(32.0).reshape(1, 4, 1, 8) / 32
    for causal in (True, False):
        whole = ops.attention(q, q, q, causal=causal)
        assert np.array_equal(whole, ops.attention(q, q, q, causal=causal, window=2**31))
    assert np.array_equal(ops.attention(q, q, q, q_offset=np.int64(2)), ops.attention(q, q, q, q_offset=2))
    for many in (np.array([2**40]), np.array([2**32 + 3]), np.array([2**32 - 1], np.uint32)):
        long = ops.attention(q, q, q, causal=False, kv_lengths=many)
        assert np.array_equal(long, ops.attention(q, q, q, causal=False))
        assert np.array_equal(ops.attention(q, q, q, q_offset=many), ops.attention(q, q, q, causal=False))
    with _compat.enable_x64(True):
        long = ops.attention(q, q, q, causal=False, kv_lengths=np.array([2**32 + 1]))
    assert np.array_equal(long, ops.attention(q, q, q, causal=False))
