import logging
import os
import signal
import subprocess
import sys
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from riftco import optim
from riftco.checkpoints import Checkpoints, check_config, config_differences
from riftco.errors import CheckpointError, ConfigError


class Moments(NamedTuple):
    step: jax.Array
    m: dict


def make_state(rng, rows=8):
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "params": {"weight": array(rows, 40, 30), "half": array(rows, 3).astype(jnp.bfloat16), "gain": array()},
        "optimizer": Moments(jnp.int32(7), {"weight": array(rows, 3)}),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
        "raw_key": jax.random.key_data(jax.random.key(5)),
        "cursor": np.array([2**40, -1], np.int64),
        "stack": [array(2), (array(1), {})],
        "special": jnp.asarray([np.nan, -0.0, np.inf, 1e-40], jnp.float32),
    }


def bits(tree):
    plain = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return [(leaf.dtype.name, leaf.shape, np.asarray(plain(leaf)).tobytes()) for leaf in jax.tree.leaves(tree)]


def small(value=0.0):
    return {"w": jnp.full((300, 20), value, jnp.float32)}


def data_files(directory, step):
    """The data files of a step, largest first."""
    files = [path for path in (directory / str(step) / "state").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)


@pytest.mark.tiny
def test_a_state_comes_back_bit_for_bit(tmp_path, rng):
    state, meta = make_state(rng), {"config": {"layers": 2}, "data": {"fingerprint": "a1", "rng": [3, [1, 2], None]}}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(7, state, meta)
        checkpoints.wait()
        got = checkpoints.restore(None, state)
    assert bits(got.state) == bits(state) and got.meta == meta and got.step == 7
    assert jax.tree.structure(got.state) == jax.tree.structure(state)
    assert isinstance(got.state["optimizer"], Moments) and isinstance(got.state["cursor"], np.ndarray)
    again = Checkpoints(tmp_path / "checkpoints")
    abstract = jax.eval_shape(lambda: {k: v for k, v in state.items() if k != "cursor"})
    got = again.restore(7, {**abstract, "cursor": state["cursor"]})
    assert bits(got.state) == bits(state)


def test_arrays_may_be_donated_and_changed_once_save_returns(tmp_path, rng):
    state = {"a": jnp.asarray(rng.normal(size=(500, 1000)), jnp.float32), "b": np.arange(200_000)}
    wanted = bits(state)
    spoil = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        host = state["b"].copy()
        state["a"] = spoil(state["a"])
        state["b"][:] = -1
        jax.block_until_ready(state["a"])
        checkpoints.wait()
        got = checkpoints.restore(1, {"a": state["a"], "b": host})
    assert bits(got.state) == wanted


def test_restores_on_fewer_and_on_more_devices(tmp_path, rng):
    def placed(count):
        mesh = Mesh(np.array(jax.devices()[:count]), ("fsdp",))
        return NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())

    def abstract(split, whole):
        return lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split if leaf.ndim == 2 else whole)

    init, _ = optim.adam(1e-3)
    host = {"w": rng.normal(size=(8, 6)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
    split, whole = placed(4)
    params = {"w": jax.device_put(host["w"], split), "b": jax.device_put(host["b"], whole)}
    state = (params, init(params), jax.device_put(jax.random.key(0), whole))
    wanted = bits(state)
    with Checkpoints(tmp_path, async_save=False) as checkpoints:
        for step, count in enumerate((4, 2, 1, 8)):
            like = jax.tree.map(abstract(*placed(count)), state)
            if step:
                state = checkpoints.restore(step - 1, like).state
                assert bits(state) == wanted
                assert state[0]["w"].sharding.is_equivalent_to(placed(count)[0], 2)
                assert len(state[1].m["b"].sharding.device_set) == count
            checkpoints.save(step, state, {})


def test_the_newest_and_the_best_are_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: float("nan"), 6: 4.0}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, small(step), {"n": step}, {"validation_loss": loss})
        checkpoints.wait()
        assert checkpoints.steps() == [3, 5, 6] and checkpoints.best() == 3 and checkpoints.latest() == 6
        assert checkpoints.meta(3) == {"n": 3}
    assert sorted(os.listdir(tmp_path)) == ["3", "5", "6"]
    with Checkpoints(tmp_path, keep=1, best_metric="accuracy", best_mode="max") as checkpoints:
        assert checkpoints.best() is None
        checkpoints.record(5, {"accuracy": 0.5})
        checkpoints.save(7, small(), {}, {"accuracy": 0.2})
        checkpoints.wait()
        assert checkpoints.steps() == [5, 7] and checkpoints.best() == 5
        assert checkpoints.metrics(5)["accuracy"] == 0.5 and np.isnan(checkpoints.metrics(5)["validation_loss"])
        with pytest.raises(CheckpointError, match="checkpoint 6: it must be saved before"):
            checkpoints.record(6, {"accuracy": 1.0})


