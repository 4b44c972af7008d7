"""Where a bundle may be written: nowhere that holds anything else."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from riftco.bundle.manifest import MANIFEST
from riftco.errors import BundleError
from riftco.files import new_directory


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
    try:
        with new_directory(destination, replace=force) as fresh:
            yield fresh
    except OSError as error:
        raise BundleError(f"{who}: {destination} cannot be written: {error.strerror}") from error
