"""Tokenizers as GGUF keeps them: byte-level BPE by strings, with the split rule by name in `tokenizer.ggml.pre`.

A tokenizer that the keys cannot express (a byte tokenizer, no split rule or an unpublished one) is written as its own
state instead, and the model with it as architecture `riftco`. Where the keys do express it, what they leave out (roles,
flags of added tokens, a normalizer) stands beside them in `riftco.tokenizer`, so that the same tokenizer comes back.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from riftco.bundle.manifest import strict_json
from riftco.errors import BundleError, RiftcoError, TokenizerError
from riftco.interchange.gguf.pre_tokenizers import IGNORES_MERGES, PATTERN_OF, PRE_OF
from riftco.tokenizers import AddedToken, BPETokenizer, Foreign, Tokenizer, from_state
from riftco.tokenizers.byte_level import CHARACTERS
from riftco.tokenizers.byte_level import to_string as to_byte_level

STATE = "riftco.tokenizer"
FINGERPRINT = "riftco.tokenizer.fingerprint"
PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def refusal(tokenizer: Tokenizer) -> str | None:
    """Why GGUF's keys cannot express a tokenizer, in a few words; None where they can."""
    if not isinstance(tokenizer, BPETokenizer):
        return "GGUF has no byte tokenizer"
    if tokenizer.pattern not in PRE_OF:
        return "GGUF has no name for the tokenizer's split rule"
    strings = _strings(tokenizer)
    if len(set(strings.values())) < len(strings):
        return "two tokens have the same text"
    if any(" " in strings[left] or " " in strings[right] for left, right, _ in tokenizer.merges):
        return "a merge's text has a space"
    ignores = tokenizer.foreign is not None and tokenizer.foreign.ignore_merges
    if ignores != (PRE_OF[tokenizer.pattern] in IGNORES_MERGES) and not _reaches_every_token(tokenizer):
        return f"ignore_merges belongs to {' and '.join(sorted(IGNORES_MERGES))}"
    return None


def _strings(tokenizer: BPETokenizer) -> dict[int, str]:
    """Id -> what the file calls the token: the byte-level alphabet, or an added token's own text."""
    if tokenizer.foreign is not None:
        strings = {id: string for string, id in tokenizer.foreign.vocabulary.items()}
    else:
        strings = {id: to_byte_level(piece) for id, piece in enumerate(tokenizer.vocabulary)}
    return strings | {token.id: token.content for token in tokenizer.added_tokens}


def _reaches_every_token(tokenizer: BPETokenizer) -> bool:
    """Whether merging a token's own bytes gives that token, so that `ignore_merges` changes nothing."""
    pieces, byte_ids, added = tokenizer.vocabulary, tokenizer._byte_ids, {token.id for token in tokenizer.added_tokens}
    for id in set(_strings(tokenizer)) - added:
        ids = [known for byte in pieces[id] if (known := byte_ids[byte]) is not None]
        if tokenizer._merger.merge(ids) != [id]:
            return False
    return True


def native_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys of a tokenizer that GGUF's cannot express: its state as it is."""
    state = json.dumps(tokenizer.to_state(), sort_keys=True, separators=(",", ":"))
    return {f"{PREFIX}model": "none", STATE: state, FINGERPRINT: tokenizer.fingerprint()}


def to_keys(tokenizer: BPETokenizer, rows: int) -> dict[str, Any]:
    """The keys of a tokenizer that GGUF's can express.

    Args:
        tokenizer: one for which `refusal` is None.
        rows: of the embedding; ids without a token are filled up to so many with unused ones.
    """
    strings, added = _strings(tokenizer), {token.id: token for token in tokenizer.added_tokens}
    taken = set(strings.values())
    tokens, types = [], np.full(rows, NORMAL, np.int32)
    for id in range(rows):
        if id in strings:
            tokens.append(strings[id])
            types[id] = (CONTROL if added[id].special else USER_DEFINED) if id in added else NORMAL
            continue
        filler = f"[PAD{id}]"
        while filler in taken:
            filler = f"[{filler}]"
        tokens.append(filler)
        types[id] = UNUSED
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": PRE_OF[tokenizer.pattern],
        "tokens": tokens,
        "token_type": types,
        "merges": [f"{strings[left]} {strings[right]}" for left, right, _ in tokenizer.merges],
    }
    ids = {token.content: token.id for token in tokenizer.added_tokens}
    keys |= {name: ids[tokenizer.roles[role]] for role, name in _ROLES.items() if role in tokenizer.roles}
    first, last = _ends(tokenizer.foreign.post_processor if tokenizer.foreign else None)
    bos, eos = tokenizer.roles.get("bos"), tokenizer.roles.get("eos")
    keys |= {"add_bos_token": bos is not None and first == bos, "add_eos_token": eos is not None and last == eos}
    keys["add_space_prefix"] = False
    state = tokenizer.to_state()
    del state["merges"]
    if tokenizer.foreign is not None:
        vocabulary = state["foreign"].pop("vocabulary")
        state["added_in_vocabulary"] = sorted(id for id, token in added.items() if token.content in vocabulary)
    own = {STATE: json.dumps(state, sort_keys=True, separators=(",", ":")), FINGERPRINT: tokenizer.fingerprint()}
    return {PREFIX + name: value for name, value in keys.items()} | own


