"""Recomputation: `checkpoint`, an op that saves its arguments and runs its function again in the backward pass."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.tree_util import tree_flatten, tree_unflatten

from riftco.autodiff.control import Packed, replaced, spread
from riftco.autodiff.tape import Op, Static, barrier, record, refuse_boxes, settle
from riftco.types import PyTree


def checkpoint(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`f`, of which only the arguments are saved for the backward pass; `f` is run again there.

    Args:
        f: a function of pytrees written in `riftco.ops`. It must take every differentiated value, every key that it
            draws from and every array that is made under the same `jit` or `scan` as an argument. Arguments that are
            not arrays (flags, sizes) must be hashable and reach `f` as they are.

    Returns:
        A function like `f`, with equal values and gradients.

    Raises:
        GradError: if `f` captured a differentiated value, or an array of a scan's body, which is gone when `f` runs
            again.

    Gradient:
        Saves the arguments. The backward pass sends the arguments *and* the cotangent through one optimization
        barrier, so that the compiler can neither merge the second run with the first nor start it early, and what the
        second run saves through another, so that the bits are those of a run without checkpointing. Any order.
    """

    @functools.wraps(f)
    def checkpointed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, tree = tree_flatten((args, kwargs))
        static = tuple((i, leaf) for i, leaf in enumerate(leaves) if not hasattr(leaf, "dtype"))
        arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
        return _checkpoint(arrays, f=_FlatFunction(f, tree, static)).unpack()

    return checkpointed


@dataclass(frozen=True)
class _FlatFunction:
    """A function of a list of arrays; equal for the same function, structure and arguments that are not arrays."""

    f: Callable[..., Any]
    tree: Any
    static: tuple[tuple[int, Any], ...]

    def __call__(self, arrays: list[Any]) -> Packed:
        leaves = list(arrays)
        for i, value in self.static:
            leaves.insert(i, value)
        args, kwargs = tree_unflatten(self.tree, leaves)
        return Packed.pack(self.f(*args, **kwargs))


def _checkpoint_impl(leaves: list[Any], *, f: _FlatFunction) -> Any:
    with barrier("checkpoint"):
        return refuse_boxes("checkpoint", f(leaves))


def _checkpoint_fwd(leaves: list[Any], *, f: _FlatFunction, needs: tuple[bool, ...]) -> Any:
    return _checkpoint(leaves, f=f), (leaves, Static(needs))


def _checkpoint_bwd(saved: Any, ct: Any, *, f: _FlatFunction) -> Any:
    leaves, needs = saved
    chosen = [i for i, need in enumerate(needs.value) if need]
    leaves, ct_leaves = settle((leaves, ct.leaves))

    def of_chosen(*boxes: Any) -> Any:
        return f(replaced(leaves, chosen, boxes)), None

    _, _, program, residuals = record(of_chosen, [leaves[i] for i in chosen], ["checkpoint input"] * len(chosen))
    residuals, ct_leaves = settle((residuals, ct_leaves))
    cts = program.backward(residuals, ct_leaves)
    return (spread(needs.value, cts),)


_checkpoint = Op("checkpoint", _checkpoint_impl, _checkpoint_fwd, _checkpoint_bwd, takes_needs=True)
