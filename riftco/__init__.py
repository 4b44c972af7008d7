"""riftco: a JAX/XLA-native language-model framework whose every derivative is written by hand.

The catalogue of public names is here and nothing else: submodules load when they are first touched, so
`import riftco.oracle` brings no jax with it.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_FROM = {
    "riftco.autodiff": (
        "grad",
        "value_and_grad",
        "vjp",
        "stop_gradient",
        "custom_gradient",
        "scan",
        "checkpoint",
        "check_grads",
        "explain",
    ),
    "riftco.generation": ("generate",),
}
_NAME_TO_MODULE = {name: module for module, names in _FROM.items() for name in names}
_SUBMODULES = (
    "aot",
    "autodiff",
    "backend",
    "bundle",
    "cajal",
    "checkpoints",
    "data",
    "errors",
    "generation",
    "gradcheck",
    "interchange",
    "layers",
    "models",
    "ops",
    "optim",
    "oracle",
    "pallas",
    "report",
    "sampling",
    "serve",
    "targets",
    "tokenizers",
    "train",
    "tree",
    "tune",
    "types",
)

__all__ = ["__version__", *_NAME_TO_MODULE, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _NAME_TO_MODULE:
        return getattr(importlib.import_module(_NAME_TO_MODULE[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"riftco.{name}")
    raise AttributeError(f"module 'riftco' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
