"""Writing the `config.json` of a Hugging Face directory. Reading one is in `config_reading.py`."""

from typing import Any

from riftco.errors import ConfigError
from riftco.models.config import DecoderConfig
from riftco.models.families.table import FAMILIES, family_of, refusal

GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_GELU_TO_NAME = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def to_hf_config(
    config: DecoderConfig, *, family: str | None = None, dtype: str = "float32", **token_ids: Any
) -> dict[str, Any]:
    """The `config.json` of a configuration, in the spellings of transformers 4 and 5 together.

    Args:
        config: the decoder.
        family: a model_type; by default the first that can express the configuration (`family_of`).
        dtype: of the weights, such as "float32" or "bfloat16".
        token_ids: bos_token_id, eos_token_id (an id or a list), pad_token_id. Absent ones are written as null,
            since transformers would otherwise fill in ids of its own.

    Returns:
        A JSON-ready dict.

    Raises:
        ConfigError: where the family cannot express the configuration, with the reason.
    """
    family = family_of(config) if family is None else family
    if reason := refusal(config, family):
        raise ConfigError(f"to_hf_config: the configuration must be one that {family} can express; {reason}")
    if unknown := [name for name in token_ids if name not in _TOKEN_IDS]:
        raise ConfigError(f"to_hf_config: token ids are {', '.join(_TOKEN_IDS)}; got {', '.join(unknown)}")
    envelope = {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
        "dtype": dtype,
        "torch_dtype": dtype,
        "tie_word_embeddings": config.tie_embeddings,
        **{name: token_ids.get(name) for name in _TOKEN_IDS},
    }
    writers = {"gpt2": _gpt2_fields, "riftco": DecoderConfig.to_dict}
    return {**writers.get(family, _llama_fields)(config), **_extras(config, family), **envelope}


def _gpt2_fields(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_head": config.heads,
        "n_layer": config.layers,
        "n_inner": config.hidden,
        "activation_function": _GELU_TO_NAME[config.mlp],
        "layer_norm_epsilon": config.norm_eps,
        **dict.fromkeys(GPT2_DROPOUT, config.dropout),
    }


def _llama_fields(config: DecoderConfig) -> dict[str, Any]:
    scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "intermediate_size": config.hidden,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
        # transformers 4 reads rope_theta and rope_scaling, transformers 5 reads rope_parameters.
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
    }


def _extras(config: DecoderConfig, family: str) -> dict[str, Any]:
    """The fields that only one family has."""
    window = config.sliding_window
    if family == "llama":
        return {"attention_bias": config.bias, "mlp_bias": config.bias}
    if family == "mistral":
        return {"sliding_window": window}
    if family not in ("qwen2", "qwen3"):
        return {}
    kind = "full_attention" if window is None else "sliding_attention"
    fields = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": [kind] * config.layers}
    # Layers from this index on use the window; transformers 4 reads this, transformers 5 reads layer_types.
    fields["max_window_layers"] = config.layers if window is None else 0
    return {**fields, "attention_bias": False} if family == "qwen3" else fields
