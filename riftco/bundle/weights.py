"""safetensors files of a directory: one, or shards with an index, written and read a tensor at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from riftco.bundle.manifest import pretty_json, strict_json
from riftco.bundle.safetensors_reader import MAX_HEADER, SafetensorsFile
from riftco.bundle.safetensors_writer import Tensors, size_of, write_file
from riftco.errors import BundleError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Older transformers refuse a file that does not say which framework its layout suits.
_METADATA = {"format": "pt"}


def write_weights(directory: Path, tensors: Tensors, shard_bytes: int) -> None:
    """Write tensors, one at a time; a new shard begins where the limit would be passed.

    Args:
        directory: exists.
        tensors: in the order in which they fill the shards.
        shard_bytes: the most bytes of tensors that a file holds; a larger single tensor has a file to itself.
    """
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name in tensors:
        size = size_of(tensors, name)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
        total += size
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, shard in zip(files, shards, strict=True):
        write_file(directory / file, tensors, shard, _METADATA)
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_bytes(pretty_json(index))


class LazyTensors(Mapping[str, np.ndarray]):
    """{tensor name: NumPy array} over several files, each tensor read when it is asked for."""

    def __init__(self, where: Mapping[str, SafetensorsFile]) -> None:
        self._where = where

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._where[name].shape_of(name)

    def dtype_of(self, name: str) -> np.dtype:
        """The dtype of a tensor, without reading it."""
        return self._where[name].dtype_of(name)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._where[name][name]

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


@contextlib.contextmanager
def open_weights(directory: Path) -> Iterator[LazyTensors]:
    """The tensors of a directory's `model.safetensors` or of its shards, while the block runs.

    Raises:
        BundleError: where the files are absent, damaged, or disagree with their index; the file is named, and the
            tensor where there is one.
    """
    weight_map = _weight_map(directory)
    index = directory / INDEX
    with contextlib.ExitStack() as stack:
        where: dict[str, SafetensorsFile] = {}
        for name in [SINGLE] if weight_map is None else sorted(set(weight_map.values())):
            file = stack.enter_context(SafetensorsFile(directory / name))
            for tensor in file:
                if tensor in where:
                    raise BundleError(
                        f"{file.path}: the tensor {tensor} stands in two shards, here and in "
                        f"{where[tensor].path.name}; the directory is damaged"
                    )
                if weight_map is not None and weight_map.get(tensor) != name:
                    raise BundleError(
                        f"{index}: it must list {tensor} in {name}; it does not; the files do not belong together"
                    )
                where[tensor] = file
        if weight_map is not None and (missing := [tensor for tensor in weight_map if tensor not in where]):
            raise BundleError(f"{index}: it lists {missing[0]}, which no shard holds; the download is incomplete")
        yield LazyTensors(where)


def _weight_map(directory: Path) -> dict[str, str] | None:
    """{tensor: file name} of a checked index, or None where there is one file."""
    index, single = directory / INDEX, directory / SINGLE
    if not index.is_file():
        if single.is_file():
            return None
        raise BundleError(
            f"{directory}: it must contain {SINGLE} or {INDEX}; neither is there; "
            + ("its weights are pickles, which run code when read: save it as safetensors"
               if any(directory.glob("*.bin")) else "nothing to load")
        )  # fmt: skip
    if single.is_file():
        raise BundleError(f"{directory}: it must contain {SINGLE} or {INDEX}; both are there; remove the one not meant")
    if index.stat().st_size > MAX_HEADER:
        raise BundleError(f"{index}: an index of at most {MAX_HEADER} bytes is required; it is longer")
    content = strict_json(index.read_bytes(), str(index))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise BundleError(f"{index}: weight_map must map tensors to files; it is damaged")
    for name in sorted(set(weight_map.values())):
        # One plain name: nothing that leads out of the directory, on any system.
        if Path(name).name != name or any(sign in name for sign in "/\\:\0") or not name.endswith(".safetensors"):
            raise BundleError(
                f"{index}: weight_map must name safetensors files beside it; got {name!r}, which is not such a name"
            )
        if not (directory / name).is_file():
            raise BundleError(f"{index}: it names {name!r}, which is not a file beside it; the download is incomplete")
    return weight_map
