"""How many instruction bundles each TPU kernel is scheduled to: a figure of its code that needs no TPU.

libtpu writes down the final schedule of what it compiles. The count of bundles is static: the body of a loop counts
once, and waiting for memory not at all. It is no time; it shows that the code is another than before.

    python -m tests.aot.bundles             prints the counts as JSON
    python -m tests.aot.bundles --write     writes them to tests/aot/bundles.json, the baseline of test_bundles.py

Both need the extra `aot` and about a minute. Write anew when a kernel is changed on purpose.
"""

import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).parent / "bundles.json"
TARGETS = ("v5e:1x1", "v6e:1x1")
_SCHEDULE = re.compile(r"\d+-(?P<kernel>.+?)(\.\d+)?-\d+-schedule-analysis_final_bundles\.txt")


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What is compiled: a function and its arguments, of shapes that kernels meet in use, by name."""
    import jax
    import jax.numpy as jnp

    import riftco
    from riftco import ops
    from riftco.ops.nf4 import pack_for_kernels

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

    def attention(q: Any, k: Any, v: Any, ct: Any) -> Any:
        out, pullback = riftco.vjp(lambda *x: ops.attention(*x, implementation="pallas_tpu"), q, k, v)
        return out, pullback(ct)

    def paged(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
        return ops.paged_attention(q, k, v, lengths, table, implementation="pallas_tpu")

    def nf4(x: Any, ct: Any, weight: Any) -> Any:
        y, pullback = riftco.vjp(lambda x: ops.nf4_linear(x, weight, implementation="pallas_tpu"), x)
        return y, pullback(ct)

    weight = jax.eval_shape(lambda w: pack_for_kernels(ops.quantize_nf4(w)), jax.ShapeDtypeStruct((1024, 1024), "f4"))
    q, k, pages = array(1, 1024, 4, 128), array(1, 1024, 1, 128), array(2, 64, 64, 128)
    return {
        "attention": (attention, (q, k, k, q)),
        "paged": (paged, (array(4, 1, 8, 128), pages, pages, integers(4), integers(4, 16))),
        "nf4": (nf4, (array(512, 1024), array(512, 1024), weight)),
    }


def count(directory: Path) -> dict[str, int]:
    """The bundles of every kernel whose schedule lies in a directory of libtpu's dumps, by the kernel's name.

    Raises:
        ValueError: a schedule without a count, which a later libtpu may write.
    """
    found: dict[str, int] = {}
    for path in sorted(directory.iterdir()):
        if match := _SCHEDULE.fullmatch(path.name):
            total = re.search(r"total scheduled bundles:\s*(\d+)", path.read_text())
            if total is None:
                raise ValueError(f"{path.name} has no count of bundles: libtpu writes it in another way now")
            found[match["kernel"]] = max(int(total[1]), found.get(match["kernel"], 0))
    return found


def measure() -> dict[str, Any]:
    """Compile everything for every target; the versions, and bundles by target, program and kernel."""
    dump = Path(tempfile.mkdtemp())
    # libtpu reads this when it is loaded, so a process that has compiled before cannot count.
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from riftco import aot, targets

        counts: dict[str, dict[str, dict[str, int]]] = {}
        for target in TARGETS:
            counts[target] = {}
            for name, (function, arguments) in programs().items():
                program = targets.chips(target).compile(function, *arguments)
                kernels, bundles = aot.kernels_of(program.as_text()), count(dump)
                counts[target][name] = {kernel: bundles[kernel] for kernel in kernels}
                for path in dump.iterdir():
                    path.unlink()
    finally:
        shutil.rmtree(dump)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {"versions": versions, "bundles": counts}


if __name__ == "__main__":
    text = json.dumps(measure(), indent=2)
    if sys.argv[1:] == ["--write"]:
        BASELINE.write_text(text + "\n")
    print(text)
