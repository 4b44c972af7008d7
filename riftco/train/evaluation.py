"""Evaluation over a whole held-out split: every target once, weighted by target, in nats and in bits per byte."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from riftco.data import EvaluationWindows, ExampleWindows, PreferenceWindows
from riftco.errors import ConfigError, TrainingError
from riftco.models import DecoderConfig
from riftco.train.mesh import batch_sharding, in_context, place_batch, process_rows, replicated
from riftco.train.metrics import perplexity
from riftco.train.objective import Figures, Objective
from riftco.types import Array, PyTree

Windows = EvaluationWindows | ExampleWindows | PreferenceWindows

_IN_FLIGHT = 4


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result over one split.

    Attributes:
        loss: mean over all targets, in nats.
        perplexity: exp(loss).
        bits_per_byte: total loss in bits over the UTF-8 bytes of the targets; None where byte lengths are not known.
        targets: how many were scored.
        bytes: how many bytes they stand for; None where not known.
        sequences: how many were scored.
        skipped: how many had fewer than two tokens.
        seconds: wall time.
        accuracy: what the objective calls so: the share of pairs whose chosen answer is preferred (preferences), or of
            targets that are the most likely token; None where not asked for.
        margin: mean of what the chosen answers are rewarded beyond the rejected ones; None but for preferences.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    targets: int
    bytes: int | None
    sequences: int
    skipped: int
    seconds: float
    accuracy: float | None = None
    margin: float | None = None


class Evaluator:
    """Scores params on the same windows as often as asked; compiled once where the windows are padded.

    Args:
        config: the decoder; dropout is off.
        windows: `riftco.data.evaluation_windows(..., padded=True)`, or unpadded (one compilation a width, one device);
            or `riftco.data.ExampleWindows`, or `PreferenceWindows` for an objective over pairs.
        byte_lengths: int32[V] of `riftco.data.token_byte_lengths(tokenizer)`, for bits per byte.
        dtype: the compute dtype; None for the params' own.
        attention: the implementation; None for the fastest.
        mesh: where the params lie; None for one device.
        objective: what is scored; None for the loss of the next token under all weights of the decoder.

    Raises:
        ConfigError: with a mesh, if the windows are not padded or their rows do not divide by the devices.
    """

    def __init__(
        self,
        config: DecoderConfig,
        windows: Windows,
        *,
        byte_lengths: np.ndarray | None = None,
        dtype: str | None = None,
        attention: str | None = None,
        mesh: Mesh | None = None,
        objective: Objective | None = None,
    ) -> None:
        if windows.context > config.context:
            raise ConfigError(
                f"Evaluator: windows must fit the model's context of {config.context}; got {windows.context}; "
                "cut shorter windows"
            )
        if mesh is not None and not windows.padded:
            raise ConfigError("Evaluator: a mesh needs windows of one shape; got unpadded ones; use padded=True")
        self.windows = windows
        self._byte_lengths = None if byte_lengths is None else np.asarray(byte_lengths)
        self._mesh = mesh
        self._rows = process_rows(mesh, windows.batch_size, windows.batch_size)

        objective = objective or Objective(config=config)

        def score(params: PyTree, batch: Any, *frozen: PyTree) -> tuple[Array, Figures]:
            with in_context(mesh):
                return objective.loss(params, batch, *frozen, reduction="sum", dtype=dtype, attention=attention)

        self._frozen = objective.frozen
        if mesh is None:
            self._score = jax.jit(score)
        else:
            everywhere = replicated(mesh)
            where = (objective.shardings(mesh), batch_sharding(mesh), *(everywhere for _ in self._frozen))
            self._score = jax.jit(score, in_shardings=where, out_shardings=everywhere)

    def __call__(self, params: PyTree, *, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Score every target of the split once.

        Args:
            params: the model's weights.
            after_batch: called between batches; what it raises ends the evaluation.

        Raises:
            TrainingError: if a loss is not finite; the message names the batch.
        """
        begin = time.perf_counter()
        sums: list[float] = []
        figures: dict[str, list[float]] = {}
        waiting: list[tuple[tuple[Array, Figures], Any]] = []

        def settle(scored: tuple[Array, Figures], batch: Any) -> None:
            sums.append(_finite(scored[0], batch))
            for name, value in scored[1].items():
                figures.setdefault(name, []).append(float(value))

        bytes_ = 0
        for batch in self.windows:
            arrays = batch.arrays()
            if self._rows is not None:
                arrays = {name: array[slice(*self._rows)] for name, array in arrays.items() if array is not None}
            placed = place_batch(arrays, self._mesh, self.windows.batch_size)
            waiting.append((self._score(params, placed, *self._frozen), batch))
            if self._byte_lengths is not None:
                bytes_ += batch.byte_count(self._byte_lengths)
            if len(waiting) > _IN_FLIGHT:
                settle(*waiting.pop(0))
            after_batch()
        for pair in waiting:
            settle(*pair)
        total, targets = math.fsum(sums), self.windows.target_count
        return Evaluation(
            loss=total / targets,
            perplexity=perplexity(total / targets),
            bits_per_byte=total / math.log(2) / bytes_ if bytes_ else None,
            targets=targets,
            bytes=None if self._byte_lengths is None else bytes_,
            sequences=self.windows.sequences,
            skipped=self.windows.skipped,
            seconds=time.perf_counter() - begin,
            **{name: math.fsum(values) / targets for name, values in figures.items()},
        )


def _finite(loss: Array, batch: Any) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise TrainingError(
            f"evaluation: every loss must be finite; got {value} in {batch.describe()}; the weights are damaged, or "
            "the tokens are not the model's"
        )
    return value


def evaluate(params: PyTree, config: DecoderConfig, windows: Windows, **options: Any) -> Evaluation:
    """The loss over a held-out split; options as `Evaluator`."""
    return Evaluator(config, windows, **options)(params)
