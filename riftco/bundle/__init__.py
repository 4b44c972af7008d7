"""The model bundle: a Hugging Face directory with an identity.

`save` writes config, weights, tokenizer and generation settings, and `riftco.json` with the digest of each of them;
`load` verifies the digests and gives everything back. Directories without a `riftco.json` are foreign:
`riftco.interchange.huggingface.load` reads those.
"""

from riftco.bundle.manifest import FORMAT_VERSION, MANIFEST
from riftco.bundle.reading import Bundle, load, verify
from riftco.bundle.writing import save

__all__ = ["FORMAT_VERSION", "MANIFEST", "Bundle", "load", "save", "verify"]
