"""The byte tokenizer: one id for each byte value that a corpus holds."""

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from riftco.errors import TokenizerError
from riftco.tokenizers.base import Tokenizer, to_utf8


class ByteTokenizer(Tokenizer):
    """One id a byte: id i stands for the byte `byte_values[i]`.

    Args:
        byte_values: distinct byte values in id order; at least one.

    Raises:
        TypeError: a value is not an integer.
        TokenizerError: no values, a value out of 0..255, or one twice.
    """

    kind = "byte"

    def __init__(self, byte_values: bytes | Iterable[int]) -> None:
        values = list(byte_values)
        for value in values:
            if isinstance(value, (bool, float)) or not hasattr(value, "__index__"):
                raise TypeError(f"ByteTokenizer: byte values must be integers; got {type(value).__name__} {value!r}")
            if not 0 <= value <= 255:
                raise TokenizerError(f"ByteTokenizer: byte values must lie in 0..255; got {value}")
        if not values:
            raise TokenizerError("ByteTokenizer: at least one byte value is required; got none")
        if len(set(values)) != len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise TokenizerError(f"ByteTokenizer: byte values must be distinct; {twice} comes twice")
        self.byte_values = bytes(values)
        self.vocab_size = len(values)
        self._pieces = [bytes([value]) for value in self.byte_values]
        self._id_of = np.full(256, -1, np.int16)
        self._id_of[list(self.byte_values)] = np.arange(len(values))

    @classmethod
    def train(cls, data: bytes | str) -> Self:
        """The tokenizer of a corpus: its distinct bytes in ascending order; id = rank.

        Raises:
            TokenizerError: the corpus is empty.
        """
        data = to_utf8(data)
        if not data:
            raise TokenizerError("ByteTokenizer.train: a corpus of at least one byte is required; got an empty one")
        return cls(np.unique(np.frombuffer(data, np.uint8)).tolist())

    def encode_array(self, text: str | bytes, *, allow_special: bool = True) -> NDArray[np.unsignedinteger]:
        """`encode`, as uint16; there are no special tokens to allow."""
        data = np.frombuffer(to_utf8(text), np.uint8)
        ids = self._id_of[data]
        if len(ids) and ids.min() < 0:
            at = int(np.argmin(ids))
            raise TokenizerError(
                f"ByteTokenizer.encode: byte {data[at]} (0x{data[at]:02x}, offset {at}) is not in the vocabulary of "
                f"{self.vocab_size} bytes; train on text that contains it"
            )
        return ids.astype(self.dtype)

    def to_state(self) -> dict[str, Any]:
        """{"format": 1, "kind": "byte", "byte_values": [...]}."""
        return {"format": 1, "kind": "byte", "byte_values": list(self.byte_values)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Inverse of `to_state`; any order of distinct bytes is accepted, merges are not."""
        if state.get("kind") != "byte" or state.get("format") != 1 or not isinstance(state.get("byte_values"), list):
            raise TokenizerError(
                'ByteTokenizer.from_state: {"format": 1, "kind": "byte", "byte_values": [...]} is required; '
                f"got format {state.get('format')!r}, kind {state.get('kind')!r}"
            )
        if unknown := sorted(set(state) - {"format", "kind", "byte_values"}):
            raise TokenizerError(f"ByteTokenizer.from_state: a byte tokenizer has no {', '.join(unknown)}; remove it")
        return cls(state["byte_values"])
