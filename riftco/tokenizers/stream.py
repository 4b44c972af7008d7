"""Text that is shown while it is generated: decoding one token at a time, and ending at a stop string."""

import codecs
from collections.abc import Callable, Sequence


class DecodeStream:
    """Turns ids into text as they come, never emitting half a character.

    A token may end inside a UTF-8 character; its bytes wait until the character is whole. Bytes that can no
    longer become a character come out as U+FFFD as soon as that is certain. What `push` and `flush` return,
    joined, is `decode` of all the ids.

    Args:
        token_bytes: the bytes of an id; it raises for an id out of range, and the stream is then as it was.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that is certain now; often the token's own, sometimes "" or more than one character."""
        return self._decoder.decode(self._token_bytes(id))

    def flush(self) -> str:
        """The rest: U+FFFD for a character that was cut off, else ""; the stream can then be used anew."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


class StopFilter:
    """Passes text on up to the first stop string, never a part of one.

    A tail that could be the beginning of a stop string is held back until it is decided.

    Args:
        stop: strings that end the text, none empty.

    Attributes:
        found: whether a stop string has come; from then on nothing is passed.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held = tuple(stop), ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain now."""
        if self.found:
            return ""
        held = self._held + piece
        cut = min((at for s in self._stop if (at := held.find(s)) >= 0), default=None)
        if cut is not None:
            self.found, self._held = True, ""
            return held[:cut]
        keep = max((n for s in self._stop for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held
