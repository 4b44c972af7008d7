"""Whether a converted model still answers as its source: logits of both on the same few rows of ids."""

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from riftco.interchange.onnx_graph.sidecar import GRAPHS
from riftco.models import DecoderConfig, forward
from riftco.types import PyTree

ROWS, LENGTH = 4, 32

_HALF, _BRAIN = 0.02, 0.1
BOUNDS = {
    "float32": 1e-4,
    "float16": _HALF,
    "bfloat16": _BRAIN,
    "f32": 1e-4,
    "f16": _HALF,
    "bf16": _BRAIN,
    "q8_0": 0.2,
    "q4_1": 0.9,
    "q4_0": 0.9,
}
"""The largest `Difference.relative` that rounding to a dtype or a type explains; unrelated logits have about 1.4."""


class Difference(NamedTuple):
    """How far the logits of a result lie from those of its source."""

    max_abs: float
    """The largest |Δlogit|."""
    kl: float
    """The mean of KL(source ‖ result) over positions, in nats."""
    argmax_agreement: float
    """The share of positions whose most likely token is the same."""
    relative: float
    """The norm of the difference by the norm of the source's, both without the mean that softmax does not see."""

    def __str__(self) -> str:
        return (
            f"max |Δlogit| {self.max_abs:.3g}, KL {self.kl:.3g}, argmax agreement {100 * self.argmax_agreement:.4g} %"
        )


def probe(config: DecoderConfig) -> NDArray[np.int32]:
    """The rows of ids [B, T] on which models of a configuration are compared; always the same."""
    shape = (ROWS, min(LENGTH, config.context))
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32)


def logits(params: PyTree, config: DecoderConfig) -> NDArray[np.float32]:
    """The logits [B, T, V] of a model on `probe(config)`, on the host.

    Args:
        params: plain or packed.
        config: their configuration.
    """
    with jax.default_matmul_precision("highest"):
        return np.asarray(_forward(params, jnp.asarray(probe(config)), config).astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="config")
def _forward(params: PyTree, tokens: Any, config: DecoderConfig) -> Any:
    return forward(params, tokens, config)


def onnx_logits(directory: Path, config: DecoderConfig) -> NDArray[np.float32] | None:
    """As `logits`, by ONNX Runtime: the first half of each row by `prefill.onnx`, the rest by `decode.onnx`.

    Args:
        directory: that `onnx_graph.export` wrote.
        config: of the model.

    Returns:
        None where onnxruntime is not installed.
    """
    try:
        # By its name, since it is no dependency: only who wants the graphs run has it.
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return None

    def run(graph: str, ids: NDArray[np.int64], total: int, past: dict[str, Any]) -> list[Any]:
        session = runtime.InferenceSession(str(directory / GRAPHS[graph]), providers=["CPUExecutionProvider"])
        mask = np.ones((len(ids), total), np.int64)
        return session.run(None, {"input_ids": ids, "attention_mask": mask, **past})

    tokens = probe(config).astype(np.int64)
    length = tokens.shape[1]
    half = (length + 1) // 2
    first, *cache = run("prefill", tokens[:, :half], half, {})
    if half == length:
        return first
    names = (f"past_key_values.{layer}.{part}" for layer in range(config.layers) for part in ("key", "value"))
    second, *_ = run("decode", tokens[:, half:], length, dict(zip(names, cache, strict=True)))
    return np.concatenate([first, second], axis=1)


def compare(source: NDArray[np.float32], result: NDArray[np.float32]) -> Difference:
    """How far two arrays of logits [B, T, V] lie apart, in float64, one row at a time."""
    largest = divergence = squares = total = 0.0
    same = 0
    for p, q in _wide_rows(source, result):
        largest = float(np.maximum(largest, np.abs(p - q).max()))  # unlike max, it keeps a NaN
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        divergence += float((np.exp(log_p) * (log_p - log_q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        p, q = p - p.mean(-1, keepdims=True), q - q.mean(-1, keepdims=True)
        squares, total = squares + float(((p - q) ** 2).sum()), total + float((p**2).sum())
    count = source.shape[0] * source.shape[1]
    relative = (squares / total) ** 0.5 if total else float(squares != 0)  # true of a NaN
    return Difference(largest, max(0.0, divergence / count), same / count, relative)


def _wide_rows(
    left: NDArray[np.float32], right: NDArray[np.float32]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    for a, b in zip(left, right, strict=True):
        yield a.astype(np.float64), b.astype(np.float64)


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
