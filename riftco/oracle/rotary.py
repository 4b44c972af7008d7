"""Rotary position embedding and its published long-context variants, in NumPy float64.

The split-half convention: channel i of a head pairs with channel i + K/2 (Su et al. 2021, arXiv:2104.09864, in the
layout of GPT-NeoX and Llama).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from riftco.errors import ConfigError, ShapeError
from riftco.oracle.elementwise import as_float64


@np.errstate(all="ignore")
def rope_tables(positions, head_dim, *, theta=1e4, scaling=None):
    """Cosines and sines of the rotation angles.

    Args:
        positions: integers [...], the absolute positions.
        head_dim: the head width K; even.
        theta: base of the geometric series of frequencies theta^(-2i/K), in radians per position.
        scaling: None, or a dict of Hugging Face's `rope_parameters`: rope_type "default", "linear", "llama3" or "yarn"
            with that type's fields. A `rope_theta` inside it must agree with `theta`.

    Returns:
        (cos, sin), each [..., K/2], float64; under yarn both carry its attention factor.

    Raises:
        ConfigError: for an odd width, an unknown type, a missing field, or two different thetas.
    """
    if head_dim % 2:
        raise ConfigError(f"rope_tables: head_dim must be even; got {head_dim}. Choose another head width.")
    frequencies = [float(theta) ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    attention_factor = 1.0
    if scaling is not None:
        frequencies, attention_factor = _scaled(frequencies, head_dim, float(theta), scaling)
    angles = np.asarray(positions)[..., None] * np.array(frequencies)
    return attention_factor * np.cos(angles), attention_factor * np.sin(angles)


def _scaled(
    frequencies: list[float], head_dim: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[list[float], float]:
    """The frequencies after scaling, and the factor for cos and sin."""
    if scaling.get("rope_theta", theta) != theta:
        raise ConfigError(
            f"rope_tables: theta and the rope_theta inside scaling must agree; got {theta}, "
            f"{scaling['rope_theta']}. Pass the one that is meant as theta."
        )
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"rope_tables: partial_rotary_factor must be 1; got {scaling['partial_rotary_factor']}. "
            "Heads that are rotated only in part are not supported."
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default":
            return frequencies, 1.0
        case "linear":
            factor = float(_field(scaling, "factor"))
            return [frequency / factor for frequency in frequencies], 1.0
        case "llama3":
            return [_llama3(frequency, scaling) for frequency in frequencies], 1.0
        case "yarn":
            return _yarn(frequencies, head_dim, theta, scaling)
        case _:
            raise ConfigError(
                f"rope_tables: rope_type must be default, linear, llama3 or yarn; got {kind!r}. "
                "Types whose frequencies depend on the current length are not supported."
            )


def _field(scaling: Mapping[str, Any], name: str) -> Any:
    if scaling.get(name) is None:
        raise ConfigError(
            f"rope_tables: scaling of type {scaling.get('rope_type')!r} needs {name!r}; got {sorted(scaling)}. "
            "Copy the whole rope_parameters dict from the model's configuration."
        )
    return scaling[name]


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Llama 3.1's rule: slow rotations slowed by `factor`, fast ones kept, a linear blend between."""
    factor = float(_field(scaling, "factor"))
    low, high = float(_field(scaling, "low_freq_factor")), float(_field(scaling, "high_freq_factor"))
    # How many turns this channel makes over the context that the model was first trained on.
    turns = _field(scaling, "original_max_position_embeddings") * frequency / (2.0 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    kept = (turns - low) / (high - low)
    return (1.0 - kept) * frequency / factor + kept * frequency


def _yarn(
    frequencies: list[float], head_dim: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[list[float], float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp over channels between kept and slowed, and a temperature."""
    factor = float(_field(scaling, "factor"))
    context = float(_field(scaling, "original_max_position_embeddings"))

    def channel(turns: float) -> float:
        """The (fractional) channel that makes so many turns over the original context."""
        return head_dim * math.log(context / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    def temperature(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1.0 else 0.1 * weight * math.log(scale) + 1.0

    first, last = channel(scaling.get("beta_fast") or 32.0), channel(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as published: a ramp of width 0 would divide by 0
    scaled = []
    for i, frequency in enumerate(frequencies):
        slowed = min(max((i - first) / (last - first), 0.0), 1.0)
        scaled.append(slowed * frequency / factor + (1.0 - slowed) * frequency)

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = temperature(factor, mscale) / temperature(factor, mscale_all)
        else:
            attention_factor = temperature(factor, 1.0)
    return scaled, float(attention_factor)


def _per_row(x: np.ndarray, table) -> np.ndarray:
    """A table [T, K/2] or [B, T, K/2] as [B or 1, T, 1, K/2], ready to meet x[B, T, H, K/2]."""
    table = as_float64(table)
    half = x.shape[-1] // 2
    if x.ndim != 4 or table.shape not in ((x.shape[1], half), (x.shape[0], x.shape[1], half)):
        raise ShapeError(
            f"rope: x[B, T, H, K] needs tables [T, K/2] or [B, T, K/2]; got x {x.shape} and a table {table.shape}. "
            "Make them with rope_tables(positions, K)."
        )
    return table.reshape(-1, x.shape[1], 1, half)


@np.errstate(all="ignore")
def rope(x, cos, sin):
    """Rotate each channel pair (i, i + K/2) of x[B, T, H, K] by its position's angle.

    Args:
        x: queries or keys [B, T, H, K].
        cos: cosines [T, K/2] or [B, T, K/2].
        sin: sines, of the shape of cos.
    """
    x = as_float64(x)
    cos, sin = _per_row(x, cos), _per_row(x, sin)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@np.errstate(all="ignore")
def rope_vjp(x, cos, sin, dy):
    """Cotangents (dx, dcos, dsin); dx is dy rotated back."""
    x, dy = as_float64(x), as_float64(dy)
    row_cos, row_sin = _per_row(x, cos), _per_row(x, sin)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    dfirst, dsecond = dy[..., :half], dy[..., half:]
    dx = np.concatenate([dfirst * row_cos + dsecond * row_sin, dsecond * row_cos - dfirst * row_sin], axis=-1)
    dcos = (dfirst * first + dsecond * second).sum(axis=2)  # (B, T, K/2)
    dsin = (dsecond * first - dfirst * second).sum(axis=2)
    if np.ndim(cos) == 2:
        dcos, dsin = dcos.sum(axis=0), dsin.sum(axis=0)
    return dx, dcos, dsin
