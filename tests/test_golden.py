"""The reference implementation's recorded numbers, reproduced: golden/golden_core.json.

Provenance: figures printed by riftco-transformer 0.6.1 (the wheel on PyPI, CPU backend) through its public API, on the
token ids of the formula that the file states. RIFTCO_GOLDEN names another recording; without it, one at
../shared/golden/ beside the checkout is preferred to the one that is shipped.
"""

import functools
import hashlib
import json
import os
import pathlib
import random
from typing import Any

import jax
import numpy as np
import pytest

from riftco import value_and_grad
from riftco.models import DecoderConfig, forward, loss, named, parameter_count, reference_init, spec
from riftco.optim import adam
from riftco.tokenizers import BPETokenizer, ByteTokenizer

_HERE = pathlib.Path(__file__).resolve().parent
_SHIPPED = _HERE / "golden" / "golden_core.json"
_BESIDE = _HERE.parents[1] / "shared" / "golden" / "golden_core.json"
_PATH = pathlib.Path(os.environ.get("RIFTCO_GOLDEN") or (_BESIDE if _BESIDE.is_file() else _SHIPPED))


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(_PATH.read_text())


def gpt_config(record: dict[str, Any]) -> DecoderConfig:
    """The configuration of the golden decoder: LayerNorm, exact GELU, learned positions, biases, head bias."""
    c = record["config"]
    return DecoderConfig(
        c["vocabulary_size"], c["maximum_context"], c["model_width"], c["head_count"], c["block_count"],
        c["feed_forward_width"], head_bias=True,
    )  # fmt: skip


def llama_config(record: dict[str, Any]) -> DecoderConfig:
    """The configuration of the golden Llama decoder: RMSNorm, SwiGLU, RoPE, grouped heads, untied and bias-free."""
    c = record["config"]
    return DecoderConfig(
        c["vocabulary_size"], c["maximum_context"], c["model_width"], c["query_head_count"], c["block_count"],
        c["feed_forward_width"], kv_heads=c["key_value_head_count"], norm="rms", mlp="swiglu", position="rope",
    )  # fmt: skip


TOPOLOGIES = [("decoder", gpt_config, 19419), ("llama", llama_config, 20320)]


@pytest.mark.parametrize(("section", "configuration", "count"), TOPOLOGIES)
def test_names_shapes_and_counts(golden, section, configuration, count):
    record = golden[section]
    config = configuration(record)
    params = named(reference_init(config, record["config"]["random_seed"]), config)
    assert list(params) == record["parameter_names"]
    if "parameter_shapes" in record:
        assert [list(array.shape) for array in params.values()] == record["parameter_shapes"]
    assert parameter_count(config) == record["scalar_count"] == count
    assert sum(leaf.size for leaf in spec(config).values()) == count


@pytest.mark.tiny
@pytest.mark.parametrize(("section", "configuration", "count"), TOPOLOGIES)
def test_initial_weights_bit_for_bit(golden, section, configuration, count):
    record = golden[section]
    config = configuration(record)
    params = named(reference_init(config, record["config"]["random_seed"]), config)
    flat = np.concatenate([np.asarray(array, "<f4").ravel() for array in params.values()])
    np.testing.assert_array_equal(flat[:16], np.float32(record["initial_values_first16"]))
    assert flat.size == count
    assert hashlib.sha256(flat.tobytes()).hexdigest() == record["initial_values_sha256"]


