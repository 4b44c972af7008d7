"""Every published family beside Hugging Face transformers: small random models, imported and exported, no downloads."""

import dataclasses
import importlib.util
import json
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import bundle
from riftco.errors import ConfigError
from riftco.interchange import family_of, huggingface, to_published
from riftco.models import init, named, parameter_count, preset
from riftco.oracle.decoder import decoder_logits

os.environ.setdefault("HF_HUB_OFFLINE", "1")
MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"PARITY WITH TRANSFORMERS NOT CHECKED: {', '.join(MISSING)} missing; pip install 'riftco[parity]'",
    ),
]

TOLERANCE = 1e-4  # float32 logits of two independent implementations
GRADIENTS = 1e-4  # and of the gradients of their loss
SIZES = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56}
SIZES = {**SIZES, "max_position_embeddings": 64, "num_key_value_heads": 2, "initializer_range": 0.3}
GPT2 = {"vocab_size": 67, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
THETA = {"rope_type": "default", "rope_theta": 5e5}

MODELS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied-erf": ("GPT2", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 48}),
    "gpt2-odd-heads": ("GPT2", {**GPT2, "n_embd": 15, "n_head": 3, "n_inner": 22}),
    "llama": ("Llama", {**SIZES, "rope_parameters": THETA}),
    "smollm2": ("Llama", {**SIZES, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3,
                          "rope_parameters": THETA, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "llama-rope-llama3": ("Llama", {**SIZES, "rope_parameters": LLAMA3}),
    "llama-rope-yarn": ("Llama", {**SIZES, "rope_parameters": YARN}),
    "llama-rope-linear": ("Llama", {**SIZES, "rope_parameters": LINEAR}),
    "llama-biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral-window": ("Mistral", {**SIZES, "sliding_window": 5}),
    "mistral-no-window": ("Mistral", {**SIZES, "sliding_window": None, "head_dim": 6}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen2-window": ("Qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 12, "rope_parameters": THETA}),
    "qwen3-tied": ("Qwen3", {**SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3", {**SIZES, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_oracles():
    """The oracles' own deprecation warnings are not this project's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        yield


def random_model(kind: str, options: dict):
    """A transformers model with every parameter random: zero biases and unit scales would hide a swapped name."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    kind = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def their_logits(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def our_logits(params, config, tokens: np.ndarray) -> np.ndarray:
    from riftco.models import forward

    with jax.default_matmul_precision("highest"):
        return np.asarray(forward(params, jnp.asarray(tokens, jnp.int32), config))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 67, size=(2, 48))


@pytest.mark.parametrize("name", MODELS)
def test_imported_models_give_the_same_logits(name, tmp_path, tokens):
    model = random_model(*MODELS[name])
    expected = their_logits(model, tokens)
    model.save_pretrained(tmp_path / "theirs")
    loaded = huggingface.load(tmp_path / "theirs")
    assert parameter_count(loaded.config) == sum(parameter.numel() for parameter in model.parameters())
    assert expected.std() > 0.1
    np.testing.assert_allclose(our_logits(loaded.params, loaded.config, tokens), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_the_float64_oracle_gives_the_same_logits(name, tmp_path, tokens):
    """The NumPy twin is itself checked against an implementation that nobody here wrote."""
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path / "theirs")
    params, config, *_ = huggingface.load(tmp_path / "theirs")
    arrays = {key: np.asarray(array, np.float64) for key, array in named(params, config).items()}
    options = {field: getattr(config, field) for field in ("heads", "kv_heads", "norm", "mlp", "position", "norm_eps")}
    options |= {field: getattr(config, field) for field in ("rope_theta", "rope_scaling", "sliding_window")}
    ours = decoder_logits(arrays, tokens, tied=config.tie_embeddings, **options)
    np.testing.assert_allclose(ours, their_logits(model, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_exported_bundles_open_in_transformers(name, tmp_path, tokens):
    import transformers

    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path / "theirs")
    loaded = huggingface.load(tmp_path / "theirs")
    bundle.save(tmp_path / "ours", loaded.params, loaded.config, None, shard_bytes=20_000)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    if family_of(loaded.config) == MODELS[name][0].lower():
        assert type(again) is type(model)
    np.testing.assert_allclose(their_logits(again.eval(), tokens), their_logits(model, tokens), atol=TOLERANCE, rtol=0)
    for key, theirs in model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[key], theirs, err_msg=key)
    text = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert text["eos_token_id"] is None and again.generation_config.eos_token_id is None


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied-erf", "llama-rope-llama3", "llama-biases", "smollm2"])
def test_gradients_of_the_loss_are_those_of_torch(name, tmp_path, tokens):
    import torch

    import riftco
    from riftco import models

    model = random_model(*MODELS[name]).eval()
    model.save_pretrained(tmp_path / "theirs")
    params, config, *_ = huggingface.load(tmp_path / "theirs")
    given = torch.tensor(tokens)
    expected = model(given, labels=given).loss
    expected.backward()

    def loss(p):
        inputs, targets = (jnp.asarray(part, jnp.int32) for part in (tokens[:, :-1], tokens[:, 1:]))
        return models.loss(p, inputs, targets, dataclasses.replace(config, dropout=0.0))

    with jax.default_matmul_precision("highest"):
        value, grads = jax.jit(riftco.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, expected.item(), atol=GRADIENTS, rtol=0)
    ours = dict(to_published(named(grads, config), config, model.config.model_type))
    theirs = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    assert set(ours) == set(theirs) and max(np.abs(gradient).max() for gradient in theirs.values()) > 1e-2
    for key, gradient in theirs.items():
        np.testing.assert_allclose(ours[key], gradient, atol=GRADIENTS, rtol=0, err_msg=key)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shards_and_narrow_dtypes_are_read_as_they_were_written(dtype, tmp_path, tokens):
    import torch
    import transformers

    model = random_model(*MODELS["llama-tied"]).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    params, config, *_ = huggingface.load(tmp_path / "theirs")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    np.testing.assert_allclose(our_logits(params, config, tokens), their_logits(wide, tokens), atol=TOLERANCE, rtol=0)
    stored, *_ = huggingface.load(tmp_path / "theirs", dtype="stored")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stored)} == {dtype}
    bundle.save(tmp_path / "ours", stored, config, None, shard_bytes=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert str(again.dtype) == f"torch.{dtype}"
    for key, theirs in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], theirs), key


