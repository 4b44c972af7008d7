"""Adam's options: their ranges, their rounding to float32, and which leaves decay."""

import math
from typing import Any, NamedTuple

import numpy as np

from riftco.errors import ConfigError
from riftco.optim.schedules import Schedule
from riftco.tree import named_leaves
from riftco.types import PyTree


class Options(NamedTuple):
    """Adam's options after rounding to float32; 1 − beta is taken of the rounded beta."""

    b1: float
    b2: float
    eps: float
    weight_decay: float


def checked_options(
    learning_rate: float | Schedule,
    b1: float,
    b2: float,
    eps: float,
    max_grad_norm: float | None,
    weight_decay: float,
    page_size: int | None,
) -> tuple[Options, float | None]:
    """The options and the limit on the norm, rounded; ConfigError names the first that is out of range."""

    def rounded(number: float) -> float:
        with np.errstate(over="ignore"):  # infinity is what the rules below refuse
            return float(np.float32(number))

    rules = [
        ("b1", b1, "in [0, 1) in float32", 0.0 <= rounded(b1) < 1.0),
        ("b2", b2, "in [0, 1) in float32", 0.0 <= rounded(b2) < 1.0),
        ("eps", eps, "a normal positive float32", float(np.finfo(np.float32).tiny) <= rounded(eps) < math.inf),
        ("weight_decay", weight_decay, "finite and >= 0", 0.0 <= rounded(weight_decay) < math.inf),
    ]
    if not callable(learning_rate):
        rules.append(("learning_rate", learning_rate, "finite and >= 0", 0.0 <= rounded(learning_rate) < math.inf))
    if max_grad_norm is not None:
        normal = float(np.finfo(np.float32).tiny) <= rounded(max_grad_norm) < math.inf
        rules.append(("max_grad_norm", max_grad_norm, "a normal positive float32, or None", normal))
    if page_size is not None:
        positive = isinstance(page_size, int) and page_size > 0
        rules.append(("page_size", page_size, "a positive integer, or None", positive))
    for name, value, wanted, holds in rules:
        if not holds:
            raise ConfigError(f"adam: {name} must be {wanted}; got {value!r}. Choose a value in that range.")
    limit = None if max_grad_norm is None else rounded(max_grad_norm)
    return Options(rounded(b1), rounded(b2), rounded(eps), rounded(weight_decay)), limit


def decay_flags(decay_mask: Any, params: PyTree, names: list[str]) -> list[bool]:
    """One bool per leaf, in leaf order; ConfigError names the leaves where the mask has none."""
    if decay_mask is None:
        return [True] * len(names)
    flags = dict(named_leaves(decay_mask(params) if callable(decay_mask) else decay_mask))
    wrong = [name for name in names if not isinstance(flags.get(name), (bool, np.bool_))]
    wrong += [name for name in flags if name not in names]
    if wrong:
        raise ConfigError(
            f"adam: decay_mask must be a pytree of bools like the parameters; it is not at {', '.join(wrong)}. "
            "Give True or False for each leaf."
        )
    return [bool(flags[name]) for name in names]
