"""GGUF files that other programs wrote: every tensor type, every key, and their tokenizers."""

import json
import random
import unicodedata

import gguf as library
import numpy as np
import pytest
import tokenizers as peer

from riftco import models
from riftco.errors import ConfigError, RiftcoError, ShapeError, TokenizerError
from riftco.interchange import gguf
from riftco.tokenizers import BPETokenizer

WIDTH, HIDDEN, HEADS, GROUPS, LAYERS = 64, 96, 4, 2, 2
KEYS = {
    "context_length": 128, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": HIDDEN,
    "attention.head_count": HEADS, "attention.head_count_kv": GROUPS, "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 500000.0,
}  # fmt: skip
Types = library.GGMLQuantizationType


def shapes(width=WIDTH, hidden=HIDDEN, vocab=40, layers=LAYERS):
    """The tensors of a llama file, rows first."""
    kv = width // HEADS * GROUPS
    block = {
        "attn_norm": (width,), "attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width),
        "attn_output": (width, width), "ffn_norm": (width,), "ffn_gate": (hidden, width), "ffn_up": (hidden, width),
        "ffn_down": (width, hidden),
    }  # fmt: skip
    found = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    return found | {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in block.items()}


def random_tensors(wanted):
    return {
        name: np.random.default_rng(index).normal(0, 1, shape).astype(np.float32)
        for index, (name, shape) in enumerate(wanted.items())
    }


def foreign(path, *, keys=KEYS, tensors=None, architecture="llama", add=None):
    """A file as the `gguf` package writes it."""
    writer = library.GGUFWriter(path, architecture)
    for name, value in keys.items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                list: writer.add_array}[type(value)]  # fmt: skip
        kind(name if name.startswith(("general.", "split.", "tokenizer.")) else f"{architecture}.{name}", value)
    if add is not None:
        add(writer)
    for name, tensor in (random_tensors(shapes()) if tensors is None else tensors).items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_the_package_is_read_with_its_rows_in_order(tmp_path):
    tensors = random_tensors(shapes())
    model = gguf.load(foreign(tmp_path / "m.gguf", tensors=tensors))
    config = model.config
    assert (config.vocab_size, config.context, config.kv_heads, config.head_dim) == (40, 128, 2, 16)
    assert (config.norm_eps, config.rope_theta, config.tie_embeddings, config.bias) == (1e-6, 5e5, True, False)
    assert model.tokenizer is None and model.chat_template is None and model.generation == {}
    assert gguf.read_lineage(tmp_path / "m.gguf") is None
    named = models.named(model.params, config)
    query, stored = np.asarray(named["blocks.1.attention.query.weight"]), tensors["blk.1.attn_q.weight"]
    for row in range(WIDTH):
        head, channel = divmod(row, 16)
        pair, half = channel % 8, channel // 8
        assert np.array_equal(query[row], stored[head * 16 + 2 * pair + half])
    assert np.array_equal(named["blocks.0.attention.value.weight"], tensors["blk.0.attn_v.weight"])
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "old.gguf").write_bytes(data[:4] + b"\2" + data[5:])
    assert gguf.load(tmp_path / "old.gguf").config == config, "version 2 has the same layout"


SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # fmt: skip


