"""Examples as ids with a weight for each: which tokens are learned, what is cut off, what is left out and counted.

A conversation becomes text through its model's chat template, which writes the token that begins a text and the one
that ends an answer; nothing is added, so nothing is doubled. By default the answers alone are learned, each with the
token that ends it. Rows of several examples are made in packing.py, batches in example_batches.py.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from riftco.data._checks import positive_integer
from riftco.data.conversations import Example, Preference
from riftco.errors import ConfigError, DataError, TokenizerError

LossOn = Literal["response", "all"]


@dataclass(frozen=True, eq=False)
class Encoded:
    """One example as tokens.

    Attributes:
        ids: int32[n].
        weights: float32[n], how much each token counts as a target; nothing precedes the first, which is never one.
        where: "FILE:LINE" of its row.
    """

    ids: np.ndarray
    weights: np.ndarray
    where: str

    @property
    def targets(self) -> int:
        """How many targets count."""
        return int(np.count_nonzero(self.weights[1:]))

    def cut(self, context: int) -> "Encoded":
        """The first context + 1 tokens: as many inputs as fit, and a target for each."""
        return (
            self
            if len(self.ids) <= context + 1
            else Encoded(self.ids[: context + 1], self.weights[: context + 1], self.where)
        )


@dataclass(frozen=True)
class EncodingReport:
    """What became of the examples; `str` of it is for reading.

    Attributes:
        read: examples (pairs, for preferences) that were given.
        kept: those that are learned from.
        no_response: left out, since they have no answer to learn from.
        cut_response: left out, since truncation leaves nothing of the answer.
        identical: pairs left out, since both answers are the same tokens.
        truncated: kept ones that were cut to the context.
        dropped_tokens: what truncation cut off them.
        tokens: what is left.
        targets: tokens that count in the loss.
        skipped: "FILE:LINE" of all that were left out.
    """

    read: int = 0
    kept: int = 0
    no_response: int = 0
    cut_response: int = 0
    identical: int = 0
    truncated: int = 0
    dropped_tokens: int = 0
    tokens: int = 0
    targets: int = 0
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = f"{self.kept:,} of {self.read:,} examples: {self.tokens:,} tokens, {self.targets:,} of them learned"
        cut = (
            f"; {self.truncated:,} cut to the context, {self.dropped_tokens:,} tokens dropped" if self.truncated else ""
        )
        return kept + cut + (f"; {self.reasons()}" if self.skipped else "")

    def reasons(self) -> str:
        """Why examples were left out, in words; the first few by file and line."""
        parts = [
            f"{count:,} {why}"
            for count, why in (
                (self.no_response, "have no response"),
                (self.cut_response, "lose the response to truncation"),
                (self.identical, "have two identical answers"),
            )
            if count
        ]
        places = ", ".join(self.skipped[:3]) + (", …" if len(self.skipped) > 3 else "")
        return f"{len(self.skipped):,} left out: {', '.join(parts)} ({places})"


@dataclass(frozen=True, eq=False)
class EncodedSet:
    """Examples, or preferences as (chosen, rejected), that can all be learned from.

    Attributes:
        items: `Encoded` each, or pairs of them.
        context: T; no item has more than T + 1 tokens.
        loss_on: "response" or "all".
        report: what became of the rows.
    """

    items: tuple[Any, ...]
    context: int
    loss_on: LossOn
    report: EncodingReport
    _digest: list[str] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all ids and weights."""
        if not self._digest:
            hasher = hashlib.sha256(b"riftco examples 1\0")
            for item in flat(self.items):
                hasher.update(len(item.ids).to_bytes(8, "little"))
                hasher.update(item.ids.astype("<i4").tobytes() + item.weights.astype("<f4").tobytes())
            self._digest.append(hasher.hexdigest())
        return self._digest[0]


def flat(items: Iterable[Any]) -> Iterator[Encoded]:
    """Every `Encoded` of items that are such or pairs of such."""
    for item in items:
        yield from item if isinstance(item, tuple) else (item,)


def encode_example(
    tokenizer: Any, example: Example, *, template: str | None = None, loss_on: LossOn = "response"
) -> Encoded:
    """One example as ids and weights, whole.

    Args:
        tokenizer: of the model.
        example: a row of `read_examples`.
        template: instead of the tokenizer's own, or of the plain one for a tokenizer that was trained here.
        loss_on: "response": weight 1 for what an assistant wrote, with the token that ends it, and 0 elsewhere; a text
            is learned whole. "all": weight 1 everywhere.

    Returns:
        An `Encoded`. A text has its model's first token where its tokenizer.json adds one, and the end-of-text token
        where there is one; neither twice.

    Raises:
        DataError: the template, or the tokenizer, refuses the example; its file and line are named.
        ConfigError: an unknown `loss_on`.
    """
    if loss_on not in ("response", "all"):
        raise ConfigError(f"encode_example: loss_on must be 'response' or 'all'; got {loss_on!r}")
    try:
        if example.text is not None:
            ids, learned = _document(tokenizer, example.text), None
        else:
            ids, learned = _conversation(tokenizer, example, template)
    except TokenizerError as error:
        raise DataError(f"data: {example.where}: {error}") from error
    weights = np.ones(len(ids), np.float32)
    if loss_on == "response" and learned is not None:
        weights = np.asarray(learned, np.float32)
    return Encoded(np.asarray(ids, np.int32), weights, example.where)


def _document(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer.encode(text))
    first, last = _added_first(tokenizer), getattr(tokenizer, "eos_id", None)
    if first is not None and ids[:1] != [first]:
        ids.insert(0, first)
    if last is not None and ids[-1:] != [last]:
        ids.append(last)
    return ids


