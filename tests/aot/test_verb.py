"""`riftco aot` as a user types it: one process, jax on the CPU by itself, and not a word on stderr but its own."""

import json
import os
import subprocess
import sys

import pytest

from riftco.models import preset


@pytest.mark.parametrize(
    ("target", "step", "kernel"),
    [
        ("v5e:2x4", "train", "flash_attention_forward"),
        ("h200", "train", "flash_attention_forward"),
        ("v6e:1x1", "decode", ""),
    ],
)
def test_the_verb(target, step, kernel):
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    words = ["aot", "--target", target, "--step", step, "--preset", "llama-tiny", "--layers", "2", "--batch-size", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "riftco", *words, "--json"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    weights = 4 * 2 * preset("llama-tiny", layers=2).width
    assert got["fits"] and got["target"] == target and got["arguments"] > weights
    assert kernel in "".join(got["kernels"])
    lines = done.stderr.splitlines()
    assert lines[0] == f"compiling for {target} …" and lines[1].startswith(f"{step} step, ")
    assert all(line.startswith("  ") for line in lines[2:]), done.stderr
