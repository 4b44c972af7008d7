"""One decoder for every family: its configuration, parameters, names and forward pass."""

from riftco.models.adapters import Adapters
from riftco.models.config import DecoderConfig
from riftco.models.decoder import forward, loss
from riftco.models.initialization import init, reference_init
from riftco.models.names import from_named, named
from riftco.models.presets import PRESETS, preset
from riftco.models.snapshot import Snapshot
from riftco.models.specification import (
    LeafSpec,
    abstract,
    check_params,
    decay_mask,
    flatten,
    logical_axes,
    parameter_count,
    spec,
    unflatten,
)

__all__ = [
    "PRESETS",
    "Adapters",
    "DecoderConfig",
    "LeafSpec",
    "Snapshot",
    "abstract",
    "check_params",
    "decay_mask",
    "flatten",
    "forward",
    "from_named",
    "init",
    "logical_axes",
    "loss",
    "named",
    "parameter_count",
    "preset",
    "reference_init",
    "spec",
    "unflatten",
]
