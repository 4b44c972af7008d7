"""4-bit bases: taken wherever params are, never changed, never widened as a whole, and measured honestly."""

import dataclasses
import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import bundle, checkpoints, generation, models, ops, optim, tune
from riftco.bundle import packed as packed_bundle
from riftco.errors import BundleError, ConfigError, DomainError, DTypeError, GradError, ShapeError
from riftco.models import decoder, decoding, families
from riftco.models.adapters import path_of, projections
from riftco.models.packed import check_packed, held_back
from riftco.ops import nf4
from riftco.tree import named_leaves

LLAMA = models.DecoderConfig(29, 16, 16, 2, 3, 24, kv_heads=1, norm="rms", mlp="swiglu", position="rope")
GPT2 = models.DecoderConfig(29, 16, 16, 2, 2, 32, mlp="gelu_tanh", tie_embeddings=True)
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 8), np.int32)
TARGETS = np.random.default_rng(1).integers(0, 29, (2, 8), np.int32)


@functools.cache
def model(name: str):
    return models.init(jax.random.key(0), CONFIGS[name])


@functools.cache
def packed(name: str, **options):
    return tune.quantize(model(name), CONFIGS[name], **options)


@functools.cache
def adapters(name: str, noise: float = 0.05):
    fresh = tune.lora_init(
        jax.random.key(1), packed(name), CONFIGS[name], targets=["attention", "feed_forward"], rank=2, alpha=4.0
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: leaf + noise * rng.standard_normal(leaf.shape, np.float32), fresh)


@functools.partial(jax.jit, static_argnames="config")
def forward(params, adapters, config):
    return models.forward(params, TOKENS, config, adapters=adapters)


