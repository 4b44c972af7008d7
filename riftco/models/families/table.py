"""The families, and which decoder configurations each of them can express."""

import dataclasses
from typing import Literal

from riftco.errors import ConfigError
from riftco.models.config import DecoderConfig

Layout = Literal["gpt2", "llama", "native"]


@dataclasses.dataclass(frozen=True)
class Family:
    """One published architecture.

    Attributes:
        model_type: what `config.json` calls it.
        architecture: the class in `architectures`.
        layout: which table of tensor names it uses.
        attribution: where the fields are defined.
    """

    model_type: str
    architecture: str
    layout: Layout
    attribution: str


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", "gpt2", "transformers.GPT2Config"),
        Family("llama", "LlamaForCausalLM", "llama", "transformers.LlamaConfig"),
        Family("mistral", "MistralForCausalLM", "llama", "transformers.MistralConfig"),
        Family("qwen2", "Qwen2ForCausalLM", "llama", "transformers.Qwen2Config"),
        Family("qwen3", "Qwen3ForCausalLM", "llama", "transformers.Qwen3Config"),
        Family("riftco", "RiftcoForCausalLM", "native", "riftco.models.DecoderConfig"),
    )
}


def refusal(config: DecoderConfig, model_type: str) -> str | None:
    """Why a family cannot express a configuration, in a few words; None where it can.

    Args:
        config: the decoder.
        model_type: a key of `FAMILIES`.

    Raises:
        ConfigError: for a family that does not exist.
    """
    if model_type not in FAMILIES:
        raise ConfigError(f"family: the name must be one of {', '.join(FAMILIES)}; got {model_type!r}")
    if model_type == "riftco":
        return None
    checks = _gpt2_demands(config) if model_type == "gpt2" else _llama_demands(config, model_type)
    return next((reason for holds, reason in checks if not holds), None)


def family_of(config: DecoderConfig) -> str:
    """The model_type that a configuration is saved as: the first published family that can express it, or "riftco"."""
    return next(name for name in FAMILIES if refusal(config, name) is None)


Demand = tuple[bool, str]


def _gpt2_demands(config: DecoderConfig) -> list[Demand]:
    return [
        (not config.head_bias, "gpt2 has no head bias"),
        (config.norm == "layer", "gpt2 uses LayerNorm"),
        (config.mlp in ("gelu", "gelu_tanh"), "gpt2 has no gated feed-forward"),
        (config.position == "learned", "gpt2 has learned positions"),
        (config.bias and config.qkv_bias, "every linear of gpt2 has a bias"),
        (config.kv_heads == config.heads, "gpt2 has as many key and value heads as query heads"),
        (config.head_dim * config.heads == config.width, "the heads of gpt2 fill the width exactly"),
        (not config.qk_norm, "gpt2 does not normalise queries and keys"),
        (config.sliding_window is None, "gpt2 attends to the whole context"),
    ]


def _llama_demands(config: DecoderConfig, model_type: str) -> list[Demand]:
    demands = [
        (not config.head_bias, f"{model_type} has no head bias"),
        (config.norm == "rms", f"{model_type} uses RMSNorm"),
        (config.mlp == "swiglu", f"{model_type} has a SwiGLU feed-forward"),
        (config.position == "rope", f"{model_type} uses RoPE"),
        (config.qk_norm == (model_type == "qwen3"), "qwen3, and it alone, normalises queries and keys"),
    ]
    if model_type == "llama":
        # One attention_bias flag covers query, key, value and output.
        demands += [
            (config.qkv_bias == config.bias, "llama has biases on all four attention projections or on none"),
            (config.sliding_window is None, "llama attends to the whole context"),
            (config.width % config.heads == 0, "transformers refuses a llama whose width is no multiple of its heads"),
        ]
    else:
        demands += [
            (not config.bias, f"{model_type} has no bias on its output and feed-forward projections"),
            (
                config.qkv_bias == (model_type == "qwen2"),
                "qwen2, and it alone, has biases on query, key and value only",
            ),
        ]
    return demands
