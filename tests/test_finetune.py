"""Post-training: what is trained and what is not, runs that go on bit for bit, and the verbs around them."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from riftco import bundle, data, models, tune
from riftco.cli import main
from riftco.errors import BundleError, CheckpointError, ConfigError
from riftco.tokenizers import chat
from riftco.train import TrainConfig, evaluate, make_train_step, read_records
from riftco.train.events import StepFinished
from riftco.tune import finetuning, objectives
from riftco.tune.bases import load_adapter, load_base, packed_digest
from riftco.tune.merged import merge_to_bundle
from tests import tuning_program
from tests.training_program import environment
from tests.tuning_program import CONFIG, KINDS, ROWS, TOKENIZER, compilation, make, prepare, write

FLAGS = ("--batch-size 4 --learning-rate 1e-2 --lr-schedule constant --seed 3 --save-every 2 --steps-per-eval 4 "
         "--device cpu --json").split()  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with compilation(tmp_path_factory):
        yield make(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("RIFTCO_")]:
        monkeypatch.delenv(name)


def command(capsys, *words) -> dict:
    """The summary of a verb that works."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(capsys, *words) -> str:
    """The one sentence of a verb that does not."""
    capsys.readouterr()
    status, err = main([str(word) for word in words]), capsys.readouterr().err
    assert status in (1, 2), err
    return err.splitlines()[-1]


@pytest.fixture(scope="module")
def runs(place):
    """A run of each method through the command line, to be copied and never changed."""
    for method in ("full", "lora", "qlora"):
        words = ["finetune", "--model", place / "base", "--data", place / "examples", "--method", method]
        words += [] if method == "full" else ["--lora-r", 3]
        assert main([str(w) for w in (*words, "--max-steps", 5, "--out-dir", place / method, *FLAGS)]) == 0
    return place


def same(left, right) -> None:
    pairs = zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True)
    for (path, a), b in pairs:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


# ---- the objective ---------------------------------------------------------------------------------------------------


