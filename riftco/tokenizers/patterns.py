r"""How text is cut into chunks before byte-pair merges: the published split regexes, and any other.

A merge never crosses a chunk. Four rules are known by name; each is what the model family published, and the
only ones that GGUF has a name for. A rule is a sequence of stages (each stage cuts the pieces of the one
before it); what no match covers stays as a chunk of its own, so nothing is ever lost.

Two facts make this fast. On ASCII text `\p{L}`, `\p{N}` and `\s` are short character classes, which the
standard library's `re` matches twice as fast as `regex` matches the Unicode ones. And none of the named rules
ever puts a letter or digit and a space that follows it into one chunk, so long text may be cut there first.
"""

import re
from collections.abc import Iterator

import regex

from riftco.errors import TokenizerError

GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT2_AS_PUBLISHED = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DIGIT, DIGITS = r"\p{N}", r"\p{N}+"

STAGES: dict[str, tuple[str, ...]] = {
    "gpt2": (GPT2_AS_PUBLISHED,),
    "llama3": (LLAMA3,),
    "qwen2": (QWEN2,),
    "smollm": (DIGIT, GPT2_AS_PUBLISHED),
}
"""The rules known by name, each as the stages that its tokenizer.json lists."""

GGUF_PRE: dict[str, str] = {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen2": "qwen2", "smollm": "smollm"}
"""What GGUF's `tokenizer.ggml.pre` calls each named rule."""

# One regex that gives what the stages give. For smollm a run of spaces before a digit ends its piece, so the
# look-ahead that keeps one space back for the next word must not see digits.
_FUSED = {
    "gpt2": GPT2,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "smollm": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+""",
}
_BLOCK = 1 << 16  # characters; small enough that one accented letter sends little text to the slower engine


def _to_ascii(pattern: str) -> str:
    r"""The same pattern for `re.ASCII`: a class such as [^\s\p{L}\p{N}] keeps its meaning inside brackets."""
    inside = re.sub(
        r"\[([^\]]*)\]", lambda m: "[" + m[1].replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9") + "]", pattern
    )
    return inside.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")


def safe_cut(text: str, start: int, stop: int) -> int:
    """Where the first chunk boundary at or after `stop` can be known locally; `len(text)` when there is none.

    The place is a space after an ASCII letter or digit: every named rule begins a chunk there, and no look-ahead
    on its left reaches past it.
    """
    while True:
        cut = text.find(" ", max(stop, start + 1))
        if cut < 0:
            return len(text)
        before = text[cut - 1]
        if before.isascii() and before.isalnum():
            return cut
        stop = cut + 1


class Splitter:
    """Cuts text into the chunks that merges stay inside of.

    Args:
        pattern: None (the whole text is one chunk), a name of `STAGES`, one regex in the syntax of the `regex`
            module, or a tuple of such regexes applied one after the other.

    Attributes:
        pattern: None, a name, a regex or a tuple: the shortest spelling of the rule.
        name: the published name of the rule, or None.
        stages: the regexes in order.

    Raises:
        TypeError: pattern is none of these types.
        TokenizerError: a regex does not compile, or uses a set operation whose meaning differs between engines.
    """

    def __init__(self, pattern: str | tuple[str, ...] | list[str] | None) -> None:
        if pattern is None:
            stages: tuple[str, ...] = ()
        elif isinstance(pattern, str):
            stages = STAGES.get(pattern, (pattern,))
        elif isinstance(pattern, (tuple, list)) and all(isinstance(stage, str) for stage in pattern):
            stages = tuple(pattern)
        else:
            raise TypeError(f"tokenizer pattern: a name, a regex, a tuple of them or None is required; got {pattern!r}")
        stages = tuple(GPT2_AS_PUBLISHED if stage == GPT2 else stage for stage in stages)
        self.stages = stages
        self.name = next((name for name, known in STAGES.items() if known == stages), None)
        self.pattern: str | tuple[str, ...] | None = self.name or (
            None if not stages else stages[0] if len(stages) == 1 else stages
        )
        if self.name:
            self._unicode = regex.compile(_FUSED[self.name])
            self._ascii = re.compile(_to_ascii(_FUSED[self.name]), re.ASCII)
        else:
            self._compiled = [_compile(stage) for stage in stages]

    @property
    def is_local(self) -> bool:
        """Whether long text may be cut at `safe_cut` without changing its chunks."""
        return self.name is not None

    def split(self, text: str) -> list[str]:
        """The chunks of `text` in order; together they are `text`."""
        if self.name:
            if text.isascii():
                return self._ascii.findall(text)
            if len(text) <= _BLOCK:
                return self._unicode.findall(text)
            chunks: list[str] = []
            start = 0
            while start < len(text):
                stop = safe_cut(text, start, start + _BLOCK)
                block = text[start:stop]
                chunks += (self._ascii if block.isascii() else self._unicode).findall(block)
                start = stop
            return chunks
        chunks = [text] if text else []
        for compiled in self._compiled:
            chunks = [piece for chunk in chunks for piece in _isolate(compiled, chunk)]
        return chunks


def _compile(pattern: str) -> "regex.Pattern[str]":
    if any(mark in pattern for mark in ("&&", "--", "~~")) and "[" in pattern:
        raise TokenizerError(
            f"tokenizer pattern: set operations mean different things to different regex engines; got {pattern!r}; "
            "write the set out"
        )
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise TokenizerError(f"tokenizer pattern: a valid regex is required; {pattern!r} fails: {error}") from error


def _isolate(compiled: "regex.Pattern[str]", text: str) -> Iterator[str]:
    """Matches and what lies between them, in order, none empty."""
    end = 0
    for match in compiled.finditer(text):
        start, stop = match.span()
        if start > end:
            yield text[end:start]
        if stop > start:
            yield text[start:stop]
        end = stop
    if end < len(text):
        yield text[end:]
