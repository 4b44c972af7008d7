"""`config.json` of a Hugging Face directory, both ways.

Reading never guesses: two spellings of one fact must agree, a field that changes the mathematics in a way that
`DecoderConfig` has no word for is refused by name, and an absent RoPE base is said aloud.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from riftco.errors import ConfigError
from riftco.models.config import DEFAULT_ROPE_THETA, DecoderConfig
from riftco.models.families.table import FAMILIES, family_of, refusal

_GELU_TO_NAME = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
_NAME_TO_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ENVELOPE = ("model_type", "architectures", "dtype", "torch_dtype", "tie_word_embeddings", *_TOKEN_IDS)


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
        **dict.fromkeys(_GPT2_DROPOUT, config.dropout),
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


def from_hf_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a `config.json` describes.

    Args:
        values: the parsed file. Fields that do not change the forward pass are ignored.

    Returns:
        A validated `DecoderConfig`.

    Raises:
        ConfigError: for an unsupported model_type or activation, packed weights, a missing field, spellings that
            disagree, or a choice that `DecoderConfig` cannot express; the field is named.

    Warns:
        UserWarning: where the file gives no RoPE base (10,000 is used, as when such files were published), and where
            its dropout rates differ (0 is used).
    """
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"config.json: model_type must be one of {', '.join(FAMILIES)}; got {family!r}")
    if values.get("quantization_config") is not None:
        raise ConfigError("config.json: weights must be plain; got quantization_config; dequantize the model first")
    config_dtype(values)
    if family == "riftco":
        native = {key: value for key, value in values.items() if key not in _ENVELOPE}
        config = DecoderConfig.from_dict(native)
        _agree("tie_word_embeddings", values.get("tie_word_embeddings"), "tie_embeddings", config.tie_embeddings)
        return config
    return _read_gpt2(values) if family == "gpt2" else _read_llama(values, family)


def config_dtype(values: Mapping[str, Any]) -> str | None:
    """The weights' dtype according to a `config.json` ("dtype", formerly "torch_dtype"), or None where it is silent."""
    old, new = (
        None if values.get(name) is None else str(values[name]).removeprefix("torch.")
        for name in ("torch_dtype", "dtype")
    )
    _agree("torch_dtype", old, "dtype", new)
    return new if new is not None else old


def _read_gpt2(values: Mapping[str, Any]) -> DecoderConfig:
    activation = values.get("activation_function", "gelu_new")
    if activation not in _NAME_TO_GELU:
        raise ConfigError(
            f"config.json: activation_function must be one of {', '.join(_NAME_TO_GELU)}; got {activation!r}"
        )
    _demand(values, "scale_attn_weights", True)
    _demand(values, "scale_attn_by_inverse_layer_idx", False)
    _demand(values, "add_cross_attention", False)
    rates = [float(values.get(name, 0.1)) for name in _GPT2_DROPOUT]
    if len(set(rates)) > 1:
        warnings.warn(f"config.json: {', '.join(_GPT2_DROPOUT)} differ ({rates}); dropout 0 is used", stacklevel=3)
    width = _required(values, "n_embd", "hidden_size")
    hidden = values.get("n_inner")
    return DecoderConfig(
        _required(values, "vocab_size"),
        _required(values, "n_positions", "max_position_embeddings"),
        width,
        _required(values, "n_head", "num_attention_heads"),
        _required(values, "n_layer", "num_hidden_layers"),
        4 * width if hidden is None else hidden,
        norm="layer",
        norm_eps=values.get("layer_norm_epsilon", 1e-5),
        mlp=_NAME_TO_GELU[activation],  # type: ignore[arg-type]
        tie_embeddings=values.get("tie_word_embeddings", True),
        dropout=rates[0] if len(set(rates)) == 1 else 0.0,
    )


