"""Configuration, specification, names, initial values and presets of the decoder."""

import dataclasses
import inspect
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco.errors import ConfigError, DTypeError, ShapeError
from riftco.models import (
    DecoderConfig,
    abstract,
    check_params,
    decay_mask,
    flatten,
    from_named,
    init,
    logical_axes,
    named,
    parameter_count,
    preset,
    reference_init,
    spec,
)
from riftco.models.families import from_hf_config, to_hf_config
from riftco.tree import differences, named_leaves

GPT = DecoderConfig(27, 16, 32, 4, 2, 64, head_bias=True)
LLAMA = DecoderConfig(27, 16, 32, 4, 2, 64, kv_heads=2, norm="rms", mlp="swiglu", position="rope")
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, head_dim=6, tie_embeddings=True)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


@pytest.mark.tiny
def test_defaults_follow_the_other_fields():
    assert (GPT.kv_heads, GPT.head_dim, GPT.bias, GPT.qkv_bias, GPT.mlp, GPT.position) == (
        4, 8, True, True, "gelu", "learned",
    )  # fmt: skip
    assert (LLAMA.bias, LLAMA.qkv_bias, LLAMA.rope_theta, LLAMA.norm_eps) == (False, False, 1e4, 1e-5)
    assert DecoderConfig(27, 16, 32, 4, 2, 64, norm="rms", qkv_bias=True).bias is False
    assert DecoderConfig(27, 16, 30, 4, 2, 64, head_dim=8).head_dim == 8
    assert DecoderConfig(np.int64(27), 16, 32, 4, 2, 64) == DecoderConfig(27, 16, 32, 4, 2, 64)


def test_signature_is_the_published_one():
    parameters = inspect.signature(DecoderConfig).parameters
    order = "vocab_size context width heads layers hidden kv_heads head_dim norm norm_eps mlp position rope_theta "
    order += "rope_scaling bias head_bias qkv_bias qk_norm sliding_window tie_embeddings dropout"
    assert list(parameters) == order.split()
    kinds = [p.kind for p in parameters.values()]
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 6 + [inspect.Parameter.KEYWORD_ONLY] * 15


def test_config_is_frozen_hashable_and_serializable():
    config = dataclasses.replace(LLAMA, rope_scaling={**LLAMA3, "rope_theta": 1e4})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 64  # type: ignore[misc]
    with pytest.raises(AttributeError):
        config.rope_scaling.factor = 3
    for candidate in (GPT, LLAMA, QWEN3, config):
        again = DecoderConfig.from_dict(json.loads(json.dumps(candidate.to_dict())))
        assert again == candidate and hash(again) == hash(candidate)
        assert list(candidate.to_dict()) == list(inspect.signature(DecoderConfig).parameters)
        assert pickle.loads(pickle.dumps(candidate)) == candidate
    assert config.rope_scaling == LLAMA3
    jitted = jax.jit(lambda x, c: x * c.width, static_argnums=1)
    assert float(jitted(jnp.float32(1), config)) == 32.0


def test_rope_parameters_are_taken_as_published():
    rope = {"kv_heads": 2, "norm": "rms", "mlp": "swiglu", "position": "rope"}
    build = lambda **more: DecoderConfig(27, 16, 32, 4, 2, 64, **rope, **more)
    assert build(rope_scaling={"rope_type": "default", "rope_theta": 5e5}).rope_theta == 5e5
    assert build(rope_scaling={"rope_type": "default", "rope_theta": 5e5}).rope_scaling is None
    assert build(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    yarn = build(rope_scaling={"rope_type": "yarn", "factor": 4, "beta_fast": None, "truncate": False}).rope_scaling
    assert yarn == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="must agree"):
        build(rope_theta=1e4, rope_scaling={"rope_type": "default", "rope_theta": 5e5})