def _added_first(tokenizer: Any) -> int | None:
    """The id that the tokenizer's own file puts before a text."""
    step = getattr(getattr(tokenizer, "foreign", None), "post_processor", None) or {}
    for part in step.get("processors", [step]):
        first = (part.get("single") or [{}])[0].get("SpecialToken", {}).get("id")
        if part.get("type") == "TemplateProcessing" and first is not None:
            return part["special_tokens"][first]["ids"][0]
    return None


def _conversation(tokenizer: Any, example: Example, template: str | None) -> tuple[list[int], list[bool]]:
    from riftco.tokenizers import chat

    source: str = tokenizer.effective_chat_template if template is None else template
    rendered = chat.render(example.messages, source, special_tokens=chat.special_tokens(tokenizer))
    return chat.encode(tokenizer, rendered._replace(spans=_learned(example, rendered.spans)))


def _learned(example: Example, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts to learn: of the answers with something in them, those after the given messages."""
    answers = [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]
    wanted = [index >= example.given and not _is_blank(example.messages[index]) for index in answers]
    if len(spans) == len(answers):
        return [span for span, is_wanted in zip(spans, wanted, strict=True) if is_wanted]
    if all(wanted) or not any(wanted):
        return spans if all(wanted) else []
    raise TokenizerError(
        f"the template must mark one part for each of the {len(answers)} answers, since some are not learned; it marks "
        f"{len(spans)}; put every answer in one {{% generation %}} block"
    )


def _is_blank(message: Any) -> bool:
    content = message.get("content")
    return not content.strip() if isinstance(content, str) else False


def encode_examples(
    tokenizer: Any,
    examples: Sequence[Example],
    context: int,
    *,
    template: str | None = None,
    loss_on: LossOn = "response",
) -> EncodedSet:
    """Examples as tokens that fit a context; those without a target are left out, with a warning, and counted.

    Args:
        tokenizer: of the model.
        examples: rows of `read_examples`.
        context: T; an example is cut to T inputs, its end dropped.
        template: see `encode_example`.
        loss_on: see `encode_example`.

    Returns:
        An `EncodedSet`; every item has a target that counts, so no loss is ever the mean of nothing.

    Raises:
        DataError: as `encode_example`; preferences; or every example is left out.
        ConfigError: an option that is none.

    Warns:
        UserWarning: if examples are left out.
    """
    context = positive_integer("encode_examples", "context", context)
    tally = _Tally(context)
    for example in examples:
        if isinstance(example, Preference):
            raise DataError(f"data: {example.where}: an example is required; it is a preference; use objective dpo")
        whole = encode_example(tokenizer, example, template=template, loss_on=loss_on)
        tally.add((whole,), lambda cut: cut[0])
    return tally.finish(loss_on)


def encode_preferences(
    tokenizer: Any, preferences: Sequence[Preference], context: int, *, template: str | None = None
) -> EncodedSet:
    """Preferences as pairs of token rows, (chosen, rejected); the answers alone have weight.

    Args:
        tokenizer: of the model.
        preferences: rows of `read_examples` of a file of preferences.
        context: T; each side is cut to T inputs.
        template: see `encode_example`.

    Returns:
        An `EncodedSet` of pairs of `Encoded`; both sides of every pair have a target that counts.

    Raises:
        DataError, ConfigError: as `encode_examples`.

    Warns:
        UserWarning: if pairs are left out.
    """
    context = positive_integer("encode_preferences", "context", context)
    tally = _Tally(context)
    for row in preferences:
        if not isinstance(row, Preference):
            raise DataError(
                f"data: {row.where}: a row with 'prompt', 'chosen' and 'rejected' is required; it is an example; use "
                "objective sft"
            )
        sides = (Example(row.where, row.prompt + side, given=len(row.prompt)) for side in (row.chosen, row.rejected))
        tally.add(tuple(encode_example(tokenizer, side, template=template) for side in sides), lambda cut: cut)
    return tally.finish("response")


class _Tally:
    """Collects what is kept and counts what is not."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._items: list[Any] = []
        self._skipped: list[str] = []
        self._counts = dict.fromkeys(
            ("read", "no_response", "cut_response", "identical", "truncated", "dropped_tokens", "tokens", "targets"), 0
        )

    def add(self, whole: tuple[Encoded, ...], item: Any) -> None:
        """Take in the rows of one example; `item` makes what is kept of the cut rows."""
        self._counts["read"] += 1
        cut = tuple(row.cut(self._context) for row in whole)
        reason = None
        if not all(row.targets for row in whole):
            reason = "no_response"
        elif not all(row.targets for row in cut):
            reason = "cut_response"
        elif len(whole) == 2 and np.array_equal(cut[0].ids, cut[1].ids):
            reason = "identical"
        if reason is not None:
            self._counts[reason] += 1
            self._skipped.append(whole[0].where)
            return
        dropped = sum(len(row.ids) for row in whole) - sum(len(row.ids) for row in cut)
        self._counts["truncated"] += dropped > 0
        self._counts["dropped_tokens"] += dropped
        self._counts["tokens"] += sum(len(row.ids) for row in cut)
        self._counts["targets"] += sum(row.targets for row in cut)
        self._items.append(item(cut))

    def finish(self, loss_on: LossOn) -> EncodedSet:
        """The set, with a warning if something was left out. Raises DataError if everything was."""
        report = EncodingReport(kept=len(self._items), skipped=tuple(self._skipped), **self._counts)
        if not report.kept:
            found = report.reasons() if report.read else "none were given"
            raise DataError(
                f"data: at least one example with a response in {self._context} tokens is required; {found}; give "
                "other rows, or room for more tokens"
            )
        if report.skipped:
            warnings.warn(f"data: {report.reasons()}", stacklevel=3)
        return EncodedSet(tuple(self._items), self._context, loss_on, report)
