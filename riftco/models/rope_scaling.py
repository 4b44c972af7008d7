"""What `rope_scaling` may say: Hugging Face's `rope_parameters` mapping, checked key by key.

Types default, linear (Chen et al. 2023, arXiv:2306.15595), llama3 (Llama 3.1's release) and yarn (Peng et al. 2023,
arXiv:2309.00071) are fixed functions of the position. The angles themselves are computed where RoPE is applied.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from riftco.errors import ConfigError

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_OPTIONAL = {
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_REFUSED = {
    "dynamic": "its angles depend on the length of the sequence so far, so cached keys would have to be turned again",
    "longrope": "it switches its table at a length of the sequence, so cached keys would have to be turned again",
    "proportional": "it turns only a part of each head",
    "axial": "it is made for images",
}


class RopeScaling(Mapping[str, Any]):
    """An immutable, hashable mapping of one scaling's parameters; equal to any mapping with the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_items", dict(sorted(items.items())))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("RopeScaling is immutable")

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (RopeScaling, (self._items,))

    def __repr__(self) -> str:
        return repr(self._items)


def parse_rope_scaling(scaling: Any, context: int) -> tuple[RopeScaling | None, float | None]:
    """The checked parameters and the `rope_theta` that stood among them.

    Args:
        scaling: None, or a mapping with `rope_type` (or the older `type`) and that type's parameters.
        context: stands in for yarn's `original_max_position_embeddings` where that is absent, as in transformers.

    Returns:
        None for type default, else the parameters without `rope_theta`; and `rope_theta` or None.

    Raises:
        ConfigError: for an unknown or refused type, a missing, unknown or non-numeric parameter.
    """
    if scaling is None:
        return None, None
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_scaling: must be a mapping such as rope_parameters in a config.json; got {scaling!r}")
    values = dict(scaling)
    legacy = values.pop("type", None)
    kind = values.pop("rope_type", legacy if legacy is not None else "default")
    if legacy is not None and legacy != kind:
        raise ConfigError(f"rope_scaling: type and rope_type must agree; got {legacy!r} and {kind!r}; give one")
    if isinstance(kind, str) and kind in _REFUSED:
        raise ConfigError(f"rope_scaling: type {kind!r} is not supported: {_REFUSED[kind]}; use linear, llama3 or yarn")
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise ConfigError(f"rope_scaling: rope_type must be one of {', '.join(_REQUIRED)}; got {kind!r}")
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("rope_scaling: partial_rotary_factor must be 1.0: every channel of a head is turned")
    theta = values.pop("rope_theta", None)
    theta = None if theta is None else _number("rope_theta", theta)
    # A null parameter means "not given" in published files.
    values = {key: value for key, value in values.items() if value is not None}
    if kind == "yarn":
        values.setdefault("original_max_position_embeddings", context)
    if missing := [key for key in _REQUIRED[kind] if key not in values]:
        raise ConfigError(f"rope_scaling: type {kind!r} needs {', '.join(missing)}; got {sorted(values)}; add them")
    if unknown := sorted(set(values) - set(_REQUIRED[kind]) - set(_OPTIONAL.get(kind, ()))):
        raise ConfigError(f"rope_scaling: type {kind!r} has no parameter {', '.join(unknown)}; remove it")
    if kind == "default":
        return None, theta
    truncate = values.pop("truncate", None)
    parsed: dict[str, Any] = {key: _number(key, value) for key, value in values.items()}
    if truncate is not None:
        if not isinstance(truncate, bool):
            raise ConfigError(f"rope_scaling: truncate must be true or false; got {truncate!r}")
        parsed["truncate"] = truncate
    if "original_max_position_embeddings" in parsed:
        parsed["original_max_position_embeddings"] = int(parsed["original_max_position_embeddings"])
    if parsed["factor"] < 1.0:
        raise ConfigError(f"rope_scaling: factor must be at least 1; got {parsed['factor']}")
    if kind == "llama3" and parsed["high_freq_factor"] <= parsed["low_freq_factor"]:
        raise ConfigError(
            f"rope_scaling: high_freq_factor must be above low_freq_factor; got {parsed['high_freq_factor']} and "
            f"{parsed['low_freq_factor']}"
        )
    return RopeScaling({"rope_type": kind, **parsed}), theta


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"rope_scaling: {name} must be a positive finite number; got {value!r}")
    return float(value)
