"""Recomputation: `checkpoint`, an op that saves its arguments and runs its function again in the backward pass."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_flatten, tree_unflatten

from riftco import _compat
from riftco.autodiff.box import Box, is_floating
from riftco.autodiff.bridge import evaluated_as
from riftco.autodiff.control import Packed, replaced, spread
from riftco.autodiff.tape import Op, Program, Static, barrier, inside_scan, record, refuse_boxes, settle
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

    def again(leaves: list[Any]) -> _Recorded:
        def of_chosen(*boxes: Any) -> Any:
            return f(replaced(leaves, chosen, boxes)), None

        _, _, program, residuals = record(of_chosen, [leaves[i] for i in chosen], ["checkpoint input"] * len(chosen))
        inputs = {id(leaf): i for i, leaf in enumerate(leaves)}
        made = [x for x in residuals if id(x) not in inputs]
        return _Recorded(made, program, tuple(inputs.get(id(x)) for x in residuals))

    if _must_keep_bits(leaves, ct_leaves):
        recorded = evaluated_as(functools.partial(_as_a_loop, again), lambda leaves, _: again(leaves))(
            leaves, ct_leaves
        )
    else:
        recorded = again(leaves)
    residuals, ct_leaves = settle((recorded.residuals(leaves), ct_leaves))
    return (spread(needs.value, recorded.program.backward(residuals, ct_leaves)),)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class _Recorded:
    """What the second run saved: the arrays that it made, their program, and which residuals are inputs."""

    made: list[Any]
    program: Program
    inputs: tuple[int | None, ...]  # for each residual, which argument it is; None for one that was made

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.made, (self.program, self.inputs)

    @classmethod
    def tree_unflatten(cls, static: Any, made: Any) -> "_Recorded":
        return cls(list(made), *static)

    def residuals(self, leaves: list[Any]) -> list[Any]:
        """All of the program's residuals, in its order."""
        made = iter(self.made)
        return [next(made) if i is None else leaves[i] for i in self.inputs]


def _must_keep_bits(leaves: list[Any], cts: list[Any]) -> bool:
    """Whether this run is compiled for a CPU, where checkpointing promises equal bits, and recorded by nothing else."""
    floating = [ct for ct in cts if ct is not None and is_floating(ct)]
    return (
        inside_scan()  # elsewhere the residuals pass through no loop without checkpointing either
        and jax.default_backend() == "cpu"
        and any(ct.size > 0 for ct in floating)
        and not _compat.is_concrete(floating[0])
        and not any(isinstance(x, Box) or _compat.varying_axes(x) for x in (*leaves, *floating))
    )


def _as_a_loop(again: Callable[[list[Any]], _Recorded], leaves: list[Any], cts: list[Any]) -> _Recorded:
    """`again(leaves)` as the body of a loop that runs once, which the compiler is not told.

    On a CPU the rounding of a chain of operations depends on what is compiled into one kernel (where a product and a
    sum are fused, in which order a row is added). Without checkpointing the residuals cross from one loop to another
    through stacked buffers; here they do the same, so both are compiled alike and give equal bits.
    """
    probe = next(ct for ct in cts if ct is not None and is_floating(ct) and ct.size > 0)
    # 0, though no compiler can know: 1 only where the cotangent is not finite, when the step is lost anyway.
    hidden_zero = (jnp.ravel(probe)[0] * 0 != 0).astype(jnp.int32)
    kept = jax.eval_shape(again, leaves)

    def body(state: Any) -> Any:
        i, buffers = state
        made = again(leaves).made
        return i + 1, [
            lax.dynamic_update_index_in_dim(buffer, x, i, 0) for buffer, x in zip(buffers, made, strict=True)
        ]

    start = [jnp.zeros((1, *x.shape), x.dtype) for x in kept.made]
    _, buffers = lax.while_loop(lambda state: state[0] < 1 + hidden_zero, body, (jnp.int32(0), start))
    made = [lax.dynamic_index_in_dim(x, hidden_zero, keepdims=False) for x in buffers]
    return _Recorded(made, kept.program, kept.inputs)


_checkpoint = Op("checkpoint", _checkpoint_impl, _checkpoint_fwd, _checkpoint_bwd, takes_needs=True)
