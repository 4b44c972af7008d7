"""Decoding one token at a time, for text that is shown while it is generated."""

import codecs
from collections.abc import Callable


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
