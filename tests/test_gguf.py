"""GGUF: files that come back exactly, files of other programs, and files that mean harm."""

import functools
import json
import subprocess
import sys
import textwrap

import gguf as library
import jax
import numpy as np
import pytest

from riftco import bundle, models
from riftco.errors import BundleError, ConfigError, RiftcoError, ShapeError
from riftco.interchange import gguf
from riftco.models import DecoderConfig
from riftco.tokenizers import BPETokenizer, ByteTokenizer, Foreign

TEXT = "the quick brown fox jumps over the lazy dog 1234567890 it's they'll été 漢字 🦊 \n\t  x\r\n" * 6
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SIZE = {"vocab_size": 300, "context": 32, "width": 32, "heads": 4, "layers": 2, "hidden": 64}
LLAMA = {**SIZE, "norm": "rms", "mlp": "swiglu", "position": "rope"}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
CONFIGS = {
    "gpt2": DecoderConfig(**SIZE, mlp="gelu_tanh", tie_embeddings=True, dropout=0.1),
    "gpt2 untied": DecoderConfig(**SIZE, mlp="gelu_tanh", norm_eps=3e-6),
    "llama": DecoderConfig(**LLAMA, kv_heads=2, rope_theta=5e5),
    "llama tied, biases, llama3": DecoderConfig(
        **LLAMA, kv_heads=2, bias=True, tie_embeddings=True, rope_scaling=LLAMA3
    ),
    "llama linear": DecoderConfig(**LLAMA, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama yarn": DecoderConfig(**LLAMA, rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}),
    "mistral": DecoderConfig(**LLAMA, kv_heads=1, head_dim=10, sliding_window=32),
    "qwen2": DecoderConfig(**LLAMA, qkv_bias=True, kv_heads=2, norm_eps=1e-6),
    "qwen3": DecoderConfig(**LLAMA, qk_norm=True, head_dim=16, kv_heads=2, tie_embeddings=True),
}
NATIVE = {
    "head bias": (DecoderConfig(**SIZE, mlp="gelu_tanh", head_bias=True), "head bias"),
    "exact gelu": (DecoderConfig(**SIZE), "GELU"),
    "window": (DecoderConfig(**LLAMA, sliding_window=8), "whole context"),
    "yarn": (
        DecoderConfig(**LLAMA, rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}), "yarn"
    ),
}  # fmt: skip
ARCHITECTURE = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@functools.cache
def params_of(config, dtype="float32"):
    """Random values in every leaf, biases and scales too."""
    leaves = {}
    for index, (name, leaf) in enumerate(models.spec(config).items()):
        values = np.random.default_rng(index).normal(0.0, 0.3, leaf.shape) + (leaf.initializer == "ones")
        leaves[name] = jax.numpy.asarray(values, dtype)
    return models.unflatten(leaves)


@functools.cache
def tokenizer_of(pattern="gpt2"):
    return BPETokenizer.train(TEXT, 290, 2, pattern, ["<|endoftext|>", "<|user|>"], roles={"bos": "<|user|>"})


def assert_equal(left, right, config):
    ours, theirs = models.flatten(left, config), models.flatten(right, config)
    for name in ours:
        a, b = np.asarray(ours[name]), np.asarray(theirs[name])
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name


@functools.cache
def logits_of(config):
    return jax.jit(lambda params, ids: models.forward(params, ids, config))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_comes_back_bit_for_bit(tmp_path, name):
    config, path = CONFIGS[name], tmp_path / "model.gguf"
    settings = {"temperature": 0.7, "eos_token_id": [1, 2]}
    written = gguf.write(
        path, params_of(config), config, tokenizer_of(), chat_template=TEMPLATE, generation=settings, name="n"
    )
    assert written == (path, ARCHITECTURE[name.split()[0]], None)
    model = gguf.load(path)
    assert model.config == config and model.chat_template == TEMPLATE and model.generation == settings
    assert model.tokenizer == tokenizer_of() and model.tokenizer.chat_template == TEMPLATE
    assert_equal(model.params, params_of(config), config)
    reader = library.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == written.architecture
    assert {str(t.tensor_type.name) for t in reader.tensors} == {"F32"}
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == config.vocab_size
    again = tmp_path / "again.gguf"
    gguf.write(again, model.params, config, model.tokenizer, chat_template=TEMPLATE, generation=settings, name="n")
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", NATIVE)
def test_what_no_architecture_expresses_keeps_a_native_form(tmp_path, name):
    config, reason = NATIVE[name]
    written = gguf.write(tmp_path / "m.gguf", params_of(config), config, tokenizer_of())
    assert written.architecture == "riftco" and reason in (written.reason or "")
    model = gguf.load(tmp_path / "m.gguf")
    assert model.config == config and model.tokenizer == tokenizer_of()
    assert_equal(model.params, params_of(config), config)
    names = [tensor.name for tensor in library.GGUFReader(tmp_path / "m.gguf").tensors]
    assert names == list(models.named(params_of(config), config))


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (ByteTokenizer.train(TEXT), "byte tokenizer"),
        (BPETokenizer.train(TEXT, 270, 2), "split rule"),
        (BPETokenizer.train(TEXT, 270, 2, r"\w+|\W+"), "split rule"),
        (BPETokenizer.train(TEXT, 270, 2, "gpt2", ["Ġ"]), "same text"),
        (BPETokenizer([(0, 1, 2)], pattern="gpt2", foreign=Foreign({"a": 0, "b c": 1, "ab c": 2})), "space"),
        (
            BPETokenizer((), pattern="gpt2", foreign=Foreign({"a": 0, "b": 1, "ab": 2}, ignore_merges=True)),
            "ignore_merges",
        ),
    ],
)
def test_tokenizers_without_a_name_make_the_file_native(tmp_path, tokenizer, reason):
    config = CONFIGS["llama"]
    written = gguf.write(tmp_path / "m.gguf", params_of(config), config, tokenizer)
    assert written.architecture == "riftco" and reason in (written.reason or "")
    model = gguf.load(tmp_path / "m.gguf")
    assert model.tokenizer == tokenizer and model.tokenizer.encode("a") == tokenizer.encode("a")
    assert gguf.load_tokenizer(tmp_path / "m.gguf")[0] == tokenizer
    assert_equal(model.params, params_of(config), config)
