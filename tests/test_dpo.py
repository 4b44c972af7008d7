"""Direct preference optimisation: its loss, its derivative, and what a run of it counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import _compat, data, models
from riftco.errors import ConfigError, DataError
from riftco.oracle import preferences as oracle
from riftco.tune import finetuning, lora_init, objectives
from tests.tuning_program import CONFIG, PAIRS, TOKENIZER, compilation, make, prepare, tune, write


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with compilation(tmp_path_factory):
        yield make(tmp_path_factory.mktemp("dpo"))


@functools.cache
def pairs() -> data.EncodedSet:
    rows = [
        data.Preference(f"f:{i}", ({"role": "user", "content": row["prompt"]},), *(
            ({"role": "assistant", "content": row[side]},) for side in ("chosen", "rejected")
        ))
        for i, row in enumerate(PAIRS)
    ]  # fmt: skip
    return data.encode_preferences(TOKENIZER, rows, 64)


@functools.cache
def base():
    return models.init(jax.random.key(0), CONFIG)


@functools.cache
def adapters():
    fresh = lora_init(jax.random.key(1), base(), CONFIG, targets=["attention", "feed_forward"], rank=2, alpha=4.0)
    noise = lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)
    return jax.tree.map(noise, fresh)


def objective(**options):
    shared = {"config": CONFIG, "frozen": (base(),), "adapters": objectives.template_of(adapters()), "beta": 0.3}
    return objectives.Preferences(**{**shared, **options})


def batch(rows: int = 3, start: int = 0) -> dict:
    return next(iter(data.PreferenceWindows(pairs_from(start, rows), rows))).arrays()


def pairs_from(start: int, rows: int) -> data.EncodedSet:
    return dataclasses.replace(pairs(), items=pairs().items[start : start + rows], _digest=[])


@functools.cache
def value_and_grad():
    def run(params, batch, frozen):
        loss = lambda params: objective().loss(params, batch, frozen, reduction="mean")
        return riftco.value_and_grad(loss, has_aux=True)(params)

    return jax.jit(run)


def alone(adapters, items) -> np.ndarray:
    """[pairs, 2]: the log-probability of each answer in a row of its own, in float64 from the logits on."""
    rows = [side for pair in items for side in pair]
    padded = lambda arrays: np.stack([np.pad(array, (0, 63 - len(array))) for array in arrays])
    tokens, targets = padded([row.ids[:-1] for row in rows]), padded([row.ids[1:] for row in rows])
    logits = jax.jit(lambda adapters: models.forward(base(), tokens, CONFIG, adapters=adapters))(adapters)
    return oracle.answer_log_probs(logits, targets, padded([row.weights[1:] for row in rows])).reshape(-1, 2)


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.tiny
def test_the_loss_of_a_margin_is_the_twin_and_never_overflows():
    z = jnp.array([-200.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 200.0])
    value, pull = riftco.vjp(objectives.preference_loss, z)
    zero = np.zeros(7)
    np.testing.assert_allclose(value, oracle.dpo_loss(z, zero, zero, zero, 1.0), rtol=1e-6, atol=1e-7)
    wanted = oracle.dpo_loss_vjp(z, zero, zero, zero, 1.0, np.ones(7))[0]
    np.testing.assert_allclose(pull(jnp.ones(7))[0], wanted, rtol=1e-6, atol=1e-30)


@pytest.mark.tiny
def test_the_twin_has_the_slope_of_its_own_differences(rng):
    arguments, dy = rng.standard_normal((4, 5)), rng.standard_normal(5)
    slopes = oracle.dpo_loss_vjp(*arguments, 0.7, dy)
    for index in (0, 1):
        step = np.zeros((4, 5))
        step[index] = 1e-6
        change = oracle.dpo_loss(*(arguments + step), 0.7) - oracle.dpo_loss(*(arguments - step), 0.7)
        np.testing.assert_allclose(slopes[index], dy * change / 2e-6, rtol=1e-6)


def test_a_row_of_two_answers_gives_what_each_gives_alone():
    items = pairs().items[:3]
    (chosen, rejected), reference = alone(adapters(), items).T, alone(None, items).T
    wanted = oracle.dpo_loss(chosen, rejected, *reference, 0.3)
    (loss, figures), _ = value_and_grad()(adapters().weights, batch(), base())
    z = 0.3 * ((chosen - rejected) - (reference[0] - reference[1]))
    np.testing.assert_allclose(loss, wanted.mean(), rtol=2e-5)
    np.testing.assert_allclose(figures["margin"], z.mean(), rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(figures["accuracy"], (z > 0).mean(), rtol=1e-6)


def test_the_gradient_is_the_slope_of_the_loss_in_float64(rng):
    with _compat.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), tree)
        params, frozen = wide(adapters().weights), wide(base())
        direction = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape)), params)
        moved = lambda size: jax.tree.map(lambda leaf, way: leaf + size * way, params, direction)
        one = {name: np.asarray(array) for name, array in batch(2).items()}
        one["weights"] = one["weights"].astype(np.float64)
        run = value_and_grad()
        _, grads = run(params, one, frozen)
        slope = (run(moved(1e-6), one, frozen)[0][0] - run(moved(-1e-6), one, frozen)[0][0]) / 2e-6
        along = sum(jnp.vdot(g, way) for g, way in zip(*map(jax.tree.leaves, (grads, direction)), strict=True))
        np.testing.assert_allclose(float(along), float(slope), rtol=1e-6)


def test_rows_without_a_pair_count_nothing():
    three, more = batch(3), next(iter(data.PreferenceWindows(pairs_from(0, 3), 4))).arrays()
    assert more["tokens"].shape[0] == 4 and not more["weights"][3].any()
    values = [jax.jit(lambda p, b: objective().loss(p, b, base(), reduction="mean"))(adapters().weights, rows)
              for rows in (three, more)]  # fmt: skip
    assert float(objective().count(more)) == 3.0
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *values)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param("dpo", marks=pytest.mark.slow), "full dpo"])
def test_a_base_in_half_precision_is_its_own_reference(place, kind, monkeypatch):
    from tests import tuning_program

    load = tuning_program.load_base
    monkeypatch.setattr(tuning_program, "load_base", lambda path: load(path, dtype="bfloat16"))
    record = next(r for r in tune(place, kind, max_steps=1, lora_dropout=0.0).records if r.phase == "train")
    assert record.loss == pytest.approx(np.log(2), rel=1e-6) and abs(record.margin) < 1e-5


@pytest.mark.parametrize("kind", ["dpo", pytest.param("full dpo", marks=pytest.mark.slow)])
def test_a_run_starts_from_its_reference_and_learns_to_prefer(place, kind):
    result = tune(place, kind, max_steps=8, lora_dropout=0.0)
    records = [record for record in result.records if record.phase == "train"]
    assert records[0].loss == pytest.approx(np.log(2), rel=1e-6) and abs(records[0].margin) < 1e-5
    assert records[-1].loss < 0.6 and records[-1].accuracy == 1.0 and records[-1].margin > 0.1
    assert result.validation.margin > 0.05 and result.validation.tokens == 2
    assert result.validation.bits_per_byte is None


def test_micro_batches_add_up_to_the_batch(place):
    whole = tune(place, "full dpo", max_steps=1, batch_size=4)
    parts = tune(place, "full dpo", max_steps=1, batch_size=2, grad_accumulation_steps=2)
    for name in ("loss", "margin", "accuracy", "grad_norm"):
        assert getattr(parts.records[1], name) == pytest.approx(getattr(whole.records[1], name), rel=1e-5, abs=1e-6)


def test_the_wrong_rows_and_options_are_refused(place, tmp_path):
    with pytest.raises(DataError, match=r"objective sft needs examples with one answer.*use objective dpo"):
        prepare_from(place, "pairs", "lora")
    with pytest.raises(DataError, match=r"objective dpo needs rows of prompt, chosen and rejected.*use objective sft"):
        prepare_from(place, "examples", "dpo")
    for wrong in ({"beta": 0.0}, {"packing": True}, {"loss_on": "all"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            finetuning.TuneConfig(objective="dpo", **wrong)
    write(tmp_path / "same.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "b"}])
    with pytest.raises(DataError, match="identical answers"):
        data.encode_preferences(TOKENIZER, data.read_examples(tmp_path / "same.jsonl").rows, 64)


def prepare_from(place, rows: str, kind: str):
    base_, _, training = prepare(place, "full", {})
    splits = data.load_examples(place / rows)
    options = finetuning.TuneConfig(objective="dpo" if kind == "dpo" else "sft")
    return finetuning.prepare(base_, options, training, splits, template="{{ messages }}")
