"""The command line from outside: every verb, where options come from, and one sentence for every mistake."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from riftco import backend
from riftco.cli import help, main, verbs
from riftco.cli.model_options import ModelOptions
from riftco.cli.options import kinds
from riftco.cli.parse import parse
from riftco.errors import BackendError, ConfigError

ROOT = pathlib.Path(__file__).parents[1]
TEXT = "".join(f"the {a} sat on the {b}. " for a in ("cat", "dog", "fox", "hen") for b in ("mat", "log", "bed")) * 12
TINY = ("--layers 1 --heads 2 --width 16 --max-seq-length 16 --batch-size 4 --vocab-size 270 --device cpu "
        "--steps-per-eval 100 --save-every 100 --steps-per-report 2").split()  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RIFTCO_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Many commands here compile the same small programs: jax keeps them on disk for the length of this file."""
    directory = tmp_path_factory.mktemp("cache")
    settings = {"jax_compilation_cache_dir": str(directory), "jax_persistent_cache_min_compile_time_secs": 0.2}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield directory
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with a text, a tokenizer, a dataset and a finished run of six steps."""
    place = tmp_path_factory.mktemp("cli")
    (place / "text.txt").write_text(TEXT)
    assert (
        main(["tokenizer", "train", f"{place}/text.txt", "--vocab-size", "270", "--out-dir", f"{place}/tokenizer"]) == 0
    )
    assert main(["data", "prepare", f"{place}/text.txt", "--vocab-size", "270", "--out-dir", f"{place}/dataset"]) == 0
    assert (
        main(["pretrain", "--data", f"{place}/text.txt", "--max-steps", "6", "--out-dir", f"{place}/run", *TINY]) == 0
    )
    return place


def refused(capsys: pytest.CaptureFixture[str], status: int, *words: object, says: tuple[str, ...] = ()) -> str:
    """Run a command that must fail with one sentence on stderr; the sentence."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines and lines[-1].startswith("riftco: ") and "Traceback" not in err
    for text in says:
        assert text in lines[-1], lines[-1]
    return lines[-1]


