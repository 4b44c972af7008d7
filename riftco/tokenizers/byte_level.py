"""The byte-level alphabet: 256 printable characters that stand for the 256 byte values in a tokenizer.json.

Printable Latin-1 characters stand for themselves; the 68 others (controls, space, no-break space, soft hyphen)
become U+0100, U+0101, … in ascending byte order. Source: the GPT-2 release, Radford et al. 2019.
"""


def _alphabet() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return tuple(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256))


CHARACTERS: tuple[str, ...] = _alphabet()
"""Byte value -> its character."""

_BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}


def to_string(piece: bytes) -> str:
    """The piece in the byte-level alphabet, one character a byte."""
    return "".join([CHARACTERS[byte] for byte in piece])


def to_bytes(string: str) -> bytes:
    """The bytes that a vocabulary string stands for; a string with other characters stands for its own UTF-8."""
    try:
        return bytes([_BYTES[character] for character in string])
    except KeyError:
        return string.encode("utf-8")
