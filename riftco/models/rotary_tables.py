"""The angles of rotary embedding, made in float64 on the host and cast once.

Source: Su et al. 2021, arXiv:2104.09864; linear scaling Chen et al. 2023, arXiv:2306.15595; llama3 scaling from the
Llama 3.1 release; yarn Peng et al. 2023, arXiv:2309.00071. Oracle: riftco.oracle.rope_tables.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco.models.config import DecoderConfig
from riftco.models.rope_scaling import RopeScaling


@functools.lru_cache(maxsize=64)
def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """Radians a position turns each pair of channels [K/2], and the factor on cosines and sines."""
    base = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return base, 1.0
    kind = scaling["rope_type"]
    if kind == "linear":
        return base / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(base, scaling), 1.0
    return _yarn(base, head_dim, theta, scaling)


def _llama3(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Short wavelengths stay, long ones are stretched by the factor, those between are blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2.0 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - blend) * base / factor + blend * base


def _yarn(base: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        """The pair that turns this often over the original context."""
        return head_dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32.0), channel(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    stretched = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        mscale, over = scaling.get("mscale"), scaling.get("mscale_all_dim")
        magnitude = temperature(mscale) / temperature(over) if mscale and over else temperature(1.0)
    return base / factor * stretched + base * (1.0 - stretched), float(magnitude)


def rope_tables(config: DecoderConfig, positions: Any, dtype: Any) -> tuple[Any, Any]:
    """Cosines and sines for concrete positions.

    Args:
        config: a configuration with position="rope".
        positions: NumPy integers of any shape [...], known on the host.
        dtype: of the result.

    Returns:
        Two arrays [..., K/2].
    """
    frequencies, magnitude = _frequencies(config.head_dim, config.rope_theta, config.rope_scaling)  # type: ignore[arg-type]
    angles = np.asarray(positions, dtype=np.float64)[..., None] * frequencies
    return jnp.asarray(np.cos(angles) * magnitude, dtype), jnp.asarray(np.sin(angles) * magnitude, dtype)
