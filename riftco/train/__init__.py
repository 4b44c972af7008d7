"""Training: one compiled step, the loop around it, evaluation, meshes.

`objective` says what is trained and what is minimised; `step` has the step and its state, `loop` the run, `evaluation`
the held-out score, `mesh` the devices, `config` the options, `metrics` and `events` what a run says, `run_directory`
what it keeps and how it is resumed.
"""

from riftco.train.config import TrainConfig
from riftco.train.distributed import connect
from riftco.train.evaluation import Evaluation, Evaluator, evaluate
from riftco.train.fixed import FixedBatchSource
from riftco.train.interruption import Interrupted
from riftco.train.loop import NonFiniteStep, TrainResult, train
from riftco.train.mesh import batch_sharding, parse_mesh, place_batch, process_rows, shardings
from riftco.train.metrics import TrainRecord, ValidationRecord, read_records
from riftco.train.objective import Objective
from riftco.train.randomness import Streams, streams
from riftco.train.run_directory import is_fresh
from riftco.train.step import (
    StepMetrics,
    TrainState,
    abstract_state,
    check_attention,
    init_state,
    make_train_step,
    state_shardings,
)

__all__ = [
    "Evaluation",
    "Evaluator",
    "FixedBatchSource",
    "Interrupted",
    "NonFiniteStep",
    "Objective",
    "StepMetrics",
    "Streams",
    "TrainConfig",
    "TrainRecord",
    "TrainResult",
    "TrainState",
    "ValidationRecord",
    "abstract_state",
    "batch_sharding",
    "check_attention",
    "connect",
    "evaluate",
    "init_state",
    "is_fresh",
    "make_train_step",
    "parse_mesh",
    "place_batch",
    "process_rows",
    "read_records",
    "shardings",
    "state_shardings",
    "streams",
    "train",
]
