"""The protocol of experiments/generalization: what is selected by what, and that the test opens once."""

import importlib
import json

import pytest

protocol = importlib.import_module("experiments.generalization.protocol")

CANDIDATES = [
    protocol.Candidate("full slow", "full", 1e-4),
    protocol.Candidate("full fast", "full", 1e-3),
    protocol.Candidate("lora 1", "lora", 1e-3, 1),
    protocol.Candidate("lora 2", "lora", 1e-3, 2),
]
LOSSES = {"full slow": (2.0, 4.0), "full fast": (1.0, 4.5), "lora 1": (2.0, 2.0), "lora 2": (1.0, 3.0)}


def play(log):
    """A run whose models are their names; every call is noted."""

    def train(candidate, seed):
        log.append(("train", candidate.name, seed))
        return candidate.name, seed

    def score(model, rows):
        log.append(("score", model and model[0], rows))
        loss = 9.0 if model is None else LOSSES[model[0]][model[1]]
        return {"loss": loss if rows == "validation rows" else -loss, "accuracy": 0.0, "exact": 0.0}

    sealed = {"test": protocol.Sealed("test rows")}
    splits = {"train": "train rows", "validation": "validation rows"}
    return protocol.run(CANDIDATES, (0, 1), train, score, splits, sealed), sealed["test"]


def test_validation_selects_by_the_mean_over_seeds_and_ties_go_to_the_first():
    found, _ = play([])
    # full fast has the lower mean, 2.75; the adapters tie at 2.0. Train losses order the other way and do not count.
    assert found["selected"] == {"full": "full fast", "lora": "lora 1"}


def test_the_test_is_scored_after_all_training_and_only_for_the_base_and_the_selected():
    log = []
    found, sealed = play(log)
    first = next(index for index, entry in enumerate(log) if entry[2] == "test rows")
    assert all(entry[0] == "score" and entry[2] == "test rows" for entry in log[first:])
    assert [entry[1] for entry in log[first:]] == [None, "full fast", "full fast", "lora 1", "lora 1"]
    assert all(
        ("test" in seeds[0]) == (name in found["selected"].values()) for name, seeds in found["candidates"].items()
    )
    assert sealed.opened_for == ("full fast", "lora 1")


def test_a_test_split_opens_once_and_for_a_selection():
    sealed = protocol.Sealed("rows")
    with pytest.raises(RuntimeError, match="none was made"):
        sealed.open([])
    assert sealed.open(["a"]) == "rows"
    with pytest.raises(RuntimeError, match="opened for a; it opens once"):
        sealed.open(["b"])


@pytest.mark.slow
def test_a_report_is_written_once(tmp_path, capsys):
    main = importlib.import_module("experiments.generalization.__main__").main
    out = main(["--profile", "quick", "--seeds", "1", "--work-dir", str(tmp_path)])
    report = json.loads((out / "report.json").read_text())
    assert set(report["selected"]) == {"full", "lora", "qlora"}
    for name, seeds in report["candidates"].items():
        assert ("test_held_out" in seeds["0"]) == (name in report["selected"].values())
        assert all(figures["loss"] < report["base"][split]["loss"] for split, figures in seeds["0"].items())
    assert "Rank sweep" in (out / "report.md").read_text()
    with pytest.raises(SystemExit):
        main(["--profile", "quick", "--work-dir", str(tmp_path)])
    assert "exists; a report is never written over" in capsys.readouterr().err
