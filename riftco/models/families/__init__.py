"""Published architectures: which of them can express a configuration, what they call its fields and its tensors.

Families are tables over one decoder: gpt2, llama (SmolLM2 is one), mistral, qwen2 and qwen3. A configuration that none
of them can express is model_type "riftco": its own field names and its own dotted tensor names.
"""

from riftco.models.families.config_reading import config_dtype, from_hf_config
from riftco.models.families.configurations import to_hf_config
from riftco.models.families.publishing import Published, to_published
from riftco.models.families.table import FAMILIES, Family, family_of, refusal
from riftco.models.families.tensors import from_published, params_from_published, published_names

__all__ = [
    "FAMILIES",
    "Family",
    "Published",
    "config_dtype",
    "family_of",
    "from_hf_config",
    "from_published",
    "params_from_published",
    "published_names",
    "refusal",
    "to_hf_config",
    "to_published",
]
