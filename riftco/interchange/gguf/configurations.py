"""The configuration that a file's keys describe; nothing that changes the function is passed over.

A key below the architecture's name that is not understood is refused by name, unless it has the value that changes
nothing. Files that riftco wrote also carry the configuration itself; their keys must then say the same.
"""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from riftco.bundle.manifest import strict_json
from riftco.errors import BundleError, ConfigError, RiftcoError
from riftco.interchange.gguf.architectures import ARCHITECTURES, NATIVE, ROPE_FREQS, config_keys, form_of, rope_factors
from riftco.interchange.gguf.container import Header
from riftco.models import DecoderConfig

CONFIG = "riftco.config"
_MISSING = object()

# Keys that change the function elsewhere, with the values at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_INFORMATIVE = ("tensor_data_layout", "rope.scaling.finetuned")
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture_of(header: Header) -> str:
    """`general.architecture`, one that is supported, of a file that holds one whole model.

    Raises:
        ConfigError: it is another one, an adapter, or one part of several.
    """
    metadata = header.metadata
    if metadata.get("general.type", "model") != "model":
        raise ConfigError(
            f"{header.path}: general.type must be 'model'; got {metadata['general.type']!r:.80}; merge it into its base"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise ConfigError(f"{header.path}: split.count must be 1; got {metadata['split.count']!r:.80}; merge the parts")
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{header.path}: general.architecture must be one of {', '.join(ARCHITECTURES)}; got {name!r:.80}, which "
            "this decoder does not have"
        )
    return str(name)


def read_config(header: Header, factors: NDArray[np.float32] | None, *, is_tied: bool) -> DecoderConfig:
    """The configuration of a file.

    Args:
        header: of the file.
        factors: the content of `rope_freqs.weight`, where the file has it.
        is_tied: whether the head is the embedding; not asked of files that riftco wrote.

    Raises:
        ConfigError: a key is missing, has a wrong type or value, or is not understood; it is named.
        BundleError: a file that riftco wrote contradicts itself.
    """
    architecture = architecture_of(header)
    if CONFIG in header.metadata or architecture == NATIVE:
        return _own(header, architecture, factors)
    keys = _Keys(header, architecture)
    try:
        config = _read_gpt2(keys, is_tied) if architecture == "gpt2" else _read_llama(keys, factors, is_tied)
    except ConfigError as error:
        raise error if str(header.path) in str(error) else ConfigError(f"{header.path}: {error}") from error
    keys.refuse_the_rest(config)
    return config


def _own(header: Header, architecture: str, factors: NDArray[np.float32] | None) -> DecoderConfig:
    text = header.metadata.get(CONFIG)
    if not isinstance(text, str):
        raise BundleError(f"{header.path}: {CONFIG} must be given as text; got {text!r:.80}; the file is damaged")
    values = strict_json(text.encode(), f"{header.path}: {CONFIG}")
    try:
        config = DecoderConfig.from_dict(values if isinstance(values, dict) else {})
    except (RiftcoError, TypeError) as error:
        raise BundleError(f"{header.path}: {CONFIG} must be a configuration; {error}") from error
    if config.layers > len(header.tensors):
        raise BundleError(
            f"{header.path}: {CONFIG} must have at most {len(header.tensors)} layers; got {config.layers}"
        )
    if architecture not in (NATIVE, form_of(config).architecture):
        raise BundleError(f"{header.path}: {CONFIG} must be one of {architecture}; it is not; the file was changed")
    expected = config_keys(config, architecture)
    below = {key for key in header.metadata if architecture != NATIVE and key.startswith(f"{architecture}.")}
    for key in [*expected, *sorted(below)]:
        wanted, got = expected.get(key), header.metadata.get(key)
        wanted = float(np.float32(wanted)) if isinstance(wanted, float) else wanted
        if type(wanted) is not type(got) or wanted != got:
            raise BundleError(
                f"{header.path}: {key} must be {wanted}, as {CONFIG} says; got {got!r:.80}; the file was changed"
            )
    table = None if architecture == NATIVE else rope_factors(config)
    if (table is None) != (factors is None) or (
        table is not None and factors is not None and not (table.shape == factors.shape and np.allclose(table, factors))
    ):
        raise BundleError(f"{header.path}: {ROPE_FREQS} must be what {CONFIG} says; it is not; the file was changed")
    return config


