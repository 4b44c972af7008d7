"""What `tokenizer.ggml.pre` may say, and the split rule that each name means.

The name fixes a regex in the programs that run the files; the file itself has none. A name that is not listed here is
refused, since every other rule would give other ids without a word.
"""

from riftco.tokenizers import GGUF_PRE

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
"""The rule of files that name none: four stages, applied one after the other."""

PRE_OF: dict[str | tuple[str, ...] | None, str] = {**GGUF_PRE, DEFAULT: "default"}
"""A tokenizer's `pattern` -> the name it is written as."""

PATTERN_OF: dict[str, str | tuple[str, ...]] = {
    **{pre: pattern for pattern, pre in PRE_OF.items() if pattern is not None},
    "llama3": "llama3",
    "llama-v3": "llama3",
    "deepseek-r1-qwen": "qwen2",
}
"""A name -> the `pattern` that it means; the last three are other names for the same rules."""

IGNORES_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Names that also say that a piece which is a token is that token, and that a text begins with bos."""
