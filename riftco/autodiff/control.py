"""Loops: `scan`, an op like any other.

Its rules re-enter the op with a larger body, so outer derivatives meet a scan again and compile in constant time, and
only the innermost call, on plain arrays, runs `lax.scan`. While it runs, a barrier is up: every box that already
exists was captured by closure, which is an error and never a silently lost derivative.

Not here: `checkpoint`, which works the same way (recompute.py).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from riftco import _compat
from riftco.autodiff.box import Box, is_floating, unbox
from riftco.autodiff.tape import Op, Program, accumulate, barrier, record, refuse_boxes
from riftco.errors import DTypeError, GradError, ShapeError
from riftco.tree import describe, named_leaves
from riftco.types import PyTree


@jax.tree_util.register_pytree_node_class
class Packed:
    """A pytree held as its list of leaves, so that a leaf's cotangent may be None and still have its place."""

    def __init__(self, leaves: list[Any], tree: Any) -> None:
        self.leaves, self.tree = leaves, tree

    @classmethod
    def pack(cls, value: PyTree) -> "Packed":
        """The leaves of `value`, and its structure."""
        return cls(*tree_flatten(value))

    def unpack(self) -> PyTree:
        """The pytree again."""
        return tree_unflatten(self.tree, self.leaves)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """The leaves, and everything static."""
        return self.leaves, self.tree

    @classmethod
    def tree_unflatten(cls, tree: Any, leaves: Any) -> "Packed":
        """The inverse of `tree_flatten`."""
        return cls(list(leaves), tree)


