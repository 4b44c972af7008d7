"""Named configurations: the teaching sizes of this project and published models, with the published numbers.

Every preset has a form that Hugging Face transformers opens: no head bias. Dropout is 0 everywhere; the
vocabularies of tiny, small, base and llama-tiny are placeholders that a tokenizer's size replaces.
"""

import dataclasses
from typing import Any

from riftco.errors import ConfigError
from riftco.models.config import DecoderConfig


def _gpt2(width: int, heads: int, layers: int) -> dict[str, Any]:
    """Radford et al. 2019, table 2, and the released `config.json` files."""
    sizes = {"vocab_size": 50257, "context": 1024, "width": width, "heads": heads, "layers": layers}
    return {**sizes, "hidden": 4 * width, "mlp": "gelu_tanh", "tie_embeddings": True}


def _gpt(vocab_size: int, context: int, width: int, heads: int, layers: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "context": context, "width": width, "heads": heads, "layers": layers}
    return {**sizes, "hidden": 4 * width, "mlp": "gelu_tanh"}


def _llama(vocab_size: int, context: int, width: int, heads: int, kv_heads: int, layers: int, hidden: int, **more: Any):
    sizes = {"vocab_size": vocab_size, "context": context, "width": width, "heads": heads, "layers": layers}
    form = {"norm": "rms", "mlp": "swiglu", "position": "rope"}
    return {**sizes, "hidden": hidden, "kv_heads": kv_heads, **form, **more}


_LLAMA_3_2_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _gpt(512, 128, 64, 2, 2),
    "small": _gpt(2048, 256, 128, 4, 4),
    "base": _gpt(4096, 256, 384, 6, 6),
    "llama-tiny": _llama(512, 128, 64, 4, 2, 2, 192),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 16, 24),
    "gpt2-large": _gpt2(1280, 20, 36),
    "gpt2-xl": _gpt2(1600, 25, 48),
    "smollm2-135m": _llama(49152, 8192, 576, 9, 3, 30, 1536, rope_theta=1e5, tie_embeddings=True),
    "smollm2-360m": _llama(49152, 8192, 960, 15, 5, 32, 2560, rope_theta=1e5, tie_embeddings=True),
    "smollm2-1.7b": _llama(49152, 8192, 2048, 32, 32, 24, 8192, rope_theta=1.3e5, tie_embeddings=True),
    "qwen2-0.5b": _llama(
        151936, 131072, 896, 14, 2, 24, 4864, rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True, qkv_bias=True
    ),
    "qwen3-0.6b": _llama(
        151936, 40960, 1024, 16, 8, 28, 3072, head_dim=128, rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True,
        qk_norm=True,
    ),
    "mistral-7b": _llama(32000, 32768, 4096, 32, 8, 32, 14336, sliding_window=4096),
    "llama3.2-1b": _llama(
        128256, 131072, 2048, 32, 8, 16, 8192, rope_theta=5e5, rope_scaling=_LLAMA_3_2_SCALING, tie_embeddings=True
    ),
}  # fmt: skip


def preset(name: str, **overrides: Any) -> DecoderConfig:
    """A named configuration, with fields replaced before the dependent ones are derived.

    Args:
        name: one of tiny, small, base, llama-tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, smollm2-135m,
            smollm2-360m, smollm2-1.7b, qwen2-0.5b, qwen3-0.6b, mistral-7b (v0.1), llama3.2-1b.
        overrides: fields of `DecoderConfig`; every field that is not given keeps the preset's value, so a new `width`
            usually wants a new `hidden`, and a new `heads` a new `kv_heads`.

    Returns:
        A validated `DecoderConfig`.

    Raises:
        ConfigError: for a name or a field that does not exist, or values that do not fit together.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset: the name must be one of {', '.join(PRESETS)}; got {name!r}")
    names = [field.name for field in dataclasses.fields(DecoderConfig)]
    if unknown := [key for key in overrides if key not in names]:
        raise ConfigError(
            f"preset: an override must be a field of DecoderConfig; got {', '.join(unknown)}; the fields are "
            f"{', '.join(names)}"
        )
    return DecoderConfig(**{**PRESETS[name], **overrides})
