"""Chats as text: a model's own template, or a plain one, and which part of the text an assistant wrote.

A template is the text of a `chat_template.jinja`; it runs in the sandbox of `chat_sandbox.py`. Tokens come from the
rendered text alone: the template writes the token that begins a text, so none is added here, and none is doubled.
"""

import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from riftco.errors import TokenizerError
from riftco.tokenizers import chat_sandbox
from riftco.tokenizers.base import Tokenizer
from riftco.tokenizers.bpe import BPETokenizer
from riftco.tokenizers.chat_sandbox import LimitError

PLAIN = """\
{% for message in messages %}
### {{ message['role'] | capitalize }}:
{% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] | trim }}{{ eos_token or '\\n' }}{% endgeneration %}
{{ '\\n' if eos_token else '' }}{% else %}
{{ message['content'] | trim }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
### Assistant:
{% endif %}
"""
"""The template of models trained here: headings, and the end-of-text token after an answer where there is one."""


# Stand for other answers: no filter changes them, no message begins or ends as they do.
_OTHER, _ANOTHER = "\ue001\ue002\ue003", "\ue001" + "\ue004" * 40 + "\ue003"


class Rendered(NamedTuple):
    """A chat as text."""

    text: str
    spans: list[tuple[int, int]]
    """(start, end) in characters of what the assistant wrote, its end-of-turn token included; ascending."""


def render(
    messages: Sequence[Mapping[str, Any]],
    template: str = PLAIN,
    *,
    add_generation_prompt: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    **variables: Any,
) -> Rendered:
    """The text of a chat, and which parts of it an assistant wrote.

    Where the template says `{% generation %} … {% endgeneration %}`, those are the parts. Elsewhere a part begins where
    the chat before it ends, with the generation prompt, and ends where the chat up to it ends, without the space after
    the end token. Where the template writes earlier answers differently from the last, a part is what changes when
    another answer takes its place.

    Args:
        messages: {"role": …, "content": …} and what else the template reads; plain JSON values.
        template: Jinja source.
        add_generation_prompt: end with what makes a model answer.
        special_tokens: `bos_token`, `eos_token` and the like for the template; see `special_tokens`.
        **variables: `tools`, `documents` and whatever else the template reads.

    Returns:
        A `Rendered`.

    Raises:
        TokenizerError: for messages that are not such; a template that is wrong, raises, or passes a bound of the
            sandbox; or an answer that cannot be found in the text.
    """
    chat = _plain_messages(messages)
    context = _context(special_tokens, variables)
    marks = _new_marks()
    token = chat_sandbox.MARKS.set(marks)
    try:
        marked = _run(template, chat, add_generation_prompt, context)
    finally:
        chat_sandbox.MARKS.reset(token)
    if "endgeneration" in template:
        return _unmark(marked, marks)
    spans = _differences(marked, chat, template, bool(add_generation_prompt), context)
    return Rendered(marked, spans)


def render_text(
    messages: Sequence[Mapping[str, Any]],
    template: str = PLAIN,
    *,
    add_generation_prompt: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    **variables: Any,
) -> str:
    """The text of `render` alone, for which the template runs once."""
    context = _context(special_tokens, variables)
    return _run(template, _plain_messages(messages), add_generation_prompt, context)


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """{"bos_token": …, "eos_token": …}: the names under which templates know a tokenizer's special tokens."""
    roles = tokenizer.roles if isinstance(tokenizer, BPETokenizer) else {}
    return {f"{role}_token": content for role, content in roles.items()}


def encode(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], list[bool]]:
    """The ids of a rendered chat, and for each whether the assistant wrote it.

    A token belongs to the assistant where any byte of it does.

    Args:
        tokenizer: of the model.
        rendered: of `render`.

    Returns:
        Two lists of one length.

    Raises:
        TokenizerError: the tokenizer cannot encode the text, or does not keep it, so that no token has a place in it.
    """
    ids = tokenizer.encode(rendered.text)
    foreign = getattr(tokenizer, "foreign", None)
    is_nfc = foreign is not None and foreign.normalizer is not None

    def place(character: int) -> int:
        """The byte at which a character begins."""
        before = rendered.text[:character]
        return len((unicodedata.normalize("NFC", before) if is_nfc else before).encode())

    ends = [0]
    for piece in tokenizer._bytes_of(ids):
        ends.append(ends[-1] + len(piece))
    if ends[-1] != place(len(rendered.text)):
        raise TokenizerError(
            "chat: the tokenizer must keep every byte of the text, so that each token has a place in it; this one does "
            "not; use a tokenizer that has all 256 bytes"
        )
    flags, spans = [False] * len(ids), [(place(start), place(end)) for start, end in rendered.spans]
    index = 0
    for start, end in spans:
        while index < len(ids) and ends[index + 1] <= start:
            index += 1
        while index < len(ids) and ends[index] < end:
            flags[index] = True
            index += 1
    return ids, flags


# ------------------------------------------------------------------------------------------------ rendering


def _context(special: Mapping[str, str] | None, variables: Mapping[str, Any]) -> dict[str, Any]:
    extra = {name: _plain_value(value, name) for name, value in variables.items()}
    return {"tools": None, "documents": None, **(special or {}), **extra}


