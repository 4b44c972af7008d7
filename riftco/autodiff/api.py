"""The functions a user calls: `vjp`, `grad`, `value_and_grad`, `stop_gradient`, `custom_gradient`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_map, tree_structure, tree_unflatten

from riftco.autodiff.box import Box, is_floating, unbox
from riftco.autodiff.tape import Op, Program, record, settle
from riftco.errors import GradError
from riftco.tree import byte_count, describe, path_name
from riftco.types import PyTree


@jax.tree_util.register_pytree_node_class
class VJP:
    """The transpose of a function at a point: hand it a cotangent of the output, get cotangents of the inputs.

    A pytree: the residual arrays are its leaves, the program is static and hashable. So a forward pass under one
    `jax.jit` can return a VJP and a backward pass under another can take it, and neither traces twice.
    """

    def __init__(self, residuals: Sequence[Any], program: Program, trees: tuple[Any, Any]) -> None:
        self.residuals, self.program, self._trees = list(residuals), program, trees

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """The residual arrays, and everything static."""
        return self.residuals, (self.program, self._trees)

    @classmethod
    def tree_unflatten(cls, static: Any, residuals: Sequence[Any]) -> "VJP":
        """The inverse of `tree_flatten`."""
        return cls(residuals, *static)

    def __call__(self, cotangent: PyTree) -> tuple[PyTree, ...]:
        """Cotangents of the primals, one pytree each.

        Args:
            cotangent: a pytree like the function's output, each leaf with its shape and dtype.

        Raises:
            GradError: if the structure, a shape or a dtype differs; the message names the path.
        """
        in_tree, out_tree = self._trees
        leaves = check_cotangents(cotangent, out_tree, self.program.output_avals)
        flat = self.program.backward(settle(self.residuals), leaves)
        filled = [jnp.zeros(*aval) if ct is None else ct for ct, aval in zip(flat, self.program.inputs, strict=True)]
        return tree_unflatten(in_tree, filled)

    def residual_bytes(self) -> int:
        """How many bytes the residuals hold; an array that several ops saved counts once."""
        return byte_count(self.residuals)

    def __str__(self) -> str:
        from riftco.autodiff.printer import render

        return render(self.program, self.residuals)


def check_cotangents(cotangent: PyTree, out_tree: Any, avals: Sequence[Any]) -> list[Any]:
    """The leaves of a cotangent that matches the output; an error naming the path where it does not."""
    with_path, tree = tree_flatten_with_path(cotangent)
    expected = [path for path, _ in tree_flatten_with_path(tree_unflatten(out_tree, range(len(avals))))[0]]
    if tree != out_tree:
        came = [path for path, _ in with_path]
        missing = [f"missing at output{_suffix(path)}" for path in expected if path not in came]
        surplus = [f"unexpected at output{_suffix(path)}" for path in came if path not in expected]
        raise GradError(
            f"VJP: the cotangent must have the structure of the output, {out_tree}; got {tree}"
            f"{''.join(f'; {difference}' for difference in (missing + surplus)[:4])}."
        )
    leaves: list[Any] = []
    for (path, leaf), (shape, dtype) in zip(with_path, avals, strict=True):
        if not hasattr(leaf, "dtype") and isinstance(leaf, (int, float)):
            leaf = jnp.asarray(leaf, dtype)
        if (getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) != (shape, dtype):
            raise GradError(
                f"VJP: the cotangent at output{_suffix(path)} must be {dtype}[{','.join(map(str, shape))}]; "
                f"got {describe(leaf)}."
            )
        leaves.append(leaf if isinstance(leaf, Box) else jnp.asarray(leaf))
    return leaves


def _suffix(path: Any) -> str:
    return f".{path_name(path)}" if path else ""


def vjp(f: Callable[..., Any], *primals: PyTree, has_aux: bool = False) -> Any:
    """The value of `f` at `primals`, and its transpose there.

    Args:
        f: a function written in `riftco.ops`, of pytrees, returning a pytree of floating arrays.
        *primals: pytrees whose leaves are floating arrays or Python floats; an empty pytree is fine.
        has_aux: `f` returns `(output, aux)`; aux comes back as it is and is not differentiated.

    Returns:
        `(output, VJP)`, or `(output, VJP, aux)`.

    Raises:
        GradError: if a leaf of `primals` or of the output is not floating (the message names its path), if a
            differentiated value was captured by closure in `scan` or `checkpoint`, or if one was handed to jnp or np.
    """
    return _vjp(f, primals, tuple(range(len(primals))), has_aux)


def _vjp(f: Callable[..., Any], primals: tuple[PyTree, ...], positions: tuple[int, ...], has_aux: bool) -> Any:
    # `positions` are the primals' places among the arguments that the user wrote, for the messages.
    with_path, in_tree = tree_flatten_with_path(primals)
    names = [f"argument {positions[path[0].idx]}{_suffix(path[1:])}" for path, _ in with_path]
    leaves = [_differentiable(leaf, name) for (_, leaf), name in zip(with_path, names, strict=True)]

    def flat(*boxes: Any) -> Any:
        out = f(*tree_unflatten(in_tree, boxes))
        if not has_aux:
            return out, None
        if not isinstance(out, tuple) or len(out) != 2:
            raise GradError(f"vjp: with has_aux=True the function must return (output, aux); got {type(out).__name__}.")
        return out

    out, aux, program, residuals = record(flat, leaves, names)
    with_path, out_tree = tree_flatten_with_path(out)
    for path, leaf in with_path:
        if not is_floating(leaf):
            raise GradError(
                f"vjp: output{_suffix(path)} must be a floating array; got {describe(leaf)}. "
                "Return it as an auxiliary output (has_aux=True)."
            )
    pull = VJP(residuals, program, (in_tree, out_tree))
    return (out, pull, aux) if has_aux else (out, pull)


def _differentiable(leaf: Any, name: str) -> Any:
    if isinstance(leaf, Box):
        return leaf
    if not is_floating(leaf):
        raise GradError(
            f"{name}: only floating arrays can be differentiated; got {describe(leaf)}. Pass integers, keys and packed "
            "weights in an argument that is not differentiated (argnums)."
        )
    return jnp.asarray(leaf)


def floating_part(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """The floating leaves of a pytree, and the function that puts others in their places."""
    leaves, structure = tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]

    def rebuild(values: Sequence[Any]) -> PyTree:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        return tree_unflatten(structure, filled)

    return [leaves[i] for i in places], rebuild


def value_and_grad(
    f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns the value of the scalar function `f` and its gradient.

    Args:
        f: returns a floating scalar, or `(scalar, aux)` with `has_aux`.
        argnums: which positional arguments are differentiated, counted from the end where negative; each is a pytree
            of floating arrays.
        has_aux: see `vjp`.

    Returns:
        A function of the same arguments: `(value, gradient)`, or `((value, aux), gradient)`. The gradient has the
        structure of the argument; a tuple of them for a tuple of argnums. Inside `shard_map` it is the device's own
        share: reduce it explicitly.

    Raises:
        GradError: as `vjp`; if the value is not a scalar; if argnums are out of range or name an argument twice.
    """
    chosen_by_user = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        selected = _positions(chosen_by_user, len(args))

        def of_selected(*chosen: Any) -> Any:
            filled = list(args)
            for i, value in zip(selected, chosen, strict=True):
                filled[i] = value
            return f(*filled, **kwargs)

        value, pull, *aux = _vjp(of_selected, tuple(args[i] for i in selected), selected, has_aux)
        if getattr(value, "shape", None) != ():
            raise GradError(
                f"grad: the function must return a floating scalar; got {_structure(value)}. Use riftco.vjp."
            )
        gradients = pull(jnp.ones((), value.dtype))
        result = gradients[0] if isinstance(argnums, int) else gradients
        return ((value, aux[0]), result) if has_aux else (value, result)

    return wrapped


