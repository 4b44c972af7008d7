"""Kernels for accelerators, reached through `riftco.ops`: tile maths in `core`, one schedule per kind of chip.

`target` and `current_target` say for which chip a trace is made; `explain` says what `implementation=None` takes there.
Importing this package loads no Pallas; a kernel's module is loaded when it is first chosen.
"""

from riftco.pallas.dispatch import Target, current_target, explain, target

__all__ = ["Target", "current_target", "explain", "target"]
