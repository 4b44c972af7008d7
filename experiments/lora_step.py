"""What a training step costs with all weights, with LoRA, and with LoRA on a base in 4 bits (QLoRA), side by side.

    python experiments/lora_step.py [--layers 6] [--width 384] [--batch 8] [--context 256] [--rank 8] [--json FILE]

A step is the loss, its gradient and an Adam update. The three are timed in turns, so that a busy machine slows all of
them; each line gives the median time, the ratio to the line above it (the median over rounds, not of medians), and the
operations that the compiler counts, a loop's body once.
"""

import argparse
import json
import os
import platform
import statistics
import time

WAYS = ("full", "lora", "qlora")


def steps(options):
    """{way: (compiled step, trained, state, base)}."""
    import jax
    import numpy as np

    import riftco
    from riftco import models, optim, tune

    config = models.preset(
        "base",
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        hidden=4 * options.width,
        head_dim=options.width // options.heads,
        kv_heads=options.heads,
        context=options.context,
    )
    params = models.init(jax.random.key(0), config)
    packed = tune.quantize(params, config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (options.batch, options.context), np.int32)
    targets = np.roll(tokens, -1, 1)
    init, update = optim.adam(1e-4, max_grad_norm=1.0)
    lora = lambda base: tune.lora_init(
        jax.random.key(1), base, config, targets=options.targets, rank=options.rank, alpha=2 * options.rank
    )

    def step(trained, state, base):
        def loss(trained):
            whole, adapters = (trained, None) if base is None else (base, trained)
            return models.loss(
                whole, tokens, targets, config, adapters=adapters, grad_checkpoint=options.grad_checkpoint
            )

        value, grads = riftco.value_and_grad(loss)(trained)
        trained, state, _ = update(grads, state, trained)
        return trained, state, value

    made = {}
    for way, trained, base in (("full", params, None), ("lora", lora(params), params), ("qlora", lora(packed), packed)):
        state = init(trained)
        compiled = jax.jit(step).lower(trained, state, base).compile()
        made[way] = (compiled, trained, state, base)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 6), ("width", 384), ("heads", 6), ("context", 256), ("batch", 8), ("rank", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds, after one that is not; default 11")
    parser.add_argument("--targets", nargs="+", default=["attention", "feed_forward"], help="what LoRA adapts")
    parser.add_argument("--grad-checkpoint", default="none", choices=("none", "block"))
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {options.rounds}")
    import jax

    made = steps(options)
    times = {way: [] for way in WAYS}
    for turn in range(options.rounds + 1):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            compiled, *arguments = made[way]
            started = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            if turn:
                times[way].append(time.perf_counter() - started)
    print(
        f"{platform.platform()}, {os.cpu_count()} cores; jax {jax.__version__} on {jax.default_backend()}; "
        f"L{options.layers} D{options.width}, {options.batch} x {options.context} tokens, rank {options.rank} on "
        f"{', '.join(options.targets)}, checkpoint {options.grad_checkpoint}, {options.rounds} rounds"
    )
    print(f"{'step':<8}{'median ms':>11}{'ratio':>8}{'to':>6}{'GFLOP':>9}{'ratio':>8}")
    rows, before = [], None
    for way in WAYS:
        analysis = made[way][0].cost_analysis()
        flops = (analysis[0] if isinstance(analysis, list) else analysis)["flops"]
        row = {"step": way, "median_ms": 1e3 * statistics.median(times[way]), "gflop": 1e-9 * flops}
        compared = ""
        if before is not None:
            ratio = statistics.median(a / b for a, b in zip(times[way], times[before], strict=True))
            row |= {"to": before, "ratio": ratio, "flop_ratio": row["gflop"] / rows[-1]["gflop"]}
            compared = f"{ratio:>8.3f}{before:>6}"
        last = f"{row['flop_ratio']:>8.3f}" if compared else ""
        print(f"{way:<8}{row['median_ms']:>11.1f}{compared:<14}{row['gflop']:>9.2f}{last}", flush=True)
        rows.append(row)
        before = way
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"platform": platform.platform(), "jax": jax.__version__, "options": vars(options), "rows": rows},
                      file, indent=1)  # fmt: skip


if __name__ == "__main__":
    main()
