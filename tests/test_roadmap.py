"""docs/roadmap.md answers every line, and every test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (ROOT / "docs" / "roadmap.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not re.match(r"\| (---|Line|Rule) ", line)
]
NAMED = sorted(
    set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / "docs" / "roadmap.md").read_text(encoding="utf-8")))
)


def functions(path):
    """Names of the test functions of a file, those in classes included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.tiny
def test_every_test_that_the_roadmap_names_exists():
    assert NAMED
    missing = [
        f"{path}::{name}" for path, name in NAMED if not (ROOT / path).is_file() or name not in functions(ROOT / path)
    ]
    assert missing == []
    assert all(name.startswith("test_") for _, name in NAMED)


def test_every_row_is_answered_and_its_last_cell_is_tests_or_a_dash():
    assert len(ROWS) > 140
    for row in ROWS:
        assert len(row) == 3 and all(row), row
        assert row[2] == "—" or re.fullmatch(r"tests/[\w/]+\.py::\w+(, tests/[\w/]+\.py::\w+)*", row[2]), row
        if row[1] == "open":
            assert row[2] == "—", row
