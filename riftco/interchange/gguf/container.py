"""The GGUF container, read strictly: versions 2 and 3, little endian.

A file is a header (counts, metadata, descriptions of tensors) and a data section. Everything that the header claims is
checked against the size of the file before anything is allocated for it: counts, lengths, types, shapes, offsets,
overlaps. Nothing of the data section is read here.

Source: the GGUF specification of the ggml project.
"""

import dataclasses
import itertools
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from riftco.errors import BundleError
from riftco.interchange.gguf.tensor_types import TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_ENTRIES = 1 << 16
"""Metadata entries, and tensors, that a file may have."""
MAX_KEY = (1 << 16) - 1
MAX_NAME = 64
MAX_STRING = 1 << 26
MAX_HEADER = 1 << 28
"""Bytes of metadata and descriptions together."""
MAX_STRINGS = 1 << 21
"""Strings in all arrays together; the largest vocabularies have 2**19 tokens and as many merges."""
MAX_RANK = 4
MAX_ALIGNMENT = 1 << 16

STRING, ARRAY, BOOL, UINT32 = 8, 9, 7, 4
SCALARS: dict[int, tuple[str, str]] = {
    0: ("uint8", "<u1"), 1: ("int8", "<i1"), 2: ("uint16", "<u2"), 3: ("int16", "<i2"), 4: ("uint32", "<u4"),
    5: ("int32", "<i4"), 6: ("float32", "<f4"), 7: ("bool", "<u1"), 10: ("uint64", "<u8"), 11: ("int64", "<i8"),
    12: ("float64", "<f8"),
}  # fmt: skip
"""Number of a scalar value type -> (name, NumPy spelling)."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What the header says of one tensor.

    Attributes:
        name: as stored.
        kind: its type.
        shape: in NumPy's order, rows first; the file has the reverse.
        offset: of its first byte in the file.
    """

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """How many scalars it holds."""
        return math.prod(self.shape)

    @property
    def byte_count(self) -> int:
        """How many bytes it takes."""
        return self.kind.byte_count(self.size)


@dataclasses.dataclass(frozen=True)
class Header:
    """A checked header.

    Attributes:
        path: the file.
        version: 2 or 3.
        metadata: key -> int, float, bool, str, list of str, or one-dimensional NumPy array.
        tensors: name -> `TensorInfo`, in the file's order.
        data_start: where the data section begins.
        size: of the file.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data_start: int
    size: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a GGUF file.

    Args:
        path: the file.

    Raises:
        BundleError: it cannot be read, is not GGUF version 2 or 3 in little-endian order, is truncated, or a field is
            not acceptable; the message names the field.
    """
    place = Path(path)
    try:
        with open(place, "rb") as file:
            return _Reader(place, file).header()
    except OSError as error:
        raise BundleError(f"{place}: a GGUF file must be readable; {error.strerror}; check the path") from error


