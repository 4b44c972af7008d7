"""Reverse-mode differentiation, written by hand: see docs/autodiff.md for a walk through it."""

from riftco.autodiff.api import VJP, custom_gradient, grad, stop_gradient, value_and_grad, vjp
from riftco.autodiff.box import Box
from riftco.autodiff.bridge import to_jax
from riftco.autodiff.control import scan
from riftco.autodiff.gradcheck import GradReport, check_grads
from riftco.autodiff.printer import explain
from riftco.autodiff.recompute import checkpoint
from riftco.autodiff.tape import Op

__all__ = [
    "VJP",
    "Box",
    "GradReport",
    "Op",
    "check_grads",
    "checkpoint",
    "custom_gradient",
    "explain",
    "grad",
    "scan",
    "stop_gradient",
    "to_jax",
    "value_and_grad",
    "vjp",
]
