"""What a run tells its watcher, as it happens; the watcher renders it, the run never prints."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from riftco.train.metrics import TrainRecord, ValidationRecord


@dataclasses.dataclass(frozen=True)
class RunStarted:
    """Before the first step.

    Attributes:
        step: updates already made; 0 for a fresh run.
        max_steps: updates in the whole run.
        parameters: scalars in the model.
        rows_per_step: rows of one update, all devices and micro-batches together.
        devices: how many take part.
        platform: "cpu", "gpu" or "tpu".
        processes: how many take part.
    """

    step: int
    max_steps: int
    parameters: int
    rows_per_step: int
    devices: int
    platform: str
    processes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The step has been traced and compiled; reported apart because no later step takes this long."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class StepFinished:
    """An update took effect; sent while the next one runs.

    Attributes:
        record: as in metrics.jsonl.
        utilization: achieved over peak floating-point operations per second (MFU); None where the peak is not known.
        eta_seconds: time left for the remaining steps, evaluations aside; None at the first.
        is_report: whether steps_per_report asks for a printed line here.
    """

    record: TrainRecord
    utilization: float | None
    eta_seconds: float | None
    is_report: bool


@dataclasses.dataclass(frozen=True)
class Validated:
    """The held-out split was scored; `is_best` where no earlier evaluation had a lower loss."""

    record: ValidationRecord
    is_best: bool


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint of this step is being written; it appears whole, soon after."""

    step: int


@dataclasses.dataclass(frozen=True)
class Notice:
    """One sentence worth showing: a resume, a damaged checkpoint that was skipped, an early stop."""

    message: str


@dataclasses.dataclass(frozen=True)
class RunFinished:
    """After the last checkpoint is complete.

    Attributes:
        step: updates made in the whole run.
        seconds: wall time of this call.
        reason: "max_steps", "patience", or "already_finished" where there was nothing left to do.
    """

    step: int
    seconds: float
    reason: str


Event: TypeAlias = RunStarted | Compiled | StepFinished | Validated | Saved | Notice | RunFinished
OnEvent: TypeAlias = Callable[[Event], None]
