"""The decoder's configuration: one frozen, validated, hashable value for every family.

Here: `DecoderConfig` and the checks that need nothing but the numbers. Not here: named configurations
(`presets.py`), the parameters that follow from a configuration (`specification.py`), and what other
projects call these fields (`riftco/interchange`).
"""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from riftco.errors import ConfigError
from riftco.models.rope_scaling import RopeScaling, parse_rope_scaling

Norm = Literal["layer", "rms"]
FeedForward = Literal["gelu", "gelu_tanh", "swiglu"]
Position = Literal["learned", "rope"]

DEFAULT_ROPE_THETA = 1e4
_UINT32_COUNT = 2**32


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape and the choices of one decoder-only transformer.

    The first six fields may be given by position; a default that depends on another field is written as None and
    is a number by the time the object exists. Frozen and hashable, so that it can be a static argument under jit.

    Args:
        vocab_size: V, how many token ids there are; 1 .. 2**32.
        context: C, the most positions a row may have; 1 .. 2**32. Learned positions have this many rows.
        width: D, the residual stream.
        heads: H, query heads.
        layers: L, blocks.
        hidden: F, the feed-forward width.
        kv_heads: G, key and value heads; divides `heads`. Default: `heads`.
        head_dim: K, the width of one head; even under RoPE. Default: `width // heads`, which must then be exact.
        norm: "layer" (scale and bias) or "rms" (scale only).
        norm_eps: added inside the root; finite and positive as a float32.
        mlp: "gelu" (exact, erf), "gelu_tanh" or "swiglu".
        position: "learned" or "rope" (rotate-half pairs).
        rope_theta: the base of the angles. Default: what `rope_scaling` says, else 1e4.
        rope_scaling: Hugging Face's `rope_parameters` mapping; types default, linear, llama3 and yarn.
        bias: whether every linear but the head has a bias. Default: `norm == "layer"`.
        head_bias: whether the language-model head has one.
        qkv_bias: whether query, key and value have one. Default: `bias`; True alone is Qwen2's form.
        qk_norm: RMSNorm over each head's query and key, before RoPE, whatever `norm` is (Qwen3).
        sliding_window: W, a query sees the last W keys, its own included; None is all of them.
        tie_embeddings: the head is the token embedding; no head weight exists.
        dropout: the rate at training time, in [0, 1).

    Raises:
        ConfigError: for a value that is not acceptable, in one sentence that says what to do.
    """

    vocab_size: int
    context: int
    width: int
    heads: int
    layers: int
    hidden: int
    _: dataclasses.KW_ONLY
    kv_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    norm: Norm = "layer"
    norm_eps: float = 1e-5
    mlp: FeedForward = "gelu"
    position: Position = "learned"
    rope_theta: float = None  # type: ignore[assignment]
    rope_scaling: RopeScaling | Mapping[str, Any] | None = None
    bias: bool = None  # type: ignore[assignment]
    head_bias: bool = False
    qkv_bias: bool = None  # type: ignore[assignment]
    qk_norm: bool = False
    sliding_window: int | None = None
    tie_embeddings: bool = False
    dropout: float = 0.0

    _POSITIVE: ClassVar[tuple[str, ...]] = ("vocab_size", "context", "width", "heads", "layers", "hidden")
    _FLAGS: ClassVar[tuple[str, ...]] = ("bias", "head_bias", "qkv_bias", "qk_norm", "tie_embeddings")

    def __post_init__(self) -> None:
        for name in self._POSITIVE:
            self._set(name, _positive_integer(name, getattr(self, name)))
        for name in ("vocab_size", "context"):
            if getattr(self, name) > _UINT32_COUNT:
                raise ConfigError(
                    f"DecoderConfig: {name} must be at most 2**32, since ids and positions are uint32; "
                    f"got {getattr(self, name)}; choose a smaller one"
                )
        for name, kind in (("norm", Norm), ("mlp", FeedForward), ("position", Position)):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(repr(choice) for choice in get_args(kind))
                raise ConfigError(f"DecoderConfig: {name} must be one of {choices}; got {getattr(self, name)!r}")
        self._resolve_heads()
        self._resolve_rope()
        self._set("bias", self.norm == "layer" if self.bias is None else self.bias)
        self._set("qkv_bias", self.bias if self.qkv_bias is None else self.qkv_bias)
        for name in self._FLAGS:
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ConfigError(f"DecoderConfig: {name} must be True or False; got {getattr(self, name)!r}")
            self._set(name, bool(getattr(self, name)))
        self._set("norm_eps", _positive_float32("norm_eps", self.norm_eps))
        if self.sliding_window is not None:
            self._set("sliding_window", _positive_integer("sliding_window", self.sliding_window))
        rate = _finite("dropout", self.dropout)
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"DecoderConfig: dropout must lie in [0, 1); got {rate}; use 0.0 for none")
        self._set("dropout", rate)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _resolve_heads(self) -> None:
        if self.head_dim is None:
            if self.width % self.heads:
                raise ConfigError(
                    f"DecoderConfig: width must be a multiple of heads unless head_dim is given; got width "
                    f"{self.width} and heads {self.heads}; change one of them or give head_dim"
                )
            self._set("head_dim", self.width // self.heads)
        self._set("head_dim", _positive_integer("head_dim", self.head_dim))
        self._set("kv_heads", _positive_integer("kv_heads", self.heads if self.kv_heads is None else self.kv_heads))
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"DecoderConfig: heads must be a multiple of kv_heads; got heads {self.heads} and kv_heads "
                f"{self.kv_heads}; each key and value head serves an equal group of query heads"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(
                f"DecoderConfig: head_dim must be even under position='rope', which turns pairs of channels; "
                f"got {self.head_dim}; give an even head_dim or use position='learned'"
            )

    def _resolve_rope(self) -> None:
        scaling, theta = parse_rope_scaling(self.rope_scaling, self.context)
        if self.position == "learned":
            if self.rope_scaling is not None or self.rope_theta not in (None, DEFAULT_ROPE_THETA):
                raise ConfigError(
                    "DecoderConfig: rope_theta and rope_scaling belong to position='rope'; got them with "
                    "position='learned'; drop them or change the position"
                )
            self._set("rope_theta", DEFAULT_ROPE_THETA)
            return
        given = None if self.rope_theta is None else _positive_finite("rope_theta", self.rope_theta)
        if given is not None and theta is not None and given != theta:
            raise ConfigError(
                f"DecoderConfig: rope_theta and rope_scaling['rope_theta'] must agree; got {given} and {theta}; "
                "give one of them"
            )
        self._set("rope_theta", next(value for value in (given, theta, DEFAULT_ROPE_THETA) if value is not None))
        self._set("rope_scaling", scaling)

    def to_dict(self) -> dict[str, Any]:
        """Every field, resolved, as JSON values in the order of the signature; `from_dict` inverts it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, RopeScaling) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """The configuration that `to_dict` described.

        Raises:
            ConfigError: for a key that is not a field, a missing required one, or an unacceptable value.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := [str(key) for key in values if key not in names]:
            raise ConfigError(
                f"DecoderConfig: every key must be a field; got {', '.join(unknown)}; the fields are {', '.join(names)}"
            )
        if missing := [name for name in cls._POSITIVE if name not in values]:
            raise ConfigError(f"DecoderConfig: {', '.join(missing)} must be given; got none; add them")
        return cls(**values)


def _positive_integer(name: str, value: Any) -> int:
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < 1:
        raise ConfigError(f"DecoderConfig: {name} must be an integer of at least 1; got {value!r}")
    return number


def _finite(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ConfigError(f"DecoderConfig: {name} must be a finite number; got {value!r}")
    return float(value)


def _positive_finite(name: str, value: Any) -> float:
    number = _finite(name, value)
    if number <= 0.0:
        raise ConfigError(f"DecoderConfig: {name} must be positive; got {value!r}")
    return number


def _positive_float32(name: str, value: Any) -> float:
    number = _finite(name, value)
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(number)
    if not (np.isfinite(rounded) and rounded > 0):
        raise ConfigError(
            f"DecoderConfig: {name} must be finite and positive after rounding to float32; got {value!r}, which "
            f"becomes {rounded}; 1e-5 is usual"
        )
    return number
