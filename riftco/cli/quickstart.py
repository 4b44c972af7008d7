"""`riftco quickstart`: from nothing to a trained model, with no file of the user's."""

import dataclasses
from pathlib import Path
from typing import Any

from riftco.cli import corpus, run_output
from riftco.cli.console import Console
from riftco.cli.model_options import decoder_config
from riftco.cli.options import flag
from riftco.cli.pretrain import CorpusOptions, TrainingOptions, fit, train_config
from riftco.cli.verbs import Action
from riftco.errors import ConfigError

_HELD_OUT = 0.02
_PROMPTS = ("There was once", "One summer day,", "Nina lived")
_GENERATION = {"do_sample": True, "temperature": 0.7, "top_k": 40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartOptions(TrainingOptions):
    """Options of `quickstart`: few, and the rest of a training run's for the curious."""

    corpus_bytes: int = flag(3_000_000, "how much text is made up")
    vocab_size: int = flag(1024, "the most ids of the tokenizer")
    max_seq_length: int = flag(128, "the context", group="model")
    layers: int = flag(3, "blocks", group="model")
    heads: int = flag(4, "query heads", group="model")
    width: int = flag(128, "the residual stream", group="model")
    max_steps: int = flag(700, "updates; 5 makes a smoke run", group="training")
    batch_size: int = flag(9, "rows of a micro-batch", group="training")
    learning_rate: float = flag(3e-3, "the highest rate", group="training")
    min_lr: float = flag(1e-4, "the floor that the schedule ends at", group="training")
    warmup_steps: int = flag(50, "updates in which the rate rises; a tenth of the run at most", group="training")
    beta2: float = flag(0.99, "Adam's decay of the second moment", group="training")
    weight_decay: float = flag(0.1, "decoupled decay of the weights of rank 2", group="training")
    out_dir: str = flag("runs/quickstart", "the run directory", group="run", metavar="DIR")
    resume: str = flag("auto", "an interrupted quickstart goes on where it was", group="run", metavar="auto|never|STEP")
    steps_per_eval: int = flag(350, "updates from one evaluation to the next", group="run")
    steps_per_report: int = flag(50, "updates from one printed line to the next", group="run")


def run(options: QuickstartOptions, console: Console) -> dict[str, Any]:
    """Corpus, tokenizer, model, training, bundle, samples, report, and what to type next."""
    from riftco import data, tokenizers

    # A smoke run of a few steps has no room for the usual warm-up.
    options = dataclasses.replace(options, warmup_steps=min(options.warmup_steps, options.max_steps // 10))
    if options.force:
        options = dataclasses.replace(options, resume="never")
    _refuse_another(options)
    shape = CorpusOptions(
        max_seq_length=options.max_seq_length, layers=options.layers, heads=options.heads, width=options.width
    )
    planned = train_config(options, decoder_config(shape, options.vocab_size))
    console.note(f"making up {options.corpus_bytes:,} bytes of little stories")
    training, held_out = stories(options.corpus_bytes, options.seed)
    console.note(f"training a tokenizer of {options.vocab_size:,} ids")
    tokenizer = tokenizers.train("bpe", training, vocab_size=options.vocab_size, pattern="gpt2")
    text = corpus.Corpus(
        tokenizer,
        data.encode_text(tokenizer, training),
        None if held_out is None else data.encode_text(tokenizer, held_out),
        {"stories": {"bytes": options.corpus_bytes, "seed": options.seed}},
    )
    config = decoder_config(shape, tokenizer.vocab_size)
    result = fit(options, planned, config, text, console)
    summary = run_output.finish(
        result, config, text, console, prompts=list(_PROMPTS), seed=options.seed, generation=_GENERATION, stop=("\n\n",)
    )
    place = options.out_dir
    if summary["loss"] is not None:
        console.say(
            f"validation loss {summary['loss']:.3f}, perplexity {summary['perplexity']:.2f}, "
            f"{summary['bits_per_byte']:.3f} bits per byte\n"
        )
    console.say(
        f"What to type next:\n"
        f"  riftco generate {place} --prompt 'One morning, Clara' --temp 0.7\n"
        f"  riftco inspect {place}/final\n"
        f"  riftco pretrain --data 'your/texts/*.txt' --preset small --out-dir runs/mine\n"
        f"and open {place}/report.html in a browser. {place}/final opens in transformers as it is."
    )
    return summary


def stories(corpus_bytes: int, seed: int, validation_fraction: float | None = None) -> tuple[str, str | None]:
    """The quickstart's training text and the text that it holds out, the same wherever they are made up.

    Args:
        corpus_bytes: of both together.
        seed: what decides them.
        validation_fraction: the share that is held out; None for the quickstart's own, 0 for none.
    """
    from riftco import data

    text = data.generate_stories(corpus_bytes, seed)
    share = _HELD_OUT if validation_fraction is None else validation_fraction
    return data.split_text(text, share) if share else (text, None)


def _refuse_another(options: QuickstartOptions) -> None:
    """A finished quickstart of another length is not gone on with in silence."""
    import yaml

    place = Path(options.out_dir)
    if options.force or not (place / "final").is_dir() or not (place / "config.yaml").is_file():
        return
    content = yaml.safe_load((place / "config.yaml").read_text(encoding="utf-8"))
    steps = content.get("max_steps") if isinstance(content, dict) else None
    if steps != options.max_steps:
        raise ConfigError(
            f"--out-dir {place} holds a finished run of {steps} steps, not {options.max_steps}; "
            "start over with --force, or choose another --out-dir"
        )


ACTIONS = {"": Action(QuickstartOptions, run, "train a model that writes little stories", None, "riftco quickstart")}
