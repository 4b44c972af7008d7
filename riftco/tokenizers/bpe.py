"""The byte-pair tokenizer: learned here or read from a file, with or without a split pattern."""

import array
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from riftco.errors import TokenizerError
from riftco.tokenizers import byte_level
from riftco.tokenizers.added import AddedToken, AddedTokenFinder
from riftco.tokenizers.base import Tokenizer, to_utf8
from riftco.tokenizers.bpe_checks import (
    check_added,
    check_foreign,
    check_merges,
    check_roles,
    check_special_texts,
    require_integer,
)
from riftco.tokenizers.bpe_encode import ChunkCache, Merger
from riftco.tokenizers.bpe_train import count_chunks, learn_merges
from riftco.tokenizers.patterns import Splitter

_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Foreign:
    """What a tokenizer.json made elsewhere may have and one trained here never has.

    Attributes:
        vocabulary: string in the byte-level alphabet -> id, in any order.
        ignore_merges: a chunk that is in the vocabulary is that token, whatever the merges say (Llama 3).
        unk_token: stands for bytes that the vocabulary lacks; with None such a byte is an error, or left out.
        normalizer: None or "NFC", applied to str (never to bytes).
        post_processor: kept for the way back out; `encode` adds no tokens.
        drop_unknown: without `unk_token`, leave bytes that the vocabulary lacks out, as other programs do with such
            a file.
    """

    vocabulary: Mapping[str, int]
    ignore_merges: bool = False
    unk_token: str | None = None
    normalizer: str | None = None
    post_processor: Mapping[str, Any] | None = None
    drop_unknown: bool = False


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding.

    Ids 0..255 are the byte values, then come the merges in the order learned, then the special tokens, unless
    `foreign` gives another vocabulary. Encoding merges the earliest-learned pair first, leftmost first.

    Args:
        merges: (left id, right id, id) in the order learned.
        pattern: where text is split before merging; see `Splitter`. None: nowhere, merges cross spaces and lines.
        added_tokens: special tokens with their ids.
        roles: which special tokens are "bos", "eos", "pad"; `<|endoftext|>` is "eos" where None is given.
        foreign: the vocabulary and options of a file made elsewhere.

    Attributes:
        merges: tuple of (left, right, id).
        pattern: None, a published name, a regex, or a tuple of regexes.
        vocab_size: number of ids; one past the highest id where a foreign vocabulary leaves gaps.

    Raises:
        TypeError: an argument has a wrong type.
        TokenizerError: the parts do not fit together; the message names the first one that does not.
    """

    kind = "bpe"

    def __init__(
        self,
        merges: Sequence[Sequence[int]],
        *,
        pattern: str | tuple[str, ...] | None = None,
        added_tokens: Sequence[AddedToken] = (),
        roles: Mapping[str, str] | None = None,
        foreign: Foreign | None = None,
    ) -> None:
        self._splitter = Splitter(pattern)
        self.pattern = self._splitter.pattern
        self.added_tokens = tuple(added_tokens)
        self.foreign = foreign
        if foreign is None:
            self.merges, pieces = check_merges(merges)
            byte_ids: list[int | None] = list(range(256))
        else:
            self.merges, pieces = check_foreign(merges, foreign.vocabulary)
            byte_ids = [foreign.vocabulary.get(character) for character in byte_level.CHARACTERS]
        self._pieces = check_added(pieces, self.added_tokens, foreign.vocabulary if foreign else None)
        self.vocab_size = len(self._pieces)
        self._special_ids = frozenset(token.id for token in self.added_tokens if token.special)
        if roles is None:
            roles = {"eos": _END_OF_TEXT} if _END_OF_TEXT in self.special_tokens else {}
        self.roles = check_roles(roles, self.added_tokens)

        unknown = foreign.vocabulary.get(foreign.unk_token) if foreign and foreign.unk_token is not None else None
        self._byte_ids = [unknown if id is None else id for id in byte_ids]
        self._merger = Merger(self.merges)
        self._can_cut = self._splitter.is_local
        self._typecode = "H" if self.vocab_size <= 1 << 16 else "I"
        normalize = (lambda text: unicodedata.normalize("NFC", text)) if foreign and foreign.normalizer else None
        self._finder = AddedTokenFinder(self.added_tokens, normalize)
        self._cache = ChunkCache(self._encode_chunk)

    @classmethod
    def train(
        cls,
        data: bytes | str,
        vocab_size: int = 512,
        min_frequency: int = 2,
        pattern: str | tuple[str, ...] | None = None,
        special_tokens: Sequence[str] = (),
        *,
        roles: Mapping[str, str] | None = None,
    ) -> Self:
        """Learn merges from a corpus.

        Each round joins the most frequent adjacent pair (ties: the smallest left id, then the smallest right id)
        until `vocab_size` is reached or no pair is left that is frequent enough. Without a pattern, pairs are
        counted over the whole corpus. With one, they are counted inside chunks, and a pair whose bytes are
        already a token is passed over, so that every token is a different string; so is, in either mode, one that
        spells a special token.

        Args:
            data: the corpus; any bytes, or a str for its UTF-8. Special tokens written in it are text.
            vocab_size: at most so many ids, bytes and special tokens included; 256 + len(special_tokens) or more.
            min_frequency: a pair must be counted at least so often; >= 1.
            pattern: see `Splitter`; "gpt2", "llama3", "qwen2", "smollm", a regex, or None.
            special_tokens: distinct texts; their ids follow the merges.
            roles: see the class.

        Raises:
            TypeError: a number is a bool, a float or no number; the corpus is neither bytes nor str.
            TokenizerError: an empty corpus, or a number out of range.
        """
        who = f"{cls.__name__}.train"
        data = to_utf8(data)
        reserved = check_special_texts(who, special_tokens)
        vocab_size = require_integer(who, "vocab_size", vocab_size, 256 + len(special_tokens))
        min_frequency = require_integer(who, "min_frequency", min_frequency, 1)
        splitter = Splitter(pattern)
        if not data:
            raise TokenizerError(f"{who}: a corpus of at least one byte is required; got an empty one")
        if splitter.stages:
            chunks = count_chunks(splitter.split(data.decode("utf-8", "surrogateescape")))
        else:
            chunks = [(data, 1)]
        limit = vocab_size - 256 - len(special_tokens)
        merges = learn_merges(chunks, limit, min_frequency, unique_pieces=bool(splitter.stages), reserved=reserved)
        first = 256 + len(merges)
        added = tuple(AddedToken(content, first + index) for index, content in enumerate(special_tokens))
        return cls(merges, pattern=pattern, added_tokens=added, roles=roles)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special token -> id."""
        return {token.content: token.id for token in self.added_tokens if token.special}

    @property
    def pattern_name(self) -> str | None:
        """The published name of the split pattern ("gpt2", …), or None."""
        return self._splitter.name

    @property
    def bos_id(self) -> int | None:
        """The id of the "bos" role."""
        return self._role_id("bos")

    @property
    def eos_id(self) -> int | None:
        """The id of the "eos" role."""
        return self._role_id("eos")

    @property
    def pad_id(self) -> int | None:
        """The id of the "pad" role."""
        return self._role_id("pad")

    def _role_id(self, role: str) -> int | None:
        content = self.roles.get(role)
        return next((token.id for token in self.added_tokens if token.content == content), None)

    def encode_array(self, text: str | bytes, *, allow_special: bool = True) -> NDArray[np.unsignedinteger]:
        """`encode`, as an array of `dtype`; several times faster than a list for long text."""
        if isinstance(text, str):
            if not text.isascii():
                to_utf8(text)
            parts = self._finder.split(text, allow_special)
        else:
            # Bytes that are not UTF-8 ride along as lone surrogates, which no pattern calls letter, digit or space.
            parts = [to_utf8(text).decode("utf-8", "surrogateescape")]
        raw: list[bytes] = []
        for part in parts:
            if isinstance(part, int):
                raw.append(array.array(self._typecode, [part]).tobytes())
            elif self._splitter.stages:
                raw.extend(map(self._cache.__getitem__, self._splitter.split(part)))
            else:
                raw.append(self._encode_chunk(part))
        return np.frombuffer(bytearray().join(raw), self.dtype)

    def _encode_chunk(self, chunk: str) -> bytes:
        """The ids of one chunk as raw bytes of `dtype`."""
        data = chunk.encode("utf-8", "surrogateescape")
        if self.foreign is not None and self.foreign.ignore_merges:
            whole = self.foreign.vocabulary.get(byte_level.to_string(data))
            if whole is not None:
                return array.array(self._typecode, [whole]).tobytes()
        known = [self._byte_ids[byte] for byte in data]
        ids = [id for id in known if id is not None]
        if len(ids) < len(known) and not (self.foreign is not None and self.foreign.drop_unknown):
            byte = data[known.index(None)]
            raise TokenizerError(
                f"BPETokenizer.encode: byte {byte} (0x{byte:02x}) is not in the vocabulary, which has no token for the "
                "unknown; use a tokenizer that has all 256 bytes"
            )
        return array.array(self._typecode, self._merger.merge(ids)).tobytes()

    def _last_cut(self, data: bytes) -> int:
        cut = data.rfind(b" ")
        while cut > 0 and not data[cut - 1 : cut].isalnum():
            cut = data.rfind(b" ", 0, cut)
        return max(cut, 0)

    def to_state(self) -> dict[str, Any]:
        """format, kind, pattern, merges, added_tokens, roles, foreign; JSON-able."""
        return {
            "format": 1,
            "kind": "bpe",
            "pattern": list(self.pattern) if isinstance(self.pattern, tuple) else self.pattern,
            "merges": [list(merge) for merge in self.merges],
            "added_tokens": [asdict(token) for token in self.added_tokens],
            "roles": dict(self.roles),
            "foreign": self._foreign_state(),
        }

    def _foreign_state(self) -> dict[str, Any] | None:
        if self.foreign is None:
            return None
        state = asdict(self.foreign)
        if not state["drop_unknown"]:
            del state["drop_unknown"]  # fingerprints are older than the field
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Inverse of `to_state`, with every check of the constructor."""
        expected = {"format", "kind", "pattern", "merges", "added_tokens", "roles", "foreign"}
        if state.get("kind") != "bpe" or state.get("format") != 1 or set(state) != expected:
            raise TokenizerError(
                f"BPETokenizer.from_state: format 1, kind 'bpe' and the fields {sorted(expected)} are required; "
                f"got format {state.get('format')!r}, kind {state.get('kind')!r}, fields {sorted(state)}"
            )
        pattern, foreign = state["pattern"], state["foreign"]
        return cls(
            state["merges"],
            pattern=tuple(pattern) if isinstance(pattern, list) else pattern,
            added_tokens=tuple(AddedToken(**token) for token in state["added_tokens"]),
            roles=state["roles"],
            foreign=Foreign(**foreign) if foreign else None,
        )
