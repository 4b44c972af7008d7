"""GGUF files in and out: the format of llama.cpp and the programs around it.

`load` reads files of the architectures llama, qwen2, qwen3 and gpt2, dequantising; `write` makes files that those
programs load, or, for what they cannot express, files of architecture riftco that come back here exactly. The container
is read by a strict reader of its own, since such files come from strangers.
"""

from riftco.interchange.gguf.architectures import ARCHITECTURES, Form, form_of
from riftco.interchange.gguf.container import Header, TensorInfo, read_header
from riftco.interchange.gguf.identity import Lineage
from riftco.interchange.gguf.loading import load, load_config, load_tokenizer, read_lineage, to_bundle
from riftco.interchange.gguf.tensor_types import FILE_TYPES
from riftco.interchange.gguf.writing import Written, export, write
from riftco.interchange.huggingface import Model

__all__ = [
    "ARCHITECTURES",
    "FILE_TYPES",
    "Form",
    "Header",
    "Lineage",
    "Model",
    "TensorInfo",
    "Written",
    "export",
    "form_of",
    "load",
    "load_config",
    "load_tokenizer",
    "read_header",
    "read_lineage",
    "to_bundle",
    "write",
]
