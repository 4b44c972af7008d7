"""Models from and for other projects: `load` takes a model in any format, `convert` writes it in another.

The modules beside it, one a format, give and take more than params: `huggingface`, `gguf`, `onnx_graph`, `nf4` (packed
4-bit weights), `flax` (nnx modules; the package flax is an extra). The tables of names and fields live with the model
(`riftco.models.families`), since the native bundle is a Hugging Face directory too.
"""

import importlib
from typing import Any

from riftco.interchange import huggingface, nf4, onnx_graph
from riftco.interchange.conversion import Converted, convert
from riftco.interchange.loading import load, load_config, load_model, locate
from riftco.models.families import (
    FAMILIES,
    config_dtype,
    family_of,
    from_hf_config,
    from_published,
    params_from_published,
    published_names,
    refusal,
    to_hf_config,
    to_published,
)

__all__ = [
    "FAMILIES",
    "Converted",
    "config_dtype",
    "convert",
    "family_of",
    "from_hf_config",
    "from_published",
    "huggingface",
    "load",
    "load_config",
    "load_model",
    "locate",
    "nf4",
    "onnx_graph",
    "params_from_published",
    "published_names",
    "refusal",
    "to_hf_config",
    "to_published",
]

_LAZY = ("flax", "gguf")


def __getattr__(name: str) -> Any:
    # Formats whose libraries take time to import load when they are first touched.
    if name in _LAZY:
        return importlib.import_module(f"riftco.interchange.{name}")
    raise AttributeError(f"module 'riftco.interchange' has no attribute {name!r}")