def equal(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------ the function


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_params_answer_as_their_decoded_weights_do(name):
    config = CONFIGS[name]
    plain = tune.dequantize(packed(name), config)
    models.check_params(plain, config)
    logits = np.asarray(forward(packed(name), None, config))
    np.testing.assert_allclose(logits, forward(plain, None, config), rtol=0, atol=1e-5)
    assert np.abs(logits - np.asarray(forward(model(name), None, config))).max() > 1e-3


def test_what_is_packed_and_what_is_not():
    for name, config in CONFIGS.items():
        plain = dict(named_leaves(model(name)))
        rest = {path: leaf for path, leaf in named_leaves(packed(name)) if path in plain}
        linear = {".".join((*path_of(target), "weight")) for target in projections(config)}
        assert set(plain) - set(rest) == linear
        assert all(leaf is plain[path] for path, leaf in rest.items())
    head = packed("llama")["language_model_head"]["weight"]
    weight = packed("llama")["blocks"]["feed_forward"]["up"]["weight"]
    assert isinstance(head, ops.NF4Array) and weight.shape == (24, 16) and weight.codes.shape == (3, 24 * 16 // 2)
    one = ops.quantize_nf4(model("llama")["blocks"]["feed_forward"]["up"]["weight"][1])
    equal(jax.tree.map(lambda leaf: leaf[1], weight), one)


def test_generation_takes_packed_params_and_adapters():
    expected = np.asarray(forward(packed("llama"), adapters("llama"), LLAMA))[0]
    session = generation.Session(packed("llama"), LLAMA, adapters=adapters("llama"))
    rows = [session.prefill(TOKENS[0, :5].tolist())] + [session.step(int(token)) for token in TOKENS[0, 5:]]
    np.testing.assert_allclose(rows, expected[4:], rtol=0, atol=2e-5)
    options = {"max_tokens": 5, "temperature": 0.0, "adapters": adapters("llama")}
    ids = riftco.generate(packed("llama"), LLAMA, [1, 2, 3], **options)
    assert ids == riftco.generate(tune.dequantize(packed("llama"), LLAMA), LLAMA, [1, 2, 3], **options)


def test_a_decoding_step_never_holds_the_whole_model_in_float32():
    """By the compiler's account of temporary memory."""
    config = models.DecoderConfig(64, 16, 64, 2, 6, 256)
    params = jax.eval_shape(
        lambda key: decoding.decoding_params(tune.quantize(models.init(key, config), config), config),
        jax.random.key(0),
    )
    cache = jax.eval_shape(lambda: decoding.contiguous_cache(config, 1, 16, jnp.float32))
    token, position = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    step = decoding.decode_step.lower(params, cache, token, position, None, config).compile()
    one_layer = 4 * (4 * 64 * 64 + 2 * 64 * 256)
    assert step.memory_analysis().temp_size_in_bytes < 1.5 * one_layer


# ------------------------------------------------------------------------------------------------ training

_INIT, _UPDATE = optim.adam(2e-2, max_grad_norm=1.0)


@functools.partial(jax.jit, static_argnames="grad_checkpoint", donate_argnums=(0, 1))
def train(lora, state, params, grad_checkpoint):
    def loss(lora):
        return models.loss(params, TOKENS, TARGETS, LLAMA, adapters=lora, grad_checkpoint=grad_checkpoint)

    value, grads = riftco.value_and_grad(loss)(lora)
    lora, state, stats = _UPDATE(grads, state, lora)
    return lora, state, value, stats.ok


def run(steps: int, grad_checkpoint: str):
    lora = jax.tree.map(jnp.copy, adapters("llama"))
    state, losses = _INIT(lora), []
    for _ in range(steps):
        lora, state, value, ok = train(lora, state, packed("llama"), grad_checkpoint)
        assert ok
        losses.append(float(value))
    return lora, state, losses


@pytest.mark.parametrize("value", [-jnp.inf, jnp.nan, -0.0, -3.0])
def test_what_holds_decoding_back_changes_no_code(value):
    is_nf4 = lambda node: isinstance(node, ops.NF4Array)
    codes = lambda params: [leaf.codes for leaf in jax.tree.leaves(params, is_leaf=is_nf4) if is_nf4(leaf)]
    held = jax.jit(held_back)(packed("llama"), jnp.full((2, 1, 4), value))
    for left, right in zip(codes(held), codes(packed("llama")), strict=True):
        np.testing.assert_array_equal(left, right)


def test_training_moves_adapters_and_no_packed_byte_with_checkpointing_or_without():
    before = jax.tree.map(np.array, packed("llama"))
    lora, state, losses = run(8, "none")
    assert losses[-1] < 0.8 * losses[0]
    equal(jax.tree.map(np.array, packed("llama")), before)
    equal((lora, state, losses), run(8, "block"))


def test_a_packed_base_has_no_gradient():
    with pytest.raises(GradError, match=r"packed weight|not floating|cannot be differentiated"):
        riftco.grad(lambda params: models.loss(params, TOKENS, TARGETS, LLAMA))(packed("llama"))


def test_a_fused_loss_knows_a_packed_head(monkeypatch):
    loss = lambda: jax.jit(lambda p: models.loss(p, TOKENS, TARGETS, LLAMA))(packed("llama"))
    expected = loss()
    monkeypatch.setattr(decoder, "_FUSED_LOSS_LOGITS", 0)
    monkeypatch.setattr(decoder, "_LOSS_CHUNK", 5)
    np.testing.assert_allclose(loss(), expected, rtol=1e-6)


# ------------------------------------------------------------------------------------------------ merging, memory


def test_merging_uses_the_decoded_weights():
    merged = tune.merge(packed("gpt2"), adapters("gpt2"), GPT2)
    models.check_params(merged, GPT2)
    same = tune.merge(tune.dequantize(packed("gpt2"), GPT2), adapters("gpt2"), GPT2)
    equal(merged, same)
    difference = tune.logit_difference(packed("gpt2"), merged, GPT2, left_adapters=adapters("gpt2"), tokens=TOKENS)
    assert difference.max_abs <= 2e-5 and difference.argmax_agreement == 1.0


@pytest.mark.tiny
def test_the_memory_report_adds_up():
    config = models.preset("base")
    shapes = jax.eval_shape(lambda key: tune.quantize(models.init(key, config), config), jax.random.key(0))
    report = tune.memory_report(shapes, config)
    assert report.packed_weights == 6 * (4 * 384 * 384 + 2 * 384 * 1536) + 4096 * 384
    assert 4.12 < report.bits_per_weight <= 4.6
    assert report.packed_weights + report.unpacked_weights == models.parameter_count(config)
    assert report.unpacked_bytes == 4 * report.unpacked_weights
    assert report.total_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    assert report.float32_bytes == 4 * models.parameter_count(config) > 3 * report.total_bytes
    assert [line.split("  ")[0] for line in str(report).splitlines()] == ["packed linears", "unpacked leaves", "total"]
    assert "head: packed" in str(report)


@pytest.mark.tiny
def test_the_memory_report_says_what_a_tied_head_does():
    report = tune.memory_report(packed("gpt2"), GPT2)
    assert report.tied_head and "tied to the embedding, so not packed" in str(report)
    assert tune.memory_report(packed("gpt2", double_quant=False), GPT2).packed_bytes > report.packed_bytes


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_bundle_comes_back_bit_for_bit(tmp_path, name):
    config = CONFIGS[name]
    base = bundle.weights_id(model(name), config)
    identity = bundle.save_packed(tmp_path / "a", packed(name), config, None, base=base, fingerprints={"data": "x"})
    loaded = bundle.load(tmp_path / "a")
    equal(loaded.params, packed(name))
    assert loaded.config == config
    assert (loaded.artifact_id, loaded.manifest["parent_artifact_id"]) == (identity, base)
    assert loaded.save(tmp_path / "b") == identity
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_a_packed_bundle_may_be_in_shards_in_half_precision_and_without_double_quantisation(tmp_path):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model("llama"))
    params = tune.quantize(half, LLAMA, block_size=32, double_quant=False)
    bundle.save_packed(tmp_path / "a", params, LLAMA, None, base=None, shard_bytes=2000)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    equal(bundle.load(tmp_path / "a").params, params)


def test_loading_never_widens_the_model(tmp_path, monkeypatch):
    """Nothing is decoded, and no more memory is taken than the packed model itself has."""
    config = models.DecoderConfig(64, 16, 128, 2, 4, 1024, norm="rms", mlp="swiglu", position="rope")
    params = tune.quantize(models.init(jax.random.key(0), config), config)
    bundle.save_packed(tmp_path / "a", params, config, None, base=None)
    report = tune.memory_report(params, config)
    bundle.load(tmp_path / "a")  # what is compiled and imported once is not counted

    def refuse(*arguments):
        raise AssertionError("a packed weight was decoded")

    monkeypatch.setattr(nf4, "_dequantize", refuse)
    tracemalloc.start()
    loaded = bundle.load(tmp_path / "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    equal(loaded.params, params)
    assert peak < 1.5 * report.total_bytes < report.float32_bytes / 4


def test_a_checkpoint_restores_packed_params_exactly(tmp_path):
    state = {"base": packed("llama"), "adapters": adapters("llama")}
    with checkpoints.Checkpoints(tmp_path / "run") as saved:
        saved.save(1, state, {})
        saved.wait()
        found = saved.restore(None, jax.tree.map(jnp.zeros_like, state)).state
    equal(found, state)


def test_the_wrong_kind_of_bundle_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"attention\.query\.weight is packed.*merge adapters and dequantize"):
        bundle.save(tmp_path / "x", packed("llama"), LLAMA, None)
    with pytest.raises(BundleError, match=r"packed by riftco\.tune\.quantize"):
        bundle.save_packed(tmp_path / "x", model("llama"), LLAMA, None, base=None)
    broken = jax.tree.map(lambda leaf: leaf, packed("llama"))
    broken["final_norm"] = {"scale": jnp.full((16,), jnp.nan)}
    with pytest.raises(BundleError, match="finite"):
        bundle.save_packed(tmp_path / "x", broken, LLAMA, None, base=None)
    with pytest.raises(BundleError, match="64 hex"):
        bundle.save_packed(tmp_path / "x", packed("llama"), LLAMA, None, base="mine")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values, tensors: values["quantization_config"].update(quant_method="gptq"), "bitsandbytes in 4 bits"),
        (lambda values, tensors: tensors.update(stray=np.zeros(1, np.float32)), "stray"),
        (lambda values, tensors: tensors.pop("lm_head.weight.absmax"), r"lm_head\.weight\.absmax must be there"),
        (lambda values, tensors: tensors.pop("model.norm.weight"), r"model\.norm\.weight must be there"),
        (lambda values, tensors: values.update(hidden_size=8, head_dim=8), "language_model_head|attention"),
    ],
)
def test_damaged_packed_tensors_are_named(change, message):
    values = {
        **families.to_hf_config(LLAMA, family="llama", dtype="float32"),
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    }
    tensors = packed_bundle._tensors(packed("llama"), LLAMA, "llama")
    equal(packed_bundle.read_packed(values, tensors)[0], packed("llama"))
    change(values, tensors)
    with pytest.raises((BundleError, ShapeError), match=message):
        packed_bundle.read_packed(values, tensors)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.tiny
