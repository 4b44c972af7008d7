"""What the package says of itself, and what it does where jax is older or newer."""

import importlib
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import riftco
from riftco import _compat, backend
from riftco.cli import bench_train, verbs
from riftco.errors import BackendError, ConfigError
from riftco.train.mesh import parse_mesh


@pytest.mark.tiny
def test_every_name_of_the_catalogue_exists_and_no_package_is_missing():
    for name in riftco._SUBMODULES:
        assert getattr(riftco, name) is importlib.import_module(f"riftco.{name}")
    packages = {path.parent.name for path in Path(riftco.__file__).parent.glob("*/__init__.py")}
    assert packages - {"cli"} <= set(riftco._SUBMODULES) <= set(riftco.__all__) == set(dir(riftco))


def test_the_oracle_brings_no_jax_with_it():
    program = "import sys, riftco.oracle; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.shard_map
def test_a_mesh_is_made_where_jax_has_no_axis_types(monkeypatch):
    devices = np.array(jax.devices()[:2])
    assert parse_mesh("data=2").axis_types == (jax.sharding.AxisType.Auto,) * 2
    monkeypatch.delattr(jax.sharding, "AxisType")
    mesh = parse_mesh("data=2")
    assert mesh is not None and dict(mesh.shape) == {"data": 2, "fsdp": 1}
    assert _compat.automatic_mesh(devices, ("data",)).axis_names == ("data",)


@pytest.mark.tiny
def test_an_old_jax_is_for_jax_metal_alone(monkeypatch):
    monkeypatch.delenv("RIFTCO_ALLOW_OLD_JAX", raising=False)
    installed: set[str] = set()
    monkeypatch.setattr(backend, "_installed", installed.__contains__)

    def is_refused(version: str) -> bool:
        monkeypatch.setattr(_compat, "JAX_VERSION", tuple(map(int, version.split("."))))
        monkeypatch.setattr(backend, "_version", lambda name: version)
        try:
            _compat._refuse_old_jax()
        except ImportError as error:
            assert "pip install -U 'jax>=0.10.2,<0.13'" in str(error)
            return True
        return False

    old = ("0.4.33", "0.4.34", "0.4.35", "0.9.0")
    assert all(map(is_refused, old)) and not is_refused("0.10.2")
    installed.add("jax_plugins.mps")
    assert all(map(is_refused, old))
    installed.add("jax_plugins.metal_plugin")
    assert [is_refused(version) for version in old] == [True, False, True, True]
    monkeypatch.setenv("RIFTCO_ALLOW_OLD_JAX", "1")
    assert not any(map(is_refused, old))


@pytest.mark.tiny
def test_the_variable_of_jax_is_honoured_or_refused(monkeypatch):
    for text, device in (
        ("gpu", "cuda"),
        ("tpu,cpu", "tpu"),
        (" METAL ,cpu", "metal"),
        ("mps", "metal"),
        ("cpu", "cpu"),
    ):
        monkeypatch.setenv("JAX_PLATFORMS", text)
        assert backend.choose() == device
    for text in ("rocm", "oneapi,cpu", "tpus"):
        monkeypatch.setenv("JAX_PLATFORMS", text)
        with pytest.raises(
            ConfigError, match=f"JAX_PLATFORMS must begin with one of cpu, cuda, .*; got '{text}'; unset"
        ):
            backend.choose()
        assert backend.choose("cpu") == "cpu"


@pytest.mark.tiny
@pytest.mark.parametrize("failure", [RuntimeError("no chip\n here"), AssertionError()])
def test_a_device_that_does_not_start_is_told_with_the_reason(monkeypatch, failure):
    def fail() -> str:
        raise failure

    before = jax.config.jax_platforms
    monkeypatch.setattr(jax, "default_backend", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    try:
        monkeypatch.setattr(backend, "missing", lambda name: f"there is no {name}")
        with pytest.raises(
            BackendError, match="tpu did not start, and JAX_PLATFORMS asks for it; there is no tpu; use"
        ):
            backend.select()
        monkeypatch.setattr(backend, "missing", lambda name: None)
        reason = "no chip here" if str(failure) else "AssertionError"
        with pytest.raises(BackendError, match=f"tpu did not start, and it was asked for; {reason}; use --device cpu"):
            backend.select("tpu")
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.tiny
def test_every_verb_that_computes_takes_a_device(monkeypatch):
    computing = {"quickstart", "pretrain", "finetune", "merge", "eval", "generate", "chat", "serve", "convert"}
    for verb in (computing | {"gradcheck", "doctor"}) & set(verbs.VERBS):
        for action in verbs.actions(verb).values():
            assert "device" in action.options.__dataclass_fields__, verb

    def refuse(device: str) -> str:
        raise BackendError(f"no {device}")

    monkeypatch.setattr(backend, "select", refuse)
    with pytest.raises(BackendError, match="no tpu"):
        bench_train.main(["--device", "tpu"])
