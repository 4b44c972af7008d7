"""ONNX graphs judged by ONNX's own checker and by ONNX Runtime, and read back bit for bit or refused."""

import functools
import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import bundle, tokenizers
from riftco.errors import BundleError, ConfigError, UnsupportedError
from riftco.interchange import huggingface, onnx_graph
from riftco.models import DecoderConfig, init, named
from riftco.oracle import decoder_logits

onnx = pytest.importorskip("onnx", reason="ONNX GRAPHS NOT CHECKED: onnx missing; pip install riftco")
runtime = pytest.importorskip(
    "onnxruntime", reason="ONNX GRAPHS NOT RUN: onnxruntime missing; pip install 'riftco[test]'"
)
runtime.set_default_logger_severity(4)  # a guard that fails is printed otherwise
Fail = (
    runtime.capi.onnxruntime_pybind11_state.Fail,
    runtime.capi.onnxruntime_pybind11_state.InvalidArgument,
    runtime.capi.onnxruntime_pybind11_state.RuntimeException,
)
TOLERANCE = 1e-4  # float32 logits of two implementations


def gpt(**more) -> DecoderConfig:
    return DecoderConfig(23, 24, 16, 4, 2, 28, **more)


def llama(**more) -> DecoderConfig:
    more = {"kv_heads": 2, "norm": "rms", "mlp": "swiglu", "position": "rope", **more}
    return DecoderConfig(23, 24, 16, 4, 2, 28, **more)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16
CONFIGS = {
    "gpt2": gpt(mlp="gelu_tanh", tie_embeddings=True),
    "native": gpt(head_bias=True, head_dim=3, kv_heads=2),
    "native-mixed": gpt(norm="rms", bias=True, qk_norm=True, position="rope", head_dim=6, sliding_window=4),
    "llama": llama(rope_theta=5e5, kv_heads=1),
    "llama-llama3": llama(rope_scaling=LLAMA3, tie_embeddings=True, bias=True),
    "llama-linear": llama(rope_scaling={"rope_type": "linear", "factor": 3.0}),
    "llama-yarn": llama(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}),
    "mistral": llama(sliding_window=5, norm_eps=1e-3),
    "qwen2": llama(qkv_bias=True, tie_embeddings=True, sliding_window=6),
    "qwen3": llama(qk_norm=True, head_dim=10),
}
OPSETS = (18, 23)
TOKENIZER = tokenizers.train("bpe", "low lower lowest slow", vocab_size=259)
SPOKEN = DecoderConfig.from_dict({**llama().to_dict(), "vocab_size": 261})
BYTES = tokenizers.train("byte", "lower")


@functools.cache
def params_of(config: DecoderConfig, dtype: str = "float32", gain: float = 1.0):
    """Every parameter random: zero biases and unit scales would hide a swapped name."""
    rng = np.random.default_rng(7)
    noisy = lambda leaf: gain * np.asarray(leaf) + rng.normal(0, 0.1, leaf.shape).astype(np.float32)
    return jax.tree.map(lambda leaf: jnp.asarray(noisy(leaf)).astype(dtype), init(jax.random.key(0), config))


