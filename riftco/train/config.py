"""How to train: one frozen, validated value whose fields are the command line's flags.

What is trained is a `DecoderConfig`; here is everything else that decides a run, and what of it may change when the run
is resumed.
"""

import dataclasses
import math
import operator
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args

from riftco.errors import ConfigError
from riftco.optim.options import checked_options

LearningRateSchedule = Literal["cosine", "constant", "linear", "wsd"]
GradCheckpoint = Literal["none", "block"]
Dtype = Literal["float32", "bfloat16"]

MAY_CHANGE = frozenset(
    "data out_dir checkpoint_dir save_every steps_per_eval steps_per_report evaluate_first keep resume force mesh "
    "attention grad_checkpoint patience peak_flops".split()
)
"""Fields that a resumed run may set anew: they decide where, how often and on what a run works, not which numbers it
goes through (`attention` and the mesh move the last digits). `max_steps` may grow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every choice of a training run but the model's shape.

    Raises:
        ConfigError: for a value that is not acceptable, in one sentence.
    """

    data: str | None = None
    """What is trained on: a text file, a glob or a prepared dataset; recorded, and read by the command line alone."""
    out_dir: str | None = None
    """The run directory; without one nothing is written and nothing can be resumed."""
    checkpoint_dir: str | None = None
    """Where checkpoints go, a gs:// path for instance; out_dir/checkpoints by default. All processes must reach it."""
    max_steps: int = 1000
    """Updates in the whole run, those before a resume included."""
    batch_size: int = 16
    """Rows of one micro-batch, all devices and processes together."""
    grad_accumulation_steps: int = 1
    """Micro-batches in one update; an update sees batch_size × grad_accumulation_steps rows."""
    learning_rate: float = 1e-3
    """The highest rate."""
    min_lr: float = 0.0
    """The floor that the schedule ends at."""
    warmup_steps: int = 0
    """Updates in which the rate rises linearly; 0 for none."""
    lr_schedule: LearningRateSchedule = "cosine"
    """How the rate goes on after the warm-up."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.999
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's term under the fraction, added to the root."""
    weight_decay: float = 0.0
    """Decoupled decay of the weights of rank 2; norms and biases never decay."""
    max_grad_norm: float | None = 1.0
    """The limit on the global gradient norm; None for no clipping."""
    page_size: int | None = None
    """Scalars in a page of Adam's moments; None keeps the moments shaped as the weights."""
    dropout: float | None = None
    """The dropout rate; None for the model's own."""
    dtype: Dtype = "float32"
    """The dtype of activations and products; weights, moments, statistics and losses stay float32."""
    attention: str | None = None
    """The implementation of attention; None for the fastest on the device."""
    grad_checkpoint: GradCheckpoint = "none"
    """"block" keeps only each block's input and runs the block again in the backward pass."""
    mesh: str | None = None
    """Devices by axis, such as "data=4" or "data=2,fsdp=2"; None for one device, or all that several processes have."""
    seed: int = 0
    """Separate streams for initial weights, batches, dropout and sampling derive from it."""
    save_every: int = 500
    """Updates from one checkpoint to the next; one more is written before every evaluation and at the end."""
    steps_per_eval: int = 250
    """Updates from one exhaustive evaluation to the next; the last step always has one."""
    evaluate_first: bool = True
    """Whether a fresh run evaluates before its first update."""
    steps_per_report: int = 10
    """Updates from one printed line to the next; metrics.jsonl has every step."""
    patience: int | None = None
    """Evaluations in a row without a better loss after which training stops; None to go on."""
    keep: int = 3
    """How many of the latest checkpoints stay; the best one stays besides."""
    resume: str | int = "never"
    """"never", "auto" (the latest good checkpoint, or a fresh start where there is none) or a step; kept as text."""
    force: bool = False
    """Whether a fresh start may remove the run that out_dir holds."""
    peak_flops: float | None = None
    """Floating-point operations per second of one device, for utilization; None for the published figure, if known."""

    def __post_init__(self) -> None:
        for name, low in (
            ("max_steps", 1), ("batch_size", 1), ("grad_accumulation_steps", 1), ("warmup_steps", 0), ("save_every", 1),
            ("steps_per_eval", 1), ("steps_per_report", 1), ("keep", 1), ("seed", 0), ("patience", 1), ("page_size", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (value is None and name in ("patience", "page_size")):
                object.__setattr__(self, name, _integer(name, value, low))
        for name, low in (
            ("learning_rate", 0.0), ("min_lr", 0.0), ("beta1", 0.0), ("beta2", 0.0), ("eps", 0.0),
            ("weight_decay", 0.0), ("max_grad_norm", 0.0), ("dropout", 0.0), ("peak_flops", 0.0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (value is None and name in ("max_grad_norm", "dropout", "peak_flops")):
                object.__setattr__(self, name, _number(name, value, low))
        for name, kind in (
            ("lr_schedule", LearningRateSchedule), ("dtype", Dtype), ("grad_checkpoint", GradCheckpoint)
        ):  # fmt: skip
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise ConfigError(f"TrainConfig: {name} must be one of {choices}; got {getattr(self, name)!r}")
        if self.seed >= 2**63:
            raise ConfigError(f"TrainConfig: seed must be below 2**63; got {self.seed}")
        if self.min_lr > self.learning_rate:
            raise ConfigError(
                f"TrainConfig: min_lr must not exceed learning_rate; got {self.min_lr} and {self.learning_rate}; "
                "lower the floor or raise the rate"
            )
        if self.warmup_steps and self.warmup_steps >= self.max_steps:
            raise ConfigError(
                f"TrainConfig: warmup_steps must be less than max_steps; got {self.warmup_steps} of {self.max_steps}; "
                "shorten the warm-up or train longer"
            )
        self._check_optimizer()
        if isinstance(self.resume, int) and not isinstance(self.resume, bool):
            object.__setattr__(self, "resume", str(self.resume))
        is_step = isinstance(self.resume, str) and self.resume.isascii() and self.resume.isdigit()
        if self.resume not in ("never", "auto") and not is_step:
            raise ConfigError(f"TrainConfig: resume must be never, auto or the number of a step; got {self.resume!r}")
        if self.resume != "never" and self.out_dir is None:
            raise ConfigError("TrainConfig: resume needs an out_dir to resume from; got none; give out_dir")
        if self.resume != "never" and self.force:
            raise ConfigError(
                f"TrainConfig: force removes the run that resume goes on with; got force and resume {self.resume}; "
                "drop one of them"
            )

    def _check_optimizer(self) -> None:
        """Adam's own limits, so that a run is refused before its data are read."""
        try:
            checked_options(
                self.learning_rate, self.beta1, self.beta2, self.eps, self.max_grad_norm, self.weight_decay,
                self.page_size,
            )  # fmt: skip
        except ConfigError as error:
            words = str(error).replace("adam: b1 ", "adam: beta1 ").replace("adam: b2 ", "adam: beta2 ")
            raise ConfigError(words.replace("adam:", "TrainConfig:")) from None

    @property
    def rows_per_step(self) -> int:
        """Rows that one update sees: batch_size × grad_accumulation_steps."""
        return self.batch_size * self.grad_accumulation_steps

    def to_dict(self) -> dict[str, Any]:
        """Every field as a JSON value; `from_dict` inverts it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """The configuration that `to_dict` described.

        Raises:
            ConfigError: for a key that is not a field, or an unacceptable value.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := [str(key) for key in values if key not in names]:
            raise ConfigError(
                f"TrainConfig: every key must be a field; got {', '.join(unknown)}; the fields are {', '.join(names)}"
            )
        return cls(**values)


def deciding(config: TrainConfig) -> Mapping[str, Any]:
    """The fields that decide the numbers of a run, `max_steps` left out: a resumed run must agree on them."""
    kept = {k: v for k, v in config.to_dict().items() if k not in MAY_CHANGE and k != "max_steps"}
    return types.MappingProxyType(kept)


def _integer(name: str, value: Any, low: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low:
        raise ConfigError(f"TrainConfig: {name} must be an integer of at least {low}; got {value!r}")
    return number


def _number(name: str, value: Any, low: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < low:
        raise ConfigError(f"TrainConfig: {name} must be a finite number of at least {low:g}; got {value!r}")
    return float(value)
