"""A run's events as people watch them: one live line on a terminal, plain lines anywhere else."""

import sys
from typing import Any

from riftco.cli.console import Console


class Watcher:
    """Renders the events of `riftco.train.train` on stderr; a context manager, and callable with an event.

    Args:
        console: where plain lines go.
        max_steps: of the run, for the bar.
    """

    def __init__(self, console: Console, max_steps: int) -> None:
        self._console, self._max_steps = console, max_steps
        self._live: Any = None
        self._task: Any = None

    def __enter__(self) -> "Watcher":
        if sys.stderr.isatty():
            from rich.console import Console as Terminal
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
            )
            self._live = Progress(*columns, console=Terminal(stderr=True, highlight=False), refresh_per_second=5)
            self._task = self._live.add_task("compiling …", total=self._max_steps)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Any) -> None:
        """Show an event."""
        match type(event).__name__:
            case "RunStarted":
                rows = f"{event.rows_per_step} rows a step"
                devices = f"{event.devices} {event.platform} device{'s' if event.devices > 1 else ''}"
                self._line(f"{event.parameters:,} parameters, {rows}, {devices}, {event.max_steps:,} steps")
                self._update(event.step, None)
            case "StepFinished":
                text = figures(event)
                self._update(event.record.step, text)
                if self._live is None and event.is_report:
                    self._line(f"step {event.record.step:>6,}/{self._max_steps:,} | {text}")
            case "Validated":
                record = event.record
                bits = "" if record.bits_per_byte is None else f", {record.bits_per_byte:.3f} bits per byte"
                best = ", the best so far" if event.is_best else ""
                figure = f"perplexity {record.perplexity:.2f}" if record.accuracy is None else rewards(record)
                text = f"validation loss {record.loss:.4f}, {figure}{bits}{best}"
                self._line(f"step {record.step:>6,}: {text}")
            case "Notice":
                self._line(event.message)
            case "Compiled":
                self._line(f"compiled in {event.seconds:.1f} s")

    def _line(self, text: str) -> None:
        if self._live is None:
            self._console.note(text)
        else:
            self._live.console.print(text, markup=False)

    def _update(self, step: int, text: str | None) -> None:
        if self._live is not None:
            self._live.update(self._task, completed=step, **({} if text is None else {"description": text}))


def figures(event: Any) -> str:
    """Loss, tokens a second, utilization where the device's peak is known, time left."""
    record = event.record
    parts = [f"loss {record.loss:.4f}"]
    if record.accuracy is not None:
        parts.append(rewards(record))
    if record.tokens_per_second is not None:
        parts.append(f"{record.tokens_per_second:,.0f} tok/s")
    if event.utilization is not None:
        parts.append(f"MFU {100 * event.utilization:.1f} %")
    if event.eta_seconds is not None:
        parts.append(f"ETA {duration(event.eta_seconds)}")
    return " | ".join(parts)


def rewards(record: Any) -> str:
    """What a record of preferences says beside its loss."""
    return f"accuracy {record.accuracy:.3f}, margin {record.margin:.4f}"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )
