"""SmolLM2-135M-Instruct out of its Q4_1 GGUF: its token ids, its answer, and what loading it costs."""

import functools
import importlib.util
import random
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import gguf as library
import numpy as np
import pytest
import tokenizers as peer

import riftco
from riftco import models
from riftco.interchange import gguf

pytestmark = pytest.mark.realmodel
ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def path():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "scripts" / "fetch_smollm2.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if not script.is_right(script.cache_path()):
        pytest.skip("SmolLM2 is not here; run python scripts/fetch_smollm2.py")
    return script.cache_path()


@functools.cache
def model():
    return gguf.load(path())


@functools.cache
def theirs():
    """The file as the `gguf` package reads it."""
    return library.GGUFReader(path())


def test_the_configuration_is_the_published_one():
    assert model().config == models.preset("smollm2-135m")
    assert model().generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def mixed_text():
    """2 MB: Python's own sources, and characters from the whole of Unicode."""
    draw = random.Random(0)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(source.read_text(encoding="utf-8", errors="ignore") for source in sources[:60])
    scattered = (chr(draw.choice((draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)))) for _ in range(150_000))
    return text + "".join(character + " " * (draw.random() < 0.2) for character in scattered)


def test_token_ids_are_those_of_the_tokenizers_library():
    strings = theirs().get_field("tokenizer.ggml.tokens").contents()
    merges = [tuple(merge.split(" ")) for merge in theirs().get_field("tokenizer.ggml.merges").contents()]
    other = peer.Tokenizer(peer.models.BPE(vocab={string: id for id, string in enumerate(strings)}, merges=merges))
    other.pre_tokenizer = peer.pre_tokenizers.Sequence(
        [peer.pre_tokenizers.Digits(individual_digits=True), peer.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    other.add_special_tokens(strings[:17])
    text = mixed_text()
    assert len(text.encode()) > 2_000_000
    tokenizer = model().tokenizer
    ids = tokenizer.encode_array(text)
    assert np.array_equal(ids, other.encode(text, add_special_tokens=False).ids)
    chat = "<|im_start|>user\nHello<|im_end|>\n"
    assert tokenizer.encode(chat) == other.encode(chat, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("naïve 漢字 1234")) == "naïve 漢字 1234"


def test_the_weights_are_those_that_the_package_dequantizes():
    ours = models.named(model().params, model().config)
    tensors = {tensor.name: tensor for tensor in theirs().tensors}
    for name, stored, heads in [
        ("token_embedding", "token_embd", 0),
        ("blocks.7.feed_forward.down", "blk.7.ffn_down", 0),
        ("blocks.29.attention.query", "blk.29.attn_q", 9),
        ("blocks.0.attention.key", "blk.0.attn_k", 3),
    ]:
        tensor = tensors[f"{stored}.weight"]
        array = library.dequantize(tensor.data, tensor.tensor_type)
        if heads:
            rows = array.reshape(heads, 64, -1)
            array = np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1).reshape(array.shape)
        assert np.array_equal(ours[f"{name}.weight"], array), name


def test_it_knows_the_capital_of_france():
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = model().tokenizer.apply_chat_template(messages)
    ids = riftco.generate(model().params, model().config, prompt, max_tokens=12, temperature=0)
    answer = model().tokenizer.decode(list(ids))
    print("answer:", answer)
    assert "Paris" in answer


def test_it_goes_out_and_comes_back(tmp_path):
    source = model()
    settings = {"chat_template": source.chat_template, "generation": source.generation}
    gguf.write(tmp_path / "a.gguf", source.params, source.config, source.tokenizer, **settings)
    again = gguf.load(tmp_path / "a.gguf")
    assert (again.config, again.tokenizer, again.chat_template) == (
        source.config,
        source.tokenizer,
        source.chat_template,
    )
    for name, leaf in models.flatten(again.params, source.config).items():
        assert np.array_equal(leaf, models.flatten(source.params, source.config)[name]), name
    written = library.GGUFReader(tmp_path / "a.gguf")
    for name in ("tokens", "token_type", "merges", "pre", "bos_token_id", "eos_token_id", "add_bos_token"):
        key = f"tokenizer.ggml.{name}"
        assert written.get_field(key).contents() == theirs().get_field(key).contents(), key


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory as Linux counts it")
def test_loading_takes_little_memory():
    program = r"""
        import re, sys, time
        from pathlib import Path
        import gguf as _
        import jax.numpy as jnp
        from riftco import tree
        from riftco.interchange import gguf
        jnp.zeros(3).block_until_ready()
        peak = lambda: 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        before, started, busy = peak(), time.monotonic(), time.process_time()
        model = gguf.load(sys.argv[1])
        spent = time.monotonic() - started, time.process_time() - busy
        print(*spent, peak() - before, tree.byte_count(model.params))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, busy, peak, size = map(float, done.stdout.split())
    print(f"loading: {seconds:.1f} s ({busy:.1f} s of them computing), {peak / 2**20:.0f} MiB of memory for")
    print(f"{size / 2**20:.0f} MiB of float32 weights: {peak / size:.2f} times")
    assert size <= peak <= 2.2 * size
