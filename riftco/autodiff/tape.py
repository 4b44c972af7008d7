"""Ops and the tape: how a program is recorded and walked backwards.

An `Op` is a triple of plain functions. On arrays it just runs. On a `Box` it runs its forward rule and writes one
`Node` on the tape of the box's trace. A node holds the op, its static arguments, the variables it read and wrote and
its residuals, all of them data: there is no closure, so a finished `VJP` is a pytree whose leaves are the residual
arrays and whose structure is a hashable `Program`. It crosses `jax.jit`, `scan` and `shard_map` without retracing.

Levels keep nested derivatives apart. Each `vjp` opens a trace with a number larger than any before it, so an inner one
always lies above the derivative around it; an op unboxes only the highest level among its arguments and its rule,
written in ops, meets the rest. This is what makes second derivatives free.

Not here: the public functions (api.py), scan (control.py), checkpoint (recompute.py), any mathematics (riftco/ops).
"""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import (
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

from riftco import _compat
from riftco.autodiff.box import Box, captured_error, foreign_function_error, is_floating, unbox
from riftco.errors import GradError, RiftcoError
from riftco.tree import describe, path_name
from riftco.types import PyTree

# One counter for the process: levels of different threads never meet, and there is nothing to give back after an error.
_LEVELS = itertools.count(1)
_BARRIER: contextvars.ContextVar[tuple[int, str]] = contextvars.ContextVar("riftco_barrier", default=(0, ""))


class Trace:
    """One recording in progress: its level, its nodes, and whether it may still be written to."""

    def __init__(self) -> None:
        self.level = next(_LEVELS)
        self.nodes: list[Node] = []
        self.residuals: list[Any] = []
        self.open = True
        self._variables = 0
        self._residual_ids: dict[int, int] = {}

    def variable(self) -> int:
        """A fresh variable number."""
        self._variables += 1
        return self._variables - 1

    def keep(self, leaf: Any) -> int:
        """The index of `leaf` among the residuals; the same array is kept once however many nodes save it."""
        # The list holds a reference, so an id cannot be reused while the trace lives.
        index = self._residual_ids.setdefault(id(leaf), len(self.residuals))
        if index == len(self.residuals):
            self.residuals.append(leaf)
        return index


Aval = tuple[tuple[int, ...], Any]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A hashable value that rides among the residuals without being an array."""

    value: Any


@dataclass(frozen=True)
class Node:
    """One recorded application. `inputs`/`outputs` are variable numbers, None where nothing is differentiated."""

    op: "Op"
    static: tuple[tuple[str, Any], ...]
    inputs: tuple[int | None, ...]
    input_avals: tuple[Aval, ...]
    input_tree: Any
    outputs: tuple[int | None, ...]
    output_avals: tuple[Aval, ...]
    output_tree: Any
    residuals: tuple[int, ...]
    residual_tree: Any

    def flat_cotangents(self, results: Any) -> list[Any]:
        """What the backward rule returned, one entry for each flat argument leaf; None for a whole argument spreads."""
        results = results if isinstance(results, tuple) else (results,)
        children = self.input_tree.children()
        if len(results) != len(children):
            raise GradError(
                f"{self.op.name}: its backward rule must return one cotangent for each of {len(children)} arguments; "
                f"got {len(results)}. Return None where there is none."
            )
        flat: list[Any] = []
        for i, (child, result) in enumerate(zip(children, results, strict=True)):
            try:
                flat += [None] * child.num_leaves if result is None else child.flatten_up_to(result)
            except (ValueError, TypeError) as error:
                raise GradError(
                    f"{self.op.name}: the cotangent of argument {i} must have its structure, {child}; got "
                    f"{tree_structure(result)} from the backward rule."
                ) from error
        return flat

    def check_cotangent(self, position: int, cotangent: Any) -> None:
        """Refuse a cotangent whose shape or dtype is not its argument's."""
        aval = self.input_avals[position]
        if (tuple(getattr(cotangent, "shape", ())), getattr(cotangent, "dtype", None)) != aval:
            numbered = tree_unflatten(self.input_tree, range(len(self.inputs)))
            path = path_name(tree_flatten_with_path(numbered)[0][position][0])
            raise GradError(
                f"{self.op.name}: the cotangent of argument {path} must have its shape and dtype, "
                f"{aval[1]}[{','.join(map(str, aval[0]))}]; the backward rule gave {describe(cotangent)}."
            )


@dataclass(frozen=True)
class Program:
    """The static half of a VJP: the nodes that lead from the inputs to the outputs, hashable and comparable."""

    nodes: tuple[Node, ...]
    inputs: tuple[Aval, ...]
    outputs: tuple[int | None, ...]
    output_avals: tuple[Aval, ...]
    _hash: list[int] = field(default_factory=list, compare=False, repr=False)

    def __hash__(self) -> int:
        if not self._hash:
            self._hash.append(hash((self.nodes, self.inputs, self.outputs, self.output_avals)))
        return self._hash[0]

    def backward(self, residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        """Walk the nodes in reverse; one cotangent for each input, None where an input is not used.

        `cotangents` has one entry for each output, None meaning zero.
        """
        pending: dict[int, Any] = {}
        for variable, cotangent in zip(self.outputs, cotangents, strict=True):
            if variable is not None and cotangent is not None:
                _accumulate(pending, variable, cotangent)
        for node in reversed(self.nodes):
            received = [None if v is None else pending.pop(v, None) for v in node.outputs]
            if all(r is None for r in received):
                continue
            filled = [
                jnp.zeros(*aval) if r is None and v is not None else r
                for r, v, aval in zip(received, node.outputs, node.output_avals, strict=True)
            ]
            saved = tree_unflatten(node.residual_tree, [residuals[i] for i in node.residuals])
            with jax.named_scope(f"{node.op.name}_bwd"):
                results = node.op.bwd(saved, tree_unflatten(node.output_tree, filled), **dict(node.static))
            for i, (variable, cotangent) in enumerate(zip(node.inputs, node.flat_cotangents(results), strict=True)):
                if variable is not None and cotangent is not None:
                    node.check_cotangent(i, cotangent)
                    _accumulate(pending, variable, cotangent)
        return [pending.get(i) for i in range(len(self.inputs))]


class Op:
    """A differentiable operation: `impl(*args, **static)`, `fwd -> (out, residuals)`, `bwd(residuals, ct, **static)`.

    Args:
        name: what the printed program and error messages call it.
        impl: the value on plain arrays.
        fwd: value and residuals, written in riftco ops. When `takes_needs`, it also gets `needs=`, a tuple of bool,
            one for each flat argument leaf: whether its cotangent is wanted, so that nothing useless is saved.
        bwd: one cotangent for each argument, None where there is none; written in riftco ops.
        transient: static arguments that the backward rule does not need and the tape does not keep.
    """

    __slots__ = ("bwd", "fwd", "impl", "name", "takes_needs", "transient")

    def __init__(
        self,
        name: str,
        impl: Callable[..., Any],
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        *,
        takes_needs: bool = False,
        transient: tuple[str, ...] = (),
    ) -> None:
        self.name, self.impl, self.fwd, self.bwd = name, impl, fwd, bwd
        self.takes_needs, self.transient = takes_needs, transient

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __call__(self, *args: PyTree, **static: Any) -> PyTree:
        """Run on plain arrays, or record on the deepest trace among the arguments."""
        leaves, tree = tree_flatten(args)
        trace: Trace | None = None
        for leaf in leaves:
            if isinstance(leaf, Box) and (trace is None or leaf.trace.level > trace.level):
                trace = leaf.trace
        if trace is None:
            return self.impl(*args, **static)
        self._check_reachable(leaves)
        return self._record(trace, leaves, tree, static)

    def _check_reachable(self, leaves: list[Any]) -> None:
        barrier, who = _BARRIER.get()
        for leaf in leaves:
            if not isinstance(leaf, Box):
                continue
            if not leaf.trace.open:
                raise GradError(
                    f"{self.name}: {leaf.origin} ({describe(leaf)}) was kept from a derivative that has ended; "
                    "return it from the function instead of storing it elsewhere."
                )
            if leaf.trace.level <= barrier:
                raise captured_error(who, leaf)

    def _record(self, trace: Trace, leaves: list[Any], tree: Any, static: dict[str, Any]) -> PyTree:
        mine = [leaf.variable if isinstance(leaf, Box) and leaf.trace is trace else None for leaf in leaves]
        values = [leaf if v is None else leaf.value for leaf, v in zip(leaves, mine, strict=True)]
        extra = {"needs": tuple(v is not None for v in mine)} if self.takes_needs else {}
        with jax.named_scope(self.name):
            out, saved = self.fwd(*tree_unflatten(tree, values), **static, **extra)
        out_leaves, out_tree = tree_flatten(out)
        saved_leaves, saved_tree = tree_flatten(saved)
        saved_leaves = [self._residual(leaf) for leaf in saved_leaves]
        for leaf in (*out_leaves, *saved_leaves):
            if isinstance(leaf, Box) and leaf.trace.level >= trace.level:
                raise captured_error(self.name, leaf)
        variables = tuple(trace.variable() if is_floating(leaf) else None for leaf in out_leaves)
        node = Node(
            op=self,
            static=tuple(sorted((k, v) for k, v in static.items() if k not in self.transient)),
            inputs=tuple(mine),
            input_avals=tuple(_aval(v) for v in values),
            input_tree=tree,
            outputs=variables,
            output_avals=tuple(_aval(leaf) for leaf in out_leaves),
            output_tree=out_tree,
            residuals=tuple(trace.keep(leaf) for leaf in saved_leaves),
            residual_tree=saved_tree,
        )
        trace.nodes.append(node)
        origin = f"output of {self.name}"
        return tree_unflatten(
            out_tree,
            [
                leaf if variable is None else Box(leaf, trace, variable, origin)
                for leaf, variable in zip(out_leaves, variables, strict=True)
            ],
        )

    def _residual(self, leaf: Any) -> Any:
        if hasattr(leaf, "dtype"):
            return leaf
        if isinstance(leaf, (bool, int, float, complex)):
            return jnp.asarray(leaf)  # a VJP's leaves are arrays, or it could not cross jit
        raise GradError(
            f"{self.name}: residuals must be arrays; the forward rule saved {type(leaf).__name__}. Wrap a hashable "
            "value in riftco.autodiff.tape.Static."
        )


def _aval(x: Any) -> Aval:
    return tuple(getattr(x, "shape", ())), getattr(x, "dtype", type(x))


accumulate = Op(
    "accumulate",
    impl=lambda x, y: x + y,
    fwd=lambda x, y: (accumulate(x, y), ()),
    bwd=lambda _, ct: (ct, ct),
)


optimization_barrier = Op(
    "optimization_barrier",
    impl=lambda tree: lax.optimization_barrier(tree),
    fwd=lambda tree: (optimization_barrier(tree), ()),
    bwd=lambda _, ct: (ct,),
)


def settle(tree: PyTree) -> PyTree:
    """`tree` behind an optimization barrier if a compiler will see it, so that its leaves are what they say: data.

    Without it XLA computes parts of a saved value again inside backward ops, or keeps more than was saved to share it
    with them: rounding would then depend on what is compiled together, and the memory would not be the residuals'.
    """
    if all(_compat.is_concrete(unbox(leaf)) for leaf in tree_leaves(tree)):
        return tree
    return optimization_barrier(tree)


def _accumulate(pending: dict[int, Any], variable: int, cotangent: Any) -> None:
    pending[variable] = accumulate(pending[variable], cotangent) if variable in pending else cotangent


@contextlib.contextmanager
def barrier(who: str) -> Iterator[None]:
    """While a real loop or a checkpointed call runs, every box made before it is a captured one."""
    token = _BARRIER.set((next(_LEVELS), who))
    try:
        yield
    finally:
        _BARRIER.reset(token)


def inside_scan() -> bool:
    """Whether the body of a real loop is being run."""
    return _BARRIER.get()[1] == "scan"


def refuse_boxes(who: str, out: PyTree) -> PyTree:
    """`out`, unless a captured box was returned untouched."""
    for leaf in tree_flatten(out)[0]:
        if isinstance(leaf, Box):
            raise captured_error(who, leaf)
    return out


@contextlib.contextmanager
def new_trace() -> Iterator[Trace]:
    """Open a trace above all that exist; it is closed whatever happens inside."""
    trace = Trace()
    try:
        yield trace
    finally:
        trace.open = False


def record(
    f: Callable[..., tuple[Any, Any]], leaves: list[Any], names: list[str]
) -> tuple[PyTree, PyTree, Program, list[Any]]:
    """Run `f` on boxes of `leaves`; `f` returns an output and an auxiliary value.

    Returns:
        Both unboxed, the program that reaches the output, and the program's residuals. Output leaves that do not
        depend on `leaves`, and non-floating ones, have no variable.
    """
    with new_trace() as trace:
        boxes = [Box(leaf, trace, trace.variable(), name) for leaf, name in zip(leaves, names, strict=True)]
        try:
            out, aux = f(*boxes)
        except TypeError as error:
            ours = isinstance(error, RiftcoError) or "Box" not in str(error)
            culprit = None if ours else _box_in_traceback(error)
            if culprit is None:
                raise
            raise foreign_function_error(culprit) from error
    flat, tree = tree_flatten(out)
    flat: list[Any] = [jnp.asarray(leaf) if isinstance(leaf, float) else leaf for leaf in flat]
    variables = tuple(leaf.variable if isinstance(leaf, Box) and leaf.trace is trace else None for leaf in flat)
    values = [leaf if v is None else leaf.value for leaf, v in zip(flat, variables, strict=True)]
    aux = tree_map(lambda leaf: leaf.value if isinstance(leaf, Box) and leaf.trace is trace else leaf, aux)
    nodes, used = _prune(trace.nodes, {v for v in variables if v is not None})
    program = Program(
        nodes=nodes,
        inputs=tuple(_aval(leaf) for leaf in leaves),
        outputs=variables,
        output_avals=tuple(_aval(v) for v in values),
    )
    return tree_unflatten(tree, values), aux, program, [trace.residuals[i] for i in used]


def _prune(nodes: list[Node], wanted: set[int]) -> tuple[tuple[Node, ...], list[int]]:
    """The nodes that reach a wanted variable, with their residuals renumbered from 0."""
    kept: list[Node] = []
    for node in reversed(nodes):
        if any(v in wanted for v in node.outputs if v is not None):
            wanted |= {v for v in node.inputs if v is not None}
            kept.append(node)
    used = sorted({i for node in kept for i in node.residuals})
    number = {old: new for new, old in enumerate(used)}
    return tuple(
        Node(**{**node.__dict__, "residuals": tuple(number[i] for i in node.residuals)}) for node in reversed(kept)
    ), used


def _box_in_traceback(error: BaseException) -> Box | None:
    """The box that the innermost frames were given, so that the message can say which value it was."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            for leaf in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(leaf, Box):
                    return leaf
    return None
