"""Our rules for people who use `jax.grad`: the one place where the library touches jax's own differentiation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from riftco.autodiff.api import floating_part, vjp
from riftco.autodiff.box import is_floating
from riftco.autodiff.tape import Static
from riftco.errors import GradError
from riftco.types import PyTree


def to_jax(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`f` as a function that `jax.grad`, `jax.vjp` and `jax.checkpoint` differentiate by riftco's rules.

    Args:
        f: a function of pytrees, written in `riftco.ops`, returning a pytree of floating arrays; positional arguments
            only. Leaves that are not floating (token ids, keys) are held fixed.

    Returns:
        The same function, wrapped in `jax.custom_vjp`: reverse mode, first order.
    """

    def forward(*args: PyTree) -> tuple[PyTree, Any]:
        leaves, tree = tree_flatten(args)
        moving, rebuild = floating_part(args)
        out, pull = vjp(lambda values: f(*rebuild(values)), moving)
        return out, (pull, Static((tree, tuple(is_floating(leaf) for leaf in leaves))))

    def backward(saved: Any, ct: PyTree) -> PyTree:
        pull, static = saved
        tree, floating = static.value
        cotangents = iter(pull(ct)[0])
        return tree_unflatten(tree, [next(cotangents) if moves else None for moves in floating])

    wrapped = jax.custom_vjp(lambda *args: f(*args))  # jax would make arguments of f's defaults
    wrapped.defvjp(forward, backward)
    return functools.update_wrapper(lambda *args: wrapped(*args), f)


def evaluated_as(value: Callable[..., PyTree], derivative: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function computed as `value`, which jax, where it differentiates one of our gradients, takes for `derivative`.

    Args:
        value: a function of arrays that jax may not be able to differentiate, a loop of unknown length say.
        derivative: an equal function that it can.
    """
    wrapped = jax.custom_jvp(value)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(derivative, primals, tangents))
    return wrapped


def without_jax_derivatives(f: Callable[..., PyTree], who: str) -> Callable[..., PyTree]:
    """`f` of arrays, whose derivatives by jax itself are refused with a sentence; `jax.grad` of a kernel has none.

    Args:
        f: a function of pytrees of arrays.
        who: begins the sentence.

    Raises:
        GradError: when jax asks for a derivative of the result.
    """
    wrapped = jax.custom_jvp(f)

    @wrapped.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise GradError(
            f"{who}: a kernel has no derivative by jax's own rules, which jax.grad asks for; take riftco.grad or "
            "riftco.vjp, or hand jax the function by riftco.autodiff.to_jax."
        )

    return wrapped
