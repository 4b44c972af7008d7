"""Two processes on this machine train as one, and notice when the other is gone."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training_program import environment


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


def test_two_processes_are_one_and_resume_as_one(tmp_path, cache):
    arguments = ("--max-steps", "12")
    one = start(tmp_path / "one", cache, "--mesh", "data=2", *arguments, devices=2)
    text = one.communicate(timeout=300)[0]
    assert one.returncode == 0, text
    two = start_two(tmp_path / "two", cache, "--max-steps", "9")
    texts = [process.communicate(timeout=300)[0] for process in two]
    assert [process.returncode for process in two] == [0, 0], texts
    # The second half by one process: what two have saved together, one can read.
    again = start(tmp_path / "two", cache, "--mesh", "data=2", "--resume", "auto", *arguments, devices=2)
    text = again.communicate(timeout=300)[0]
    assert again.returncode == 0, text
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
