"""The model bundle: a Hugging Face directory with an identity.

`save` writes config, weights, tokenizer and generation settings, and `riftco.json` with the digest of each of them;
`load` verifies the digests and gives everything back. Directories without a `riftco.json` are foreign:
`riftco.interchange.huggingface.load` reads those.

Models in 4 bits are saved by `save_packed` and loaded by `load` as they are; adapters have directories of their own
(`save_adapters`, `load_adapters`). Both name the base that they belong to.
"""

from riftco.bundle.adapters import (
    MERGED,
    AdapterBundle,
    check_base,
    load_adapters,
    save_adapters,
    weights_id,
)
from riftco.bundle.manifest import FORMAT_VERSION, MANIFEST
from riftco.bundle.packed import save_packed
from riftco.bundle.reading import Bundle, load, verify
from riftco.bundle.writing import save

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "MERGED",
    "AdapterBundle",
    "Bundle",
    "check_base",
    "load",
    "load_adapters",
    "save",
    "save_adapters",
    "save_packed",
    "verify",
    "weights_id",
]
