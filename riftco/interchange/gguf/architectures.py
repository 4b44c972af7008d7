"""Which architecture a configuration is written as, and the keys that say it.

GGUF's names are those of the programs that run the files: an architecture there fixes the whole function. So a
configuration is only written as `llama`, `qwen2`, `qwen3` or `gpt2` where that name means exactly its function; any
other is architecture `riftco`, with its own tensor names, which those programs refuse instead of running it wrongly.
Reading is in `configurations`.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from riftco.models import DecoderConfig
from riftco.models.families import family_of, refusal
from riftco.models.rotary_tables import _frequencies

NATIVE = "riftco"
ROPE_FREQS = "rope_freqs.weight"
"""The tensor [K/2] by which frequencies are divided: how GGUF says Llama 3's scaling."""

_ARCHITECTURE_OF = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2", NATIVE)


class Form(NamedTuple):
    """How a model is written."""

    architecture: str
    """One of `ARCHITECTURES`."""
    reason: str | None
    """Why it is "riftco", in a few words; None for the others."""


def form_of(config: DecoderConfig) -> Form:
    """The architecture that means a configuration's function, or "riftco" with the reason why none does."""
    family = family_of(config)
    if family == NATIVE:
        nearest = "gpt2" if config.position == "learned" else "llama"
        return Form(NATIVE, refusal(config, nearest))
    reason = next((reason for holds, reason in _demands(config) if not holds), None)
    return Form(NATIVE, reason) if reason else Form(_ARCHITECTURE_OF[family], None)


def _demands(config: DecoderConfig) -> list[tuple[bool, str]]:
    scaling = config.rope_scaling or {}
    sizes = (config.vocab_size, config.context, config.width, config.heads, config.layers, config.hidden)
    with np.errstate(over="ignore"):
        theta = np.float32(config.rope_theta)
    yarn_only = ("attention_factor", "mscale", "mscale_all_dim")
    return [
        (config.mlp != "gelu", "gpt2's GELU is the tanh approximation in GGUF"),
        (
            config.sliding_window is None or config.sliding_window >= config.context,
            "GGUF's llama and qwen architectures attend to the whole context",
        ),
        (
            not any(scaling.get(name) for name in yarn_only) and scaling.get("truncate", True),
            "GGUF's yarn has no attention_factor, mscale or truncate",
        ),
        (bool(np.isfinite(theta)), "rope_theta must fit a float32 in GGUF"),
        (max(sizes) < 2**32, "sizes must fit 32 bits in GGUF"),
    ]


def config_keys(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """The keys of a configuration: int for uint32, float for float32.

    Args:
        config: one that `architecture` expresses, or any for "riftco".
        architecture: one of `ARCHITECTURES`.
    """
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.context,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.hidden,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
    }
    norm = "rms_" if config.norm == "rms" else ""
    values[f"attention.layer_norm_{norm}epsilon"] = config.norm_eps
    if architecture not in ("gpt2", NATIVE):
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
        values |= {"rope.dimension_count": config.head_dim, "rope.freq_base": config.rope_theta, **_scaling(config)}
    return {f"{architecture}.{name}": value for name, value in values.items()}


def _scaling(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] == "llama3":  # a tensor says that one
        return {}
    values = {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
    if scaling["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            if name in scaling:
                values[f"rope.scaling.yarn_{name}"] = scaling[name]
    return values


def rope_factors(config: DecoderConfig) -> NDArray[np.float32] | None:
    """What `rope_freqs.weight` holds, float32[K/2]; None where there is no such tensor."""
    if config.rope_scaling is None or config.rope_scaling["rope_type"] != "llama3":
        return None
    plain, _ = _frequencies(config.head_dim, config.rope_theta, None)
    scaled, _ = _frequencies(config.head_dim, config.rope_theta, config.rope_scaling)  # type: ignore[arg-type]
    return (plain / scaled).astype(np.float32)
