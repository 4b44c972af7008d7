"""What is asked and what is answered: `Request`, `Piece` as it comes, `Completion` in the end."""

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from riftco.errors import ConfigError
from riftco.serve.programs import MOST_ALTERNATIVES

MOST_CHOICES = 128
_LARGEST = float(np.finfo(np.float32).max)
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to go on from it; give exactly one of prompt_ids, messages and prompt.

    Args:
        prompt_ids: token ids, taken as they are.
        messages: a chat, `[{"role": …, "content": …}, …]`, written by the tokenizer's chat template.
        prompt: text.
        max_tokens: how many tokens are drawn at most; None for the rest of the context; 0 only with echo.
        min_tokens: so many are drawn before a stop id or a stop string can end the answer.
        temperature: 0 takes the most likely token, the lowest id among equals.
        top_k: keep the k most likely tokens; off if <= 0 or >= V.
        top_p: keep the fewest most likely tokens whose probabilities reach p; 1 is off.
        min_p: drop tokens below p times the largest probability; 0 is off.
        seed: the draw at position p of choice c depends on (seed, c, p) alone; the low 32 bits count.
        n: how many answers, 1 … 128, each with a choice number of its own.
        stop: a string or strings that end the answer; the text ends before them.
        stop_token_ids: ids that end the answer, beside the tokenizer's own; they are not returned.
        ignore_eos: the tokenizer's own end does not end the answer.
        logit_bias: {id: number} added to the logits after the penalties; −inf bans an id.
        presence_penalty: subtracted once for every token that the answer holds already.
        frequency_penalty: subtracted for every occurrence in the answer.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and answer; 1 is off.
        logprobs: None, or how many of the most likely tokens are told beside each token's own log-probability, 0 … 20.
            They are the model's own, before penalties and temperature.
        echo: the answer begins with the prompt.
        deadline: seconds after which the answer ends as it is, counted from its submission; None for never.
        adapter: the name of an adapter of the engine; None for the base alone.
        cache_salt: only requests with the same salt share cached prefixes.

    Raises:
        ConfigError: for a value that is not acceptable, in one sentence that names it.
    """

    prompt_ids: Sequence[int] | None = None
    _: dataclasses.KW_ONLY
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    echo: bool = False
    deadline: float | None = None
    adapter: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("prompt_ids", "messages", "prompt") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                "Request: exactly one of prompt_ids, messages and prompt must be given; got "
                f"{' and '.join(given) or 'none'}."
            )
        if self.prompt_ids is not None:
            self._set("prompt_ids", _integers("prompt_ids", self.prompt_ids))
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise ConfigError(f"Request: prompt must be text; got {type(self.prompt).__name__}; ids go to prompt_ids.")
        for name, low, high in (
            ("max_tokens", 0, None),
            ("min_tokens", 0, None),
            ("top_k", None, None),
            ("seed", None, None),
            ("n", 1, MOST_CHOICES),
            ("logprobs", 0, MOST_ALTERNATIVES),
        ):
            if getattr(self, name) is not None or name not in ("max_tokens", "logprobs"):
                self._set(name, _integer(name, getattr(self, name), low, high))
        for name, low, high in (
            ("temperature", 0.0, None),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", None, None),
            ("frequency_penalty", None, None),
            ("repetition_penalty", 0.0, None),
            ("deadline", 0.0, None),
        ):
            if getattr(self, name) is not None or name != "deadline":
                self._set(name, _number(name, getattr(self, name), low, high))
        if self.repetition_penalty == 0:
            raise ConfigError("Request: repetition_penalty must be above 0; got 0; 1 turns it off.")
        if self.max_tokens == 0 and not self.echo:
            raise ConfigError("Request: max_tokens must be at least 1 without echo; got 0.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"Request: min_tokens must not be above max_tokens; got {self.min_tokens} and {self.max_tokens}."
            )
        for name in ("ignore_eos", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Request: {name} must be True or False; got {getattr(self, name)!r}.")
        for name in ("adapter", "cache_salt"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"Request: {name} must be a name or None; got {getattr(self, name)!r}.")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Iterable) or not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"Request: stop must be one or more strings, none empty; got {self.stop!r}.")
        self._set("stop", tuple(stop))
        self._set("stop_token_ids", _integers("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


class TokenLogprob(NamedTuple):
    """A token's log-probability, and the most likely tokens at its place with theirs, the most likely first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Piece(NamedTuple):
    """What one step adds to an answer.

    `id` is None where no token of the answer came with it (a stop id, a cancellation); `text` may be empty while a
    character or a stop string is undecided; the piece with a `finish_reason` is the choice's last.
    """

    choice: int
    id: int | None
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes:
        ids: the tokens drawn, without a stop id; under echo the prompt's before them.
        text: what they say, up to a stop string; special tokens are left out.
        finish_reason: "stop" (a stop id or string), "length" (max_tokens, or the context is full), "cancelled",
            "deadline", or "error" (the model's numbers cannot be drawn from).
        logprobs: one entry for each of ids, or None if they were not asked for; under echo the first is None.
        choice: 0 … n − 1.
        prompt_tokens: the prompt's length.
        cached_tokens: how many of them were found in the prefix cache.
    """

    ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob | None] | None
    choice: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


def _integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"Request: {name} must be an integer; got {value!r}.")
    if (low is not None and number < low) or (high is not None and number > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"Request: {name} must be {wanted}; got {number}.")
    return number


def _number(name: str, value: Any, low: float | None, high: float | None) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise ConfigError(f"Request: {name} must be a finite number; got {value!r}.")
    if (low is not None and number < low) or (high is not None and number > high):
        wanted = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise ConfigError(f"Request: {name} must be {wanted}; got {number:g}.")
    return number


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(f"Request: {name} must be a list of token ids; got {type(values).__name__}.")
    return tuple(_integer(f"every id of {name}", value, 0) for value in values)


def _biases(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ConfigError(f"Request: logit_bias must map ids to numbers; got {type(bias).__name__}.")
    found = {}
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value < math.inf:
            raise ConfigError(f"Request: a logit_bias must be a number below +inf; id {token!r} has {value!r}.")
        found[_integer("every id of logit_bias", token, 0)] = float(value)
    return found
