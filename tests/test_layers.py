"""Arrows point down: the layers of the package, read from its imports, and what may not be imported at all."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import riftco

ROOT = Path(riftco.__file__).parent

# The longest prefix decides. A module imports only modules of its own layer (without cycles between packages) or below.
LAYERS = {
    0: ("errors", "files", "types", "tree", "backend", "_compat"),
    1: ("oracle", "cajal", "analysis"),
    2: ("autodiff", "pallas"),
    3: ("ops",),
    4: ("layers", "optim", "data", "tokenizers", "sampling", "cajal.lowering", "targets"),
    5: ("models", "checkpoints", "bundle"),
    6: ("train", "serve", "generation", "interchange", "report", "charts", "gradcheck"),
    7: ("tune", "aot"),
    8: ("cli", "__main__"),
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}

# What a package must not import although it lies lower.
FORBIDDEN = {
    "serve": ("train", "tune", "optim"),
    "pallas": ("autodiff", "ops"),
    "oracle": ("types", "tree", "_compat", "ops", "autodiff"),
    "autodiff": ("oracle", "pallas"),
}

BANNED = {
    "jax": {"grad", "value_and_grad", "vjp", "jvp", "linearize", "linear_transpose", "jacrev", "jacfwd", "hessian"}
    | {
        "checkpoint",
        "remat",
        "custom_vjp",
        "custom_jvp",
        "custom_gradient",
        "closure_convert",
        "_src",
        "ad_checkpoint",
    },
    "optax": None,
}


def exempt(name: str) -> bool:
    return name == "autodiff.bridge" or name.startswith("cli.bench")


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name below riftco ("" for the package itself) and path of every module."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(node: ast.AST):
    """Every node that runs: also those inside functions, which import late."""
    for child in ast.iter_child_nodes(node):
        if not only_for_types(child):
            yield child
            yield from walk(child)


def imports(name: str) -> set[str]:
    """The modules of riftco that a module imports, without the leading `riftco.`."""
    found = set()
    for node in walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            base = str(node.module)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner.removeprefix("riftco.") in modules() else base)
    return {target.removeprefix("riftco").removeprefix(".") for target in found if target.split(".")[0] == "riftco"}


def package(name: str) -> str:
    """The unit that has a layer: the longest listed prefix."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in LAYER_OF:
            return ".".join(parts[:end])
    raise AssertionError(f"riftco.{name} has no layer: add it to LAYERS")


@pytest.mark.tiny
def test_every_module_has_a_layer_and_imports_point_down():
    wrong = []
    for name in modules():
        if not name:
            continue
        for target in imports(name) - {""}:
            own, other = package(name), package(target)
            if LAYER_OF[other] > LAYER_OF[own]:
                wrong.append(f"{name} (layer {LAYER_OF[own]}) imports {target} (layer {LAYER_OF[other]})")
            if other in FORBIDDEN.get(own, ()):
                wrong.append(f"{name} must not import {target}")
    assert not wrong, "\n".join(wrong)


def test_packages_of_one_layer_form_no_cycle():
    edges: dict[str, set[str]] = {}
    for name in modules():
        if name:
            targets = {package(target) for target in imports(name) - {""}}
            edges.setdefault(package(name), set()).update(targets - {package(name)})

    def reach(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for target in edges.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    assert [name for name in edges if name in reach(name)] == []


def test_the_package_itself_imports_nothing_when_it_is_imported():
    top = [node for node in tree("").body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {alias.name for node in top for alias in node.names} <= {"importlib", "Any"}


def test_ops_reach_pallas_only_through_its_dispatch():
    """And its tile maths and the order of its NF4 codes, which are plain jnp and load no Pallas."""
    for name in modules():
        if name.startswith("ops"):
            reached = {t for t in imports(name) if t.startswith("pallas") and not t.startswith("pallas.core.")}
            assert reached <= {"pallas.dispatch", "pallas.nf4.layout"}, name


def test_no_module_bears_the_name_of_a_public_function_beside_it():
    wrong = []
    for name in modules():
        prefix = f"{name}." if name else ""
        if modules()[name].name != "__init__.py":
            continue
        beside = {m.removeprefix(prefix) for m in modules() if m.startswith(prefix)}
        for node in tree(name).body:
            if isinstance(node, ast.ImportFrom) and node.module != ("riftco." + name).rstrip("."):
                wrong += [f"riftco.{prefix}{a.asname or a.name}" for a in node.names if (a.asname or a.name) in beside]
    wrong += [f"riftco.{name}" for names in riftco._FROM.values() for name in names if name in modules()]
    assert not wrong, f"both a module and a function: {wrong}"


def banned_uses(name: str) -> list[str]:
    found = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = [f"{node.value.id}.{node.attr}"]
        else:
            continue
        for dotted in used:
            first, *rest = dotted.split(".")
            if first in BANNED and (BANNED[first] is None or (rest and rest[0] in BANNED[first])):
                found.append(f"riftco.{name}:{node.lineno} uses {dotted}")
    return found


@pytest.mark.tiny
def test_other_peoples_derivatives_and_optimizers_are_not_used():
    # What jax keeps private may be used in one place, which looks at the version as well.
    allowed = lambda use: use.startswith("riftco._compat:") and "uses jax._src" in use
    wrong = [use for name in modules() if not exempt(name) for use in banned_uses(name) if not allowed(use)]
    assert not wrong, "\n".join(wrong)
    assert any("custom_vjp" in use for use in banned_uses("autodiff.bridge"))  # the ban sees what it looks for


@pytest.mark.parametrize("name", ["", "oracle", "tokenizers", "data", "errors", "cajal"])
def test_what_needs_no_jax_loads_no_jax(name):
    if name not in modules():
        pytest.skip(f"riftco.{name} does not exist yet")
    module = f"riftco.{name}".rstrip(".")
    public = f"[getattr({module}, n) for n in getattr({module}, '__all__', ())]" if name else f"dir({module})"
    code = f"import sys, {module}; {public}; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
