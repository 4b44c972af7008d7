"""GGUF: files that come back exactly, files of other programs, and files that mean harm."""

import functools

import gguf as library
import jax
import numpy as np
import pytest

from riftco import bundle, models
from riftco.errors import BundleError, ConfigError
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
    tokens, types = (reader.get_field(f"tokenizer.ggml.{key}").contents() for key in ("tokens", "token_type"))
    count = tokenizer_of().vocab_size
    assert len(tokens) == len(types) == config.vocab_size > count
    assert tokens[count - 2 : count + 1] == ["<|endoftext|>", "<|user|>", f"[PAD{count}]"]
    assert types == [1] * (count - 2) + [3] * 2 + [5] * (config.vocab_size - count)
    assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-2"
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


def dequantized(path):
    """{tensor name: float32 array}, all of it the `gguf` package's."""
    return {
        tensor.name: library.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        for tensor in library.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("type", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_type_is_what_the_package_reads(tmp_path, name, type):
    config, path = CONFIGS[name], tmp_path / "m.gguf"
    gguf.write(path, params_of(config), config, type=type)
    theirs, ours = dequantized(path), models.named(gguf.load(path).params, config)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in library.GGUFReader(path).tensors}
    head = "token_embd.weight" if config.tie_embeddings else "output.weight"
    for tensor, kind in kinds.items():
        small = theirs[tensor].ndim == 1 or tensor == "position_embd.weight"
        mixed = "Q8_0" if tensor == head and type in ("q4_0", "q4_1") else type.upper()
        assert kind == ("F32" if small else mixed), tensor
    assert library.GGUFReader(path).get_field("general.file_type").contents() == gguf.FILE_TYPES[type]
    for layer in range(config.layers):
        prefix, attention = f"blk.{layer}.", f"blocks.{layer}.attention."
        if name == "gpt2":
            fused = [ours[f"{attention}{part}.weight"] for part in ("query", "key", "value")]
            assert np.array_equal(np.concatenate(fused), theirs[f"{prefix}attn_qkv.weight"])
        else:
            for part, heads in (("query", config.heads), ("key", config.kv_heads)):
                rows = theirs[f"{prefix}attn_{part[0]}.weight"].reshape(heads, config.head_dim, -1)
                # Channels i and i + K/2 stand side by side.
                rows = np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1)
                assert np.array_equal(ours[f"{attention}{part}.weight"], rows.reshape(-1, config.width))
        assert np.array_equal(ours[f"{attention}output.weight"], theirs[f"{prefix}attn_output.weight"])
    assert np.array_equal(ours["token_embedding.weight"], theirs["token_embd.weight"])
    again, second = tmp_path / "again.gguf", gguf.load(path)
    gguf.write(again, second.params, config, type="f32")
    assert_equal(gguf.load(again).params, second.params, config)


def test_the_quantized_bytes_are_the_packages_and_rows_that_hold_no_whole_blocks_are_f16(tmp_path):
    config = DecoderConfig(**{**LLAMA, "width": 48, "hidden": 64})
    gguf.write(tmp_path / "m.gguf", params_of(config), config, type="q4_0")
    tensors = {tensor.name: tensor for tensor in library.GGUFReader(tmp_path / "m.gguf").tensors}
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == "F16"
    down = np.asarray(models.named(params_of(config), config)["blocks.0.feed_forward.down.weight"])
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "Q4_0"
    assert np.array_equal(
        tensors["blk.0.ffn_down.weight"].data, library.quantize(down, library.GGMLQuantizationType.Q4_0)
    )


def norm(x, scale, bias=None, eps=1e-5):
    if bias is None:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale + bias


