"""Samplers one token at a time in float64: each rule as a loop, from one row of numbers to the next.

The twin of `riftco.sampling`. Every function takes one row [V] and returns one row [V]. Order of the rules: penalties →
logit bias → temperature → top-k → top-p → min-p. Among equals the lower id comes first everywhere.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Row = NDArray[np.float64]


def apply_penalties(
    logits: ArrayLike,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Row:
    """Logits [V] after the repetition penalty on prompt and output, then presence and frequency on the output."""
    row = np.array(logits, np.float64)
    for token in range(row.size):
        if token in prompt or token in output:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        if token in output:
            row[token] -= presence
        for produced in output:
            if produced == token:
                row[token] -= frequency
    return row


def apply_temperature(logits: ArrayLike, value: float) -> Row:
    """Probabilities [V] of the softmax of logits / value; for 0, all of it on the largest logit."""
    row = np.array(logits, np.float64)
    best = descending(row)[0]
    if value == 0:
        result = np.zeros_like(row)
        result[best] = 1.0
        return result
    weights = np.array([math.exp((logit - row[best]) / value) for logit in row])
    return weights / weights.sum()


def keep_top_k(probabilities: ArrayLike, k: int) -> Row:
    """The k most likely tokens, renormalised; k ≤ 0 or ≥ V keeps all."""
    row = np.array(probabilities, np.float64)
    return row if k <= 0 or k >= row.size else _only(row, descending(row)[:k])


def keep_top_p(probabilities: ArrayLike, p: float) -> Row:
    """The fewest most likely tokens whose probabilities sum to at least p (never none), renormalised; 1 keeps all."""
    row = np.array(probabilities, np.float64)
    if p >= 1:
        return row
    kept: list[int] = []
    mass = 0.0
    for token in descending(row):
        if kept and mass >= p:
            break
        kept.append(token)
        mass += row[token]
    return _only(row, kept)


def keep_min_p(probabilities: ArrayLike, p: float) -> Row:
    """The tokens with at least p times the largest probability, renormalised; 0 keeps all."""
    row = np.array(probabilities, np.float64)
    largest = max(row)
    return _only(row, [token for token in range(row.size) if row[token] >= p * largest])


def distribution(logits: ArrayLike, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Row:
    """The probabilities [V] that a token is drawn with, after all four rules in their order."""
    row = apply_temperature(logits, temperature)
    # By logit, not by probability: two logits may differ and their probabilities still both round to 0.
    if 0 < top_k < row.size:
        row = _only(row, descending(np.array(logits, np.float64))[:top_k])
    return keep_min_p(keep_top_p(row, top_p), min_p)


def descending(row: Row) -> list[int]:
    """Ids from the largest value to the smallest, lower ids first among equals."""
    return sorted(range(row.size), key=lambda token: (-row[token], token))


def _only(row: Row, kept: Sequence[int]) -> Row:
    result = np.zeros_like(row)
    for token in kept:
        result[token] = row[token]
    return result / result.sum()
