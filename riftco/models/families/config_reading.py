"""Reading the `config.json` of a Hugging Face directory.

Nothing is guessed and nothing is passed over: two spellings of one fact must agree, a key that is not understood and
not known to leave the function as it is (`config_keys.py`) is refused by its name, and an absent RoPE base is said
aloud.
"""

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from riftco.errors import ConfigError
from riftco.models.config import DEFAULT_ROPE_THETA, DecoderConfig
from riftco.models.families.config_keys import ENVELOPE, HARMLESS, HARMLESS_IN, NEUTRAL
from riftco.models.families.configurations import GPT2_DROPOUT
from riftco.models.families.table import FAMILIES

_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def from_hf_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a `config.json` describes.

    Args:
        values: the parsed file.

    Returns:
        A validated `DecoderConfig`.

    Raises:
        ConfigError: for an unsupported model_type or activation, packed weights, a missing field, spellings that
            disagree, a key that is not understood, or a choice that `DecoderConfig` cannot express; the key is named.

    Warns:
        UserWarning: where the file gives no RoPE base (10,000 is used, as when such files were published), and where
            its dropout rates differ (0 is used).
    """
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        _refuse(f"model_type must be one of {', '.join(FAMILIES)}; got {family!r}")
    if values.get("quantization_config") is not None:
        _refuse("weights must be plain; got quantization_config; dequantize the model first")
    config_dtype(values)
    fields = _Fields(values, family)
    fields.check_architectures()
    if family == "riftco":
        config = DecoderConfig.from_dict({key: value for key, value in values.items() if key not in ENVELOPE})
        _agree("tie_word_embeddings", values.get("tie_word_embeddings"), "tie_embeddings", config.tie_embeddings)
        return config
    fields.check_neutral()
    config = _read_gpt2(fields) if family == "gpt2" else _read_llama(fields)
    fields.check_unknown()
    return config


def config_dtype(values: Mapping[str, Any]) -> str | None:
    """The weights' dtype according to a `config.json` ("dtype", formerly "torch_dtype"), or None where it is silent."""
    old, new = (
        None if values.get(name) is None else str(values[name]).removeprefix("torch.")
        for name in ("torch_dtype", "dtype")
    )
    _agree("torch_dtype", old, "dtype", new)
    return new if new is not None else old


