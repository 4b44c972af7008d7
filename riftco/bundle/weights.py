"""safetensors files of a directory: one, or shards with an index, written and read a tensor at a time."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from riftco.bundle.manifest import pretty_json, strict_json
from riftco.errors import BundleError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Older transformers refuse a file that does not say which framework its layout suits.
_METADATA = {"format": "pt"}


def write_weights(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int) -> None:
    """Write tensors in order; a new shard begins where the limit would be passed.

    Args:
        directory: exists.
        tensors: (name, C-contiguous array) pairs.
        shard_bytes: the most bytes of tensors that a file holds; a larger single tensor has a file to itself.
    """
    weight_map: dict[str, int] = {}
    shard: dict[str, np.ndarray] = {}
    filled = total = count = 0

    def flush() -> None:
        nonlocal shard, filled, count
        save_file(shard, directory / f"shard-{count}", metadata=_METADATA)
        shard, filled, count = {}, 0, count + 1

    for name, tensor in tensors:
        if shard and filled + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
        weight_map[name] = count
        filled += tensor.nbytes
        total += tensor.nbytes
    flush()
    if count == 1:
        (directory / "shard-0").rename(directory / SINGLE)
        return
    names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
    for index, name in enumerate(names):
        (directory / f"shard-{index}").rename(directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": {k: names[v] for k, v in weight_map.items()}}
    (directory / INDEX).write_bytes(pretty_json(index))


class LazyTensors(Mapping[str, np.ndarray]):
    """{tensor name: NumPy array}, each read from its file when it is asked for."""

    def __init__(self, where: dict[str, Any]) -> None:
        self._where = where

    def __getitem__(self, name: str) -> np.ndarray:
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


@contextlib.contextmanager
def open_weights(directory: Path) -> Iterator[LazyTensors]:
    """The tensors of a directory's `model.safetensors` or of its shards, while the block runs.

    Raises:
        BundleError: where the files are absent, damaged, or disagree with their index; the file is named.
    """
    index = directory / INDEX
    if index.is_file():
        content = strict_json(index.read_bytes(), str(index))
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise BundleError(f"{index}: weight_map must map tensors to files; it is damaged")
        files = sorted({str(name) for name in weight_map.values()})
    elif (directory / SINGLE).is_file():
        weight_map, files = None, [SINGLE]
    else:
        raise BundleError(f"{directory}: it must contain {SINGLE} or {INDEX}; neither is there; nothing to load")
    with contextlib.ExitStack() as stack:
        where: dict[str, Any] = {}
        for name in files:
            path = directory / name
            if Path(name).name != name or not path.is_file():
                raise BundleError(
                    f"{index}: it names {name!r}, which is not a file beside it; the download is incomplete"
                )
            try:
                handle = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise BundleError(f"{path}: it must be a safetensors file; {error}; fetch or save it again") from error
            for tensor in handle.keys():
                if tensor in where:
                    raise BundleError(f"{path}: the tensor {tensor} stands in two shards; the directory is damaged")
                if weight_map is not None and weight_map.get(tensor) != name:
                    raise BundleError(
                        f"{index}: it must list {tensor} in {name}; it does not; the files do not belong together"
                    )
                where[tensor] = handle
        if weight_map is not None and (missing := [tensor for tensor in weight_map if tensor not in where]):
            raise BundleError(f"{index}: it lists {missing[0]}, which no shard holds; the download is incomplete")
        yield LazyTensors(where)
