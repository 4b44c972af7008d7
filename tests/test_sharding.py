"""Meshes of simulated devices: the same numbers as one device, in pieces that are really pieces."""

from typing import Any

import jax
import numpy as np
import pytest

from riftco.data import evaluation_windows
from riftco.errors import BackendError, ConfigError
from riftco.models import DecoderConfig, spec
from riftco.train import (
    Evaluator,
    TrainConfig,
    TrainResult,
    init_state,
    make_train_step,
    parse_mesh,
    place_batch,
    read_records,
    shardings,
)
from riftco.train.mesh import partition
from tests.training_program import OPTIONS, SMALL, compilation_cache, run, tokens


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with compilation_cache(tmp_path_factory.getbasetemp() / "compiled"):
        yield


@pytest.fixture(scope="module")
def alone() -> TrainResult:
    return run(config=SMALL)


@pytest.mark.tiny
def test_a_mesh_is_read_from_its_name():
    mesh = parse_mesh("data=2,fsdp=4")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4} and parse_mesh(None) is None
    assert dict(parse_mesh(" fsdp=2").shape) == {"data": 1, "fsdp": 2}
    for text in ("model=2", "data", "data=0", "data=x", ""):
        with pytest.raises(ConfigError, match="axes are written data=N"):
            parse_mesh(text)
    with pytest.raises(BackendError, match=r"data=3,fsdp=3 needs 9 devices; there are 8 \(cpu\)"):
        parse_mesh("data=3,fsdp=3")


def test_fsdp_splits_one_large_axis_of_every_matrix_and_never_the_layers():
    config = DecoderConfig(17, 8, 12, 2, 4, 32)
    mesh = parse_mesh("fsdp=4")
    parts = {name: partition(leaf, mesh) for name, leaf in spec(config).items()}
    assert parts["blocks.feed_forward.expand.weight"] == jax.sharding.PartitionSpec(None, "fsdp")  # [4, 32, 12]
    assert parts["blocks.feed_forward.project.weight"] == jax.sharding.PartitionSpec(None, None, "fsdp")
    assert parts["token_embedding.weight"] == jax.sharding.PartitionSpec(None, "fsdp")  # 17 does not divide
    assert parts["blocks.attention_norm.scale"] == jax.sharding.PartitionSpec()
    assert set(jax.tree.leaves(shardings(config, mesh), is_leaf=lambda x: hasattr(x, "spec")))


def test_every_device_holds_its_share_of_weights_and_moments():
    mesh = parse_mesh("data=2,fsdp=2")
    state = init_state(SMALL, TrainConfig(**OPTIONS), mesh)
    for tree in (state.params, state.optimizer.m, state.optimizer.v):
        weight = tree["blocks"]["feed_forward"]["expand"]["weight"]  # [1, 16, 8]
        assert {shard.data.shape for shard in weight.addressable_shards} == {(1, 8, 8)}
    plain = init_state(SMALL, TrainConfig(**OPTIONS))
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_sharded_training_is_single_device_training(alone):
    result = run(config=SMALL, mesh="data=2,fsdp=2")
    ours, theirs = ([(r.phase, r.step, r.loss) for r in run.records] for run in (result, alone))
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]
    np.testing.assert_allclose([row[2] for row in ours], [row[2] for row in theirs], atol=1e-5, rtol=0)


def test_a_run_goes_on_with_another_number_of_devices(alone, tmp_path):
    path = str(tmp_path / "run")
    run(config=SMALL, mesh="data=4", max_steps=8, out_dir=path)
    run(config=SMALL, mesh="data=2,fsdp=2", max_steps=16, out_dir=path, resume="auto")
    result = run(config=SMALL, max_steps=24, out_dir=path, resume="auto")
    assert result.params["final_norm"]["scale"].devices() == {jax.devices()[0]}
    losses = [record.loss for record in read_records(f"{path}/metrics.jsonl") if record.phase == "train"]
    expected = [record.loss for record in alone.records if record.phase == "train"]
    np.testing.assert_allclose(losses, expected, atol=1e-5, rtol=0)


def test_accumulation_is_exact_to_the_token_over_two_devices(rng):
    """Answers of 1 and 99 tokens on each device and in each micro-batch: one division, of all by all."""
    model = DecoderConfig(17, 100, 8, 1, 1, 8)
    ids = rng.integers(0, 17, (4, 101)).astype(np.int32)
    weights = np.zeros((4, 100), np.float32)
    weights[:2, 40], weights[2:, 1:] = 1, 1
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}
    got: list[Any] = []
    for text, size, accumulation in ((None, 4, 1), ("data=2", 2, 2)):
        config = TrainConfig(
            batch_size=size, grad_accumulation_steps=accumulation, mesh=text, max_steps=9, max_grad_norm=None
        )
        mesh = parse_mesh(text)
        step = make_train_step(model, config, mesh)
        got.append(step(init_state(model, config, mesh), place_batch(batch, mesh, 4), np.int32(0)))
    (one, metrics_one), (two, metrics_two) = got
    assert int(metrics_one.targets) == int(metrics_two.targets) == 200
    np.testing.assert_allclose(metrics_one.loss, metrics_two.loss, atol=1e-6)
    for a, b in zip(jax.tree.leaves(one.optimizer.m), jax.tree.leaves(two.optimizer.m), strict=True):
        np.testing.assert_allclose(np.asarray(a) * 10, np.asarray(b) * 10, atol=1e-6, rtol=0)  # m = 0.1·gradient


def test_evaluation_on_a_mesh_needs_windows_of_one_shape():
    with pytest.raises(ConfigError, match="padded=True"):
        Evaluator(SMALL, evaluation_windows(tokens()[400:], 8, 4), mesh=parse_mesh("data=2"))


def test_rows_that_do_not_divide_by_the_devices_are_refused():
    with pytest.raises(ConfigError, match="a multiple of the 3 devices; got batch_size 4"):
        run(config=SMALL, mesh="data=3")
