"""Our rules for people who use `jax.grad`: the one place where the library touches jax's own differentiation."""

import functools
from collections.abc import Callable

import jax

from riftco.autodiff.api import vjp
from riftco.types import PyTree


def to_jax(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`f` as a function that `jax.grad`, `jax.vjp` and `jax.checkpoint` differentiate by riftco's rules.

    Args:
        f: a function of pytrees of floating arrays, written in `riftco.ops`; positional arguments only.

    Returns:
        The same function, wrapped in `jax.custom_vjp`: reverse mode, first order.
    """
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda *args: vjp(f, *args), lambda pull, ct: pull(ct))
    return functools.update_wrapper(lambda *args: wrapped(*args), f)