def scan(
    body: Callable[..., tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    *shared: PyTree,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[PyTree, PyTree]:
    """`lax.scan` with hand-written reverse mode and explicit shared inputs.

    Args:
        body: `body(carry, x, *shared) -> (carry, y)`. It must take every differentiated value as an argument.
        init: first carry.
        xs: pytree whose leaves have a leading axis of the loop's length.
        *shared: pytrees handed unchanged to every step; their gradients are summed over the steps.
        length: number of steps, needed only when `xs` is empty.
        reverse: run from the last step to the first.
        unroll: how many steps are laid out in one iteration; True for all.

    Returns:
        `(carry, ys)`.

    Raises:
        GradError: if the body captured a differentiated value by closure, does not return a pair, or returns a carry
            of another structure. ShapeError: if the leading axes differ, there is no length, or a carry's shape
            changes. DTypeError: if a carry's dtype changes.

    Gradient:
        Saves the residuals of each step, stacked; a residual that is the step's own slice of `xs`, a shared input or
        a constant from outside the loop is supplied again and not copied. Any order; compile time does not grow with
        the length.
    """
    length = _length(xs, length)
    flat = _FlatBody(body, tree_structure(init), tree_structure(xs), tree_structure(shared))
    carry, ys = _scan(
        [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in tree_leaves(init)],
        tree_leaves(xs),
        tree_leaves(shared),
        body=flat,
        length=length,
        reverse=reverse,
        unroll=unroll,
    )
    return tree_unflatten(flat.carry, carry), ys.unpack()


def _length(xs: PyTree, length: int | None) -> int:
    """The number of steps, which the backward loop needs even if it has nothing to run along."""
    expected = length
    for name, leaf in named_leaves(xs):
        shape = tuple(getattr(leaf, "shape", ()))
        expected = shape[0] if expected is None and shape else expected
        if not shape or shape[0] != expected:
            raise ShapeError(f"scan: xs.{name} must have a leading axis of {expected} steps; got {describe(leaf)}.")
    if expected is None:
        raise ShapeError("scan: the number of steps must be known; got no xs and no length. Pass length=.")
    return expected


@dataclass(frozen=True)
class _FlatBody:
    """A body that takes and returns lists of leaves; equal for the same function and structures."""

    body: Callable[..., Any]
    carry: Any
    xs: Any
    shared: Any

    def __call__(self, carry: list[Any], x: list[Any], shared: list[Any]) -> tuple[list[Any], Packed]:
        result = self.body(
            tree_unflatten(self.carry, carry), tree_unflatten(self.xs, x), *tree_unflatten(self.shared, shared)
        )
        if not isinstance(result, tuple) or len(result) != 2:
            raise GradError(f"scan: the body must return (carry, y); got {type(result).__name__}.")
        leaves, tree = tree_flatten(result[0])
        if tree != self.carry:
            raise GradError(
                f"scan: the body must return a carry of the structure it was given, {self.carry}; got {tree}."
            )
        for i, (before, after) in enumerate(zip(carry, leaves, strict=True)):
            self._check_carry(i, before, after)
        return leaves, Packed.pack(result[1])

    def _check_carry(self, position: int, before: Any, after: Any) -> None:
        # A Python number takes the dtype of the carry.
        same_dtype = getattr(after, "dtype", before.dtype) == before.dtype
        if same_dtype and getattr(after, "shape", ()) == before.shape:
            return
        numbered = tree_unflatten(self.carry, range(self.carry.num_leaves))
        path = "".join(f".{name}" for name, i in named_leaves(numbered) if i == position and name)
        raise (ShapeError if same_dtype else DTypeError)(
            f"scan: carry{path} must keep its shape and dtype, {describe(before)}; the body returned "
            f"{describe(after)}. Start from a carry of the final type."
        )


@dataclass(frozen=True)
class _Reads:
    """Which leaves of (carry, x, shared) are differentiated."""

    carry: tuple[bool, ...]
    xs: tuple[bool, ...]
    shared: tuple[bool, ...]

    def split(self, values: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """One value for each differentiated leaf, cut into the three groups."""
        a, b = sum(self.carry), sum(self.carry) + sum(self.xs)
        return values[:a], values[a:b], values[b:]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Step:
    """What one step saved: the arrays to stack, and where each residual of its program is to be found again."""

    stacked: list[Any]
    program: Program
    sources: tuple[tuple[str, int], ...]  # ("stacked" | "xs" | "shared" | "constants", index)
    reads: _Reads

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """The arrays to stack, and everything static."""
        return self.stacked, (self.program, self.sources, self.reads)

    @classmethod
    def tree_unflatten(cls, static: Any, stacked: Any) -> "Step":
        """The inverse of `tree_flatten`."""
        return cls(list(stacked), *static)

    def used(self, kind: str, leaves: list[Any]) -> dict[int, Any]:
        """The leaves of a group that the backward pass reads again."""
        return {i: leaves[i] for i in sorted({i for k, i in self.sources if k == kind})}


def _scan_impl(
    carry: list[Any], xs: list[Any], shared: list[Any], *, body: _FlatBody, length: Any, reverse: bool, unroll: Any
) -> Any:
    # A fresh function each time: lax.scan caches by function, and the body's Python must run.
    def step(carry: Any, x: Any) -> Any:
        return refuse_boxes("scan", body(carry, x, shared))

    try:
        with barrier("scan"):
            return _compat.scan(step, carry, xs, length, reverse, unroll)
    except jax.errors.UnexpectedTracerError as error:
        raise GradError(
            "scan: the body used an array that was made inside another loop and no longer exists; most often a "
            "function given to riftco.checkpoint captured it by closure and is run again in the backward pass: pass "
            "it as an argument of that function."
        ) from error


def _scan_fwd(
    carry: list[Any],
    xs: list[Any],
    shared: list[Any],
    *,
    body: _FlatBody,
    length: Any,
    reverse: bool,
    unroll: Any,
    needs: tuple[bool, ...],
) -> Any:
    # A carry leaf that starts undifferentiated may meet a differentiated value in the first step.
    a, b = len(carry), len(carry) + len(xs)
    reads = _Reads(tuple(is_floating(leaf) for leaf in carry), needs[a:b], needs[b:])
    constants: list[Any] = []  # what the steps saved that was made outside the loop; it need not pass through it
    recorded = functools.partial(_record_step, body, reads, constants)
    carry_out, (ys, step) = scan(recorded, carry, xs, shared, length=length, reverse=reverse, unroll=unroll)
    again = {kind: step.used(kind, group) for kind, group in (("shared", shared), ("constants", constants))}
    return (carry_out, ys), (step, step.used("xs", xs), again)


def _record_step(
    body: _FlatBody, reads: _Reads, constants: list[Any], carry: list[Any], x: list[Any], shared: list[Any]
) -> Any:
    leaves = [*carry, *x, *shared]
    chosen = [i for i, read in enumerate((*reads.carry, *reads.xs, *reads.shared)) if read]
    a, b = len(carry), len(carry) + len(x)

    def of_chosen(*boxes: Any) -> Any:
        filled = replaced(leaves, chosen, boxes)
        return body(filled[:a], filled[a:b], filled[b:]), None

    groups = [group for group, of in (("carry", carry), ("x", x), ("shared", shared)) for _ in of]
    names = [f"scan {groups[i]} input" for i in chosen]
    (carry_out, y), _, program, residuals = record(of_chosen, [leaves[i] for i in chosen], names)
    place = {id(leaf): ("shared", i) for i, leaf in enumerate(shared)}
    place |= {id(leaf): ("xs", i) for i, leaf in enumerate(x)}
    stacked: list[Any] = []
    constants.clear()  # the body may be traced more than once
    for leaf in residuals:
        if id(leaf) not in place:
            # Slices and carries are tracers of the loop; what is not a peer of theirs was there before it.
            outside = not isinstance(leaf, Box) and not any(
                _compat.belongs_to_same_trace(leaf, unbox(one)) for one in (*carry, *x)
            )
            kind, group = ("constants", constants) if outside else ("stacked", stacked)
            place[id(leaf)] = (kind, len(group))
            group.append(leaf)
    return carry_out, (y, Step(stacked, program, tuple(place[id(leaf)] for leaf in residuals), reads))


def replaced(leaves: list[Any], positions: list[int], values: Any) -> list[Any]:
    """`leaves` with `values` at `positions`."""
    filled = list(leaves)
    for i, value in zip(positions, values, strict=True):
        filled[i] = value
    return filled


def _scan_bwd(saved: Any, ct: Any, *, length: Any, reverse: bool, unroll: Any) -> Any:
    step, xs_again, again = saved
    ct_carry, ct_ys = ct
    program, reads = step.program, step.reads

    def backward(state: Any, x: Any, again: Any) -> Any:
        ct_carry, sums = state
        slice_, xs_again, ct_y = x
        found = {"stacked": slice_.stacked, "xs": xs_again, **again}
        cts = program.backward([found[kind][i] for kind, i in slice_.sources], [*spread(reads.carry, ct_carry), *ct_y])
        cts = [jnp.zeros(*aval) if c is None else c for c, aval in zip(cts, program.inputs, strict=True)]
        ct_carry, ct_x, ct_shared = reads.split(cts)
        return (ct_carry, [accumulate(s, c) for s, c in zip(sums, ct_shared, strict=True)]), ct_x

    sums = [jnp.zeros(*aval) for aval in reads.split(list(program.inputs))[2]]
    (ct_init, ct_shared), ct_xs = scan(
        backward,
        ([c for c, read in zip(ct_carry, reads.carry, strict=True) if read], sums),
        (step, xs_again, ct_ys.leaves),
        again,
        length=length,
        reverse=not reverse,
        unroll=unroll,
    )
    return spread(reads.carry, ct_init), spread(reads.xs, ct_xs), spread(reads.shared, ct_shared)


def spread(flags: tuple[bool, ...], values: list[Any]) -> list[Any]:
    """One of `values` for each True, None for each False."""
    left = iter(values)
    return [next(left) if flag else None for flag in flags]


_scan = Op("scan", _scan_impl, _scan_fwd, _scan_bwd, takes_needs=True, transient=("body",))
