"""One small training run, as a function and as a program that can be killed, stopped, or run as several processes."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from riftco.data import (
    ExampleWindowBatchSource,
    RandomWindowBatchSource,
    SequenceWindowBatchSource,
    Source,
    UniformWindowSource,
    evaluation_windows,
)
from riftco.errors import RiftcoError
from riftco.models import DecoderConfig
from riftco.train import TrainConfig, TrainResult, connect, streams, train

CONFIG = DecoderConfig(17, 8, 8, 2, 2, 16, dropout=0.5)
# One layer compiles in half the time.
SMALL = DecoderConfig(17, 8, 8, 2, 1, 16, dropout=0.1)
# A constant rate after the warm-up, so that runs of every length share one compiled step.
OPTIONS: dict[str, Any] = {
    "batch_size": 4, "max_steps": 24, "learning_rate": 1e-2, "warmup_steps": 3, "lr_schedule": "constant",
    "weight_decay": 0.1, "save_every": 5, "steps_per_eval": 8, "seed": 3,
}  # fmt: skip
SOURCES = {
    "uniform": UniformWindowSource,
    "random": RandomWindowBatchSource,
    "sequence": SequenceWindowBatchSource,
    "example": ExampleWindowBatchSource,
}


@contextlib.contextmanager
def compilation_cache(directory: Any) -> Iterator[None]:
    """Compiled programs are kept in a directory, so that the tests compile each step once."""
    names = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    old = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            jax.config.update(name, value)


def tokens() -> np.ndarray:
    """500 ids that are not uniform, so that there is something to learn."""
    i = np.arange(500)
    return (i * i + 3 * i // 2 + i % 7) % 17


def make_source(kind: str, options: dict[str, Any]) -> Source:
    ids = tokens()[:400]
    rows = options["batch_size"] * options.get("grad_accumulation_steps", 1)
    is_of_sequences = kind in ("sequence", "example")
    text: Any = np.split(ids, [60, 150, 330]) if is_of_sequences else ids
    return SOURCES[kind](text, CONFIG.context, rows, streams(options["seed"]).data)


def run(
    kind: str = "uniform", *, config: DecoderConfig = CONFIG, on_event: Any = None, **overrides: Any
) -> TrainResult:
    """Train with the options above, changed by `overrides`."""
    options = {**OPTIONS, **overrides}
    validation = evaluation_windows(tokens()[400:], CONFIG.context, 4, padded=True)
    return train(config, TrainConfig(**options), make_source(kind, options), validation=validation, on_event=on_event)


def environment(cache: Any, devices: int = 8) -> dict[str, str]:
    """Variables for a child that computes as this process does."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out_dir")
    parser.add_argument("--source", default="uniform")
    parser.add_argument("--resume", default="never")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--mesh")
    parser.add_argument("--small", action="store_true", help="one layer")
    parser.add_argument("--max-steps", type=int, default=OPTIONS["max_steps"])
    parser.add_argument("--coordinator")
    parser.add_argument("--process", type=int)
    parser.add_argument("--die-at", type=int, help="the step at which this process ends without a word")
    arguments = parser.parse_args()
    if arguments.coordinator:
        connect(arguments.coordinator, 2, arguments.process, timeout_seconds=60)

    steps = 0

    class Watched:
        """The source, with a pause or a death between batches; every process has one, unlike `on_event`."""

        def __init__(self, source: Source) -> None:
            self._source = source

        def __getattr__(self, name: str) -> Any:
            return getattr(self._source, name)

        def next(self, rows: Any = None) -> Any:
            nonlocal steps
            steps += 1
            time.sleep(arguments.pause)
            if steps == arguments.die_at:
                os._exit(9)
            return self._source.next(rows)

    options = {
        **OPTIONS, "out_dir": arguments.out_dir, "resume": arguments.resume, "mesh": arguments.mesh,
        "max_steps": arguments.max_steps,
    }  # fmt: skip
    source: Any = Watched(make_source(arguments.source, options))
    validation = evaluation_windows(tokens()[400:], CONFIG.context, 4, padded=True)
    try:
        train(SMALL if arguments.small else CONFIG, TrainConfig(**options), source, validation=validation)
    except RiftcoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # Not sys.exit: a process whose peers are gone must not wait for them at exit.
        os._exit(getattr(error, "exit_code", 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
