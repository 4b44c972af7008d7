"""The training step and loop: what is learnt, counted, written, stopped and refused."""

import dataclasses
import json
import math
import os
import pathlib
import runpy
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import models
from riftco.data import Batch, UniformWindowSource, evaluation_windows, token_byte_lengths
from riftco.errors import ConfigError, DataError, ShapeError, TrainingError
from riftco.models import DecoderConfig
from riftco.tokenizers import ByteTokenizer
from riftco.train import (
    FixedBatchSource,
    Interrupted,
    NonFiniteStep,
    TrainConfig,
    TrainRecord,
    ValidationRecord,
    abstract_state,
    evaluate,
    events,
    init_state,
    make_train_step,
    place_batch,
    streams,
    train,
)
from riftco.train.config import MAY_CHANGE
from riftco.train.throughput import flops_per_token, peak_flops
from tests.training_program import CONFIG, OPTIONS, compilation_cache, make_source, run, tokens


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with compilation_cache(tmp_path_factory.getbasetemp() / "compiled"):
        yield


PLAIN = DecoderConfig(17, 8, 16, 2, 1, 32)


def batch_of(rng: np.random.Generator, rows: int, config: DecoderConfig = CONFIG) -> Batch:
    ids = rng.integers(0, config.vocab_size, (rows, config.context + 1)).astype(np.int32)
    return Batch(ids[:, :-1], ids[:, 1:])


def arrays_of(batch: Batch) -> dict[str, Any]:
    """On the device, as the loop hands them over, so that both use one compiled step."""
    arrays = {"tokens": batch.tokens, "targets": batch.targets, "weights": batch.weights}
    return place_batch(arrays, None, len(batch.tokens))


def assert_same_bits(left: Any, right: Any) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def untimed(records: Any) -> list[Any]:
    return [dataclasses.replace(record, tokens_per_second=None) for record in records]


