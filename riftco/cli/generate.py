"""`riftco generate`: continue a prompt, shown as it is written."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from riftco.cli import models
from riftco.cli.console import Console
from riftco.cli.model_options import DeviceOptions
from riftco.cli.options import UsageError, flag
from riftco.cli.verbs import Action

_SAMPLING = "sampling"
_OWN = "generation_config.json's, or "
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The settings of sampling that change nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(DeviceOptions):
    """Options of `generate`."""

    model: str | None = flag(None, "a bundle, a run directory, or a Hugging Face directory", metavar="DIR")
    adapter: str | None = flag(
        None, "adapters for it: a run of finetune, its final/, or a directory that PEFT wrote", metavar="DIR"
    )
    prompt: str | None = flag(
        None, "what to continue; - reads standard input", shown="a beginning-of-text token, or a line break"
    )
    max_tokens: int = flag(200, "how many tokens at most", group=_SAMPLING)
    temp: float | None = flag(None, "temperature; 0 takes the most likely token", group=_SAMPLING, shown=f"{_OWN}1")
    top_k: int | None = flag(None, "keep the k most likely tokens; 0 keeps all", group=_SAMPLING, shown=f"{_OWN}0")
    top_p: float | None = flag(
        None, "keep the fewest most likely tokens that reach this probability", group=_SAMPLING, shown=f"{_OWN}1"
    )
    min_p: float | None = flag(
        None, "drop tokens below this share of the largest probability", group=_SAMPLING, shown=f"{_OWN}0"
    )
    repetition_penalty: float | None = flag(
        None, "makes tokens that were seen less likely; 1 is off", group=_SAMPLING, shown=f"{_OWN}1"
    )
    seed: int = flag(0, "equal seeds write equal texts", group=_SAMPLING)
    stop: tuple[str, ...] = flag((), "texts that end the answer and are not printed", group=_SAMPLING)


def run(options: GenerateOptions, console: Console) -> dict[str, Any]:
    """Load, then write piece by piece."""
    from riftco import backend

    path = models.require(options.model)
    models.locate(path)
    backend.select(options.device)
    model = models.load(path, adapter=options.adapter)
    given = {name: getattr(options, "temp" if name == "temperature" else name) for name in NEUTRAL}
    chosen = settings(given, model.generation, console)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    ids = prompt_ids(prompt, model.tokenizer)
    drawn: list[int] = []
    pieces: list[str] = []
    for piece in write(model, ids, options.max_tokens, chosen, options.seed, options.stop, drawn):
        # The prompt is shown once it is known to fit.
        console.say(piece if pieces else f"{prompt or ''}{piece}", end="")
        pieces.append(piece)
    console.say("" if pieces else prompt or "")
    reason = "length" if len(drawn) == options.max_tokens and not options.stop else "stop"
    text = "".join(pieces)
    # A row of the model that the tokenizer has no id for stands for no text.
    known = [token for token in drawn if token < model.tokenizer.vocab_size]
    if options.stop and len(drawn) == options.max_tokens and text == model.tokenizer.decode(known, skip_special=True):
        reason = "length"
    return {"prompt": prompt, "text": text, "ids": drawn, "finish_reason": reason, "seed": options.seed, **chosen}


def write(
    model: models.Loaded,
    prompt_ids: list[int],
    max_tokens: int,
    settings: dict[str, Any],
    seed: int,
    stop: tuple[str, ...],
    drawn: list[int],
) -> Iterator[str]:
    """The continuation as pieces of text; the ids are appended to `drawn` as they come.

    Args:
        model: what writes.
        prompt_ids: at least one id.
        max_tokens: how many ids at most.
        settings: temperature, top_k, top_p, min_p, repetition_penalty.
        seed: of the draws.
        stop: texts that end it.
        drawn: receives the ids.
    """
    from riftco.generation import Session, stream, stream_text

    ids = stream(
        Session(model.params, model.config, adapters=model.adapters),
        prompt_ids,
        max_tokens=max_tokens,
        seed=seed,
        stop_ids=model.stop_ids,
        **settings,
    )

    def decoded() -> Iterator[str]:
        decoder = model.tokenizer.decode_stream(skip_special=True)
        for token in ids:
            drawn.append(token)
            yield decoder.push(token) if token < model.tokenizer.vocab_size else ""
        yield decoder.flush()

    yield from stream_text(decoded(), stop)


def settings(given: dict[str, Any], stored: dict[str, Any], console: Console, **defaults: float) -> dict[str, Any]:
    """Flags, else what generation_config.json says, else nothing filtered.

    Args:
        given: a value for each name of `NEUTRAL`; None for what the flags leave open.
        stored: the content of generation_config.json.
        console: is told what that file decides.
        **defaults: other values than those of `NEUTRAL` for what nothing decides.
    """
    if stored.get("do_sample") is False:
        stored = {**stored, "temperature": 0.0}
    applied = {k: stored[k] for k in NEUTRAL if given[k] is None and isinstance(stored.get(k), int | float)}
    if applied:
        console.note("generation_config.json sets " + ", ".join(f"{name} {value}" for name, value in applied.items()))
    flags = {name: value for name, value in given.items() if value is not None}
    chosen = {**NEUTRAL, **defaults, **applied, **flags}
    if chosen["temperature"] < 0:
        raise UsageError(f"--temp must be at least 0; got {chosen['temperature']}")
    return chosen


def prompt_ids(prompt: str | None, tokenizer: Any) -> list[int]:
    """The ids of a prompt, and for none a beginning of text. Raises TokenizerError for what has no ids."""
    if prompt:
        return tokenizer.encode(prompt)
    for token in (tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return [token]
    return tokenizer.encode("\n")


ACTIONS = {
    "": Action(
        GenerateOptions, run, "continue a prompt with a trained model", "model",
        "riftco generate runs/quickstart --prompt 'Once upon a time' --temp 0.8 --top-k 40",
    )
}  # fmt: skip
