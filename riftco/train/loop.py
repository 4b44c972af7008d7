"""The training loop: batches in, steps dispatched, metrics written, checkpoints and evaluations where they are due.

The host runs one step ahead of the device: while step k computes, the host cuts batch k + 1 and hands it over, and only
then waits for the numbers of step k. What stands on disk and what a watcher is told always belongs to steps that are
known to have worked.
"""

import collections
import dataclasses
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from riftco.data import Batch, Source, token_byte_lengths
from riftco.errors import CheckpointError, ConfigError, TrainingError
from riftco.models import DecoderConfig, parameter_count
from riftco.train import events
from riftco.train.config import TrainConfig
from riftco.train.distributed import is_from_jax
from riftco.train.evaluation import Evaluator, Windows
from riftco.train.interruption import Interrupted, Interruptions, Uninterrupted
from riftco.train.mesh import parse_mesh, place_batch, process_rows, replicated
from riftco.train.metrics import Record, TrainRecord, ValidationRecord, perplexity, read_records
from riftco.train.objective import Objective
from riftco.train.run_directory import Best, Position, RunDirectory
from riftco.train.step import StepMetrics, TrainState, check_attention, init_state, make_train_step
from riftco.train.throughput import peak_flops
from riftco.types import PyTree

_SMOOTHING = 0.05