def _positions(argnums: tuple[int, ...], count: int) -> tuple[int, ...]:
    for i in argnums:
        if not isinstance(i, int) or not -count <= i < count:
            raise GradError(f"grad: argnums must be integers in [{-count}, {count}) for this call; got {i!r}.")
    positions = tuple(i % count for i in argnums)
    if len(set(positions)) != len(positions):
        raise GradError(f"grad: argnums must name each argument once; got {argnums} for {count} arguments.")
    return positions


def _structure(value: Any) -> str:
    return describe(value) if hasattr(value, "dtype") else str(tree_structure(value))


def grad(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns the gradient of the scalar function `f`; `(gradient, aux)` with `has_aux`.

    See `value_and_grad` for the arguments.
    """
    both = value_and_grad(f, argnums, has_aux=has_aux)

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped


def stop_gradient(x: PyTree) -> PyTree:
    """The values of `x`, plain arrays through which no derivative flows at any level; jax's own included."""
    return tree_map(lambda leaf: jax.lax.stop_gradient(unbox(leaf)) if is_floating(leaf) else leaf, x)


def custom_gradient(fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Callable[..., Any]:
    """A differentiable function from a forward and a backward rule of your own.

    Args:
        fwd: `fwd(*args) -> (out, residuals)`; args, out and residuals are pytrees of arrays. The rules must not use a
            differentiated value that is not among the arguments.
        bwd: `bwd(residuals, ct) -> tuple` with one cotangent for each argument, like it in structure, shape and
            dtype; None for an argument, or a leaf of one, that has none.

    Returns:
        A function of `fwd`'s arguments. Written in `riftco.ops`, it can be differentiated any number of times.

    Raises:
        GradError: if the forward rule does not return a pair; when the backward rule is run and its result does not
            match the arguments.
    """
    name = getattr(fwd, "__name__", "custom_gradient")

    def checked(*args: Any) -> tuple[Any, Any]:
        result = fwd(*args)
        if not isinstance(result, tuple) or len(result) != 2:
            raise GradError(f"{name}: its forward rule must return (out, residuals); got {type(result).__name__}.")
        return result

    op = Op(name, impl=lambda *args: checked(*args)[0], fwd=checked, bwd=bwd)

    def apply(*args: Any) -> Any:
        return op(*args)

    return functools.update_wrapper(apply, fwd)
