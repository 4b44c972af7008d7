"""Conversion between formats: what comes back bit for bit, what is compared, what is refused and leaves nothing."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import bundle, interchange, tune
from riftco.cli import main
from riftco.errors import BundleError, ConfigError, ShapeError
from riftco.interchange import conversion, gguf, huggingface, onnx_graph, verification
from riftco.models import DecoderConfig, spec, unflatten
from riftco.tokenizers import BPETokenizer, ByteTokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXT = "the quick brown fox jumps over the lazy dog 1234567890 it's they'll été 漢字 🦊 \n\t  x\r\n" * 6
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
SIZE = {"vocab_size": 300, "context": 16, "width": 32, "heads": 4, "layers": 2, "hidden": 64}
LLAMA = {**SIZE, "norm": "rms", "mlp": "swiglu", "position": "rope"}
FAMILIES = {
    "gpt2": (DecoderConfig(**SIZE, mlp="gelu_tanh", tie_embeddings=True, dropout=0.1), "float32"),
    "llama": (
        DecoderConfig(**LLAMA, kv_heads=2, rope_scaling={"rope_type": "linear", "factor": 4.0}, tie_embeddings=True),
        "bfloat16",
    ),
    "mistral": (DecoderConfig(**LLAMA, kv_heads=1, head_dim=10, sliding_window=8), "float32"),
    "qwen2": (DecoderConfig(**LLAMA, qkv_bias=True, kv_heads=2, norm_eps=1e-6), "float16"),
    "qwen3": (DecoderConfig(**LLAMA, qk_norm=True, head_dim=16, kv_heads=2), "float32"),
    "head bias": (DecoderConfig(**SIZE, head_bias=True, kv_heads=2), "float32"),
    "mixed": (DecoderConfig(**SIZE, norm="rms", bias=True, qk_norm=True, position="rope", sliding_window=4), "float32"),
}
# Llama files have no window.
NATIVE = {"hf": ("head bias", "mixed"), "gguf": ("head bias", "mixed", "mistral"), "onnx": ()}


@functools.cache
def params_of(name, scale=0.3):
    """Random values in every leaf, biases and scales too."""
    config, dtype = FAMILIES[name]
    leaves = {}
    for index, (leaf, about) in enumerate(spec(config).items()):
        values = np.random.default_rng(index).normal(0.0, scale, about.shape) + (about.initializer == "ones")
        leaves[leaf] = jnp.asarray(values, dtype)
    return unflatten(leaves)


@functools.cache
def tokenizer_of(name):
    if name == "mixed":
        return ByteTokenizer.train(TEXT)
    return BPETokenizer.train(TEXT, 290, 2, "gpt2", ["<|endoftext|>", "<|user|>"], roles={"eos": "<|endoftext|>"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> the directory of a bundle, written once."""

    @functools.cache
    def save(name):
        place = tmp_path_factory.mktemp("bundles") / "model"
        bundle.save(
            place,
            params_of(name),
            FAMILIES[name][0],
            tokenizer_of(name),
            stage="finetune",
            parent="ab" * 32,
            fingerprints={"data": {"seed": 1}},
            generation={"temperature": 0.5},
            chat_template=TEMPLATE,
        )
        return place

    return save


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A llama directory that another program might have written: no identity, no tokenizer."""
    place = tmp_path_factory.mktemp("foreign") / "model"
    bundle.save(place, params_of("llama"), FAMILIES["llama"][0], None)
    (place / bundle.MANIFEST).unlink()
    return place


def content(place):
    return {path.name: path.read_bytes() for path in sorted(Path(place).iterdir())}


def identity(place):
    return json.loads((Path(place) / bundle.MANIFEST).read_text())


def summary(capsys, *words):
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys, status, *words):
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()[-1]


# ---- identity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bundle_comes_back_to_the_last_byte_through_every_format(saved, tmp_path, name):
    source, steps = saved(name), {}
    path = source
    for to in ("hf", "gguf", "riftco", "onnx", "riftco"):
        done = interchange.convert(path, tmp_path / f"{len(steps)}", to=to, verify=False)
        assert done.artifact_id == identity(source)["artifact_id"]
        assert (done.form == "riftco") == (name in NATIVE.get(to, NATIVE["hf"])) == (done.reason is not None)
        again = interchange.convert(path, tmp_path / "again", to=to, verify=False, force=True)
        assert content(again.path) == content(done.path)
        path = steps[len(steps)] = done.path
        if to in ("hf", "riftco"):
            assert content(path) == content(source)
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "4", "again"]
    assert content(steps[1]).keys() == {"model.gguf"}
    assert {"prefill.onnx", "decode.onnx", "tokenizer.json", "chat_template.jinja"} <= content(steps[3]).keys()


def test_a_foreign_model_has_one_identity_whichever_way_it_takes(foreign, tmp_path):
    found = set()
    for to in ("riftco", "gguf", "onnx"):
        with pytest.warns(UserWarning, match=r"tokenizer"):
            done = interchange.convert(foreign, tmp_path / to, to=to, verify=False)
        assert done.source_kind == "huggingface"
        with pytest.warns(UserWarning, match=r"tokenizer") if to != "riftco" else pytest.warns(UserWarning):
            again = interchange.convert(done.path, tmp_path / f"{to}-back", to="riftco", verify=False)
        found |= {done.artifact_id, again.artifact_id}
    assert len(found) == 1 and identity(tmp_path / "gguf-back")["stage"] == "convert"


def test_a_cast_is_a_child_of_its_source(saved, tmp_path):
    source = identity(saved("gpt2"))["artifact_id"]
    same = interchange.convert(saved("gpt2"), tmp_path / "same", to="hf", dtype="float32", verify=False)
    assert same.artifact_id == source
    for kind, path in (("bundle", saved("gpt2")), ("gguf", None), ("onnx", None)):
        path = path or interchange.convert(saved("gpt2"), tmp_path / kind, to=kind, verify=False).path
        done = interchange.convert(path, tmp_path / f"{kind}16", to="riftco", dtype="bfloat16", verify=False)
        manifest = identity(done.path)
        assert (manifest["stage"], manifest["parent_artifact_id"]) == ("convert", source) and done.source_kind == kind
        loaded = bundle.load(done.path)
        wanted = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params_of("gpt2"))
        assert all(map(np.array_equal, jax.tree.leaves(loaded.params), jax.tree.leaves(wanted)))
        assert loaded.tokenizer == tokenizer_of("gpt2") and loaded.chat_template == TEMPLATE
    rounded = interchange.convert(saved("gpt2"), tmp_path / "q8", to="gguf", type="q8_0", verify=False)
    back = interchange.convert(rounded.path, tmp_path / "q8-back", to="riftco", verify=False)
    assert identity(back.path)["parent_artifact_id"] == source and back.artifact_id != source


def test_packed_weights_stay_packed_or_are_decoded_with_a_note(saved, tmp_path):
    plain = bundle.load(saved("llama"))
    config = plain.config
    packed = tune.quantize(plain.params, config, block_size=32)
    base = bundle.save_packed(tmp_path / "packed", packed, config, plain.tokenizer, base=plain.artifact_id)
    copied = interchange.convert(tmp_path / "packed", tmp_path / "copy", to="riftco", verify=False)
    assert content(copied.path) == content(tmp_path / "packed") and copied.artifact_id == base and not copied.notes
    done = interchange.convert(tmp_path / "packed", tmp_path / "gguf", to="gguf")
    assert "decoded to bfloat16" in done.notes[0] and done.difference.relative < verification.BOUNDS["bfloat16"]
    back = interchange.convert(done.path, tmp_path / "back", to="riftco", verify=False)
    assert back.artifact_id == done.artifact_id and identity(back.path)["parent_artifact_id"] == base
    wanted = tune.dequantize(packed, config, jnp.bfloat16)
    assert all(map(np.array_equal, jax.tree.leaves(bundle.load(back.path).params), jax.tree.leaves(wanted)))


# ---- comparing -----------------------------------------------------------------------------------------------------


@pytest.mark.tiny
def test_the_figures_are_those_of_their_definitions(rng):
    p, q = rng.normal(size=(2, 2, 3, 7)).astype(np.float32)
    q = p + 0.1 * q
    found = verification.compare(p, q)
    soft = [np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (p, q)]
    centred = [x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64) for x in (p, q)]
    assert found.max_abs == np.abs(p.astype(np.float64) - q).max()
    assert np.isclose(found.kl, (soft[0] * np.log(soft[0] / soft[1])).sum() / 6, rtol=1e-9)
    assert found.argmax_agreement == (p.argmax(-1) == q.argmax(-1)).mean()
    assert np.isclose(found.relative, np.linalg.norm(centred[0] - centred[1]) / np.linalg.norm(centred[0]), rtol=1e-9)
    assert verification.compare(p, p + 1).relative < 1e-6 and verification.compare(p, p)[:3] == (0, 0, 1)
    assert "argmax agreement 100 %" in str(verification.compare(p, p))


@pytest.mark.parametrize("source", [np.zeros((1, 2, 3), np.float32), np.eye(3, dtype=np.float32)[None]])
def test_a_result_that_is_not_finite_is_no_result(source):
    result = source.copy()
    result[0, 0, 0] = np.nan
    with np.errstate(invalid="ignore"):
        difference = verification.compare(source, result)
    assert np.isnan(difference.max_abs) and not difference.relative <= max(verification.BOUNDS.values())


def test_results_are_compared_with_their_source(saved, tmp_path):
    pytest.importorskip("onnxruntime", reason="ONNX GRAPHS NOT RUN: onnxruntime missing; pip install 'riftco[test]'")
    found = {}
    for to in ("hf", "f32", "f16", "bf16", "q8_0", "q4_0", "18", "23"):
        kind = "hf" if to == "hf" else "onnx" if to in ("18", "23") else "gguf"
        options = {"hf": {}, "gguf": {"type": to}, "onnx": {"opset": int(to) if to.isdigit() else 0}}[kind]
        done = interchange.convert(saved("qwen3"), tmp_path / to, to=kind, **options)
        found[to] = done.difference
        assert done.notes == ()
    relative = {to: difference.relative for to, difference in found.items()}
    print(relative)
    assert found["hf"] == found["f32"] == (0.0, 0.0, 1.0, 0.0)
    assert 0 < relative["f16"] < relative["bf16"] < relative["q8_0"] < relative["q4_0"]
    assert max(relative["18"], relative["23"]) < 1e-5


def test_a_wrong_result_is_refused_and_leaves_nothing(saved, tmp_path, monkeypatch, capsys):
    export = gguf.export

    def wrong(model, path, **options):
        params = jax.tree.map(lambda leaf: leaf, model.params)
        query = params["blocks"]["attention"]["query"]["weight"]
        params["blocks"]["attention"]["query"]["weight"] = jnp.roll(query, 1, axis=1)
        return export(bundle.Bundle(**{**vars(model), "params": params}), path, **options)

    monkeypatch.setattr(gguf, "export", wrong)
    for type in ("f32", "f16", "q8_0"):
        with pytest.raises(BundleError, match=r"relative difference .*--no-verify"):
            interchange.convert(saved("qwen3"), tmp_path / "out", to="gguf", type=type)
    assert os.listdir(tmp_path) == []
    assert "argmax agreement" in refused(
        capsys, 1, "convert", saved("qwen3"), "--to", "gguf", "--out-dir", tmp_path / "x"
    )
    interchange.convert(saved("qwen3"), tmp_path / "out", to="gguf", verify=False)
    assert os.listdir(tmp_path) == ["out"]


def test_without_onnx_runtime_it_is_said_that_the_graphs_were_not_run(saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = interchange.convert(saved("gpt2"), tmp_path / "o", to="onnx", verify=True)
    assert done.difference is None and "onnxruntime is not installed" in done.notes[0]


def test_large_models_are_compared_only_when_asked(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "VERIFIED_BELOW", 1000)
    assert interchange.convert(saved("gpt2"), tmp_path / "a", to="hf").difference is None
    assert interchange.convert(saved("gpt2"), tmp_path / "b", to="hf", verify=True).difference is not None


# ---- the door and the verb -----------------------------------------------------------------------------------------


def test_every_kind_of_path_loads(saved, tmp_path, foreign):
    run = tmp_path / "run"
    shutil.copytree(saved("gpt2"), run / "final")
    one = interchange.convert(saved("gpt2"), tmp_path / "g", to="gguf", verify=False).path
    onnx = interchange.convert(saved("gpt2"), tmp_path / "o", to="onnx", verify=False).path
    kinds = {saved("gpt2"): "bundle", run: "bundle", one: "gguf", onnx: "onnx"}
    for path, kind in kinds.items():
        assert interchange.locate(path)[1] == kind and interchange.load_config(path) == FAMILIES["gpt2"][0]
        params, config = interchange.load(path)
        assert config == FAMILIES["gpt2"][0]
        assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(params_of("gpt2"))))
        assert interchange.load_model(path).tokenizer == tokenizer_of("gpt2")
    assert interchange.load(onnx, dtype="float16")[0]["token_embedding"]["weight"].dtype == jnp.float16
    assert interchange.locate(foreign)[1] == "huggingface"


@pytest.mark.tiny
def test_options_that_do_not_fit_are_refused(tmp_path, capsys):
    for words, says in {
        "--to gguf --dtype float32": "--dtype is for --to riftco and hf",
        "--to onnx --type f16": "--type is for --to gguf",
        "--to hf --opset 18": "--opset is for --to onnx",
        "": "--to is required",
        "--to nothing": "--to must be one of riftco, hf, gguf, onnx",
    }.items():
        assert says in refused(capsys, 2, "convert", "x", *words.split(), "--out-dir", tmp_path / "o")
    assert "--out-dir is required" in refused(capsys, 2, "convert", "x", "--to", "hf")
    assert "does not" in refused(capsys, 1, "convert", tmp_path / "none", "--to", "hf", "--out-dir", tmp_path / "o")
    with pytest.raises(ConfigError, match="dtype belongs to riftco and hf"):
        interchange.convert("x", "y", to="gguf", dtype="float16")
    with pytest.raises(ConfigError, match="to must be one of"):
        interchange.convert("x", "y", to="bin")
    for options in ({"to": "gguf", "type": ""}, {"to": "onnx", "opset": 0}, {"to": "hf", "dtype": "int8"}):
        with pytest.raises(ConfigError, match=r"must be one of .*; got"):
            interchange.convert("x", "y", **options)


def test_the_verb(saved, tmp_path, capsys, foreign):
    words = ["convert", saved("gpt2"), "--to", "gguf", "--type", "q8_0", "--out-dir", tmp_path / "g"]
    found = summary(capsys, *words)
    assert found["files"].keys() == {"model.gguf"} and found["form"] == "gpt2" and found["from"] == "bundle"
    assert (
        0 < found["verification"]["relative"] < 0.2 and found["artifact_id"] == identity(saved("gpt2"))["artifact_id"]
    )
    assert "--force" in refused(capsys, 2, *words)
    before = content(tmp_path / "g")
    # Another format may take the place of a conversion; nothing else may.
    words = ["convert", saved("gpt2"), "--to", "onnx", "--opset", "18", "--no-verify", "--force", "--out-dir"]
    assert main([*map(str, words), str(tmp_path / "g")]) == 0
    assert not before.keys() & content(tmp_path / "g").keys() and (tmp_path / "g" / "decode.onnx").is_file()
    assert "artifact_id" in capsys.readouterr().out
    (tmp_path / "mine").mkdir()
    assert main([*map(str, words), str(tmp_path / "mine")]) == 0
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("words")
    assert "replaces only" in refused(capsys, 1, *words, tmp_path / "thesis")
    assert os.listdir(tmp_path / "thesis") == ["chapter.txt"]
    # Without a tokenizer: a warning, and no text afterwards.
    capsys.readouterr()
    words = ["convert", "--model", foreign, "--to", "riftco", "--out-dir", tmp_path / "ids", "--no-verify"]
    assert main([str(word) for word in words]) == 0
    assert "without a tokenizer" in capsys.readouterr().err
    assert "must have a tokenizer.json" in refused(capsys, 1, "generate", tmp_path / "ids")


def test_inspect_reads_no_weights(saved, tmp_path, capsys, foreign):
    places = {"bundle": saved("gpt2"), "huggingface": foreign}
    for to in ("gguf", "onnx"):
        places[to] = interchange.convert(saved("gpt2"), tmp_path / to, to=to, verify=False).path
    plain = bundle.load(saved("llama"))
    packed = tune.quantize(plain.params, plain.config, block_size=32)
    places["packed"] = tmp_path / "packed"
    bundle.save_packed(places["packed"], packed, plain.config, plain.tokenizer, base=plain.artifact_id)
    adapters = tune.lora_init(jax.random.key(0), plain.params, plain.config, targets=("query",), rank=2, alpha=4)
    places["adapter"] = tmp_path / "adapter"
    bundle.save_adapters(places["adapter"], adapters, plain.config, base=plain.artifact_id)
    found = {}
    for kind, place in places.items():
        found[kind] = summary(capsys, "inspect", place)
        assert found[kind]["kind"] == kind
        assert main(["inspect", str(place)]) == 0 and str(place) in capsys.readouterr().out
        if kind != "adapter":
            assert found[kind]["parameters"] > 10_000 and found[kind]["model_type"] in ("gpt2", "llama")
    artifact = identity(saved("gpt2"))["artifact_id"]
    assert found["gguf"]["artifact_id"] == found["onnx"]["artifact_id"] == found["bundle"]["artifact_id"] == artifact
    assert found["gguf"]["weights"]["F32"]["tensors"] == found["bundle"]["weights"]["float32"]["tensors"] > 20
    assert found["gguf"]["exact"] is True and found["gguf"]["architecture"] == "gpt2" and found["onnx"]["opset"] == 23
    assert found["packed"]["packing"].startswith("nf4") and "uint8" in found["packed"]["weights"]
    assert (found["adapter"]["rank"], found["adapter"]["base_id"]) == (2, plain.artifact_id)
    assert found["bundle"]["tokenizer"]["vocab_size"] == tokenizer_of("gpt2").vocab_size
    assert summary(capsys, "inspect", places["gguf"] / "model.gguf")["kind"] == "gguf"


@pytest.mark.realmodel
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory as Linux counts it")
def test_converting_takes_little_memory(tmp_path):
    about = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "scripts" / "fetch_smollm2.py")
    script = importlib.util.module_from_spec(about)
    about.loader.exec_module(script)
    if not script.is_right(script.cache_path()):
        pytest.skip("SmolLM2 is not here; run python scripts/fetch_smollm2.py")
    program = r"""
        import re, sys
        from pathlib import Path
        import gguf as _
        import jax.numpy as jnp
        from riftco import interchange
        from riftco.models import parameter_count
        jnp.zeros(3).block_until_ready()
        peak = lambda: 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        before = peak()
        done = interchange.convert(sys.argv[1], sys.argv[2], to="gguf", type="q8_0")
        print(peak() - before, 4 * parameter_count(interchange.load_config(done.path)), done.difference.relative)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(script.cache_path()), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    peak, size, relative = map(float, re.split(r"\s+", done.stdout.strip()))
    print(f"converting: {peak / 2**20:.0f} MiB for {size / 2**20:.0f} MiB of weights: {peak / size:.2f} times")
    assert peak <= 2.2 * size and 0 < relative < 0.1


