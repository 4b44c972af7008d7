"""XLA's CPU matrix product beside NumPy's BLAS, on five shapes of the presets, with one thread and with all.

    python experiments/cpu_matmul.py [--json FILE]

Each line gives the median time of both, taken in turns, and their ratio: below 1, XLA is the faster. NumPy's BLAS is
OpenBLAS in the wheels for Linux and Accelerate in those for macOS 14 and newer. Each thread count runs in a process of
its own, since neither library changes it later; one thread also means one core where the system can pin a process.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

SHAPES = {  # name: (rows, inner, columns) of x @ w
    "base qkv, 16 x 256 tokens": (4096, 384, 1152),
    "base MLP up": (4096, 384, 1536),
    "base MLP down": (4096, 1536, 384),
    "gpt2 head, 256 tokens": (256, 768, 50257),
    "smollm2 decode, one token": (1, 576, 1536),
}
REPEATS = 15
ONE = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}


def measure(threads):
    if threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax
    import numpy as np

    product = jax.jit(lambda x, w: x @ w)
    rows = []
    for name, (m, k, n) in SHAPES.items():
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
        on_device = jax.device_put((x, w))
        inner = max(1, round(2e8 / (2 * m * k * n)))  # so that no timing is near the clock's own step
        ways = {
            "xla": lambda pair=on_device: product(*pair).block_until_ready(),
            "numpy": lambda x=x, w=w: x @ w,
        }
        times = {way: [] for way in ways}
        for repeat in range(REPEATS + 2):
            for way, run in ways.items():
                started = time.perf_counter()
                for _ in range(inner):
                    run()
                if repeat >= 2:
                    times[way].append((time.perf_counter() - started) / inner)
        medians = {way: statistics.median(values) for way, values in times.items()}
        ratio = statistics.median(a / b for a, b in zip(times["xla"], times["numpy"], strict=True))
        gflops = 2e-9 * m * k * n
        rows.append(
            {
                "shape": name,
                "mkn": [m, k, n],
                "threads": threads,
                "xla_ms": 1e3 * medians["xla"],
                "numpy_ms": 1e3 * medians["numpy"],
                "xla_gflops": gflops / medians["xla"],
                "numpy_gflops": gflops / medians["numpy"],
                "ratio": ratio,
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads is not None:
        print(json.dumps(measure(options.threads)))
        return
    import jax
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    cores = os.cpu_count() or 1
    print(f"{platform.platform()}, {cores} cores; jax {jax.__version__}; NumPy {np.__version__} with {blas['name']}")
    print(f"{'shape':<28}{'threads':>8}{'XLA ms':>10}{'NumPy ms':>10}{'XLA GF/s':>10}{'NumPy GF/s':>12}{'ratio':>8}")
    rows = []
    for threads in (1, cores):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **(ONE if threads == 1 else {})}
        command = [sys.executable, __file__, "--threads", str(threads)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(
                f"cpu_matmul: the measurement with {threads} threads failed: {done.stderr.strip().splitlines()[-1]}"
            )
        for row in json.loads(done.stdout.splitlines()[-1]):
            rows.append(row)
            print(
                f"{row['shape']:<28}{row['threads']:>8}{row['xla_ms']:>10.3f}{row['numpy_ms']:>10.3f}"
                f"{row['xla_gflops']:>10.1f}{row['numpy_gflops']:>12.1f}{row['ratio']:>8.2f}"
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"platform": platform.platform(), "jax": jax.__version__, "numpy": np.__version__,
                       "blas": blas["name"], "rows": rows}, file, indent=1)  # fmt: skip


if __name__ == "__main__":
    main()
