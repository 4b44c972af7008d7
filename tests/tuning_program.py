"""One small model, examples for it, and post-training of it as a function."""

import json
from pathlib import Path
from typing import Any

import jax

from riftco import bundle, data, models, tokenizers
from riftco.tokenizers import chat
from riftco.train import TrainConfig, TrainResult, train
from riftco.tune import finetuning
from riftco.tune.bases import Base, load_base
from tests.training_program import compilation_cache

WORDS = "red blue green gold pink grey".split()
ROWS = [{"prompt": f"say {word}", "completion": f"{word} {word}."} for word in WORDS]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no."} for row in ROWS]
TOKENIZER = tokenizers.ByteTokenizer.train(("### User:\nAssistant " + json.dumps([ROWS, PAIRS])).encode())
CONFIG = models.DecoderConfig(
    TOKENIZER.vocab_size, 64, 16, 2, 1, 32, norm="rms", mlp="swiglu", position="rope", kv_heads=1
)
OPTIONS: dict[str, Any] = {
    "batch_size": 4, "max_steps": 5, "learning_rate": 1e-2, "lr_schedule": "constant", "save_every": 2,
    "steps_per_eval": 4, "seed": 3,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora", "lora_r": 3, "lora_dropout": 0.25, "packing": True},
    "qlora": {"method": "qlora", "lora_r": 3, "lora_dropout": 0.25},
    "dpo": {"method": "lora", "lora_r": 3, "lora_dropout": 0.25, "objective": "dpo", "beta": 0.5},
    "full dpo": {"method": "full", "objective": "dpo"},
}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(place: Path) -> Path:
    """A directory with base/, examples/ and pairs/."""
    bundle.save(place / "base", models.init(jax.random.key(0), CONFIG), CONFIG, TOKENIZER)
    for name, rows in (("examples", ROWS), ("pairs", PAIRS)):
        write(place / name / "train.jsonl", rows[:4])
        write(place / name / "valid.jsonl", rows[4:])
    return place


def prepare(place: Path, kind: str, options: dict[str, Any], packed: Any = None) -> tuple[Base, Any, TrainConfig]:
    base = load_base(place / "base")
    tuning = finetuning.TuneConfig(**{**KINDS[kind], **{k: v for k, v in options.items() if k not in TRAIN}})
    training = TrainConfig(**{**OPTIONS, **{k: v for k, v in options.items() if k in TRAIN}})
    splits = data.load_examples(place / ("pairs" if tuning.objective == "dpo" else "examples"))
    return base, finetuning.prepare(base, tuning, training, splits, template=chat.PLAIN, packed=packed), training


TRAIN = frozenset(TrainConfig.__dataclass_fields__)


def tune(place: Path, kind: str, *, on_event: Any = None, packed: Any = None, **options: Any) -> TrainResult:
    """Tune the model with the options above, changed by `options`."""
    base, prepared, training = prepare(place, kind, options, packed)
    return train(
        base.config, training, prepared.source, validation=prepared.validation, params=prepared.params,
        tokenizer=base.tokenizer, on_event=on_event, objective=prepared.objective,
    )  # fmt: skip


def compilation(factory: Any) -> Any:
    """A cache of compiled programs for the tests of one process."""
    return compilation_cache(factory.getbasetemp() / "compiled")
