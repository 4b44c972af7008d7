"""The tensor types that are read and written: their sizes, and how a stretch of blocks becomes float32 and back.

The arithmetic of the quantised types is the `gguf` package's. Blocks are independent of each other, so everything works
on stretches of a bounded size, whatever the tensor's shape.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20
"""Scalars that are converted at a time; a multiple of every block."""

FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True)
class TensorType:
    """One way of storing scalars.

    Attributes:
        name: the `gguf` package's name for it.
        number: what the file calls it.
        block: scalars in a block; rows hold whole blocks.
        size: bytes of a block.
    """

    name: str
    number: int
    block: int
    size: int

    def byte_count(self, scalars: int) -> int:
        """How many bytes so many scalars take; a whole number of blocks."""
        return scalars // self.block * self.size


TYPES: dict[int, TensorType] = {
    kind.number: kind
    for kind in (
        TensorType("F32", 0, 1, 4),
        TensorType("F16", 1, 1, 2),
        TensorType("Q4_0", 2, 32, 18),
        TensorType("Q4_1", 3, 32, 20),
        TensorType("Q5_0", 6, 32, 22),
        TensorType("Q5_1", 7, 32, 24),
        TensorType("Q8_0", 8, 32, 34),
        TensorType("Q2_K", 10, 256, 84),
        TensorType("Q3_K", 11, 256, 110),
        TensorType("Q4_K", 12, 256, 144),
        TensorType("Q5_K", 13, 256, 176),
        TensorType("Q6_K", 14, 256, 210),
        TensorType("BF16", 30, 1, 2),
    )
}
"""Number -> type, for every type that can be read."""

BY_NAME = {kind.name: kind for kind in TYPES.values()}

FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}
"""What `write` offers -> `general.file_type`."""


@functools.cache
def _library() -> Any:
    """The `gguf` package, imported when the first tensor needs it: it takes a third of a second."""
    import gguf

    return gguf


def dequantize(data: bytes | bytearray | memoryview, kind: TensorType) -> NDArray[np.float32]:
    """The scalars of a stretch of whole blocks, as float32, bit for bit what the `gguf` package gives.

    Args:
        data: whole blocks.
        kind: their type.

    Returns:
        float32[N].
    """
    raw = np.frombuffer(data, np.uint8)
    if kind.name == "F32":
        return raw.view("<f4")
    # One row of many blocks: the package converts sixteen rows at a time, so short rows would be slow.
    with np.errstate(all="ignore"):  # a damaged scale makes an infinity, which the caller looks for
        return _library().dequantize(raw.reshape(1, -1), _library().GGMLQuantizationType(kind.number)).reshape(-1)


def quantize(values: NDArray[np.float32], kind: TensorType) -> bytes:
    """Whole blocks of float32 scalars, stored: the inverse of `dequantize` up to the type's rounding.

    Args:
        values: float32[N], finite, N a multiple of the block; within ±65504 unless the type is F32 or BF16.
        kind: the type.
    """
    if kind.name == "F32":
        return values.astype("<f4", copy=False).tobytes()
    with np.errstate(all="ignore"):  # blocks of zeros and of subnormal numbers
        return _library().quantize(values.reshape(1, -1), _library().GGMLQuantizationType(kind.number)).tobytes()
