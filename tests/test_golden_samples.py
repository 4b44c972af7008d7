"""tests/golden/samples.jsonl, regenerated: identities of bundles, and what their models write."""

import json

from tests import golden_samples


def test_samples_are_those_on_record():
    recorded = [json.loads(line) for line in golden_samples.FILE.read_text().splitlines()]
    made = list(golden_samples.rows())
    assert len(made) == 27
    assert {row["model"]: row["artifact_id"] for row in made} == {row["model"]: row["artifact_id"] for row in recorded}
    for row, kept in zip(made, recorded, strict=True):
        assert row == kept


def test_the_children_differ_from_the_base_and_from_each_other():
    recorded = [json.loads(line) for line in golden_samples.FILE.read_text().splitlines()]
    by_model = {}
    for row in recorded:
        by_model.setdefault(row["model"], []).append(row["ids"])
    base, *children = by_model.values()
    assert len(children) == 2
    assert all(sum(a != b for a, b in zip(base, child, strict=True)) >= 6 for child in children)
    assert children[0] != children[1]
    assert len({tuple(ids) for ids in base}) >= 6