class _Reader:
    """A cursor over a file that never reads past its end or past the bounds above."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0
        self.strings = 0

    def fail(self, sentence: str) -> NoReturn:
        raise BundleError(f"{self.path}: {sentence}")

    def take(self, count: int, what: str) -> bytes:
        self.demand(count, what)
        self.at += count
        data = self.file.read(count)
        if len(data) != count:
            self.fail(f"{what} must be whole; the file ends inside it; it is truncated")
        return data

    def demand(self, count: int, what: str) -> None:
        """Refuse what the rest of the file cannot hold, before anything is allocated for it."""
        if count > self.size - self.at:
            self.fail(
                f"{what} must be whole; it needs {count} bytes and {self.size - self.at} are left; it is truncated"
            )
        if self.at + count > MAX_HEADER:
            self.fail(
                f"{what} must lie in the first {MAX_HEADER} bytes; it ends at {self.at + count}; no model needs more"
            )

    def u32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def count(self, what: str, limit: int, least: int) -> int:
        """A count of at most `limit` things of `least` bytes each."""
        number = self.u64(what)
        if number > limit:
            self.fail(f"{what} must be at most {limit}; got {number}; the file is damaged")
        self.demand(number * least, what)
        return number

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        data = self.take(self.count(f"the length of {what}", limit, 1), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} must be UTF-8; byte {error.start} of it is not; the file is damaged")

    def header(self) -> Header:
        if self.take(4, "the magic") != MAGIC:
            self.fail("it must begin with GGUF; it does not: it is another kind of file")
        version = self.u32("the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = "; it is big endian" if swapped in VERSIONS else ""
            self.fail(f"version must be 2 or 3 in little-endian order; got {version}{order}; convert the file")
        tensor_count = self.count("tensor_count", MAX_ENTRIES, 24)
        entry_count = self.count("metadata_kv_count", MAX_ENTRIES, 13)
        metadata = self.metadata(entry_count)
        alignment = self.alignment(metadata)
        described = [self.tensor(index) for index in range(tensor_count)]
        data_start = -(-self.at // alignment) * alignment
        tensors = self.placed(described, data_start, alignment)
        return Header(self.path, version, metadata, tensors, data_start, self.size)

    def metadata(self, entry_count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(entry_count):
            key = self.string(f"metadata key {index}", MAX_KEY)
            if not key or not key.isprintable():
                self.fail(f"metadata key {index} must be a printable name; got {key[:80]!r}; the file is damaged")
            if key in metadata:
                self.fail(f"every metadata key must be there once; {key} stands twice; the file is damaged")
            metadata[key] = self.value(key, self.u32(f"the type of {key}"))
        return metadata

    def value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            self.fail(f"{key}: its type must be one of 0 to 12; got {kind}; the file is damaged")
        return self.numbers(key, kind, 1)[0].item()

    def array(self, key: str) -> Any:
        kind = self.u32(f"the element type of {key}")
        if kind == STRING:
            count = self.count(f"the length of {key}", MAX_STRINGS, 8)
            self.strings += count
            if self.strings > MAX_STRINGS:
                self.fail(
                    f"{key}: all arrays together may hold {MAX_STRINGS} strings; it passes that; no model needs more"
                )
            return self.array_of_strings(key, count)
        if kind not in SCALARS:
            nested = "an array of arrays" if kind == ARRAY else f"type {kind}"
            self.fail(f"{key}: its elements must be numbers, booleans or strings; got {nested}; no model needs that")
        return self.numbers(
            key, kind, self.count(f"the length of {key}", MAX_HEADER, np.dtype(SCALARS[kind][1]).itemsize)
        )

    def array_of_strings(self, key: str, count: int) -> list[str]:
        """As `string` for each, but without a call and a message for each: vocabularies are long."""
        read, unpack, strings = self.file.read, struct.Struct("<Q").unpack, []
        left = min(self.size, MAX_HEADER) - self.at
        for index in range(count):
            left -= 8
            length = unpack(read(8))[0] if left >= 0 else 0
            left -= length
            if left < 0:
                self.fail(
                    f"{key}[{index}] must be whole; it passes the end of the file or of the header; it is damaged"
                )
            try:
                strings.append(read(length).decode())
            except UnicodeDecodeError as error:
                self.fail(f"{key}[{index}] must be UTF-8; byte {error.start} of it is not; the file is damaged")
        self.at = min(self.size, MAX_HEADER) - left
        return strings

    def numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(SCALARS[kind][1])
        values = np.frombuffer(self.take(count * dtype.itemsize, key), dtype)
        if kind != BOOL:
            return values
        if count and values.max() > 1:
            self.fail(f"{key}: a boolean must be 0 or 1; got {values.max()}; the file is damaged")
        return values.astype(bool)

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self.fail(f"general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}; got {value!r:.80}")
        return value

    def tensor(self, index: int) -> TensorInfo:
        """A description, with the offset still counted from the data section."""
        name = self.string(f"the name of tensor {index}", MAX_NAME)
        if not name or not name.isprintable():
            self.fail(f"the name of tensor {index} must be printable; got {name!r}; the file is damaged")
        rank = self.u32(f"the rank of {name}")
        if not 1 <= rank <= MAX_RANK:
            self.fail(f"tensor {name}: its rank must be 1 to {MAX_RANK}; got {rank}; the file is damaged")
        shape = struct.unpack(f"<{rank}Q", self.take(8 * rank, f"the shape of {name}"))[::-1]
        number = self.u32(f"the type of {name}")
        offset = self.u64(f"the offset of {name}")
        kind = TYPES.get(number)
        if kind is None:
            names = ", ".join(known.name for known in TYPES.values())
            self.fail(f"tensor {name}: its type must be one of {names}; got {_type_name(number)}; convert the file")
        if min(shape) < 1:
            self.fail(f"tensor {name}: every dimension must be at least 1; got {list(shape)}; the file is damaged")
        if shape[-1] % kind.block:
            self.fail(
                f"tensor {name}: rows of {kind.name} must be whole blocks of {kind.block}; got {shape[-1]} columns"
            )
        return TensorInfo(name, kind, shape, offset)

    def placed(self, described: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
        """The tensors by name, every one within the file and none over another."""
        tensors: dict[str, TensorInfo] = {}
        for info in described:
            if info.name in tensors:
                self.fail(f"every tensor must be there once; {info.name} stands twice; the file is damaged")
            if info.offset % alignment:
                self.fail(f"tensor {info.name}: its offset must be a multiple of {alignment}; got {info.offset}")
            end = start + info.offset + info.byte_count
            if end > self.size:
                self.fail(
                    f"tensor {info.name}: it must lie in the file; it would end at byte {end} of {self.size}; the file "
                    "is truncated"
                )
            tensors[info.name] = dataclasses.replace(info, offset=start + info.offset)
        ordered = sorted(tensors.values(), key=lambda info: info.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.byte_count > after.offset:
                self.fail(f"tensors must not overlap; {before.name} and {after.name} do; the file is damaged")
        return tensors


def _type_name(number: int) -> str:
    """The `gguf` package's name for a type that is not read here, or its number."""
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return str(number)


def read_blocks(file: BinaryIO, info: TensorInfo, start: int, scalars: int, chunk: int) -> Iterator[bytes]:
    """The bytes of `scalars` scalars of a tensor from scalar `start` on, at most `chunk` scalars at a time.

    Args:
        file: the file, open for reading.
        info: the tensor.
        start: the first scalar; this and the next two are multiples of the type's block.
        scalars: how many.
        chunk: how many at a time.

    Raises:
        BundleError: the file ended early.
    """
    file.seek(info.offset + info.kind.byte_count(start))
    for first in range(0, scalars, chunk):
        count = info.kind.byte_count(min(chunk, scalars - first))
        data = file.read(count)
        if len(data) != count:
            raise BundleError(
                f"{file.name}: tensor {info.name} must be whole; the file ends inside it; it was truncated"
            )
        yield data
