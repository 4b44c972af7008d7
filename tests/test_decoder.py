"""The decoder's promises: shapes, determinism, exact causality, gradients that reach every leaf, finite extremes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import layers, models, ops
from riftco.errors import ConfigError, IndexRangeError, ShapeError
from riftco.models import DecoderConfig, forward, loss
from riftco.ops.attend import choose

# A context longer than the rows, so that some positions are not used; a dropout rate, which is nothing without a key.
GPT = DecoderConfig(27, 20, 32, 4, 2, 64, head_bias=True, dropout=0.5)
LLAMA = DecoderConfig(27, 16, 32, 4, 2, 64, kv_heads=2, norm="rms", mlp="swiglu", position="rope")
QWEN = DecoderConfig(
    27, 16, 32, 4, 2, 64, kv_heads=2, norm="rms", mlp="swiglu", position="rope", qkv_bias=True, qk_norm=True,
    tie_embeddings=True, sliding_window=5,
)  # fmt: skip
CONFIGS = pytest.mark.parametrize("config", [GPT, LLAMA, QWEN], ids=["gpt", "llama", "qwen"])
TOKENS = np.random.default_rng(0).integers(0, 27, (2, 16)).astype(np.int32)
TARGETS = np.random.default_rng(1).integers(0, 27, (2, 16)).astype(np.int32)

# Compiling is nearly all that these tests cost, so they share these functions, one shape and the default options; for
# 16 queries the default attention is the plain rule.
run = jax.jit(forward, static_argnums=2, static_argnames=("attention", "dtype", "grad_checkpoint", "unroll"))
loss_and_grads = jax.jit(
    riftco.value_and_grad(loss), static_argnums=3, static_argnames=("attention", "dtype", "grad_checkpoint", "unroll")
)


@functools.cache
def params_of(config: DecoderConfig) -> dict:
    return models.init(jax.random.key(0), config)


@pytest.mark.tiny
@CONFIGS
def test_logits_and_counts(config: DecoderConfig) -> None:
    logits = run(params_of(config), TOKENS, config)
    assert logits.shape == (2, 16, 27) and logits.dtype == jnp.float32
    again = run(models.init(jax.random.key(0), config), TOKENS, config)
    assert np.array_equal(logits, again)
    assert not np.array_equal(logits, run(models.init(jax.random.key(1), config), TOKENS, config))


@CONFIGS
@pytest.mark.parametrize("attention", [None, "blockwise"], ids=["plain", "blockwise"])
def test_a_later_token_changes_no_bit_of_earlier_logits(config: DecoderConfig, attention: str | None) -> None:
    assert choose(None, TOKENS, TOKENS, TOKENS) == "plain"
    before = np.asarray(run(params_of(config), TOKENS, config, attention=attention))
    for t in (1, 7, 15):
        changed = TOKENS.copy()
        changed[0, t] = (changed[0, t] + 1) % 27
        after = np.asarray(run(params_of(config), changed, config, attention=attention))
        assert np.array_equal(before[:, :t], after[:, :t])
        assert np.array_equal(before[1], after[1]), "the other row"
        assert not np.array_equal(before[0, t], after[0, t])


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_the_future_gets_exactly_no_weight_and_no_gradient(attention: str) -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 70, 4, 8)) for i in range(3))
    weights = np.asarray(jax.jit(ops.attention_weights)(q, k))
    future = np.triu(np.ones((70, 70), bool), 1)
    assert (weights[:, :, future] == 0.0).all()
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)

    def of_first_rows(k: jax.Array, v: jax.Array) -> jax.Array:
        return ops.sum(ops.attention(q, k, v, implementation=attention)[:, :33])

    dk, dv = jax.jit(riftco.grad(of_first_rows, (0, 1)))(k, v)
    assert (np.asarray(dk[:, 33:]) == 0.0).all() and (np.asarray(dv[:, 33:]) == 0.0).all()
    assert (np.abs(np.asarray(dv[:, :33])) > 0).any()


@pytest.mark.parametrize("config", [GPT, QWEN], ids=["gpt", "qwen"])  # together they have every kind of leaf
def test_every_leaf_gets_a_gradient(config: DecoderConfig) -> None:
    _, grads = loss_and_grads(params_of(config), TOKENS, TARGETS, config)
    for name, leaf in models.named(grads, config).items():
        size = float(jnp.max(jnp.abs(leaf)))
        if name.endswith("attention.key.bias") and not config.qk_norm and config.position == "learned":
            assert size < 1e-6, f"{name} has no gradient: softmax does not see a constant added to a row"
        else:
            assert size > 1e-6, name


def test_positions_that_are_not_used_get_exactly_no_gradient() -> None:
    _, grads = loss_and_grads(params_of(GPT), TOKENS, TARGETS, GPT)
    rows = np.abs(np.asarray(grads["position_embedding"]["weight"])).max(1)
    assert (rows[:16] > 0.0).all() and (rows[16:] == 0.0).all()


def test_extreme_logits_stay_finite() -> None:
    params = jax.tree_util.tree_map(jnp.asarray, params_of(GPT))
    size = float(jnp.max(jnp.abs(run(params, TOKENS, GPT))))
    params["language_model_head"] = {"weight": params["language_model_head"]["weight"] * (1e4 / size),
                                     "bias": params["language_model_head"]["bias"]}  # fmt: skip
    logits = run(params, TOKENS, GPT)
    assert float(jnp.max(jnp.abs(logits))) > 9e3
    value, grads = loss_and_grads(params, TOKENS, TARGETS, GPT)
    assert np.isfinite(float(value)) and float(value) > 100
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree_util.tree_leaves(grads))


def test_the_two_attentions_and_unrolling_agree() -> None:
    value, grads = loss_and_grads(params_of(QWEN), TOKENS, TARGETS, QWEN)
    other, other_grads = loss_and_grads(params_of(QWEN), TOKENS, TARGETS, QWEN, attention="blockwise")
    np.testing.assert_allclose(value, other, rtol=1e-6)
    jax.tree_util.tree_map(functools.partial(np.testing.assert_allclose, atol=2e-6), grads, other_grads)
    looped, unrolled = (run(params_of(QWEN), TOKENS, QWEN, unroll=n) for n in (1, 2))
    np.testing.assert_allclose(looped, unrolled, atol=2e-6)


def test_bfloat16_compute_over_float32_parameters() -> None:
    value, grads = loss_and_grads(params_of(QWEN), TOKENS, TARGETS, QWEN)
    rough, rough_grads = loss_and_grads(params_of(QWEN), TOKENS, TARGETS, QWEN, dtype="bfloat16")
    assert rough.dtype == jnp.float32
    assert jax.eval_shape(lambda p: forward(p, TOKENS, QWEN, dtype="bfloat16"), params_of(QWEN)).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree_util.tree_leaves(rough_grads)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(value, rough, rtol=2e-2)
    flat, rough_flat = (
        np.concatenate([np.ravel(x) for x in jax.tree_util.tree_leaves(g)]) for g in (grads, rough_grads)
    )
    assert flat @ rough_flat / np.linalg.norm(flat) / np.linalg.norm(rough_flat) > 0.999


@CONFIGS
def test_packed_documents_equal_separate_ones(config: DecoderConfig) -> None:
    segments = jnp.asarray([[1] * 6 + [2] * 10])
    positions = jnp.asarray([[*range(6), *range(10)]])
    packed = run(params_of(config), TOKENS[:1], config, segment_ids=segments, positions=positions)[0]
    # One document a row, filled up with tokens that lie in its future.
    first, second = run(params_of(config), np.stack([TOKENS[0], np.roll(TOKENS[0], -6)]), config)
    np.testing.assert_allclose(packed[:6], first[:6], atol=3e-6)
    np.testing.assert_allclose(packed[6:], second[:10], atol=3e-6)


def test_loss_counts_weights_and_sums() -> None:
    weights = jnp.asarray(np.random.default_rng(2).integers(0, 2, (2, 16)), jnp.float32)
    logits = run(params_of(GPT), TOKENS, GPT)
    rows = -jax.nn.log_softmax(logits)[jnp.arange(2)[:, None], jnp.arange(16)[None], TARGETS]
    total = float(jnp.sum(rows * weights))
    both = jax.jit(lambda p: [loss(p, TOKENS, TARGETS, GPT, weights=weights, reduction=r) for r in ("mean", "sum")])
    np.testing.assert_allclose(both(params_of(GPT)), [total / weights.sum(), total], rtol=1e-5)


def test_a_large_vocabulary_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from riftco.models import decoder

    value, grads = loss_and_grads(params_of(GPT), TOKENS, TARGETS, GPT)
    monkeypatch.setattr(decoder, "_FUSED_LOSS_LOGITS", 10)
    again = jax.jit(riftco.value_and_grad(lambda p: loss(p, TOKENS, TARGETS, GPT)))  # its own trace
    fused, fused_grads = again(params_of(GPT))
    np.testing.assert_allclose(value, fused, rtol=1e-6)
    jax.tree_util.tree_map(functools.partial(np.testing.assert_allclose, atol=1e-6), grads, fused_grads)


def test_dropout_is_drawn_from_its_key() -> None:
    one, other = jax.random.key(1), jax.random.key(2)
    draw = functools.partial(loss_and_grads, params_of(GPT), TOKENS, TARGETS, GPT)
    kept = draw(dropout_key=one)
    assert float(kept[0]) == float(draw(dropout_key=one)[0])
    assert len({float(draw(**options)[0]) for options in ({}, {"dropout_key": one}, {"dropout_key": other})}) == 3
    recomputed = draw(dropout_key=one, grad_checkpoint="block")
    for a, b in zip(*map(jax.tree_util.tree_leaves, (kept, recomputed)), strict=True):
        np.testing.assert_array_equal(a, b, err_msg="block checkpointing changes no bit")


def test_compiled_size_does_not_grow_with_depth() -> None:
    def lines(depth: int) -> int:
        config = DecoderConfig(27, 16, 32, 4, depth, 64)
        grad = jax.jit(riftco.value_and_grad(loss), static_argnums=3)
        return len(grad.lower(models.abstract(config), TOKENS, TARGETS, config).as_text().splitlines())

    assert lines(3) == lines(24)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: forward(p, TOKENS[0], GPT), ShapeError, r"\[B, T\]"),
        (lambda p: forward(p, TOKENS.astype(np.float32), GPT), ShapeError, "integers"),
        (lambda p: forward(p, np.zeros((1, 21), np.int32), GPT), ShapeError, "at most 20 positions"),
        (lambda p: forward(p, np.full((1, 2), 27, np.int32), GPT), IndexRangeError, r"\[0, 27\)"),
        (lambda p: forward(p, np.full((1, 2), -1, np.int32), GPT), IndexRangeError, r"\[0, 27\)"),
        (lambda p: forward(p, TOKENS, GPT, grad_checkpoint="all"), ConfigError, "'none' or 'block'"),
        (lambda p: forward(p, TOKENS, GPT, adapters={}), TypeError, "adapters"),
        (lambda p: forward(p, TOKENS, GPT, attention="fast"), ConfigError, "plain, blockwise"),
        (lambda p: forward(p, TOKENS, GPT, attention="cudnn"), NotImplementedError, "cudnn"),
        (lambda p: forward(p, TOKENS, GPT, positions=np.zeros((3, 16), np.int32)), ShapeError, "positions"),
    ],
)
def test_bad_input_is_refused(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(params_of(GPT))


def test_under_jit_an_id_out_of_range_is_nan_and_never_a_clamp() -> None:
    bad = TOKENS.copy()
    bad[0, 5] = 27
    logits = np.asarray(run(params_of(GPT), bad, GPT))
    # Its own row is lost (0 times a NaN value is NaN, so earlier positions as well); the other row is not touched.
    assert np.isnan(logits[0, 5:]).all() and np.isfinite(logits[1]).all()
    targets = TARGETS.copy()
    targets[1, 2] = -1
    assert np.isnan(float(loss_and_grads(params_of(GPT), TOKENS, targets, GPT)[0]))


@pytest.mark.parametrize(
    "call",
    [
        lambda p, x: layers.linear({"weight": p["weight"][0]}, x),
        lambda p, x: layers.norm({"scale": p["weight"]}, x, eps=1e-5),
        lambda p, x: layers.embedding({"weight": p["weight"][0]}, jnp.zeros(2, jnp.int32)),
        lambda p, x: layers.feed_forward({}, x[0], mlp="gelu"),
        lambda p, x: layers.project_heads({}, x[0], head_dim=2, eps=1e-5, rope=None),
        lambda p, x: models.decoder.Block(GPT)(x[0], ({}, None), (None, None)),
    ],
)
def test_a_wrong_rank_is_refused_while_tracing(call: object) -> None:
    with pytest.raises(AssertionError, match="rank"):
        call({"weight": jnp.zeros((4, 4))}, jnp.zeros((2, 3, 4)))
