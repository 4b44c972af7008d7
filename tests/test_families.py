"""Published configurations and tensor names, both ways, without the libraries that define them."""

import dataclasses

import jax
import numpy as np
import pytest

from riftco.errors import ConfigError, ShapeError
from riftco.interchange import (
    config_dtype,
    family_of,
    from_hf_config,
    from_published,
    published_names,
    to_hf_config,
    to_published,
)
from riftco.models import DecoderConfig, init, named, preset

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {**LLAMA3, "original_max_position_embeddings": 8}
LLAMA_FORM = {"kv_heads": 2, "norm": "rms", "mlp": "swiglu", "position": "rope", "rope_theta": 5e5}


def gpt(**more):
    return DecoderConfig(27, 16, 32, 4, 2, 48, **more)


def llama(**more):
    return DecoderConfig(27, 16, 32, 4, 2, 48, **{**LLAMA_FORM, **more})


EXPRESSIBLE = [
    ("gpt2", gpt()),
    ("gpt2", gpt(mlp="gelu_tanh", tie_embeddings=True, dropout=0.1)),
    ("llama", llama()),
    ("llama", llama(tie_embeddings=True, rope_scaling=LLAMA3)),
    ("llama", llama(rope_scaling={"rope_type": "yarn", "factor": 4.0})),
    ("llama", llama(rope_scaling={"rope_type": "linear", "factor": 2.0}, dropout=0.25)),
    ("llama", llama(bias=True)),
    ("llama", llama(head_dim=6)),
    ("mistral", llama(sliding_window=5)),
    ("mistral", DecoderConfig(27, 16, 30, 4, 2, 48, head_dim=8, **LLAMA_FORM)),
    ("qwen2", llama(qkv_bias=True)),
    ("qwen2", llama(qkv_bias=True, sliding_window=5, tie_embeddings=True)),
    ("qwen3", llama(qk_norm=True, head_dim=6)),
    ("qwen3", llama(qk_norm=True, sliding_window=7)),
    ("riftco", gpt(head_bias=True)),
    ("riftco", gpt(norm="rms")),
    ("riftco", gpt(sliding_window=3)),
    ("riftco", llama(norm="layer")),
    ("riftco", llama(qk_norm=True, qkv_bias=True, rope_scaling=LLAMA3, dropout=0.5, tie_embeddings=True)),
    ("riftco", llama(head_bias=True, tie_embeddings=True)),
]
IDS = [f"{family}-{index}" for index, (family, _) in enumerate(EXPRESSIBLE)]


@pytest.mark.tiny
@pytest.mark.parametrize(("family", "config"), EXPRESSIBLE, ids=IDS)
def test_configurations_survive(family, config):
    assert family_of(config) == family
    written = to_hf_config(config, dtype="bfloat16", eos_token_id=3)
    assert written["model_type"] == family
    assert (written["eos_token_id"], written["bos_token_id"], config_dtype(written)) == (3, None, "bfloat16")
    assert from_hf_config(written) == config


@pytest.mark.parametrize(("family", "config"), EXPRESSIBLE, ids=IDS)
def test_tensors_survive(family, config, rng):
    flat = {
        name: rng.normal(size=array.shape) for name, array in named(init(jax.random.key(0), config), config).items()
    }
    published = dict(to_published(flat, config))
    assert all(tensor.flags.c_contiguous for tensor in published.values())
    again = from_published(published, config)
    assert set(again) == set(flat)
    for name, array in flat.items():
        np.testing.assert_array_equal(again[name], array)


def test_every_preset_has_a_published_form():
    families = {name: family_of(preset(name)) for name in ("tiny", "base", "llama-tiny", "gpt2", "smollm2-135m")}
    assert families == {
        "tiny": "gpt2", "base": "gpt2", "llama-tiny": "llama", "gpt2": "gpt2", "smollm2-135m": "llama",
    }  # fmt: skip
    assert [family_of(preset(name)) for name in ("mistral-7b", "qwen2-0.5b", "qwen3-0.6b", "llama3.2-1b")] == [
        "mistral", "qwen2", "qwen3", "llama",
    ]  # fmt: skip


def test_gpt2_orientation_is_in_out_and_fused(rng):
    config = gpt()
    flat = {
        name: rng.normal(size=array.shape) for name, array in named(init(jax.random.key(0), config), config).items()
    }
    published = dict(to_published(flat, config))
    x = rng.normal(size=(3, 32))
    fused = x @ published["transformer.h.1.attn.c_attn.weight"] + published["transformer.h.1.attn.c_attn.bias"]
    for part, name in zip(np.split(fused, 3, axis=1), ("query", "key", "value"), strict=True):
        linear = f"blocks.1.attention.{name}"
        np.testing.assert_allclose(part, x @ flat[f"{linear}.weight"].T + flat[f"{linear}.bias"], atol=1e-12)
    assert published["transformer.h.0.mlp.c_fc.weight"].shape == (32, 48)


def test_published_names_are_one_to_one():
    names = published_names(llama(qk_norm=True))
    assert len(set(names.values())) == len(names)
    assert names["blocks.1.attention.key_norm.scale"] == "model.layers.1.self_attn.k_norm.weight"
    native = published_names(gpt(head_bias=True))
    assert all(name == published for name, published in native.items())


