"""What the package says of itself, and what it does where jax is older or newer."""

import importlib
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import riftco
from riftco import _compat
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
