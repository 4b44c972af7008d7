"""The bundle: identity, byte-exact round trips, atomic publication, and refusals that name the file."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import bundle
from riftco.errors import BundleError, DomainError, ShapeError
from riftco.interchange import huggingface
from riftco.models import DecoderConfig, Snapshot, init, preset
from riftco.tokenizers import BPETokenizer, ByteTokenizer

TEXT = b"the cat sat on the mat, and the other cat sat on the other mat.\n" * 4
CONFIG = preset("tiny", vocab_size=300, context=16, width=16, hidden=32)
GOLDEN_FORM = DecoderConfig(40, 16, 32, 4, 2, 48, head_bias=True)


def tree_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert jax.tree.map(lambda x: x.dtype, left) == jax.tree.map(lambda x: x.dtype, right)


def contents(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def tokenizer():
    return BPETokenizer.train(TEXT, vocab_size=300, pattern="gpt2", special_tokens=["<|endoftext|>"])


@pytest.fixture(scope="module")
def params():
    return init(jax.random.key(0), CONFIG)


@pytest.fixture
def saved(tmp_path, params, tokenizer):
    bundle.save(tmp_path / "final", params, CONFIG, tokenizer, fingerprints={"data": "ab", "training": {"steps": 3}})
    return tmp_path / "final"


@pytest.mark.tiny
def test_a_bundle_comes_back_exactly(saved, params, tokenizer):
    loaded = bundle.load(saved)
    tree_equal(loaded.params, params)
    assert loaded.config == CONFIG
    assert loaded.tokenizer == tokenizer
    assert loaded.tokenizer.encode("the cat<|endoftext|>") == tokenizer.encode("the cat<|endoftext|>")
    assert loaded.manifest["stage"] == "pretrain" and loaded.manifest["fingerprints"]["training"] == {"steps": 3}
    assert (
        json.loads((saved / "config.json").read_text())["eos_token_id"] == tokenizer.eos_id == tokenizer.vocab_size - 1
    )
    assert loaded.generation == {"eos_token_id": tokenizer.eos_id}
    assert sorted(contents(saved)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "riftco.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_identity_is_the_digest_of_the_manifest_without_it(saved, tmp_path, params, tokenizer):
    manifest = json.loads((saved / "riftco.json").read_text())
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((saved / name).read_bytes()).hexdigest() == digest
    assert set(manifest["files"]) == {path.name for path in saved.iterdir()} - {"riftco.json"}
    identity = manifest.pop("artifact_id")
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(canonical.encode()).hexdigest() == identity == bundle.load(saved).artifact_id
    child = bundle.save(tmp_path / "child", params, CONFIG, tokenizer, stage="finetune", parent=identity)
    assert child != identity
    assert bundle.load(tmp_path / "child").manifest["parent_artifact_id"] == identity


def test_saving_what_was_loaded_gives_the_same_bytes(saved, tmp_path, tokenizer, params):
    loaded = bundle.load(saved)
    assert loaded.save(tmp_path / "again") == loaded.artifact_id
    assert contents(tmp_path / "again") == contents(saved)
    options = {"generation": {"temperature": 0.5, "eos_token_id": [1, 2]}, "chat_template": "{{ messages }}\r\n"}
    bundle.save(tmp_path / "chat", params, CONFIG, tokenizer, stage="finetune", parent=loaded.artifact_id, **options)
    chat = bundle.load(tmp_path / "chat")
    assert chat.chat_template == options["chat_template"]
    assert json.loads((tmp_path / "chat" / "config.json").read_text())["eos_token_id"] == [1, 2]
    chat.save(tmp_path / "chat2")
    assert contents(tmp_path / "chat2") == contents(tmp_path / "chat")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(GOLDEN_FORM, jnp.float32), (preset("llama-tiny", vocab_size=40, layers=1), jnp.bfloat16)],
    ids=["native", "bfloat16"],
)
def test_other_forms_and_dtypes(tmp_path, config, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), init(jax.random.key(1), config))
    tokenizer = ByteTokenizer.train(TEXT)
    bundle.save(tmp_path / "a", params, config, tokenizer)
    loaded = bundle.load(tmp_path / "a")
    tree_equal(loaded.params, params)
    assert loaded.config == config and loaded.tokenizer == tokenizer
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == jnp.dtype(dtype).name
    loaded.save(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_large_models_are_sharded(tmp_path, params):
    bundle.save(tmp_path / "sharded", params, CONFIG, None, shard_bytes=9000)
    names = sorted(contents(tmp_path / "sharded"))
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    loaded = bundle.load(tmp_path / "sharded")
    tree_equal(loaded.params, params)
    assert loaded.tokenizer is None
    tree_equal(huggingface.load(tmp_path / "sharded").params, params)
    loaded.save(tmp_path / "again", shard_bytes=9000)
    assert contents(tmp_path / "again") == contents(tmp_path / "sharded")


def test_other_tools_find_their_metadata(saved):
    header_size = int.from_bytes((saved / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((saved / "model.safetensors").read_bytes()[8 : 8 + header_size])
    assert header["__metadata__"] == {"format": "pt"}
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert json.loads((saved / "tokenizer_config.json").read_text())["model_max_length"] == CONFIG.context


def flip(path: pathlib.Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_damaged_file_is_named(saved, name):
    original = (saved / name).read_bytes()
    flip(saved / name, -2)
    with pytest.raises(BundleError, match=rf"{name}: its SHA-256"):
        bundle.load(saved)
    (saved / name).write_bytes(original[:-1])
    with pytest.raises(BundleError, match=rf"{name}: its SHA-256"):
        bundle.load(saved)
    (saved / name).unlink()
    with pytest.raises(BundleError, match=rf"{name}: riftco.json lists it; it is missing"):
        bundle.load(saved)


def test_a_changed_manifest_is_refused(saved):
    path = saved / "riftco.json"
    text = path.read_text()
    for edited in (
        text.replace('"pretrain"', '"finetune"'),
        text.replace('"stage"', '"stage": "x",\n  "stage"'),
        text[:-30],
        text + " ",
        text.replace("model.safetensors", "../model.safetensors"),
        text.replace('"format_version": 1', '"format_version": 2'),
        "[]",
        '{"stage": NaN}',
    ):
        assert edited != text
        path.write_text(edited)
        with pytest.raises(BundleError, match=r"riftco\.json"):
            bundle.load(saved)
    path.unlink()
    with pytest.raises(BundleError, match=r"must contain riftco.json"):
        bundle.load(saved)


def test_adapters_and_stray_weights_are_refused_by_name(saved):
    (saved / "README.md").write_text("a note harms nothing")
    bundle.load(saved)
    (saved / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(BundleError, match=r"adapter_model.safetensors: .* merge it first"):
        bundle.load(saved)
    os.rename(saved / "adapter_model.safetensors", saved / "extra.safetensors")
    with pytest.raises(BundleError, match=r"extra.safetensors: riftco.json must list"):
        bundle.load(saved)


def test_only_plain_weights_are_saved(tmp_path, params, tokenizer):
    adapted = {**params, "adapters": {"query": jnp.ones(3)}}
    with pytest.raises(BundleError, match=r"adapters.query.*merge adapters"):
        bundle.save(tmp_path / "x", adapted, CONFIG, tokenizer)
    packed = {**params, "token_embedding": {"weight": jnp.zeros((300, 16), jnp.uint8)}}
    with pytest.raises(BundleError, match=r"token_embedding.weight must be floating"):
        bundle.save(tmp_path / "x", packed, CONFIG, tokenizer)
    broken = {**params, "final_norm": {**params["final_norm"], "bias": jnp.full(16, jnp.nan)}}
    with pytest.raises(BundleError, match=r"final_norm.bias is not"):
        bundle.save(tmp_path / "x", broken, CONFIG, tokenizer)
    with pytest.raises(BundleError, match="vocabulary must fit"):
        bundle.save(tmp_path / "x", init(jax.random.key(0), GOLDEN_FORM), GOLDEN_FORM, tokenizer)
    for bad in (
        {"parent": "me"},
        {"stage": " "},
        {"fingerprints": {"a": {1, 2}}},
        {"generation": {"top_p": float("nan")}},
    ):
        with pytest.raises(BundleError, match=f"{next(iter(bad))} must be"):
            bundle.save(tmp_path / "x", params, CONFIG, tokenizer, **bad)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_unless_asked(saved, tmp_path, params, tokenizer):
    before = contents(saved)
    with pytest.raises(BundleError, match="must not exist"):
        bundle.save(saved, params, CONFIG, tokenizer, stage="finetune")
    assert contents(saved) == before
    bundle.save(saved, params, CONFIG, tokenizer, stage="finetune", force=True)
    assert bundle.load(saved).manifest["stage"] == "finetune"
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match="replaces only a bundle"):
        bundle.save(precious, params, CONFIG, tokenizer, force=True)
    assert (precious / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "thesis"]


def test_a_save_that_fails_leaves_the_old_bundle(saved, tmp_path, params, tokenizer, monkeypatch):
    before = contents(saved)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("riftco.bundle.writing.write_weights", full_disk)
        with pytest.raises(BundleError, match="No space left"):
            bundle.save(saved, params, CONFIG, tokenizer, force=True)
    rename = os.rename

    def last_rename_fails(source, target):
        if str(source).endswith("new"):
            assert not saved.exists()  # the old bundle has been set aside
            full_disk()
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", last_rename_fails)
        with pytest.raises(BundleError, match="No space left"):
            bundle.save(saved, params, CONFIG, tokenizer, force=True)
    assert contents(saved) == before
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_saving_over_the_files_that_were_loaded(saved, params):
    loaded = bundle.load(saved)
    loaded.save(saved, force=True)
    tree_equal(bundle.load(saved).params, params)


def test_shards_that_do_not_belong_together(tmp_path, params):
    bundle.save(tmp_path / "s", params, CONFIG, None, shard_bytes=9000)
    place = tmp_path / "foreign"
    shutil.copytree(tmp_path / "s", place)
    first = sorted(place.glob("model-00001-*"))[0]
    first.rename(place / "gone")
    with pytest.raises(BundleError, match=r"model-00001-of.*not a file beside it"):
        huggingface.load(place)
    (place / "gone").rename(first)
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"model-00001-of.*the file is truncated"):
        huggingface.load(place)


def test_snapshot_restores_exactly_and_stands_alone(params, tokenizer):
    live = jax.tree.map(jnp.copy, params)
    snapshot = Snapshot(live, CONFIG, tokenizer)
    jax.tree.map(lambda leaf: leaf.delete(), live)
    restored, config, restored_tokenizer = snapshot.restore()
    tree_equal(restored, params)
    assert config == CONFIG and restored_tokenizer == tokenizer
    jax.tree.map(lambda leaf: leaf.delete(), restored)
    tree_equal(snapshot.restore()[0], params)


def test_snapshot_refuses_what_it_could_not_restore(params):
    with pytest.raises(ShapeError, match="position_embedding"):
        Snapshot(params, dataclasses.replace(CONFIG, context=8), None)
    with pytest.raises(DomainError, match=r"final_norm.scale"):
        Snapshot({**params, "final_norm": {**params["final_norm"], "scale": jnp.full(16, jnp.inf)}}, CONFIG)
