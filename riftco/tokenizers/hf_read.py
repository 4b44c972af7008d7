"""Reading `tokenizer.json`: what is understood is read exactly, anything else is refused by name.

Understood: byte-level BPE (merges as pairs or as "a b"), with any vocabulary and id order, added tokens, the
NFC normalizer, `ignore_merges`, and pre-tokenizers made of Split, Digits and ByteLevel.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from riftco.errors import TokenizerError
from riftco.files import read_small
from riftco.tokenizers import byte_level
from riftco.tokenizers.added import AddedToken
from riftco.tokenizers.base import Tokenizer
from riftco.tokenizers.bpe import BPETokenizer, Foreign
from riftco.tokenizers.byte import ByteTokenizer
from riftco.tokenizers.hf_json import _ROLE_FIELDS, NATIVE_MODEL
from riftco.tokenizers.patterns import DIGIT, DIGITS, GPT2_AS_PUBLISHED


def read(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of the directory that holds one.

    A directory's `tokenizer_config.json` says which special tokens are bos, eos, pad and unk, where
    `tokenizer.json` itself does not.

    Raises:
        TokenizerError: the file is missing, is not JSON, or asks for something that is not understood.
    """
    file = Path(path)
    roles = None
    if file.is_dir():
        config = file / "tokenizer_config.json"
        if config.exists():
            roles = _roles(_json(config))
        file = file / "tokenizer.json"
    return from_json(_json(file), roles=roles, who=str(file))


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_small(file).decode())
    except OSError as error:
        raise TokenizerError(f"{file}: a readable tokenizer file is required; {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: JSON is required; {error}") from error
    if not isinstance(document, dict):
        raise TokenizerError(f"{file}: a JSON object is required; got {type(document).__name__}")
    return document


def _roles(config: Mapping[str, Any]) -> dict[str, str]:
    roles = {}
    for role, field in _ROLE_FIELDS.items():
        value = config.get(field)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            roles[role] = content
    return roles


def from_json(
    document: Mapping[str, Any], *, roles: Mapping[str, str] | None = None, who: str = "tokenizer.json"
) -> Tokenizer:
    """The tokenizer of a parsed `tokenizer.json`; errors begin with `who`."""
    try:
        return _Reader(document, who).tokenizer(roles)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise TokenizerError(f"{who}: not a well-formed tokenizer file ({type(error).__name__}: {error})") from error


def _steps(step: Mapping[str, Any] | None, plural: str) -> list[Mapping[str, Any]]:
    """A step as a list: [] for none, the members of a Sequence, else itself."""
    if step is None:
        return []
    return step[plural] if step.get("type") == "Sequence" else [step]


