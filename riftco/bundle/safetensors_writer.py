"""Writing a safetensors file one tensor at a time, with the bytes that the library `safetensors` would write.

The library wants every tensor in memory at once, and copies them once more. Here shapes and dtypes alone make the
header; a tensor is asked for when its place in the file has come, and let go.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from riftco.bundle.safetensors_reader import DTYPES
from riftco.errors import BundleError

# The library sorts by alignment, largest first, then by name; this is its order of types, smallest first.
_ORDER = ("BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64")
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


class Tensors(Protocol):
    """What is written: {name: array} whose shapes and dtypes are known before its arrays are."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        ...

    def dtype_of(self, name: str) -> np.dtype:
        """The dtype of a tensor."""
        ...

    def __getitem__(self, name: str, /) -> np.ndarray:
        """The tensor; asked for once."""
        ...

    def __iter__(self) -> Iterator[str]:
        """The names."""
        ...


class Ready:
    """Arrays that are there already, as `Tensors`."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.arrays[name].shape)

    def dtype_of(self, name: str) -> np.dtype:
        """The dtype of a tensor."""
        return self.arrays[name].dtype

    def __getitem__(self, name: str, /) -> np.ndarray:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)


def size_of(tensors: Tensors, name: str) -> int:
    """The bytes of a tensor."""
    return math.prod(tensors.shape_of(name)) * tensors.dtype_of(name).itemsize


def write_file(path: Path, tensors: Tensors, names: Iterable[str], metadata: Mapping[str, str]) -> None:
    """Write some tensors as one file.

    Args:
        path: replaced if it exists.
        tensors: where they come from.
        names: which of them; their order does not matter.
        metadata: for the header.

    Raises:
        BundleError: for a dtype that the format has no name for; the tensor is named.
    """
    kinds: dict[str, str] = {}
    for name in names:
        kind = _NAME_OF.get(tensors.dtype_of(name))
        if kind is None:
            raise BundleError(
                f"{path}: tensor {name!r}: dtype must be one of {', '.join(DTYPES)}; got "
                f"{tensors.dtype_of(name)}; cast it"
            )
        kinds[name] = kind
    ordered = sorted(kinds, key=lambda name: (-_ORDER.index(kinds[name]), name.encode()))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in ordered:
        end = at + size_of(tensors, name)
        header[name] = {"dtype": kinds[name], "shape": list(tensors.shape_of(name)), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            array = np.ascontiguousarray(tensors[name], dtype=DTYPES[kinds[name]])
            file.write(array.reshape(-1).view(np.uint8).data)
