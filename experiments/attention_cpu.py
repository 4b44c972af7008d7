"""Attention on a CPU: what a training step needs in memory as the length grows, and blockwise beside plain in time.

    python experiments/attention_cpu.py [--lengths 1024 2048 4096 8192] [--time]

Memory is XLA's own figure for the compiled step (loss and gradients of q, k and v; one row, 8 heads of width 64,
float32, causal): temporaries, without arguments and results. Times are medians of steps taken in turns; a ratio below 1
means that blockwise is the faster.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import riftco
from riftco import ops

HEADS, WIDTH = 8, 64


def compiled(implementation, length):
    def step(q, k, v):
        loss = lambda q, k, v: ops.mean(ops.attention(q, k, v, implementation=implementation))
        return riftco.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    shape = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32)
    return jax.jit(step).lower(shape, shape, shape).compile()


def timed(steps, inputs, repeats):
    times = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            jax.block_until_ready(step(*inputs))
            if repeat:
                times[name].append(time.perf_counter() - started)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--time", action="store_true", help="time both as well, up to 4096 (plain needs T x T scores)")
    options = parser.parse_args()
    print(f"jax {jax.__version__}; {HEADS} heads of {WIDTH}, float32, causal, forward and backward")
    print(
        f"{'T':>6}{'blockwise MiB':>15}{'growth':>8}{'plain MiB':>12}{'blockwise ms':>14}{'plain ms':>10}{'ratio':>7}"
    )
    before = None
    for length in options.lengths:
        steps = {name: compiled(name, length) for name in ("blockwise", "plain")}
        need = {name: step.memory_analysis().temp_size_in_bytes / 2**20 for name, step in steps.items()}
        growth = "" if before is None else f"{need['blockwise'] / before:.2f}"
        before = need["blockwise"]
        line = f"{length:>6}{need['blockwise']:>15.1f}{growth:>8}{need['plain']:>12.1f}"
        if options.time and length <= 4096:
            keys = jax.random.split(jax.random.key(0), 3)
            inputs = [jax.random.normal(key, (1, length, HEADS, WIDTH)) for key in keys]
            times = timed(steps, inputs, 9 if length <= 2048 else 5)
            ratio = statistics.median(a / b for a, b in zip(times["blockwise"], times["plain"], strict=True))
            line += (
                f"{1e3 * statistics.median(times['blockwise']):>14.1f}{1e3 * statistics.median(times['plain']):>10.1f}"
            )
            line += f"{ratio:>7.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