def tokens_of(golden: dict[str, Any]) -> np.ndarray:
    """The stated formula: ids[i] = (i*i + (3*i)//2 + i%7) % 27 for i in range(438)."""
    i = np.arange(438)
    return ((i * i + (3 * i) // 2 + i % 7) % 27).astype(np.int32)


def batches(golden: dict[str, Any], count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The recorded windows: one `randrange(N - T)` of Python's generator per row."""
    record, tokens = golden["decoder"], tokens_of(golden)
    context, rows = record["config"]["maximum_context"], record["batch"]
    generator = random.Random(record["sampler_seed"])
    starts = [[generator.randrange(len(tokens) - context) for _ in range(rows)] for _ in range(count)]
    recorded = record["first_8_window_starts"]
    assert [start for row in starts for start in row][:8] == recorded[: count * rows]
    windows = [np.stack([tokens[start : start + context + 1] for start in row]) for row in starts]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


@functools.cache
def training(config: DecoderConfig) -> tuple[Any, Any]:
    """The optimizer's init and one compiled step of a configuration, shared by the tests."""
    optimizer_init, update = adam(1e-2)

    @jax.jit
    def step(params, state, tokens, targets):
        value, grads = value_and_grad(loss)(params, tokens, targets, config)
        params, state, stats = update(grads, state, params)
        return params, state, (value, stats.grad_norm, stats.clip_scale, stats.ok)

    return optimizer_init, step


def trained(config: DecoderConfig, params: Any, data: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """float64[steps, 3]: loss before the update, gradient norm, clip scale."""
    optimizer_init, step = training(config)
    state, rows = optimizer_init(params), []
    for tokens, targets in data:
        params, state, (*row, ok) = step(params, state, tokens, targets)
        assert ok
        rows.append([float(entry) for entry in row])
    return np.array(rows)


@pytest.mark.parametrize(("section", "configuration", "count"), TOPOLOGIES)
def test_logits_of_the_first_window(golden, section, configuration, count):
    record = golden[section]
    config = configuration(record)
    params = reference_init(config, record["config"]["random_seed"])
    logits = np.asarray(forward(params, tokens_of(golden)[None, : config.context], config))
    np.testing.assert_allclose(logits.ravel(), record["logits_first_window"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("section", "configuration", "count"), TOPOLOGIES)
def test_losses_norms_and_clipping_of_a_run(golden, section, configuration, count):
    record = golden[section]
    config = configuration(record)
    expected = np.array(record["loss_norm_clip"])
    rows = trained(config, reference_init(config, record["config"]["random_seed"]), batches(golden, len(expected)))
    np.testing.assert_allclose(rows[:, 0], expected[:, 0], atol=2e-4, rtol=0)
    np.testing.assert_allclose(rows[:, 1], expected[:, 1], rtol=1e-3)
    np.testing.assert_allclose(rows[:, 2], expected[:, 2], rtol=1e-3)


def test_one_batch_is_learnt_by_heart(golden):
    record, curve = golden["decoder"], golden["overfit_one_batch_200_steps"]
    config = gpt_config(record)
    losses = trained(config, reference_init(config, record["config"]["random_seed"]), batches(golden, 1) * 200)[:, 0]
    assert abs(losses[0] - curve["0"]) <= 1e-5
    assert abs(losses[20] / curve["20"] - 1) <= 0.2
    assert losses[199] < 0.03


@pytest.mark.parametrize("vocab_size", ["258", "272", "300", "512"])
def test_byte_pair_merges_and_ids(golden, vocab_size):
    record, corpus = golden["bpe"][vocab_size], bytes(97 + int(token) for token in tokens_of(golden))
    tokenizer = BPETokenizer.train(corpus, vocab_size=int(vocab_size), min_frequency=2)
    assert [list(merge) for merge in tokenizer.merges] == record["merges"]
    ids = tokenizer.encode(corpus)
    assert (len(ids), ids[:32]) == (record["token_count"], record["ids_first32"])
    assert ByteTokenizer.train(corpus).vocab_size == golden["bpe"]["byte_vocabulary"]


def test_the_recording_beside_the_checkout_is_the_shipped_one():
    if _BESIDE.is_file():
        assert json.loads(_BESIDE.read_text()) == json.loads(_SHIPPED.read_text())
    assert json.loads(_SHIPPED.read_text())["source"].startswith("riftco-transformer 0.6.1")