def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ConfigError, match="packed already"):
        tune.quantize(packed("llama"), LLAMA)
    with pytest.raises(ConfigError, match="layout must be"):
        tune.quantize(model("llama"), LLAMA, layout="other")
    with pytest.raises(ConfigError, match="power of two"):
        tune.quantize(model("llama"), LLAMA, block_size=48)
    with pytest.raises(ShapeError):
        tune.quantize(model("llama"), GPT2)
    broken = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan), model("llama"))
    with pytest.raises(DomainError, match="finite"):
        tune.quantize(broken, LLAMA)
    with pytest.raises(DTypeError, match=r"query is not; use tune\.quantize"):
        tune.with_layout(model("llama"), LLAMA)
    with pytest.raises(DTypeError, match=r"query is not; use tune\.quantize"):
        check_packed(model("llama"), LLAMA)
    with pytest.raises(ShapeError, match=r"query must be \[3, 16, 16\]; got \[2, 16, 16\]"):
        check_packed(packed("gpt2"), dataclasses.replace(GPT2, layers=3))
    with pytest.raises(DTypeError, match="packed in 4 bits; decode them first"):
        models.flatten(packed("llama"), LLAMA)
    assert tune.is_packed(packed("gpt2")) and not tune.is_packed(model("gpt2"))
