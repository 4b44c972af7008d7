"""Directories that appear whole or not at all: written aside, flushed to disk, renamed into place."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from riftco.errors import DataError


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_directory(destination: Path, *, force: bool, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    """A temporary directory beside `destination` that takes its place when the block ends without an error.

    Args:
        destination: absent, or an empty directory; anything else needs `force` and the consent of `may_replace`.
        force: replace what is there.
        may_replace: whether what is there is of the kind that may be replaced.

    Raises:
        DataError: the destination is taken, or its parent cannot be written. The destination is then as it was.
    """
    destination = Path(os.path.abspath(destination))
    is_taken = destination.exists() and not (destination.is_dir() and not any(destination.iterdir()))
    if is_taken and not force:
        raise DataError(f"data: the output directory must be new; '{destination}' exists; choose another or use force")
    if is_taken and not may_replace(destination):
        raise DataError(f"data: force replaces only a dataset; '{destination}' is none; choose another directory")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".tmp", dir=destination.parent))
    except OSError as error:
        raise DataError(f"data: cannot write beside '{destination}': {error.strerror or error}") from error
    try:
        written = aside / "new"
        written.mkdir()
        yield written
        _sync_directory(written)
        if destination.exists():
            os.rename(destination, aside / "old")
        os.rename(written, destination)
        _sync_directory(destination.parent)
    except OSError as error:
        raise DataError(f"data: cannot write '{destination}': {error.strerror or error}") from error
    finally:
        if (aside / "old").exists() and not destination.exists():  # stopped between the two renames
            os.rename(aside / "old", destination)
        shutil.rmtree(aside, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable, where the system can."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