# ---- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.tiny
def test_a_configuration_survives_its_dict_and_refuses_unknown_keys():
    config = TrainConfig(max_steps=7, mesh="data=2", patience=3, page_size=64, max_grad_norm=None)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match=r"every key must be a field; got lerning_rate"):
        TrainConfig.from_dict({"lerning_rate": 1})
    assert {field.name for field in dataclasses.fields(TrainConfig)} > MAY_CHANGE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_steps": 0}, "max_steps must be an integer of at least 1; got 0"),
        ({"batch_size": True}, "batch_size must be an integer"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number"),
        ({"lr_schedule": "cosin"}, "lr_schedule must be one of cosine, constant, linear, wsd"),
        ({"min_lr": 1.0}, "min_lr must not exceed learning_rate"),
        ({"warmup_steps": 1000}, "warmup_steps must be less than max_steps"),
        ({"resume": "last"}, "resume must be never, auto or the number of a step"),
        ({"resume": "auto"}, "resume needs an out_dir"),
        ({"resume": 300}, "resume needs an out_dir"),
        ({"resume": -1}, "resume must be never, auto or the number of a step; got '-1'"),
        ({"resume": True}, "resume must be never, auto or the number of a step; got True"),
        ({"resume": "²", "out_dir": "x"}, "resume must be"),
        ({"resume": "auto", "out_dir": "x", "force": True}, "force removes the run that resume goes on with"),
        ({"max_grad_norm": 0}, "TrainConfig: max_grad_norm must be a normal positive float32"),
        ({"beta2": 1.0}, r"TrainConfig: beta2 must be in \[0, 1\)"),
        ({"eps": 0.0}, "TrainConfig: eps must be"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(values, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**values)


def test_streams_are_separate_and_follow_the_seed_alone():
    first, again, other = streams(5), streams(5), streams(6)
    assert first.data == again.data != other.data
    assert (jax.random.key_data(first.init) == jax.random.key_data(again.init)).all()
    keys = {tuple(np.asarray(jax.random.key_data(key)).tolist()) for s in (first, other) for key in (s.init, s.dropout)}
    assert len(keys) == 4


# ---- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.tiny
def test_one_batch_is_learnt_by_heart_in_memory(rng):
    config = TrainConfig(**{**OPTIONS, "max_steps": 200})
    result = train(PLAIN, config, FixedBatchSource([batch_of(rng, 4, PLAIN)]))
    losses = [record.loss for record in result.records]
    assert [record.step for record in result.records] == list(range(1, 201))
    assert losses[0] > 2.5 and losses[-1] < 0.05
    assert result.reason == "max_steps" and result.validation is None
    assert int(result.state.optimizer.step) == 200


def test_a_step_that_is_not_finite_or_out_of_turn_changes_no_bit(rng):
    config = TrainConfig(**OPTIONS)
    step = make_train_step(CONFIG, config)
    good = arrays_of(batch_of(rng, 4))
    bad = {**good, "tokens": good["tokens"] + 99}  # out of range: NaN under jit
    state, _ = step(init_state(CONFIG, config), good, np.int32(0))
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, bad, np.int32(1))
    assert not metrics.ok and math.isnan(metrics.loss)
    assert_same_bits(before, state)
    state, metrics = step(state, good, np.int32(2))  # already sent when step 1 was found to have failed
    assert not metrics.ok and math.isfinite(metrics.loss)
    assert_same_bits(before, state)
    state, metrics = step(state, good, np.int32(1))
    assert metrics.ok and int(state.optimizer.step) == 2


def test_two_micro_batches_are_one_batch_to_the_token(rng):
    """Answers of 1 and of 99 tokens: a mean of means would weigh the single token like the 99 others together."""
    model = DecoderConfig(17, 100, 8, 1, 1, 8)
    weights = np.zeros((2, 100), np.float32)
    weights[0, 40], weights[1, 1:] = 1, 1
    batch = {**arrays_of(batch_of(rng, 2, model)), "weights": weights}
    common = {"max_steps": 10, "max_grad_norm": None, "learning_rate": 1e-2}
    got = {}
    for size, accumulation in ((2, 1), (1, 2)):
        config = TrainConfig(**common, batch_size=size, grad_accumulation_steps=accumulation)
        state, metrics = make_train_step(model, config)(init_state(model, config), batch, np.int32(0))
        got[accumulation] = (metrics, state.optimizer.m, state)
    one, two = got[1], got[2]
    assert int(one[0].targets) == int(two[0].targets) == 100
    np.testing.assert_allclose(one[0].loss, two[0].loss, rtol=1e-6)
    # m = 0.1·gradient after the first update.
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(two[1]), strict=True):
        np.testing.assert_allclose(a * 10, b * 10, atol=1e-6, rtol=0)
    config = TrainConfig(**common, batch_size=2)
    alone = [np.where(np.arange(2)[:, None] == row, weights, 0) for row in (0, 1)]
    step = make_train_step(model, config)
    means = [
        step(init_state(model, config), {**batch, "weights": w.astype(np.float32)}, np.int32(0))[1].loss for w in alone
    ]
    assert abs(np.mean(means) - one[0].loss) > 1e-3


def test_a_batch_of_another_size_is_refused(rng):
    config = TrainConfig(batch_size=4, grad_accumulation_steps=2, max_steps=5)
    with pytest.raises(ShapeError, match=r"grad_accumulation_steps = 8; got \[4, 8\]"):
        make_train_step(CONFIG, config).trace(abstract_state(CONFIG, config), arrays_of(batch_of(rng, 4)), np.int32(0))


def test_block_checkpointing_changes_no_bit_under_dropout():
    assert CONFIG.dropout == 0.5
    plain, saved = (run(max_steps=6, grad_checkpoint=choice) for choice in ("none", "block"))
    assert untimed(plain.records) == untimed(saved.records)
    assert_same_bits(plain.state, saved.state)
    assert len({record.loss for record in plain.records}) > 5


