"""A run that was stopped, killed or damaged goes on as if nothing had happened, bit for bit."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from riftco.data import UniformWindowSource
from riftco.errors import CheckpointError, ConfigError, DataError
from riftco.tokenizers import ByteTokenizer
from riftco.train import Interrupted, TrainConfig, TrainRecord, ValidationRecord, events, read_records, train
from riftco.train.metrics import MetricsLog
from tests.training_program import CONFIG, OPTIONS, SOURCES, compilation_cache, environment, make_source, run, tokens


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.getbasetemp() / "compiled"


@pytest.fixture(scope="module", autouse=True)
def _cache(cache):
    with compilation_cache(cache):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, _cache) -> Path:
    """A whole run, to be copied and never changed."""
    path = tmp_path_factory.mktemp("finished") / "run"
    run(out_dir=str(path))
    return path


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def assert_same_run(path: Path, result: Any, whole: Any) -> None:
    """Every record but its times, and every bit of the weights and moments."""
    untimed = lambda records: [dataclasses.replace(record, tokens_per_second=None) for record in records]
    assert untimed(read_records(path / "metrics.jsonl")) == untimed(whole.records)
    leaves = zip(jax.tree_util.tree_leaves_with_path(result.state), jax.tree.leaves(whole.state), strict=True)
    for (name, a), b in leaves:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(name))


def stop_at(step: int) -> Any:
    """A watcher that ends the run from outside, without a checkpoint, when a step is reported."""

    def watch(event: Any) -> None:
        if isinstance(event, events.StepFinished) and event.record.step == step:
            raise RuntimeError("power cut")

    return watch


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


@pytest.mark.tiny
def test_metrics_are_cut_back_and_a_torn_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [TrainRecord(step, 2.0, 7.0, 1.0, 1.0, 0.1, 8 * step, None) for step in (1, 2, 3)]
    records.insert(2, ValidationRecord(2, 2.5, 12.0, None, 9, 3.0))
    log = MetricsLog(path)
    for record in records:
        log.add(record)
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"phase": "train", "step": 4, "lo')
    assert list(read_records(path)) == records
    MetricsLog(path, records[:3]).close()
    assert list(read_records(path)) == records[:3] and whole.startswith(path.read_bytes())
    path.write_bytes(b"not json\n" + whole)
    with pytest.raises(DataError, match="line 1 of"):
        read_records(path)


def test_numbers_that_are_not_finite_are_null(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.add(TrainRecord(1, 900.0, float("inf"), 1.0, 1.0, 0.1, 8, None))
    log.close()
    assert json.loads((tmp_path / "m.jsonl").read_text())["perplexity"] is None
    assert read_records(tmp_path / "m.jsonl")[0].perplexity == float("inf")


# ---- stopped, and resumed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SOURCES))
def test_a_run_cut_off_between_checkpoints_goes_on_bit_for_bit(kind, tmp_path):
    whole = run(kind)
    path = tmp_path / "run"
    for step in (3, 7, 18) if kind == "uniform" else (12,):  # before the first checkpoint, and between two
        with pytest.raises(RuntimeError, match="power cut"):
            run(kind, out_dir=str(path), resume="auto", on_event=stop_at(step))
    assert_same_run(path, run(kind, out_dir=str(path), resume="auto"), whole)


def test_a_finished_run_is_left_as_it_is(copy):
    files = lambda: {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in copy.rglob("*") if p.is_file()}
    before = files()
    result = run(out_dir=str(copy), resume="auto")
    assert (result.reason, result.step) == ("already_finished", 24) and files() == before


def test_an_evaluation_that_was_cut_off_is_made_up_for(copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:-1]))
    result = run(out_dir=str(copy), resume="auto")
    assert result.reason == "max_steps" and result.validation.step == 24
    assert json.loads(lines[-1])["loss"] == result.validation.loss


def test_going_back_to_a_step_rewrites_what_came_after(copy):
    before = read_records(copy / "metrics.jsonl")
    seen: list[Any] = []
    result = run(out_dir=str(copy), resume="16", on_event=seen.append)
    assert result.step == 24 and len(read_records(copy / "metrics.jsonl")) == len(before)
    assert seen[0] == events.Notice("resumed after step 16")
    assert [r.loss for r in read_records(copy / "metrics.jsonl")] == [r.loss for r in before]
    with pytest.raises(CheckpointError, match="step 13 must be in"):
        run(out_dir=str(copy), resume="13")


def test_a_longer_run_goes_on_and_a_shorter_one_is_refused(copy):
    result = run(out_dir=str(copy), resume="auto", max_steps=30, save_every=7, keep=1)
    assert result.step == 30 and result.validation.step == 30
    with pytest.raises(CheckpointError, match="saved 30, now 24"):
        run(out_dir=str(copy), resume="auto")


def test_a_fresh_start_needs_a_new_directory_or_force(copy):
    with pytest.raises(ConfigError, match=r"holds a run .*; continue it with --resume auto, remove it with --force"):
        run(out_dir=str(copy))
    (copy / "notes.txt").write_text("mine")
    result = run(out_dir=str(copy), force=True, max_steps=3 + 1)
    assert result.step == 4 and [r.step for r in result.records] == [0, 1, 2, 3, 4, 4]
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["4"]
    assert (copy / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["final", "tokenizer.json", "samples.jsonl", "report.html", "run.yaml", "checkpoints"])
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_nothing_of_a_run_is_removed_unasked(tmp_path, name, resume):
    """Also where little of it is left: a copied bundle, a tokenizer trained into the directory."""
    place = tmp_path / "run"
    if "." in name:
        place.mkdir()
        (place / name).write_text("precious")
    else:
        (place / name).mkdir(parents=True)
        (place / name / "weights").write_text("precious")
    if (resume, name) == ("auto", "run.yaml"):  # cut off before its first checkpoint: nothing to lose
        assert run(out_dir=str(place), resume=resume, max_steps=4).step == 4
        return
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        run(out_dir=str(place), resume=resume)
    assert [path.read_text() for path in place.rglob("*") if path.is_file()] == ["precious"]


def test_a_finished_run_without_its_checkpoints_is_not_started_over(copy):
    shutil.rmtree(copy / "checkpoints")
    (copy / "final").mkdir()
    before = sorted(path.name for path in copy.iterdir())
    with pytest.raises(ConfigError, match=r"holds final, which a fresh start would remove.*--resume never --force"):
        run(out_dir=str(copy), resume="auto")
    assert sorted(path.name for path in copy.iterdir()) == before
    assert len(read_records(copy / "metrics.jsonl")) == 28


def test_another_configuration_is_refused_with_the_fields_that_differ(copy):
    with pytest.raises(CheckpointError, match=r"train\.learning_rate: saved 0\.01, now 0\.02.*") as error:
        run(out_dir=str(copy), resume="auto", learning_rate=2e-2, steps_per_eval=3)
    assert "steps_per_eval" not in str(error.value)
    with pytest.raises(CheckpointError, match=r"model\.norm_eps"):
        run(out_dir=str(copy), resume="auto", config=dataclasses.replace(CONFIG, norm_eps=1e-6))
    config = TrainConfig(**OPTIONS, out_dir=str(copy), resume="auto")
    with pytest.raises(DataError, match="made from other data or options"):
        train(CONFIG, config, UniformWindowSource(tokens()[:399], 8, 4, 1))
    with pytest.raises(CheckpointError, match="tokenizer: saved null"):
        train(CONFIG, config, make_source("uniform", OPTIONS), tokenizer=ByteTokenizer.train(b"abc"))


def test_a_damaged_checkpoint_is_named_and_passed_over(copy):
    largest = max((copy / "checkpoints/24").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2 :] = b""
    largest.write_bytes(content)
    seen: list[Any] = []
    result = run(out_dir=str(copy), resume="auto", on_event=seen.append)
    notices = [event.message for event in seen if isinstance(event, events.Notice)]
    assert "checkpoint 24 is damaged" in notices[0] and notices[1] == "resumed after step 20"
    assert result.step == 24
    assert run(out_dir=str(copy), resume="auto").reason == "already_finished"  # 24 was written again


def test_when_every_checkpoint_is_damaged_nothing_is_thrown_away(copy):
    for path in (copy / "checkpoints").rglob("metadata"):
        path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"every one in .* is damaged"):
        run(out_dir=str(copy), resume="auto")
    assert len(read_records(copy / "metrics.jsonl")) == 28


# ---- killed ----------------------------------------------------------------------------------------------------------


def start(path: Path, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training_program", str(path), *arguments]
    return subprocess.Popen(command, env=environment(cache), stderr=subprocess.PIPE, text=True)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 120
    while time.monotonic() < limit and process.poll() is None:
        if (path / "metrics.jsonl").is_file() and (path / "metrics.jsonl").read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)
    process.kill()
    raise AssertionError(f"the run did not get that far: {process.communicate()[1]}")


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, cache):
    whole = run()
    path = tmp_path / "run"
    process = start(path, cache, "--pause", "0.03")
    wait_for_lines(path, 13, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"phase": "tra')  # as a kill in the middle of a write leaves it
    assert_same_run(path, run(out_dir=str(path), resume="auto"), whole)


def test_sigterm_saves_and_exits_with_143(tmp_path, cache):
    path = tmp_path / "run"
    process = start(path, cache, "--pause", "0.03")
    wait_for_lines(path, 4, process)
    process.terminate()
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and "stopped by SIGTERM after step" in message
    assert_same_run(path, run(out_dir=str(path), resume="auto"), run())


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(SOURCES))
def test_five_kills_at_random_moments(kind, tmp_path, cache, rng):
    whole = run(kind, max_steps=120)
    path = tmp_path / "run"
    arguments = ("--source", kind, "--max-steps", "120", "--pause", "0.01", "--resume", "auto")
    for count in sorted(rng.integers(2, 120, 5)):
        process = start(path, cache, *arguments)
        wait_for_lines(path, int(count), process)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.communicate()
    assert_same_run(path, run(kind, max_steps=120, out_dir=str(path), resume="auto"), whole)


def test_interrupted_is_a_training_error_with_an_exit_code():
    assert Interrupted(signal.SIGINT, 3, "run").exit_code == 130