def test_what_is_frozen_is_an_argument_and_no_constant(place):
    """Nor is it donated, nor has it a moment."""
    _, prepared, training = prepare(place, "lora", {})
    objective = prepared.objective
    state = jax.eval_shape(lambda p: (p,), prepared.params)[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == objective.trained_count() < 2000
    step = make_train_step(CONFIG, training, None, objective)
    from riftco.train import abstract_state

    arrays = {k: v for k, v in prepared.source.batch(0).arrays().items() if v is not None}
    traced = step.trace(abstract_state(CONFIG, training, None, objective), arrays, np.int32(0), *objective.frozen)
    text = traced.lower().as_text()
    embedded = max((len(found) for found in re.findall(r'dense<"0x[0-9A-F]+">', text)), default=0)
    assert embedded < 8 * CONFIG.width * CONFIG.hidden  # hex digits: no feed-forward of the base stands in the program
    names = [str(path[0]) for path, leaf in jax.tree_util.tree_leaves_with_path(traced.args_info) if leaf.donated]
    assert names and len(names) == len(jax.tree.leaves(abstract_state(CONFIG, training, None, objective)))


def test_adapters_start_where_the_base_is_and_only_they_change(runs):
    base = load_base(runs / "base")
    records = read_records(runs / "lora" / "metrics.jsonl")
    plain = read_records(runs / "full" / "metrics.jsonl")
    assert records[0].loss == plain[0].loss and records[1].loss == plain[1].loss
    assert records[-1].loss < records[0].loss and plain[-1].loss < plain[0].loss
    same(load_base(runs / "base").params, base.params)
    found = load_adapter(runs / "lora", base)
    assert found.base_id == base.identity and found.manifest["stage"] == "sft"
    assert found.adapters.targets == tuple(n for n in tune_projections() if n != "language_model_head")


def tune_projections():
    from riftco.models.adapters import projections

    return projections(CONFIG)


def test_packed_weights_are_as_they_were_packed(runs):
    base, kept = load_base(runs / "base"), load_base(runs / "qlora" / "base")
    same(kept.params, tune.quantize(base.params, CONFIG))
    assert kept.manifest["parent_artifact_id"] == base.identity


def test_what_is_recorded(runs):
    for method in ("full", "lora", "qlora"):
        manifest = json.loads((runs / method / "final" / "riftco.json").read_text())
        facts = manifest["fingerprints"]
        assert manifest["parent_artifact_id"] == load_base(runs / "base").identity
        assert (facts["objective"]["method"], facts["objective"]["loss_on"]) == (method, "response")
        assert facts["data"]["train"]["sha256"] == data.read_examples(runs / "examples" / "train.jsonl").sha256
        assert facts["training"] == {"steps": 5, "seed": 3}
        assert ("quantization" in facts) == (method == "qlora")
    assert bundle.load(runs / "full" / "final").chat_template == chat.PLAIN
    assert (runs / "full" / "report.html").is_file() and (runs / "full" / "samples.jsonl").is_file()


def test_scores_are_those_of_the_logits(place):
    encoded = data.encode_examples(TOKENIZER, data.read_examples(place / "examples" / "train.jsonl").rows, 64)
    params = models.init(jax.random.key(0), CONFIG)
    result = evaluate(params, CONFIG, data.ExampleWindows(encoded, 2), objective=objectives.Scored(config=CONFIG))
    plain = evaluate(params, CONFIG, data.ExampleWindows(encoded, 2))
    right = total = 0
    forward = jax.jit(lambda tokens: models.forward(params, tokens, CONFIG))
    for item in encoded.items:
        tokens = np.pad(item.ids[:-1], (0, 64 - len(item.ids) + 1))[None]
        best = np.asarray(forward(tokens))[0, : len(item.ids) - 1].argmax(-1)
        right += ((best == item.ids[1:]) & (item.weights[1:] > 0)).sum()
        total += item.targets
    assert result.targets == total and result.accuracy == pytest.approx(right / total)
    assert result.loss == pytest.approx(plain.loss, rel=1e-6) and plain.accuracy is None


def test_target_names_are_ours_or_the_published_ones():
    assert finetuning.targets_of(["q_proj", "feed_forward.down"], CONFIG) == ("attention.query", "feed_forward.down")
    gpt = models.DecoderConfig(29, 16, 16, 4, 2, 32)
    assert finetuning.targets_of(["c_attn"], gpt) == ("attention.query", "attention.key", "attention.value")
    assert "language_model_head" not in finetuning.targets_of(["all-linear"], CONFIG)
    assert finetuning.targets_of(["lm_head"], CONFIG) == ("language_model_head",)
    with pytest.raises(ConfigError, match="'w_proj' is not"):
        finetuning.targets_of(["w_proj"], CONFIG)


# ---- stopped, and resumed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "lora", "qlora", "dpo", pytest.param("full dpo", marks=pytest.mark.slow)])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(place, tmp_path, kind):
    def power_cut(event) -> None:
        if isinstance(event, StepFinished) and event.record.step == 3:
            raise RuntimeError("power cut")

    more = {"page_size": 64, "grad_checkpoint": "block"} if kind == "qlora" else {}
    whole = tuning_program.tune(place, kind, **more)
    path = tmp_path / "run"
    with pytest.raises(RuntimeError, match="power cut"):
        tuning_program.tune(place, kind, out_dir=str(path), resume="auto", on_event=power_cut, **more)
    result = tuning_program.tune(place, kind, out_dir=str(path), resume="auto", **more)
    same(result.state, whole.state)
    untimed = lambda records: [dataclasses.replace(record, tokens_per_second=None) for record in records]
    assert untimed(result.records) == untimed(whole.records)


def test_another_base_method_or_data_is_refused_by_name(runs, tmp_path, capsys):
    run = Path(shutil.copytree(runs / "qlora", tmp_path / "run"))
    other = tmp_path / "other"
    bundle.save(other, models.init(jax.random.key(9), CONFIG), CONFIG, TOKENIZER)
    write(tmp_path / "more" / "train.jsonl", ROWS)
    same_ = {"--model": runs / "base", "--data": runs / "examples", "--method": "qlora", "--lora-r": 3}
    for change, words in (
        ({"--model": other}, r"objective\.base: saved"),
        ({"--data": tmp_path / "more"}, r"objective\.data\.train: saved"),
        ({"--method": "lora"}, r"objective\.method: saved \"qlora\", now \"lora\""),
        ({"--lora-r": 2}, r"objective\.adapters\.rank: saved 3, now 2"),
        ({"--block-size": 32}, r"objective\.quantization\.block_size: saved 64, now 32"),
        ({"--loss-on": "all"}, r"objective\.loss_on: saved"),
    ):
        flags = [word for pair in {**same_, **change}.items() for word in pair]
        said = refused(capsys, "finetune", *flags, "--max-steps", 6, "--out-dir", run, "--resume", "auto", *FLAGS)
        assert re.search(words, said), said
    flags = [word for pair in same_.items() for word in pair]
    done = command(capsys, "finetune", *flags, "--max-steps", 5, "--out-dir", run, "--resume", "auto", *FLAGS)
    assert done["reason"] == "already_finished"
    assert sorted(p.name for p in run.iterdir()) == sorted(p.name for p in (runs / "qlora").iterdir())


def test_a_run_does_not_replace_what_it_is_made_of(runs, tmp_path, capsys):
    base = Path(shutil.copytree(runs / "base", tmp_path / "here" / "base"))
    data = Path(shutil.copytree(runs / "examples", tmp_path / "there" / "rows"))
    words = ["finetune", "--model", base, "--data", data, "--max-steps", 1, "--force"]
    for out in (base, base.parent, data, data.parent):
        assert "must not replace what it is made of" in refused(capsys, *words, "--out-dir", out)
    assert sorted(p.name for p in base.iterdir()) == sorted(p.name for p in (runs / "base").iterdir())


def test_options_that_would_change_nothing_are_refused(runs, capsys):
    words = ["finetune", "--model", runs / "base", "--data", runs / "examples", "--out-dir", runs / "none"]
    for more, said in (
        (("--method", "full", "--lora-r", 4), "--lora-r is for --method lora and qlora; got it with full"),
        (("--method", "lora", "--block-size", 32), "--block-size is for --method qlora"),
        (("--beta", 0.2), "--beta is for --objective dpo; got it with sft"),
    ):
        assert said in refused(capsys, *words, *more)
    assert not (runs / "none").exists()


def start(place: Path, run: Path, kind: str) -> subprocess.Popen[str]:
    words = [word for key, value in KINDS[kind].items() for word in flag(key, value)]
    code = "import sys, time; from riftco.cli import main; sys.exit(main(sys.argv[1:]))"
    rows = "pairs" if kind == "dpo" else "examples"
    command = [sys.executable, "-c", code, "finetune", "--model", place / "base", "--data", place / rows, *words,
               "--max-steps", "60", "--out-dir", run, "--resume", "auto", *FLAGS]  # fmt: skip
    with open(run.with_suffix(".err"), "w") as said:
        return subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.DEVNULL,
            stderr=said,
            text=True,
            env=environment(place / "compiled"),
        )


