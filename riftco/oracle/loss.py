"""Cross-entropy over a vocabulary, one position at a time, in NumPy float64.

A position counts when its weight is not 0, its target is not `ignore_index` and it lies in `time_range`. The logits and
the target of a position that does not count are never looked at: it adds 0 to the loss and gets gradient 0.
"""

import numpy as np

from riftco.errors import ConfigError, ShapeError
from riftco.oracle.elementwise import as_float64
from riftco.oracle.linalg import linear, linear_vjp
from riftco.oracle.reduce import logsumexp, softmax


def _weights(logits: np.ndarray, targets: np.ndarray, weights, ignore_index, time_range, reduction) -> np.ndarray:
    """The weight of every position, 0 for those that do not count."""
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"cross_entropy: logits[..., V] needs targets[...]; got {logits.shape} and {targets.shape}. "
            "Give one target id per position."
        )
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"cross_entropy: reduction must be 'mean' or 'sum'; got {reduction!r}. Choose one of them.")
    result = np.ones(targets.shape) if weights is None else as_float64(weights).copy()
    if result.shape != targets.shape:
        raise ShapeError(
            f"cross_entropy: weights must have the shape of targets {targets.shape}; got {result.shape}. "
            "Give one weight per position."
        )
    if ignore_index is not None:
        result[targets == ignore_index] = 0.0
    if time_range is not None:
        offset, count = time_range
        if targets.ndim < 1 or not (0 <= offset and 1 <= count and offset + count <= targets.shape[-1]):
            raise ShapeError(
                f"cross_entropy: time_range (offset, count) must lie inside the last axis of targets {targets.shape}; "
                f"got {tuple(time_range)}. Shorten it."
            )
        time = np.arange(targets.shape[-1])
        result[..., (time < offset) | (time >= offset + count)] = 0.0
    return result


def _position_loss(row: np.ndarray, target: int, label_smoothing: float, z_loss: float) -> float:
    """The loss of one position with the logits `row`[V]."""
    if not 0 <= target < len(row):
        return np.nan
    log_normaliser = float(logsumexp(row))
    loss = (1.0 - label_smoothing) * (log_normaliser - row[target])
    if label_smoothing:  # a logit of -inf must not turn an unused term into 0 · inf
        loss += label_smoothing * np.mean(log_normaliser - row)
    if z_loss:
        loss += z_loss * log_normaliser**2
    return float(loss)


def _position_gradient(row: np.ndarray, target: int, label_smoothing: float, z_loss: float) -> np.ndarray:
    """The derivative of `_position_loss` by each of the V logits."""
    if not 0 <= target < len(row):
        return np.full(row.shape, np.nan)
    p = softmax(row)
    one_hot = np.zeros(len(row))
    one_hot[target] = 1.0
    gradient = (1.0 - label_smoothing) * (p - one_hot)
    if label_smoothing:
        gradient = gradient + label_smoothing * (p - 1.0 / len(row))
    if z_loss:
        gradient = gradient + 2.0 * z_loss * logsumexp(row) * p
    return gradient


@np.errstate(all="ignore")
def cross_entropy(
    logits,
    targets,
    *,
    weights=None,
    ignore_index=None,
    label_smoothing=0.0,
    z_loss=0.0,
    time_range=None,
    reduction="mean",
):
    """The weighted mean (or sum) of the negative log-likelihood, in nats.

    The loss of a position that counts, with p = softmax(logits) and s the label smoothing, is its weight times
    (1 - s)(-log p[target]) + s mean_v(-log p[v]) + z_loss · logsumexp(logits)².

    Args:
        logits: unnormalised log-probabilities [..., V].
        targets: token ids [...]. One outside [0, V) at a position that counts makes the result NaN.
        weights: a factor for each position [...]; None means 1.
        ignore_index: the target value of positions that do not count.
        label_smoothing: s, the share of the loss spread evenly over the vocabulary.
        z_loss: factor of the squared log-normaliser.
        time_range: (offset, count) on the last axis of targets; positions outside do not count.
        reduction: "mean", Σ weight · loss / Σ weight (0 when no position counts), or "sum", Σ weight · loss.

    Returns:
        A float64 scalar.
    """
    logits, targets = as_float64(logits), np.asarray(targets)
    weight = _weights(logits, targets, weights, ignore_index, time_range, reduction)
    total, total_weight = 0.0, 0.0
    for position in np.ndindex(targets.shape):
        if weight[position] != 0.0:
            loss = _position_loss(logits[position], int(targets[position]), label_smoothing, z_loss)
            total += weight[position] * loss
            total_weight += weight[position]
    if reduction == "sum":
        return np.float64(total)
    return np.float64(total / total_weight if total_weight != 0.0 else 0.0)


@np.errstate(all="ignore")
def cross_entropy_vjp(
    logits,
    targets,
    dy,
    *,
    weights=None,
    ignore_index=None,
    label_smoothing=0.0,
    z_loss=0.0,
    time_range=None,
    reduction="mean",
):
    """Cotangents (dlogits, None, None) of logits, targets and weights; a position with a bad target gets NaN."""
    logits, targets, dy = as_float64(logits), np.asarray(targets), float(dy)
    weight = _weights(logits, targets, weights, ignore_index, time_range, reduction)
    divisor = 1.0 if reduction == "sum" else weight.sum()
    dlogits = np.zeros_like(logits)
    for position in np.ndindex(targets.shape):
        if weight[position] != 0.0 and divisor != 0.0:
            gradient = _position_gradient(logits[position], int(targets[position]), label_smoothing, z_loss)
            dlogits[position] = dy * weight[position] / divisor * gradient
    return dlogits, None, None


def linear_cross_entropy(x, weight, targets, *, bias=None, **options):
    """cross_entropy(linear(x, weight, bias), targets, **options).

    Args:
        x: the activations [..., D].
        weight: the output embedding [V, D].
        targets: token ids [...].
        bias: None or [V].
        options: the keywords of `cross_entropy`.
    """
    return cross_entropy(linear(x, weight, bias), targets, **options)


def linear_cross_entropy_vjp(x, weight, targets, dy, *, bias=None, **options):
    """Cotangents (dx, dweight, None), and dbias behind them when a bias is given."""
    dlogits, _, _ = cross_entropy_vjp(linear(x, weight, bias), targets, dy, **options)
    if bias is None:
        return *linear_vjp(x, weight, dlogits), None
    dx, dweight, dbias = linear_vjp(x, weight, bias, dlogits)
    return dx, dweight, None, dbias
