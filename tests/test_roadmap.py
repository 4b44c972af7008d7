"""docs/roadmap.md answers every line, and every test and every public name in it exists."""

import ast
import functools
import importlib
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


def found(name):
    """The object of a dotted name below riftco: the longest prefix that is a module, then attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[count:], module)
    raise ModuleNotFoundError(name)


def test_every_public_name_in_an_answer_exists():
    names = {name for row in ROWS for name in re.findall(r"`(riftco(?:\.\w+)+)", row[1]) if name != "riftco.json"}
    assert len(names) > 40
    missing = []
    for name in sorted(names):
        try:
            found(name)
        except (ModuleNotFoundError, AttributeError):
            missing.append(name)
    assert missing == []


def test_every_command_in_an_answer_exists():
    from riftco.cli.verbs import VERBS

    commands = {verb for row in ROWS for verb in re.findall(r"`riftco (\w+)", row[1])}
    assert len(commands) > 3
    assert commands <= set(VERBS)