def _ends(post_processor: Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """The special tokens that a `tokenizer.json` puts before and after a text."""
    steps = (post_processor or {}).get("processors", [post_processor or {}])
    for step in steps:
        if step.get("type") == "TemplateProcessing" and step.get("single"):
            ends = [step["single"][index].get("SpecialToken", {}).get("id") for index in (0, -1)]
            return ends[0], ends[1]
    return None, None


def from_keys(metadata: Mapping[str, Any], who: str) -> Tokenizer | None:
    """The tokenizer of a file; None where it has none.

    Args:
        metadata: of the file.
        who: begins error messages.

    Raises:
        TokenizerError: a key is missing, damaged or says something that is not supported; it is named.
        BundleError: a file that riftco wrote contradicts itself.
    """
    if metadata.get(f"{PREFIX}model", "none") in ("none", "no_vocab") and STATE not in metadata:
        return None
    if STATE in metadata:
        return _own(metadata, who)
    reader = _Reader(metadata, who)
    try:
        return reader.tokenizer()
    except TokenizerError as error:
        raise error if str(error).startswith(who) else TokenizerError(f"{who}: {error}") from error


def _own(metadata: Mapping[str, Any], who: str) -> Tokenizer:
    text, fingerprint = metadata[STATE], metadata.get(FINGERPRINT)
    state = strict_json(text.encode() if isinstance(text, str) else b"", f"{who}: {STATE}")
    try:
        if metadata.get(f"{PREFIX}model") == "gpt2":
            reader = _Reader(metadata, who)
            strings, types = reader.tokens()
            in_vocabulary = set(state.pop("added_in_vocabulary", ()))
            vocabulary = {
                string: id
                for id, string in enumerate(strings)
                if types[id] == NORMAL or (types[id] in (CONTROL, USER_DEFINED) and id in in_vocabulary)
            }
            state["merges"] = reader.merges(vocabulary)
            if state["foreign"] is not None:
                state["foreign"]["vocabulary"] = vocabulary
            pattern = state["pattern"]
            if reader.pattern() != (tuple(pattern) if isinstance(pattern, list) else pattern):
                reader.fail("pre", f"what {STATE} says", reader.find("pre"))
        tokenizer = from_state(state)
    except (RiftcoError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(f"{who}: {STATE} must be a tokenizer's state; {error}; the file was changed") from error
    if tokenizer.fingerprint() != fingerprint:
        raise BundleError(f"{who}: the tokenizer must be the one of {FINGERPRINT}; it is not; the file was changed")
    return tokenizer


class _Reader:
    """The `tokenizer.ggml` keys of a file that another program wrote."""

    def __init__(self, metadata: Mapping[str, Any], who: str) -> None:
        self.metadata, self.who = metadata, who

    def fail(self, name: str, required: str, got: Any) -> NoReturn:
        raise TokenizerError(f"{self.who}: {PREFIX}{name} must be {required}; got {got!r:.80}")

    def find(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(PREFIX + name, default)

    def tokenizer(self) -> BPETokenizer:
        if self.find("model") != "gpt2":
            self.fail("model", "gpt2, byte-level BPE", self.find("model"))
        pre, pattern = self.find("pre"), self.pattern()
        for name in ("add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap"):
            value = self.find(name, False)
            if not isinstance(value, bool) or value:
                self.fail(name, "false, since the text is taken as it is", value)
        strings, types = self.tokens()
        roles = {role: id for role, name in _ROLES.items() if (id := self.id_of(name, len(strings), types)) is not None}
        # Whatever has a role is special, also in files that type it as ordinary text.
        special = {id for id, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)} | set(roles.values())
        vocabulary = {string: id for id, string in enumerate(strings) if types[id] != UNUSED}
        added = tuple(
            AddedToken(string, id, id in special)
            for id, string in enumerate(strings)
            if id in special or types[id] == USER_DEFINED
        )
        foreign = Foreign(
            vocabulary,
            ignore_merges=pre in IGNORES_MERGES,
            post_processor=self.post_processor(strings, roles),
            drop_unknown=any(character not in vocabulary for character in CHARACTERS),
        )
        named = {role: strings[id] for role, id in roles.items()}
        return BPETokenizer(self.merges(vocabulary), pattern=pattern, added_tokens=added, roles=named, foreign=foreign)

    def pattern(self) -> str | tuple[str, ...]:
        pre = self.find("pre")
        if not isinstance(pre, str) or pre not in PATTERN_OF:
            self.fail("pre", f"one of {', '.join(PATTERN_OF)}", pre)
        return PATTERN_OF[pre]

    def tokens(self) -> tuple[list[str], list[int]]:
        strings = self.find("tokens")
        if not isinstance(strings, list) or not strings:
            self.fail("tokens", "an array of strings", strings)
        if len(set(strings)) < len(strings):
            self.fail("tokens", "distinct", f"{Counter(strings).most_common(1)[0][0]!r:.80} twice")
        types = self.find("token_type", np.full(len(strings), NORMAL))
        if not isinstance(types, np.ndarray) or types.shape != (len(strings),) or types.dtype.kind not in "iu":
            self.fail("token_type", f"{len(strings)} integers, one a token", types)
        kinds = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED)
        if not np.isin(types, kinds).all():
            self.fail("token_type", f"made of {', '.join(map(str, kinds))}", types[~np.isin(types, kinds)][0])
        return strings, types.tolist()

    def id_of(self, name: str, count: int, types: list[int]) -> int | None:
        id = self.find(name)
        if id is None:
            return None
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < count or types[id] == UNUSED:
            self.fail(name, f"the id of a token, 0 to {count - 1}", id)
        return id

    def merges(self, vocabulary: Mapping[str, int]) -> list[tuple[int, int, int]]:
        listed = self.find("merges", [])
        if not isinstance(listed, list):
            self.fail("merges", "an array of strings", listed)
        merges = []
        for rank, merge in enumerate(listed):
            left, _, right = merge.partition(" ")
            ids = [vocabulary.get(string) for string in (left, right, left + right)]
            if None in ids:
                self.fail(f"merges[{rank}]", "two tokens of the vocabulary that make a third", merge)
            merges.append(tuple(ids))
        return merges

    def post_processor(self, strings: list[str], roles: Mapping[str, int]) -> dict[str, Any] | None:
        """The step of a `tokenizer.json` that puts bos and eos around a text, for the way to Hugging Face."""
        adds_bos = self.flag("add_bos_token", self.find("pre") in IGNORES_MERGES) and "bos" in roles
        adds_eos = self.flag("add_eos_token", False) and "eos" in roles
        if not adds_bos and not adds_eos:
            return None
        before = [{"SpecialToken": {"id": strings[roles["bos"]], "type_id": 0}}] if adds_bos else []
        after = [{"SpecialToken": {"id": strings[roles["eos"]], "type_id": 0}}] if adds_eos else []
        sequences = [[*before, {"Sequence": {"id": name, "type_id": 0}}, *after] for name in ("A", "B")]
        used = [roles[role] for role, adds in (("bos", adds_bos), ("eos", adds_eos)) if adds]
        tokens = {strings[id]: {"id": strings[id], "ids": [id], "tokens": [strings[id]]} for id in used}
        return {
            "type": "TemplateProcessing",
            "single": sequences[0],
            "pair": sequences[0] + sequences[1],
            "special_tokens": tokens,
        }

    def flag(self, name: str, default: bool) -> bool:
        value = self.find(name, default)
        if not isinstance(value, bool):
            self.fail(name, "true or false", value)
        return value
