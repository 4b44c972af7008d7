"""Text to tokens, and a position among them."""

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from riftco.cajal.diagnostics import CajalSyntaxError, Diagnostic, Source, Span

Item = TypeVar("Item")
KEYWORDS = frozenset("type rel def let in case of inl inr inj error as for dict Fin and or not".split())
MAX_DIGITS = 12

# Longest match first. `()` is two tokens, and `_` alone is no identifier.
_TOKEN = re.compile(
    r"(?P<space>(?:[ \t\r\n]|#[^\n]*)+)|(?P<int>[0-9]+)|(?P<id>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<symbol><\|>|->|=>|==|!=|<=|>=|[()\[\]{},.:;=+\-*%^|<>/@])"
)


class Token(NamedTuple):
    """A word of a text: kind "id", "int", "symbol" (keywords and `_` too) or "end"."""

    kind: str
    text: str
    start: int
    end: int


def is_identifier(name: object) -> bool:
    """Whether a name can stand in a program text."""
    return (
        isinstance(name, str)
        and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None
        and name != "_"
        and name not in KEYWORDS
    )


def syntax_error(source: Source, start: int, end: int, wanted: str) -> CajalSyntaxError:
    """An error at some characters: what was wanted, and what stands there."""
    span = Span(source, start, end)
    found = source.text[start:end]
    found = f"`{found[:40]}`" if found else "the end of the text"
    message = f"syntax: {wanted}; got {found} ({span})"
    return CajalSyntaxError(message, [Diagnostic("syntax", message, None, (span,), (wanted,))])


def tokens(source: Source) -> list[Token]:
    """The tokens of a text, and one of kind "end".

    Raises:
        CajalSyntaxError: a character that belongs to no token, or a number of more than 12 digits.
    """
    found, at, text = [], 0, source.text
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise syntax_error(source, at, at + 1, "no word of the language begins with this character")
        kind, word = str(match.lastgroup), match.group()
        if kind == "int" and len(word) > MAX_DIGITS:
            raise syntax_error(source, at, match.end(), f"a number has at most {MAX_DIGITS} digits")
        if kind == "id" and not is_identifier(word):
            kind = "symbol"
        if kind != "space":
            found.append(Token(kind, word, at, match.end()))
        at = match.end()
    found.append(Token("end", "", len(text), len(text)))
    return found


class Reader:
    """A position among the tokens of a source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tokens, self.at = tokens(source), 0

    @property
    def next(self) -> Token:
        """The token to read next."""
        return self.tokens[self.at]

    def peek(self, *texts: str, ahead: int = 0) -> bool:
        """Whether the next token, or one further ahead, is one of these symbols."""
        token = self.tokens[min(self.at + ahead, len(self.tokens) - 1)]
        return token.kind == "symbol" and token.text in texts

    def take(self) -> Token:
        """Read a token."""
        token = self.next
        self.at += token.kind != "end"
        return token

    def took(self, *texts: str) -> bool:
        """Read one of these symbols if it is next."""
        found = self.peek(*texts)
        self.at += found
        return found

    def fail(self, wanted: str) -> NoReturn:
        """Raise CajalSyntaxError at the next token."""
        raise syntax_error(self.source, self.next.start, self.next.end, wanted)

    def want(self, text: str, where: str) -> Token:
        """Read this symbol."""
        return self.take() if self.peek(text) else self.fail(f"`{text}` must stand {where}")

    def identifier(self, what: str) -> Token:
        """Read a name."""
        return self.take() if self.next.kind == "id" else self.fail(f"{what} must be a name")

    def number(self, what: str) -> int:
        """Read a number."""
        return int(self.take().text) if self.next.kind == "int" else self.fail(f"{what} must be a number")

    def listed(self, item: Callable[[], Item], close: str) -> list[Item]:
        """Read items between commas up to a closing symbol, which is read too."""
        found = [item()]
        while self.took(","):
            found.append(item())
        self.want(close, "after the last of a list")
        return found

    def whole(self, rule: Callable[[], Item]) -> Item:
        """Read what a rule reads, and nothing after it."""
        found = rule()
        return found if self.next.kind == "end" else self.fail("the text must end here")

    def span(self, start: int) -> Span:
        """From an offset to the end of the token read last."""
        return Span(self.source, start, self.tokens[max(0, self.at - 1)].end)

    def here(self, token: Token) -> Span:
        """The place of a token."""
        return Span(self.source, token.start, token.end)