def _run(template: str, chat: list[dict[str, Any]], add_generation_prompt: bool, context: dict[str, Any]) -> str:
    if not isinstance(template, str):
        raise TokenizerError(f"chat: the template must be a str; got {type(template).__name__}")
    variables = {**context, "messages": chat, "add_generation_prompt": bool(add_generation_prompt)}
    try:
        return chat_sandbox.render(template, variables)
    except LimitError as error:
        raise TokenizerError(f"chat template: it must stay within bounds; {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"chat template: line {error.lineno}: {error.message}; correct the template") from error
    except jinja2.TemplateError as error:
        raise TokenizerError(f"chat template: {error.message or type(error).__name__}") from error
    except Exception as error:  # whatever a foreign template provokes: types, indices, depth, memory
        raise TokenizerError(f"chat template: {type(error).__name__}: {str(error)[:200]}") from error


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TokenizerError(
            f'chat: messages must be a list of {{"role": …, "content": …}}; got {type(messages).__name__}'
        )
    chat = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(f'chat: message {number} must be a mapping with a "role"; got {str(message)[:80]!r}')
        # A null field is an absent one: templates test for presence.
        kept = {key: value for key, value in message.items() if value is not None}
        if "content" not in kept and len(kept) == 1:
            raise TokenizerError(f'chat: message {number} must have a "content"; it has a role alone')
        chat.append(_plain_value(kept, f"message {number}"))
    return chat


def _plain_value(value: Any, where: str) -> Any:
    """A copy made of JSON's types: a template meets no object with methods of its own, and nothing that is ours."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain_value(key, where): _plain_value(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(item, where) for item in value]
    raise TokenizerError(f"chat: {where} must be made of JSON values; got {type(value).__name__}")


# ------------------------------------------------------------------------------------------------ spans


def _new_marks() -> tuple[str, str]:
    """Two texts that no message holds."""
    nonce = secrets.token_hex(8)
    return f"\ue000{nonce}(\ue000", f"\ue000{nonce})\ue000"


def _unmark(text: str, marks: tuple[str, str]) -> Rendered:
    begin, end = marks
    pieces, spans, size = [], [], 0
    for number, part in enumerate(text.split(begin)):
        inside, mark, rest = part.partition(end)
        if bool(mark) != bool(number) or end in rest:
            raise TokenizerError("chat template: {% generation %} blocks must not lie in one another; these do")
        if mark:
            spans.append((size, size + len(inside)))
        pieces += [inside, rest]
        size += len(inside) + len(rest)
    return Rendered("".join(pieces), [span for span in spans if span[0] < span[1]])


def _differences(
    text: str, chat: list[dict[str, Any]], template: str, prompt: bool, context: dict[str, Any]
) -> list[tuple[int, int]]:
    """Spans of the assistant's messages, out of the texts of other chats."""
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = _attempt(template, chat[:number], True, context)
        after = (
            text if number == len(chat) - 1 and not prompt else _attempt(template, chat[: number + 1], False, context)
        )
        start = len(before) if before and text.startswith(before) else None
        if start is not None and after and text.startswith(after):
            span = (start, len(after))
        else:
            span = _changing_part(text, chat, number, template, prompt, context)
            if span is not None and start is not None:
                span = (start, span[1])
        if span is None or span[0] >= span[1] or (spans and span[0] < spans[-1][1]):
            raise TokenizerError(
                f"chat template: the answer in message {number} cannot be told from the rest of the text; put "
                "{% generation %} … {% endgeneration %} around answers in the template"
            )
        spans.append((span[0], _without_space(text, *span, context.get("eos_token"))))
    return spans


def _changing_part(
    text: str, chat: list[dict[str, Any]], number: int, template: str, prompt: bool, context: dict[str, Any]
) -> tuple[int, int] | None:
    """The part of the text that changes with one message, and its end of turn; None where that cannot be said."""

    def with_answer(content: str, rest: list[dict[str, Any]], prompt: bool) -> str:
        other = [*chat[:number], {"role": "assistant", "content": content}, *rest]
        return _attempt(template, other, prompt, context) or ""

    rest = chat[number + 1 :]
    changed, alone = with_answer(_OTHER, rest, prompt), with_answer(_OTHER, [], False)
    if changed.count(_OTHER) != 1 or alone.count(_OTHER) != 1:
        return None
    # A text that says more about an answer than the answer itself, such as its length, changes in other places too.
    if with_answer(_ANOTHER, rest, prompt) != changed.replace(_OTHER, _ANOTHER):
        return None
    start = _shared(text, changed)
    end = len(text) - _shared(text[start:][::-1], changed[start:][::-1])
    turn_end = alone[alone.index(_OTHER) + len(_OTHER) :]
    return start, end + len(turn_end) if text.startswith(turn_end, end) else end


def _shared(left: str, right: str) -> int:
    """How many characters two texts begin with together."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _attempt(template: str, chat: list[dict[str, Any]], prompt: bool, context: dict[str, Any]) -> str | None:
    """The text of a shorter chat, or None where the template refuses one."""
    try:
        return _run(template, chat, prompt, context) if chat or prompt else ""
    except TokenizerError:
        return None


def _without_space(text: str, start: int, end: int, eos: str | None) -> int:
    """The end of a part, before the space that follows its end token."""
    trimmed = start + len(text[start:end].rstrip())
    return trimmed if eos and text.endswith(eos, start, trimmed) else end