def flag(key: str, value: object) -> list[str]:
    name = "--" + key.replace("_", "-")
    return [name] if value is True else [name, str(value)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "qlora", "dpo"])
def test_a_killed_command_goes_on_bit_for_bit(place, tmp_path, kind):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert start(place, whole, kind).wait() == 0
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = start(place, run, kind)
        begun = len(read_records(run / "metrics.jsonl")) if run.exists() else 0
        while process.poll() is None and (
            not (run / "metrics.jsonl").is_file() or len(read_records(run / "metrics.jsonl")) < begun + 8
        ):
            time.sleep(0.02)
        process.send_signal(number)
        process.wait()
    process = start(place, run, kind)
    assert process.wait() == 0, run.with_suffix(".err").read_text()
    untimed = lambda path: [
        dataclasses.replace(r, tokens_per_second=None) for r in read_records(path / "metrics.jsonl")
    ]
    assert untimed(run) == untimed(whole)
    weights = "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    assert (run / "final" / weights).read_bytes() == (whole / "final" / weights).read_bytes()
    if kind == "qlora":
        assert (run / "base" / "riftco.json").read_bytes() == (whole / "base" / "riftco.json").read_bytes()


# ---- the verbs -------------------------------------------------------------------------------------------------------


def test_merging_gives_one_model_that_answers_alike(runs, tmp_path, capsys):
    words = ["--prompt", "say red", "--temp", 0, "--max-tokens", 6, "--json"]
    for method in ("lora", "qlora"):
        out = tmp_path / method
        summary = command(
            capsys, "merge", "--model", runs / "base", "--adapter", runs / method, "--out-dir", out, "--json"
        )
        manifest = json.loads((out / "riftco.json").read_text())
        assert summary["artifact_id"] == manifest["artifact_id"]
        assert manifest["fingerprints"]["merged_adapter"] == summary["adapter"]
        difference = summary["logit_difference"]
        recorded = json.loads((out / "merge.json").read_text()) if difference else {}
        assert recorded == ({"artifact_id": summary["artifact_id"], **difference} if difference else {})
        assert bundle.verify(out)["artifact_id"] == summary["artifact_id"]
        assert set(difference) == ({"packed_base_with_adapters", "base_with_adapters"} if method == "qlora" else set())
        if method == "qlora":
            assert (
                difference["packed_base_with_adapters"]["max_abs"] < 2e-5 < difference["base_with_adapters"]["max_abs"]
            )
        texts = [command(capsys, "generate", *model, *words)["text"] for model in (
            (runs / method,), (runs / "base", "--adapter", runs / method / "final"), (out,)
        )]  # fmt: skip
        assert len(set(texts)) == 1
        scores = [command(capsys, "eval", *model, "--json") for model in (
            (runs / method,), (out, "--data", runs / "examples")
        )]  # fmt: skip
        assert scores[0]["loss"] == pytest.approx(scores[1]["loss"], rel=1e-5)
        assert scores[0]["accuracy"] == scores[1]["accuracy"] and scores[0]["bits_per_byte"] > 0
        last = read_records(runs / method / "metrics.jsonl")[-1]
        assert last.loss == pytest.approx(scores[0]["loss"], rel=1e-5)