BAD = [
    ({"width": 33}, "width must be a multiple of heads"),
    ({"kv_heads": 3}, "multiple of kv_heads"),
    ({"position": "rope", "head_dim": 7}, "head_dim must be even"),
    ({"norm_eps": 1e300}, "after rounding to float32"),
    ({"norm_eps": 1e-50}, "after rounding to float32"),
    ({"norm_eps": float("nan")}, "norm_eps must be a finite"),
    ({"norm_eps": 0.0}, "norm_eps"),
    ({"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
    ({"position": "rope", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported: its"),
    ({"position": "rope", "rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported: it"),
    ({"position": "rope", "rope_scaling": {"rope_type": "linear"}}, "needs factor"),
    ({"position": "rope", "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "no parameter beta"),
    ({"position": "rope", "rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
    ({"position": "rope", "rope_scaling": 3}, "must be a mapping"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "belong to position='rope'"),
    ({"rope_theta": 5e5}, "belong to position='rope'"),
    ({"position": "rope", "rope_theta": -1.0}, "rope_theta must be positive"),
    ({"vocab_size": 2**32 + 1}, "vocab_size must be at most"),
    ({"context": 2**33}, "context must be at most"),
    ({"layers": 0}, "layers must be an integer"),
    ({"layers": True}, "layers must be an integer"),
    ({"hidden": 1.5}, "hidden must be an integer"),
    ({"dropout": 1.0}, "dropout must lie"),
    ({"dropout": -0.1}, "dropout must lie"),
    ({"norm": "batch"}, "norm must be one of 'layer', 'rms'"),
    ({"mlp": "relu"}, "mlp must be one of"),
    ({"bias": 1}, "bias must be True or False"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(change) for change, _ in BAD])
def test_unacceptable_values_are_refused_in_one_sentence(change, message):
    values = dict(vocab_size=27, context=16, width=32, heads=4, layers=2, hidden=64)
    with pytest.raises(ConfigError, match=message) as error:
        DecoderConfig(**{**values, **change})
    assert "\n" not in str(error.value)


def test_smallest_float32_is_an_acceptable_epsilon():
    assert dataclasses.replace(GPT, norm_eps=2.0**-149).norm_eps == 2.0**-149


def test_unknown_and_missing_keys_are_refused():
    with pytest.raises(ConfigError, match="got n_layers"):
        DecoderConfig.from_dict({**GPT.to_dict(), "n_layers": 3})
    with pytest.raises(ConfigError, match="layers must be given"):
        DecoderConfig.from_dict({key: value for key, value in GPT.to_dict().items() if key != "layers"})


@pytest.mark.parametrize("config", [GPT, LLAMA, QWEN3], ids=["gpt", "llama", "qwen3"])
def test_names_invert_and_errors_name_the_leaf(config):
    params = init(jax.random.key(0), config)
    flat = named(params, config)
    assert sum(array.size for array in flat.values()) == parameter_count(config)
    again = from_named(dict(reversed(flat.items())), config)
    assert not differences(params, again)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    name = "blocks.1.attention.key.weight"
    assert flat[name].shape == (config.kv_heads * config.head_dim, config.width)
    with pytest.raises(ShapeError, match=rf"{name} missing"):
        from_named({key: value for key, value in flat.items() if key != name}, config)
    with pytest.raises(ShapeError, match=r"got blocks.2.attention.key.weight"):
        from_named({**flat, "blocks.2.attention.key.weight": flat[name]}, config)
    with pytest.raises(ShapeError, match=rf"{name} must be"):
        from_named({**flat, name: flat[name].T[:-1]}, config)
    with pytest.raises(ShapeError, match=r"must share a dtype.*blocks.1.attention.key.weight is bfloat16"):
        from_named({**flat, name: flat[name].astype(jnp.bfloat16)}, config)


def test_reference_order_of_a_modern_block():
    names = [name for name in named(init(jax.random.key(0), QWEN3), QWEN3)]
    block = "attention_norm.scale attention.query.weight attention.key.weight attention.value.weight "
    block += "attention.output.weight attention.query_norm.scale attention.key_norm.scale feed_forward_norm.scale "
    block += "feed_forward.gate.weight feed_forward.up.weight feed_forward.down.weight"
    blocks = [f"blocks.{layer}.{part}" for layer in range(2) for part in block.split()]
    assert names == ["token_embedding.weight", *blocks, "final_norm.scale"]  # tied: no head


def test_spec_gives_everything_that_derives_from_it():
    leaf = spec(LLAMA)["blocks.attention.key.weight"]
    assert (leaf.shape, leaf.layer_shape, leaf.axes) == ((2, 16, 32), (16, 32), ("layers", "kv_out", "width"))
    assert leaf.decay and leaf.per_layer and leaf.initializer == "xavier_uniform"
    decayed = [name for name, keep in named_leaves(decay_mask(GPT)) if keep]
    assert sorted(decayed) == sorted(name for name in spec(GPT) if name.endswith("weight"))
    shapes = {name: struct.shape for name, struct in named_leaves(abstract(GPT, jnp.bfloat16))}
    assert shapes == {name: leaf.shape for name, leaf in spec(GPT).items()}
    axes = flatten(logical_axes(GPT), GPT)
    assert tuple(axes["blocks.feed_forward.project.weight"]) == ("layers", "width", "hidden")
    assert jax.tree.structure(logical_axes(GPT)) == jax.tree.structure(abstract(GPT))


def test_check_params_names_the_leaf():
    params = init(jax.random.key(0), GPT)
    check_params(params, GPT)
    check_params(abstract(GPT), GPT)
    with pytest.raises(ShapeError, match=r"final_norm.bias must be \[32\]"):
        check_params({**params, "final_norm": {**params["final_norm"], "bias": jnp.zeros((1, 32))}}, GPT)
    with pytest.raises(DTypeError, match=r"final_norm.bias must be floating"):
        check_params({**params, "final_norm": {**params["final_norm"], "bias": jnp.zeros(32, jnp.int32)}}, GPT)
    with pytest.raises(ShapeError, match=r"language_model_head.bias, language_model_head.weight"):
        check_params(params, dataclasses.replace(GPT, tie_embeddings=True, head_bias=False))
    with pytest.raises(ShapeError, match=r"position_embedding.weight missing"):
        check_params({key: value for key, value in params.items() if key != "position_embedding"}, GPT)


def test_init_draws_the_stated_distributions_from_one_stream_per_leaf():
    config = DecoderConfig(512, 64, 64, 4, 3, 256, head_bias=True)
    params = flatten(init(jax.random.key(1), config), config)
    again = flatten(init(jax.random.key(1), config), config)
    for name, leaf in spec(config).items():
        np.testing.assert_array_equal(params[name], again[name])
        values = np.asarray(params[name])
        if leaf.initializer in ("ones", "zeros"):
            np.testing.assert_array_equal(values, float(leaf.initializer == "ones"))
            continue
        rows, columns = leaf.layer_shape
        limit = np.sqrt(6 / (rows + columns)) if leaf.initializer == "xavier_uniform" else 1 / np.sqrt(columns)
        assert np.abs(values).max() <= limit and np.abs(values).max() > 0.98 * limit, name
        np.testing.assert_allclose(values.std(), limit / np.sqrt(3), rtol=0.02)
        if leaf.per_layer:
            assert not np.array_equal(values[0], values[1])
    # A deeper model with another vocabulary keeps the layers that it shares.
    other = dataclasses.replace(config, layers=4, vocab_size=300)
    deeper = flatten(init(jax.random.key(1), other), other)
    np.testing.assert_array_equal(deeper["blocks.attention.query.weight"][:3], params["blocks.attention.query.weight"])
    np.testing.assert_array_equal(deeper["position_embedding.weight"], params["position_embedding.weight"])


def test_reference_init_refuses_seeds_that_the_generator_has_not():
    for seed in (-1, 2**32, True, 1.5):
        with pytest.raises(ConfigError, match="seed must be an integer"):
            reference_init(GPT, seed)


PUBLISHED_COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "mistral-7b": 7_241_732_096,
    "llama3.2-1b": 1_235_814_400,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED_COUNTS.items())
def test_presets_have_the_published_parameter_counts(name, count):
    assert parameter_count(preset(name)) == count


def test_presets_take_overrides_and_refuse_what_is_not_there():
    tiny = preset("tiny")
    assert (tiny.layers, tiny.heads, tiny.width, tiny.hidden, tiny.head_bias) == (2, 2, 64, 256, False)
    assert preset("qwen3-0.6b", layers=2, vocab_size=99).layers == 2
    assert preset("gpt2", width=96).head_dim == 8  # derived after the override
    with pytest.raises(ConfigError, match="tiny, small"):
        preset("huge")
    with pytest.raises(ConfigError, match="got depth"):
        preset("tiny", depth=3)


def test_two_spellings_of_one_rope_type_must_agree():
    values = to_hf_config(LLAMA, family="llama")
    linear = {"factor": 2.0, "rope_theta": LLAMA.rope_theta}
    for spelling in ({"type": "linear"}, {"rope_type": "linear"}, {"type": "linear", "rope_type": "linear"}):
        read = from_hf_config({**values, "rope_scaling": {**linear, **spelling}, "rope_parameters": None})
        assert read.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ConfigError, match="type and rope_type must agree; got 'yarn' and 'linear'"):
        scaling = {**linear, "type": "yarn", "rope_type": "linear"}
        from_hf_config({**values, "rope_scaling": scaling, "rope_parameters": None})


def test_params_that_are_not_the_configurations_are_refused_with_a_remedy_that_exists():
    params = {**init(jax.random.key(0), GPT), "extra": jnp.ones(2)}
    with pytest.raises(ShapeError, match="got extra; remove or merge them, or use the configuration"):
        flatten(params, GPT)
