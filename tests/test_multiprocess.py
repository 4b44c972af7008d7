"""Two processes on this machine train as one, and notice when the other is gone."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training_program import SMALL, compilation_cache, environment, run


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.getbasetemp() / "compiled-processes"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(path: Path, cache: Path, *arguments: str, devices: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training_program", str(path), "--small", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment(cache, devices), **pipes)


def start_two(path: Path, cache: Path, *arguments: str, second: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
    address = f"127.0.0.1:{free_port()}"
    common = ("--coordinator", address, "--mesh", "data=2", *arguments)
    return [
        start(path, cache, *common, "--process", "0"),
        start(path, cache, *common, "--process", "1", *second),
    ]


def records(path: Path) -> list[dict[str, Any]]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def test_two_processes_are_one_and_one_goes_on_from_what_two_saved(tmp_path, cache):
    two = start_two(tmp_path / "two", cache, "--max-steps", "9")
    texts = [process.communicate(timeout=300)[0] for process in two]
    assert [process.returncode for process in two] == [0, 0], texts
    with compilation_cache(cache):
        run(config=SMALL, mesh="data=2", max_steps=12, out_dir=str(tmp_path / "one"))
        run(config=SMALL, mesh="data=2", max_steps=12, out_dir=str(tmp_path / "two"), resume="auto")
    ours, theirs = records(tmp_path / "two"), records(tmp_path / "one")
    ours = [record for record in ours if (record["phase"], record["step"]) != ("validation", 9)]
    assert [(r["phase"], r["step"]) for r in ours] == [(r["phase"], r["step"]) for r in theirs]
    for left, right in zip(ours, theirs, strict=True):
        assert left == {**right, **{k: pytest.approx(v, abs=1e-5) for k, v in right.items() if isinstance(v, float)}}


def test_a_process_that_dies_is_noticed_by_the_other(tmp_path, cache):
    two = start_two(tmp_path / "run", cache, "--pause", "0.05", second=("--die-at", "3"))
    two[1].communicate(timeout=300)
    begin = time.monotonic()
    text = two[0].communicate(timeout=120)[0]
    assert time.monotonic() - begin < 60
    assert two[0].returncode not in (0, None)
    assert "every process must keep running" in text, text


@pytest.mark.slow
def test_the_script_for_tpu_hosts_runs_as_one_process_and_as_two(tmp_path, cache):
    root = Path(__file__).resolve().parents[1]

    def script(out_dir: str, devices: int, *more: str) -> subprocess.Popen[str]:
        options = (
            "--max-steps",
            "20",
            "--batch-size",
            "4",
            "--max-seq-length",
            "16",
            "--out-dir",
            str(tmp_path / out_dir),
        )
        command = [sys.executable, "experiments/train_tpu.py", "--data", "corpus/tiny.txt", *options, *more]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=root, env=environment(cache, devices), **pipes)

    def finished(*processes: subprocess.Popen[str]) -> None:
        texts = [process.communicate(timeout=300)[0] for process in processes]
        assert not any(process.returncode for process in processes), texts

    finished(script("one", 1))
    names = ("--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process")
    finished(*(script("two", 1, *names, str(process)) for process in (0, 1)))
    one, two = ([record["loss"] for record in records(tmp_path / name)] for name in ("one", "two"))
    assert one == pytest.approx(two, abs=1e-5) and len(one) == 2
    finished(script("two", 4, "--max-steps", "30", "--mesh", "data=2,fsdp=2"))  # two saved it, four devices go on
    assert len(records(tmp_path / "two")) == 3


@pytest.mark.slow
def test_sigterm_to_one_process_saves_and_stops_both(tmp_path, cache):
    two = start_two(tmp_path / "run", cache, "--pause", "0.1", "--max-steps", "500")
    while not (tmp_path / "run/metrics.jsonl").is_file() or len(records(tmp_path / "run")) < 4:
        assert [process.poll() for process in two] == [None, None]
        time.sleep(0.05)
    two[1].terminate()
    texts = [process.communicate(timeout=100)[0] for process in two]
    assert [process.returncode for process in two] == [143, 143], texts
    saved = max(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir())
    assert all(f"stopped by SIGTERM after step {saved}, which is saved" in text for text in texts), texts