class NonFiniteStep(TrainingError):
    """A step whose loss, gradients or candidates were not finite; nothing of it took effect.

    Attributes:
        step: the number of the update that failed, from 1.
        batch: what it was computed on.
        state: the state before it, the last good one; saved as checkpoint step − 1 where there is an out_dir.
    """

    def __init__(self, message: str, step: int, batch: Batch, state: TrainState) -> None:
        super().__init__(message)
        self.step, self.batch, self.state = step, batch, state


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves.

    Attributes:
        state: the last weights and moments.
        step: updates made in the whole run.
        best: the lowest validation loss and its step; its checkpoint is kept.
        reason: "max_steps", "patience" or "already_finished".
        seconds: wall time of this call.
        directory: the run directory, or None.
    """

    state: TrainState
    step: int
    best: Best
    reason: str
    seconds: float
    directory: Any
    _records: tuple[Record, ...]

    @property
    def params(self) -> PyTree:
        """The last weights."""
        return self.state.params

    @property
    def records(self) -> tuple[Record, ...]:
        """Every record of the run, in order; read from metrics.jsonl where there is one."""
        return self._records if self.directory is None else read_records(self.directory / "metrics.jsonl")

    @property
    def validation(self) -> ValidationRecord | None:
        """The last evaluation, or None."""
        return next((record for record in reversed(self.records) if isinstance(record, ValidationRecord)), None)


def train(
    config: DecoderConfig,
    train_config: TrainConfig,
    source: Source,
    *,
    validation: Windows | None = None,
    params: PyTree = None,
    tokenizer: Any = None,
    on_event: events.OnEvent | None = None,
    objective: Objective | None = None,
) -> TrainResult:
    """Train a decoder from a source of batches.

    Args:
        config: the decoder.
        train_config: how to train, where to write, how to begin.
        source: batches of batch_size × grad_accumulation_steps rows of at most `config.context` tokens.
        validation: the held-out split, `evaluation_windows(..., padded=True)`, `ExampleWindows` or
            `PreferenceWindows`; None to train without evaluation.
        params: what a fresh run starts from: weights, or what the objective trains; None draws it from the seed.
        tokenizer: recorded with the run; its byte lengths give bits per byte.
        on_event: called, on process 0, with each `riftco.train.events` event.
        objective: what is trained and minimised; None for all weights of the decoder, on the next token.

    Returns:
        A `TrainResult`.

    Raises:
        NonFiniteStep: a loss or gradient is not finite; the state before it is saved.
        Interrupted: Ctrl-C or SIGTERM came; the state is saved.
        ConfigError, DataError, CheckpointError: the run cannot begin as asked, or the disk fails.
        TrainingError: another process of a distributed run was lost.
    """
    loop = _Loop(config, train_config, source, validation, tokenizer, on_event, objective or Objective(config=config))
    try:
        return loop.run(params)
    except (jax.errors.JaxRuntimeError, CheckpointError) as error:
        if jax.process_count() == 1 or not is_from_jax(error):
            raise
        raise TrainingError(
            f"training: every process must keep running; one of {jax.process_count()} was lost after step "
            f"{loop.position.step} ({str(error).splitlines()[0][:200]}); start them all again with --resume auto"
        ) from error


class _Pending(NamedTuple):
    """A step that was handed to the device and whose numbers have not been looked at."""

    metrics: StepMetrics
    batch: Batch
    source_state: dict[str, Any]


class _Loop:
    """One call of `train`."""

    def __init__(
        self,
        config: DecoderConfig,
        train_config: TrainConfig,
        source: Source,
        validation: Windows | None,
        tokenizer: Any,
        on_event: events.OnEvent | None,
        objective: Objective,
    ) -> None:
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise ConfigError(
                f"train: the vocabulary must fit the model; the tokenizer has {tokenizer.vocab_size} ids and the model "
                f"{config.vocab_size} rows; raise vocab_size"
            )
        check_attention(config, train_config.attention)
        self.config, self.train_config, self.source = config, train_config, source
        self.mesh = parse_mesh(train_config.mesh)
        if self.mesh is not None and objective.frozen:
            frozen = jax.device_put(objective.frozen, replicated(self.mesh))  # once, not at every step
            objective = dataclasses.replace(objective, frozen=frozen)
        self.objective = objective
        self.rows = process_rows(self.mesh, train_config.rows_per_step, train_config.batch_size)
        self.directory = None
        if train_config.out_dir is not None:
            self.directory = RunDirectory(config, train_config, tokenizer, objective)
        self.evaluator = None
        if validation is not None:
            self.evaluator = Evaluator(
                config,
                validation,
                byte_lengths=None if tokenizer is None or objective.unit != "token" else token_byte_lengths(tokenizer),
                dtype=train_config.dtype,
                attention=train_config.attention,
                mesh=self.mesh,
                objective=objective,
            )
        self.emit = on_event if on_event is not None and jax.process_index() == 0 else lambda event: None
        self.step = make_train_step(config, train_config, self.mesh, objective)
        self.position, self.saved = Position(), -1
        self.pending: collections.deque[_Pending] = collections.deque()
        self.records: list[Record] = []
        self.clock: float | None = None
        self.seconds_per_step: float | None = None
        self.flops: float | None = None
        device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        devices = 1 if self.mesh is None else self.mesh.size
        self.peak = (train_config.peak_flops or peak_flops(device) or 0.0) * devices

    # ---- the course of a run -----------------------------------------------------------------------------------------

    def run(self, params: PyTree) -> TrainResult:
        begin, limit = time.perf_counter(), self.train_config.max_steps
        state = None
        if self.directory is not None:
            state, self.position = self.directory.begin(self.source, self.mesh)
            for step, reason in self.directory.checkpoints.skipped.items():
                self.emit(events.Notice(f"checkpoint {step} is damaged and was skipped: {reason}"))
        self.saved = -1 if state is None else self.position.step
        if state is not None:
            self.emit(events.Notice(f"resumed after step {self.position.step}"))
        if state is not None and self._was_finished():
            return self._result(state, begin, "already_finished")
        fresh = lambda: init_state(self.config, self.train_config, self.mesh, params, self.objective)
        self.state = fresh() if state is None else state
        try:
            if self.directory is not None:
                self.directory.open(self.position)
            self._announce()
            with Interruptions() if self.directory is not None else Uninterrupted() as self.signals:
                if self.train_config.evaluate_first or self.position.step:
                    self._validate_if_due()
                dispatched = self.position.step
                while dispatched < limit and not self._is_over(self.position):
                    self._dispatch(dispatched)
                    dispatched += 1
                    self._settle(leave=1)
                    number = self.signals.at(dispatched)
                    if number is not None or self._is_boundary(dispatched):
                        self._settle(leave=0)
                        self._save()
                        self._stop_for(number)
                        self._validate_if_due()
                        self.clock = time.perf_counter()
        except BaseException:
            self._close()
            if self.directory is not None and state is None and self.position.step == 0 and self.saved < 0:
                self.directory.undo()
            raise
        self._close()
        reason = "max_steps" if self.position.step >= limit else "patience"
        if reason == "patience":
            self.emit(events.Notice(f"stopped early: {self.position.best.stale} evaluations without a lower loss"))
        return self._result(self.state, begin, reason)

    def _close(self) -> None:
        if self.directory is not None:
            self.directory.close()

    def _result(self, state: TrainState, begin: float, reason: str) -> TrainResult:
        seconds = time.perf_counter() - begin
        self.emit(events.RunFinished(self.position.step, seconds, reason))
        path = None if self.directory is None else self.directory.path
        return TrainResult(state, self.position.step, self.position.best, reason, seconds, path, tuple(self.records))

    def _is_over(self, position: Position) -> bool:
        patience = self.train_config.patience
        return self._is_last(position.step) or (patience is not None and position.best.stale >= patience)

    def _is_boundary(self, step: int) -> bool:
        return step % self.train_config.save_every == 0 or self._is_validated(step) or self._is_last(step)

    def _is_last(self, step: int) -> bool:
        return step >= self.train_config.max_steps

    def _is_validated(self, step: int) -> bool:
        is_due = step % self.train_config.steps_per_eval == 0 or self._is_last(step)
        return self.evaluator is not None and is_due

    def _was_finished(self) -> bool:
        """Whether there is nothing left to do for the run that was found, its last evaluation included."""
        position = self.position
        if self._is_validated(position.step):
            record = None if self.directory is None else self.directory.validation_at(position.step)
            if record is None:
                return False
            position = dataclasses.replace(position, best=position.best.after(record))
        return self._is_over(position)

    def _stop_for(self, number: int | None) -> None:
        if number is not None and self.directory is not None:
            self.directory.close()  # the message says that it is saved, so wait until it is
            raise Interrupted(number, self.position.step, str(self.directory.path))

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _dispatch(self, number: int) -> None:
        source_state = self.source.state()
        batch = self.source.next(self.rows)
        placed = place_batch(batch.arrays(), self.mesh, self.train_config.rows_per_step)
        begin = time.perf_counter()
        self.state, metrics = self.step(self.state, placed, np.int32(number), *self.objective.frozen)
        if self.flops is None:
            self.flops = self.objective.flops_per_token(batch.tokens.shape[1])
            self.emit(events.Compiled(time.perf_counter() - begin))
        self.pending.append(_Pending(metrics, batch, source_state))

    def _settle(self, leave: int) -> None:
        """Look at the numbers of the oldest steps until `leave` are left."""
        while len(self.pending) > leave:
            metrics, batch, source_state = self.pending.popleft()
            values: StepMetrics = jax.device_get(metrics)
            if not values.ok:
                self._fail(values, batch, source_state)
            now = time.perf_counter()
            seconds, self.clock = None if self.clock is None else now - self.clock, now
            step, targets = self.position.step + 1, int(values.targets)
            self.position = dataclasses.replace(self.position, step=step, tokens=self.position.tokens + targets)
            loss = float(values.loss)
            record = TrainRecord(
                step=step,
                loss=loss,
                perplexity=perplexity(loss),
                grad_norm=float(values.grad_norm),
                clip_scale=float(values.clip_scale),
                learning_rate=float(values.learning_rate),
                tokens=self.position.tokens,
                tokens_per_second=None if not seconds else targets / seconds,
                **{name: float(value) for name, value in values.figures.items()},
            )
            self._write(record)
            self._report(record, seconds)

    def _report(self, record: TrainRecord, seconds: float | None) -> None:
        if seconds is not None:
            old = self.seconds_per_step
            self.seconds_per_step = seconds if old is None else old + _SMOOTHING * (seconds - old)
        eta = self.seconds_per_step and self.seconds_per_step * (self.train_config.max_steps - record.step)
        rate = record.tokens_per_second
        utilization = rate * self.flops / self.peak if rate and self.flops and self.peak else None
        is_report = record.step % self.train_config.steps_per_report == 0 or self._is_last(record.step)
        self.emit(events.StepFinished(record, utilization, eta, is_report))

    def _fail(self, values: StepMetrics, batch: Batch, source_state: dict[str, Any]) -> None:
        step = self.position.step + 1
        self.pending.clear()
        kept = "the state before it is kept"
        if self.directory is not None:
            self._save(source_state)
            kept = f"the state before it is saved as checkpoint {step - 1}"
        raise NonFiniteStep(
            f"training: loss, gradients and the updated weights must be finite; at step {step} the loss is "
            f"{float(values.loss):g} and the gradient norm {float(values.grad_norm):g} on {batch.describe()}; {kept}; "
            "lower the learning rate, or look at these rows",
            step,
            batch,
            self.state,
        )

    # ---- saving and evaluating ---------------------------------------------------------------------------------------

    def _save(self, source_state: dict[str, Any] | None = None) -> None:
        if self.directory is None or self.saved == self.position.step:
            return
        self.directory.save(self.state, self.position, source_state or self.source.state())
        self.saved = self.position.step
        self.emit(events.Saved(self.saved))

    def _validate_if_due(self) -> None:
        if self.evaluator is None or not self._is_validated(self.position.step):
            return
        record = None if self.directory is None else self.directory.validation_at(self.position.step)
        if record is None:
            record = self._validate(self.evaluator)
            self._write(record)
        best = self.position.best.after(record)
        is_best = best.step == record.step
        self.position = dataclasses.replace(self.position, best=best)
        if self.directory is not None and self.saved == record.step:
            self.directory.checkpoints.record(record.step, {"validation_loss": record.loss})
        self.emit(events.Validated(record, is_best))

    def _validate(self, evaluator: Evaluator) -> ValidationRecord:
        def after_batch() -> None:
            if (number := self.signals.during_evaluation()) is not None:
                self._save()
                self._stop_for(number)

        result = evaluator(self.state.params, after_batch=after_batch)
        return ValidationRecord(
            step=self.position.step,
            loss=result.loss,
            perplexity=result.perplexity,
            bits_per_byte=result.bits_per_byte,
            tokens=result.targets,
            tokens_per_second=result.targets / result.seconds if result.seconds else None,
            accuracy=result.accuracy,
            margin=result.margin,
        )

    def _write(self, record: Record) -> None:
        if self.directory is None:
            self.records.append(record)
        else:
            self.directory.add(record)

    def _announce(self) -> None:
        self.emit(
            events.RunStarted(
                step=self.position.step,
                max_steps=self.train_config.max_steps,
                parameters=parameter_count(self.config),
                rows_per_step=self.train_config.rows_per_step,
                devices=1 if self.mesh is None else self.mesh.size,
                platform=jax.devices()[0].platform,
                processes=jax.process_count(),
            )
        )
