"""Tokens that stand outside the merges: special tokens, and what a foreign file adds to its vocabulary."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from riftco.errors import TokenizerError


@dataclass(frozen=True)
class AddedToken:
    """One token matched as a whole.

    Attributes:
        content: its text.
        id: its id.
        special: whether it is control rather than text, so that `allow_special` and `skip_special` apply.
        normalized: whether it is looked for after the others, in normalized text (a foreign file's flag).
    """

    content: str
    id: int
    special: bool = True
    normalized: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"special token: str is required; got {type(self.content).__name__} {self.content!r}")
        if not self.content:
            raise TokenizerError('special token: a text of at least one character is required; got ""')
        try:
            self.content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"special token: {self.content!r} is not encodable as UTF-8; write it without"
            ) from error


class AddedTokenFinder:
    """Cuts text around added tokens: the leftmost match, and of those that begin there the longest.

    Args:
        tokens: the added tokens.
        normalize: applied to the text between the tokens that are not `normalized`.
    """

    def __init__(self, tokens: Sequence[AddedToken], normalize: Callable[[str], str] | None = None) -> None:
        self._ids = {token.content: token.id for token in tokens}
        self._normalize = normalize
        self._passes = {
            allow: [
                _any_of([t.content for t in tokens if t.normalized is normalized and (allow or not t.special)])
                for normalized in (False, True)
            ]
            for allow in (False, True)
        }

    def split(self, text: str, allow_special: bool) -> list[str | int]:
        """The text in order, as stretches of text and ids of added tokens."""
        raw, normalized = self._passes[allow_special]
        parts = self._cut([text], raw)
        if self._normalize is not None:
            parts = [self._normalize(part) if isinstance(part, str) else part for part in parts]
        return self._cut(parts, normalized)

    def _cut(self, parts: list[str | int], pattern: "re.Pattern[str] | None") -> list[str | int]:
        if pattern is None:
            return parts
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            # A capturing split alternates text and match.
            for index, piece in enumerate(pattern.split(part)):
                if index % 2:
                    cut.append(self._ids[piece])
                elif piece:
                    cut.append(piece)
        return cut


def _any_of(contents: list[str]) -> "re.Pattern[str] | None":
    if not contents:
        return None
    return re.compile("(" + "|".join(map(re.escape, sorted(contents, key=len, reverse=True))) + ")")
