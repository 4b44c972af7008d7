"""`riftco chat`: a conversation in a terminal, or over a pipe, where each line is a message."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from riftco.cli import generate, models
from riftco.cli.console import Console
from riftco.cli.conversation import Conversation
from riftco.cli.model_options import DeviceOptions
from riftco.cli.options import UsageError, flag
from riftco.cli.verbs import Action
from riftco.errors import RiftcoError

_SAMPLING = "sampling"
_OWN = "generation_config.json's, or "
_GGUF = "model.gguf"  # what a conversion to GGUF calls its file
_SEEN = 2048  # each token costs as much as the cache is long
_COMMANDS = """\
/reset          begin anew
/system TEXT    begin anew with a system message; without TEXT, with none
/help           this list
/exit           leave, as ^D does; Ctrl-C stops an answer"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(DeviceOptions):
    """Options of `chat`."""

    model: str | None = flag(
        None, "a bundle, a run directory, a Hugging Face directory, or a .gguf file", metavar="PATH"
    )
    adapter: str | None = flag(
        None, "adapters for it: a run of finetune, its final/, or a directory that PEFT wrote", metavar="DIR"
    )
    chat_template: str | None = flag(
        None, "a Jinja file, or plain", metavar="FILE", shown="the model's own, or the plain one"
    )
    system: str | None = flag(None, "a system message")
    max_seq_length: int | None = flag(
        None, "how much of a conversation is seen at once; less is faster", shown=f"the model's, {_SEEN} at most"
    )
    max_tokens: int = flag(512, "how many tokens an answer has at most", group=_SAMPLING)
    temperature: float | None = flag(
        None, "0 takes the most likely token", group=_SAMPLING, shown=f"{_OWN}0.7"
    )  # fmt: skip
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
    seed: int = flag(0, "equal seeds and messages give equal answers", group=_SAMPLING)


def run(options: ChatOptions, console: Console) -> dict[str, Any]:
    """Load, then answer until there are no more messages."""
    from riftco import backend

    path = Path(models.require(options.model))
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens must be at least 1; got {options.max_tokens}")
    if (options.temperature or 0) < 0:
        raise UsageError(f"--temperature must be at least 0; got {options.temperature}")
    if (path / _GGUF).is_file():
        path = path / _GGUF
    models.locate(str(path))
    backend.select(options.device)
    model = models.load(str(path), adapter=options.adapter)
    template = models.chat_template(options.chat_template, model.tokenizer, console.note)
    model = dataclasses.replace(
        model,
        config=_shortened(model.config, options.max_seq_length),
        tokenizer=model.tokenizer.with_chat_template(template),
    )
    given = {name: getattr(options, name) for name in generate.NEUTRAL}
    settings = generate.settings(given, model.generation, console, temperature=0.7)
    talk = Conversation(
        model,
        settings=settings,
        max_tokens=options.max_tokens,
        seed=options.seed,
        system=options.system,
        note=console.note,
    )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not console.as_json
    if is_terminal:
        console.note(f"{model.path}: sees {model.config.context:,} tokens; /help lists the commands, /exit leaves")
    for message in _messages(is_terminal):
        try:
            if message.startswith("/") and message[1:].split(" ")[0].isalpha():
                if not _obey(message, talk, console):
                    break
                continue
            _answer(message, talk, console)
        except KeyboardInterrupt:  # between the places that have something to stop
            print()
    return {"turns": talk.turns, "system": talk.system, "dropped": talk.dropped, "seed": options.seed, **settings}


def _shortened(config: Any, wanted: int | None) -> Any:
    """The configuration with a shorter context: with rotary positions the same function of the tokens in it.

    Raises:
        UsageError: the length is none that the model can have.
    """
    is_rotary = config.position == "rope"
    length = min(config.context, _SEEN if is_rotary else config.context) if wanted is None else wanted
    if not 1 <= length <= config.context or not (is_rotary or length == config.context):
        allowed = f"1 to {config.context:,}" if is_rotary else f"{config.context:,}, as many as it has positions"
        raise UsageError(f"--max-seq-length must be {allowed}, for this model; got {length}")
    return dataclasses.replace(config, context=length)


def _messages(is_terminal: bool) -> Iterator[str]:
    """What is typed or piped, without the lines that are blank."""
    if not is_terminal:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and its keys)
    while True:
        message = ""
        try:
            message = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(^D or /exit leaves)")
        if message:
            yield message


def _obey(command: str, talk: Conversation, console: Console) -> bool:
    """Do what a command says; whether the conversation goes on."""
    name, _, rest = command.partition(" ")
    match name:
        case "/exit":
            return False
        case "/help":
            console.note(_COMMANDS)
        case "/reset":
            talk.reset(talk.system)
            console.note("(a new conversation)")
        case "/system":
            talk.reset(rest.strip() or None)
            console.note("(a new conversation, " + ("with this system message)" if rest.strip() else "without one)"))
        case _:
            console.note(f"(there is no {name}; /help lists the commands)")
    return True


def _answer(message: str, talk: Conversation, console: Console) -> None:
    """Write one answer; Ctrl-C ends it, and a message that cannot be answered is said to be such."""
    try:
        for piece in talk.answer(message):
            console.say(piece, end="")
        console.say()
    except KeyboardInterrupt:
        console.say()
        console.note("(stopped)")
        return
    except RiftcoError as error:
        console.note(str(error))
        return
    reason = talk.turns[-1]["finish_reason"]
    if reason in ("length", "context"):
        limit = "--max-tokens" if reason == "length" else "the context"
        console.note(f"(cut off by {limit})")


ACTIONS = {
    "": Action(
        ChatOptions, run, "talk with a model in the terminal", "model",
        "riftco chat models/smollm2 --system 'Answer in one sentence.'",
    )
}  # fmt: skip
