"""Where a bundle may be written: nowhere that holds anything else."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from riftco.bundle.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST, MERGE_RECORD
from riftco.errors import BundleError
from riftco.files import new_directory

# What directories of models and adapters hold, whoever wrote them, and the record of riftco merge.
_KNOWN = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *(ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md", MERGE_RECORD),
)


@contextlib.contextmanager
def published(destination: Path, *, force: bool, marker: str = MANIFEST, what: str = "a bundle") -> Iterator[Path]:
    """A fresh directory beside `destination` that takes its place when the block ends without an error.

    An existing bundle is set aside by a rename, and restored if its replacement cannot take its place.

    Args:
        destination: must not exist, unless `force`.
        force: replace an existing bundle or an empty directory; anything else is never removed.
        marker: the file by which a directory that may be replaced is known.
        what: is written, for messages.

    Raises:
        BundleError: where the destination exists, or nothing can be written beside it.
    """
    destination, who = Path(os.path.abspath(destination)), what.split()[-1]
    if os.path.lexists(destination):
        if not force:
            raise BundleError(f"{who}: {destination} must not exist; it does; choose another path or pass force=True")
        if not destination.is_dir() or (any(destination.iterdir()) and not (destination / marker).is_file()):
            raise BundleError(
                f"{who}: force replaces only {what}; {destination} holds no {marker}; choose another path"
            )
        if others := _others(destination, marker):
            raise BundleError(
                f"{who}: force replaces only {what}; {destination} holds {others[0]} besides; choose another path, or "
                "move it"
            )
    try:
        with new_directory(destination, replace=force) as fresh:
            yield fresh
    except OSError as error:
        raise BundleError(f"{who}: {destination} cannot be written: {error.strerror}") from error


def keep_source(who: str, target: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
    """Refuse a destination that would replace what it is made of.

    Args:
        who: for the message.
        target: what is to be written.
        source: what is read; a directory or a file.

    Raises:
        BundleError: the source is the target, or lies in it.
    """
    target, source = Path(os.path.realpath(target)), Path(os.path.realpath(source))
    if target == source or target in source.parents:
        raise BundleError(
            f"{who}: the result must not replace what it is made of; {target} holds it; choose another --out-dir"
        )


def _others(destination: Path, marker: str) -> list[str]:
    """What a directory holds that is not of the thing that its marker says it is."""
    own = {marker, MANIFEST, *_KNOWN}
    for name in (MANIFEST, marker):
        # A list that cannot be read vouches for nothing but what every bundle has.
        with contextlib.suppress(OSError, ValueError):
            listed = json.loads((destination / name).read_bytes())
            own |= set(listed["files"]) if isinstance(listed, dict) and isinstance(listed.get("files"), dict) else set()
    return sorted(path.name for path in destination.iterdir() if path.name not in own)
