"""`riftco aot` without its compilers: simulated devices stand in for the chips. tests/aot has the real ones."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.experimental import topologies

from riftco import aot, targets
from riftco.backend import CUDA_PLUGINS
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
    made = Chips("v5e:2x4", "cpu", tuple(jax.devices()), 16 << 30)
    monkeypatch.setattr(targets, "chips", lambda name: made)
    monkeypatch.setattr(verb, "_stay_on_the_cpu", lambda: None)
    return made


def refused(capsys: pytest.CaptureFixture[str], status: int, *words: object, compiling: bool = False) -> str:
    """The one sentence of a refusal; nothing is said before it unless the compiler has been asked."""
    capsys.readouterr()
    assert main(["aot", *map(str, words)]) == status
    out, err = capsys.readouterr()
    *before, last = err.splitlines()
    assert last.startswith("riftco: ") and out == ""
    assert [line.partition(" ")[0] for line in before] == ["compiling"] * compiling
    return last


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What a compiler is asked to describe; it answers with one simulated device."""
    asked: list[dict[str, object]] = []

    def describe(**arguments: object) -> SimpleNamespace:
        asked.append(arguments)
        return SimpleNamespace(devices=jax.devices()[:1])

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(targets, "_require", lambda *_: None)
    monkeypatch.setattr(targets, "_has_ptxas", lambda: True)
    return asked


@pytest.mark.tiny
def test_missing_compilers_are_one_sentence_that_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'riftco[aot]'" in refused(capsys, 1, "--target", "v5e:2x4")
    for target, compiler in (("v5e:2x4", "libtpu"), ("h200", "jax_cuda12_plugin or jax_cuda13_plugin")):
        with pytest.raises(BackendError, match=rf"\({compiler}\) is not installed.*riftco\[aot\]"):
            targets.chips(target)
    assert "--target must name the chips" in refused(capsys, 2)


@pytest.mark.tiny
@pytest.mark.parametrize("name", ["", "h100", "2x4", "h200:1x1", "v5e:2x3:1", "gpu"])
def test_a_name_that_is_no_target(name):
    with pytest.raises(ConfigError, match=f"it must name chips, such as v5e:2x4, v6e:2x2 or h200; got {name!r}"):
        targets.chips(name)


@pytest.mark.tiny
def test_only_slices_that_exist_are_described_and_the_others_are_told(described):
    for name in ("v5e:2x4", " V6E:1x1", "v6e:16x16", "v4:2x2x1", "v4:16x16x16", "v5p:4x4x12", "v5p:16x16x24"):
        assert targets.chips(name).name == name.strip().lower()
    for name in ("v5e", "v5e:2", "v5e:2x3", "v5e:0x0", "v6e:32x32", "v5e:02x4", "v6e:2x2x1", "v6e:4x2"):
        with pytest.raises(ConfigError, match=rf"got '{name}'; the slices of {name[:3]} are 1x1, 2x2, 2x4, .* 16x16$"):
            targets.chips(name)
    for name in ("v4:2x2", "v5p:1x1x1", "v4:4x4x6", "v4:8x4x4", "v4:0x4x4", "v4:16x16x20", "v5p:16x16x28", "v4:-4x4x4"):
        with pytest.raises(ConfigError, match=r"are 2x2x1, 2x2x2, 2x2x4, 2x4x4, and AxBxC with A <= B <= C.* chips$"):
            targets.chips(name)


@pytest.mark.tiny
def test_a_device_is_a_chip_with_the_memory_of_one(described, tmp_path: Path):
    sizes = {"v5e:2x4": 16 << 30, "v4:2x2x1": 32 << 30, "v5p:2x2x2": 95 << 30, "v6e:1x1": 32 << 30}
    assert {name: targets.chips(name).memory for name in sizes} == sizes
    # jax runs the two cores of a v4 chip as one device; a slice of one chip is smaller than a host.
    assert described[1]["chip_config_name"] == "megacore" and "chip_config_name" not in described[0]
    assert described[3]["chips_per_host_bounds"] == (1, 1, 1) and "chips_per_host_bounds" not in described[0]
    assert 139 < targets.chips("h200").memory / 2**30 < 140
    file = tmp_path / "mine.txtpb"
    file.write_text("gpu_device_info { device_memory_size: 80 }")
    assert (targets.nvidia_from_file(file).name, targets.nvidia_from_file(file).memory) == ("mine", 80)
    assert described[-1]["target_config"] == file.read_text()
    file.write_text("gpu_device_info { }")
    assert targets.nvidia_from_file(file).memory is None


@pytest.mark.tiny
def test_a_description_that_is_none(described, monkeypatch, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"a text file that can be read; .*nothing\.txtpb"):
        targets.nvidia_from_file(tmp_path / "nothing.txtpb")
    (tmp_path / "mine.txtpb").write_text("no description")

    def refuse(**_: object) -> None:
        raise ValueError("INVALID_ARGUMENT:\n no such field")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(BackendError, match=r"^target: mine cannot be described: INVALID_ARGUMENT: no such field$"):
        targets.nvidia_from_file(tmp_path / "mine.txtpb")


@pytest.mark.tiny
def test_a_missing_assembler_is_told_before_it_ends_the_process(described, monkeypatch):
    monkeypatch.setattr(targets, "_has_ptxas", lambda: False)
    with pytest.raises(BackendError, match=r"need ptxas.*pip install nvidia-cuda-nvcc-cu12"):
        targets.chips("h200")


