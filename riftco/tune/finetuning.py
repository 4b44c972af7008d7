"""From a model, examples and options to what a training run needs; and from its result to what is kept.

`prepare` makes objective, start, batches and held-out examples for `riftco.train.train`; `save` writes the bundle or
the adapters. The command line (riftco/cli/finetune.py) is one way to call them.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from riftco import bundle, data
from riftco.bundle.peft import modules
from riftco.errors import ConfigError, DataError
from riftco.models.adapters import HEAD, Adapters, check_options, match_targets, projections
from riftco.models.config import DecoderConfig
from riftco.train import Objective, TrainConfig, streams
from riftco.tune.bases import PACKED, Base, packed_digest
from riftco.tune.lora import lora_init
from riftco.tune.objectives import Preferences, Supervised, template_of
from riftco.tune.quantization import quantize
from riftco.types import PyTree

Method = Literal["full", "lora", "qlora"]
Goal = Literal["sft", "dpo"]
ALL_LINEAR = "all-linear"
_LONGEST = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Every choice of post-training that is not a `TrainConfig`'s.

    Raises:
        ConfigError: for a value that is not acceptable, in one sentence.
    """

    method: Method = "lora"
    """What is trained: all weights, or adapters beside a base that is plain (lora) or in 4 bits (qlora)."""
    objective: Goal = "sft"
    """Responses, or preferences between two."""
    lora_r: int = 8
    """The rank of adapters."""
    lora_alpha: float = 16.0
    """The numerator of their scale."""
    lora_dropout: float = 0.0
    """The dropout rate on their input."""
    rslora: bool = False
    """Whether the scale is alpha / √rank."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Which linear layers have adapters: riftco's names or the published ones (q_proj); every one but the head."""
    packing: bool = False
    """Several examples in a row, kept apart; else one."""
    loss_on: Literal["response", "all"] = "response"
    """What counts: the answers, or every token."""
    max_length: int | None = None
    """Tokens of an example that are read; None for the model's context, at most 512."""
    block_size: int = 64
    """Weights that share a maximum in 4 bits."""
    double_quant: bool = True
    """Whether the maxima are quantised too."""
    beta: float = 0.1
    """How far preferences may lead from the start."""

    def __post_init__(self) -> None:
        for name, kind in (("method", Method), ("objective", Goal)):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise ConfigError(f"TuneConfig: {name} must be one of {choices}; got {getattr(self, name)!r}")
        check_options(self.lora_r, self.lora_alpha, self.rslora, self.lora_dropout)
        if not (isinstance(self.beta, int | float) and 0.0 < self.beta < float("inf")):
            raise ConfigError(f"TuneConfig: beta must be a finite number above 0; got {self.beta!r}")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"TuneConfig: max_length must be at least 1; got {self.max_length}")
        if self.objective == "dpo" and (self.packing or self.loss_on == "all"):
            what = "packing" if self.packing else "loss_on all"
            raise ConfigError(f"TuneConfig: {what} is for objective sft; got dpo, whose rows are pairs; leave it out")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What `riftco.train.train` needs.

    Attributes:
        objective: what is trained and minimised.
        params: what a fresh run starts from.
        source: batches.
        validation: held-out examples, or None.
        reports: what became of the examples, by split.
        facts: what is recorded in riftco.json.
    """

    objective: Supervised
    params: PyTree
    source: Any
    validation: Any
    reports: dict[str, data.EncodingReport]
    facts: dict[str, Any]


def targets_of(names: Sequence[str], config: DecoderConfig) -> tuple[str, ...]:
    """The projections that names mean: riftco's own, published ones ("q_proj"), or "all-linear".

    Raises:
        ConfigError: for a name that is neither; what there is, is named.
    """
    own: list[str] = []
    for name in names:
        if name == ALL_LINEAR:
            own += [projection for projection in projections(config) if projection != HEAD]
            continue
        held = [parts for module, parts in modules(config).items() if f".{name}." in f".{module}."]
        published = {".".join(part.split(".")[2:]) if part != HEAD else HEAD for parts in held for part in parts}
        own += sorted(published) or [name]
    return match_targets(own, config)


def prepare(
    base: Base,
    options: TuneConfig,
    train_config: TrainConfig,
    splits: Mapping[str, data.ExampleFile],
    *,
    template: str,
    packed: PyTree = None,
) -> Prepared:
    """Everything for a run.

    Args:
        base: what is tuned.
        options: how.
        train_config: the run: batch size and seed.
        splits: of `riftco.data.load_examples`: "train" and perhaps "validation".
        template: how conversations are written, Jinja; it is kept with what is trained.
        packed: the base in 4 bits, where it was packed before; qlora packs it itself otherwise.

    Raises:
        ConfigError, DataError, TokenizerError, DomainError: for options or examples that do not fit the model.

    Warns:
        UserWarning: if examples are left out.
    """
    config = base.config
    if options.method == "full" and base.is_packed:
        raise ConfigError("finetune: method full needs plain weights; the model is in 4 bits; use lora or qlora")
    encoded = _encoded(base.tokenizer, options, splits, config, template)
    about: dict[str, Any] = {"objective": options.objective, "method": options.method, "base": base.identity}
    about["data"] = {split: rows.fingerprint for split, rows in encoded.items()}
    about |= {"beta": float(options.beta)} if options.objective == "dpo" else {"loss_on": options.loss_on}
    about["template"] = hashlib.sha256(template.encode()).hexdigest()
    frozen, adapters, params = base.params, None, base.params
    facts: dict[str, Any] = {}
    if options.method == "qlora" and not base.is_packed:
        how = {"block_size": options.block_size, "double_quant": options.double_quant}
        frozen = quantize(base.params, config, **how) if packed is None else packed
        facts[PACKED] = {**how, "packed": packed_digest(frozen, config)}
    if options.method != "full":
        targets = targets_of(options.target_modules, config)
        adapters = lora_init(
            streams(train_config.seed).init, frozen, config, targets=targets, rank=options.lora_r,
            alpha=options.lora_alpha, rslora=options.rslora, dropout=options.lora_dropout,
        )  # fmt: skip
        params = adapters.weights
        about["adapters"] = {
            "targets": list(targets), "rank": adapters.rank, "alpha": adapters.alpha, "rslora": adapters.rslora,
            "dropout": adapters.dropout,
        }  # fmt: skip
    about |= facts
    needs_base = adapters is not None or options.objective == "dpo"
    shared: dict[str, Any] = {
        "config": config,
        "frozen": (frozen,) if needs_base else (),
        "adapters": None if adapters is None else template_of(adapters),
        "facts": about,
    }
    rows, seed = train_config.rows_per_step, streams(train_config.seed).data
    held_out = encoded.get("validation")
    if options.objective == "dpo":
        objective = Preferences(**shared, beta=float(options.beta))
        source: Any = data.PreferenceSource(encoded["train"], rows, seed)
        windows: Any = held_out and data.PreferenceWindows(held_out, train_config.batch_size)
    else:
        objective = Supervised(**shared)
        kind = data.PackedExampleSource if options.packing else data.PaddedExampleSource
        source = kind(encoded["train"], rows, seed)
        windows = held_out and data.ExampleWindows(held_out, train_config.batch_size)
    files = {split: {"sha256": splits[split].sha256, "examples": rows.report.kept} for split, rows in encoded.items()}
    facts |= {"data": files, "objective": {k: v for k, v in about.items() if k not in (PACKED, "base")}}
    facts["chat_template"] = template
    reports = {split: rows.report for split, rows in encoded.items()}
    return Prepared(objective, params, source, windows, reports, facts)


def _encoded(
    tokenizer: Any,
    options: TuneConfig,
    splits: Mapping[str, data.ExampleFile],
    config: DecoderConfig,
    template: str,
) -> dict[str, data.EncodedSet]:
    """Training and held-out examples as tokens."""
    if tokenizer is None:
        raise ConfigError("finetune: the model must have a tokenizer; it has none; add its tokenizer.json")
    context = read_length(options, config)
    if context > config.context:
        raise ConfigError(
            f"finetune: max_length must be at most the model's context of {config.context}; got {context}; lower it"
        )
    is_pairs = splits["train"].format == "preference"
    if is_pairs != (options.objective == "dpo"):
        wanted = "rows of prompt, chosen and rejected" if options.objective == "dpo" else "examples with one answer"
        other = "sft" if options.objective == "dpo" else "dpo"
        raise DataError(
            f"finetune: objective {options.objective} needs {wanted}; '{splits['train'].path}' holds "
            f"{splits['train'].format} rows; use objective {other}, or other data"
        )
    found = {}
    for split in ("train", "validation"):
        if split in splits and is_pairs:
            found[split] = data.encode_preferences(tokenizer, splits[split].rows, context, template=template)
        elif split in splits:
            found[split] = data.encode_examples(
                tokenizer, splits[split].rows, context, template=template, loss_on=options.loss_on
            )
    return found


def read_length(options: TuneConfig, config: DecoderConfig) -> int:
    """How many tokens of an example are read."""
    return min(config.context, _LONGEST) if options.max_length is None else options.max_length


def trained(objective: Objective, params: PyTree) -> Adapters | PyTree:
    """What a run trained: `Adapters`, or all weights."""
    adapters = objective.adapters if isinstance(objective, Supervised) else None
    return params if adapters is None else dataclasses.replace(adapters, weights=jax.tree.map(jnp.asarray, params))


def save(
    directory: str | os.PathLike[str],
    base: Base,
    prepared: Prepared,
    params: PyTree,
    *,
    fingerprints: Mapping[str, Any] | None = None,
    force: bool = False,
) -> str:
    """Write what a run trained: a bundle for all weights, else a bundle of adapters that names the base.

    Args:
        directory: where.
        base: what was tuned.
        prepared: of `prepare`.
        params: what the run trained: `TrainResult.params`.
        fingerprints: more JSON values to record.
        force: replace what is there, if it is one.

    Returns:
        The artifact_id.

    Raises:
        BundleError: as `riftco.bundle.save` and `save_adapters`.
    """
    facts, stage = {**prepared.facts, **(fingerprints or {})}, prepared.facts["objective"]["objective"]
    result = trained(prepared.objective, params)
    if isinstance(result, Adapters):
        return bundle.save_adapters(
            directory, result, base.config, base=base.identity, base_path=str(base.path), stage=stage,
            fingerprints=facts, force=force,
        )  # fmt: skip
    template = facts.pop("chat_template")
    return bundle.save(
        directory, result, base.config, base.tokenizer, stage=stage, parent=base.identity, fingerprints=facts,
        generation=base.generation, chat_template=template, force=force,
    )  # fmt: skip


def keep_packed(directory: Path, base: Base, prepared: Prepared) -> None:
    """Write the base in 4 bits beside a run that trains adapters beside it, unless it is there.

    Raises:
        BundleError: it cannot be written.
    """
    if PACKED in prepared.facts and not (directory / bundle.MANIFEST).is_file():
        bundle.save_packed(
            directory, prepared.objective.frozen[0], base.config, base.tokenizer, base=base.identity,
            fingerprints={PACKED: prepared.facts[PACKED]}, generation=base.generation,
            chat_template=base.chat_template, force=directory.exists(),
        )  # fmt: skip