@pytest.mark.parametrize(
    ("option", "tolerance"),
    [({"dtype": "bfloat16"}, 3e-2), pytest.param({"page_size": 50}, 1e-6, marks=pytest.mark.slow)],
)
def test_narrow_activations_and_paged_moments_train_as_well(option, tolerance):
    plain, other = (run(max_steps=6, config=PLAIN, **more) for more in ({}, option))
    np.testing.assert_allclose([r.loss for r in other.records], [r.loss for r in plain.records], atol=tolerance)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(other.params))
    if "dtype" in option:
        assert [r.loss for r in other.records] != [r.loss for r in plain.records]


def test_the_dropout_override_wins_over_the_model(rng):
    batch = arrays_of(batch_of(rng, 4))

    def program(model: DecoderConfig, **options: Any) -> str:
        config = TrainConfig(**OPTIONS, **options)
        return make_train_step(model, config).lower(abstract_state(model, config), batch, np.int32(0)).as_text()

    none = dataclasses.replace(CONFIG, dropout=0.0)
    assert program(CONFIG, dropout=0.0) == program(none) != program(CONFIG)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_the_evaluator_scores_every_target_once_by_token():
    params = models.init(jax.random.key(1), CONFIG)
    rows = [tokens()[:30], tokens()[100:105], tokens()[200:201], tokens()[300:310]]
    forward = jax.jit(lambda tokens: models.forward(params, tokens, CONFIG))
    losses = []
    for row in rows:
        for start in range(0, len(row) - 1, CONFIG.context):
            chunk = row[start : start + CONFIG.context + 1].astype(np.int32)
            inputs = np.zeros((1, CONFIG.context), np.int32)  # what follows a position does not matter to it
            inputs[0, : len(chunk) - 1] = chunk[:-1]
            logits = np.asarray(forward(inputs), np.float64)[0]
            wide = np.log(np.exp(logits).sum(-1))
            losses += [wide[t] - logits[t, target] for t, target in enumerate(chunk[1:])]
    for padded in (True, False):
        result = evaluate(params, CONFIG, evaluation_windows(rows, CONFIG.context, 4, padded=padded))
        assert result.targets == len(losses) == 29 + 4 + 9 and result.skipped == 1
        assert abs(result.loss - np.mean(losses)) < 1e-6
        assert result.perplexity == math.exp(result.loss) and result.bits_per_byte is None


def test_bits_per_byte_count_the_bytes_of_the_targets():
    text = "naïve café, naïve café. " * 20
    tokenizer = ByteTokenizer.train(text.encode())
    ids = tokenizer.encode(text)
    model = DecoderConfig(tokenizer.vocab_size, 8, 8, 2, 1, 16)
    params = models.init(jax.random.key(0), model)
    windows = evaluation_windows(ids, 8, 4, padded=True)
    result = evaluate(params, model, windows, byte_lengths=token_byte_lengths(tokenizer))
    assert result.bytes == len(text.encode()) - 1
    assert result.bits_per_byte is not None
    assert abs(result.bits_per_byte - result.loss / math.log(2)) < 1e-9  # a byte tokenizer: one byte a token


def test_an_evaluation_that_is_not_finite_is_an_error():
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, models.init(jax.random.key(0), CONFIG))
    with pytest.raises(TrainingError, match="every loss must be finite; got nan in held_out rows 0:0"):
        evaluate(params, CONFIG, evaluation_windows(tokens()[:30], 8, 4, padded=True))


# ---- the loop --------------------------------------------------------------------------------------------------------