class _Keys:
    """The keys below one architecture, and which of them have been read."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.path, self.metadata, self.architecture = header.path, header.metadata, architecture
        self.tensors = header.tensors
        self.read: set[str] = set()

    def fail(self, name: str, required: str, got: Any) -> NoReturn:
        shown = "none" if got is _MISSING else f"{got!r:.80}"
        raise ConfigError(f"{self.path}: {self.architecture}.{name} must be {required}; got {shown}")

    def find(self, name: str) -> Any:
        self.read.add(name)
        value = self.metadata.get(f"{self.architecture}.{name}", _MISSING)
        if isinstance(value, np.ndarray):  # one number a layer
            if not len(value) or (value != value[0]).any():
                self.fail(name, "one value for all layers", value)
            return value[0].item()
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.find(name)
        if value is _MISSING and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
            self.fail(name, "an integer of 32 bits", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.find(name)
        if value is _MISSING and default is not None:
            return default
        if not isinstance(value, float) or not math.isfinite(value):
            self.fail(name, "a finite float", value)
        # 1e-5 is stored as the nearest float32; the shortest number that rounds to it is what was meant.
        short = np.float32(value)
        return float(str(short)) if float(short) == value else value

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.metadata

    def demand(self, name: str, wanted: Any) -> None:
        value = self.find(name)
        if value not in (_MISSING, wanted):
            self.fail(name, repr(wanted), value)

    def refuse_the_rest(self, config: DecoderConfig) -> None:
        neutral = {**_NEUTRAL, "attention.scale": (0.0, float(np.float32(config.head_dim**-0.5)))}
        prefix = f"{self.architecture}."
        for key in self.metadata:
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in self.read or name in _INFORMATIVE:
                continue
            value = self.find(name)
            if name not in neutral:
                raise ConfigError(
                    f"{self.path}: {key} is not understood and may change the function; got {value!r:.80}; it cannot "
                    "be converted exactly"
                )
            if value not in neutral[name]:
                self.fail(name, " or ".join(map(repr, neutral[name])), value)


def _sizes(keys: _Keys) -> dict[str, Any]:
    embedding = keys.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(
            f"{keys.path}: the tensor token_embd.weight must be there; it is not; this is no language model"
        )
    rows = embedding.shape[0]
    keys.demand("vocab_size", rows)
    layers = keys.integer("block_count")
    if layers > len(keys.tensors):
        keys.fail("block_count", f"at most the number of tensors, {len(keys.tensors)}", layers)
    return {
        "vocab_size": rows,
        "context": keys.integer("context_length"),
        "width": keys.integer("embedding_length"),
        "heads": keys.integer("attention.head_count"),
        "layers": layers,
        "hidden": keys.integer("feed_forward_length"),
    }


def _read_gpt2(keys: _Keys, is_tied: bool) -> DecoderConfig:
    sizes = _sizes(keys)
    keys.demand("attention.head_count_kv", sizes["heads"])
    eps = keys.number("attention.layer_norm_epsilon")
    return DecoderConfig(**sizes, norm="layer", norm_eps=eps, mlp="gelu_tanh", tie_embeddings=is_tied)


def _read_llama(keys: _Keys, factors: NDArray[np.float32] | None, is_tied: bool) -> DecoderConfig:
    sizes = _sizes(keys)
    if not sizes["heads"]:
        keys.fail("attention.head_count", "at least 1", 0)
    head_dim = keys.integer("attention.key_length", sizes["width"] // sizes["heads"])
    for name in ("attention.value_length", "rope.dimension_count"):
        keys.demand(name, head_dim)
    theta = keys.number("rope.freq_base", 1e4)
    window = keys.integer("attention.sliding_window", 0)
    return DecoderConfig(
        **sizes,
        kv_heads=keys.integer("attention.head_count_kv", sizes["heads"]),
        head_dim=head_dim,
        norm="rms",
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        mlp="swiglu",
        position="rope",
        rope_theta=theta,
        rope_scaling=_read_scaling(keys, factors, head_dim, theta),
        bias="blk.0.attn_output.bias" in keys.tensors,
        qkv_bias="blk.0.attn_q.bias" in keys.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in keys.tensors,
        sliding_window=window or None,
        tie_embeddings=is_tied,
    )


def _read_scaling(
    keys: _Keys, factors: NDArray[np.float32] | None, head_dim: int, theta: float
) -> Mapping[str, Any] | None:
    # Without a type the factor means linear scaling; scale_linear is its older name.
    kind = keys.find("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0) or 1.0
    keys.read.add("rope.scale_linear")
    kind = "linear" if kind is _MISSING else kind
    if kind not in ("none", "linear", "yarn"):
        keys.fail("rope.scaling.type", "none, linear or yarn", kind)
    scaling: dict[str, Any] | None = None
    if kind == "linear" and factor != 1.0:
        scaling = {"rope_type": "linear", "factor": factor}
    original = keys.integer("rope.scaling.original_context_length", 0)
    betas = {name: keys.number(f"rope.scaling.yarn_{name}", 0.0) for name in ("beta_fast", "beta_slow")}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original or None}
        scaling |= {name: value for name, value in betas.items() if value > 0.0}
    if factors is None or (factors == 1.0).all():
        return scaling
    if scaling is not None:
        raise ConfigError(f"{keys.path}: {ROPE_FREQS} and rope.scaling.type must not both scale; they do; drop one")
    return _llama3(keys, factors, head_dim, theta)


def _llama3(keys: _Keys, factors: NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's parameters: the file has only the table that they give, and the published ones are tried."""
    guess = {"rope_type": "llama3", "factor": max(round(float(factors.max()), 4), 1.0), **_LLAMA_3}
    form: dict[str, Any] = {
        "norm": "rms",
        "mlp": "swiglu",
        "position": "rope",
        "rope_theta": theta,
        "head_dim": head_dim,
    }
    table = rope_factors(DecoderConfig(1, 1, 1, 1, 1, 1, rope_scaling=guess, **form))
    if table is None or table.shape != factors.shape or not np.allclose(table, factors, rtol=1e-4, atol=0.0):
        raise ConfigError(
            f"{keys.path}: {ROPE_FREQS} must be Llama 3's table (low 1, high 4, original context 8192); it is another, "
            "which this decoder has no words for"
        )
    return guess