def _read_llama(values: Mapping[str, Any], family: str) -> DecoderConfig:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act must be 'silu'; got {values['hidden_act']!r}")
    _demand(values, "partial_rotary_factor", 1.0)
    biases = (
        [bool(values.get(name, False)) for name in ("attention_bias", "mlp_bias")] if family == "llama" else [False]
    )
    if family in ("mistral", "qwen3"):
        _demand(values, "attention_bias", False)
    if len(set(biases)) > 1:
        raise ConfigError(
            f"config.json: attention_bias and mlp_bias must be equal, since one switch covers the output and "
            f"feed-forward projections here; got {biases[0]} and {biases[1]}"
        )
    theta, scaling = _read_rope(values)
    heads = _required(values, "num_attention_heads")
    kv_heads, head_dim = values.get("num_key_value_heads"), values.get("head_dim")
    if head_dim is None and family == "qwen3":
        head_dim = 128
    return DecoderConfig(
        _required(values, "vocab_size"),
        _required(values, "max_position_embeddings"),
        _required(values, "hidden_size"),
        heads,
        _required(values, "num_hidden_layers"),
        _required(values, "intermediate_size"),
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,  # type: ignore[arg-type]
        norm="rms",
        norm_eps=values.get("rms_norm_eps", 1e-6),
        mlp="swiglu",
        position="rope",
        rope_theta=theta,
        rope_scaling=scaling,
        bias=biases[0],
        qkv_bias=family == "qwen2" or biases[0],
        qk_norm=family == "qwen3",
        sliding_window=_read_window(values, family),
        tie_embeddings=values.get("tie_word_embeddings", False),
        dropout=values.get("attention_dropout", 0.0),
    )


def _read_rope(values: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """The base and the scaling out of rope_theta, rope_scaling (transformers 4) and rope_parameters (5)."""
    old, new = values.get("rope_scaling"), values.get("rope_parameters")
    dictionaries = [dict(given) for given in (old, new) if given]
    thetas = {float(given) for given in [values.get("rope_theta"), *(d.pop("rope_theta", None) for d in dictionaries)]
              if given is not None}  # fmt: skip
    if len(thetas) > 1:
        raise ConfigError(
            f"config.json: rope_theta must agree with rope_parameters and rope_scaling; got {sorted(thetas)}; correct "
            "the file"
        )
    for scaling in dictionaries:
        legacy = scaling.pop("type", None)
        _agree("type", legacy, "rope_type", scaling.get("rope_type"))
        scaling.setdefault("rope_type", "default" if legacy is None else legacy)
    if len(dictionaries) == 2 and dictionaries[0] != dictionaries[1]:
        raise ConfigError(
            f"config.json: rope_scaling and rope_parameters must agree; got {dictionaries[0]} and {dictionaries[1]}"
        )
    if not thetas:
        warnings.warn("config.json: it gives no rope_theta; 10000 is used, the base of the first models", stacklevel=4)
    theta = next(iter(thetas), DEFAULT_ROPE_THETA)
    scaling = dictionaries[-1] if dictionaries else None
    # Some files keep the length before scaling beside the mapping; there it counts for the types that use it.
    original = values.get("original_max_position_embeddings")
    if scaling is not None and original is not None and scaling["rope_type"] in ("llama3", "yarn"):
        inner = scaling.setdefault("original_max_position_embeddings", original)
        _agree("original_max_position_embeddings", original, "the one in rope_parameters", inner)
    return theta, scaling


def _read_window(values: Mapping[str, Any], family: str) -> int | None:
    window, kinds = values.get("sliding_window"), values.get("layer_types")
    if family == "llama":
        return None
    if family == "mistral":
        # Before transformers 4.34 the field was absent and the window 4096 by default.
        window = values["sliding_window"] if "sliding_window" in values else 4096
        if kinds is not None and len(set(kinds)) > 1:
            raise ConfigError("config.json: layer_types must be one kind for all layers; this model mixes them")
        return window
    if not values.get("use_sliding_window", False) or window is None:
        return None
    layers = _required(values, "num_hidden_layers")
    if kinds is None:
        first = values.get("max_window_layers", 28)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if set(kinds) - {"sliding_attention", "full_attention"} or len(set(kinds)) > 1:
        raise ConfigError(
            "config.json: the sliding window must apply to all layers or to none; layer_types (or max_window_layers) "
            "mix them"
        )
    return window if kinds[0] == "sliding_attention" else None


def _required(values: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise ConfigError(f"config.json: {names[0]} must be given; got none; add it")


def _demand(values: Mapping[str, Any], name: str, wanted: Any) -> None:
    if values.get(name, wanted) not in (wanted, None):
        raise ConfigError(f"config.json: {name} must be {wanted}; got {values[name]!r}, which this decoder has not")


def _agree(left_name: str, left: Any, right_name: str, right: Any) -> None:
    if left is None or right is None:
        return
    if left != right:
        raise ConfigError(f"config.json: {left_name} and {right_name} must agree; got {left!r} and {right!r}")
