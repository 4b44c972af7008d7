"""What a run keeps on disk, and how it begins: fresh, refused, or where it was left.

run.yaml         the model's and the run's configuration, as the library has them
config.yaml      the same as flags, where the command line runs it
tokenizer.json   the tokenizer, where there is one
metrics.jsonl    one record a line
checkpoints/     one directory a step

base/            the packed base of a run that trains adapters beside one, which the command line keeps there

samples.jsonl, report.html and final/ come from the command line once the run is finished.
"""

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import yaml
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from riftco.checkpoints import Checkpoints
from riftco.data import Source
from riftco.errors import CheckpointError, ConfigError
from riftco.files import replace_file
from riftco.models import DecoderConfig
from riftco.train.config import TrainConfig, deciding
from riftco.train.metrics import MetricsLog, Record, ValidationRecord, read_records
from riftco.train.objective import Objective
from riftco.train.step import TrainState, abstract_state

_BEGUN = ("run.yaml", "config.yaml", "metrics.jsonl")
_RESULTS = ("samples.jsonl", "report.html", "final")
_NAMES = (*_BEGUN, "tokenizer.json", "base", "checkpoints", *_RESULTS)


@dataclasses.dataclass(frozen=True)
class Best:
    """The lowest validation loss so far.

    Attributes:
        loss: it; None before the first evaluation.
        step: where it was.
        stale: evaluations since.
    """

    loss: float | None = None
    step: int | None = None
    stale: int = 0

    def after(self, record: ValidationRecord) -> "Best":
        """The best once `record` is known; of equals the first stays."""
        if self.loss is None or record.loss < self.loss:
            return Best(record.loss, record.step, 0)
        return dataclasses.replace(self, stale=self.stale + 1)


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands, apart from its arrays.

    Attributes:
        step: updates made.
        tokens: targets counted in them.
        best: the evaluations so far, one that is due at `step` not included.
    """

    step: int = 0
    tokens: int = 0
    best: Best = Best()


def is_fresh(train_config: TrainConfig, checkpoints: Checkpoints | None = None) -> bool:
    """Whether a run begins anew in its out_dir, as its options and what lies there decide; nothing is changed.

    A run is there where any file or directory that a run makes is. Without `force` none of it is ever removed, but
    for one case: `resume="auto"` starts over what was cut off before its first checkpoint.

    Args:
        train_config: `out_dir`, `checkpoint_dir`, `resume` and `force`.
        checkpoints: those of the run, where they are open.

    Raises:
        ConfigError: a fresh start would remove a run, or the directory cannot be one.
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    path, resume = Path(train_config.out_dir or "."), train_config.resume
    probe = next(parent for parent in (path, *path.parents) if parent.exists())
    if not probe.is_dir():
        raise ConfigError(
            f"out_dir: it must be possible to write to the directory; '{path}': {probe} is a file; "
            "choose another --out-dir"
        )
    if resume not in ("never", "auto"):
        return False
    if checkpoints is None:
        checkpoints = Checkpoints(train_config.checkpoint_dir or path / "checkpoints")
    found = [name for name in _NAMES if (path / name).exists()]
    if resume == "never":
        if (found or checkpoints.steps()) and not train_config.force:
            names = f" ({', '.join(found)})" if found else ""
            raise ConfigError(
                f"out_dir: a fresh run needs a new directory; '{path}' holds a run{names}; continue it with --resume "
                "auto, remove it with --force, or choose another --out-dir"
            )
        return True
    if checkpoints.latest() is not None:
        return False
    if checkpoints.skipped:
        raise CheckpointError(
            f"resume: a checkpoint that is whole is needed; every one in '{checkpoints.directory}' is damaged "
            f"({'; '.join(checkpoints.skipped.values())}); start over with --resume never --force"
        )
    kept = [name for name in found if name in _RESULTS] if any(name in _BEGUN for name in found) else found
    if kept:
        raise ConfigError(
            f"out_dir: a run without checkpoints cannot be resumed; '{path}' has none but holds {', '.join(kept)}, "
            "which a fresh start would remove; choose another --out-dir, or start over with --resume never --force"
        )
    return True


