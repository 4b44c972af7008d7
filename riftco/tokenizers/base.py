"""What every tokenizer does: text or bytes to ids and back, an identity, and a file."""

import abc
import codecs
import copy
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from riftco.errors import TokenizerError
from riftco.tokenizers.stream import DecodeStream


class Tokenizer(abc.ABC):
    """Base of `ByteTokenizer` and `BPETokenizer`; immutable, safe to share between threads.

    Attributes:
        kind: "byte" or "bpe".
        vocab_size: ids are 0 .. vocab_size − 1.
        chat_template: the Jinja template of the model that it was loaded with, or None; no part of its identity.
    """

    kind: str
    vocab_size: int
    chat_template: str | None = None
    _pieces: Sequence[bytes | None]
    _special_ids: frozenset[int] = frozenset()

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes of every id in order; b"" where a foreign file left an id unused."""
        return tuple(piece or b"" for piece in self._pieces)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special token -> id, in id order."""
        return {}

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, where the tokenizer has one."""
        return None

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, where the tokenizer has one."""
        return None

    @property
    def pad_id(self) -> int | None:
        """The id that fills up a batch, where the tokenizer has one."""
        return None

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint16 and uint32 that holds every id; what `encode_array` returns."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @property
    def byte_lengths(self) -> NDArray[np.int32]:
        """int32[vocab_size]: bytes of text that each id stands for, 0 for special tokens.

        Bits per byte divides by these; the length of the decoded string would be wrong for a token that holds
        part of a character.
        """
        lengths = np.array([len(piece or b"") for piece in self._pieces], np.int32)
        lengths[list(self._special_ids)] = 0
        return lengths

    @abc.abstractmethod
    def encode_array(self, text: str | bytes, *, allow_special: bool = True) -> NDArray[np.unsignedinteger]:
        """`encode`, as an array of `dtype`."""

    def encode(self, text: str | bytes, *, allow_special: bool = True) -> list[int]:
        """The ids of a text or of bytes; "" gives [].

        Args:
            text: str (encoded as UTF-8), or bytes, which are taken as they are: any values, no special tokens.
            allow_special: whether special tokens written out in a str become their ids; with False they are text.

        Raises:
            TypeError: text is neither.
            TokenizerError: a lone surrogate in a str, or a byte that the vocabulary lacks.
        """
        return self.encode_array(text, allow_special=allow_special).tolist()

    def encode_file(
        self, path: str | os.PathLike[str], block_bytes: int = 1 << 24
    ) -> Iterator[NDArray[np.unsignedinteger]]:
        """Arrays that, concatenated, are `encode_array` of the file's bytes.

        Reads about `block_bytes` at a time where the tokenizer can be cut (byte, or a named split pattern), else
        the whole file. Special tokens written in the file are text.
        """
        with open(path, "rb") as file:
            if not self._can_cut:
                yield self.encode_array(file.read())
                return
            kept = b""
            while block := file.read(block_bytes):
                kept += block
                cut = self._last_cut(kept)
                if cut:
                    yield self.encode_array(kept[:cut])
                    kept = kept[cut:]
            if kept:
                yield self.encode_array(kept)

    _can_cut: bool = True

    def _last_cut(self, data: bytes) -> int:
        """The last index at which `data` may be cut without changing ids; 0 when there is none."""
        return len(data)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one id.

        Raises:
            TypeError: id is not an integer (bool and float are not).
            TokenizerError: id is out of range or unused.
        """
        return self._bytes_of([id])[0]

    def _bytes_of(self, ids: Iterable[int]) -> list[bytes]:
        if hasattr(ids, "__array__"):
            row = np.asarray(ids)
            if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
                raise TypeError(f"decode: ids must be one row of integers; got {row.dtype}{list(row.shape)}")
            numbers = row.tolist()
        elif isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable):
            raise TypeError(f"decode: ids must be a sequence of integers; got {type(ids).__name__}")
        else:
            numbers = list(ids)
            for kind in set(map(type, numbers)) - {int}:
                if issubclass(kind, (bool, float)) or not hasattr(kind, "__index__"):
                    raise TypeError(f"decode: every id must be an integer; got {kind.__name__}")
            numbers = [int(id) for id in numbers]
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            wrong = next(id for id in numbers if not 0 <= id < self.vocab_size)
            raise TokenizerError(f"decode: ids must lie in 0..{self.vocab_size - 1}; got {wrong}")
        found = [self._pieces[id] for id in numbers]
        if None in found:
            raise TokenizerError(
                f"decode: id {numbers[found.index(None)]} is unused in this vocabulary; it has no bytes"
            )
        return found  # pyright: ignore[reportReturnType]

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """The bytes that the ids stand for, exactly; `skip_special` leaves special tokens out.

        Raises:
            TypeError, TokenizerError: as `token_bytes`.
        """
        if skip_special:
            ids = list(ids)
            return b"".join(
                [piece for id, piece in zip(ids, self._bytes_of(ids), strict=True) if id not in self._special_ids]
            )
        return b"".join(self._bytes_of(ids))

    def decode(self, ids: Iterable[int], *, errors: str = "replace", skip_special: bool = False) -> str:
        """The text that the ids stand for; nothing is cleaned up.

        Args:
            ids: integers in 0 .. vocab_size − 1.
            errors: "replace" writes U+FFFD for bytes that are not UTF-8 (a model may sample such), "strict" raises.
            skip_special: leave special tokens out.

        Raises:
            TypeError, TokenizerError: as `token_bytes`; under "strict" also for bytes that are not UTF-8.
        """
        if errors not in ("replace", "strict"):
            raise TokenizerError(f'decode: errors must be "replace" or "strict"; got {errors!r}')
        data = self.decode_bytes(ids, skip_special=skip_special)
        try:
            return data.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise TokenizerError(
                f'decode: the ids are not UTF-8 text ({error}); use errors="replace" or decode_bytes'
            ) from error

    def decode_stream(self, *, skip_special: bool = False) -> DecodeStream:
        """An incremental decoder: `push(id) -> str`, `flush() -> str`; see `DecodeStream`."""
        return DecodeStream(lambda id: self.decode_bytes([id], skip_special=skip_special))

    def with_chat_template(self, template: str | None) -> Self:
        """The same tokenizer with another chat template."""
        other = copy.copy(self)
        other.chat_template = template
        return other

    @property
    def effective_chat_template(self) -> str:
        """`chat_template`, or the plain one of `riftco.tokenizers.chat` for a tokenizer that was trained here.

        Raises:
            TokenizerError: a tokenizer made elsewhere that came without a template: what its model was trained on is
                not known.
        """
        if self.chat_template is not None:
            return self.chat_template
        if getattr(self, "foreign", None) is not None:
            raise TokenizerError(
                "chat: the model must come with a chat template (chat_template.jinja); it has none; give one with "
                "with_chat_template, such as riftco.tokenizers.chat.PLAIN"
            )
        from riftco.tokenizers.chat import PLAIN

        return PLAIN

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a chat, as the template writes it; no token is added to what it writes.

        Args:
            messages: {"role": …, "content": …}, in order.
            add_generation_prompt: end with what makes a model answer.
            **variables: whatever else the template reads, such as `tools`.

        Raises:
            TokenizerError: there is no template, or as `riftco.tokenizers.chat.render`.
        """
        from riftco.tokenizers import chat

        template = self.effective_chat_template
        settings = {"add_generation_prompt": add_generation_prompt, "special_tokens": chat.special_tokens(self)}
        return self.encode(chat.render_text(messages, template, **settings, **variables))

    @abc.abstractmethod
    def to_state(self) -> dict[str, Any]:
        """Everything that defines the tokenizer, as JSON-able values; `from_state` is the inverse."""

    @classmethod
    @abc.abstractmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The tokenizer of a state.

        Raises:
            TokenizerError: the state is not one of this kind, or is inconsistent.
        """

    def fingerprint(self) -> str:
        """sha256 (hex) of the canonical state; equal exactly when two tokenizers are."""
        canonical = json.dumps(self.to_state(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_state() == other.to_state()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `tokenizer.json` and return its path; see `riftco.tokenizers.hf_json`.

        Args:
            path: a name ending in .json, or a directory, which is made if need be. An existing file is replaced
                in one step.
        """
        from riftco.tokenizers.hf_json import write

        return write(self, path)

    def tokenizer_config(self, **fields: Any) -> dict[str, Any]:
        """The content of `tokenizer_config.json`; see `riftco.tokenizers.hf_json.tokenizer_config`."""
        from riftco.tokenizers.hf_json import tokenizer_config

        return tokenizer_config(self, **fields)


def to_utf8(text: object) -> bytes:
    """The bytes of a str or a bytes-like object.

    Raises:
        TypeError: it is neither.
        TokenizerError: a str with a lone surrogate, which no UTF-8 text can hold.
    """
    if isinstance(text, str):
        try:
            return codecs.encode(text, "utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"encode: text must be encodable as UTF-8; character {error.start} is a lone surrogate; pass bytes"
            ) from error
    if isinstance(text, (bytes, bytearray, memoryview)):
        return bytes(text)
    raise TypeError(f"encode: str or bytes is required; got {type(text).__name__}")