@pytest.mark.parametrize("kind", [*SCALES, "BF16", "F16"])
def test_every_type_is_dequantized_as_the_package_does(tmp_path, kind, rng):
    wanted = shapes(256, 256, 300, 1)
    tensors = dict(random_tensors(wanted))
    if kind == "F16":
        tensors = {name: array.astype(np.float16) if array.ndim > 1 else array for name, array in tensors.items()}
    for name, shape in wanted.items() if kind != "F16" else ():
        if len(shape) == 1:
            continue
        if kind == "BF16":
            tensors[name] = (library.quantize(tensors[name], Types.BF16), Types.BF16)
            continue
        block, size = library.GGML_QUANT_SIZES[Types[kind]]
        blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
        for at in SCALES[kind]:
            blocks[:, at : at + 2] = rng.normal(0, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        tensors[name] = (blocks.reshape(shape[0], -1), Types[kind])
    keys = {**KEYS, "embedding_length": 256, "feed_forward_length": 256, "block_count": 1}
    model = gguf.load(foreign(tmp_path / "m.gguf", keys=keys, tensors=tensors))
    theirs = {
        t.name: library.dequantize(t.data, t.tensor_type) for t in library.GGUFReader(tmp_path / "m.gguf").tensors
    }
    ours = models.named(model.params, model.config)
    for name, theirs_name in [("token_embedding", "token_embd"), ("blocks.0.feed_forward.down", "blk.0.ffn_down"),
                              ("blocks.0.attention.value", "blk.0.attn_v")]:  # fmt: skip
        assert np.asarray(ours[f"{name}.weight"]).tobytes() == theirs[f"{theirs_name}.weight"].tobytes()


def llama3_factors(head_dim=16, theta=5e5, factor=32.0):
    """The table as it is computed where such files are made, from the released formula."""
    factors = []
    for wavelength in 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim):
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "rope_scaling", LINEAR),
        ({"rope.scaling.factor": 2.0}, "rope_scaling", LINEAR),
        ({"rope.scale_linear": 2.0}, "rope_scaling", LINEAR),
        ({"rope.scaling.type": "none"}, "rope_scaling", None),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"attention.sliding_window": 16}, "sliding_window", 16),
        ({"attention.sliding_window": 0}, "sliding_window", None),
        ({"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}, "head_dim", 16),
        ({"expert_count": 0, "attention.causal": True, "vocab_size": 40, "tensor_data_layout": "x"}, "bias", False),
        ({"general.type": "model", "split.count": 1, "general.license": "mit"}, "layers", 2),
        ({"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}, "kv_heads", 2),
    ],
)  # fmt: skip
def test_keys_that_change_the_function_are_understood(tmp_path, more, field, value):
    config = gguf.load(foreign(tmp_path / "m.gguf", keys={**KEYS, **more})).config
    assert getattr(config, field) == value


def test_llama_3_scaling_biases_and_heads_are_read_from_the_tensors(tmp_path):
    plain = random_tensors(shapes())
    tensors = {**plain, "rope_freqs.weight": llama3_factors()}
    config = gguf.load(foreign(tmp_path / "a.gguf", tensors=tensors)).config
    assert config.rope_scaling == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        tensors["rope_freqs.weight"] = llama3_factors() ** 1.1
        gguf.load(foreign(tmp_path / "b.gguf", tensors=tensors))
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        keys = {**KEYS, "rope.scaling.factor": 2.0}
        gguf.load(foreign(tmp_path / "c.gguf", keys=keys, tensors={**plain, "rope_freqs.weight": llama3_factors()}))

    for layer in range(LAYERS):
        plain |= {
            f"blk.{layer}.attn_{part}.bias": np.ones(n, np.float32) for part, n in (("q", 64), ("k", 32), ("v", 32))
        }
    config = gguf.load(foreign(tmp_path / "d.gguf", tensors=plain, architecture="qwen2")).config
    assert (config.qkv_bias, config.bias, config.tie_embeddings) == (True, False, True)
    plain["output.weight"] = plain["token_embd.weight"].copy()
    assert gguf.load(foreign(tmp_path / "e.gguf", tensors=plain, architecture="qwen2")).config.tie_embeddings
    plain["output.weight"][3, 5] += 1
    model = gguf.load(foreign(tmp_path / "f.gguf", tensors=plain, architecture="qwen2"))
    assert not model.config.tie_embeddings
    assert np.array_equal(model.params["language_model_head"]["weight"], plain["output.weight"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"expert_count": 8}, r"llama\.expert_count must be 0; got 8"),
        ({"attention.causal": False}, r"llama\.attention\.causal"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale"),
        ({"attention.scale": 0.5}, r"llama\.attention\.scale"),
        ({"some.novelty": 1}, r"llama\.some\.novelty is not understood"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count"),
        ({"rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log"),
        ({"attention.head_count_kv": [2, 4]}, r"llama\.attention\.head_count_kv must be one value for all"),
        ({"attention.head_count": "4"}, r"llama\.attention\.head_count must be an integer"),
        ({"attention.head_count": 0}, r"llama\.attention\.head_count"),
        ({"attention.head_count": 3}, "heads"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, r"rms_epsilon must be a finite float"),
        ({"block_count": 4_000_000_000}, r"llama\.block_count must be at most the number of tensors"),
        ({"vocab_size": 41}, r"llama\.vocab_size"),
        ({"context_length": True}, r"llama\.context_length"),
        ({"general.type": "adapter"}, r"general\.type"),
        ({"split.count": 3}, r"split\.count"),
    ],
)
def test_what_is_not_understood_is_refused_by_key(tmp_path, change, named):
    with pytest.raises(ConfigError, match=named):
        gguf.load(foreign(tmp_path / "m.gguf", keys={**KEYS, **change}))


@pytest.mark.parametrize("missing", ["context_length", "attention.head_count", "attention.layer_norm_rms_epsilon"])
def test_a_missing_key_is_named(tmp_path, missing):
    keys = {name: value for name, value in KEYS.items() if name != missing}
    with pytest.raises(ConfigError, match=f"llama.{missing} must be .*got none"):
        gguf.load(foreign(tmp_path / "m.gguf", keys=keys))


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"general\.architecture .*'mamba'"):
        gguf.load(foreign(tmp_path / "a.gguf", architecture="mamba"))
    tensors = random_tensors(shapes())
    for name, array, named in [
        ("rope_factors_long.weight", np.ones(8, np.float32), "rope_factors_long"),
        ("blk.0.ffn_gate_inp.weight", np.ones((8, 64), np.float32), "ffn_gate_inp"),
        ("output.bias", np.ones(40, np.float32), r"output\.bias"),
        ("blk.0.attn_q.weight", np.ones((32, 64), np.float32), r"blk\.0\.attn_q\.weight must be \[64, 64\]"),
        ("blk.1.ffn_up.weight", None, r"blk\.1\.ffn_up\.weight missing"),
        ("output_norm.weight", np.full(64, np.inf, np.float32), "finite"),
    ]:
        changed = {key: value for key, value in {**tensors, name: array}.items() if value is not None}
        with pytest.raises(RiftcoError, match=named):
            gguf.load(foreign(tmp_path / "b.gguf", tensors=changed))
    with pytest.raises(ConfigError, match=r"token_embd\.weight"):
        gguf.load(foreign(tmp_path / "c.gguf", tensors={"output_norm.weight": np.ones(64, np.float32)}))
    biased = {**tensors, "blk.0.attn_q.bias": np.ones(64, np.float32)}
    with pytest.raises(ShapeError, match=r"attn_k\.bias"):
        gguf.load(foreign(tmp_path / "d.gguf", tensors=biased))


_LINE = "The quick brown foxes' 12345 jumps; it's THEY'LL été naïve 漢字仮名 прювет 🦊🦊 a=b+c <tag> $9.99 \n\n\t"
CORPUS = 8 * (_LINE + "  def f(x):\r\n")
SPLITS = {
    "gpt-2": peer.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": peer.pre_tokenizers.Sequence(
        [peer.pre_tokenizers.Digits(individual_digits=True), peer.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REGEXES = {
    "llama-bpe": [rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"],
    "qwen2": [rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}|{_REST}"],
    "default": [
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ],
}
for _name, _stages in REGEXES.items():
    _steps = [peer.pre_tokenizers.Split(peer.Regex(stage), "isolated") for stage in _stages]
    SPLITS[_name] = peer.pre_tokenizers.Sequence([*_steps, peer.pre_tokenizers.ByteLevel(False, use_regex=False)])


def trained(pre):
    """A vocabulary as the `tokenizers` library trains it, without the bytes that the corpus lacks."""
    other = peer.Tokenizer(peer.models.BPE())
    other.pre_tokenizer = SPLITS[pre]
    special = ["<|begin|>", "<|end|>"]
    trainer = peer.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    other.train_from_iterator([CORPUS], trainer)
    return other


def vocabulary_keys(other, **more):
    document = json.loads(other.to_str())["model"]
    tokens = sorted(document["vocab"], key=document["vocab"].__getitem__)
    types = [3 if index < 2 else 1 for index in range(len(tokens))]
    merges = [" ".join(pair) for pair in document["merges"]]
    keys = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges}
    keys |= {"bos_token_id": 0, "eos_token_id": 1}
    return {f"tokenizer.ggml.{name}": value for name, value in (keys | more).items() if value is not None}


def mixed_text(size, seed=0):
    """Words of the corpus, and characters from everywhere."""
    choose = random.Random(seed)
    words = CORPUS.split(" ")
    parts = []
    for _ in range(size):
        kind = choose.random()
        if kind < 0.5:
            parts.append(choose.choice(words))
        elif kind < 0.7:
            parts.append("".join(choose.choices("abcXYZ0123456789 '.,!$=\n\r\t", k=choose.randrange(1, 9))))
        elif kind < 0.8:
            parts.append("<|end|>")
        else:
            # Old characters: of newer ones the tables may differ. C: controls, surrogates, unassigned.
            top = choose.choice((0x80, 0x800, 0x3000, 0xD800, 0x20000))
            drawn = [chr(choose.randrange(1, top)) for _ in range(4)]
            parts.append("".join(c for c in drawn if not unicodedata.ucd_3_2_0.category(c).startswith("C")) + "\0\x04")
    return " ".join(parts)


def peer_ids(other, text):
    return other.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", SPLITS)
def test_tokenizers_of_every_known_rule_give_the_librarys_ids(tmp_path, pre):
    other = trained(pre)
    if pre == "llama-bpe":
        # Such files use a token for a piece that is one even where the merges would not make it.
        vocabulary = other.get_vocab()
        vocabulary["Ġzzz"] = len(vocabulary)
        other.model = peer.models.BPE(vocab=vocabulary, merges=[], ignore_merges=True)
        other.add_special_tokens(["<|begin|>", "<|end|>"])
    keys = vocabulary_keys(other, pre=pre)
    count = len(keys["tokenizer.ggml.tokens"])
    path = foreign(tmp_path / "m.gguf", keys={**KEYS, **keys}, tensors=random_tensors(shapes(vocab=count)))
    tokenizer = gguf.load(path).tokenizer
    assert isinstance(tokenizer, BPETokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, count)
    assert tokenizer.encode("<|begin|>x<|end|>")[:1] == [0]
    text = mixed_text(3000)
    assert tokenizer.encode(text) == peer_ids(other, text)
    assert tokenizer.encode(" zzz the") == peer_ids(other, " zzz the")
    tokenizer.save(tmp_path)
    rewritten = peer.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert peer_ids(rewritten, text) == peer_ids(other, text)
    adds_bos = rewritten.encode("x").ids[0] == 0
    assert adds_bos == (pre == "llama-bpe"), "this name also says that a text begins with bos"
    # And out again as a file of ours: the same state.
    model = gguf.load(path)
    gguf.write(tmp_path / "n.gguf", model.params, model.config, model.tokenizer)
    assert gguf.load_tokenizer(tmp_path / "n.gguf")[0] == tokenizer
    theirs = library.GGUFReader(tmp_path / "n.gguf")
    for name, value in keys.items():
        assert theirs.get_field(name).contents() == value, name
    assert theirs.get_field("tokenizer.ggml.add_bos_token").contents() is adds_bos


def test_unused_ids_roles_and_sampling_defaults(tmp_path):
    other = trained("smollm")
    keys = vocabulary_keys(
        other, pre="smollm", eot_token_id=0, padding_token_id=1, add_bos_token=True, add_eos_token=True
    )
    count = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"] += ["[PAD7]", "<custom>"]
    keys["tokenizer.ggml.token_type"] += [5, 4]
    keys |= {
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
    }
    path = foreign(tmp_path / "m.gguf", keys={**KEYS, **keys}, tensors=random_tensors(shapes(vocab=count + 2)))
    model = gguf.load(path)
    tokenizer = model.tokenizer
    assert tokenizer.encode("<custom>", allow_special=False) == [count + 1], "user-defined tokens are text"
    assert tokenizer.special_tokens == {"<|begin|>": 0, "<|end|>": 1}
    with pytest.raises(TokenizerError, match="unused"):
        tokenizer.decode([count])
    assert model.generation == {
        "bos_token_id": 0,
        "eos_token_id": [1, 0],
        "pad_token_id": 1,
        "temperature": 0.7,
        "top_k": 20,
    }
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the <|end|>"}]) == tokenizer.encode(
        "the <|end|>"
    )
    tokenizer.save(tmp_path)
    rewritten = peer.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert rewritten.encode("the").ids == [0, *tokenizer.encode("the"), 1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre must be one of .*'deepseek-llm'"),
        ({"pre": None}, r"tokenizer\.ggml\.pre must be"),
        ({"model": "llama"}, r"tokenizer\.ggml\.model must be gpt2"),
        ({"add_space_prefix": True}, r"tokenizer\.ggml\.add_space_prefix"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"token_type": [1, 1]}, r"tokenizer\.ggml\.token_type"),
        ({"token_type": [9] * 400}, r"tokenizer\.ggml\.token_type"),
        ({"merges": ["a b c"]}, r"tokenizer\.ggml\.merges\[0\]"),
        ({"merges": ["q q"]}, r"tokenizer\.ggml\.merges\[0\]"),
        ({"eos_token_id": 400}, r"tokenizer\.ggml\.eos_token_id"),
        ({"add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token"),
    ],
)
def test_tokenizers_that_are_not_known_are_refused_by_key(tmp_path, change, named):
    keys = vocabulary_keys(trained("smollm"), **{"pre": "smollm", **change})
    path = foreign(tmp_path / "m.gguf", keys={**KEYS, **keys}, tensors=random_tensors(shapes(vocab=400)))
    with pytest.raises(TokenizerError, match=named):
        gguf.load_tokenizer(path)
    assert gguf.load(path, with_tokenizer=False).config.vocab_size == 400, "the weights alone can still be had"
