"""The registry: for every public op its NumPy twin, samples, bad inputs and tolerance class.

`riftco.ops.check` runs it; `riftco gradcheck` and the tests are what call that. An op that is missing here, or lacks a
part, is a failure of both.
"""

import inspect

from riftco import ops
from riftco.ops.spec import attention, elementwise, products, quantized, reductions, shapes
from riftco.ops.spec.kinds import BadInput, Call, OpSpec, Sample
from riftco.ops.spec.tolerances import TOLERANCES

__all__ = ["REGISTRY", "TOLERANCES", "BadInput", "Call", "OpSpec", "Sample", "gaps", "ops_table"]

REGISTRY: dict[str, OpSpec] = {
    spec.name: spec
    for theme in (elementwise, shapes, reductions, products, attention, quantized)
    for spec in theme.SPECS
}

# No derivative to compare: the first returns its argument, checked in tests/test_ops.py; the others pack and unpack
# constants, checked to the last bit in tests/test_nf4.py.
EXEMPT = frozenset({"stop_gradient", "quantize_nf4", "dequantize_nf4"})


def gaps() -> list[str]:
    """What the registry lacks, one line each; [] when it is complete."""
    missing = [f"{name}: not in the registry" for name in sorted(set(ops.__all__) - EXEMPT - set(REGISTRY))]
    missing += [f"{name}: not a public op" for name in sorted(set(REGISTRY) - set(ops.__all__))]
    for spec in REGISTRY.values():
        parts = {
            "an oracle": spec.forward,
            "an oracle for its cotangents": spec.backward,
            "samples": spec.samples,
            "a sample that finite differences can check": any(not s.jit_only for s in spec.samples),
            "bad inputs": spec.bad_inputs,
            "a tolerance": all((dtype, spec.tolerance) in TOLERANCES for dtype in ("float64", "float32", "bfloat16")),
        }
        missing += [f"{spec.name}: lacks {part}" for part, present in parts.items() if not present]
        if len({s.name for s in spec.samples}) < len(spec.samples):
            missing.append(f"{spec.name}: two samples of one name")
    return missing


def ops_table() -> str:
    """The page docs/ops.md: every public op with its arguments, meaning, and what it is checked on."""
    lines = [
        "# Ops",
        "",
        "`riftco.ops` is the whole of what riftco can differentiate. Each op is a value, a forward and a backward",
        "rule written by hand, and a NumPy float64 twin of the same name in `riftco.oracle`. This page is generated",
        "from the registry that `riftco gradcheck` runs: every sample is compared with the twin and with centred",
        "differences to second order in float64, and some in float32 and bfloat16.",
        "",
        "Elementwise ops take equal shapes, or an array and a Python number; broadcasting is asked for. On concrete",
        "arrays each op checks its own domain and raises; under `jit` nothing is clamped: an index out of range gives",
        "NaN, and NaN and infinity flow on.",
        "",
        "| op | computes | tolerance class | checked on |",
        "| --- | --- | --- | --- |",
    ]
    for name in sorted(ops.__all__):
        function = getattr(ops, name)
        arguments = ", ".join(_argument(p) for p in inspect.signature(function).parameters.values())
        summary = " ".join((function.__doc__ or "").split("\n\n")[0].split()).split(" Gradient:")[0]
        spec = REGISTRY.get(name)
        checked = "; ".join(s.name for s in spec.samples) if spec else "by hand"
        row = (f"`{name}({arguments})`", summary, spec.tolerance if spec else "", checked)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    lines += [
        "",
        "## Tolerances",
        "",
        "The largest accepted difference from the twin, relative to the larger of 1 and the twin's largest entry.",
        "",
        "| class | float64 | float32 | bfloat16 |",
        "| --- | --- | --- | --- |",
    ]
    for kind in dict.fromkeys(kind for _, kind in TOLERANCES):
        cells = [f"{TOLERANCES[dtype, kind]:g}" for dtype in ("float64", "float32", "bfloat16")]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _argument(parameter: inspect.Parameter) -> str:
    star = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else ""
    default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
    return f"{star}{parameter.name}{default}"
