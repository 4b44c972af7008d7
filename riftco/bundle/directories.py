"""Directories that appear whole or not at all: written beside their place, flushed to disk, renamed into it."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from riftco.bundle.manifest import MANIFEST
from riftco.errors import BundleError


@contextlib.contextmanager
def published(destination: Path, *, force: bool) -> Iterator[Path]:
    """A fresh directory beside `destination` that takes its place when the block ends without an error.

    An existing bundle is set aside by a rename, and restored if its replacement cannot take its place.

    Args:
        destination: must not exist, unless `force`.
        force: replace an existing bundle or an empty directory; anything else is never removed.

    Raises:
        BundleError: where the destination exists, or nothing can be written beside it.
    """
    destination = Path(os.path.abspath(destination))
    if os.path.lexists(destination):
        if not force:
            raise BundleError(f"bundle: {destination} must not exist; it does; choose another path or pass force=True")
        if not destination.is_dir() or (any(destination.iterdir()) and not (destination / MANIFEST).is_file()):
            raise BundleError(
                f"bundle: force replaces only a bundle; {destination} holds no {MANIFEST}; choose another path"
            )
    aside = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}")
    fresh, old = aside.with_name(aside.name + ".new"), aside.with_name(aside.name + ".old")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir()
        yield fresh
        _flush(fresh)
        if force and destination.is_dir():
            os.rename(destination, old)
        # A rename onto a directory with content fails, so nothing that appeared meanwhile is lost.
        os.rename(fresh, destination)
        _flush_entry(destination.parent)
    except OSError as error:
        raise BundleError(f"bundle: {destination} cannot be written: {error.strerror or error}") from error
    finally:
        if old.exists() and not destination.exists():
            os.rename(old, destination)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(fresh, ignore_errors=True)


def _flush(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        _flush_entry(path)
    _flush_entry(directory)


def _flush_entry(path: Path) -> None:
    """Wait until the disk has a file, or a directory's names; only POSIX can do the latter."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
