"""A run's checkpoints: one directory a step, written in the background, complete or not there at all.

Orbax stores the arrays and commits a step by renaming its directory. What it does not do is here: noticing damage,
falling back to the step before, keeping the newest and the best, and saying which configuration a state belongs to.
"""

import contextlib
import json
import logging
import os
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from riftco.checkpoints.directory import committed, damage, read_record, remove
from riftco.checkpoints.leaves import restored, storable, target
from riftco.checkpoints.records import array_differences, array_record, check_config, corrupted, seal
from riftco.errors import CheckpointError, ConfigError
from riftco.tree import named_leaves
from riftco.types import PyTree

_LOG = logging.getLogger("riftco.checkpoints")
_METRICS_FILE = "riftco_metrics.json"


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns."""

    state: PyTree
    """Bit for bit what was saved, placed as asked."""
    meta: dict[str, Any]
    """The JSON that was saved with it."""
    step: int
    """The step it is from."""


class Checkpoints:
    """The checkpoints of one run, in `directory/<step>/`.

    A context manager; leaving it waits for the save in progress. Every process of a distributed run calls every method.
    Reading needs no write access and touches nothing, so a run's checkpoints can be read while it is training.

    Damaged steps (a missing commit file, a truncated or changed data file, unreadable metadata) are never `latest`;
    each is named in a warning of the logger `riftco.checkpoints` and kept, with the reason, in `skipped`. Directories
    of saves that never finished are not steps at all.
    """

    skipped: dict[int, str]
    """Damaged steps found so far, and why each was passed over."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        best_metric: str | None = "validation_loss",
        best_mode: str = "min",
        async_save: bool = True,
    ) -> None:
        """Name the directory; nothing is created before the first save.

        Args:
            directory: where the step directories go; may be a `gs://` path.
            keep: how many of the newest steps to keep, >= 1; the best step is kept beside them.
            best_metric: the metric that decides which step is best; None keeps no best step.
            best_mode: "min" or "max": which end of the metric is best.
            async_save: whether `save` returns once the arrays are in host memory, and writes in the background.

        Raises:
            ConfigError: if `keep` or `best_mode` is not acceptable.
        """
        if keep < 1 or best_mode not in ("min", "max"):
            raise ConfigError(
                f"Checkpoints: keep must be >= 1 and best_mode min or max; got {keep} and {best_mode!r}. Change them."
            )
        path = os.fspath(directory)
        self.directory = epath.Path(path if "://" in path else os.path.abspath(path))
        self.skipped = {}
        self._unscored: set[int] = set()
        self._keep, self._best_metric, self._best_mode = keep, best_metric, best_mode
        self._async_save = async_save
        self._manager: ocp.CheckpointManager | None = None
        _quieten()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _LOG.error("%s", failure)  # The error that ended the block matters more.

    # Writing.

    def save(
        self,
        step: int,
        state: PyTree,
        meta: dict[str, Any],
        metrics: dict[str, float] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Save a state under a step; first waits for the save before it.

        Once it returns the arrays may be donated or changed. The step appears, complete, when the writing is done; a
        kill before that leaves the steps as they were.

        Args:
            step: >= 0; usually how many updates the state has seen.
            state: pytree of jax or NumPy arrays of any dtype, typed keys included.
            meta: JSON: configuration, data position, fingerprints.
            metrics: numbers known already; `record` adds those that come later.
            overwrite: whether an undamaged checkpoint of this step may be replaced; a damaged one always is.

        Raises:
            CheckpointError: if this or the previous save fails, if the step exists, if a leaf is not an array, or if
                `meta` is not JSON.
        """
        self.wait()
        state = jax.tree.map(storable, state)
        for name, leaf in named_leaves(state):
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                raise CheckpointError(
                    f"checkpoint {step}: every leaf of the state must be an array; {name or '(root)'} is "
                    f"{type(leaf).__name__}. Put plain values in meta."
                )
        record = seal(step, meta, metrics or {}, array_record(state))
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(record))
        try:
            exists = step in committed(self.directory)
            if exists and not overwrite and not self._is_skipped(step):
                raise CheckpointError(
                    f"checkpoint {self.directory / str(step)}: a step is saved once; it exists. "
                    "Resume from it, or pass overwrite=True."
                )
            self._remove([step] if exists else [])
            if self._manager is None:
                self._manager = self._open_manager()
            self._manager.save(step, args=items, force=True)
        except CheckpointError:
            raise
        except Exception as error:
            raise self._write_error(step, error) from error
        self.skipped.pop(step, None)
        if not self._async_save:
            self.wait()

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Add metrics to a saved step, for instance those of an evaluation that came after it; first waits for it.

        Raises:
            CheckpointError: if the step is not there, or cannot be written to.
        """
        self.wait()
        if step not in committed(self.directory):
            raise CheckpointError(f"checkpoint {step}: it must be saved before metrics are recorded. Save it first.")
        if jax.process_index() == 0:
            path = self.directory / str(step) / _METRICS_FILE
            try:
                aside = path.with_name(f"{_METRICS_FILE}.tmp")
                aside.write_text(json.dumps({**self.metrics(step), **metrics}))
                aside.replace(path)
            except OSError as error:
                raise self._write_error(step, error) from error

    def wait(self) -> None:
        """Wait for the save in progress, then remove the steps that are neither among the newest nor the best.

        Raises:
            CheckpointError: if that save failed.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._prune()
        except Exception as error:
            broken, self._manager = self._manager, None  # The next save opens another.
            with contextlib.suppress(Exception):
                broken.close()
            raise self._write_error(None, error) from error

    def close(self) -> None:
        """`wait`, then release the threads; the object can still read, and save again.

        Raises:
            CheckpointError: if the save in progress failed.
        """
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def discard_after(self, step: int) -> None:
        """Remove every step later than `step`: what a run that goes back to it does before it goes on."""
        self.wait()
        self._remove([number for number in committed(self.directory) if number > step])

    # Reading.

    def steps(self) -> list[int]:
        """The complete steps, ascending; damage that shows without reading the arrays is warned of and left out."""
        return [step for step in committed(self.directory) if not self._is_skipped(step)]

    def latest(self) -> int | None:
        """The newest step that `steps` lists, or None. Its arrays are looked at only by `restore`."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best `best_metric`, the newest of equals; None where no step has one."""
        sign = 1.0 if self._best_mode == "min" else -1.0
        scored = {step: self.metrics(step).get(self._best_metric or "") for step in self.steps()}
        finite = {step: sign * value for step, value in scored.items() if value is not None and np.isfinite(value)}
        return min(finite, key=lambda step: (finite[step], -step)) if finite else None

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON saved with a step. Raises CheckpointError if it is absent or damaged."""
        return read_record(self.directory, step)["meta"]

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step, saved and recorded; damaged ones that were recorded are left out with a warning.

        Raises CheckpointError if the step is absent or damaged.
        """
        saved = read_record(self.directory, step)["metrics"]
        path = self.directory / str(step) / _METRICS_FILE
        try:
            return {**saved, **json.loads(path.read_text())}
        except FileNotFoundError:
            return saved
        except (OSError, ValueError, TypeError) as error:
            if step not in self._unscored:
                self._unscored.add(step)
                _LOG.warning("%s is damaged, so step %d may lose its place as the best: %s", path, step, error)
            return saved

    def restore(
        self,
        step: int | None,
        like: PyTree,
        *,
        config: Any = None,
        ignore: tuple[str, ...] = (),
    ) -> Restored:
        """Read a state back, bit for bit, onto any devices.

        Args:
            step: the step, or None for the newest that can be read: damaged ones are passed over with a warning.
            like: pytree of arrays or `jax.ShapeDtypeStruct`s, of the saved structure. A leaf's sharding says where to
                put it, whatever the number of devices at the save; without one it goes to the default device. A NumPy
                leaf comes back as NumPy.
            config: if given, what `meta["config"]` must be; see `check_config`.
            ignore: fields of the configuration that may differ.

        Returns:
            (state, meta, step).

        Raises:
            CheckpointError: if there is nothing to restore, if `step` is damaged, or if the configuration or the arrays
                are not those of this run, listing what differs.
        """
        self.wait()
        if step is not None:
            if step not in committed(self.directory):
                raise CheckpointError(
                    f"checkpoints: step {step} must be in {self.directory}; there are {self.steps()}. Choose one."
                )
            if reason := damage(self.directory, step):
                raise self._damaged(step, reason)
        for candidate in reversed(self.steps()) if step is None else [step]:
            record = read_record(self.directory, candidate)
            if config is not None:
                check_config(record["meta"].get("config"), config, ignore=ignore)
            wanted = jax.tree.map(target, like)
            if lines := array_differences(record["arrays"], wanted):
                raise CheckpointError(
                    f"checkpoint {self.directory / str(candidate)}: the arrays must be those of this run; "
                    f"{'; '.join(lines)}. Use the configuration it was saved with."
                )
            try:
                with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                    state = reader.restore(
                        self.directory / str(candidate) / "state", args=ocp.args.StandardRestore(wanted)
                    )
                reason = ", ".join(corrupted(record["arrays"], state))
                reason = reason and f"changed since the save: {reason}"
            except Exception as error:  # Whatever the storage layers raise, the step is not readable.
                state, reason = None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not reason:
                return Restored(jax.tree.map(restored, state, like), record["meta"], candidate)
            if step is not None:
                raise self._damaged(step, reason)
            self._skip(candidate, reason)
        raise CheckpointError(
            f"checkpoints: there must be a step to restore in {self.directory}; there is none"
            f"{' that is whole' if self.skipped else ''}. Start a new run."
        )

    # Inside.

    def _open_manager(self) -> ocp.CheckpointManager:
        # Only a writer may clear away unfinished saves: a reader could meet a live one.
        options = ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True, enable_async_checkpointing=self._async_save
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def _is_skipped(self, step: int) -> bool:
        if step not in self.skipped and (reason := damage(self.directory, step)):
            self._skip(step, reason)
        return step in self.skipped

    def _skip(self, step: int, reason: str) -> None:
        self.skipped[step] = reason
        _LOG.warning("checkpoint %s is damaged and is skipped: %s", self.directory / str(step), reason)

    def _prune(self) -> None:
        if jax.process_index() == 0:
            steps = self.steps()
            kept = {*steps[-self._keep :], self.best()}
            for step in steps:
                if step not in kept:
                    remove(self.directory, step)

    def _remove(self, steps: list[int]) -> None:
        """Remove steps on behalf of all processes, each of which has looked before the first one acts."""
        _barrier("look")
        if jax.process_index() == 0:
            for step in steps:
                remove(self.directory, step)
        _barrier("removed")
        if steps and self._manager is not None:
            self._manager.reload()

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.directory / str(step)}: the files must be as they were saved; {reason}. "
            "Resume from another step."
        )

    def _write_error(self, step: int | None, error: Exception) -> CheckpointError:
        which = self.directory if step is None else self.directory / str(step)
        return CheckpointError(
            f"checkpoint {which}: it must be possible to write there; {type(error).__name__}: {error}. "
            "Check the permissions and the free space; earlier steps are intact."
        )


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"riftco.checkpoints:{name}")


def _quieten() -> None:
    """Orbax narrates each save at INFO through absl's logger; a level that the user has set stands."""
    logger = logging.getLogger("absl")
    if logger.level in (logging.NOTSET, logging.INFO):
        logger.setLevel(logging.WARNING)