def summary(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    """Run a command with --json; its one line on stdout."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


# ---- starting ----------------------------------------------------------------------------------------------------


@pytest.mark.tiny
def test_help_starts_without_jax() -> None:
    code = "import sys; from riftco.cli import main; s = main(['--help']); sys.exit(s or ('jax' in sys.modules) * 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "quickstart" in done.stdout
    for later in verbs.LATER:
        assert f"  {later}" not in done.stdout


@pytest.mark.tiny
def test_every_verb_explains_itself_without_jax() -> None:
    words = [[verb, sub, "--help"] if sub else [verb, "--help"] for verb in verbs.VERBS if verb != "bench"
             for sub in verbs.actions(verb)]  # fmt: skip
    code = (
        f"import sys; from riftco.cli import main; sys.exit(any([main(w) for w in {words!r}]) or 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--learning-rate" in done.stdout and "(default: 0.001)" in done.stdout


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "riftco", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == __import__("riftco").__version__


@pytest.mark.tiny
def test_verbs_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in verbs.LATER:
        refused(capsys, 2, verb, says=(f"'{verb}' is not part of this version",))
    refused(capsys, 2, "pretrian", says=("did you mean pretrain?",))
    refused(capsys, 2, "tokenizer", "trian", says=("did you mean train?",))
    refused(capsys, 2, "bench", "tran", says=("train, tokenizer",))


def test_documentation_is_current() -> None:
    assert help.markdown() in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), "run python -m riftco.cli.help"


# ---- where options come from -------------------------------------------------------------------------------------


@pytest.mark.tiny
def test_flags_win_over_the_environment_over_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("width: 1\nheads: 1\nrope-theta: 1e3\npreset: base\n")
    options = parse(
        ModelOptions,
        ["--config", str(file), "--width=3", "--max_seq_length", "7", "--no-bias"],
        environment={"RIFTCO_WIDTH": "2", "RIFTCO_HEADS": "2", "RIFTCO_GOLDEN": "x", "OTHER": "y"},
    )
    assert (options.width, options.heads, options.preset) == (3, 2, "base")
    assert (options.max_seq_length, options.bias, options.rope_theta) == (7, False, 1000.0)


@pytest.mark.tiny
def test_unknown_keys_name_the_nearest(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    refused(capsys, 2, "inspect", "--widht", 3, says=("no option --widht", "did you mean --width?"))
    file = tmp_path / "c.yaml"
    file.write_text("learnin_rate: 1")
    refused(capsys, 2, "pretrain", "--config", file, says=("c.yaml", "'learnin_rate'", "did you mean learning_rate?"))
    file.write_text("- 1")
    refused(capsys, 2, "pretrain", "--config", file, says=("a mapping",))
    file.write_text("a: [")
    refused(capsys, 2, "pretrain", "--config", file, says=("YAML",))
    refused(capsys, 2, "pretrain", "--config", tmp_path / "none.yaml", says=("none.yaml",))
    monkeypatch.setenv("RIFTCO_WIDHT", "3")
    refused(capsys, 2, "inspect", says=("RIFTCO_WIDHT", "did you mean RIFTCO_WIDTH?"))


@pytest.mark.tiny
def test_a_variable_of_another_verb_is_no_error(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("RIFTCO_LEARNING_RATE", "1")
    assert main(["inspect", "--layers", "1"]) == 0


@pytest.mark.tiny
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--width", "x"], "--width must be an integer; got 'x'"),
        (["--dropout", "x"], "--dropout must be a number; got 'x'"),
        (["--norm", "x"], "--norm must be one of layer, rms; got 'x'"),
        (["--width"], "--width needs a value"),
        (["--preset", "smal"], "--preset must be one of"),
        (["--width", "33", "--heads", "4"], "--width must be a multiple of heads"),
        (["--heads", "4", "--kv-heads", "3"], "--heads must be a multiple of kv_heads"),
        (["--max-seq-length", "0"], "--max-seq-length must be an integer of at least 1"),
        (["a", "b"], "one --model is wanted"),
        (["a", "--model", "b"], "give --model once"),
    ],
)
def test_wrong_values(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, 2, "inspect", *words, says=(says,))


def test_training_flags_are_the_trainers_fields_with_its_defaults() -> None:
    import dataclasses

    from riftco.cli.eval import EvalOptions
    from riftco.cli.pretrain import PretrainOptions
    from riftco.pallas.dispatch import IMPLEMENTATIONS
    from riftco.train import TrainConfig
    from riftco.train.config import Dtype

    ours = {field.name: field.default for field in dataclasses.fields(PretrainOptions)}
    theirs = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    given_otherwise = {"data", "out_dir", "checkpoint_dir"}
    assert {name: ours[name] for name in theirs if name not in given_otherwise} == {
        name: default for name, default in theirs.items() if name not in given_otherwise
    }
    for options in (PretrainOptions, EvalOptions):
        assert kinds(options)["attention"].choices == IMPLEMENTATIONS
        assert kinds(options)["dtype"].choices == typing.get_args(Dtype)
    assert set(kinds(PretrainOptions)) >= set(theirs) - {"checkpoint_dir"}


def test_a_traceback_is_shown_on_request(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("RIFTCO_TRACEBACK", "1")
    assert main(["generate", "nowhere"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_unexpected_error_says_how_to_see_more(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("riftco.cli.help.top", lambda: 1 / 0)
    refused(capsys, 1, "--help", says=("unexpected ZeroDivisionError", "RIFTCO_TRACEBACK=1"))


def test_a_failure_under_json_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "nowhere", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_status"] == 1 and "nowhere" in json.loads(out)["error"] and err.count("\n") == 1


@pytest.mark.tiny
def test_json_may_be_asked_for_anywhere(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    def failure(*words: object) -> str:
        capsys.readouterr()
        assert main(["generate", *map(str, words)]) in (1, 2)
        return capsys.readouterr().out

    file = tmp_path / "c.yaml"
    file.write_text("json: true\n")
    for words in (["nowhere", "--config", file], [f"--config={file}", "--widht", 3]):
        assert json.loads(failure(*words))["verb"] == "generate"
    assert failure("nowhere", "--config", file, "--no-json") == failure("nowhere") == ""
    monkeypatch.setenv("RIFTCO_JSON", "1")
    assert json.loads(failure("nowhere"))["exit_status"] == 1
    assert json.loads(failure("--no-such"))["exit_status"] == 2
    monkeypatch.setenv("RIFTCO_JSON", "0")
    assert failure("nowhere", "--config", file) == ""


@pytest.mark.tiny
def test_none_undoes_the_window_of_a_preset() -> None:
    from riftco.cli.model_options import decoder_config

    words = ["--preset", "mistral-7b"]
    windows = [decoder_config(parse(ModelOptions, [*words, *more])).sliding_window
               for more in ((), ("--sliding-window", "none"), ("--sliding-window", "9"))]  # fmt: skip
    assert windows == [4096, None, 9]


# ---- devices -----------------------------------------------------------------------------------------------------


@pytest.mark.tiny
def test_the_device_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    there: set[str] = set()
    monkeypatch.setattr(backend, "missing", lambda name: None if name in there | {"cpu"} else "it is not plugged in")
    assert backend.choose() == "cpu"
    for name in ("metal", "cuda", "tpu"):  # each is preferred to those before
        there.add(name)
        assert backend.choose() == name
    there.clear()
    with pytest.raises(BackendError, match="cuda was asked for; it is not plugged in"):
        backend.choose("cuda")
    with pytest.raises(ConfigError, match="must be one of"):
        backend.choose("gpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    there.add("tpu")
    assert backend.choose() == "cpu"


def test_a_plugin_without_its_chip_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_installed", lambda name: True)
    monkeypatch.setattr(backend, "_has_tpu", lambda: False)
    monkeypatch.setattr(backend, "_has_nvidia", lambda: False)
    monkeypatch.setattr(backend.sys, "platform", "linux")
    assert "no TPU" in str(backend.missing("tpu")) and "no NVIDIA driver" in str(backend.missing("cuda"))
    assert "Apple silicon" in str(backend.missing("metal"))


@pytest.mark.tiny
def test_the_metal_plugin_fits_the_jax_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    jax_version = {"jax": "0.11.2"}
    monkeypatch.setattr(backend, "_installed", lambda name: name in installed)
    monkeypatch.setattr(backend, "_version", jax_version.__getitem__)
    monkeypatch.setattr(backend.sys, "platform", "darwin")
    monkeypatch.setattr(backend.platform, "machine", lambda: "arm64")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert "no Metal plugin" in str(backend.missing("metal")) and backend.choose() == "cpu"
    installed.add("jax_plugins.metal_plugin")
    assert "jax-metal works with jax 0.4.34 alone and this is jax 0.11.2" in str(backend.missing("metal"))
    jax_version["jax"] = "0.4.34"
    assert backend.missing("metal") is None and backend.metal_plugin() == ("jax-metal", "METAL")
    jax_version["jax"] = "0.11.2"
    installed.add("jax_plugins.metal")
    assert backend.metal_plugin() == ("metaljax", "metal") and backend.choose() == "metal"
    installed.add("jax_plugins.mps")
    assert backend.metal_plugin() == ("jax-mps", "mps") and backend._platform("metal") == "mps"
    monkeypatch.setenv("JAX_PLATFORMS", "mps,cpu")
    assert backend.choose() == "metal"


def test_a_missing_device_is_refused(place: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(backend, "_installed", lambda name: False)
    refused(capsys, 1, "generate", place / "run", "--device", "tpu", says=("tpu was asked for", "riftco[tpu]"))


# ---- verbs -------------------------------------------------------------------------------------------------------


def test_tokenizer_verbs(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = summary(capsys, "tokenizer", "encode", "the cat", "--tokenizer", place / "tokenizer")["ids"]
    assert summary(capsys, "tokenizer", "decode", *ids, "--tokenizer", place / "tokenizer")["text"] == "the cat"
    assert summary(capsys, "tokenizer", "inspect", place / "run")["vocab_size"] == 270
    refused(capsys, 1, "tokenizer", "decode", 270, "--tokenizer", place / "tokenizer", says=("0..269", "got 270"))
    refused(capsys, 2, "tokenizer", "decode", "x", "--tokenizer", place / "tokenizer", says=("integers",))
    refused(capsys, 2, "tokenizer", "train", place / "text.txt", "--out-dir", place / "tokenizer", says=("--force",))
    refused(capsys, 1, "tokenizer", "inspect", place / "nothing", says=("nothing",))


def test_data_verbs(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(capsys, "data", "check", place / "dataset")["vocab_size"] == 270
    assert summary(capsys, "data", "show", place / "dataset", "--index", 3)["text"].startswith("train window at 3")
    refused(capsys, 1, "data", "show", place / "dataset", "--index", 10**6, says=("index must lie in",))
    refused(capsys, 1, "data", "check", place, says=("manifest.json",))
    refused(capsys, 1, "data", "prepare", place / "text.txt", "--out-dir", place / "dataset", says=("must be new",))


def test_a_run_directory_is_complete(place: pathlib.Path) -> None:
    import yaml

    run = place / "run"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "checkpoints/6",
        "final/model.safetensors",
        "report.html",
        "samples.jsonl",
    ):
        assert (run / name).exists(), name
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["layers"], config["hidden"], config["max_steps"], config["kv_heads"]) == (1, 64, 6, 2)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["phase"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["phase"] == "validation" and records[-1]["bits_per_byte"] > 0
    assert "prompt" in json.loads((run / "samples.jsonl").read_text().splitlines()[0])


def test_the_saved_config_means_the_same_run(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = place / "again"
    assert main(["pretrain", "--config", f"{place}/run/config.yaml", "--out-dir", str(again)]) == 0
    first, second = ((place / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "again"))
    assert [json.loads(line)["loss"] for line in first] == [json.loads(line)["loss"] for line in second]


def test_eval_agrees_with_the_last_validation(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = json.loads((place / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    own = summary(capsys, "eval", place / "run")
    assert own["loss"] == pytest.approx(last["loss"], rel=1e-6) and own["targets"] == last["tokens"]
    assert own["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    prepared = summary(capsys, "eval", place / "run", "--data", place / "dataset")
    assert prepared["loss"] == pytest.approx(last["loss"], rel=1e-5)
    refused(capsys, 1, "eval", place / "run", "--data", place / "nothing.txt", says=("nothing.txt",))


def test_generate(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", place / "run", "--prompt", "the cat", "--max-tokens", 8]
    greedy = summary(capsys, *words, "--temp", 0)
    assert len(greedy["ids"]) == 8 and greedy["finish_reason"] == "length"
    one, two, other = (summary(capsys, *words, "--seed", seed) for seed in (1, 1, 2))
    assert one["text"] == two["text"] != other["text"]
    capsys.readouterr()
    assert main([*map(str, words), "--temp", "0"]) == 0
    assert capsys.readouterr().out == f"the cat{greedy['text']}\n"
    stop = greedy["text"][1:3]
    stopped = summary(capsys, *words, "--temp", 0, f"--stop={stop}")
    assert stopped["finish_reason"] == "stop" and stopped["text"] == greedy["text"].split(stop)[0]
    refused(
        capsys, 1, *words[:2], "--prompt", "the cat sat on the mat. " * 9, says=("prompt must have 1 to 16 tokens",)
    )
    refused(capsys, 2, *words, "--temp", -1, says=("--temp must be at least 0",))
    refused(capsys, 1, "generate", place / "dataset", says=("final/",))


def test_every_end_of_text_stops(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    import shutil

    from riftco.cli import models

    shutil.copytree(place / "run" / "final", tmp_path / "m")
    (tmp_path / "m" / "riftco.json").unlink()  # so that it is another program's directory, without digests
    for name, value in (("config.json", 5), ("generation_config.json", [6, 7])):
        content = json.loads((tmp_path / "m" / name).read_text())
        (tmp_path / "m" / name).write_text(json.dumps({**content, "eos_token_id": value}))
    assert models.load(str(tmp_path / "m")).stop_ids == (5, 6, 7)


@pytest.mark.parametrize(("words", "count"), [
    ("--head-bias", 19_419),
    ("--kv-heads 2 --norm rms", 20_320),
])  # fmt: skip
def test_inspect_counts_the_golden_models(words: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--vocab-size 27 --max-seq-length 16 --width 32 --heads 4 --layers 2 --hidden 64".split()
    assert main(["inspect", *shape, *words.split()]) == 0
    out = capsys.readouterr().out
    assert f"{count:,} parameters" in out and "blocks.attention.query.weight" in out and "residual bytes" in out
    found = summary(capsys, "inspect", *shape, *words.split())
    assert found["parameters"] == count and found["leaves"]["token_embedding.weight"] == [27, 32]
    assert found["model_type"] == ("riftco" if "--head-bias" in words else "llama")


def test_inspect_knows_what_lies_where(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = summary(capsys, "inspect", place / "run")
    assert run["kind"] == "run" and run["checkpoints"] == [6] and run["model"]["model_type"] == "gpt2"
    bundle = summary(capsys, "inspect", place / "run" / "final")
    assert bundle["kind"] == "bundle" and "transformers (GPT2LMHeadModel)" in bundle["opened_by"]
    assert summary(capsys, "inspect", place / "tokenizer")["kind"] == "tokenizer"
    assert summary(capsys, "inspect", place / "dataset")["kind"] == "dataset"
    checkpoint = summary(capsys, "inspect", place / "run" / "checkpoints" / "6")
    assert checkpoint["kind"] == "checkpoint" and any("token_embedding.weight" in name for name in checkpoint["leaves"])
    refused(capsys, 1, "inspect", place / "nothing", says=("does not exist",))


def test_report(place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = summary(capsys, "report", place / "run", "--output", tmp_path / "page.html")["path"]
    assert "<svg" in pathlib.Path(page).read_text()
    refused(capsys, 1, "report", place / "dataset", says=("metrics.jsonl",))


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary(capsys, "doctor")
    assert found["device"] == "cpu" and set(found["checks"].values()) == {"yes"}
    assert found["packages"]["jax"] == __import__("jax").__version__ and "tpu" in found["extras"]


def test_gradcheck(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from riftco import gradcheck

    row = gradcheck.CheckResult("relu", "a sample", "differences", 0.5, 1e-6)
    monkeypatch.setattr(gradcheck, "rows", lambda only: [row] if only else [])
    assert summary(capsys, "gradcheck") == {"verb": "gradcheck", "checks": 0, "failed": 0, "subjects_failed": [],
                                            "rows": [], "exit_status": 0}  # fmt: skip
    assert main(["gradcheck", "relu"]) == 1
    assert "FAILED relu" in capsys.readouterr().out


def test_quickstart_smoke(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "quickstart",
        "--max-steps",
        2,
        "--out-dir",
        tmp_path / "q",
        "--corpus-bytes",
        60_000,
        *TINY[:6],
        *TINY[8:10],
    ]
    words += ["--vocab-size", 300, "--max-seq-length", 16]
    done = summary(capsys, *words)
    assert done["steps"] == 2 and len(done["samples"]) == 3 and done["loss"] > 0
    before = {path: path.read_bytes() for path in (tmp_path / "q").rglob("*") if path.is_file()}
    again = summary(capsys, *words)
    assert again["reason"] == "already_finished" and again["samples"] == done["samples"]
    assert {path: path.read_bytes() for path in (tmp_path / "q").rglob("*") if path.is_file()} == before
    words[2] = 3
    refused(capsys, 2, *words, says=("finished run of 2 steps", "--force"))
    words[2] = 2
    assert summary(capsys, *words, "--force")["reason"] == "max_steps"
    own = summary(capsys, "eval", tmp_path / "q")
    assert own["loss"] == pytest.approx(done["loss"], rel=1e-6)
    more = summary(capsys, "eval", tmp_path / "q", "--validation-fraction", 0.1)
    assert 4 * own["bytes"] < more["bytes"] < 6 * own["bytes"]


# ---- mistakes, each one sentence ---------------------------------------------------------------------------------


def _pretrain(place: pathlib.Path, out: pathlib.Path, *words: object) -> list[object]:
    return ["pretrain", "--data", place, "--out-dir", out, "--max-steps", 2, *TINY, *words]


def test_bad_data(place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    refused(capsys, 2, "pretrain", says=("--data is required",))
    refused(capsys, 1, *_pretrain(tmp_path / "none.txt", out), says=("none.txt' does not exist",))
    refused(capsys, 1, *_pretrain(tmp_path / "*.md", out), says=("matches no file",))
    (tmp_path / "empty.txt").write_text("")
    refused(capsys, 1, *_pretrain(tmp_path / "empty.txt", out), says=("is empty",))
    (tmp_path / "bytes.txt").write_bytes(b"good until here \xff")
    refused(capsys, 1, *_pretrain(tmp_path / "bytes.txt", out), says=("bytes.txt", "offset 16"))
    (tmp_path / "short.txt").write_text("a few words only")
    refused(capsys, 1, *_pretrain(tmp_path / "short.txt", out), says=("at least 17 tokens",))
    refused(capsys, 1, *_pretrain(tmp_path, out), says=("manifest.json or train.txt",))
    assert not out.exists()


def test_bad_models(place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = place / "text.txt", tmp_path / "out"
    refused(
        capsys, 2, *_pretrain(text, out, "--width", 33, "--heads", 4), says=("--width must be a multiple of heads",)
    )
    refused(capsys, 1, *_pretrain(text, out, "--vocab-size", 100), says=("vocab_size must lie in 256",))
    wanted = ("--vocab-size must be at least the 270 ids",)
    refused(capsys, 2, *_pretrain(text, out, "--tokenizer", place / "tokenizer", "--vocab-size", 99), says=wanted)
    refused(capsys, 2, *_pretrain(place / "dataset", out, "--vocab-size", 99), says=wanted)
    refused(capsys, 2, *_pretrain(text, out, "--learning-rate", -1), says=("learning_rate",))
    assert not out.exists()


def test_taken_and_unwritable_directories(place: pathlib.Path, tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    before = {path: path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()}
    refused(capsys, 2, *_pretrain(place / "text.txt", place / "run"), says=("--resume auto", "--force"))
    (tmp_path / "file").write_text("")
    refused(capsys, 2, *_pretrain(place / "text.txt", tmp_path / "file" / "run"), says=("is a file",))
    assert {path: path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dtype float16", "--dtype must be one of float32, bfloat16"),
        ("--batch-size 0", "batch_size must be an integer of at least 1"),
        ("--dropout 2", "--dropout must lie in [0, 1)"),
        ("--max-grad-norm 0", "max_grad_norm must be a normal positive float32"),
        ("--vocab-size 0", "--vocab-size must be an integer of at least 1"),
        ("--attention cudnn", "--attention cudnn cannot be had here"),
        ("--attention pallas_tpu", "--attention pallas_tpu cannot be had here"),
        ("--force --resume auto", "drop one of them"),
    ],
)
def test_what_rules_a_run_out_is_said_before_its_data_are_read(
    words: str, says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, 2, *_pretrain(tmp_path / "none.txt", tmp_path / "out", *words.split()), says=(says,))
    assert not (tmp_path / "out").exists()


def test_options_that_would_change_nothing_are_refused(
    place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = place / "text.txt", ("--out-dir", tmp_path / "out")
    for words in (["--special", "<x>"], ["--vocab-size", 9], ["--pattern", "nonsense"], ["--min-frequency", 3]):
        refused(capsys, 2, "tokenizer", "train", text, "--tokenizer", "byte", *out, *words,
                says=(f"{words[0]} belongs to --tokenizer bpe",))  # fmt: skip
    for kind in ("byte", place / "tokenizer"):
        refused(capsys, 2, "data", "prepare", text, "--tokenizer", kind, "--vocab-size", 9, *out, says=("belongs to",))
        refused(capsys, 2, *_pretrain(text, tmp_path / "out", "--tokenizer", kind, "--min-frequency", 3),
                says=("--min-frequency belongs to",))  # fmt: skip
    dataset = _pretrain(place / "dataset", tmp_path / "out")
    refused(capsys, 2, *dataset, "--tokenizer", "byte", says=("--tokenizer byte is for text",))
    refused(capsys, 2, *dataset, "--min-frequency", 3, says=("--min-frequency",))
    score = ["eval", place / "run", "--data"]
    refused(capsys, 2, *score, place / "dataset", "--validation-fraction", 0.5, says=("belongs to text",))
    refused(capsys, 2, *score, text, "--split", "validation", says=("--validation-fraction",))
    assert main(["eval", str(place / "run"), "--max-seq-length", "0"]) != 0
    assert not (tmp_path / "out").exists()


def test_eval_scores_the_side_that_is_named(place: pathlib.Path, tmp_path: pathlib.Path, capsys) -> None:
    own, train = (summary(capsys, "eval", place / "run", "--split", split) for split in ("validation", "train"))
    assert summary(capsys, "eval", place / "run") | {"seconds": 0} == own | {"seconds": 0}
    assert train["bytes"] > 8 * own["bytes"]
    given = summary(capsys, "eval", place / "run", "--data", place / "dataset", "--split", "train")
    assert given["targets"] == train["targets"]
    half = summary(capsys, "eval", place / "run", "--data", place / "text.txt", "--validation-fraction", 0.5)
    assert 4 * own["bytes"] < half["bytes"] < 6 * own["bytes"]


def test_eval_refuses_text_that_is_not_the_runs(place: pathlib.Path, tmp_path: pathlib.Path, capsys) -> None:
    import shutil

    run = pathlib.Path(shutil.copytree(place / "run", tmp_path / "run"))
    (tmp_path / "moved.txt").write_text(TEXT)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(place / "text.txt"), str(tmp_path / "moved.txt")))
    assert summary(capsys, "eval", run)["targets"] > 0  # the same bytes under another name
    (tmp_path / "moved.txt").write_text(TEXT + "one more line")
    refused(capsys, 1, "eval", run, says=("moved.txt changed since", "--data"))
    assert summary(capsys, "eval", run, "--data", tmp_path / "moved.txt")["targets"] > 0


def test_a_prompt_without_ids_is_refused_before_training(place: pathlib.Path, tmp_path: pathlib.Path, capsys) -> None:
    words = _pretrain(place / "text.txt", tmp_path / "out", "--tokenizer", "byte", "--prompt", "\u03a9")
    words = [word for word in words if word not in ("--vocab-size", "270")]
    refused(capsys, 2, *words, says=("--prompt must be text that the tokenizer can encode",))
    assert not (tmp_path / "out").exists()


def test_samples_and_report_are_made_up_for(place: pathlib.Path, tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    import shutil

    from riftco.cli import run_output

    run = pathlib.Path(shutil.copytree(place / "run", tmp_path / "run"))
    words = ["pretrain", "--config", run / "config.yaml", "--out-dir", run, "--resume", "auto"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for name in ("samples.jsonl", "report.html"):
        (run / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(run_output, "sample", lambda *_: 1 / 0)
        assert main([*map(str, words)]) == 1
    done = summary(capsys, *words)
    assert done["reason"] == "already_finished" and done["samples"]
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert before.keys() == after.keys() and after[run / "samples.jsonl"] == before[run / "samples.jsonl"]
    (run / "samples.jsonl").write_text(json.dumps({"prompt": "a", "text": "b\u2028c"}, ensure_ascii=False) + "\n")
    assert [row["text"] for row in run_output.read_samples(run)] == ["b\u2028c"]


def test_unused_rows_of_the_model_stand_for_no_text(place: pathlib.Path, capsys, monkeypatch) -> None:
    from riftco import generation

    monkeypatch.setattr(generation, "stream", lambda *_, **__: iter([65, 10**6, 66]))
    done = summary(capsys, "generate", place / "run", "--prompt", "the", "--max-tokens", 3, "--stop", "zzz")
    assert done["ids"] == [65, 10**6, 66] and done["finish_reason"] == "length"


def test_the_library_form_of_a_configuration_is_named(place: pathlib.Path, capsys, tmp_path: pathlib.Path) -> None:
    refused(capsys, 2, "pretrain", "--config", place / "run" / "run.yaml", says=("library's own form", "config.yaml"))


def test_tables_survive_bars() -> None:
    rows = [line for line in help.markdown().splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)


def test_resume(place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = _pretrain(place / "text.txt", out, "--resume", "auto", "--save-every", 1)
    assert summary(capsys, *words)["reason"] == "max_steps"  # nothing to resume from: it starts
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert summary(capsys, *words)["reason"] == "already_finished"
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    refused(capsys, 1, *words, "--width", 32, says=("width",))
    refused(capsys, 2, *words, "--resume", "sometimes", says=("resume must be never, auto",))
    refused(capsys, 1, *words, "--resume", "77", says=("77",))
    assert summary(capsys, *words, "--max-steps", 3)["steps"] == 3
    assert summary(capsys, *words, "--max-steps", 3, "--resume", "2")["steps"] == 3


@pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit")
def test_a_disk_that_takes_no_more(place: pathlib.Path, tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    limit = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); from riftco.cli import main; sys.exit(main())"
    words = _pretrain(place / "text.txt", tmp_path / "out")
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", limit, *map(str, words)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("riftco: ") and "out" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_saves_and_says_how_to_go_on(
    place: pathlib.Path, tmp_path: pathlib.Path, cache: pathlib.Path, number: int, status: int, name: str
) -> None:
    words = _pretrain(place / "text.txt", tmp_path / "out", "--max-steps", 100_000, "--steps-per-eval", 100_000)
    command = [sys.executable, "-m", "riftco", *map(str, words)]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    metrics, deadline = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("train") > 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status and "Traceback" not in err
    assert name in err.splitlines()[-1] and "--resume auto" in err.splitlines()[-1]
    saved = max(int(path.name) for path in (tmp_path / "out" / "checkpoints").iterdir() if path.name.isdigit())
    assert saved == metrics.read_text().count('"train"')
