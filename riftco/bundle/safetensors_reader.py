"""Reading a safetensors file that may be damaged or hostile: every claim of its header is checked before it is used.

The layout (https://github.com/huggingface/safetensors, "Format"): eight bytes of little-endian header length, a JSON
header padded with spaces, then the tensors' bytes, which the header must account for without a hole or an overlap. The
library `safetensors` is asked as well, so that nothing is read here that it refuses; the bytes themselves are read by
plain reads and not through a mapping, since mapped pages count as memory beside the arrays that they are copied to.

Not here: directories of several files and their index (`weights.py`).
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from riftco.errors import BundleError

MAX_HEADER = 1 << 24
"""The most bytes of a header: 16 MiB, room for the names of more tensors than `MAX_TENSORS`."""
MAX_TENSORS = 1 << 16
MAX_RANK = 8

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
"""The types that are read. 8-bit floats and narrower need scales that stand elsewhere, so they are refused."""


class Entry(NamedTuple):
    """One tensor of a header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    """Of its first byte, from the end of the header."""
    end: int


class SafetensorsFile(Mapping[str, np.ndarray]):
    """{tensor name: NumPy array} of one file, each read when it is asked for; close it, or use it as a context.

    Args:
        path: the file.

    Attributes:
        entries: {tensor name: `Entry`} in the order of the bytes.
        metadata: the header's `__metadata__`.

    Raises:
        BundleError: for a file that is not exactly what the format says; the message names the file, and the tensor and
            the field where there is one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise BundleError(f"{self.path}: a safetensors file is required; there is none; check the path")
        try:
            self._file = open(self.path, "rb")
        except OSError as error:
            raise BundleError(f"{self.path}: it must be readable; {error.strerror}") from error
        try:
            self.entries, self.metadata, self._start = read_header(self._file, self.path)
            self._ask_the_library()
        except BaseException:
            self._file.close()
            raise

    def _ask_the_library(self) -> None:
        try:
            with safe_open(self.path, framework="np") as file:
                names = set(file.keys())
        except (SafetensorError, OSError) as error:
            raise BundleError(f"{self.path}: the safetensors library refuses it: {error}") from error
        if names != set(self.entries):
            raise BundleError(f"{self.path}: the safetensors library reads other tensors from it; it is damaged")

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self.entries[name].shape

    def dtype_of(self, name: str) -> np.dtype:
        """The dtype of a tensor, without reading it."""
        return self.entries[name].dtype

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        array = np.empty(entry.shape, entry.dtype)
        if array.size:
            self._file.seek(self._start + entry.begin)
            flat = array.reshape(-1).view(np.uint8)
            if self._file.readinto(flat.data) != flat.size:
                raise BundleError(f"{self.path}: tensor {name!r}: the file ended while it was read; it was changed")
        return array

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def close(self) -> None:
        """Close the file; arrays that were read stay."""
        self._file.close()

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_header(file: Any, path: Path) -> tuple[dict[str, Entry], dict[str, str], int]:
    """The checked header of an open file: entries, metadata, and where the tensors' bytes begin.

    Args:
        file: binary, seekable.
        path: for messages.

    Raises:
        BundleError: as `SafetensorsFile`.
    """
    total = file.seek(0, os.SEEK_END)
    file.seek(0)
    if total < 8:
        raise BundleError(f"{path}: a safetensors file has at least 8 bytes; got {total}; it is truncated")
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= MAX_HEADER:
        raise BundleError(f"{path}: the header length must be 2 .. {MAX_HEADER} bytes; got {length}; it is damaged")
    if length > total - 8:
        raise BundleError(
            f"{path}: the header length must fit the file; got {length} in a file of {total} bytes; it is truncated"
        )
    header = _parse(file.read(length), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BundleError(f"{path}: __metadata__ must map strings to strings; it is damaged")
    if len(header) > MAX_TENSORS:
        raise BundleError(f"{path}: the header must list at most {MAX_TENSORS} tensors; got {len(header)}")
    size = total - 8 - length
    entries = {name: _entry(f"{path}: tensor {name!r}", name, value, size) for name, value in header.items()}
    return _in_order(entries, size, path), metadata, 8 + length


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    if not data.startswith(b"{"):
        raise BundleError(f"{path}: the header must begin with '{{'; got {data[:1]!r}; it is no safetensors file")
    # Objects are counted before they are made: a header of empty objects is small as text and large in memory.
    if data.count(b"{") + data.count(b"[") > 4 * MAX_TENSORS:
        raise BundleError(
            f"{path}: the header must list at most {MAX_TENSORS} tensors; it holds more objects than that"
        )
    if not data.rstrip(b" ").endswith(b"}"):
        raise BundleError(f"{path}: the header must end with '}}' and spaces; it does not; it is damaged")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} stands twice")
            found[key] = value
        return found

    def refuse(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise BundleError(f"{path}: the header must be UTF-8; byte {error.start} is not; it is damaged") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: the header must be JSON; {error}; it is damaged") from error
    return header


def _entry(who: str, name: str, value: Any, size: int) -> Entry:
    """One tensor's claims, each by itself; `who` begins the messages."""
    try:
        is_text = bool(name.encode("utf-8"))
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise BundleError(f"{who}: a name must be text of at least one character; it is not; it is damaged")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise BundleError(f"{who}: the fields must be dtype, shape and data_offsets; got {got}; it is damaged")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BundleError(f"{who}: dtype must be one of {', '.join(DTYPES)}; got {dtype!r}; convert it to one")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_count(side) for side in shape):
        raise BundleError(
            f"{who}: shape must be at most {MAX_RANK} integers of at least 0; got {str(shape)[:80]}; it is damaged"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise BundleError(f"{who}: data_offsets must be two integers of at least 0; got {str(offsets)[:80]}")
    begin, end = offsets
    if begin > end:
        raise BundleError(f"{who}: data_offsets must ascend; got {offsets}; it is damaged")
    if end > size:
        raise BundleError(
            f"{who}: data_offsets must lie within the {size} bytes of tensors; got {offsets}; the file is truncated"
        )
    # Python's integers do not overflow: a product of huge sides is compared as it is.
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise BundleError(
            f"{who}: {dtype}{shape} needs {needed} bytes, and data_offsets must span as many; got {end - begin}; it is "
            "damaged"
        )
    return Entry(DTYPES[dtype], tuple(shape), begin, end)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _in_order(entries: dict[str, Entry], size: int, path: Path) -> dict[str, Entry]:
    """The entries by their place, once it is known that they fill the file exactly."""
    at = 0
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    for name, entry in ordered.items():
        if entry.begin != at:
            kind = "overlap the tensor before it" if entry.begin < at else "leave no hole before it"
            verb = "must not" if entry.begin < at else "must"
            raise BundleError(
                f"{path}: tensor {name!r}: data_offsets {verb} {kind}; it begins at {entry.begin}, not at {at}"
            )
        at = entry.end
    if at != size:
        raise BundleError(
            f"{path}: the tensors must fill the file; {size - at} bytes after the last one belong to none"
        )
    return ordered