class _Fields:
    """The fields of a file; which of them were asked for; and the keys behind the names of `DecoderConfig`."""

    def __init__(self, values: Mapping[str, Any], family: str) -> None:
        self.values, self.family = values, family
        self.asked: set[str] = set()
        self.names: dict[str, str] = {}

    def get(self, name: str, *aliases: str, default: Any = None) -> Any:
        """A field under its name or an older one; `default` where it is absent or null."""
        self.asked.update((name, *aliases))
        given = [key for key in (name, *aliases) if self.values.get(key) is not None]
        for key in given[1:]:
            _agree(given[0], self.values[given[0]], key, self.values[key])
        return self.values[given[0]] if given else default

    def integer(self, field: str, name: str, *aliases: str, default: int | None = None) -> int:
        """A count of at least 1, required where there is no default; `field` is what `DecoderConfig` calls it."""
        self.names[field] = name
        value = self.get(name, *aliases, default=default)
        if value is None:
            _refuse(f"{name} must be given; got none; add it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            _refuse(f"{name} must be an integer of at least 1; got {value!r}; correct the file")
        return value

    def number(self, field: str, name: str, default: float) -> float:
        """A finite number."""
        self.names[field] = name
        value = self.get(name, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            _refuse(f"{name} must be a finite number; got {value!r}; correct the file")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            _refuse(f"{name} must be true or false; got {value!r}; correct the file")
        return value

    def build(self, **fields: Any) -> DecoderConfig:
        """The configuration; what it refuses is said in the words of the file."""
        try:
            return DecoderConfig(**fields)
        except ConfigError as error:
            text = str(error).removeprefix("DecoderConfig: ")
            words = "|".join(sorted(map(re.escape, self.names), key=len, reverse=True))
            raise ConfigError("config.json: " + re.sub(rf"\b({words})\b", lambda m: self.names[m[1]], text)) from error

    def check_architectures(self) -> None:
        """The class that the file was saved from must be the decoder with its head, or the bare decoder."""
        named = self.values.get("architectures")
        if named is None or named == []:
            return
        head = FAMILIES[self.family].architecture
        fitting = {head, re.sub("(ForCausalLM|LMHeadModel)$", "Model", head)}
        if not isinstance(named, list) or not fitting.intersection(map(str, named)):
            _refuse(f"architectures must name {head} for model_type {self.family}; got {named!r}")

    def check_neutral(self) -> None:
        """Switches that this decoder does not have must stand as if they were not there."""
        for name, neutral in NEUTRAL.items():
            if name in self.values and name not in HARMLESS_IN.get(self.family, ()):
                value = self.values[name]
                if value is not None and value not in neutral:
                    _refuse(f"{name} must be {neutral[0]}; got {value!r}, which this decoder has not")

    def check_unknown(self) -> None:
        """Whatever is left must be known to leave the function as it is."""
        known = self.asked | ENVELOPE | HARMLESS | HARMLESS_IN.get(self.family, frozenset()) | NEUTRAL.keys()
        unknown = [str(key) for key in self.values if key not in known and self.values[key] is not None]
        if unknown:
            _refuse(
                f"{', '.join(sorted(unknown)[:5])} is not understood for model_type {self.family}, so what it "
                "changes is not known; if it changes nothing, remove it"
            )


def _read_gpt2(fields: _Fields) -> DecoderConfig:
    activation = fields.get("activation_function", default="gelu_new")
    if not isinstance(activation, str) or activation not in _GELU:
        _refuse(f"activation_function must be one of {', '.join(_GELU)}; got {activation!r}")
    rates = [float(fields.number("dropout", name, 0.1)) for name in GPT2_DROPOUT]
    if len(set(rates)) > 1:
        warnings.warn(f"config.json: {', '.join(GPT2_DROPOUT)} differ ({rates}); dropout 0 is used", stacklevel=3)
    width = fields.integer("width", "n_embd", "hidden_size")
    return fields.build(
        vocab_size=fields.integer("vocab_size", "vocab_size"),
        context=fields.integer("context", "n_positions", "max_position_embeddings"),
        width=width,
        heads=fields.integer("heads", "n_head", "num_attention_heads"),
        layers=fields.integer("layers", "n_layer", "num_hidden_layers"),
        hidden=fields.integer("hidden", "n_inner", default=4 * width),
        norm="layer",
        norm_eps=fields.number("norm_eps", "layer_norm_epsilon", 1e-5),
        mlp=_GELU[activation],
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        dropout=rates[0] if len(set(rates)) == 1 else 0.0,
    )


def _read_llama(fields: _Fields) -> DecoderConfig:
    family = fields.family
    activation = fields.get("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        _refuse(f"hidden_act must be 'silu'; got {activation!r}")
    bias = family == "llama" and fields.flag("attention_bias", False)
    if family == "llama" and fields.flag("mlp_bias", False) != bias:
        _refuse(
            "attention_bias and mlp_bias must be equal, since one switch covers the output and feed-forward "
            f"projections here; got {bias} and {not bias}"
        )
    theta, scaling = _read_rope(fields)
    heads = fields.integer("heads", "num_attention_heads")
    has_head_dim = fields.get("head_dim") is not None or family == "qwen3"
    return fields.build(
        vocab_size=fields.integer("vocab_size", "vocab_size"),
        context=fields.integer("context", "max_position_embeddings"),
        width=fields.integer("width", "hidden_size"),
        heads=heads,
        layers=fields.integer("layers", "num_hidden_layers"),
        hidden=fields.integer("hidden", "intermediate_size"),
        kv_heads=fields.integer("kv_heads", "num_key_value_heads", default=heads),
        head_dim=fields.integer("head_dim", "head_dim", default=128) if has_head_dim else None,
        norm="rms",
        norm_eps=fields.number("norm_eps", "rms_norm_eps", 1e-6),
        mlp="swiglu",
        position="rope",
        rope_theta=theta,
        rope_scaling=scaling,
        bias=bias,
        qkv_bias=family == "qwen2" or bias,
        qk_norm=family == "qwen3",
        sliding_window=_read_window(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        dropout=fields.number("dropout", "attention_dropout", 0.0),
    )


def _read_rope(fields: _Fields) -> tuple[float, Mapping[str, Any] | None]:
    """The base and the scaling out of rope_theta, rope_scaling (transformers 4) and rope_parameters (5)."""
    given = {name: fields.get(name) for name in ("rope_scaling", "rope_parameters")}
    for name, value in given.items():
        if value is not None and not isinstance(value, Mapping):
            _refuse(f"{name} must be an object; got {value!r}; correct the file")
    fields.names["rope_scaling"] = "rope_parameters" if given["rope_parameters"] else "rope_scaling"
    dictionaries = [dict(value) for value in given.values() if value]
    thetas = {
        _theta(base)
        for base in [fields.get("rope_theta"), *(scaling.pop("rope_theta", None) for scaling in dictionaries)]
        if base is not None
    }
    if len(thetas) > 1:
        _refuse(f"rope_theta must agree with rope_parameters and rope_scaling; got {sorted(thetas)}; correct the file")
    for scaling in dictionaries:
        legacy = scaling.pop("type", None)
        _agree("type", legacy, "rope_type", scaling.get("rope_type"))
        scaling.setdefault("rope_type", "default" if legacy is None else legacy)
    if len(dictionaries) == 2 and dictionaries[0] != dictionaries[1]:
        _refuse(f"rope_scaling and rope_parameters must agree; got {dictionaries[0]} and {dictionaries[1]}")
    if not thetas:
        warnings.warn("config.json: it gives no rope_theta; 10000 is used, the base of the first models", stacklevel=4)
    theta = next(iter(thetas), DEFAULT_ROPE_THETA)
    scaling = dictionaries[-1] if dictionaries else None
    # Some files keep the length before scaling beside the mapping; there it counts for the types that use it.
    original = fields.get("original_max_position_embeddings")
    if scaling is not None and original is not None and scaling["rope_type"] in ("llama3", "yarn"):
        inner = scaling.setdefault("original_max_position_embeddings", original)
        _agree("original_max_position_embeddings", original, "the one in rope_parameters", inner)
    return theta, scaling


def _theta(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        _refuse(f"rope_theta must be a positive finite number; got {value!r}; correct the file")
    return float(value)


def _read_window(fields: _Fields) -> int | None:
    family, layers = fields.family, fields.integer("layers", "num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_FULL, _SLIDING) for kind in kinds)
    ):
        _refuse(f"layer_types must be {layers} of {_FULL} and {_SLIDING}; got {str(kinds)[:80]}")
    window = fields.get("sliding_window")
    if window is not None:
        window = fields.integer("sliding_window", "sliding_window")
    switch = fields.flag("use_sliding_window", family in ("mistral", "llama"))
    first = fields.get("max_window_layers", default=28)
    if family == "llama":
        if (window is not None and switch) or (kinds is not None and _SLIDING in kinds):
            _refuse("sliding_window and layer_types must be off for a llama, which sees the whole context; they are on")
        return None
    if family == "mistral":
        if "sliding_window" not in fields.values:
            window = 4096  # the default before transformers 4.34, which wrote no field
        kinds = [_FULL if window is None else _SLIDING] * layers if kinds is None else kinds
        if window is not None and set(kinds) != {_SLIDING}:
            _refuse("layer_types must be sliding_attention throughout for a mistral with a sliding_window; it is not")
        return window
    if not switch or window is None:
        if kinds is not None and _SLIDING in kinds:
            _refuse("layer_types must be full_attention throughout without use_sliding_window and sliding_window")
        return None
    if kinds is None:
        if isinstance(first, bool) or not isinstance(first, int):
            _refuse(f"max_window_layers must be an integer; got {first!r}; correct the file")
        kinds = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    if len(set(kinds)) > 1:
        _refuse("the sliding window must apply to all layers or to none; layer_types (or max_window_layers) mix them")
    return window if kinds[0] == _SLIDING else None


def _agree(left_name: str, left: Any, right_name: str, right: Any) -> None:
    if left is not None and right is not None and left != right:
        _refuse(f"{left_name} and {right_name} must agree; got {left!r} and {right!r}")


def _refuse(text: str) -> NoReturn:
    raise ConfigError(f"config.json: {text}")