def test_a_run_writes_one_record_a_step_and_validates_when_due(tmp_path):
    seen: list[Any] = []
    result = run(out_dir=str(tmp_path / "run"), on_event=seen.append)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["phase"] == "train"] == list(range(1, 25))
    assert [line["step"] for line in lines if line["phase"] == "validation"] == [0, 8, 16, 24]
    assert list(lines[1]) == [
        "phase", "step", "loss", "perplexity", "grad_norm", "clip_scale", "learning_rate", "tokens",
        "tokens_per_second",
    ]  # fmt: skip
    assert list(lines[0]) == [
        "phase", "step", "loss", "perplexity", "bits_per_byte", "tokens", "tokens_per_second",
    ]  # fmt: skip
    assert lines[-2]["tokens"] == 24 * 4 * 8 and lines[-1]["tokens"] == 99
    assert lines[1]["tokens_per_second"] is None and lines[2]["tokens_per_second"] > 0
    assert np.float32(lines[1]["learning_rate"]) == np.float32(1e-2 / 4)  # one of three steps of warm-up
    assert result.validation.loss < lines[0]["loss"]
    kinds = [type(event) for event in seen]
    assert kinds[:3] == [events.RunStarted, events.Validated, events.Compiled] and kinds[-1] is events.RunFinished
    saved = [event.step for event in seen if isinstance(event, events.Saved)]
    assert saved == [5, 8, 10, 15, 16, 20, 24]
    order = [type(e) for e in seen if getattr(e, "step", None) == 8 or getattr(getattr(e, "record", e), "step", 0) == 8]
    assert order == [events.StepFinished, events.Saved, events.Validated]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "metrics.jsonl", "run.yaml"]


def test_the_same_seed_gives_the_same_run_and_memory_equals_disk(tmp_path):
    first, second = run(), run(out_dir=str(tmp_path / "run"))
    assert untimed(first.records) == untimed(second.records)
    assert_same_bits(first.state, second.state)


def test_a_source_that_writes_over_its_buffer_disturbs_nothing():
    plain = run(max_steps=12)
    source = make_source("uniform", OPTIONS)

    class Reusing:
        def __init__(self) -> None:
            self.kind, self.fingerprint, self.batches_emitted = source.kind, source.fingerprint, 0
            self.tokens, self.targets = (np.zeros((4, 8), np.int32) for _ in range(2))
            self.batch, self.state, self.restore = source.batch, source.state, source.restore

        def next(self, rows: Any = None) -> Batch:
            fresh = source.next(rows)
            self.tokens[:], self.targets[:] = fresh.tokens, fresh.targets
            return Batch(self.tokens, self.targets)

    validation = evaluation_windows(tokens()[400:], 8, 4, padded=True)
    result = train(CONFIG, TrainConfig(**{**OPTIONS, "max_steps": 12}), Reusing(), validation=validation)
    assert untimed(result.records) == untimed(plain.records)


def test_a_non_finite_step_stops_with_its_batch_and_keeps_the_state_before_it(tmp_path):
    class Poisoned(UniformWindowSource):
        def next(self, rows: Any = None) -> Batch:
            batch = super().next(rows)
            if self.batches_emitted < 5:
                return batch
            return dataclasses.replace(batch, tokens=np.full_like(batch.tokens, 17))

    def poisoned() -> Poisoned:
        return Poisoned(tokens()[:400], 8, 4, streams(3).data)

    options = {**OPTIONS, "out_dir": str(tmp_path / "run")}
    with pytest.raises(
        NonFiniteStep, match=r"at step 5 the loss is nan .* on uniform_window rows 0:\d+.* checkpoint 4"
    ) as error:
        train(CONFIG, TrainConfig(**options), poisoned())
    assert error.value.step == 5 and int(error.value.state.optimizer.step) == 4
    good = run()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    updates = [record for record in good.records if record.phase == "train"]
    assert [line["loss"] for line in lines] == [record.loss for record in updates[:4]]
    # What was saved is step 4 and the batch that failed comes next again.
    resumed = train(CONFIG, TrainConfig(**{**options, "resume": "auto"}), make_source("uniform", OPTIONS))
    assert untimed(resumed.records) == untimed(updates)
    assert_same_bits(resumed.state, good.state)