@pytest.mark.parametrize("name", ["llama-rope-llama3", "llama-rope-yarn", "llama-rope-linear", "qwen3"])
def test_older_spellings_of_rope_give_the_same_model(name, tmp_path, tokens):
    """What transformers 4 wrote: rope_theta beside rope_scaling."""
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path / "theirs")
    expected = huggingface.load(tmp_path / "theirs").config
    path = tmp_path / "theirs" / "config.json"
    values = json.loads(path.read_text())
    scaling = values.pop("rope_parameters")
    values["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    values["rope_scaling"] = None if scaling["type"] == "default" else scaling
    path.write_text(json.dumps(values))
    assert huggingface.load(tmp_path / "theirs").config == expected
    path.write_text(json.dumps({**values, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}))
    with pytest.raises(ConfigError, match="rope_theta must agree with rope_parameters"):
        huggingface.load(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_our_own_presets_open_in_transformers(name, tmp_path, tokens):
    import transformers

    config = preset(name, vocab_size=67)
    params = init(jax.random.key(3), config)
    bundle.save(tmp_path / "final", params, config, None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    np.testing.assert_allclose(our_logits(params, config, tokens), their_logits(theirs, tokens), atol=TOLERANCE, rtol=0)


def test_bundles_are_transformers_tokenizers_too(tmp_path):
    import transformers

    from riftco.tokenizers import BPETokenizer

    text = "The cat's naïve 猫 sat — twice!  On\r\nthe mat 🙂.\n"
    tokenizer = BPETokenizer.train(text.encode() * 3, vocab_size=300, pattern="gpt2", special_tokens=["<|endoftext|>"])
    config = preset("tiny", vocab_size=tokenizer.vocab_size)
    bundle.save(tmp_path / "final", init(jax.random.key(0), config), config, tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "final")
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(theirs(text)["input_ids"]) == text
