"""Every kernel on the device itself: checked against the NumPy twin, then timed beside what it has to beat.

    python experiments/kernels_hardware.py --target gpu --json results.json  # or --target tpu
    python experiments/kernels_hardware.py --target gpu --compile h200       # no device: only compile all of it
    python experiments/kernels_hardware.py --target gpu --dry-run            # no device: tiny checks by interpreters

One command, meant for eight minutes on one H200 and not yet run on one. Times stop being taken after `--budget` seconds
(what that cuts off is named); the checks before them, and a case that has begun, run to their end. On a GPU it
first writes XLA's description of it beside the JSON, which `riftco.targets.nvidia_from_file` compiles for. A time is
the median of several loops on the device in which each call feeds the next, divided by the calls, so that launching
costs nothing; a failed case is a line of the table, not the end of the run. Exits 1 if a check failed.
"""

import argparse
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import riftco
from riftco import ops, oracle, pallas, targets
from riftco.ops.nf4 import pack_for_kernels

ATTENTION = {"gpu": ("pallas_triton", "pallas_mosaic_gpu", "cudnn"), "tpu": ("pallas_tpu",)}
OTHERS = {"gpu": "pallas_triton", "tpu": "pallas_tpu"}
BYTES_PER_SECOND = {"NVIDIA H200": 4.8e12, "TPU v5 lite": 0.82e12, "TPU v6 lite": 1.64e12}
BF16 = jnp.bfloat16


# ------------------------------------------------------------------------------------------------ checks


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def relative(got, wanted):
    wanted = np.asarray(wanted, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-30))


def check_attention(implementation, interpret, width, options):
    batch, length, heads, groups = (1, 40, 2, 1) if interpret else (2, 200, 4, 2)
    q = normal(1, batch, length, heads, width, dtype=BF16)
    k, v = (normal(seed, batch, length, groups, width, dtype=BF16) for seed in (2, 3))
    ct = normal(4, batch, length, heads, width, dtype=BF16)
    run = functools.partial(ops.attention, implementation=implementation, interpret=interpret, **options)
    out, pull = riftco.vjp(run, q, k, v)
    errors = [relative(out, oracle.attention(q, k, v, **options))]
    errors += map(relative, pull(ct), oracle.attention_vjp(q, k, v, ct, **options))
    return max(errors), 1e-2


def check_paged(implementation, interpret, width):
    batch, groups, pages, size, table = 3, 2, 16, 16, 4
    q = normal(1, batch, 3, 4, width, dtype=BF16)
    k, v = (normal(seed, groups, pages, size, width, dtype=BF16) for seed in (2, 3))
    lengths = jnp.asarray([5, 64, 33], jnp.int32)
    indices = jnp.asarray(np.random.default_rng(5).permutation(pages)[: batch * table].reshape(batch, table), jnp.int32)
    got = ops.paged_attention(q, k, v, lengths, indices, implementation=implementation, interpret=interpret)
    return relative(got, oracle.paged_attention(q, k, v, lengths, indices)), 1e-2


def check_nf4(implementation, interpret, rows):
    x, w = normal(1, rows, 512, dtype=BF16), normal(2, 192, 512)
    packed = ops.quantize_nf4(w)
    dense = np.asarray(ops.dequantize_nf4(packed, jnp.float32), np.float64)
    run = functools.partial(ops.nf4_linear, implementation=implementation, interpret=interpret)
    out, pull = riftco.vjp(lambda x: run(x, packed), x)
    ct = normal(3, rows, 192, dtype=BF16)
    wide = lambda a: np.asarray(a, np.float64)
    return max(relative(out, wide(x) @ dense.T), relative(pull(ct)[0], wide(ct) @ dense)), 1e-2


def checks(target, interpret):
    for implementation in ATTENTION[target]:
        if interpret and implementation == "cudnn":
            continue
        for width in (64, 128):
            yield (f"attention[{implementation}] causal, K={width}", check_attention,
                   (implementation, interpret, width, {}))  # fmt: skip
        for options in ({"window": 9}, {"causal": False}, {"logits_soft_cap": 5.0}, {"q_offset": 0, "scale": 0.5}):
            name = ", ".join(f"{key}={value}" for key, value in options.items())
            yield f"attention[{implementation}] {name}", check_attention, (implementation, interpret, 64, options)
    for width in (64, 128):
        name = f"paged_attention[{OTHERS[target]}] K={width}"
        yield name, check_paged, (OTHERS[target], interpret, width)
    for rows in (1, 16, 200):
        yield f"nf4_linear[{OTHERS[target]}] M={rows}", check_nf4, (OTHERS[target], interpret, rows)


# ------------------------------------------------------------------------------------------------ times
# A case is (group, way, step, arguments, work): step(carry, *rest) gives the next carry; `work` is that of one call.


