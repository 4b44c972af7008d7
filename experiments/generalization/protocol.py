"""The protocol: candidates, selection on validation alone, a test split that opens once.

Nothing here trains. `run` takes two functions, so that the order of what happens can be tested without a model.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = dict[str, float]
"""Of one model on one split: "loss" in nats per answer token, "accuracy" of these tokens, "exact" share of answers."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to tune the base.

    Attributes:
        name: unique.
        method: "full", "lora" or "qlora"; the best of a method is selected.
        learning_rate: the highest rate.
        rank: of the adapters; 0 for full. The scale's alpha is always twice the rank.
    """

    name: str
    method: str
    learning_rate: float
    rank: int = 0


class Sealed:
    """A split that can be opened once, and only for a selection that has been made."""

    def __init__(self, rows: Any) -> None:
        self._rows, self.opened_for = rows, None

    def open(self, selection: Sequence[str]) -> Any:
        """The rows; `selection` is kept. Raises RuntimeError the second time, and for an empty selection."""
        if self.opened_for is not None:
            raise RuntimeError(f"the test split was opened for {', '.join(self.opened_for)}; it opens once")
        if not selection:
            raise RuntimeError("the test split opens for a selection; none was made")
        self.opened_for = tuple(selection)
        return self._rows


def select(validation: Mapping[str, Sequence[float]], candidates: Sequence[Candidate]) -> dict[str, str]:
    """Method -> the candidate of the lowest mean validation loss over seeds; of equals the first that was declared.

    Seeds are averaged, never chosen from: a seed is luck, and no hyperparameter.
    """
    best: dict[str, str] = {}
    mean = {name: statistics.fmean(losses) for name, losses in validation.items()}
    for candidate in candidates:
        if candidate.method not in best or mean[candidate.name] < mean[best[candidate.method]]:
            best[candidate.method] = candidate.name
    return best


def run(
    candidates: Sequence[Candidate],
    seeds: Sequence[int],
    train: Callable[[Candidate, int], Any],
    score: Callable[[Any, Any], Figures],
    splits: Mapping[str, Any],
    sealed: Mapping[str, Sealed],
) -> dict[str, Any]:
    """Train every candidate with every seed, select on validation, open the test for the base and the selected.

    Args:
        candidates: in the order in which ties are broken.
        seeds: of adapters, batches and dropout.
        train: gives the model that a candidate and a seed come to.
        score: of a model (None is the base) on a split.
        splits: "train" and "validation".
        sealed: test splits by name, opened once each.

    Returns:
        {"base", "candidates", "selected"}: figures by split, for candidates by seed; those not selected have no figures
        for the test.
    """
    base = {name: score(None, rows) for name, rows in splits.items()}
    models, rows = {}, {}
    for candidate in candidates:
        models[candidate.name] = {seed: train(candidate, seed) for seed in seeds}
        rows[candidate.name] = {
            seed: {name: score(model, split) for name, split in splits.items()}
            for seed, model in models[candidate.name].items()
        }
    losses = {name: [found["validation"]["loss"] for found in of.values()] for name, of in rows.items()}
    selected = select(losses, candidates)
    for name, split in sealed.items():
        opened = split.open(sorted(selected.values()))
        base[name] = score(None, opened)
        for candidate in selected.values():
            for seed, model in models[candidate].items():
                rows[candidate][seed][name] = score(model, opened)
    return {"base": base, "candidates": rows, "selected": selected}
