"""What a run writes about itself: immutable records, and the file that holds one of them a line.

metrics.jsonl reads as one run however often the run was stopped: on a resume the lines past the restored step and a
torn last line are dropped before new ones are added.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO, TypeAlias

from riftco.errors import DataError
from riftco.files import json_lines, replace_file


@dataclasses.dataclass(frozen=True, slots=True)
class TrainRecord:
    """One update.

    Attributes:
        step: updates made, this one included; from 1.
        loss: mean loss of the counted targets before the update, in nats.
        perplexity: exp(loss).
        grad_norm: global gradient norm before clipping.
        clip_scale: what the gradients were multiplied by.
        learning_rate: of this update.
        tokens: targets counted since the run began.
        tokens_per_second: counted targets over wall time since the step before; None for the first step after a start,
            which compiles.
        accuracy: of preferences, the share of pairs whose chosen answer has the larger reward; None elsewhere, and then
            not written.
        margin: of preferences, by how much on average; None elsewhere.
    """

    phase: ClassVar[str] = "train"
    step: int
    loss: float
    perplexity: float
    grad_norm: float
    clip_scale: float
    learning_rate: float
    tokens: int
    tokens_per_second: float | None
    accuracy: float | None = None
    margin: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ValidationRecord:
    """One exhaustive evaluation.

    Attributes:
        step: updates made before it; from 0.
        loss: mean over all targets of the split, in nats.
        perplexity: exp(loss).
        bits_per_byte: loss in bits over the bytes of the targets; None where byte lengths are not known.
        tokens: targets scored.
        tokens_per_second: targets scored over wall time.
        accuracy: see `TrainRecord`.
        margin: see `TrainRecord`.
    """

    phase: ClassVar[str] = "validation"
    step: int
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    tokens_per_second: float | None
    accuracy: float | None = None
    margin: float | None = None


Record: TypeAlias = TrainRecord | ValidationRecord


def perplexity(loss: float) -> float:
    """The exponential of a loss; infinity where it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def to_json(record: Record) -> str:
    """One line, without its end; a number that is not finite, or not known, is null."""
    values: dict[str, Any] = {"phase": record.phase, **dataclasses.asdict(record)}
    values = {k: v for k, v in values.items() if not (v is None and k in ("accuracy", "margin"))}
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(clean, allow_nan=False)


def _record(line: Mapping[str, Any]) -> Record | None:
    values = dict(line)
    try:
        kind = {"train": TrainRecord, "validation": ValidationRecord}[values.pop("phase")]
        for name in ("loss", "perplexity", "grad_norm", "clip_scale"):
            if name in values and values[name] is None:
                values[name] = math.inf
        return kind(**values)
    except (KeyError, TypeError):
        return None


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """The records of a metrics.jsonl, in order: none where there is no file, and without a torn last line.

    Raises:
        DataError: a line other than the last is not a record.
    """
    records = []
    for line in json_lines(path):
        if not line.is_whole:
            break
        record = None if line.record is None else _record(line.record)
        if record is None:
            raise DataError(
                f"metrics: every line must be a record; line {line.number} of '{path}' is not; move it aside"
            )
        records.append(record)
    return tuple(records)


class MetricsLog:
    """An append-only metrics.jsonl that begins with given records.

    Args:
        path: the file. Where it holds anything but `kept` it is replaced in one step, else left as it is.
        kept: the records to begin with.

    Raises:
        DataError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], kept: Sequence[Record] = ()) -> None:
        self._path = Path(path)
        text = "".join(to_json(record) + "\n" for record in kept)
        try:
            if not self._path.is_file() or self._path.read_text(encoding="utf-8", errors="replace") != text:
                replace_file(self._path, text)
            self._file: TextIO = open(self._path, "a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise DataError(f"metrics: cannot write '{self._path}': {error.strerror or error}") from error

    def add(self, record: Record) -> None:
        """Append a line; a reader sees it at once."""
        self._file.write(to_json(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until the disk has every line; called before a checkpoint that counts on them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
