"""Whole steps compile: training over 4 and 8 TPU chips with the kernels inside, and decoding."""

import dataclasses

import pytest

from riftco import aot
from riftco.models import DecoderConfig
from riftco.train import TrainConfig

MODEL = DecoderConfig(256, 128, 128, 4, 2, 256, kv_heads=2, norm="rms", mlp="swiglu", position="rope")
TRAIN = TrainConfig(batch_size=16, dtype="bfloat16")


@pytest.mark.parametrize(
    ("target", "chips_used", "options"),
    [
        ("v5e:2x2", 4, {}),
        ("v5e:2x4", 8, {"mesh": "data=2,fsdp=4", "grad_accumulation_steps": 2}),
        ("v6e:2x2", 4, {"mesh": "fsdp=4", "grad_checkpoint": "block"}),
        ("v6e:1x1", 1, {"dtype": "float32"}),
        ("h200", 1, {}),
    ],
)
def test_a_training_step(chips, target, chips_used, options):
    report = aot.train_step(chips(target), MODEL, dataclasses.replace(TRAIN, **options))
    assert (report.chips, report.fits) == (chips_used, True)
    assert report.attention == ("pallas_triton" if target == "h200" else "pallas_tpu")
    # Forward, queries' gradient, keys' and values' gradient; the forward kernel once more where blocks run again.
    assert sum(report.kernels.values()) == (4 if "grad_checkpoint" in options else 3), report.kernels


def test_weights_and_moments_in_parts_take_less(chips):
    whole, parts = (
        aot.train_step(chips("v5e:2x2"), dataclasses.replace(MODEL, layers=1), dataclasses.replace(TRAIN, mesh=mesh))
        for mesh in ("data=4", "fsdp=4")
    )
    assert parts.arguments < whole.arguments / 3


@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:1x1", "h200"])
def test_a_decoding_step(chips, target):
    report = aot.decode_one(chips(target), MODEL, batch_size=8, dtype="bfloat16")
    assert report.fits and report.total > 0 and report.step == "decode"


def test_a_step_too_large_for_the_chip_is_refused_with_one_sentence(chips):
    from riftco.errors import BackendError

    model = dataclasses.replace(MODEL, context=2048, layers=8, hidden=8192)
    with pytest.raises(BackendError, match=r"must fit the [\d.]+G of memory .* it needs [\d.]+G; use a smaller batch"):
        aot.train_step(chips("v5e:1x1"), model, dataclasses.replace(TRAIN, batch_size=256))