def as_other_programs_run_it(path, ids):
    """Logits by the file's keys and tensors alone, in float64, as the architectures are defined outside riftco."""
    reader = library.GGUFReader(path)
    architecture = reader.get_field("general.architecture").contents()
    tensors = {name: array.astype(np.float64) for name, array in dequantized(path).items()}

    def key(name, default=None):
        field = reader.get_field(f"{architecture}.{name}")
        return default if field is None else field.contents()

    heads, groups = key("attention.head_count"), key("attention.head_count_kv")
    eps = key("attention.layer_norm_rms_epsilon") or key("attention.layer_norm_epsilon")
    width = key("attention.key_length", key("embedding_length") // heads)

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)

    def normed(x, name):
        return norm(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), eps)

    def rotated(x):
        if architecture == "gpt2":
            return x
        frequencies = key("rope.freq_base") ** (-np.arange(0, width, 2) / width) / key("rope.scaling.factor", 1.0)
        angles = np.arange(len(x))[:, None, None] * frequencies / tensors.get("rope_freqs.weight", 1.0)
        first, second = (x[..., 0::2], x[..., 1::2]) if architecture == "llama" else np.split(x, 2, -1)
        turned = first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)
        return np.stack(turned, -1).reshape(x.shape) if architecture == "llama" else np.concatenate(turned, -1)

    x = tensors["token_embd.weight"][ids]
    if architecture == "gpt2":
        x = x + tensors["position_embd.weight"][: len(ids)]
    for layer in range(key("block_count")):
        blk = f"blk.{layer}."
        y = normed(x, f"{blk}attn_norm")
        if architecture == "gpt2":
            q, k, v = np.split(linear(y, f"{blk}attn_qkv"), 3, -1)
        else:
            q, k, v = (linear(y, f"{blk}attn_{part}") for part in "qkv")
        q, k, v = (a.reshape(len(ids), n, width) for a, n in ((q, heads), (k, groups), (v, groups)))
        if f"{blk}attn_q_norm.weight" in tensors:
            q, k = normed(q, f"{blk}attn_q_norm"), normed(k, f"{blk}attn_k_norm")
        q, k, v = rotated(q), *(np.repeat(a, heads // groups, 1) for a in (rotated(k), v))
        scores = np.einsum("thk,shk->hts", q, k) / np.sqrt(width)
        scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,shk->thk", weights / weights.sum(-1, keepdims=True), v)
        x = x + linear(mixed.reshape(len(ids), -1), f"{blk}attn_output")
        y = normed(x, f"{blk}ffn_norm")
        if architecture == "gpt2":
            up = linear(y, f"{blk}ffn_up")
            hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        else:
            gate = linear(y, f"{blk}ffn_gate")
            hidden = gate / (1 + np.exp(-gate)) * linear(y, f"{blk}ffn_up")
        x = x + linear(hidden, f"{blk}ffn_down")
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    return normed(x, "output_norm") @ head.T


@pytest.mark.parametrize(
    ("name", "type"),
    [("gpt2", "q8_0"), ("llama tied, biases, llama3", "f32"), ("llama linear", "q4_1"), ("mistral", "bf16"),
     ("qwen2", "f16"), ("qwen3", "q8_0")],
)  # fmt: skip
def test_the_file_means_the_same_function_elsewhere(tmp_path, name, type):
    config, path = CONFIGS[name], tmp_path / "m.gguf"
    gguf.write(path, params_of(config), config, tokenizer_of(), type=type)
    ids = np.arange(3, 3 + 11 * 7, 7, dtype=np.int32)
    ours = np.asarray(logits_of(config)(gguf.load(path).params, ids[None]))[0]
    theirs = as_other_programs_run_it(path, ids)
    assert np.abs(ours - theirs).max() < 2e-4 * np.abs(theirs).max()
    if type == "f32":
        original = np.asarray(logits_of(config)(params_of(config), ids[None]))[0]
        assert np.array_equal(ours, original)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama tied, biases, llama3", "qwen3", "head bias", "unsplit"])
def test_a_bundle_comes_back_with_its_identity(tmp_path, name, dtype):
    config = NATIVE[name][0] if name in NATIVE else CONFIGS[name if name in CONFIGS else "llama"]
    tokenizer = BPETokenizer.train(TEXT, 270, 2, None, ["<|endoftext|>"]) if name == "unsplit" else tokenizer_of()
    settings = {"stage": "finetune", "parent": "a" * 64, "fingerprints": {"seed": 3}, "chat_template": TEMPLATE}
    params = params_of(config, dtype)
    identity = bundle.save(tmp_path / "a", params, config, tokenizer, generation={"top_k": 5}, **settings)
    source = bundle.load(tmp_path / "a")
    gguf.export(source, tmp_path / "m.gguf")
    lineage = gguf.read_lineage(tmp_path / "m.gguf")
    assert lineage == (identity, "finetune", "a" * 64, {"seed": 3}, True)
    assert gguf.to_bundle(tmp_path / "m.gguf", tmp_path / "b") == identity
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    gguf.export(source, tmp_path / "small.gguf", type="q8_0", name="small")
    gguf.to_bundle(tmp_path / "small.gguf", tmp_path / "c")
    manifest = bundle.load(tmp_path / "c").manifest
    assert (manifest["stage"], manifest["parent_artifact_id"]) == ("convert", identity)


def test_params_take_the_dtype_that_is_asked_for(tmp_path):
    config = CONFIGS["llama"]
    gguf.write(tmp_path / "m.gguf", params_of(config, "float16"), config, type="f16")
    for dtype, wanted in (("float32", "float32"), ("stored", "float16"), ("bfloat16", "bfloat16")):
        leaves = models.flatten(gguf.load(tmp_path / "m.gguf", dtype=dtype).params, config).values()
        assert {str(leaf.dtype) for leaf in leaves} == {wanted}
    assert gguf.read_lineage(tmp_path / "m.gguf").is_exact
    assert_equal(gguf.load(tmp_path / "m.gguf", dtype="stored").params, params_of(config, "float16"), config)
    with pytest.raises(ConfigError, match="int8"):
        gguf.load(tmp_path / "m.gguf", dtype="int8")


def test_a_changed_file_is_noticed_and_a_requantized_one_is_not_ours_any_more(tmp_path):
    config, path = CONFIGS["llama"], tmp_path / "m.gguf"
    gguf.write(path, params_of(config), config, tokenizer_of(), type="f16")
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(BundleError, match="digest"):
        gguf.load(path)
    for old, new, named in [
        (b"llama.rope.freq_base\x06\0\0\0\0", b"llama.rope.freq_base\x06\0\0\0\1", "freq_base"),
        (b"llama.block_count\x04\0\0\0\2", b"llama.block_count\x04\0\0\0\1", "block_count"),
        ("Ġ t".encode(), "Ġ q".encode(), "riftco.tokenizer"),
        (b"pre\x08\0\0\0\x05\0\0\0\0\0\0\0gpt-2", b"pre\x08\0\0\0\x05\0\0\0\0\0\0\0qwen2", "pre must be"),
        (b"riftco.format_version\x04\0\0\0\1", b"riftco.format_version\x04\0\0\0\2", "format_version"),
        (b'{"bias":false', b'{"bias":maybe', "riftco.config"),
    ]:
        assert whole.count(old) >= 1, old
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(BundleError, match=named):
            gguf.load(path)
    gguf.write(path, params_of(config), config, tokenizer_of(), force=True)
    assert gguf.read_lineage(path).is_exact
    whole, old = path.read_bytes(), b"general.file_type\x04\0\0\0\0"
    path.write_bytes(whole.replace(old, old[:-1] + b"\2")[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    assert gguf.load(path).config == config and not gguf.read_lineage(path).is_exact


def test_writing_refuses_what_it_cannot_do_and_leaves_nothing(tmp_path):
    config, path = CONFIGS["gpt2"], tmp_path / "m.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(BundleError, match="must not exist"):
        gguf.write(path, params_of(config), config)
    gguf.write(path, params_of(config), config, force=True)
    assert gguf.load(path).tokenizer is None
    params = params_of(config)
    for value, type, named in [(np.nan, "f32", "finite"), (7e4, "f16", "F16"), (7e4, "q8_0", "Q8_0")]:
        changed = jax.tree.map(lambda leaf: leaf, params)
        changed["token_embedding"] = {"weight": params["token_embedding"]["weight"].at[5, 7].set(value)}
        with pytest.raises(BundleError, match=named):
            gguf.write(tmp_path / "bad.gguf", changed, config, type=type)
    gguf.write(tmp_path / "wide.gguf", changed, config, type="bf16")
    with pytest.raises(ConfigError, match="q2_k"):
        gguf.write(tmp_path / "bad.gguf", params, config, type="q2_k")
    with pytest.raises(BundleError, match="plain weights"):
        gguf.write(tmp_path / "bad.gguf", {**params, "lora": params["token_embedding"]}, config)
    with pytest.raises(BundleError, match="vocabulary"):
        gguf.write(tmp_path / "bad.gguf", params, config, BPETokenizer.train(TEXT, 310, 1, "gpt2"))
    with pytest.raises(BundleError, match="JSON"):
        gguf.write(tmp_path / "bad.gguf", params, config, generation={"x": object()})
    assert sorted(place.name for place in tmp_path.iterdir()) == ["m.gguf", "wide.gguf"]
