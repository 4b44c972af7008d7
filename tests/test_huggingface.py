"""Hugging Face directories: what is read, in which dtype, what is refused by its key, and the one door to all kinds."""

import json
import shutil
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from riftco import bundle, interchange, tokenizers
from riftco.errors import BundleError, ConfigError, DTypeError, RiftcoError, ShapeError, TokenizerError
from riftco.interchange import from_hf_config, huggingface, params_from_published, to_hf_config, to_published
from riftco.models import DecoderConfig, parameter_count
from riftco.models.families import config_keys, from_published
from riftco.models.names import from_named, named_spec
from riftco.tokenizers import BPETokenizer, chat

GPT2 = DecoderConfig(300, 16, 16, 2, 2, 24, tie_embeddings=True)
LLAMA = DecoderConfig(
    300, 16, 16, 4, 3, 24, kv_heads=2, norm="rms", mlp="swiglu", position="rope", rope_theta=5e5, tie_embeddings=True
)
MISTRAL = DecoderConfig(
    300, 16, 16, 4, 2, 24, kv_heads=2, norm="rms", mlp="swiglu", position="rope", rope_theta=5e5, sliding_window=4
)
QWEN2 = DecoderConfig(
    300, 16, 16, 4, 2, 24, kv_heads=2, norm="rms", mlp="swiglu", position="rope", rope_theta=5e5, qkv_bias=True
)
QWEN3 = DecoderConfig(
    300, 16, 16, 4, 2, 24, kv_heads=2, norm="rms", mlp="swiglu", position="rope", rope_theta=5e5, qk_norm=True
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
CHAT = [{"role": "user", "content": "the cat"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"


def flat(config, seed=0, dtype=np.float32):
    """Random arrays by dotted name: equal layers would hide a swapped one."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=leaf.layer_shape).astype(dtype) for name, (leaf, _) in named_spec(config).items()}


def tree_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert jax.tree.map(lambda x: x.dtype, left) == jax.tree.map(lambda x: x.dtype, right)


@pytest.fixture(scope="module")
def tokenizer():
    text = b"the cat sat on the mat, and the other cat sat on the other mat.\n" * 4
    special = ["<s>", "</s>"]
    roles = {"bos": "<s>", "eos": "</s>"}
    return BPETokenizer.train(text, vocab_size=300, pattern="gpt2", special_tokens=special, roles=roles)


@pytest.fixture
def directory(tmp_path, tokenizer):
    """What another program would have written: no riftco.json."""

    def make(config=LLAMA, *, dtype=np.float32, with_tokenizer=True, name="theirs", **fields):
        place = tmp_path / name
        place.mkdir()
        written = {**to_hf_config(config, dtype=jnp.dtype(dtype).name), **fields}
        (place / "config.json").write_text(json.dumps({k: v for k, v in written.items() if v != "ABSENT"}))
        save_file(dict(to_published(flat(config, dtype=dtype), config)), place / "model.safetensors")
        if with_tokenizer:
            tokenizer.save(place)
            (place / "tokenizer_config.json").write_text(json.dumps(tokenizer.tokenizer_config()))
        return place

    return make


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.tiny
@pytest.mark.parametrize(
    "config", [GPT2, LLAMA, MISTRAL, QWEN2, QWEN3], ids=["gpt2", "llama", "mistral", "qwen2", "qwen3"]
)
def test_streamed_params_are_the_named_ones(config):
    arrays = flat(config)
    published = dict(to_published(arrays, config))
    streamed = params_from_published(published, config)
    tree_equal(streamed, from_named(arrays, config))
    tree_equal(streamed, from_named(from_published(published, config), config))
    half = params_from_published(published, config, dtype="bfloat16")
    tree_equal(half, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), streamed))


def test_params_own_their_memory():
    """A step may donate them, and the arrays that they came from may change."""
    published = dict(to_published(flat(LLAMA), LLAMA))
    params = params_from_published(published, LLAMA)
    before = jax.tree.map(np.array, params)
    for array in published.values():
        array += 1
    tree_equal(params, jax.tree.map(jnp.asarray, before))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda p: jax.tree.map(lambda leaf: leaf * 2, p), donate_argnums=0)(params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


class Counting(dict):
    """Tensors that are made when they are asked for, and never twice."""

    def __init__(self, published):
        super().__init__(published)
        self.asked = []

    def __getitem__(self, name):
        self.asked.append(name)
        return np.array(super().__getitem__(name))

    def shape_of(self, name):
        return super().__getitem__(name).shape


def test_each_tensor_is_read_once_and_let_go():
    config = DecoderConfig(64, 16, 64, 4, 16, 256)
    tensors = Counting(to_published(flat(config), config))
    size = sum(array.nbytes for array in tensors.values())
    tracemalloc.start()  # of NumPy's memory; the params themselves are jax's
    params_from_published(tensors, config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(tensors.asked) == sorted(tensors)
    assert peak < 0.75 * size, f"{peak} bytes beside the params of {size}"


def test_tensors_that_do_not_fit():
    published = dict(to_published(flat(LLAMA), LLAMA))
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(ShapeError, match=rf"{norm} must be \[16\]; got \[17\]"):
        params_from_published({**published, norm: np.ones(17, np.float32)}, LLAMA)
    with pytest.raises(DTypeError, match=f"{norm} must be floating; got int8"):
        params_from_published({**published, norm: np.ones(16, np.int8)}, LLAMA)
    mixed = {**published, norm: np.ones(16, np.float16)}
    with pytest.raises(ShapeError, match=f"{norm} is float16, the first is float32"):
        params_from_published(mixed, LLAMA)
    assert jax.tree.leaves(params_from_published(mixed, LLAMA, dtype="float32"))[0].dtype == jnp.float32
    head = {"lm_head.weight": published["model.embed_tokens.weight"]}
    params_from_published({**published, **head}, LLAMA)
    params_from_published({**published, **head}, LLAMA, dtype="bfloat16")
    with pytest.raises(ShapeError, match=r"lm_head.weight must equal the embedding"):
        params_from_published({**published, "lm_head.weight": head["lm_head.weight"] + 1}, LLAMA)


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
def test_weights_load_as_float32_on_a_cpu_unless_asked_otherwise(directory, stored):
    place = directory(dtype=stored)
    stored = jnp.dtype(stored)
    arrays = flat(LLAMA, dtype=stored)
    exact = from_named(arrays, LLAMA)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), exact)
    tree_equal(huggingface.load(place).params, wide)
    tree_equal(interchange.load(place)[0], wide)
    tree_equal(huggingface.load(place, dtype="stored").params, exact)
    tree_equal(interchange.load(place, dtype="stored")[0], exact)
    half = interchange.load(place, dtype="bfloat16")[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16, float16 or stored; got 'int8'"):
        interchange.load(place, dtype="int8")


# ------------------------------------------------------------------------------------------------ refused keys

REFUSED = [
    # (family's form, field, value, what the message must say beside the key)
    (LLAMA, "model_type", "gemma3", "got 'gemma3'"),
    (LLAMA, "model_type", None, "must be one of"),
    (LLAMA, "model_type", ["llama"], "must be one of"),
    (LLAMA, "rope_parameters", {"rope_type": [], "rope_theta": 5e5}, "rope_type must be one of"),
    (GPT2, "activation_function", ["gelu_new"], "must be one of"),
    (LLAMA, "layer_types", [["full_attention"], {}], "layer_types must be 3 of"),
    (LLAMA, "architectures", ["LlamaForSequenceClassification"], "must name LlamaForCausalLM"),
    (LLAMA, "architectures", "LlamaForCausalLM", "must name LlamaForCausalLM"),
    (LLAMA, "quantization_config", {"bits": 4}, "dequantize"),
    (LLAMA, "dtype", "float16", "must agree"),
    (LLAMA, "hidden_size", "ABSENT", "must be given"),
    (LLAMA, "hidden_size", "16", "must be an integer"),
    (LLAMA, "hidden_size", 16.0, "must be an integer"),
    (LLAMA, "num_hidden_layers", True, "must be an integer"),
    (LLAMA, "num_hidden_layers", -1, "at least 1"),
    (LLAMA, "vocab_size", None, "must be given"),
    (LLAMA, "vocab_size", 1 << 40, "at most 2\\*\\*32"),
    (LLAMA, "num_attention_heads", 3, "num_attention_heads must be a multiple of num_key_value_heads"),
    (LLAMA, "num_key_value_heads", 3, "multiple of num_key_value_heads"),
    (LLAMA, "head_dim", 5, "must be even"),
    (LLAMA, "hidden_act", "gelu", "must be 'silu'"),
    (LLAMA, "rms_norm_eps", "small", "must be a finite number"),
    (LLAMA, "rms_norm_eps", 0.0, "finite and positive"),
    (LLAMA, "attention_dropout", 1.5, "\\[0, 1\\)"),
    (LLAMA, "tie_word_embeddings", "yes", "true or false"),
    (LLAMA, "attention_bias", True, "must be equal"),
    (LLAMA, "mlp_bias", True, "must be equal"),
    (LLAMA, "rope_theta", 1e4, "must agree"),
    (LLAMA, "rope_theta", "1e4", "positive finite"),
    (LLAMA, "rope_scaling", "linear", "must be an object"),
    (LLAMA, "rope_scaling", {"type": "linear", "factor": 2.0}, "must agree"),
    (LLAMA, "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
    (LLAMA, "rope_parameters", {"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
    (LLAMA, "rope_parameters", {"rope_type": "mrope", "mrope_section": [1]}, "rope_type must be one of"),
    (LLAMA, "rope_parameters", {"rope_type": "linear"}, "needs factor"),
    (LLAMA, "rope_parameters", {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "no parameter beta_fast"),
    (LLAMA, "rope_parameters", {"full_attention": {"rope_type": "default"}}, "no parameter full_attention"),
    (LLAMA, "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, "partial_rotary_factor", 0.25, "which this decoder has not"),
    (LLAMA, "rope_interleaved", True, "which this decoder has not"),
    (LLAMA, "sliding_window", 4, "sees the whole context"),
    (LLAMA, "layer_types", ["sliding_attention"] * 3, "must be off for a llama"),
    (LLAMA, "layer_types", ["full_attention"] * 2, "must be 3 of full_attention"),
    (LLAMA, "layer_types", ["linear_attention"] * 3, "must be 3 of full_attention"),
    (LLAMA, "auto_map", {"AutoModelForCausalLM": "modeling.Mine"}, "is not understood"),
    (LLAMA, "attn_logit_softcapping", 50.0, "is not understood"),
    (LLAMA, "num_local_experts", 8, "is not understood"),
    (LLAMA, "logits_scaling", 2.0, "is not understood"),
    (LLAMA, "residual_multiplier", 0.5, "is not understood"),
    (LLAMA, "embedding_multiplier", 12, "is not understood"),
    (LLAMA, "hidden_activation", "silu", "is not understood"),
    (LLAMA, "no_rope_layers", [1, 0], "is not understood"),
    (LLAMA, "is_encoder_decoder", True, "which this decoder has not"),
    (LLAMA, "pruned_heads", {"0": [1]}, "which this decoder has not"),
    (MISTRAL, "sliding_window", "4", "must be an integer"),
    (MISTRAL, "layer_types", ["sliding_attention", "full_attention"], "sliding_attention throughout"),
    (MISTRAL, "attention_bias", True, "which this decoder has not"),
    (QWEN2, "use_mrope", True, "which this decoder has not"),
    (QWEN2, "use_sliding_window", 1, "true or false"),
    (QWEN2, "layer_types", ["sliding_attention"] * 2, "full_attention throughout"),
    (QWEN2, "dual_chunk_attention_config", {"chunk_size": 8}, "is not understood"),
    (QWEN3, "attention_bias", True, "which this decoder has not"),
    (QWEN3, "decoder_sparse_step", 1, "is not understood"),
    (GPT2, "activation_function", "relu", "must be one of"),
    (GPT2, "scale_attn_weights", False, "which this decoder has not"),
    (GPT2, "scale_attn_by_inverse_layer_idx", True, "which this decoder has not"),
    (GPT2, "add_cross_attention", True, "which this decoder has not"),
    (GPT2, "n_embd", 15, "n_embd must be a multiple of n_head"),
    (GPT2, "hidden_size", 32, "must agree"),
    (GPT2, "layer_norm_epsilon", -1e-5, "finite and positive"),
    (GPT2, "embd_pdrop", "none", "must be a finite number"),
    (GPT2, "rotary_dim", 4, "is not understood"),
    (GPT2, "multi_query", True, "is not understood"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "key", "value", "message"), REFUSED, ids=[f"{key}={str(value)[:18]}" for _, key, value, _ in REFUSED]
)
def test_a_refused_configuration_names_the_key(config, key, value, message):
    written = {**to_hf_config(config), key: value}
    with pytest.raises(ConfigError, match=message) as caught:
        from_hf_config({name: given for name, given in written.items() if given != "ABSENT"})
    assert key in str(caught.value) and str(caught.value).startswith("config.json: ")


def test_keys_that_change_nothing_are_passed_over():
    noise = {key: object() for key in config_keys.HARMLESS} | {"anything": None, "auto_map": None}
    assert from_hf_config({**to_hf_config(LLAMA), **noise, "rope_interleaved": False, "pruned_heads": {}}) == LLAMA
    extra = dict.fromkeys(config_keys.HARMLESS_IN["gpt2"], 7)
    assert from_hf_config({**to_hf_config(GPT2), **noise, **extra, "scale_attn_weights": True}) == GPT2


def test_older_and_bare_forms_are_read():
    bare = {**to_hf_config(LLAMA), "architectures": ["LlamaModel"], "sliding_window": 4, "use_sliding_window": False}
    assert from_hf_config(bare) == LLAMA
    aliased = to_hf_config(GPT2)
    for old, new in (("n_embd", "hidden_size"), ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")):
        aliased[new] = aliased.pop(old)
    assert from_hf_config({**aliased, "n_inner": 24, "architectures": None}) == GPT2
    windowed = {**to_hf_config(QWEN2), "layer_types": None, "use_sliding_window": True, "sliding_window": 4}
    assert from_hf_config({**windowed, "max_window_layers": 0}).sliding_window == 4
    assert from_hf_config({**windowed, "max_window_layers": 2}).sliding_window is None
    with pytest.raises(ConfigError, match=r"layer_types .or max_window_layers. mix them"):
        from_hf_config({**windowed, "max_window_layers": 1})
    yarn = from_hf_config({**to_hf_config(LLAMA), "rope_scaling": None, "rope_theta": None, "rope_parameters": YARN})
    assert yarn.rope_scaling["rope_type"] == "yarn" and yarn.rope_theta == 1e4


# ------------------------------------------------------------------------------------------------ directories


def test_a_directory_is_read_with_everything_in_it(directory, tokenizer):
    place = directory()
    (place / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [1, 2]}))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    model = huggingface.load(place)
    assert model.config == LLAMA and model.generation == {"temperature": 0.5, "eos_token_id": [1, 2]}
    assert model.chat_template == TEMPLATE == model.tokenizer.chat_template
    assert model.tokenizer.encode("the cat</s>") == tokenizer.encode("the cat</s>")
    identity = huggingface.to_bundle(place, place.parent / "bundle")
    ours = bundle.load(place.parent / "bundle")
    assert ours.artifact_id == identity and ours.manifest["stage"] == "convert"
    assert (ours.config, ours.chat_template, ours.generation["eos_token_id"]) == (LLAMA, TEMPLATE, [1, 2])
    tree_equal(ours.params, model.params)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "old"}}, "old"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "t"},
                                                      {"name": "default", "template": "d"}]}}, "d"),
        ({"chat_template.json": {"chat_template": "j"}, "tokenizer_config.json": {"chat_template": "old"}}, "j"),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
    ids=["config", "named", "json", "none", "no files"],
)  # fmt: skip
def test_templates_are_found_where_they_were_kept(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert tokenizers.read_chat_template(tmp_path) == expected
    (tmp_path / "chat_template.jinja").write_text("new")
    assert tokenizers.read_chat_template(tmp_path) == "new"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff", "chat_template.jinja: it must be UTF-8"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: it must be UTF-8 text of its kind"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template must be text; got int"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "rag", "template": ""}]}', "named default; got rag"),
    ],
)
def test_damaged_templates_name_their_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        tokenizers.read_chat_template(tmp_path)


def test_a_directory_without_a_tokenizer_converts_with_a_warning(directory):
    place = directory(with_tokenizer=False)
    assert huggingface.load(place).tokenizer is None
    with pytest.warns(UserWarning, match="it has none; the model is converted without a tokenizer"):
        huggingface.to_bundle(place, place.parent / "a")
    (place / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.warns(UserWarning, match=r"it has tokenizer.model alone, which is not supported"):
        huggingface.to_bundle(place, place.parent / "b")
    with pytest.raises(TokenizerError, match=r"tokenizer.model: it must come with a tokenizer.json"):
        tokenizers.load(place)
    from riftco.cli import models

    with pytest.raises(BundleError, match=r"must have a tokenizer\.json"):
        models.load(str(place))
    assert models.load(str(place), needs_tokenizer=False).tokenizer is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "must contain config.json"),
        ("config.json", b"[]", "config.json: it must be a JSON object; got list"),
        ("config.json", b'{"model_type": "llama", "model_type": "gpt2"}', "'model_type' stands twice"),
        ("config.json", "long", "config.json: it must have at most 16777216 bytes"),
        ("config.json", b'{"model_type": "mamba"}', "theirs: config.json: model_type must be one of"),
        ("generation_config.json", b"{", "generation_config.json: it must be JSON"),
        ("model.safetensors", None, "must contain model.safetensors"),
        ("model.safetensors", b"\0" * 100, "model.safetensors: the header length must be"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
    ],
)
def test_damaged_files_are_named(directory, name, content, message):
    place = directory()
    content = b" " * (huggingface.MAX_JSON + 1) if content == "long" else content
    (place / name).unlink(missing_ok=True) if content is None else (place / name).write_bytes(content)
    with pytest.raises(RiftcoError, match=message):
        huggingface.load(place)


def test_a_vocabulary_larger_than_the_model_is_refused(directory):
    small = DecoderConfig(64, 16, 16, 4, 1, 24, norm="rms", mlp="swiglu", position="rope", rope_theta=5e5)
    with pytest.raises(BundleError, match="must fit the model's 64 rows; it has"):
        huggingface.load(directory(small))


# ------------------------------------------------------------------------------------------------ one door


def test_one_door_for_every_kind(directory, tokenizer, tmp_path):
    place = directory()
    saved = tmp_path / "run" / "final"
    params = from_named(flat(LLAMA), LLAMA)
    bundle.save(saved, params, LLAMA, tokenizer, chat_template=TEMPLATE)
    for path in (place, saved, tmp_path / "run", str(saved)):
        loaded, config = interchange.load(path)
        assert config == LLAMA
        tree_equal(loaded, params)
        assert tokenizers.load(path).decode(tokenizers.load(path).encode("the mat")) == "the mat"
    assert interchange.load_model(saved).chat_template == TEMPLATE
    ids = tokenizers.load(tmp_path / "run").apply_chat_template(CHAT)
    assert ids == tokenizer.encode("<s>user: the cat\n") and ids.count(tokenizer.bos_id) == 1
    plain = tokenizers.load(place).apply_chat_template(CHAT, add_generation_prompt=True)
    assert tokenizer.decode(plain) == chat.render_text(CHAT, add_generation_prompt=True)
    assert tokenizers.load(place / "tokenizer.json") == tokenizer


def test_bundles_widen_too(tmp_path):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), from_named(flat(GPT2), GPT2))
    bundle.save(tmp_path / "half", half, GPT2, None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(interchange.load(tmp_path / "half")[0])} == {"float32"}
    tree_equal(interchange.load(tmp_path / "half", dtype="stored")[0], half)
    tree_equal(bundle.load(tmp_path / "half").params, half)


def test_weights_are_cast_as_they_are_written(tmp_path):
    params = from_named(flat(GPT2), GPT2)
    bundle.save(tmp_path / "half", params, GPT2, None, dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    tree_equal(bundle.load(tmp_path / "half").params, half)
    assert bundle.save(tmp_path / "again", half, GPT2, None) == bundle.load(tmp_path / "half").artifact_id
    large = jax.tree.map(lambda leaf: leaf * 1e6, params)
    with pytest.raises(RiftcoError, match=r"every weight must stay finite as float16; the largest is"):
        bundle.save(tmp_path / "large", large, GPT2, None, dtype="float16")
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda place: None, "must exist; it does not"),
        (lambda place: place.write_text("x"), "must be a directory or end in .gguf"),
        (
            lambda place: place.mkdir(),
            "holds neither riftco.json, config.json, final/, riftco_onnx.json nor one .gguf file",
        ),
        (lambda place: (place / "checkpoints").mkdir(parents=True), "a run that has not finished"),
    ],
    ids=["nothing", "file", "empty", "unfinished"],
)
def test_what_is_no_model_is_said(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(BundleError, match=message):
        interchange.load(tmp_path / "x")
    with pytest.raises(RiftcoError):
        tokenizers.load(tmp_path / "x")


def test_a_gguf_file_goes_through_the_same_door(tmp_path, tokenizer):
    gguf = pytest.importorskip("riftco.interchange.gguf")
    params = from_named(flat(LLAMA), LLAMA)
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "model.gguf"
    gguf.write(path, params, LLAMA, tokenizer, chat_template=TEMPLATE)
    for place in (path, path.parent):
        loaded, config = interchange.load(place)
        assert config == LLAMA
        tree_equal(loaded, params)
        assert tokenizers.load(place).apply_chat_template(CHAT) == tokenizer.encode("<s>user: the cat\n")
    from riftco.cli import models

    assert models.load(str(path)).config == LLAMA
    shutil.copy(path, path.parent / "second.gguf")
    with pytest.raises(BundleError, match=r"nor one \.gguf file"):
        interchange.load(path.parent)


def test_parameters_are_counted_once(directory):
    model = huggingface.load(directory())
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == parameter_count(LLAMA)
