"""Direct preference optimisation in float64 NumPy: the loss of pairs, and its derivative by the policy's logits."""

import numpy as np


def answer_log_probs(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ weight · log p(target) over the last axis of targets: logits [..., T, V], targets and weights [..., T]."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return (np.take_along_axis(log_p, targets[..., None], -1)[..., 0] * weights).sum(-1)


def dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta: float) -> np.ndarray:
    """−log σ(β ((chosen − reference_chosen) − (rejected − reference_rejected))) of each pair, of log-probabilities [B].

    Source:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 7.
    """
    arrays = (np.asarray(x, np.float64) for x in (chosen, rejected, reference_chosen, reference_rejected))
    chosen, rejected, reference_chosen, reference_rejected = arrays
    z = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return np.where(z > 0, np.log1p(np.exp(-np.abs(z))), np.log1p(np.exp(-np.abs(z))) - z)


def dpo_loss_vjp(chosen, rejected, reference_chosen, reference_rejected, beta: float, dy) -> tuple:
    """Cotangents of chosen and rejected: ∓ β σ(−z) dy."""
    z = beta * ((np.asarray(chosen) - reference_chosen) - (np.asarray(rejected) - reference_rejected))
    slope = beta * np.asarray(dy, np.float64) / (1.0 + np.exp(z))
    return -slope, slope
