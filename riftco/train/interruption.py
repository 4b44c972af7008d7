"""Ctrl-C and SIGTERM: noted when they come, acted on between two steps, after a checkpoint."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from riftco.errors import TrainingError

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupted(TrainingError):
    """Training was told to stop, and saved first.

    Attributes:
        exit_code: what a program should exit with: 130 for Ctrl-C, 143 for SIGTERM.
        step: updates made, all of them saved.
    """

    def __init__(self, number: int, step: int, directory: str | None) -> None:
        self.exit_code, self.step = EXIT_CODES[signal.Signals(number)], step
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        super().__init__(
            f"training: stopped by {name} after step {step}, which is saved in '{directory}'; "
            "go on with the same command and --resume auto"
        )


class Interruptions:
    """Within a `with` block the first signal is only noted; the second Ctrl-C stops at once.

    Several processes must save together, so there the one that is signalled tells the others through jax's preemption
    service, which handles SIGTERM itself, and all of them agree on a step. Outside the main thread nothing is caught.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._old: dict[int, Any] = {}
        self._together = jax.process_count() > 1

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._together else (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)  # wakes the preemption service

    def at(self, step: int) -> int | None:
        """The signal to stop for after `step`, or None; called by every process after every step."""
        if self._together:
            reached = multihost_utils.reached_preemption_sync_point(step)
            return (self._received or signal.SIGTERM) if reached else None
        return self._received

    def during_evaluation(self) -> int | None:
        """The signal to stop for in the middle of an evaluation: never where several processes must agree."""
        return None if self._together else self._received


class Uninterrupted:
    """Signals left to their usual handlers: a run without a directory has nowhere to save."""

    def __enter__(self) -> "Uninterrupted":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def at(self, step: int) -> int | None:
        """None: nothing is noted."""
        return None

    def during_evaluation(self) -> int | None:
        """None: nothing is noted."""
        return None
