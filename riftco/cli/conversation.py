"""A conversation with a model: its turns, kept within the context, and each answer as it is written."""

from collections.abc import Callable, Iterator
from typing import Any

from riftco.errors import RiftcoError, TokenizerError

_MARK = "\ue010answer\ue010"


class Conversation:
    """Turns so far, and what answers them.

    Args:
        model: a `riftco.cli.models.Loaded` with a tokenizer that has a chat template.
        settings: temperature, top_k, top_p, min_p and repetition_penalty.
        max_tokens: how many ids an answer has at most.
        seed: of the draws.
        system: what a system message says, or None.
        note: is told what is dropped.

    Attributes:
        system: as given.
        turns: [{"user": …, "assistant": …, "ids": [...], "finish_reason": "stop" | "length" | "context" |
            "interrupted"}, …].
        dropped: how many turns at the beginning the model no longer sees.
    """

    def __init__(
        self,
        model: Any,
        *,
        settings: dict[str, Any],
        max_tokens: int,
        seed: int = 0,
        system: str | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        from riftco.generation import Session

        self._model, self._settings, self._max_tokens, self._seed, self._note = model, settings, max_tokens, seed, note
        self._session = Session(model.params, model.config, adapters=model.adapters)
        stop_ids, self._stop_texts = turn_end(model.tokenizer)
        self._stop_ids = (*model.stop_ids, *stop_ids)
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Begin anew, with another system message or none."""
        self.system, self.turns, self.dropped = system, [], 0

    def answer(self, message: str) -> Iterator[str]:
        """Pieces of the answer to a message; whatever was written when the iteration ends is the turn's answer.

        Raises:
            RiftcoError: the message does not fit into the context, or the template refuses it; there is no new turn.
        """
        ids = self._prompt(message)
        turn = {"user": message, "assistant": "", "ids": [], "finish_reason": "interrupted"}
        self.turns.append(turn)
        is_complete = False
        try:
            for piece in self._pieces(ids, turn):
                turn["assistant"] += piece
                yield piece
            is_complete = True
        finally:
            if not is_complete:
                # A step may have been cut off between giving its cache away and getting the next.
                self._session.reset()

    def _pieces(self, ids: list[int], turn: dict[str, Any]) -> Iterator[str]:
        from riftco.generation import stream, stream_text

        tokenizer = self._model.tokenizer
        room = min(self._max_tokens, self._model.config.context - len(ids))

        def decoded() -> Iterator[str]:
            decoder = tokenizer.decode_stream(skip_special=True)
            drawn = stream(
                self._session, ids, max_tokens=room, seed=self._seed, stop_ids=self._stop_ids, **self._settings
            )
            for token in drawn:
                turn["ids"].append(token)
                # A row of the model that the tokenizer has no id for stands for no text.
                yield decoder.push(token) if token < tokenizer.vocab_size else ""
            yield decoder.flush()
            if len(turn["ids"]) == room:
                turn["finish_reason"] = "length" if room == self._max_tokens else "context"
            else:
                turn["finish_reason"] = "stop"

        yield from stream_text(decoded(), self._stop_texts)
        if turn["finish_reason"] == "interrupted":  # the text that ends a turn came, and nothing after it was asked for
            turn["finish_reason"] = "stop"

    def _prompt(self, message: str) -> list[int]:
        """The ids of the conversation with a new message, without the oldest turns where all do not fit."""
        context = self._model.config.context
        # An answer gets a quarter of the context at least, if it may be so long.
        wanted = min(self._max_tokens, max(1, context // 4))
        dropped = self.dropped
        while True:
            ids = self._model.tokenizer.apply_chat_template(self._messages(dropped, message))
            if len(ids) + wanted <= context or dropped == len(self.turns):
                break
            dropped += 1
        if len(ids) >= context:
            raise RiftcoError(
                f"chat: a message must leave room for an answer in the model's {context} tokens; with its template it "
                f"has {len(ids)}; shorten it{' or the system message' if self.system else ''}"
            )
        if dropped > self.dropped:
            self._note(f"(the context is full: the model no longer sees the first {_turns(dropped)})")
        self.dropped = dropped
        return ids

    def _messages(self, dropped: int, message: str) -> list[dict[str, str]]:
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[dropped:]:
            found += [{"role": role, "content": turn[role]} for role in ("user", "assistant")]
        return [*found, {"role": "user", "content": message}]


def _turns(count: int) -> str:
    return "turn" if count == 1 else f"{count} turns"


def turn_end(tokenizer: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What the chat template writes after an answer: a token that ends it, or else a text.

    Args:
        tokenizer: with its chat template.

    Returns:
        (ids, texts), of which one is empty, or both where the template writes nothing.
    """
    from riftco.tokenizers import chat

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    try:
        rendered = chat.render(
            messages, tokenizer.effective_chat_template, special_tokens=chat.special_tokens(tokenizer)
        )
    except TokenizerError:  # a template that wants another beginning; the model's own ends are known all the same
        return (), ()
    after = rendered.text.rfind(_MARK) + len(_MARK)
    ending = rendered.text[after : rendered.spans[-1][1]] if rendered.spans else ""
    for token, id in tokenizer.special_tokens.items():
        if ending.startswith(token):
            return (id,), ()
    return (), (ending,) if ending else ()
