"""`riftco pretrain`: text in, a run directory out."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from riftco import backend
from riftco.cli import corpus, run_output
from riftco.cli.console import Console
from riftco.cli.model_options import (
    Attention,
    DeviceOptions,
    Dtype,
    ModelOptions,
    check_attention,
    decoder_config,
)
from riftco.cli.options import flag
from riftco.cli.progress import Watcher, duration
from riftco.cli.verbs import Action
from riftco.errors import ConfigError

_DATA, _TRAINING, _RUN = "data", "training", "run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(DeviceOptions):
    """What becomes a `riftco.train.TrainConfig`, field by field; the defaults are that class's own."""

    max_steps: int = flag(1000, "updates in the whole run", group=_TRAINING)
    batch_size: int = flag(16, "rows of a micro-batch, all devices together", group=_TRAINING)
    grad_accumulation_steps: int = flag(1, "micro-batches in an update", group=_TRAINING)
    learning_rate: float = flag(1e-3, "the highest rate", group=_TRAINING)
    min_lr: float = flag(0.0, "the floor that the schedule ends at", group=_TRAINING)
    warmup_steps: int = flag(0, "updates in which the rate rises", group=_TRAINING)
    lr_schedule: Literal["cosine", "constant", "linear", "wsd"] = flag(
        "cosine", "how the rate goes on after that", group=_TRAINING
    )
    beta1: float = flag(0.9, "Adam's decay of the first moment", group=_TRAINING)
    beta2: float = flag(0.999, "Adam's decay of the second moment", group=_TRAINING)
    eps: float = flag(1e-8, "Adam's term under the fraction", group=_TRAINING)
    weight_decay: float = flag(0.0, "decoupled decay of the weights of rank 2", group=_TRAINING)
    max_grad_norm: float | None = flag(
        1.0, "the limit on the global gradient norm; none for no clipping", group=_TRAINING
    )
    page_size: int | None = flag(None, "scalars in a page of Adam's moments", group=_TRAINING, shown="not paged")
    dtype: Dtype = flag(  # noqa: RUF009
        "float32", "of activations and products; weights and moments stay float32", group=_TRAINING
    )
    attention: Attention | None = flag(  # noqa: RUF009
        None, "how attention is computed", group=_TRAINING, shown="the fastest here"
    )
    grad_checkpoint: Literal["none", "block"] = flag(
        "none", "block keeps each block's input and runs the block again backwards", group=_TRAINING
    )
    mesh: str | None = flag(
        None, "devices by axis: data=4, or data=2,fsdp=2", group=_TRAINING, metavar="AXES", shown="one device"
    )
    patience: int | None = flag(
        None, "stop after so many evaluations without a better loss", group=_TRAINING, shown="never"
    )
    seed: int = flag(0, "separate streams for weights, batches, dropout and samples derive from it", group=_TRAINING)
    out_dir: str = flag("runs/pretrain", "the run directory", group=_RUN, metavar="DIR")
    resume: str = flag(
        "never",
        "auto goes on from the last good checkpoint, a number from that step",
        group=_RUN,
        metavar="auto|never|STEP",
    )
    force: bool = flag(False, "remove the run that is there", group=_RUN)
    save_every: int = flag(500, "updates from one checkpoint to the next", group=_RUN)
    keep: int = flag(3, "how many of the latest checkpoints stay, the best one besides", group=_RUN)
    steps_per_eval: int = flag(250, "updates from one evaluation of the whole validation split to the next", group=_RUN)
    evaluate_first: bool = flag(True, "evaluate before the first update", group=_RUN)
    steps_per_report: int = flag(10, "updates from one printed line to the next", group=_RUN)
    peak_flops: float | None = flag(
        None, "of one device, for MFU", group=_RUN, shown="the published figure, where known"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusOptions(ModelOptions):
    """What is trained on, and its tokenizer."""

    data: tuple[str, ...] = flag(
        (), "text files, globs, .jsonl files with a text field, or one prepared dataset", group=_DATA, metavar="PATH …"
    )
    validation_fraction: float | None = flag(
        None, "share of the text, from its end, that is held out", group=_DATA, shown="0.1"
    )
    tokenizer: str | None = flag(
        None,
        "byte, bpe (split by GPT-2's pattern), or a directory with a tokenizer.json",
        group=_DATA,
        metavar="byte|bpe|DIR",
        shown="bpe, or the dataset's own",
    )
    min_frequency: int | None = flag(
        None, "how often a pair must occur to become a token of a BPE trained here", group=_DATA, shown="2"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainingOptions, CorpusOptions):
    """Options of `pretrain`."""

    prompt: str | None = flag(
        None, "what the samples at the end begin with", group=_RUN, shown="the first words that are held out"
    )


def run(options: PretrainOptions, console: Console) -> dict[str, Any]:
    """Data, tokenizer, model, training, bundle, samples, report."""
    backend.choose(options.device)
    training = train_config(options, decoder_config(options))
    text = corpus.load(
        options.data,
        tokenizer=options.tokenizer,
        vocab_size=_preset_vocabulary(options.preset) if options.vocab_size is None else options.vocab_size,
        min_frequency=options.min_frequency,
        validation_fraction=options.validation_fraction,
        note=console.note,
    )
    config = decoder_config(options, _rows(options, text))
    prompts = [run_output.opening(text) if options.prompt is None else options.prompt]
    run_output.check_prompts(prompts, text.tokenizer)
    result = fit(options, training, config, text, console)
    summary = run_output.finish(result, config, text, console, prompts=prompts, seed=options.seed)
    console.say(f"saved {summary['bundle']}; continue a text with: riftco generate {options.out_dir} --prompt '…'")
    return summary


def train_config(options: Any, config: Any, **changes: Any) -> Any:
    """The `TrainConfig` of `TrainingOptions`, with everything refused that can be before any data are read.

    Args:
        options: `TrainingOptions` and whatever else.
        config: a decoder of the shape that will be trained, whatever its vocabulary; None where it is not known yet.
        **changes: fields that the options say otherwise, or not at all.

    Raises:
        ConfigError, CheckpointError: an option, or the directory as it is, rules the run out.
    """
    from riftco import train

    names = [field.name for field in dataclasses.fields(train.TrainConfig) if hasattr(options, field.name)]
    settings = {name: getattr(options, name) for name in names}
    data = getattr(options, "data", None)
    settings |= {"data": data if isinstance(data, str) else " ".join(data or ()) or None, "dropout": None}
    training = train.TrainConfig(**{**settings, **changes})
    train.is_fresh(training)
    if config is not None:
        check_attention(config, training.attention)
    return training


def fit(options: Any, training: Any, config: Any, text: corpus.Corpus, console: Console) -> Any:
    """Train as the options say; the `TrainResult`.

    Args:
        options: `TrainingOptions` and whatever else; all of it is recorded in config.yaml.
        training: what `train_config` made of them.
        config: the decoder.
        text: the corpus.
        console: where progress goes.
    """
    from riftco import data, train

    context = config.context
    source = data.UniformWindowSource(text.train, context, training.rows_per_step, train.streams(options.seed).data)
    validation = None
    if text.validation is not None:
        validation = data.evaluation_windows(text.validation, context, training.batch_size, padded=True)
    backend.select(options.device)
    resolved = run_output.resolved(options, config)
    console.note(run_output.as_yaml(resolved).rstrip())
    with Watcher(console, training.max_steps) as watcher:

        def on_event(event: Any) -> None:
            if isinstance(event, train_started):
                run_output.write_config(Path(options.out_dir), resolved)
            watcher(event)

        from riftco.train.events import RunStarted as train_started

        result = train.train(
            config, training, source, validation=validation, tokenizer=text.tokenizer, on_event=on_event
        )
    console.note(f"step {result.step:,} reached ({result.reason.replace('_', ' ')}) in {duration(result.seconds)}")
    return result


def _preset_vocabulary(name: str | None) -> int | None:
    from riftco.models.presets import PRESETS

    return PRESETS[name]["vocab_size"] if name in PRESETS else None


def _rows(options: PretrainOptions, text: corpus.Corpus) -> int:
    """The model's vocabulary: the tokenizer's, or more where --vocab-size asks for unused rows."""
    ids, is_trained_here = text.tokenizer.vocab_size, options.tokenizer in (None, "bpe") and "dataset" not in text.facts
    if options.vocab_size is None or is_trained_here:
        return ids
    if options.vocab_size < ids:
        raise ConfigError(
            f"--vocab-size must be at least the {ids} ids of the tokenizer; got {options.vocab_size}; "
            "leave it out, or train a smaller tokenizer"
        )
    return options.vocab_size


ACTIONS = {
    "": Action(
        PretrainOptions, run, "train a model from text", "data",
        "riftco pretrain --data 'texts/*.txt' --preset small --max-steps 2000 --out-dir runs/small",
    )
}  # fmt: skip