def test_metrics_may_come_after_the_save(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, loss in ((1, 2.0), (2, 1.0), (3, 5.0)):
            checkpoints.save(step, small(step), {})
            checkpoints.record(step, {"validation_loss": loss})
        assert checkpoints.steps() == [2, 3]
        assert Checkpoints(tmp_path).metrics(3) == {"validation_loss": 5.0}
        assert float(checkpoints.restore(checkpoints.best(), small()).state["w"][0, 0]) == 2.0


def test_a_step_is_saved_once_unless_asked(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, small(1), {})
        with pytest.raises(CheckpointError, match=r"4: a step is saved once"):
            checkpoints.save(4, small(2), {})
        checkpoints.save(4, small(3), {"new": True}, overwrite=True)
        checkpoints.wait()
        got = checkpoints.restore(4, small())
        assert float(got.state["w"][0, 0]) == 3.0 and got.meta == {"new": True}


def test_going_back_discards_what_came_after(tmp_path):
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, small(step), {})
        checkpoints.discard_after(2)
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, small(30), {})
        checkpoints.wait()
        assert float(checkpoints.restore(None, small()).state["w"][0, 0]) == 30.0


def delete_commit_file(directory, step):
    mark = directory / str(step) / "commit_success.txt"
    if not mark.exists():
        pytest.skip("this orbax-checkpoint writes no such file: its rename is the commit")
    mark.unlink()


def delete_root_metadata(directory, step):
    (directory / str(step) / "_CHECKPOINT_METADATA").unlink()


def damage_meta(directory, step):
    path = directory / str(step) / "meta" / "metadata"
    path.write_text(path.read_text()[:-9])


def change_meta(directory, step):
    path = directory / str(step) / "meta" / "metadata"
    text = path.read_text()
    assert '"n": 3' in text
    path.write_text(text.replace('"n": 3', '"n": 8'))


def delete_meta(directory, step):
    (directory / str(step) / "meta" / "metadata").unlink()


