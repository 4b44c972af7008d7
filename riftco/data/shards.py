"""Token shards on disk: plain little-endian .bin files beside a manifest, written once, memory-mapped to read."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from riftco.data.manifest import DTYPES, Manifest, Shard, Split, read_manifest
from riftco.data.text import file_sha256
from riftco.data.tokens import Tokens, update_digest
from riftco.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened directory of token shards. The shards are mapped read-only, not loaded.

    Attributes:
        directory: where it lies.
        manifest: what it says about itself.
        train: the training ids.
        validation: the held-out ids, or None.
    """

    directory: Path
    manifest: Manifest
    train: Tokens
    validation: Tokens | None

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the ids, their vocabulary and their tokenizer."""
        return self.manifest.fingerprint

    def split(self, name: str) -> Tokens:
        """The ids of `train` or `validation`. Raises DataError if the dataset has no such split."""
        tokens = {"train": self.train, "validation": self.validation}.get(name)
        if tokens is None:
            has = ", ".join(self.manifest.splits)
            raise DataError(
                f"data: split '{name}' is not in '{self.directory}'; it has {has}; prepare it or name another"
            )
        return tokens

    def verify(self) -> None:
        """Hash every shard again, and compare ids with the vocabulary. Raises DataError naming the file that lies."""
        for name, split in self.manifest.splits.items():
            hasher = hashlib.sha256()
            for shard, part in zip(split.shards, self.split(name).parts, strict=True):
                path = self.directory / shard.file
                actual = file_sha256(path)
                if actual != shard.sha256:
                    raise DataError(
                        f"data: '{path}' must have the SHA-256 of its manifest, {shard.sha256[:12]}…; "
                        f"it has {actual[:12]}…; restore the file or prepare the dataset again"
                    )
                largest = int(part.max())
                if largest >= self.manifest.vocab_size:
                    raise DataError(
                        f"data: '{path}' must hold ids below the vocabulary size {self.manifest.vocab_size}; it holds "
                        f"{largest}; prepare the dataset again"
                    )
                update_digest(hasher, part)
            if hasher.hexdigest() != split.token_sha256:
                raise DataError(
                    f"data: the ids of split '{name}' in '{self.directory}' must have the manifest's token_sha256; "
                    "they do not; prepare the dataset again"
                )


def open_dataset(directory: str | Path, *, tokenizer: Any = None) -> Dataset:
    """Open a directory that `prepare` made; its manifest and file sizes are checked, its hashes are not.

    Args:
        directory: holds manifest.json and the shards.
        tokenizer: if given, its fingerprint must be that of the tokenizer which made the ids.

    Raises:
        DataError: no or a bad manifest, a shard missing or of the wrong size, another tokenizer.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    if tokenizer is not None and (came := tokenizer.fingerprint()) != manifest.tokenizer_fingerprint:
        raise DataError(
            f"data: '{directory}' must be read with the tokenizer that made it, fingerprint "
            f"{manifest.tokenizer_fingerprint[:12]}…; got {came[:12]}…; "
            "load that tokenizer or prepare the dataset again"
        )
    mapped = {name: _map_split(directory, manifest, split) for name, split in manifest.splits.items()}
    return Dataset(directory, manifest, mapped["train"], mapped.get("validation"))


def _map_split(directory: Path, manifest: Manifest, split: Split) -> Tokens:
    dtype = DTYPES[manifest.dtype]
    parts = []
    for shard in split.shards:
        path = directory / shard.file
        try:
            size = path.stat().st_size
        except OSError:
            raise DataError(f"data: shard '{path}' is missing; restore it or prepare the dataset again") from None
        expected = shard.tokens * dtype.itemsize
        if size != expected:
            raise DataError(
                f"data: shard '{path}' must hold {expected} bytes ({shard.tokens} {manifest.dtype} ids); it holds "
                f"{size}; restore it or prepare the dataset again"
            )
        parts.append(np.asarray(np.memmap(path, dtype, mode="r")))  # a plain view, still mapped
    return Tokens(parts, split.token_sha256)


def shard_dtype(vocab_size: int) -> str:
    """The name of the narrowest shard dtype for a vocabulary: uint16 up to 65,536 ids, else uint32."""
    return "uint16" if vocab_size <= 65_536 else "uint32"


class ShardWriter:
    """Writes the ids of one split as shards of at most `tokens_per_shard` ids; a context manager.

    Args:
        directory: where the files `SPLIT-00000.bin`, … go.
        split: the name of the split.
        vocab_size: ids must be below it.
        tokens_per_shard: ids in every shard but the last.
    """

    def __init__(self, directory: Path, split: str, vocab_size: int, tokens_per_shard: int) -> None:
        self._directory, self._split = directory, split
        self._vocab_size, self._tokens_per_shard = vocab_size, tokens_per_shard
        self._dtype = DTYPES[shard_dtype(vocab_size)]
        self._shards: list[Shard] = []
        self._file: Any = None
        self._in_shard = 0
        self._all_ids = hashlib.sha256()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, ids: np.ndarray) -> None:
        """Write ids (an integer array [n]). Raises DataError for an id outside the vocabulary."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise DataError(f"data: token ids must lie in 0 .. {self._vocab_size - 1}; the tokenizer gave {wrong}")
        update_digest(self._all_ids, ids)
        while len(ids):
            if self._file is None:
                name = f"{self._split}-{len(self._shards):05d}.bin"
                self._file, self._hasher, self._in_shard = open(self._directory / name, "wb"), hashlib.sha256(), 0
            head, ids = np.split(ids, [self._tokens_per_shard - self._in_shard])
            content = head.astype(self._dtype).tobytes()
            self._file.write(content)
            self._hasher.update(content)
            self._in_shard += len(head)
            if self._in_shard == self._tokens_per_shard:
                self._finish_shard()

    def finish(self, characters: int, utf8_bytes: int) -> Split:
        """Close the last shard and describe the split. Raises DataError if no id was written."""
        if self._file is not None:
            self._finish_shard()
        if not self._shards:
            raise DataError(f"data: split '{self._split}' must have at least one token; it has none; give more text")
        total = sum(shard.tokens for shard in self._shards)
        return Split(total, characters, utf8_bytes, self._all_ids.hexdigest(), tuple(self._shards))

    def _finish_shard(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = Path(self._file.name).name
        self._shards.append(Shard(name, self._in_shard, self._hasher.hexdigest()))
        self._file = None
