"""How much arithmetic a token costs, what a device can do, and how long the rest will take."""

from typing import Any

from riftco.models import DecoderConfig, spec

# Dense bfloat16 operations per second of one device, from the makers' data sheets, by the start of `device_kind`.
_PEAKS = {
    "TPU v2": 22.5e12,  # a device is one core of these two
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device: Any) -> float | None:
    """The published bfloat16 peak of a device in operations per second; None where it is not known, as on a CPU."""
    names = sorted(_PEAKS, key=len, reverse=True)  # the longest name that fits
    return next((_PEAKS[name] for name in names if device.device_kind.startswith(name)), None)


def flops_per_token(config: DecoderConfig, context: int) -> float:
    """Floating-point operations that training spends on a token: 6 for each weight it is multiplied by, and attention.

    Args:
        config: the decoder.
        context: T, tokens in a row; attention counts T keys a query, masked or not.

    Returns:
        6·N + 12·L·H·K·T, N without the embedding tables (with the head). Recomputation does not count.

    Source:
        Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    tables = ("token_embedding.weight", "position_embedding.weight")
    weights = sum(leaf.size for name, leaf in spec(config).items() if name not in tables)
    if config.tie_embeddings:
        weights += config.vocab_size * config.width
    return 6.0 * weights + 12.0 * config.layers * config.heads * config.head_dim * context
