"""`riftco bench train`: the compiled train step beside jax.grad + optax, paired runs in one process.

Every figure is a ratio of ours to a peer's, measured alternately, so that a busy machine slows both. Times are medians;
memory is XLA's temporary buffers; compile times are of one compilation each, alternated.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from riftco import backend, models, ops, optim
from riftco.autodiff import value_and_grad, vjp
from riftco.cli import bench_peers, bench_twin
from riftco.models import DecoderConfig

SHAPES = {
    "base": (DecoderConfig(65, 256, 384, 6, 6, 1536), 8),
    "nanogpt": (DecoderConfig(65, 64, 128, 4, 4, 512), 12),
}
REFERENCE_SHAPE = (DecoderConfig(512, 128, 128, 4, 4, 512, head_bias=True), 8)


def train_step(config: DecoderConfig, grad_checkpoint: str = "none") -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours, in the form of `bench_twin.train_step`."""
    init, update = optim.adam(1e-3, b2=0.99, weight_decay=0.1, max_grad_norm=1.0)

    def step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        value, grads = value_and_grad(models.loss)(params, tokens, targets, config, grad_checkpoint=grad_checkpoint)
        params, state, _ = update(grads, state, params)
        return params, state, value

    return init, step


class Runner:
    """A compiled step with its donated state."""

    def __init__(self, make: tuple[Any, Any], params: Any, tokens: Any, targets: Any) -> None:
        init, step = make
        params = jax.tree_util.tree_map(jnp.array, params)
        self.state = (params, init(params))
        self.batch = (tokens, targets)
        started = time.perf_counter()
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*self.state, *self.batch).compile()
        self.compile_seconds = time.perf_counter() - started
        analysis = self.compiled.memory_analysis()
        self.temporary_bytes = analysis.temp_size_in_bytes if analysis else 0  # not every backend tells

    def run(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        *state, loss = self.compiled(*self.state, *self.batch)
        jax.block_until_ready((state, loss))
        self.state = tuple(state)
        return time.perf_counter() - started


def paired(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both and the median of the rounds' ratios, the two run alternately after a warm-up each."""
    ours()
    theirs()
    pairs = [(ours(), theirs()) if i % 2 else tuple(reversed((theirs(), ours()))) for i in range(rounds)]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def _batch(config: DecoderConfig, rows: int) -> tuple[Any, Any]:
    ids = jax.random.randint(jax.random.key(1), (rows, config.context + 1), 0, config.vocab_size)
    return ids[:, :-1], ids[:, 1:]


def bench_step(name: str, rounds: int) -> dict[str, Any]:
    """Time, memory and compile-time ratios at one shape."""
    config, rows = SHAPES[name]
    batch = _batch(config, rows)
    params, twin_params = models.init(jax.random.key(0), config), bench_twin.init(jax.random.key(0), config)
    # Each is compiled twice, alternately, and the faster counts.
    ours, theirs = [], []
    for _ in range(2):
        ours.append(Runner(train_step(config), params, *batch))
        theirs.append(Runner(bench_twin.train_step(config), twin_params, *batch))
    a, b, ratio = paired(ours[0].run, theirs[0].run, rounds)
    return {
        "what": f"train step, {name}",
        "ours_s": a,
        "peer_s": b,
        "time_ratio": ratio,
        "memory_ratio": ours[0].temporary_bytes / theirs[0].temporary_bytes,
        "compile_ratio": min(r.compile_seconds for r in ours) / min(r.compile_seconds for r in theirs),
        "tokens_per_second": batch[0].size / a,
    }


def bench_checkpoint() -> dict[str, Any]:
    """Temporary memory of block checkpointing beside jax.checkpoint's, 12 layers."""
    config = DecoderConfig(65, 256, 128, 4, 12, 512)
    batch = _batch(config, 4)
    ours = Runner(train_step(config, "block"), models.init(jax.random.key(0), config), *batch)
    theirs = Runner(bench_twin.train_step(config, True), bench_twin.init(jax.random.key(0), config), *batch)
    return {"what": "block checkpointing, L12", "memory_ratio": ours.temporary_bytes / theirs.temporary_bytes}


def bench_attention(rounds: int) -> dict[str, Any]:
    """Causal attention forward and backward at (B8 H6 T256 K64) beside the plain jnp form under jax.grad."""
    q, k, v, ct = (jax.random.normal(jax.random.key(i), (8, 256, 6, 64)) for i in range(4))

    def ours(q: Any, k: Any, v: Any, ct: Any) -> Any:
        out, pull = vjp(ops.attention, q, k, v)
        return out, pull(ct)

    def theirs(q: Any, k: Any, v: Any, ct: Any) -> Any:
        out, pull = jax.vjp(bench_twin.attention, q, k, v)
        return out, pull(ct)

    def timer(f: Any) -> Callable[[], float]:
        compiled = jax.jit(f)

        def run() -> float:
            started = time.perf_counter()
            jax.block_until_ready(compiled(q, k, v, ct))
            return time.perf_counter() - started

        return run

    a, b, ratio = paired(timer(ours), timer(theirs), rounds)
    return {"what": "causal attention, forward + backward", "ours_s": a, "peer_s": b, "time_ratio": ratio}


def bench_reference(rounds: int) -> dict[str, Any]:
    """One train step beside the reference implementation, riftco-transformer 0.6.1."""
    config, rows = REFERENCE_SHAPE
    batch = _batch(config, rows)
    try:
        theirs = bench_peers.reference_step(config, *batch)
    except ImportError:
        return {
            "what": "reference implementation 0.6.1",
            "not_run": "riftco-transformer is not installed (extra: test)",
        }
    ours = Runner(train_step(config), models.init(jax.random.key(0), config), *batch)
    a, b, ratio = paired(ours.run, theirs, rounds)
    return {"what": "reference implementation 0.6.1", "ours_s": a, "peer_s": b, "time_ratio": ratio}


def bench_torch(name: str, rounds: int) -> dict[str, Any]:
    """One train step beside PyTorch eager on as many threads as there are cores."""
    config, rows = SHAPES[name]
    batch = _batch(config, rows)
    try:
        theirs = bench_peers.torch_step(config, *batch, threads=os.cpu_count() or 1)
    except ImportError:
        return {"what": f"PyTorch eager, {name}", "not_run": "torch is not installed (extra: parity)"}
    ours = Runner(train_step(config), models.init(jax.random.key(0), config), *batch)
    a, b, ratio = paired(ours.run, theirs, rounds)
    return {"what": f"PyTorch eager, {name}", "ours_s": a, "peer_s": b, "time_ratio": ratio}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows and print a table, or one JSON line a row with --json."""
    parser = argparse.ArgumentParser(prog="riftco bench train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="paired runs of each row (default 15)")
    parser.add_argument("--only", default="", help="run only rows whose name holds this text")
    parser.add_argument("--json", action="store_true", help="one JSON object a row on stdout")
    parser.add_argument("--device", default="auto", choices=backend.DEVICES, help="what to run on (default auto)")
    arguments = parser.parse_args(argv)
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "step base": lambda: bench_step("base", arguments.rounds),
        "step nanogpt": lambda: bench_step("nanogpt", 4 * arguments.rounds),
        "checkpoint": bench_checkpoint,
        "attention": lambda: bench_attention(4 * arguments.rounds),
        "reference": lambda: bench_reference(3),
        "torch base": lambda: bench_torch("base", arguments.rounds),
        "torch nanogpt": lambda: bench_torch("nanogpt", 4 * arguments.rounds),
    }
    chosen = [run for name, run in rows.items() if arguments.only in name]
    if not chosen:
        parser.error(f"--only {arguments.only!r} matches none of {', '.join(rows)}")
    backend.select(arguments.device)
    for run in chosen:
        row = run()
        print(json.dumps(row) if arguments.json else _line(row), flush=True)
    return 0


def _line(row: dict[str, Any]) -> str:
    if "not_run" in row:
        return f"{row['what']:<40} not run: {row['not_run']}"
    parts = []
    if "ours_s" in row:
        parts.append(f"{row['ours_s'] * 1e3:9.1f} ms beside {row['peer_s'] * 1e3:9.1f} ms")
    parts += [f"{key.removesuffix('_ratio')} x{row[key]:.2f}" for key in row if key.endswith("_ratio")]
    if "tokens_per_second" in row:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    return f"{row['what']:<40} {'   '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
