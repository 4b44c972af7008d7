"""Checkpoints of a run: saved in the background, complete or absent, restored bit for bit on any number of devices.

`manager` has `Checkpoints`; `records` what a checkpoint says about itself, and the comparison of configurations. The
model as other tools open it is a bundle, not a checkpoint.
"""

from riftco.checkpoints.manager import Checkpoints, Restored
from riftco.checkpoints.records import check_config, config_differences

__all__ = ["Checkpoints", "Restored", "check_config", "config_differences"]
