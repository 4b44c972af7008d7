"""Text to ids and back: a byte tokenizer, and byte-level BPE trained here or read from tokenizer.json."""

from riftco.tokenizers.added import AddedToken
from riftco.tokenizers.base import Tokenizer
from riftco.tokenizers.bpe import BPETokenizer, Foreign
from riftco.tokenizers.byte import ByteTokenizer
from riftco.tokenizers.hf_json import is_portable, to_json
from riftco.tokenizers.loading import from_state, load, read_chat_template, train
from riftco.tokenizers.patterns import GGUF_PRE, STAGES, Splitter
from riftco.tokenizers.stream import DecodeStream

__all__ = [
    "GGUF_PRE",
    "STAGES",
    "AddedToken",
    "BPETokenizer",
    "ByteTokenizer",
    "DecodeStream",
    "Foreign",
    "Splitter",
    "Tokenizer",
    "from_state",
    "is_portable",
    "load",
    "read_chat_template",
    "to_json",
    "train",
]
