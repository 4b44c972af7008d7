"""manifest.json: what a directory of token shards says about itself, as dataclasses and as JSON.

Format version 1. Numbers are plain integers, hashes lower-case hex SHA-256, file names relative to the directory.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np

from riftco.data.corpus import SourceFile
from riftco.errors import DataError

FILE_NAME = "manifest.json"
FORMAT = "riftco.token_shards"
VERSION = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_Record = TypeVar("_Record", bound=Any)


@dataclass(frozen=True)
class Shard:
    """One file of ids: its name, how many ids it holds, the SHA-256 of its bytes."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """One split: its ids in shards, and the text they stand for.

    Attributes:
        tokens: ids in all shards together.
        characters: of the text.
        utf8_bytes: of the text, so that loss per token gives bits per byte.
        token_sha256: SHA-256 of the ids as little-endian uint32, whatever the shards' dtype and sizes.
        shards: in order.
    """

    tokens: int
    characters: int
    utf8_bytes: int
    token_sha256: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """The whole description of a dataset.

    Attributes:
        dtype: `uint16` or `uint32`, little-endian, of every shard.
        vocab_size: ids are below it.
        tokenizer_fingerprint: of the tokenizer that made the ids.
        separator: what stood between two documents.
        validation_fraction: share of the characters split off from the end; 0 for an explicit pair or no validation.
        sources: the files that the text came from.
        splits: `train`, and `validation` where there is one.
    """

    dtype: str
    vocab_size: int
    tokenizer_fingerprint: str
    separator: str
    validation_fraction: float
    sources: tuple[SourceFile, ...]
    splits: dict[str, Split]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the ids are and who made them; the same data in other shards has the same fingerprint."""
        facts = [self.vocab_size, self.tokenizer_fingerprint]
        facts += [[name, split.tokens, split.token_sha256] for name, split in sorted(self.splits.items())]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"


def is_dataset(directory: Path) -> bool:
    """Whether the directory holds a manifest.json of token shards, sound or not."""
    path = directory / FILE_NAME
    return path.is_file() and FORMAT.encode() in path.read_bytes()


def read_manifest(directory: str | Path) -> Manifest:
    """Read and validate a directory's manifest.json. Raises DataError naming the file and the field at fault."""
    path = Path(directory) / FILE_NAME
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"data: a dataset directory holds {FILE_NAME}; '{directory}' does not; make one with `riftco data prepare`"
        ) from None
    except OSError as error:
        raise DataError(f"data: '{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise _fault(path, f"it is not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _fault(path, f"its format is not '{FORMAT}'")
    if content.get("version") != VERSION:
        raise _fault(path, f"its version is {content.get('version')!r} and this riftco reads {VERSION}")
    manifest = _parse(
        Manifest, {key: value for key, value in content.items() if key not in ("format", "version")}, path
    )
    _check(manifest, path)
    return manifest


def _parse(record: type[_Record], content: Any, path: Path, where: str = "") -> _Record:
    """`content` as a `record`, every field present, none unknown, each of its type."""
    if not isinstance(content, dict):
        raise _fault(path, f"'{where}' is not an object")
    hints = get_type_hints(record)
    if content.keys() != hints.keys():
        names = ", ".join(sorted(f"{where}{name}" for name in content.keys() ^ hints.keys()))
        raise _fault(path, f"fields missing or unknown: {names}")
    values = {}
    for name, hint in hints.items():
        value, here = content[name], f"{where}{name}"
        if hint is int and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise _fault(path, f"'{here}' is not an integer of at least 0")
        if hint is float and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1):
            raise _fault(path, f"'{here}' is not a number of 0 or more and below 1")
        if hint is str and not isinstance(value, str):
            raise _fault(path, f"'{here}' is not a string")
        if name in ("sources", "shards"):
            element = SourceFile if name == "sources" else Shard
            if not isinstance(value, list):
                raise _fault(path, f"'{here}' is not a list")
            value = tuple(_parse(element, item, path, f"{here}.{index}.") for index, item in enumerate(value))
        if name == "splits":
            if not isinstance(value, dict):
                raise _fault(path, f"'{here}' is not an object")
            value = {split: _parse(Split, item, path, f"{here}.{split}.") for split, item in value.items()}
        values[name] = value
    return record(**values)


def _check(manifest: Manifest, path: Path) -> None:
    """What the fields must satisfy among themselves."""
    if manifest.dtype not in DTYPES:
        raise _fault(path, f"'dtype' is {manifest.dtype!r}; known: {', '.join(DTYPES)}")
    if "train" not in manifest.splits or not manifest.splits.keys() <= {"train", "validation"}:
        raise _fault(
            path, f"'splits' must be train and perhaps validation; it is {', '.join(manifest.splits) or 'empty'}"
        )
    for name, split in manifest.splits.items():
        if split.tokens < 1 or sum(shard.tokens for shard in split.shards) != split.tokens:
            raise _fault(path, f"the shards of '{name}' do not hold its {split.tokens} tokens")
        for shard in split.shards:
            if shard.file != Path(shard.file).name or shard.file in ("", ".", ".."):
                raise _fault(path, f"shard '{shard.file}' is not a plain file name")
            if shard.tokens < 1:
                raise _fault(path, f"shard '{shard.file}' holds no tokens")


def _fault(path: Path, found: str) -> DataError:
    return DataError(f"data: '{path}' must be a valid manifest; {found}; prepare the dataset again")