def test_a_merge_keeps_the_dtype_of_the_base(runs, tmp_path):
    base = bundle.load(runs / "base")
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), base.params)
    identity = bundle.save(tmp_path / "half", half, CONFIG, TOKENIZER)
    packed = finetuning.quantize(jax.tree.map(lambda leaf: leaf.astype("float32"), half), CONFIG)
    how = {"block_size": 64, "double_quant": True, "packed": packed_digest(packed, CONFIG)}
    found = bundle.load_adapters(runs / "qlora" / "final", CONFIG).adapters
    bundle.save_adapters(tmp_path / "adapters", found, CONFIG, base=identity, fingerprints={finetuning.PACKED: how})
    merge_to_bundle(tmp_path / "half", tmp_path / "adapters", tmp_path / "child")
    with bundle.reading.open_weights(tmp_path / "child") as tensors:
        assert {str(tensors.dtype_of(name)) for name in tensors} == {"bfloat16"}


def test_inspecting_a_run_of_adapters_says_whose_they_are(runs, capsys):
    found = command(capsys, "inspect", runs / "lora", "--json")["adapter"]
    assert found["parent_artifact_id"] == load_base(runs / "base").identity and found["r"] == 3


def test_what_cannot_be_merged_is_refused_and_nothing_is_lost(runs, tmp_path):
    merge_to_bundle(runs / "base", runs / "lora", tmp_path / "once")
    before = (tmp_path / "once" / "riftco.json").read_bytes()
    for model, adapter, out, words in (
        (tmp_path / "once", runs / "lora", tmp_path / "twice", "adapters are merged once"),
        (runs / "full", runs / "lora", tmp_path / "other", "it belongs to the base"),
        (runs / "qlora" / "base", runs / "lora", tmp_path / "packed", "it belongs to the base"),
        (runs / "base", runs / "full", tmp_path / "whole", "holds a whole model"),
        (runs / "base", runs / "lora", tmp_path / "once", "must not exist"),
        (runs / "base", runs / "none", tmp_path / "none", "must exist"),
    ):
        with pytest.raises(BundleError, match=words):
            merge_to_bundle(model, adapter, out)
    with pytest.raises(BundleError, match="must not replace what it is made of"):
        merge_to_bundle(runs / "base", runs / "lora", runs / "base", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["once"]
    assert (tmp_path / "once" / "riftco.json").read_bytes() == before
    again = merge_to_bundle(runs / "qlora" / "base", runs / "qlora", tmp_path / "once", force=True)
    assert again.artifact_id == bundle.verify(tmp_path / "once")["artifact_id"]


def test_adapters_that_peft_wrote_are_merged_and_used(runs, tmp_path):
    foreign = Path(shutil.copytree(runs / "lora" / "final", tmp_path / "peft"))
    (foreign / "riftco.json").unlink()
    ours = merge_to_bundle(runs / "base", runs / "lora", tmp_path / "ours")
    theirs = merge_to_bundle(runs / "base", foreign, tmp_path / "theirs")
    same(bundle.load(tmp_path / "ours").params, bundle.load(tmp_path / "theirs").params)
    assert ours.adapter != theirs.adapter
    with pytest.raises(BundleError, match="merged into this base already"):
        merge_to_bundle(tmp_path / "theirs", foreign, tmp_path / "twice")


def test_what_is_left_out_or_cut_is_said_once(place, tmp_path, capsys):
    write(
        tmp_path / "rows.jsonl",
        [*ROWS[:3], {"prompt": "say", "completion": " "}, {"prompt": "s" * 90, "completion": "d"}],
    )
    words = ["--model", place / "base", "--data", tmp_path / "rows.jsonl", "--max-steps", 1, "--max-length", 60]
    capsys.readouterr()
    assert main([str(w) for w in ("finetune", *words, "--out-dir", tmp_path / "run", *FLAGS)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1 and "2 left out: 1 have no response, 1 lose the response to truncation" in said[0]


def test_wrong_arguments_are_one_sentence(runs, tmp_path, capsys):
    model, rows = ("--model", runs / "base"), ("--data", runs / "examples")
    (tmp_path / "template.jinja").write_bytes(b"\xff")
    for words, says in (
        ((*rows,), "--model is required"),
        ((*model,), "--data is required"),
        ((*model, *rows, "--method", "dora"), "--method must be one of full, lora, qlora"),
        ((*model, *rows, "--lora-r", 0), "rank must be an integer of at least 1"),
        ((*model, *rows, "--lora-r", 99), "rank must be at most"),
        ((*model, *rows, "--lora-dropout", 1), "dropout must lie in"),
        ((*model, *rows, "--target-modules", "quer"), "'quer' is not"),
        ((*model, *rows, "--max-length", 999), "must be at most the model's context of 64"),
        ((*model, *rows, "--method", "qlora", "--block-size", 48), "block_size"),
        ((*model, *rows, "--objective", "dpo"), "use objective sft"),
        ((*model, "--data", runs / "pairs"), "use objective dpo"),
        ((*model, "--data", tmp_path / "none.jsonl"), "none.jsonl"),
        ((*model, *rows, "--chat-template", tmp_path / "template.jinja"), "it is not UTF-8 text"),
        (("--model", tmp_path, *rows), "holds neither"),
        (("--model", runs / "qlora" / "base", *rows, "--method", "full"), "the model is in 4 bits"),
        (("--model", runs / "lora", *rows), "not merged"),
    ):
        said = refused(capsys, "finetune", *words, "--out-dir", tmp_path / "run", *FLAGS)
        assert says in said and not (tmp_path / "run").exists(), said
    said = refused(capsys, "finetune", *model, *rows, "--out-dir", runs / "full", *FLAGS)
    assert "holds a run" in said and (runs / "full" / "final" / "riftco.json").is_file()
    said = refused(capsys, "eval", runs / "base", "--data", runs / "pairs")
    assert "holds preferences" in said
    assert "--adapter is required" in refused(capsys, "merge", "--model", runs / "base", "--out-dir", tmp_path / "out")
    with pytest.raises(ConfigError, match="method"):
        finetuning.TuneConfig(method="lola")  # pyright: ignore[reportArgumentType]
    with pytest.raises((ConfigError, CheckpointError)):
        TrainConfig(batch_size=0)


def test_a_mesh_trains_the_same_adapters(place):
    alone = tuning_program.tune(place, "qlora", max_steps=2, lora_dropout=0.0)
    spread = tuning_program.tune(place, "qlora", max_steps=2, lora_dropout=0.0, mesh="data=2")
    for a, b in zip(jax.tree.leaves(alone.params), jax.tree.leaves(spread.params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=2e-5)
