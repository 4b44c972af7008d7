"""Models from and for other projects: Hugging Face directories, and packed 4-bit weights.

The tables of names and fields live with the model (`riftco.models.families`), since the native bundle is a Hugging
Face directory too; here are the readers of directories that riftco did not write.
"""

from riftco.interchange import huggingface, nf4
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
    "config_dtype",
    "family_of",
    "from_hf_config",
    "from_published",
    "huggingface",
    "nf4",
    "params_from_published",
    "published_names",
    "refusal",
    "to_hf_config",
    "to_published",
]