def test_training_stops_early_when_nothing_gets_better(tmp_path):
    result = run(learning_rate=0.0, warmup_steps=0, steps_per_eval=4, patience=2, out_dir=str(tmp_path / "run"))
    assert (result.reason, result.step, result.best.step) == ("patience", 8, 0)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    options = {"learning_rate": 0.0, "warmup_steps": 0, "steps_per_eval": 4, "patience": 2}
    again = run(**options, out_dir=str(tmp_path / "run"), resume="auto")
    assert again.reason == "already_finished" and again.step == 8
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_ctrl_c_saves_and_stops_and_the_rest_can_be_resumed(tmp_path):
    def interrupt(event: Any) -> None:
        if isinstance(event, events.StepFinished) and event.record.step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="--resume auto") as error:
        run(out_dir=str(tmp_path / "run"), on_event=interrupt)
    assert error.value.exit_code == 130 and error.value.step in (8, 9)
    assert (tmp_path / f"run/checkpoints/{error.value.step}").is_dir()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed, whole = run(out_dir=str(tmp_path / "run"), resume="auto"), run()
    assert untimed(resumed.records) == untimed(whole.records)
    assert_same_bits(resumed.state, whole.state)


def test_a_step_given_as_a_number_is_that_step():
    assert TrainConfig(resume=300, out_dir="x").resume == "300"


def test_attention_that_is_not_here_is_refused_before_anything_is_written(tmp_path):
    for name, error in (("cudnn", NotImplementedError), ("flash", ConfigError)):
        with pytest.raises(error, match=name):
            run(out_dir=str(tmp_path / "run"), attention=name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_start_that_fails_leaves_nothing_behind(tmp_path, is_there):
    class Broken:
        def __getattr__(self, name):
            return getattr(make_source("uniform", OPTIONS), name)

        def next(self, rows=None):
            raise DataError("no batch")

    place = tmp_path / "run"
    if is_there:
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    validation = evaluation_windows(tokens()[400:], CONFIG.context, 4, padded=True)
    with pytest.raises(DataError, match="no batch"):
        train(CONFIG, TrainConfig(**OPTIONS, out_dir=str(place)), Broken(), validation=validation)
    assert (os.listdir(place) if place.exists() else None) == (["notes.txt"] if is_there else None)


def test_a_tokenizer_too_large_for_the_model_is_refused():
    tokenizer = ByteTokenizer.train(bytes(range(97, 123)))
    with pytest.raises(ConfigError, match="the tokenizer has 26 ids and the model 17 rows"):
        train(CONFIG, TrainConfig(**OPTIONS), make_source("uniform", OPTIONS), tokenizer=tokenizer)


def test_an_out_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises((ConfigError, DataError), match="it must be possible to write to the directory"):
        run(out_dir=str(tmp_path / "file" / "run"))


# ---- throughput ------------------------------------------------------------------------------------------------------


def test_the_script_stops_at_the_step_that_failed_not_at_the_next_line_of_its_log(tmp_path, monkeypatch):
    script = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "experiments" / "train_tpu.py"))
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    words = f"x --data {tmp_path}/text.txt --out-dir {tmp_path}/run --max-steps 12 --max-seq-length 8 --batch-size 2"
    monkeypatch.setattr("sys.argv", [*words.split(), "--learning-rate", "1e38", "--log-every", "100"])
    with pytest.raises(SystemExit, match=r"^step [1-3]: .* is not finite on "):
        script["main"]()


def test_arithmetic_per_token_by_hand():
    model = DecoderConfig(10, 8, 4, 2, 1, 16, bias=False)
    norms = 2 * 3 * 4
    weights = 4 * 4 * 4 + 2 * 4 * 16 + 10 * 4 + norms
    assert flops_per_token(model, 8) == 6 * weights + 12 * 1 * 4 * 8
    tied = dataclasses.replace(model, tie_embeddings=True)
    assert flops_per_token(tied, 8) == flops_per_token(model, 8)


def test_the_longest_device_name_decides_the_peak():
    class Device:
        def __init__(self, device_kind: str) -> None:
            self.device_kind = device_kind

    assert peak_flops(Device("TPU v5 lite")) == 197e12
    assert peak_flops(Device("TPU v5")) == 459e12
    assert peak_flops(Device("NVIDIA H200 NVL")) == 989e12
    assert peak_flops(Device("cpu")) is None
    assert TrainRecord.phase == "train" and ValidationRecord.phase == "validation"