def truncate_data(directory, step):
    for path in data_files(directory, step):
        os.truncate(path, path.stat().st_size // 2)


def delete_data(directory, step):
    for path in data_files(directory, step):
        if path.parent.name == "d":
            path.unlink()


def flip_a_data_byte(directory, step):
    (path, *_) = data_files(directory, step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def incompressible(step):
    return {"w": jax.random.normal(jax.random.key(step), (100, 300))}


@pytest.mark.parametrize(
    "harm",
    [
        delete_commit_file,
        delete_root_metadata,
        damage_meta,
        change_meta,
        delete_meta,
        truncate_data,
        delete_data,
        flip_a_data_byte,
    ],
)
def test_a_damaged_step_is_skipped_by_name(harm, tmp_path, caplog):
    with Checkpoints(tmp_path, async_save=False) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, incompressible(step), {"n": step})
    harm(tmp_path, 3)
    with Checkpoints(tmp_path, async_save=False) as checkpoints, caplog.at_level(logging.WARNING, "riftco.checkpoints"):
        got = checkpoints.restore(None, incompressible(0))
        assert got.step == 2 and got.meta == {"n": 2} and bits(got.state) == bits(incompressible(2))
        assert list(checkpoints.skipped) == [3] and checkpoints.latest() == 2
        assert f"checkpoint {tmp_path / '3'} is damaged" in caplog.text
        with pytest.raises(CheckpointError, match=r"3: the files must be as they were saved"):
            checkpoints.restore(3, incompressible(0))
        # The resumed run comes to step 3 again: the damaged one makes way.
        checkpoints.save(3, incompressible(33), {"n": 33})
        got = checkpoints.restore(None, incompressible(0))
        assert got.meta == {"n": 33} and bits(got.state) == bits(incompressible(33)) and not checkpoints.skipped


def test_nothing_left_to_restore_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is none\. Start a new run"):
        Checkpoints(tmp_path / "absent").restore(None, small())
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None and checkpoints.best() is None and checkpoints.steps() == []
        checkpoints.save(1, small(), {})
    truncate_data(tmp_path, 1)
    with pytest.raises(CheckpointError, match="there is none that is whole"):
        Checkpoints(tmp_path).restore(None, small())
    with pytest.raises(CheckpointError, match=r"step 5 must be in .*there are \[1\]"):
        Checkpoints(tmp_path).restore(5, small())


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
from riftco.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
make = lambda step: {"w": jax.random.normal(jax.random.key(step), (1500, 4000))}
checkpoints.save(1, make(1), {"n": 1})
checkpoints.wait()
checkpoints.save(2, make(2), {"n": 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_damaged_metrics_are_named_once(tmp_path, caplog):
    with Checkpoints(tmp_path, async_save=False) as checkpoints, caplog.at_level(logging.WARNING, "riftco.checkpoints"):
        for step, loss in ((1, 2.0), (2, 3.0)):
            checkpoints.save(step, small(step), {})
            checkpoints.record(step, {"validation_loss": loss})
        assert checkpoints.best() == 1 and not caplog.records
        (tmp_path / "1" / "riftco_metrics.json").write_text('{"validation')
        assert [checkpoints.best(), checkpoints.best()] == [2, 2]
    assert len(caplog.records) == 1
    assert "riftco_metrics.json is damaged" in caplog.text and "step 1" in caplog.text


def test_a_kill_during_a_save_leaves_the_one_before(tmp_path, caplog):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        env=environment,
        capture_output=True,
        timeout=120,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    unfinished = [name for name in os.listdir(tmp_path) if not name.isdecimal()]
    assert unfinished and not (tmp_path / "2").exists(), "the save had finished before the kill"
    make = lambda step: {"w": jax.random.normal(jax.random.key(step), (1500, 4000))}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1] and not caplog.records
        got = checkpoints.restore(None, make(0))
        assert got.step == 1 and bits(got.state) == bits(make(1))
        assert [name for name in os.listdir(tmp_path) if not name.isdecimal()] == unfinished, "a reader wrote"
        checkpoints.save(3, make(3), {"n": 3})
    assert sorted(os.listdir(tmp_path)) == ["1", "3"], "the unfinished save was left lying"


def test_another_config_is_refused_field_by_field(tmp_path):
    saved = {"model": {"layers": 2, "width": 64, "scaling": (1, 2)}, "seed": 0, "gone": True}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(), {"config": saved})
        checkpoints.wait()
        checkpoints.restore(None, small(), config=saved)
        current = {"model": {"layers": 4, "width": 64, "scaling": [1, 2]}, "seed": 1, "new": None}
        with pytest.raises(CheckpointError) as refusal:
            checkpoints.restore(None, small(), config=current)
        message = str(refusal.value)
        for line in ("model.layers: saved 2, now 4", "seed: saved 0, now 1", "gone: saved true, now absent"):
            assert line in message
        assert "new: saved absent, now null" in message and "width" not in message and "scaling" not in message
        assert not checkpoints.skipped, "a healthy step was taken for a damaged one"
        checkpoints.restore(None, small(), config=current, ignore=("model", "seed", "gone", "new"))
        with pytest.raises(CheckpointError, match="seed"):
            checkpoints.restore(None, small(), config=current, ignore=("model", "gone", "new"))
    assert config_differences(saved, saved) == []
    check_config(saved, saved)


def test_other_arrays_are_refused_by_name(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {**small(), "old": jnp.zeros(2)}, {})
        checkpoints.wait()
        like = {"w": jnp.zeros((300, 21)), "b": jnp.zeros(1)}
        with pytest.raises(CheckpointError) as refusal:
            checkpoints.restore(None, like)
    for line in ("b: not in the checkpoint", "old: only in", "w: saved float32[300,20], now float32[300,21]"):
        assert line in str(refusal.value)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path, async_save):
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", async_save=async_save)
    with pytest.raises(CheckpointError, match=r"file/checkpoints.*: it must be possible to write there"):
        checkpoints.save(1, small(), {})
        checkpoints.wait()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it may not")
def test_a_read_only_directory_is_a_clear_error(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(1), {})
        checkpoints.wait()
        tmp_path.chmod(0o500)
        try:
            with pytest.raises(CheckpointError, match="must be possible to write"):
                checkpoints.save(2, small(2), {})
                checkpoints.wait()
            assert checkpoints.restore(None, small()).step == 1
        finally:
            tmp_path.chmod(0o700)


def test_an_error_in_the_background_surfaces_and_the_next_save_works(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise OSError("no space left on device")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1), {})
    checkpoints.wait()
    with monkeypatch.context() as patch:
        # The commit is the last thing the background thread does.
        patch.setattr("os.rename", broken)
        patch.setattr("os.replace", broken)
        checkpoints.save(2, small(2), {})
        with pytest.raises(CheckpointError, match="no space left on device"):
            checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.save(2, small(2), {})
    checkpoints.close()
    assert checkpoints.steps() == [1, 2] and checkpoints.restore(None, small()).step == 2


def test_leaving_by_an_error_keeps_that_error(tmp_path):
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(), {})
        _ = 1 / 0
    assert Checkpoints(tmp_path).latest() == 1


def test_what_cannot_be_saved_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"every leaf of the state must be an array; a\.b is str"):
        checkpoints.save(1, {"a": {"b": "text"}}, {})
    with pytest.raises(CheckpointError, match="meta and metrics must be JSON"):
        checkpoints.save(1, small(), {"array": jnp.zeros(2)})
    assert checkpoints.steps() == []
    with pytest.raises(ConfigError, match="keep must be >= 1"):
        Checkpoints(tmp_path, keep=0)


def test_saving_is_quiet(tmp_path, capfd):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(), {})
        checkpoints.wait()
        checkpoints.restore(1, small())
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""