def shape(*dims, dtype=BF16):
    return jax.ShapeDtypeStruct(dims, dtype)


def attention_cases(target):
    for length, window in ((4096, None), (16384, None), (8192, None), (8192, 1024)):
        batch, heads, width = 16384 // length, 16, 128
        q = shape(batch, length, heads, width)
        pairs = length * (length + 1) / 2 if window is None else window * length - window * (window - 1) / 2
        flops = 4 * batch * heads * width * pairs
        name = f"T={length}" + ("" if window is None else f" window={window}")
        for implementation in ATTENTION[target]:
            run = functools.partial(ops.attention, implementation=implementation, window=window)

            def forward(q, k, v, run=run):
                return run(q, k, v)

            def both(q, k, v, run=run):
                out, pull = riftco.vjp(run, q, k, v)
                return sum(pull(out))

            yield f"attention forward {name}", implementation, forward, (q, q, q), {"flops": flops}
            yield f"attention both {name}", implementation, both, (q, q, q), {"flops": 3.5 * flops}


def paged_cases(target):
    for batch, context in ((1, 32768), (32, 4096), (256, 2048)):
        groups, heads, width, size = 8, 32, 128, 64
        table = context // size
        pool = shape(groups, batch * table, size, width)
        arguments = (shape(batch, 1, heads, width), pool, pool, shape(batch, dtype=jnp.int32),
                     shape(batch, table, dtype=jnp.int32))  # fmt: skip
        work = {"bytes": 2 * batch * context * groups * width * 2, "paged": (batch, context, table)}
        for way in (OTHERS[target], "plain"):
            if way == "plain" and batch * context > 131072:
                continue
            run = functools.partial(ops.paged_attention, implementation=way)
            yield f"paged decode B={batch} S={context}", way, run, arguments, work


def nf4_cases(target):
    size = 4096
    packed = jax.eval_shape(lambda w: pack_for_kernels(ops.quantize_nf4(w)), shape(size, size, dtype=jnp.float32))
    weight = shape(size, size)
    for rows in (1, 8, 64, 512, 4096):
        x, work = shape(rows, size), {"flops": 2 * rows * size * size}
        for way in (OTHERS[target], "plain"):
            run = functools.partial(ops.nf4_linear, implementation=way)

            def gradient(x, packed, run=run):
                return riftco.vjp(lambda x: run(x, packed), x)[1](x)[0]

            yield f"NF4 forward M={rows}", way, run, (x, packed), work
            yield f"NF4 dX M={rows}", way, gradient, (x, packed), work
        dot = lambda x, w: jnp.dot(x, w.T, preferred_element_type=jnp.float32).astype(x.dtype)
        yield f"NF4 forward M={rows}", "bf16 dot", dot, (x, weight), work


def looped(step):
    """`step` many times in one program, each call on the result of the one before, kept near unit size."""

    def run(count, carry, *rest):
        def body(_, carry):
            out = step(carry, *rest).astype(jnp.float32)
            size = jax.lax.rsqrt(jnp.mean(out * out) + 1e-6)
            return (out * size).astype(carry.dtype)

        return jax.lax.fori_loop(0, count, body, carry)

    return run


def filled(arguments, work):
    """Arrays of the described shapes: normal numbers, full lengths, shuffled pages, a packed weight."""
    if "paged" in work:
        batch, context, table = work["paged"]
        pages = np.random.default_rng(0).permutation(batch * table).reshape(batch, table)
        lengths = jnp.full((batch,), context, jnp.int32)
        numbers = [jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate(arguments[:3])]
        return [*numbers, lengths, jnp.asarray(pages, jnp.int32)]
    arrays = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, jax.ShapeDtypeStruct):
            arrays.append(jax.random.normal(jax.random.key(i), argument.shape, argument.dtype))
        else:
            dense = jax.random.normal(jax.random.key(i), argument.shape, jnp.float32)
            arrays.append(pack_for_kernels(ops.quantize_nf4(dense)))
    return arrays


def timed(step, arguments, work, repeats=7, seconds=0.04):
    arrays = filled(arguments, work)
    run = jax.jit(looped(step))

    def once(count):
        started = time.perf_counter()
        jax.block_until_ready(run(count, *arrays))
        return time.perf_counter() - started

    once(2)
    count = int(min(2000, max(3, 10 * seconds / max(once(10), 1e-6))))
    return statistics.median(once(count) for _ in range(repeats)) / count


# ------------------------------------------------------------------------------------------------ the run


def cases(target):
    for make in (paged_cases, nf4_cases, attention_cases):
        yield from make(target)


def one_line(error):
    return " ".join(str(error).split())[:300]


