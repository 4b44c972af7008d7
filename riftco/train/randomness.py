"""One seed, four separate streams of randomness: initial weights, batches, dropout, sampling.

They share nothing, so a change to the model leaves the batches as they were, and dropout leaves the weights.
"""

import hashlib
from typing import NamedTuple

import jax

from riftco.types import Key


class Streams(NamedTuple):
    """What each consumer of randomness starts from."""

    init: Key
    """The key of the initial weights."""
    data: int
    """The seed of the batch source, 0 .. 2**63 − 1."""
    dropout: Key
    """The key of dropout; the mask of a micro-batch comes from fold_in(fold_in(key, step), micro-batch)."""
    sampling: int
    """The seed of generated samples, 0 .. 2**31 − 1."""


def streams(seed: int) -> Streams:
    """The four streams of `seed`, an integer of at least 0."""
    return Streams(
        jax.random.key(_derive(seed, "init", 63)),
        _derive(seed, "data", 63),
        jax.random.key(_derive(seed, "dropout", 63)),
        _derive(seed, "sampling", 31),
    )


def _derive(seed: int, name: str, bits: int) -> int:
    digest = hashlib.sha256(f"riftco {name} {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - bits)