class RunDirectory:
    """The files of one run; every process of a distributed run has one, and process 0 writes the small files.

    Raises:
        ConfigError: the directory cannot be made or written.
    """

    def __init__(
        self, config: DecoderConfig, train_config: TrainConfig, tokenizer: Any, objective: Objective | None = None
    ) -> None:
        self.path = Path(train_config.out_dir or ".")
        self.checkpoints = Checkpoints(train_config.checkpoint_dir or self.path / "checkpoints", keep=train_config.keep)
        self._config, self._train_config, self._tokenizer = config, train_config, tokenizer
        self._objective = objective or Objective(config=config)
        self._log: MetricsLog | None = None
        self._is_new = False

    # ---- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, source: Source, mesh: Mesh | None) -> tuple[TrainState | None, Position]:
        """Follow `resume`: the restored state, or None for a fresh start, and where the run stands.

        Raises:
            ConfigError: a fresh start where a run is, without `force`; or fewer max_steps than were made.
            CheckpointError: no checkpoint to resume from is whole, or it belongs to another configuration.
            DataError: the source is not the one the checkpoint was saved with.
        """
        resume = self._train_config.resume
        if not is_fresh(self._train_config, self.checkpoints):
            return self._restore(None if resume == "auto" else int(resume), source, mesh)
        self._clear()
        self._is_new = not self.path.exists()
        return None, Position()

    def _restore(self, step: int | None, source: Source, mesh: Mesh | None) -> tuple[TrainState, Position]:
        like = abstract_state(self._config, self._train_config, mesh, self._objective)
        state, meta, step = self.checkpoints.restore(step, like, config=self._identity())
        max_steps = self._train_config.max_steps
        if max_steps < meta["max_steps"]:
            raise CheckpointError(
                f"resume: max_steps may grow but not shrink; saved {meta['max_steps']}, now {max_steps}; give at least "
                "as many"
            )
        source.restore(meta["source"])
        return state, Position(step, meta["tokens"], Best(**meta["best"]))

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with: everything that decides the numbers."""
        tokenizer = None if self._tokenizer is None else self._tokenizer.fingerprint()
        train = dict(deciding(self._train_config))
        identity = {"model": self._config.to_dict(), "train": train, "tokenizer": tokenizer}
        objective = self._objective.identity()
        return {**identity, "objective": objective} if objective else identity

    def _clear(self) -> None:
        """Remove what an earlier run left, and nothing that is not a run's."""
        _together("looked")
        if jax.process_index() == 0:
            try:
                for path in (self.path / name for name in _NAMES):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            except OSError as error:
                raise _unwritable(self.path, error) from error
        _together("cleared")
        self.checkpoints.discard_after(-1)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def open(self, position: Position) -> None:
        """Write the configuration and cut the metrics back to `position`; called once there is something to do."""
        self.checkpoints.discard_after(position.step)
        if jax.process_index() != 0:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            settings = {"model": self._config.to_dict(), "train": self._train_config.to_dict()}
            replace_file(self.path / "run.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
            if self._tokenizer is not None:
                self._tokenizer.save(self.path / "tokenizer.json")
        except OSError as error:
            raise _unwritable(self.path, error) from error
        kept = [record for record in self._records() if record.step <= position.step]
        if jax.process_count() > 1:  # evaluated again, since not every process sees the file
            kept = [record for record in kept if record.phase == "train" or record.step < position.step]
        self._log = MetricsLog(self.path / "metrics.jsonl", kept)

    def _records(self) -> tuple[Record, ...]:
        return read_records(self.path / "metrics.jsonl")

    def validation_at(self, step: int) -> ValidationRecord | None:
        """The evaluation of `step` that is on record already; None where several processes would have to agree."""
        if jax.process_count() > 1:
            return None
        found = (record for record in self._records() if isinstance(record, ValidationRecord) and record.step == step)
        return next(found, None)

    def add(self, record: Any) -> None:
        """Append to metrics.jsonl."""
        if self._log is not None:
            self._log.add(record)

    def save(self, state: TrainState, position: Position, source_state: dict[str, Any]) -> None:
        """Start writing the checkpoint of `position`; the arrays may be donated once this returns."""
        if self._log is not None:
            self._log.sync()
        meta = {
            "config": self._identity(),
            "max_steps": self._train_config.max_steps,
            "source": source_state,
            "tokens": position.tokens,
            "best": dataclasses.asdict(position.best),
        }
        self.checkpoints.save(position.step, state, meta)

    def undo(self) -> None:
        """Remove what a fresh start has made, after a failure before there was anything to keep."""
        if jax.process_index() != 0:
            return
        with contextlib.suppress(OSError):
            for name in (*_BEGUN, "tokenizer.json"):
                (self.path / name).unlink(missing_ok=True)
            if (self.path / "base").is_dir():
                shutil.rmtree(self.path / "base")
            if (self.path / "checkpoints").is_dir():
                (self.path / "checkpoints").rmdir()  # only if it is empty
            if self._is_new:
                self.path.rmdir()

    def close(self) -> None:
        """Wait for the last checkpoint and close the files."""
        try:
            self.checkpoints.close()
        finally:
            if self._log is not None:
                self._log.close()


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"out_dir: it must be possible to write to the directory; '{path}': {error.strerror or error}; "
        "check its permissions or choose another --out-dir"
    )


def _together(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"riftco.train:{name}")
