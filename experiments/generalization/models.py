"""What the protocol needs done: a base pretrained, candidates trained from it, models scored."""

import dataclasses
import functools
import math
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.generalization.protocol import Candidate, Figures
from riftco import bundle, data, models, tokenizers, train
from riftco.tokenizers import chat
from riftco.tune import bases, finetuning

BATCH = 64


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large an experiment is."""

    layers: int
    width: int
    context: int
    vocabulary: int
    base_bytes: int
    base_steps: int
    rows: int
    steps: int
    batch_size: int


def pretrained(directory: Path, scale: Scale) -> bases.Base:
    """The base of a scale: little stories, and questions with answers; made once and kept in `directory`."""
    if not (directory / bundle.MANIFEST).is_file():
        rows = data.generate_instructions(scale.base_bytes // 200, seed=1)
        text = "".join(f"{row['prompt']}\n{row['completion']}\n\n" for row in rows)
        text += data.generate_stories(scale.base_bytes, seed=1)
        tokenizer = tokenizers.BPETokenizer.train(text, scale.vocabulary)
        ids = data.encode_text(tokenizer, text)
        config = models.DecoderConfig(
            vocab_size=tokenizer.vocab_size, context=scale.context, width=scale.width, heads=scale.width // 32,
            layers=scale.layers, hidden=2 * scale.width, mlp="swiglu", norm="rms", position="rope",
        )  # fmt: skip
        options = train.TrainConfig(
            max_steps=scale.base_steps, batch_size=16, warmup_steps=scale.base_steps // 20, seed=1
        )
        source = data.UniformWindowSource(ids, config.context, options.rows_per_step, train.streams(1).data)
        params = train.train(config, options, source).params
        bundle.save(directory, params, config, tokenizer, chat_template=chat.PLAIN)
    return bases.load_base(directory)


class Lab:
    """Trains and scores from one base, with one program for each kind of model."""

    def __init__(self, base: bases.Base, scale: Scale, splits: dict[str, Any]) -> None:
        self.base, self.scale, self.files = base, scale, splits

    def rows(self, split: str, keep: Any = slice(None)) -> tuple[np.ndarray, ...]:
        """The examples of a split, or those that `keep` indexes, as arrays (ids, weights) [N, T + 1]."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing may be cut or left out: every figure is of whole answers
            encoded = data.encode_examples(
                self.base.tokenizer, self.files[split].rows, self.base.config.context, template=chat.PLAIN
            )
        width = self.base.config.context + 1
        ids, weights = np.zeros((len(encoded), width), np.int32), np.zeros((len(encoded), width), np.float32)
        for place, item in enumerate(encoded.items):
            ids[place, : len(item.ids)], weights[place, : len(item.ids)] = item.ids, item.weights
        return ids[keep], weights[keep]

    def train(self, candidate: Candidate, seed: int) -> Any:
        """(objective, what was trained)."""
        tuning = finetuning.TuneConfig(
            method=candidate.method, lora_r=candidate.rank or 1, lora_alpha=2.0 * (candidate.rank or 1)
        )
        options = train.TrainConfig(
            max_steps=self.scale.steps, batch_size=self.scale.batch_size, learning_rate=candidate.learning_rate,
            warmup_steps=self.scale.steps // 20, seed=seed,
        )  # fmt: skip
        splits = {"train": self.files["train"]}
        prepared = finetuning.prepare(self.base, tuning, options, splits, template=chat.PLAIN)
        result = train.train(
            self.base.config, options, prepared.source, params=prepared.params, objective=prepared.objective
        )
        return prepared.objective, result.params

    def score(self, model: Any, rows: tuple[np.ndarray, ...]) -> Figures:
        """Loss, accuracy and exact answers of a model, or of the base for None."""
        params, adapters = (self.base.params, None) if model is None else model[0].parts(model[1], model[0].frozen)
        sums = np.zeros(3)
        ids, weights = rows
        for start in range(0, len(ids), BATCH):
            part = [np.zeros((BATCH, array.shape[1]), array.dtype) for array in rows]
            for padded, array in zip(part, rows, strict=True):
                padded[: len(array) - start] = array[start : start + BATCH]
            sums += np.asarray(_score(params, adapters, *part, config=self.base.config), np.float64)
        targets, answers = float(np.count_nonzero(weights[:, 1:])), len(ids)
        figures = {"loss": sums[0] / targets, "accuracy": sums[1] / targets, "exact": sums[2] / answers}
        if not all(map(math.isfinite, figures.values())):
            raise ArithmeticError(f"a model's figures must be finite; got {figures}")
        return figures


@functools.partial(jax.jit, static_argnames="config")
def _score(params: Any, adapters: Any, ids: jax.Array, weights: jax.Array, *, config: Any) -> jax.Array:
    """Sums over a batch: loss, right tokens, rows whose every answer token is the likeliest.

    Greedy decoding writes exactly the expected answer where, and only where, each of its tokens is the likeliest after
    those before it, so that one pass tells what generation would.
    """
    logits = models.forward(params, ids[:, :-1], config, adapters=adapters)
    targets, counts = ids[:, 1:], weights[:, 1:] != 0
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    right = jnp.argmax(logits, axis=-1) == targets
    whole = jnp.all(right | ~counts, axis=1) & jnp.any(counts, axis=1)
    sums = (jnp.where(counts, losses, 0.0), right & counts, whole)
    return jnp.stack([jnp.sum(values.astype(jnp.float32)) for values in sums])
