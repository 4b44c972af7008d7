"""A recorded program as text: one line an op, with shapes and the bytes it keeps for the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

from riftco.autodiff.api import vjp
from riftco.autodiff.tape import Aval, Node, Program
from riftco.types import PyTree


def explain(f: Callable[..., PyTree], *args: PyTree) -> str:
    """The tape of `f` at `args`: its ops in order, the variables they read and write, and what they save.

    Args:
        f: a function written in `riftco.ops`.
        *args: pytrees of floating arrays.

    Returns:
        A table; its last line sums the residual bytes, each array counted once.
    """
    return str(vjp(f, *args)[1])


def render(program: Program, residuals: Sequence[Any]) -> str:
    """The text of `explain` for a program that has been recorded."""
    lines = [f"inputs: {', '.join(f'%{i} {_aval(a)}' for i, a in enumerate(program.inputs)) or 'none'}"]
    counted: set[int] = set()
    for node in program.nodes:
        lines.append(_line(node, residuals, counted))
    outputs = zip(program.outputs, program.output_avals, strict=True)
    lines.append(f"outputs: {', '.join(f'{_variable(v)} {_aval(a)}' for v, a in outputs) or 'none'}")
    total = sum(_bytes(residuals[i]) for i in counted)
    lines.append(f"{len(program.nodes)} ops, {total} residual bytes in {len(counted)} arrays")
    return "\n".join(lines)


def _line(node: Node, residuals: Sequence[Any], counted: set[int]) -> str:
    written = ", ".join(f"{_variable(v)} {_aval(a)}" for v, a in zip(node.outputs, node.output_avals, strict=True))
    read = ", ".join(_variable(v) for v in node.inputs)
    static = "".join(f", {k}={v!r}" for k, v in node.static if v is not None and len(repr(v)) <= 40)
    fresh = [i for i in dict.fromkeys(node.residuals) if i not in counted]
    counted |= set(fresh)
    return f"{written} = {node.op.name}({read}{static})  # saves {sum(_bytes(residuals[i]) for i in fresh)} B"


def _variable(number: int | None) -> str:
    return "_" if number is None else f"%{number}"


def _aval(aval: Aval) -> str:
    shape, dtype = aval
    return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"


def _bytes(leaf: Any) -> int:
    return int(leaf.size) * leaf.dtype.itemsize