# What the tests above patch must be what conversions call.
assert conversion.huggingface is huggingface and conversion.onnx_graph is onnx_graph


def test_force_replaces_neither_the_source_nor_what_is_no_conversions(saved, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(saved("gpt2"), source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    run = tmp_path / "run"
    shutil.copytree(source, run / "final")
    for given, target in ((source, source), (run, run), (run / "final", run)):
        with pytest.raises(BundleError, match="must not replace what it is made of"):
            interchange.convert(given, target, to="gguf", force=True)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    for to in ("gguf", "onnx", "hf"):
        made = tmp_path / to
        interchange.convert(source, made, to=to, verify=False)
        (made / "thesis.txt").write_text("years of work")
        with pytest.raises(BundleError, match=r"holds thesis\.txt besides"):
            interchange.convert(source, made, to="gguf", verify=False, force=True)
        assert (made / "thesis.txt").read_text() == "years of work"


def test_a_configuration_of_absurd_size_is_refused_at_once(saved, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(saved("qwen3"), source)
    (source / "riftco.json").unlink()
    values = json.loads((source / "config.json").read_text())
    values.pop("layer_types", None)
    (source / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 10**9}))
    with pytest.raises(ShapeError, match="1000000000 layers need as many tensors at least"):
        interchange.load(source)


def test_an_adapter_is_no_model_to_convert(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "riftco.json").write_text("{}")
    with pytest.raises(BundleError, match="this is an adapter; merge it first"):
        interchange.convert(tmp_path, tmp_path / "out", to="gguf")
