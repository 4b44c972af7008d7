"""A recorded program as text: one line an op, with shapes and the bytes it keeps for the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import tree_unflatten

from riftco.autodiff.api import floating_part, vjp
from riftco.autodiff.control import Step
from riftco.autodiff.tape import Aval, Node, Program
from riftco.tree import byte_count
from riftco.types import PyTree


def explain(f: Callable[..., PyTree], *args: PyTree) -> str:
    """The tape of `f` at `args`: its ops in order, the variables they read and write, and what they save.

    Args:
        f: a function written in `riftco.ops`.
        *args: pytrees; floating leaves are the inputs, numbered in their order, other leaves are held fixed.

    Returns:
        A table; its last line sums the residual bytes, each array counted once. The program of a scan's step stands
        indented below the scan.
    """
    moving, rebuild = floating_part(args)
    return str(vjp(lambda values: f(*rebuild(values)), moving)[1])


def render(program: Program, residuals: Sequence[Any]) -> str:
    """The text of `explain` for a program that has been recorded."""
    lines = _lines(program, residuals)
    # Residuals are distinct arrays: the tape keeps each once.
    lines.append(f"{len(program.nodes)} ops, {byte_count(residuals)} residual bytes in {len(residuals)} arrays")
    return "\n".join(lines)


def _lines(program: Program, residuals: Sequence[Any] | None) -> list[str]:
    lines = [f"inputs: {', '.join(f'%{i} {_aval(a)}' for i, a in enumerate(program.inputs)) or 'none'}"]
    counted: set[int] = set()
    for node in program.nodes:
        lines.append(_line(node, residuals, counted))
        lines += [f"    {line}" for step in _steps(node) for line in _lines(step.program, None)]
    outputs = zip(program.outputs, program.output_avals, strict=True)
    lines.append(f"outputs: {', '.join(f'{_variable(v)} {_aval(a)}' for v, a in outputs) or 'none'}")
    return lines


def _steps(node: Node) -> list[Step]:
    """The step of a scan, which lies among its residuals."""
    saved = tree_unflatten(node.residual_tree, node.residuals)
    return [part for part in saved if isinstance(part, Step)] if isinstance(saved, tuple) else []


def _line(node: Node, residuals: Sequence[Any] | None, counted: set[int]) -> str:
    written = ", ".join(f"{_variable(v)} {_aval(a)}" for v, a in zip(node.outputs, node.output_avals, strict=True))
    read = ", ".join(_variable(v) for v in node.inputs)
    static = "".join(f", {k}={v!r}" for k, v in node.static if v is not None and len(repr(v)) <= 40)
    text = f"{written} = {node.op.name}({read}{static})"
    if residuals is None:
        return text
    fresh = [i for i in dict.fromkeys(node.residuals) if i not in counted]
    counted |= set(fresh)
    return f"{text}  # saves {byte_count([residuals[i] for i in fresh])} B"


def _variable(number: int | None) -> str:
    return "_" if number is None else f"%{number}"


def _aval(aval: Aval) -> str:
    shape, dtype = aval
    return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"
