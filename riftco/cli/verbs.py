"""The verbs: which there are, where each lives, and which are for later; none is imported before it is typed."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from riftco.cli.console import Console


@dataclasses.dataclass(frozen=True)
class Action:
    """What a verb, or one of its sub-commands, does.

    Attributes:
        options: a dataclass of `flag` fields, `Common` among its bases.
        run: does it, and returns the summary that --json prints.
        help: one line.
        positional: the option that a bare word fills.
        example: a command line that shows it.
        reads_config_of: another verb, whose config.yaml will do here: its other keys are passed over.
    """

    options: type
    run: Callable[[Any, Console], dict[str, Any]]
    help: str
    positional: str | None = None
    example: str = ""
    reads_config_of: str | None = None


VERBS = {
    "quickstart": "from nothing to a trained model that writes little stories, in about two minutes",
    "tokenizer": "train tokenizers, encode and decode with them, look inside",
    "data": "turn text into token shards; split, generate and show examples for post-training",
    "pretrain": "train a model from text, with --resume auto after any interruption",
    "finetune": "tune a model on examples: all weights, LoRA or QLoRA; responses or preferences",
    "merge": "fold adapters into their base: one plain model",
    "eval": "loss, perplexity and bits per byte of a model over a whole text",
    "generate": "continue a prompt: greedy, temperature, top-k, top-p, min-p",
    "chat": "talk with a model in the terminal, or over a pipe",
    "report": "curves, figures and samples of a run as one HTML file",
    "convert": "a model in another format: riftco, hf, gguf, onnx; compared with its source",
    "inspect": "what a model, checkpoint, run, tokenizer or dataset holds, and which tools open it",
    "gradcheck": "every derivative against its oracle and finite differences",
    "doctor": "versions, devices, what works, and what each missing extra would add",
    "aot": "compile a training or decoding step for chips that are not here: memory, FLOPs, kernels, whether it fits",
    "cajal": "check, run, compile and show Cajal programs",
    "bench": "races: the compiled train step beside jax.grad and optax; the tokenizer beside tokenizers",
}
LATER = ("serve",)
GROUPS = ("tokenizer", "data", "cajal")
BENCHES = ("train", "tokenizer")


def actions(verb: str) -> dict[str, Action]:
    """The actions of a verb by sub-command; "" where it has none. `bench` parses its own command line."""
    return importlib.import_module(f"riftco.cli.{verb}").ACTIONS


def keys_of(verb: str) -> frozenset[str]:
    """The names of the options of a verb without sub-commands."""
    return frozenset(field.name for field in dataclasses.fields(actions(verb)[""].options))


def option_names() -> frozenset[str]:
    """The names of every option of every verb."""
    found = (action.options for verb in VERBS if verb != "bench" for action in actions(verb).values())
    return frozenset(field.name for options in found for field in dataclasses.fields(options))
