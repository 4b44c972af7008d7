"""The TPU kernels' code is as long as it was: within 5 % of the baseline, either way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aot.bundles import BASELINE, TARGETS, count

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.05
REMEDY = "if that is meant, write the baseline anew: python -m tests.aot.bundles --write"


def test_bundle_counts_are_the_baselines():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.aot.bundles"], capture_output=True, text=True, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    now, before = json.loads(done.stdout), json.loads(BASELINE.read_text())
    assert set(before["bundles"]) == set(TARGETS)
    wrong = []
    for target, programs in before["bundles"].items():
        for program, kernels in programs.items():
            assert now["bundles"][target][program].keys() == kernels.keys(), f"{target} {program}: {REMEDY}"
            for kernel, bundles in kernels.items():
                got = now["bundles"][target][program][kernel]
                if abs(got - bundles) > TOLERANCE * bundles:
                    wrong.append(f"{target} {kernel}: {got} bundles, {bundles} before")
    versions = f"{now['versions']} now, {before['versions']} before"
    assert not wrong, "\n".join([*wrong, versions, REMEDY])


def test_counts_are_read_from_schedules(tmp_path):
    head = "Schedule analysis:\n\ttotal scheduled bundles:    {}\n"
    (tmp_path / "17-flash.1-71-schedule-analysis_final_bundles.txt").write_text(head.format(46))
    (tmp_path / "18-flash.2-71-schedule-analysis_final_bundles.txt").write_text(head.format(48))
    (tmp_path / "19-copy-66-schedule-analysis_final_bundles.txt").write_text(head.format(3))
    (tmp_path / "17-flash.1-71-schedule-analysis_packed-bundles-post-ra.txt").write_text(head.format(9))
    assert count(tmp_path) == {"flash": 48, "copy": 3}
    (tmp_path / "20-new-66-schedule-analysis_final_bundles.txt").write_text("Schedule")
    with pytest.raises(ValueError, match="no count of bundles"):
        count(tmp_path)