def run_checks(target, interpret):
    results = []
    for name, check, arguments in checks(target, interpret):
        try:
            error, limit = check(*arguments)
            verdict = {"error": error, "limit": limit, "ok": bool(error <= limit)}
        except NotImplementedError as refused:
            verdict = {"refused": one_line(refused), "ok": True}
        except Exception as failure:  # a compiler's or a driver's: a line of the table
            verdict = {"failed": f"{type(failure).__name__}: {one_line(failure)}", "ok": False}
        results.append({"check": name, **verdict})
        said = f"{verdict['error']:.1e} (limit {verdict['limit']:.0e})" if "error" in verdict else ""
        said = said or verdict.get("refused") or verdict["failed"]
        mark = "--  " if "refused" in verdict else "ok  " if verdict["ok"] else "FAIL"
        print(f"{mark} {name:<58} {said}", flush=True)
    return results


def run_times(target, deadline):
    results, kind = [], jax.devices()[0].device_kind
    peak = BYTES_PER_SECOND.get(kind)
    print(f"\n{'case':<38}{'way':<20}{'us':>11}{'TFLOP/s':>10}{'TB/s':>8}{'of peak':>9}")
    for group, way, step, arguments, work in cases(target):
        if time.monotonic() > deadline:
            results.append({"case": group, "way": way, "cut": "the budget was used up"})
            continue
        try:
            seconds = timed(step, arguments, work)
        except NotImplementedError as refused:
            results.append({"case": group, "way": way, "refused": one_line(refused)})
            continue
        except Exception as failure:  # a compiler's or a driver's: a line of the table
            results.append({"case": group, "way": way, "failed": f"{type(failure).__name__}: {one_line(failure)}"})
            print(f"{group:<38}{way:<20} failed: {results[-1]['failed'][:80]}", flush=True)
            continue
        row = {"case": group, "way": way, "us": 1e6 * seconds}
        row |= {"tflops": work["flops"] / seconds / 1e12} if "flops" in work else {}
        row |= {"tbytes": work["bytes"] / seconds / 1e12} if "bytes" in work else {}
        of_peak = f"{1e12 * row['tbytes'] / peak:.0%}" if peak and "tbytes" in row else ""
        flops, rate = (f"{row[key]:.1f}" if key in row else "" for key in ("tflops", "tbytes"))
        print(f"{group:<38}{way:<20}{row['us']:>11.1f}{flops:>10}{rate:>8}{of_peak:>9}", flush=True)
        results.append(row)
    cut = sum("cut" in row for row in results)
    if cut:
        print(f"{cut} of {len(results)} cases were not reached within the budget")
    return results


def compile_all(target, chips):
    failed = 0
    for group, way, step, arguments, _ in cases(target):
        started = time.monotonic()
        try:
            chips.compile(looped(step), shape(dtype=jnp.int32), *arguments)
            said = f"compiled in {time.monotonic() - started:.1f} s"
        except NotImplementedError as refused:
            said = f"refused: {one_line(refused)}"
        except Exception as failure:
            # Deviceless compilation has no cuDNN to ask.
            failed += way != "cudnn"
            said = f"{type(failure).__name__}: {one_line(failure)[:120]}"
        print(f"{group:<38}{way:<20} {said}", flush=True)
    return failed


def commit():
    here = pathlib.Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("gpu", "tpu"), required=True)
    parser.add_argument("--json", type=pathlib.Path, help="write the results there")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds; checks come first, then times")
    parser.add_argument("--dry-run", action="store_true", help="tiny checks by the interpreters; no times")
    parser.add_argument("--compile", metavar="TARGET", help="only compile the timed cases, for h200 or v5e:2x2, …")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    if options.compile:
        sys.exit(1 if compile_all(options.target, targets.chips(options.compile)) else 0)
    wanted = "cuda" if options.target == "gpu" else "tpu"
    device = pallas.current_target()
    if not options.dry_run and device.platform != wanted:
        sys.exit(
            f"kernels_hardware: --target {options.target} needs one; jax runs on {device.platform} ({device.kind})"
        )
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device.kind,
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "dry_run": options.dry_run,
    }
    print(json.dumps(record))
    if options.json and wanted == "cuda" and not options.dry_run:
        description = targets.describe_attached()
        if description is not None:
            options.json.with_suffix(".txtpb").write_text(description)
    record["checks"] = run_checks(options.target, options.dry_run)
    if not options.dry_run:
        record["times"] = run_times(options.target, deadline)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    bad = [row for row in record["checks"] if not row["ok"]]
    held = sum("error" in row and row["ok"] for row in record["checks"])
    print(f"{held} checks hold, {len(bad)} do not, {len(record['checks']) - held - len(bad)} were refused")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
