"""`riftco finetune`: a model and examples in, a run directory with the tuned model or its adapters out."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from riftco import backend
from riftco.cli import models, run_output
from riftco.cli.console import Console
from riftco.cli.options import UsageError, flag
from riftco.cli.pretrain import TrainingOptions, train_config
from riftco.cli.progress import Watcher, duration
from riftco.cli.verbs import Action

_TUNING, _TRAINING, _RUN = "tuning", "training", "run"
_RATES = {"full": 5e-5, "lora": 2e-4, "qlora": 2e-4}
_SAMPLE_TOKENS = 128
# Options that do nothing elsewhere: name -> (the option that decides, its values with which they do something).
_BELONGS = {
    **dict.fromkeys(
        ("lora_r", "lora_alpha", "lora_dropout", "rslora", "target_modules"), ("method", ("lora", "qlora"))
    ),
    **dict.fromkeys(("block_size", "double_quant"), ("method", ("qlora",))),
    "beta": ("objective", ("dpo",)),
    **dict.fromkeys(("packing", "loss_on"), ("objective", ("sft",))),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions):
    """Options of `finetune`."""

    model: str | None = flag(
        None, "what is tuned: a bundle, a run directory, a Hugging Face directory or a .gguf file", metavar="PATH"
    )
    data: str | None = flag(
        None, "a .jsonl file, or a directory with train.jsonl and perhaps valid.jsonl", metavar="PATH"
    )
    method: Literal["full", "lora", "qlora"] = flag(
        "lora", "all weights; adapters beside the base; adapters beside the base in 4 bits", group=_TUNING
    )
    objective: Literal["sft", "dpo"] = flag(
        "sft", "learn the responses; or prefer the chosen answer to the rejected one", group=_TUNING
    )
    lora_r: int = flag(8, "the rank of adapters", group=_TUNING)
    lora_alpha: float = flag(16.0, "the numerator of their scale", group=_TUNING)
    lora_dropout: float = flag(0.0, "the dropout rate on their input", group=_TUNING)
    rslora: bool = flag(False, "scale by alpha / √rank, not alpha / rank", group=_TUNING)
    target_modules: tuple[str, ...] = flag(
        ("all-linear",), "linear layers with adapters: query, attention.query, feed_forward, q_proj, …",
        group=_TUNING, metavar="NAME …", shown="all but the head",
    )  # fmt: skip
    packing: bool = flag(False, "fill rows with several examples, kept apart", group=_TUNING)
    loss_on: Literal["response", "all"] = flag("response", "which tokens are learned", group=_TUNING)
    max_length: int | None = flag(
        None, "tokens of an example that are read", group=_TUNING, shown="the model's context, at most 512"
    )
    chat_template: str | None = flag(
        None, "a Jinja file, or plain for the built-in one", group=_TUNING, metavar="FILE|plain",
        shown="the model's own, else plain",
    )  # fmt: skip
    block_size: int = flag(64, "weights that share a maximum in 4 bits", group=_TUNING)
    double_quant: bool = flag(True, "quantise the maxima too", group=_TUNING)
    beta: float = flag(0.1, "dpo: how strongly answers are held to the start", group=_TUNING)
    max_steps: int = flag(200, "updates in the whole run", group=_TRAINING)
    batch_size: int = flag(8, "examples, or pairs, or packed rows of a micro-batch", group=_TRAINING)
    learning_rate: float | None = flag(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "the highest rate", group=_TRAINING, shown="5e-05 for full, 0.0002 for adapters; a tenth of it for dpo"
    )
    dropout: float | None = flag(None, "the model's own dropout", group=_TRAINING, shown="the model's")
    out_dir: str = flag("runs/finetune", "the run directory", group=_RUN, metavar="DIR")
    save_every: int = flag(100, "updates from one checkpoint to the next", group=_RUN)
    steps_per_eval: int = flag(50, "updates from one evaluation of valid.jsonl to the next", group=_RUN)


def run(options: FinetuneOptions, console: Console) -> dict[str, Any]:
    """Model, examples, training, the bundle or the adapters, a sample, the report."""
    if not options.data:
        raise UsageError("--data is required: a .jsonl file of examples, or a directory with train.jsonl")
    _refuse_idle(options)
    path = models.require(options.model)
    backend.choose(options.device)
    from riftco import train, tune
    from riftco.bundle.directories import keep_source
    from riftco.interchange.loading import locate
    from riftco.tune import bases, finetuning

    tuning = finetuning.TuneConfig(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(finetuning.TuneConfig)}
    )
    keep_source("finetune", options.out_dir, locate(path)[0])
    keep_source("finetune", options.out_dir, options.data)
    rate = _RATES[options.method] * (0.1 if options.objective == "dpo" else 1.0)
    rate = rate if options.learning_rate is None else options.learning_rate
    training = train_config(options, None, learning_rate=rate, dropout=options.dropout)
    splits = _examples(options.data, console)
    backend.select(options.device)
    base = bases.load_base(path)
    template = models.chat_template(options.chat_template, base.tokenizer, console.note)
    kept = Path(options.out_dir) / "base"
    packed = None
    if options.method == "qlora" and not train.is_fresh(training) and (kept / "riftco.json").is_file():
        packed = bases.load_base(kept).params
    with models.noted(console):
        prepared = finetuning.prepare(base, tuning, training, splits, template=template, packed=packed)
    del packed
    for split, report in prepared.reports.items():
        console.note(f"{'warning: ' if report.skipped or report.truncated else ''}{split}: {report}")
    if "validation" not in splits:
        console.note("no valid.jsonl, so nothing is held out; riftco data split makes one")
    if finetuning.PACKED in prepared.facts:
        console.note(str(tune.memory_report(prepared.objective.frozen[0], base.config)))
    if options.method != "full":
        console.note(f"{prepared.objective.trained_count():,} scalars are trained, in adapters")
    # What was decided here stands in config.yaml: riftco eval reads examples as the run did.
    options = dataclasses.replace(options, max_length=finetuning.read_length(tuning, base.config))
    if options.method == "qlora":
        base = dataclasses.replace(base, params=None)  # training beside 4 bits needs no memory for more
    result = _fit(options, training, base, prepared, console)
    return _finish(options, result, base, prepared, splits, console)


def _refuse_idle(options: FinetuneOptions) -> None:
    """An option that would change nothing is a mistake about what is being done."""
    defaults = {field.name: field.default for field in dataclasses.fields(FinetuneOptions)}
    for name, (decides, values) in _BELONGS.items():
        if getattr(options, name) != defaults[name] and getattr(options, decides) not in values:
            raise UsageError(
                f"--{name.replace('_', '-')} is for --{decides} {' and '.join(values)}; got it with "
                f"{getattr(options, decides)}; leave it out"
            )


def _examples(path: str, console: Console) -> dict[str, Any]:
    from riftco import data

    with models.noted(console):
        return data.load_examples(path)


def _fit(options: FinetuneOptions, training: Any, base: Any, prepared: Any, console: Console) -> Any:
    from riftco import train
    from riftco.cli.model_options import check_attention
    from riftco.train.events import RunStarted
    from riftco.tune import finetuning

    check_attention(base.config, training.attention)
    place = Path(options.out_dir)
    resolved = run_output.resolved(options)
    with Watcher(console, training.max_steps) as watcher:

        def on_event(event: Any) -> None:
            if isinstance(event, RunStarted):
                run_output.write_config(place, resolved)
                finetuning.keep_packed(place / "base", base, prepared)
            watcher(event)

        result = train.train(
            base.config,
            training,
            prepared.source,
            validation=prepared.validation,
            params=prepared.params,
            tokenizer=base.tokenizer,
            on_event=on_event,
            objective=prepared.objective,
        )
    console.note(f"step {result.step:,} reached ({result.reason.replace('_', ' ')}) in {duration(result.seconds)}")
    return result


def _finish(
    options: FinetuneOptions, result: Any, base: Any, prepared: Any, splits: dict[str, Any], console: Console
) -> dict[str, Any]:
    """The bundle or the adapters, a sample and the report: all of a new run, of an old one what is missing."""
    from riftco import bundle
    from riftco.report import write_report
    from riftco.tune import finetuning

    place = Path(options.out_dir)
    final, is_new = place / "final", result.reason != "already_finished"
    if is_new or not (final / bundle.MANIFEST).is_file():
        steps = {"training": {"steps": result.step, "seed": options.seed}}
        finetuning.save(final, base, prepared, result.params, fingerprints=steps, force=final.exists())
    if is_new or not (place / "samples.jsonl").is_file():
        row = _sample(options, result, base, prepared, splits)
        run_output.replace(place / "samples.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
    else:
        (row,) = run_output.read_samples(place)
    if is_new or not (place / "report.html").is_file():
        write_report(place)
    console.say(f"\n{row['prompt']}{row['text']}\n")
    last = result.validation
    if last is not None:
        figures = f"validation loss {last.loss:.4f}"
        pairs = "" if last.accuracy is None else f", reward accuracy {last.accuracy:.3f}, margin {last.margin:.4f}"
        console.say(figures + (pairs or f", perplexity {last.perplexity:.2f}"))
    if options.method == "full":
        console.say(f"saved {final}; riftco generate {place} --prompt '…'")
    else:
        console.say(
            f"saved {final}; riftco generate {options.model} --adapter {place} --prompt '…', or make one model of "
            f"both: riftco merge --model {options.model} --adapter {place} --out-dir …"
        )
    first = next((record for record in result.records if record.phase == "train"), None)
    final_train = next((record for record in reversed(result.records) if record.phase == "train"), None)
    return {
        "out_dir": place,
        "method": options.method,
        "objective": options.objective,
        "steps": result.step,
        "reason": result.reason,
        "seconds": result.seconds,
        "first_loss": None if first is None else first.loss,
        "last_loss": None if final_train is None else final_train.loss,
        "loss": None if last is None else last.loss,
        "accuracy": None if last is None else last.accuracy,
        "margin": None if last is None else last.margin,
        "best_step": result.best.step,
        "final": final,
        "report": place / "report.html",
        "samples": [row["text"]],
    }


def _sample(options: FinetuneOptions, result: Any, base: Any, prepared: Any, splits: dict[str, Any]) -> dict[str, Any]:
    """What the tuned model answers to the first held-out prompt, as a line of samples.jsonl."""
    from riftco import data
    from riftco.cli import generate
    from riftco.tokenizers import chat
    from riftco.tune import finetuning

    row = splits.get("validation", splits["train"]).rows[0]
    tokenizer, template = base.tokenizer, prepared.facts["chat_template"]
    is_pair = isinstance(row, data.Preference)
    messages = list(row.prompt if is_pair else row.messages)
    while len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages.pop()
    if messages:
        prompt = chat.render_text(
            messages, template, add_generation_prompt=True,
            special_tokens=chat.special_tokens(tokenizer),
        )  # fmt: skip
    else:
        prompt = "" if is_pair else " ".join(row.text.split(" ")[:4])
    ids = generate.prompt_ids(prompt, tokenizer)[: base.config.context]
    trained = finetuning.trained(prepared.objective, result.params)
    if options.method == "full":
        model = models.in_memory(base, trained, None)
    else:
        model = models.in_memory(base, prepared.objective.frozen[0], trained)
    settings = {**generate.NEUTRAL, "temperature": 0.0}
    text = "".join(generate.write(model, ids, _SAMPLE_TOKENS, settings, options.seed, (), []))
    return {"step": result.step, "prompt": prompt, "text": text, "seed": options.seed, **settings}


ACTIONS = {
    "": Action(
        FinetuneOptions, run, "tune a model on examples: all weights, or adapters; on responses, or preferences",
        None, "riftco finetune --model runs/small --data examples --method lora --out-dir runs/tuned",
    )
}  # fmt: skip
