"""The declared dependencies are those that the imports need: none missing, none that nothing imports."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from riftco.cli import bench
from riftco.errors import RiftcoError

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, OPTIONS = SETTINGS["project"], SETTINGS["tool"]["pytest"]["ini_options"]["addopts"]
MODULE_OF = {"orbax-checkpoint": "orbax", "pyyaml": "yaml", "riftco-transformer": "riftco_transformer"}


def declared(requirements: list[str]) -> set[str]:
    """The modules that a list of requirements brings."""
    names = [re.split(r"[\s\[<>=!;~]", requirement, maxsplit=1)[0].lower() for requirement in requirements]
    return {MODULE_OF.get(name, name) for name in names}


RUNTIME = declared(PROJECT["dependencies"])
EXTRAS = {name: declared(requirements) for name, requirements in PROJECT["optional-dependencies"].items()}


def imported(folder: Path, *, skip: str = "") -> set[str]:
    """Top-level names of foreign modules that the files of a folder import, anywhere in them."""
    found = set()
    for path in folder.rglob("*.py"):
        if skip and path.match(skip):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    found |= {alias.name for alias in names}
                case ast.ImportFrom(module=str(module), level=0):
                    found.add(module)
                case ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=str(module)), *_]):
                    found.add(module)
    return {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"riftco", "tests"}


@pytest.mark.tiny
def test_a_plain_install_brings_what_the_package_imports_and_no_more():
    # jaxlib is jax's compiled half, listed so that both keep one range. The races import their peers when they start.
    # flax is imported by the one module that is for its users, when that is used.
    assert imported(ROOT / "riftco", skip="cli/bench_*.py") - EXTRAS["flax"] == RUNTIME - {"jaxlib"}


def test_the_extras_bring_what_the_tests_and_the_races_import():
    # pytest loads its plugin by itself: the default options ask for it.
    plugins = {"pytest-xdist"}
    assert imported(ROOT / "tests") - RUNTIME == EXTRAS["test"] - plugins | {
        "torch",
        "transformers",
        "bitsandbytes",
        "peft",
        "flax",
    }
    assert plugins <= EXTRAS["test"] and "-n auto" in OPTIONS
    assert imported(ROOT / "riftco") - RUNTIME <= EXTRAS["test"] | EXTRAS["parity"] | EXTRAS["flax"]
    assert {"torch", "transformers", "bitsandbytes", "peft"} <= EXTRAS["parity"]


@pytest.mark.parametrize(("race", "peer"), [("train", "optax"), ("tokenizer", "tokenizers")])
def test_a_race_without_its_peer_says_what_installs_it(race, peer, monkeypatch):
    monkeypatch.setitem(sys.modules, peer, None)
    for variable in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):  # the race sets them; they end with this test
        monkeypatch.setenv(variable, "1")
    options = ["--only", "step base"] if race == "train" else ["--megabytes", "0.001"]
    with pytest.raises(RiftcoError, match=r"riftco\[test\]"):
        bench.dispatch([race, *options])
