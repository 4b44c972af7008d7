"""`riftco aot` without its compilers: simulated devices stand in for the chips. tests/aot has the real ones."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import pytest

from riftco import aot, targets
from riftco.cli import aot as verb
from riftco.cli import main
from riftco.errors import BackendError, ConfigError
from riftco.models import DecoderConfig
from riftco.targets import Chips
from riftco.train import TrainConfig

MODEL = DecoderConfig(17, 8, 8, 2, 1, 16, position="rope")
FLAGS = "--layers 1 --heads 2 --width 8 --hidden 16 --max-seq-length 8 --batch-size 8 --vocab-size 17".split()
TPU_CALL = (
    '  %x.1 = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", '
    'metadata={op_name="jit(step)/while/body/flash_forward/pallas_call" stack_frame_id=3}'
)
CUDA_CALL = TPU_CALL.replace("tpu_custom_call", "__gpu$xla.gpu.triton").replace("flash_forward", "paged")


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> Chips:
    """Eight simulated devices, as if a target named them and their compiler were there."""
    made = Chips("v5e:2x4", "cpu", tuple(jax.devices()))
    monkeypatch.setattr(targets, "chips", lambda name: made)
    monkeypatch.setattr(verb, "_stay_on_the_cpu", lambda: None)
    return made


def refused(capsys: pytest.CaptureFixture[str], status: int, *words: object) -> str:
    capsys.readouterr()
    assert main(["aot", *map(str, words)]) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("riftco: ")
    return last


@pytest.mark.tiny
def test_missing_compilers_are_one_sentence_that_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'riftco[aot]'" in refused(capsys, 1, "--target", "v5e:2x4")
    for target, compiler in (("v5e:2x4", "libtpu"), ("h200", "jax_cuda12_plugin")):
        with pytest.raises(BackendError, match=rf"\({compiler}\) is not installed.*riftco\[aot\]"):
            targets.chips(target)
    for name in ("v5e", "h100", "v5e:2", "2x4"):
        with pytest.raises(ConfigError, match="it must name chips, such as v5e:2x4"):
            targets.chips(name)
    assert "--target must name the chips" in refused(capsys, 2)


@pytest.mark.tiny
def test_the_memory_of_a_device():
    eight = tuple(jax.devices())
    sizes = {"v5e:2x4": 16 << 30, "v4:2x2x1": 16 << 30, "v5p:2x2x2": 95 << 30, "mine": None}
    assert {name: Chips(name, "tpu", eight).memory for name in sizes} == sizes
    assert Chips("h200", "cuda", eight[:1]).memory == 141 * 10**9


@pytest.mark.tiny
def test_a_missing_assembler_is_told_before_it_ends_the_process(monkeypatch):
    monkeypatch.setattr(targets, "_require", lambda *_: None)
    monkeypatch.setattr(targets, "_has_ptxas", lambda: False)
    with pytest.raises(BackendError, match=r"need ptxas.*pip install nvidia-cuda-nvcc-cu12"):
        targets.chips("h200")


@pytest.mark.tiny
def test_what_compilers_write_past_python_is_muted(capfd, monkeypatch):
    with verb._muted():
        os.write(2, b"no driver\n")
    os.write(2, b"heard\n")
    assert capfd.readouterr().err == "heard\n"
    monkeypatch.setenv("RIFTCO_TRACEBACK", "1")
    with verb._muted():
        os.write(2, b"no driver\n")
    assert capfd.readouterr().err == "no driver\n"


@pytest.mark.tiny
def test_jax_is_kept_on_the_cpu(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    verb._stay_on_the_cpu()
    assert os.environ["JAX_PLATFORMS"] == "cpu" == jax.config.jax_platforms


def test_a_training_step_for_eight_chips(chips, capsys):
    assert main(["aot", "v5e:2x4", *FLAGS, "--json"]) == 0
    out, err = capsys.readouterr()
    got = json.loads(out)
    assert out.count("\n") == 1 and "total" in err
    assert (got["verb"], got["chips"], got["mesh"], got["step"]) == ("aot", 8, {"data": 8, "fsdp": 1}, "train")
    assert got["fits"] and got["memory"] == 16 << 30 and got["attention"] == "plain" and got["kernels"] == {}
    parts = [got[name] for name in ("arguments", "outputs", "temporaries", "code")]
    assert got["total"] == sum(parts) and got["arguments"] > 3 * 4 * 17 * 8 and got["flops"] > 0
    # The same weights and moments in eight parts.
    model = dataclasses.replace(MODEL, position="learned", head_dim=4)
    assert aot.train_step(chips, model, TrainConfig(batch_size=8, mesh="fsdp=8")).arguments < got["arguments"] / 2


def test_a_decoding_step(chips, capsys):
    assert main(["aot", "v5e:2x4", "--step", "decode", *FLAGS]) == 0
    assert "decode step, a token of 8 rows of 8, on 8 chips of v5e:2x4" in capsys.readouterr().out
    one, eight = (aot.decode_one(chips, MODEL, batch_size=8, mesh=mesh) for mesh in ("data=1", None))
    cache = 2 * 4 * 8 * 8 * 8  # keys and values, float32, 8 rows, 8 slots, 2 heads of 4
    assert one.arguments - eight.arguments >= cache * 7 // 8 and eight.attention is None
    with pytest.raises(ConfigError, match="whole weights on every chip"):
        aot.decode_one(chips, MODEL, batch_size=8, mesh="fsdp=8")
    assert "--attention belongs to --step train" in refused(
        capsys, 2, "v5e:2x4", "--step", "decode", "--attention", "plain"
    )


def test_a_step_that_does_not_fit_fails_with_one_sentence(chips, capsys, monkeypatch):
    monkeypatch.setitem(targets.MEMORY, "v5e", 1 << 10)
    assert main(["aot", "v5e:2x4", *FLAGS, "--json"]) == 1
    out, err = capsys.readouterr()
    got = json.loads(out)
    assert not got["fits"] and "the train step must fit the 1.0 KiB" in got["error"]
    assert err.splitlines()[-1] == f"riftco: {got['error']}"


def test_what_the_chips_or_their_compiler_refuse(chips, capsys, monkeypatch):
    assert "a multiple of the 8 devices; got batch_size 4" in refused(capsys, 2, "v5e:2x4", *FLAGS, "--batch-size", 4)
    assert "data=9 needs 9 devices" in refused(capsys, 1, "v5e:2x4", *FLAGS, "--mesh", "data=9")
    assert "attention[pallas_tpu]: it needs a tpu" in refused(capsys, 2, "v5e:2x4", *FLAGS, "--attention", "pallas_tpu")

    def fail(*_: object) -> None:
        raise RuntimeError("the register allocator\n gave up")

    monkeypatch.setattr(aot, "make_train_step", fail)
    assert "does not compile for v5e:2x4: the register allocator gave up" in refused(capsys, 1, "v5e:2x4", *FLAGS)


@pytest.mark.tiny
@pytest.mark.parametrize(
    "reason",
    [
        "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (284.02G) exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 284.02G of 15.75G hbm. Exceeded hbm capacity",
    ],
)
def test_a_compiler_out_of_memory_is_understood(reason):
    sentence = aot._refused(Chips("v5e:2x4", "cpu", tuple(jax.devices())), "train", reason)
    assert "must fit the 15.75G of memory" in sentence and "it needs 284.02G" in sentence


@pytest.mark.tiny
def test_kernels_are_read_from_the_program():
    text = "\n".join(['%y = f32[8]{0} custom-call(%p), custom_call_target="Sharding"', TPU_CALL, TPU_CALL, CUDA_CALL])
    assert aot.kernels_of(text) == {"flash_forward": 2, "paged": 1}
    assert aot.kernels_of(TPU_CALL.partition("metadata")[0]) == {"tpu_custom_call": 1}


def test_the_configuration_of_a_run_will_do(chips, capsys, tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("data: [x.txt]\nlearning_rate: 1.0e-3\nout_dir: runs/x\nvocab_size: 17\nlayers: 1\nheads: 2\n"
                    "width: 8\nmax_seq_length: 8\nbatch_size: 16\n")  # fmt: skip
    assert main(["aot", "v5e:2x4", "--config", str(file), "--step", "decode"]) == 0
    assert "a token of 16 rows" in capsys.readouterr().out
    file.write_text("learning_rat: 1\n")
    assert "'learning_rat' is no option" in refused(capsys, 2, "v5e:2x4", "--config", file)