class _Reader:
    def __init__(self, document: Mapping[str, Any], who: str) -> None:
        self.document = document
        self.who = who

    def tokenizer(self, roles: Mapping[str, str] | None) -> Tokenizer:
        document, model = self.document, self.document["model"]
        marker = document.get("riftco") or (document.get("decoder") or {}).get("riftco") or {}
        if marker.get("format", 1) != 1:
            self.refuse("riftco.format", marker["format"], "update riftco")
        if model.get("type") == NATIVE_MODEL:
            kind = ByteTokenizer if marker["kind"] == "byte" else BPETokenizer
            return kind.from_state(marker["state"])
        self.check_model(model)
        for field in ("truncation", "padding"):
            if document.get(field) is not None:
                self.refuse(field, document[field], "set it to null: lengths are the caller's business")
        normalizer = self.normalizer(document.get("normalizer"))
        stages = self.stages(document.get("pre_tokenizer"))
        self.check_decoder(document.get("decoder"))
        post_processor = document.get("post_processor")
        self.check_post_processor(post_processor)
        vocabulary: dict[str, int] = model["vocab"]
        merges = self.merges(model["merges"], vocabulary)
        if marker.get("kind") == "byte":
            return ByteTokenizer([byte_level.to_bytes(s)[0] for s in sorted(vocabulary, key=vocabulary.__getitem__)])
        added = self.added_tokens(document.get("added_tokens") or [])
        contents = {token.content for token in added}
        roles = marker.get("roles", roles)
        if roles is not None:
            roles = {role: content for role, content in roles.items() if content in contents}
        own = [byte_level.CHARACTERS[byte] for byte in range(256)]
        is_standard = (
            not (normalizer or post_processor or model.get("ignore_merges") or model.get("unk_token"))
            and len(vocabulary) == 256 + len(merges)
            and all(vocabulary.get(character) == byte for byte, character in enumerate(own))
            and all(id == 256 + rank for rank, (_, _, id) in enumerate(merges))
            and all(token.id == len(vocabulary) + index for index, token in enumerate(added))
            and not contents & vocabulary.keys()
        )
        unk_token = model.get("unk_token")
        foreign = None
        if not is_standard:
            # The `tokenizers` library leaves such bytes out, so files made for it rely on that.
            lacks_bytes = unk_token is None and any(character not in vocabulary for character in own)
            drop = bool(marker.get("drop_unknown", not marker and lacks_bytes))
            ignore_merges = bool(model.get("ignore_merges"))
            foreign = Foreign(vocabulary, ignore_merges, unk_token, normalizer, post_processor, drop)
            if model.get("fuse_unk") and any(character not in vocabulary for character in own):
                self.refuse("model.fuse_unk", True, "the vocabulary lacks bytes, and runs of them would be fused")
        return BPETokenizer(merges, pattern=stages or None, added_tokens=added, roles=roles, foreign=foreign)

    def refuse(self, field: str, value: object, remedy: str) -> None:
        shown = json.dumps(value, ensure_ascii=False)
        raise TokenizerError(f"{self.who}: {field} is {shown[:120]}, which riftco does not support; {remedy}")

    def check_model(self, model: Mapping[str, Any]) -> None:
        if model.get("type", "BPE") != "BPE":
            self.refuse("model.type", model["type"], "only byte-level BPE is; use the `tokenizers` library for it")
        for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
            if model.get(field):
                self.refuse(f"model.{field}", model[field], "use the `tokenizers` library for this file")

    def normalizer(self, step: Mapping[str, Any] | None) -> str | None:
        if step is None:
            return None
        if step.get("type") == "Sequence" and len(step["normalizers"]) <= 1:
            return self.normalizer(step["normalizers"][0] if step["normalizers"] else None)
        if step.get("type") != "NFC":
            self.refuse("normalizer", step, "only NFC or none is; use the `tokenizers` library for this file")
        return "NFC"

    def stages(self, step: Mapping[str, Any] | None) -> tuple[str, ...]:
        steps = _steps(step, "pretokenizers")
        if not steps or steps[-1].get("type") != "ByteLevel":
            self.refuse("pre_tokenizer", step, "it must end with ByteLevel")
        stages: list[str] = []
        for index, part in enumerate(steps):
            kind, last = part.get("type"), index == len(steps) - 1
            if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
                text = part["pattern"]
                stages.append(text["Regex"] if "Regex" in text else re.escape(text["String"]))
            elif kind == "Digits":
                stages.append(DIGIT if part["individual_digits"] else DIGITS)
            elif kind == "ByteLevel" and last and not part.get("add_prefix_space", True):
                stages += [GPT2_AS_PUBLISHED] if part.get("use_regex", True) else []
            else:
                self.refuse("pre_tokenizer", part, "use the `tokenizers` library for this file")
        return tuple(stages)

    def check_decoder(self, step: Mapping[str, Any] | None) -> None:
        steps = _steps(step, "decoders")
        if len(steps) != 1 or steps[0].get("type") != "ByteLevel":
            self.refuse("decoder", step, "only ByteLevel is; use the `tokenizers` library for this file")

    def check_post_processor(self, step: Mapping[str, Any] | None) -> None:
        """These add tokens around a whole text at most, which `encode` does not do; they go back out as they came."""
        for part in _steps(step, "processors"):
            if part.get("type") not in ("ByteLevel", "TemplateProcessing"):
                self.refuse("post_processor", part, "use the `tokenizers` library for this file")

    def merges(self, listed: list[Any], vocabulary: Mapping[str, int]) -> list[tuple[int, int, int]]:
        merges = []
        for rank, merge in enumerate(listed):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if len(pair) != 2:
                raise TokenizerError(f"{self.who}: model.merges[{rank}] must be a pair of tokens; got {merge!r}")
            left, right = pair
            for string in (left, right, left + right):
                if string not in vocabulary:
                    raise TokenizerError(f"{self.who}: model.merges[{rank}] needs {string!r}, which model.vocab lacks")
            merges.append((vocabulary[left], vocabulary[right], vocabulary[left + right]))
        return merges

    def added_tokens(self, listed: list[Mapping[str, Any]]) -> tuple[AddedToken, ...]:
        for token in listed:
            for flag in ("single_word", "lstrip", "rstrip"):
                if token.get(flag):
                    self.refuse(f"added_tokens[{token.get('content')!r}].{flag}", True, "set it to false")
        return tuple(
            AddedToken(t["content"], t["id"], bool(t.get("special")), bool(t.get("normalized"))) for t in listed
        )
