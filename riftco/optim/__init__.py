"""Optimization: Adam with a whole-step commit, schedules as pure functions of the step, token-exact accumulation.

`optimizer` has Adam, `options` its options, `state` its state, `clipping` the global norm, `pages` the paged layout of
moments, `schedules` the learning rates, `accumulation` the sums over micro-batches. The NumPy float64 twins are in
`riftco.oracle.optim`.
"""

from riftco.optim.accumulation import Accumulated, accumulate, add_scaled, zeros_like
from riftco.optim.clipping import global_norm
from riftco.optim.optimizer import adam
from riftco.optim.schedules import (
    Schedule,
    constant,
    linear,
    schedule,
    warmup_cosine,
    warmup_stable_decay,
)
from riftco.optim.state import AdamState, AdamStats, from_logical_state, logical_state

__all__ = [
    "Accumulated",
    "AdamState",
    "AdamStats",
    "Schedule",
    "accumulate",
    "adam",
    "add_scaled",
    "constant",
    "from_logical_state",
    "global_norm",
    "linear",
    "logical_state",
    "schedule",
    "warmup_cosine",
    "warmup_stable_decay",
    "zeros_like",
]