@pytest.mark.tiny
def test_a_directory_for_temporary_files_is_asked_for_before_it_ends_the_process(
    described, monkeypatch, tmp_path: Path
):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    with pytest.raises(BackendError, match=r"temporary files; .*gone: No such file or directory; set TMPDIR"):
        targets.chips("h200")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert targets.chips("h200").platform == "cuda" and not list(tmp_path.iterdir())


@pytest.mark.tiny
def test_a_full_disk_behind_stdout_is_one_sentence(capsys, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert main(["aot", "--target", "nothing", "--json"]) != 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("riftco: ")


@pytest.mark.tiny
def test_the_assembler_is_looked_for_where_xla_looks(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(targets.Path, "exists", lambda path: path == tmp_path / "bin" / "ptxas")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    assert not targets._has_ptxas()
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    assert targets._has_ptxas()
    monkeypatch.delenv("CUDA_ROOT")
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    for wheel in ("nvidia.cuda_nvcc", "nvidia.cu13"):
        monkeypatch.setattr("importlib.util.find_spec", {wheel: package}.get)
        assert targets._has_ptxas()


@pytest.mark.tiny
def test_either_plugin_for_cuda_will_do(monkeypatch):
    for installed in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        monkeypatch.setattr("importlib.util.find_spec", {installed: object()}.get)
        targets._require(CUDA_PLUGINS, "NVIDIA")
        verb._stay_on_the_cpu()


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
@pytest.mark.parametrize("end", ["os.abort()", "os._exit(3)", "pass", "raise SystemExit(3)"])
def test_what_a_compiler_wrote_is_shown_where_it_ends_the_process(end):
    """An abort gives no exception to catch; what was written before it is all that there is to tell."""
    code = f"import os\nfrom riftco.cli import aot\nwith aot._muted():\n    os.write(2, b'check failed')\n    {end}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ("check failed" if "os." in end else "")


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
    alone = dataclasses.replace(chips, devices=chips.devices[:1])
    one, eight = (aot.decode_one(place, MODEL, batch_size=8) for place in (alone, chips))
    cache = 2 * 4 * 8 * 8 * 8  # keys and values, float32, 8 rows, 8 slots, 2 heads of 4
    assert one.arguments - eight.arguments >= cache * 7 // 8 and eight.attention is None
    with pytest.raises(ConfigError, match="whole weights on every chip"):
        aot.decode_one(chips, MODEL, batch_size=8, mesh="fsdp=8")
    assert "--attention belongs to --step train" in refused(
        capsys, 2, "v5e:2x4", "--step", "decode", "--attention", "plain"
    )


def test_a_step_that_does_not_fit_fails_with_one_sentence(chips, capsys, monkeypatch):
    small = dataclasses.replace(chips, memory=1 << 10)
    monkeypatch.setattr(targets, "chips", lambda name: small)
    assert main(["aot", "v5e:2x4", "--step", "decode", *FLAGS, "--json"]) == 1
    out, err = capsys.readouterr()
    got = json.loads(out)
    assert not got["fits"] and "the decode step must fit the 1.0 KiB of one cpu" in got["error"]
    assert err.splitlines()[-1] == f"riftco: {got['error']}"


def test_what_the_chips_or_their_compiler_refuse(chips, capsys, monkeypatch):
    assert "a multiple of the 8 devices; got batch_size 4" in refused(capsys, 2, "v5e:2x4", *FLAGS, "--batch-size", 4)
    assert "a multiple of the 8 devices; got batch_size 4" in refused(
        capsys, 2, "v5e:2x4", *FLAGS, "--batch-size", 4, "--step", "decode"
    )
    for mesh, made in (("data=9", 9), ("data=3", 3), ("data=2,fsdp=2", 4), ("fsdp=1", 1)):
        said = refused(capsys, 2, "v5e:2x4", *FLAGS, "--mesh", mesh)
        assert f"multiply to the chips of v5e:2x4, 8; got '{mesh}', which makes {made}; write data=8" in said
    for mesh in ("tensor=8", "data=4,data=8", "data=", "data=²", "8", ""):
        assert f"axes are written data=N or data=N,fsdp=M with N, M >= 1; got {mesh!r}" in refused(
            capsys, 2, "v5e:2x4", *FLAGS, "--mesh", mesh
        )
    assert "attention[pallas_tpu]: it needs a tpu" in refused(capsys, 2, "v5e:2x4", *FLAGS, "--attention", "pallas_tpu")

    def fail(*_: object) -> None:
        raise RuntimeError("the register allocator\n gave up")

    monkeypatch.setattr(aot, "make_train_step", fail)
    assert "does not compile for v5e:2x4: the register allocator gave up" in refused(
        capsys, 1, "v5e:2x4", *FLAGS, compiling=True
    )


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
    assert "must fit the 15.75G of memory that one cpu leaves to a program; it needs 284.02G; use" in sentence
    assert "block checkpointing" in sentence and "checkpointing" not in aot.too_large("decode", "1 GiB", "2 GiB")


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


@pytest.mark.tiny
def test_the_usage_shows_the_targets(capsys):
    assert main(["aot", "--help"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "usage: riftco aot v4:XxYxZ|v5e:XxY|v5p:XxYxZ|v6e:XxY|h200 [options]"
    )


@pytest.mark.tiny
def test_bytes_in_words():
    words = {
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        1 << 29: "512.0 MiB",
        3 << 39: "1.5 TiB",
        1 << 62: "4194304.0 TiB",
    }
    assert {count: verb.size(count) for count in words} == words