def model_of(config: DecoderConfig, tokenizer=None, gain: float = 1.0) -> huggingface.Model:
    return huggingface.Model(params_of(config, gain=gain), config, tokenizer, {}, None)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(config, opset, gain) -> a directory, written once."""

    @functools.cache
    def write(config: DecoderConfig, opset: int, gain: float = 1.0) -> Path:
        place = tmp_path_factory.mktemp("onnx") / "model"
        onnx_graph.export(model_of(config, gain=gain), place, opset=opset)
        return place

    return write


@functools.cache
def session(path: Path, optimize: bool = True):
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def prefill(place: Path, ids, mask=None, **options) -> list[np.ndarray]:
    ids = np.asarray(ids, np.int64)
    mask = np.ones_like(ids) if mask is None else np.asarray(mask, np.int64)
    return session(place / "prefill.onnx", **options).run(None, {"input_ids": ids, "attention_mask": mask})


def decode(place: Path, ids, mask, cache: list[np.ndarray], **options) -> list[np.ndarray]:
    feed = {"input_ids": np.asarray(ids, np.int64), "attention_mask": np.asarray(mask, np.int64)}
    for index, array in enumerate(cache):
        feed[f"past_key_values.{index // 2}.{('key', 'value')[index % 2]}"] = array
    return session(place / "decode.onnx", **options).run(None, feed)


def expected_logits(config: DecoderConfig, ids: np.ndarray) -> np.ndarray:
    arrays = {name: np.asarray(array, np.float64) for name, array in named(params_of(config), config).items()}
    fields = ("heads", "kv_heads", "norm", "mlp", "position", "norm_eps", "rope_theta", "rope_scaling")
    options = {name: getattr(config, name) for name in (*fields, "sliding_window")}
    return decoder_logits(arrays, ids, tied=config.tie_embeddings, **options)


# ------------------------------------------------------------------------------------------------ the graphs


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_are_valid_and_give_the_logits_of_the_model(name, opset, exported):
    config = CONFIGS[name]
    place = exported(config, opset)
    for kind in ("prefill", "decode"):
        path = place / f"{kind}.onnx"
        onnx.checker.check_model(str(path), full_check=True)
        proto = onnx.load(str(path))
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
        assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", opset)]
        # The file is what the library would write for the same model.
        assert proto.SerializeToString(deterministic=True) == path.read_bytes()
        names = [tensor.name for tensor in proto.graph.initializer]
        assert len(set(names)) == len(names)
        assert {*named(params_of(config), config)} <= {*names}
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, config.context))
    expected = expected_logits(config, ids)
    assert expected.std() > 0.1
    whole, *_ = prefill(place, ids)
    np.testing.assert_allclose(whole, expected, atol=TOLERANCE, rtol=0)
    # One token, then several at once, on top of a prompt: the same again.
    first, *cache = prefill(place, ids[:, :9])
    second, *cache = decode(place, ids[:, 9:10], np.ones((2, 10)), cache)
    third, *cache = decode(place, ids[:, 10:], np.ones_like(ids), cache)
    assert cache[0].shape == (2, config.kv_heads, config.context, config.head_dim)
    joined = np.concatenate([first, second, third], 1)
    np.testing.assert_allclose(joined, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", ["learned", "rotary"])
def test_greedy_tokens_are_the_models_own(name, opset, exported):
    config = gpt() if name == "learned" else llama(sliding_window=7, qk_norm=True)
    config = DecoderConfig.from_dict({**config.to_dict(), "context": 70})
    prompt, gain = [3, 1, 4, 1, 5], 3.0  # a larger gain makes less monotonous text
    wanted = riftco.generate(params_of(config, gain=gain), config, prompt, max_tokens=65, temperature=0)
    assert len(set(wanted)) > 2
    place = exported(config, opset, gain)
    logits, *cache = prefill(place, [prompt])
    found = [int(logits[0, -1].argmax())]
    for _ in range(64):
        mask = np.ones((1, len(prompt) + len(found)))
        logits, *cache = decode(place, [found[-1:]], mask, cache)
        found.append(int(logits[0, -1].argmax()))
    assert found == wanted


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3"])
def test_padding_on_either_side_changes_nothing(name, opset, exported):
    config = CONFIGS[name]
    place = exported(config, opset)
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, 23, count) for count in (9, 4, 6)]
    following = rng.integers(0, 23, (4, 2))
    ids, mask = rng.integers(0, 23, (4, 10)), np.zeros((4, 10), np.int64)
    spans = [slice(1, 10), slice(6, 10), slice(0, 6)]  # left, left, right; the last row is all padding
    for row, span, own in zip(range(3), spans, rows, strict=True):
        ids[row, span], mask[row, span] = own, 1
    logits, *cache = prefill(place, ids, mask)
    assert np.isfinite(logits).all()
    joined_mask = np.concatenate([mask, np.ones_like(following)], 1)
    joined_mask[3] = 0
    more, *_ = decode(place, following, joined_mask, cache)
    assert np.isfinite(more).all()
    for row, span, own in zip(range(3), spans, rows, strict=True):
        alone, *own_cache = prefill(place, own[None])
        np.testing.assert_allclose(logits[row, span], alone[0], atol=1e-5, rtol=0)
        alone, *_ = decode(place, following[row][None], np.ones((1, len(own) + 2)), own_cache)
        np.testing.assert_allclose(more[row], alone[0], atol=1e-5, rtol=0)


def test_what_padding_holds_is_not_seen(exported):
    place = exported(CONFIGS["mistral"], 23)
    ids, mask = np.arange(8)[None] % 23, np.array([[0, 0, 1, 1, 1, 0, 1, 1]])
    base, *cache = prefill(place, ids, mask)
    changed, *other = prefill(place, np.where(mask, ids, 22), mask)
    assert np.array_equal(base[mask == 1], changed[mask == 1])
    assert not np.array_equal(cache[0], other[0])


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("opset", OPSETS)
def test_input_that_the_model_does_not_take_fails(opset, optimize, exported):
    context, ones = 24, np.ones
    for name in ("gpt2", "llama"):
        place = exported(CONFIGS[name], opset)
        good = np.full((2, 5), 22)
        _, *cache = prefill(place, good, optimize=optimize)
        decode(place, good, ones((2, 10)), cache, optimize=optimize)
        prefill(place, ones((1, context)), optimize=optimize)
        wrong = {
            "negative id": (good - 23, None),
            "id = V": (good + 1, None),
            "no position": (good[:, :0], None),
            "no row": (good[:0], None),
            "too long": (ones((1, context + 1)), None),
            "mask of fewer rows": (good, ones((1, 5))),
            "mask of one column": (good, ones((2, 1))),
            "longer mask": (good, ones((2, 6))),
            "mask that is no mask": (good, 2 * ones((2, 5))),
            "negative mask": (good, -ones((2, 5))),
        }
        for what, (ids, mask) in wrong.items():
            with pytest.raises(Fail):
                pytest.fail(f"{name}: {what} gave {prefill(place, ids, mask, optimize=optimize)[0].shape}")
        short = [cache[0], cache[1], cache[2][:, :, :-1], cache[3]]
        gone = [*cache[:2], cache[2][:, :, :0], cache[3][:, :, :0]]
        no_keys = [*cache[:2], cache[2][:, :, :0], cache[3]]
        long_mask = ones((2, context + 1))
        long_cache = [np.zeros((2, a.shape[1], context, a.shape[3]), np.float32) for a in cache]
        wrong = {
            "id = V": (good + 1, ones((2, 10)), cache),
            "no position": (good[:, :0], ones((2, 5)), cache),
            "mask without the past": (good, ones((2, 5)), cache),
            "one layer's keys are short": (good, ones((2, 10)), short),
            "one layer has no past": (good[:, :1], ones((2, 6)), gone),
            "one layer has no past keys": (good[:, :1], ones((2, 6)), no_keys),
            "past of fewer rows": (good, ones((2, 10)), [a[:1] for a in cache]),
            "too long": (good[:, :1], long_mask, long_cache),
        }
        for what, (ids, mask, past) in wrong.items():
            with pytest.raises(Fail):
                pytest.fail(f"{name}: {what} gave {decode(place, ids, mask, past, optimize=optimize)[0].shape}")


@pytest.mark.parametrize("opset", OPSETS)
def test_the_guard_fails_by_itself(opset, exported):
    """Elsewhere than on a CPU an index out of range may be clamped, so nothing but the guard is run here."""
    proto = onnx.load(str(exported(CONFIGS["mistral"], opset) / "prefill.onnx"))
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("guard.factor", onnx.TensorProto.INT64, []))
    proto = onnx.utils.Extractor(proto).extract_model(["input_ids", "attention_mask"], ["guard.factor"])
    assert len(proto.graph.node) < 40
    guard = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(ids, mask) -> int:
        feed = {"input_ids": ids.astype(np.int64), "attention_mask": mask.astype(np.int64)}
        return guard.run(None, feed)[0]

    ids, mask = np.full((2, 24), 22), np.ones((2, 24))
    assert run(ids, mask) == 1 and run(ids * 0, mask * 0) == 1
    long = np.ones((2, 25))
    for wrong in (
        (ids + 1, mask), (ids - 23, mask), (ids, mask + 1), (ids, mask - 2), (long, long), (ids, mask[:1]),
        (ids, mask[:, :1]), (ids[:, :0], mask[:, :0]), (ids[:0], mask[:0]),
    ):  # fmt: skip
        with pytest.raises(Fail):
            pytest.fail(f"{[array.shape for array in wrong]} gave {run(*wrong)}")


def test_a_tied_weight_is_stored_once(exported):
    for name in ("gpt2", "llama"):
        config = CONFIGS[name]
        proto = onnx.load(str(exported(config, 23) / "decode.onnx"))
        tables = [t.name for t in proto.graph.initializer if list(t.dims) == [config.vocab_size, config.width]]
        heads = [] if config.tie_embeddings else ["language_model_head.weight"]
        assert tables == ["token_embedding.weight", *heads]
        assert sum("token_embedding.weight" in node.input for node in proto.graph.node) == 1 + config.tie_embeddings


def test_graphs_say_which_model_they_are(saved, tmp_path):
    identity, place = saved
    onnx_graph.export(bundle.load(place), tmp_path / "out")
    for kind in ("prefill", "decode"):
        proto = onnx.load(str(tmp_path / "out" / f"{kind}.onnx"))
        said = {entry.key: entry.value for entry in proto.metadata_props}
        assert said["riftco.artifact_id"] == identity and said["riftco.graph"] == kind
        assert said["riftco.tokenizer"] == TOKENIZER.fingerprint()
        assert DecoderConfig.from_dict(json.loads(said["riftco.config"])) == SPOKEN
        assert proto.producer_name == "riftco" and proto.ir_version == 11


def test_large_weights_have_a_file_of_their_own(tmp_path, exported):
    config = CONFIGS["qwen2"]
    model = model_of(config, BYTES)
    onnx_graph.export(model, tmp_path / "out", external_bytes=1000)
    path = tmp_path / "out" / "decode.onnx"
    assert path.stat().st_size < (exported(config, 23) / "decode.onnx").stat().st_size - 4 * 23 * 16
    for kind in ("prefill", "decode"):
        onnx.checker.check_model(str(tmp_path / "out" / f"{kind}.onnx"), full_check=True)
    ids = np.arange(10)[None]
    whole, *_ = prefill(tmp_path / "out", ids)
    assert np.array_equal(whole, prefill(exported(config, 23), ids)[0])
    _, *cache = prefill(tmp_path / "out", ids[:, :9])
    last, *_ = decode(tmp_path / "out", ids[:, 9:], np.ones((1, 10)), cache)
    np.testing.assert_allclose(last[:, 0], whole[:, 9], atol=1e-5)
    assert_same_tree(onnx_graph.load(tmp_path / "out").params, model.params)
    damage(tmp_path / "out" / "model.onnx_data", 5000)
    with pytest.raises(BundleError, match=r"model\.onnx_data"):
        onnx_graph.load(tmp_path / "out")


# ------------------------------------------------------------------------------------------------ there and back


def assert_same_tree(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), left, right)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def saved(tmp_path):
    """(artifact_id, place) of a bundle with everything that a bundle can have."""
    place = tmp_path / "bundle"
    identity = bundle.save(
        place,
        params_of(SPOKEN),
        SPOKEN,
        TOKENIZER,
        stage="finetune",
        parent="a" * 64,
        fingerprints={"data": "b" * 64},
        generation={"temperature": 0.5, "eos_token_id": [1, 2]},
        chat_template="{{ messages }}",
    )
    return identity, place


@pytest.mark.parametrize("opset", OPSETS)
def test_a_bundle_comes_back_with_its_identity(opset, saved, tmp_path):
    identity, place = saved
    files = onnx_graph.export(bundle.load(place), tmp_path / "out", opset=opset)
    assert {*files, onnx_graph.SIDECAR} == set(contents(tmp_path / "out"))
    assert files["tokenizer.json"] == hashlib.sha256((place / "tokenizer.json").read_bytes()).hexdigest()
    model = onnx_graph.load(tmp_path / "out")
    assert model.tokenizer.to_state() == TOKENIZER.to_state() and model.config == SPOKEN
    assert isinstance(model, huggingface.Model) and model._replace(generation={}).manifest is None
    assert model.manifest["artifact_id"] == identity and model.chat_template == "{{ messages }}"
    assert_same_tree(model.params, params_of(SPOKEN))
    assert onnx_graph.to_bundle(tmp_path / "out", tmp_path / "back") == identity
    assert contents(tmp_path / "back") == contents(place)
    # What was read exports to the same bytes.
    onnx_graph.export(model, tmp_path / "again", opset=opset)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["native", "qwen3"])
def test_native_forms_and_half_precision_come_back(name, dtype, tmp_path):
    config = CONFIGS[name]
    identity = bundle.save(tmp_path / "bundle", params_of(config, dtype), config, BYTES)
    onnx_graph.export(bundle.load(tmp_path / "bundle"), tmp_path / "out")
    params, _, tokenizer, generation, template = onnx_graph.load(tmp_path / "out")
    assert_same_tree(params, params_of(config, dtype))
    assert tokenizer == BYTES and generation == {} and template is None
    assert onnx_graph.to_bundle(tmp_path / "out", tmp_path / "back") == identity


def test_a_model_without_identity_has_none_afterwards(exported, tmp_path):
    model = onnx_graph.load(exported(CONFIGS["gpt2"], 18))
    assert model.manifest is None and model.tokenizer is None
    with pytest.raises(BundleError, match="artifact_id"):
        onnx_graph.to_bundle(exported(CONFIGS["gpt2"], 18), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_writing_and_reading_hold_a_tensor_at_a_time(tmp_path):
    config = DecoderConfig(64, 16, 64, 4, 24, 256, norm="rms", mlp="swiglu", position="rope")
    params = params_of(config)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    onnx_graph.export(model_of(config), tmp_path / "first")  # imports what is needed
    tracemalloc.start()
    onnx_graph.export(model_of(config), tmp_path / "second")
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    onnx_graph.load(tmp_path / "second")
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < 0.3 * size and read < 1.5 * size


# ------------------------------------------------------------------------------------------------ refusals


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rewrite(place: Path, change) -> None:
    """Change the sidecar, spelled as riftco spells it."""
    values = json.loads((place / onnx_graph.SIDECAR).read_bytes())
    change(values)
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (place / onnx_graph.SIDECAR).write_text(text)


def reseal(place: Path) -> None:
    """Give the sidecar the digests of the files as they are."""
    digest = lambda name: hashlib.sha256((place / name).read_bytes()).hexdigest()
    rewrite(place, lambda values: values.update(files={name: digest(name) for name in values["files"]}))


@pytest.fixture
def place(exported, tmp_path):
    """A copy to be spoiled."""
    return Path(shutil.copytree(exported(CONFIGS["qwen2"], 23), tmp_path / "copy"))


def edit(path: Path, change) -> None:
    proto = onnx.load(str(path))
    change(proto)
    path.write_bytes(proto.SerializeToString(deterministic=True))


def change_operator(proto):
    next(node for node in proto.graph.node if node.op_type == "Sigmoid").op_type = "HardSig"


def change_attribute(proto):
    node = next(node for node in proto.graph.node if node.op_type == "Attention")
    node.attribute[0].f += 1.0


def swap_inputs(proto):
    node = next(node for node in proto.graph.node if node.name == "blocks.1.attention.residual")
    node.input[0], node.input[1] = node.input[1], node.input[0]


def change_constant(proto):
    constant = next(tensor for tensor in proto.graph.initializer if tensor.name == "integer.22")
    constant.raw_data = np.array(99, np.int64).tobytes()


def rename_tensor(proto):
    next(tensor for tensor in proto.graph.initializer if tensor.name == "rope.sin").name = "rope.san"


def add_node(proto):
    proto.graph.node.append(onnx.helper.make_node("Identity", ["logits"], ["copy"]))


def drop_node(proto):
    proto.graph.node.pop(3)


def add_attribute(proto):
    proto.graph.node[-1].attribute.append(onnx.helper.make_attribute("allowzero", 1))


def change_metadata(proto):
    proto.metadata_props[0].value = "c" * 64


EDITS = {
    "operator": (change_operator, r"blocks\.0\.feed_forward\.sigmoid \(Sigmoid\)"),
    "attribute": (change_attribute, r"blocks\.0\.attention\.mixed \(Attention\)"),
    "inputs": (swap_inputs, r"blocks\.1\.attention\.residual"),
    "constant": (change_constant, r"the constant integer\.22"),
    "tensor name": (rename_tensor, r"rope\.sin"),
    "added node": (add_node, r"has \d+ bytes; .* and differs first in the graph's name"),
    "dropped node": (drop_node, r"differs first in the node guard\.mask_shape \(Shape\)"),
    "added attribute": (add_attribute, r"differs first in the node logits \(Reshape\)"),
    "metadata": (change_metadata, r"prefill\.onnx"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_graph_is_refused_even_with_its_digest(name, place):
    change, message = EDITS[name]
    edit(place / "prefill.onnx", change)
    with pytest.raises(BundleError):
        onnx_graph.load(place)
    reseal(place)
    with pytest.raises(BundleError, match=message):
        onnx_graph.load(place)


def test_weights_that_differ_between_the_graphs_are_refused(place):
    def change(proto):
        tensor = next(t for t in proto.graph.initializer if t.name == "final_norm.scale")
        tensor.raw_data = (np.frombuffer(tensor.raw_data, np.float32) + 1).tobytes()

    edit(place / "decode.onnx", change)
    with pytest.raises(BundleError, match=r"decode\.onnx: the tensor final_norm\.scale"):
        onnx_graph.load(place)
    edit(place / "prefill.onnx", change)
    with pytest.raises(BundleError, match=r"prefill\.onnx: its SHA-256"):
        onnx_graph.load(place)
    reseal(place)
    onnx_graph.load(place)


@pytest.mark.parametrize(
    ("name", "value"), [("token_embedding.weight", np.nan), ("rope.cos", 0.5), ("rope.cos", np.nan)]
)
def test_values_that_no_export_has_are_refused(name, value, place):
    def change(proto):
        tensor = next(t for t in proto.graph.initializer if t.name == name)
        tensor.raw_data = np.float32(value).tobytes() + tensor.raw_data[4:]

    for kind in ("prefill", "decode"):
        edit(place / f"{kind}.onnx", change)
    reseal(place)
    with pytest.raises(BundleError, match=name):
        onnx_graph.load(place)


def test_weights_finer_than_their_dtype_are_refused(place):
    rewrite(place, lambda values: values["dtypes"].update({"final_norm.scale": "bfloat16"}))
    with pytest.raises(BundleError, match=r"final_norm\.scale must hold bfloat16"):
        onnx_graph.load(place)


def test_a_changed_identity_is_refused(saved, tmp_path):
    _, source = saved
    onnx_graph.export(bundle.load(source), tmp_path / "out")
    for kind in ("prefill", "decode"):
        edit(tmp_path / "out" / f"{kind}.onnx", nudge_final_norm)
    reseal(tmp_path / "out")
    onnx_graph.load(tmp_path / "out")
    with pytest.raises(BundleError, match="must be the one of its artifact_id"):
        onnx_graph.to_bundle(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    rewrite(tmp_path / "out", lambda values: values["artifact"].update(stage="pretrain"))
    with pytest.raises(BundleError, match="artifact_id must be the digest"):
        onnx_graph.load(tmp_path / "out")


def nudge_final_norm(proto):
    tensor = next(t for t in proto.graph.initializer if t.name == "final_norm.scale")
    tensor.raw_data = (np.frombuffer(tensor.raw_data, np.float32) + 1).tobytes()


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.truncate(1 << 40)  # sparse: no such file is read


def test_files_of_another_size_are_refused(place):
    for name in ("prefill.onnx", "decode.onnx"):
        whole = (place / name).read_bytes()
        grow(place / name)
        with pytest.raises(
            BundleError, match=rf"{name}: what riftco writes for the configuration has {len(whole)} bytes"
        ):
            onnx_graph.load(place)
        for count in (0, 100, len(whole) - 1):
            (place / name).write_bytes(whole[:count])
            with pytest.raises(BundleError, match=name):
                onnx_graph.load(place)
        (place / name).unlink()
        with pytest.raises(BundleError, match=f"{name}: it must be there"):
            onnx_graph.load(place)
        (place / name).write_bytes(whole)
    grow(place / onnx_graph.SIDECAR)
    with pytest.raises(BundleError, match="at most"):
        onnx_graph.load(place)


SIDECARS = {
    "extra key": (lambda values: values.update(extra=1), "extra is unknown"),
    "missing key": (lambda values: values.pop("dtypes"), "dtypes is unknown or missing"),
    "format": (lambda values: values.update(format="riftco-bundle"), "format must be"),
    "version": (lambda values: values.update(format_version=2), "format_version must be 1"),
    "graph version": (lambda values: values.update(graph_version=True), "graph_version must be 1"),
    "opset": (lambda values: values.update(opset=19), "opset must be"),
    "other opset": (lambda values: values.update(opset=18), r"prefill\.onnx"),
    "config key": (lambda values: values["config"].update(depth=2), "depth"),
    "config value": (lambda values: values["config"].update(heads=3), "heads"),
    "config type": (lambda values: values["config"].update(norm_eps=1), "as it is resolved|norm_eps"),
    "other config": (lambda values: values["config"].update(sliding_window=7), r"prefill\.onnx"),
    "huge width": (lambda values: values["config"].update(hidden=10**12), "needs at least"),
    "huge vocabulary": (lambda values: values["config"].update(vocab_size=2**32), "needs at least"),
    "huge context": (lambda values: values["config"].update(context=2**32), r"prefill\.onnx"),
    "many layers": (lambda values: values["config"].update(layers=10**9), "needs at least"),
    "dtype": (lambda values: values["dtypes"].update({"final_norm.scale": "float64"}), "dtypes must"),
    "dtype key": (lambda values: values["dtypes"].update({"other": "float32"}), "dtypes must"),
    "file": (lambda values: values["files"].update({"../other": "a" * 64}), "only what riftco writes"),
    "no graph": (lambda values: values["files"].pop("decode.onnx"), r"must list decode\.onnx"),
    "digest": (lambda values: values["files"].update({"decode.onnx": "a" * 64}), r"decode\.onnx: its SHA-256"),
    "short digest": (lambda values: values["files"].update({"decode.onnx": "abc"}), "SHA-256 digests"),
    "tokenizer": (lambda values: values.update(tokenizer="a" * 64), "there together"),
    "tokenizer type": (lambda values: values.update(tokenizer=3), "fingerprint"),
    "artifact": (lambda values: values.update(artifact={"stage": "pretrain"}), "bundle's manifest"),
    "artifact type": (lambda values: values.update(artifact=[]), "artifact must be"),
    "no data file": (lambda values: values["files"].update({"model.onnx_data": "a" * 64}), r"model\.onnx_data"),
}


@pytest.mark.parametrize("name", SIDECARS)
def test_a_wrong_sidecar_is_refused(name, place):
    change, message = SIDECARS[name]
    rewrite(place, change)
    with pytest.raises(BundleError, match=message):
        onnx_graph.load(place)


def test_a_sidecar_that_is_not_spelled_as_written_is_refused(place):
    path = place / onnx_graph.SIDECAR
    text = path.read_text()
    for wrong in (text[:-1], "[]", "{", text.replace("{", '{"format": "riftco-onnx",', 1), text.replace('": ', '":')):
        path.write_text(wrong)
        with pytest.raises(BundleError, match=onnx_graph.SIDECAR):
            onnx_graph.load(place)
    path.unlink()
    with pytest.raises(BundleError, match="only graphs that riftco wrote"):
        onnx_graph.load(place)


def test_text_files_are_pinned(saved, tmp_path):
    onnx_graph.export(bundle.load(saved[1]), tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        whole = (tmp_path / "out" / name).read_bytes()
        damage(tmp_path / "out" / name, 4)
        with pytest.raises(BundleError, match=f"{name}: its SHA-256"):
            onnx_graph.load(tmp_path / "out")
        (tmp_path / "out" / name).write_bytes(whole)
    BYTES.save(tmp_path / "out")
    reseal(tmp_path / "out")
    with pytest.raises(BundleError, match="must be the sidecar's tokenizer"):
        onnx_graph.load(tmp_path / "out")


def test_exports_that_would_not_be_the_model_are_refused(tmp_path):
    config = CONFIGS["gpt2"]
    good, out = model_of(config), tmp_path / "out"
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params_of(config))
    infinite = jax.tree.map(lambda leaf: leaf.at[0].set(np.inf), params_of(config))
    big = tokenizers.ByteTokenizer(range(24))
    for model, error, message in (
        (good._replace(params=wide), UnsupportedError, "float64"),
        (good._replace(params=infinite), BundleError, "must be finite"),
        (good._replace(params={**good.params, "lora": np.zeros(2)}), BundleError, "merge adapters"),
        (good._replace(tokenizer=big), BundleError, "24 ids"),
    ):
        with pytest.raises(error, match=message):
            onnx_graph.export(model, out)
    with pytest.raises(ConfigError, match="opset must be one of 18, 23; got 21"):
        onnx_graph.export(good, out, opset=21)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_unless_asked(saved, tmp_path):
    out = tmp_path / "out"
    onnx_graph.export(model_of(CONFIGS["gpt2"]), out)
    before = contents(out)
    with pytest.raises(BundleError, match="must not exist"):
        onnx_graph.export(model_of(CONFIGS["llama"]), out)
    assert contents(out) == before
    onnx_graph.export(model_of(CONFIGS["llama"]), out, force=True)
    assert onnx_graph.load(out).config == CONFIGS["llama"]
    with pytest.raises(BundleError, match=f"holds no {onnx_graph.SIDECAR}"):
        onnx_graph.export(model_of(CONFIGS["llama"]), saved[1], force=True)
