"""Writing `tokenizer.json`, the file format of the Hugging Face `tokenizers` library.

Every tokenizer here is a byte-level BPE to that library: the byte tokenizer one without merges, the unsplit
one a pre-tokenizer that does not split. The library then gives the same ids on any text. The key `riftco`
inside `decoder`, which the library passes over (at the top it would be an error), says which kind wrote the
file and what the special tokens are for.

One thing the format cannot say: two tokens of the same bytes, which unsplit training can in rare cases
learn. Such a tokenizer is written with the model type `riftco`, which other tools refuse, rather than
approximated. Reading is in `hf_read`.
"""

import json
import os
from pathlib import Path
from typing import Any

from riftco.errors import TokenizerError
from riftco.files import replace_file
from riftco.tokenizers import byte_level
from riftco.tokenizers.base import Tokenizer
from riftco.tokenizers.bpe import BPETokenizer
from riftco.tokenizers.byte import ByteTokenizer
from riftco.tokenizers.patterns import DIGIT, DIGITS, GPT2_AS_PUBLISHED

NATIVE_MODEL = "riftco"
"""The model type of a tokenizer that the format cannot express; its state stands beside it."""

_ROLE_FIELDS = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token", "unk": "unk_token"}


def is_portable(tokenizer: Tokenizer) -> bool:
    """Whether the `tokenizers` library can run what `save` writes: no two tokens have the same bytes."""
    if isinstance(tokenizer, ByteTokenizer) or (isinstance(tokenizer, BPETokenizer) and tokenizer.foreign):
        return True
    return len(set(tokenizer.vocabulary)) == tokenizer.vocab_size


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    marker: dict[str, Any] = {"format": 1, "kind": tokenizer.kind}
    if not is_portable(tokenizer):
        marker["state"] = tokenizer.to_state()
        return {"version": "1.0", "model": {"type": NATIVE_MODEL}, "riftco": marker}
    if isinstance(tokenizer, ByteTokenizer):
        vocabulary = {byte_level.CHARACTERS[byte]: id for id, byte in enumerate(tokenizer.byte_values)}
        return _document(marker, vocabulary)
    if not isinstance(tokenizer, BPETokenizer):
        raise TypeError(f"to_json: a ByteTokenizer or BPETokenizer is required; got {type(tokenizer).__name__}")
    foreign = tokenizer.foreign
    marker["roles"] = tokenizer.roles
    if foreign:
        vocabulary = dict(sorted(foreign.vocabulary.items(), key=lambda item: item[1]))
    else:
        added_ids = {token.id for token in tokenizer.added_tokens}
        vocabulary = {byte_level.to_string(p): id for id, p in enumerate(tokenizer.vocabulary) if id not in added_ids}
    string_of = {id: string for string, id in vocabulary.items()}
    document = _document(marker, vocabulary)
    document["added_tokens"] = [
        {
            "id": token.id,
            "content": token.content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": token.normalized,
            "special": token.special,
        }
        for token in tokenizer.added_tokens
    ]
    document["pre_tokenizer"] = _pre_tokenizer(tokenizer._splitter.stages)
    document["model"]["merges"] = [[string_of[left], string_of[right]] for left, right, _ in tokenizer.merges]
    if foreign:
        if foreign.drop_unknown:
            marker["drop_unknown"] = True
        document["normalizer"] = {"type": foreign.normalizer} if foreign.normalizer else None
        document["post_processor"] = foreign.post_processor
        document["model"]["unk_token"] = foreign.unk_token
        document["model"]["ignore_merges"] = foreign.ignore_merges
    return document


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _pre_tokenizer(stages: tuple[str, ...]) -> dict[str, Any]:
    """GPT-2's regex is built into ByteLevel; every other stage is written out before it."""
    published = bool(stages) and stages[-1] == GPT2_AS_PUBLISHED
    steps: list[dict[str, Any]] = []
    for stage in stages[:-1] if published else stages:
        if stage in (DIGIT, DIGITS):
            steps.append({"type": "Digits", "individual_digits": stage == DIGIT})
        else:
            steps.append({"type": "Split", "pattern": {"Regex": stage}, "behavior": "Isolated", "invert": False})
    steps.append(_byte_level(published))
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


def _document(marker: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _byte_level(False),
        "post_processor": None,
        "decoder": _byte_level(True) | {"riftco": marker},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def tokenizer_config(tokenizer: Tokenizer, **fields: Any) -> dict[str, Any]:
    """The content of `tokenizer_config.json`, for `transformers` to open the tokenizer as it is.

    Args:
        tokenizer: any.
        **fields: added as they are, over what is derived (`model_max_length`, `chat_template`, …).
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    if isinstance(tokenizer, BPETokenizer):
        config["added_tokens_decoder"] = {
            str(token.id): {
                "content": token.content,
                "lstrip": False,
                "normalized": token.normalized,
                "rstrip": False,
                "single_word": False,
                "special": token.special,
            }
            for token in tokenizer.added_tokens
        }
        config |= {_ROLE_FIELDS[role]: content for role, content in tokenizer.roles.items()}
    return config | fields


def write(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> Path:
    """Write `tokenizer.json`, in one step; `path` is a .json file or a directory."""
    target = Path(path)
    if target.suffix != ".json":
        target = target / "tokenizer.json"
    text = json.dumps(to_json(tokenizer), ensure_ascii=False, indent=1) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, text)
    except OSError as error:
        raise TokenizerError(f"save: {target} cannot be written ({error.strerror}); choose a writable place") from error
    return target
