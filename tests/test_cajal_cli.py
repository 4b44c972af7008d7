"""`riftco cajal`: what its actions print, and what they say about a wrong program."""

import json

import pytest

from riftco.cli import main

PROGRAM = """type B = Fin 2
def swap(x: B * B): B * B = (x.1, x.0)
def pick(x: B, y: B): B = case x of | 0 -> y | 1 -> (y <|> y)
"""
WRONG = """def twice(x: 1): 1 =
  x; x
def lost(x: Fin 2, y: 1): Fin 2 = x
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.cajal"
    path.write_text(PROGRAM)
    return str(path)


def run(capsys, *words):
    status = main(["cajal", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_check(program, capsys):
    assert run(capsys, "check", program) == (
        0, "swap(x: Fin 2^2) -> Fin 2^2\npick(x: Fin 2, y: Fin 2) -> Fin 2\n", "")  # fmt: skip
    status, out, _ = run(capsys, "check", program, "--def", "swap", "--json")
    assert status == 0 and json.loads(out)["types"] == {"swap": "(x: Fin 2^2) -> Fin 2^2"}


def test_run(program, capsys):
    arguments = ["--arg", "x=1:Fin 2", "--arg", "y=0:B"]
    assert run(capsys, "run", program, *arguments)[:2] == (0, "0:Fin 2\n0:Fin 2\n")
    status, out, _ = run(capsys, "run", program, "--def", "swap", "--arg", "x=(0:Fin 2, 1:Fin 2)", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["results"], found["vector"], found["type"]) == (["(1:Fin 2, 0:Fin 2)"], [0, 1, 1, 0], "Fin 2^2")
    for words, message in [
        (["--arg", "x=0:B"], "must give each parameter of pick (x: Fin 2, y: Fin 2) once; got x"),
        (["--arg", "x"], "NAME=EXPRESSION"),
        (["--def", "nothing"], "--def must name a definition"),
    ]:
        status, _, err = run(capsys, "run", program, *words)
        assert status == 2 and message in err
    status, _, err = run(capsys, "run", program, "--arg", "x=0:Fin 3", "--arg", "y=0:B")
    assert status == 1 and "the parameter x" in err and "1 | 0:Fin 3\n      | ^^^^^^^" in err


def test_compile_and_show(program, capsys):
    status, out, _ = run(capsys, "compile", program, "--def", "pick", "--entries", "1")
    assert status == 0
    assert out == "pick: 2 × 2 -> 2\n4 of 8 coefficients are not zero\n  [0, 0, 0] 1\n  …\n"
    assert json.loads(run(capsys, "compile", program, "--json", "--semiring", "boolean")[1])["nnz"] == 4
    status, out, _ = run(capsys, "show", program)
    assert out == "def pick(x: Fin 2, y: Fin 2) = case x of | inj 0 u -> u; y | inj 1 u -> u; (y <|> y)\n"


def test_a_wrong_program_is_shown_with_its_places_underlined(tmp_path, capsys):
    path = tmp_path / "wrong.cajal"
    path.write_text(WRONG)
    status, out, err = run(capsys, "check", str(path))
    assert (status, out) == (1, "")
    assert "error[sequence-twice]: sequence: its parts" in err and "error[context-unused]" in err
    assert "    2 |   x; x\n      |   ^ used here" in err and "    2 |   x; x\n      |      ^ and again" in err
    assert err.endswith(f"2 errors in {path}\n")
    status, out, _ = run(capsys, "show", str(path), "--def", "twice", "--json")
    found = json.loads(out)
    assert (status, found["exit_status"]) == (1, 1)
    (diagnostic,) = found["diagnostics"]
    assert (diagnostic["code"], diagnostic["variable"]) == ("sequence-twice", "x")
    assert [span[:2] for span in diagnostic["spans"]] == [[2, 3], [2, 6], [2, 3]]
    path.write_text("def f( = x")
    status, _, err = run(capsys, "check", str(path))
    assert status == 1 and "error[syntax]" in err and "1 | def f( = x\n      |        ^" in err


def test_files(tmp_path, capsys):
    assert run(capsys, "check")[0] == 2
    assert run(capsys, "check", str(tmp_path / "none.cajal"))[0] == 1
    empty = tmp_path / "empty.cajal"
    empty.write_text("type A = 1")
    assert run(capsys, "run", str(empty))[0] == 2
    empty.write_bytes(b"\xff\xfe")
    status, _, err = run(capsys, "check", str(empty))
    assert status == 1 and "UTF-8" in err


def test_the_definition_can_come_from_the_environment_or_a_file(program, tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text("def: pick\n")
    assert run(capsys, "show", program, "--config", str(config))[1].startswith("def pick")
    monkeypatch.setenv("RIFTCO_DEF", "swap")
    assert run(capsys, "show", program, "--config", str(config))[1].startswith("def swap")
