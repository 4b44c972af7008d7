"""The checks of `riftco gradcheck`: they pass, they fail where a derivative is wrong, and the table says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import _compat, gradcheck, models
from riftco.autodiff import control, recompute, tape, value_and_grad
from riftco.errors import ConfigError
from riftco.ops import attend, linalg
from riftco.ops.check import CheckResult
from riftco.tree import named_leaves

COUNTS = {"linear layer": 3, "feed-forward": 5, "attention module": 9, "block": 17, "llama block": 10}


def failures(rows):
    return [row for row in rows if not row.passed]


@pytest.mark.parametrize("name", gradcheck.MODULE_CHECKS)
def test_modules_pass(name):
    rows = gradcheck.rows([name])
    assert failures(rows) == []
    tensors = [row.sample for row in rows if row.check == "differences"]
    if name in COUNTS:
        assert len(tensors) == COUNTS[name]  # the input, and each tensor of the module
    assert {row.check for row in rows} >= {"differences", "second order", "bfloat16"}


@pytest.mark.parametrize("name", ["scan", "checkpoint"])
def test_loops_pass(name):
    assert failures(gradcheck.rows([name])) == []


@pytest.mark.tiny
def test_ops_by_name_and_the_table():
    rows = gradcheck.rows(["relu", "neg"])
    assert failures(rows) == []
    lines = gradcheck.table(rows).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["relu", "neg"]
    assert lines[1].endswith("ok") and lines[-1] == f"{len(rows)} of {len(rows)} checks passed."


@pytest.mark.tiny
def test_a_failure_is_printed():
    rows = [CheckResult("mul", "2x3", "float64", 0.01, 1e-13), CheckResult("add", "2x3", "float64", 0.0, 1e-13)]
    text = gradcheck.table(rows)
    assert "FAILED mul [2x3] float64: error 0.01, accepted 1e-13" in text and "1 of 2 checks passed." in text


@pytest.mark.tiny
def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="'cosh' is not an op or module"):
        gradcheck.rows(["cosh"])


def planted(rule):
    def wrong(*args, **static):
        leaves, tree = jax.tree_util.tree_flatten(rule(*args, **static))
        return jax.tree_util.tree_unflatten(tree, [leaves[0] * 1.01, *leaves[1:]])

    return wrong


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (control._scan, "scan"),
        (recompute._checkpoint, "checkpoint"),
        (tape.accumulate, "scan"),
        (linalg.dot, "linear layer"),
        (attend._attention, "attention module"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_planted_error_fails_it(op, name, monkeypatch):
    monkeypatch.setattr(op, "bwd", planted(op.bwd))
    bad = failures(gradcheck.rows([name]))
    assert bad
    assert all(row.message == "" for row in bad)


def test_every_tensor_of_the_loss_has_a_gradient():
    """None is zero but the key bias, whose effect the softmax cancels."""
    config = gradcheck.GPT
    with _compat.enable_x64(True):
        params = jax.tree_util.tree_map(jnp.asarray, gradcheck._parameters(config))
        _, gradient = jax.jit(value_and_grad(lambda params: gradcheck._loss(config, params)))(params)
        sizes = {name: float(jnp.max(jnp.abs(leaf))) for name, leaf in named_leaves(gradient)}
    assert len(sizes) == len(jax.tree_util.tree_leaves(models.init(jax.random.key(0), config)))
    zero = {name for name, size in sizes.items() if size < 1e-12}
    assert zero == {"blocks.attention.key.bias"}
    assert np.isfinite(list(sizes.values())).all()