def test_a_collision_names_both(monkeypatch):
    from riftco.models.families import tensors

    monkeypatch.setitem(tensors._LLAMA_BLOCK, "attention.key", "self_attn.q_proj")
    with pytest.raises(
        ConfigError, match=r"blocks.0.attention.query.weight and blocks.0.attention.key.weight would both"
    ):
        published_names(llama())


def changed(config, **fields):
    written = to_hf_config(config)
    return {key: value for key, value in {**written, **fields}.items() if value != "ABSENT"}


REFUSED = [
    (changed(llama(), rope_theta=1e4), "rope_theta must agree"),
    (changed(llama(), rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling and rope_parameters must agree"),
    (changed(llama(), rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' is not supported"),
    (changed(llama(), dtype="float16"), "torch_dtype and dtype must agree"),
    (changed(llama(), hidden_act="gelu"), "hidden_act must be 'silu'"),
    (changed(llama(), attention_bias=True), "attention_bias and mlp_bias must be equal"),
    (changed(llama(), partial_rotary_factor=0.5), "partial_rotary_factor must be 1.0"),
    (changed(llama(), hidden_size="ABSENT"), "hidden_size must be given"),
    (changed(llama(), model_type="mamba"), "model_type must be one of"),
    (changed(llama(), quantization_config={"bits": 4}), "got quantization_config"),
    (changed(llama(qkv_bias=True, sliding_window=4), layer_types=["full_attention", "sliding_attention"]), "mix them"),
    (changed(llama(qk_norm=True), attention_bias=True), "attention_bias must be False"),
    (changed(gpt(), activation_function="relu"), "activation_function must be one of"),
    (changed(gpt(), scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx must be False"),
    (changed(gpt(head_bias=True), n_layers=3), "got n_layers"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_files_that_disagree_or_cannot_be_expressed_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        from_hf_config(values)


def test_either_spelling_of_the_base_is_read():
    config = llama(rope_scaling=LLAMA3)
    assert from_hf_config(changed(config, rope_theta="ABSENT", rope_scaling="ABSENT")) == config
    assert from_hf_config(changed(config, rope_parameters="ABSENT")) == config
    with pytest.warns(UserWarning, match="no rope_theta"):
        plain = from_hf_config(changed(llama(), rope_theta="ABSENT", rope_parameters="ABSENT"))
    assert plain.rope_theta == 1e4


def test_uneven_dropout_is_said_aloud():
    with pytest.warns(UserWarning, match="dropout 0 is used"):
        assert from_hf_config(changed(gpt(dropout=0.1), attn_pdrop=0.0)).dropout == 0.0


def test_a_family_that_cannot_say_it_gives_the_reason():
    with pytest.raises(ConfigError, match="llama attends to the whole context"):
        to_hf_config(llama(sliding_window=4), family="llama")
    with pytest.raises(ConfigError, match="must be one of gpt2"):
        to_hf_config(gpt(), family="bert")
    assert to_hf_config(llama(), family="mistral")["model_type"] == "mistral"


def test_stored_forms_of_tied_and_prefixless_models(rng):
    config = llama(tie_embeddings=True)
    flat = {
        name: rng.normal(size=array.shape) for name, array in named(init(jax.random.key(0), config), config).items()
    }
    published = dict(to_published(flat, config))
    assert "lm_head.weight" not in published
    from_published({**published, "lm_head.weight": published["model.embed_tokens.weight"]}, config)
    with pytest.raises(ShapeError, match=r"lm_head.weight must equal the embedding"):
        from_published({**published, "lm_head.weight": published["model.embed_tokens.weight"] + 1}, config)
    bare = {name.removeprefix("model."): tensor for name, tensor in published.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)
    np.testing.assert_array_equal(
        from_published(bare, config)["blocks.1.attention.key.weight"], flat["blocks.1.attention.key.weight"]
    )
    with pytest.raises(ShapeError, match=r"model.norm.weight and norm.weight are the same"):
        from_published({**published, "norm.weight": published["model.norm.weight"]}, config)
    untied = dataclasses.replace(config, tie_embeddings=False)
    with pytest.raises(ShapeError, match=r"lm_head.weight missing"):
        from_published(published, untied)
    with pytest.raises(ShapeError, match=r"got model.layers.0.self_attn.q_proj.lora_A.weight"):
        from_published({**published, "model.layers.0.self_attn.q_proj.lora_A.weight": np.ones(1)}, config)
    with pytest.raises(ShapeError, match=r"model.norm.weight must be \[32\]"):
        from_published({**published, "model.norm.weight": np.ones(31)}, config)


# The fields that decide the forward pass, as the released config.json files give them.
RELEASED = {
    "gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "vocab_size": 50257,
    },
    "smollm2-135m": {
        "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192, "mlp_bias": False,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49152,
    },
    "llama3.2-1b": {
        "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 131072, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_presets_are_the_released_configurations(name):
    assert from_hf_config(RELEASED[name]) == preset(name)
