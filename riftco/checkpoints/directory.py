"""The step directories on disk: which are complete, what they say, what is wrong with them, how they go."""

import json
import re

from etils import epath

from riftco.checkpoints.records import unseal
from riftco.errors import CheckpointError

_COMMIT_FILE = "commit_success.txt"
_DELETED = re.compile(r"\d+\.deleted")


def committed(directory: epath.Path) -> list[int]:
    """The steps whose saves finished, ascending; an unfinished save has another name until it is renamed."""
    try:
        return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_record(directory: epath.Path, step: int) -> dict:
    """The record of a step, its seal checked. Raises CheckpointError if it is absent or damaged."""
    try:
        return unseal(json.loads((directory / str(step) / "meta" / "metadata").read_text()))
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {step}: meta/metadata cannot be read: {error}") from error


def damage(directory: epath.Path, step: int) -> str | None:
    """Why a step cannot be used, as far as its small files tell; None if they are whole."""
    path = directory / str(step)
    # An old Orbax writes no commit files on a local disk, where the rename is the commit; a bucket has no rename.
    promised = is_remote(path) or any((path / item / _COMMIT_FILE).exists() for item in ("state", "meta"))
    if promised and not (path / _COMMIT_FILE).exists():
        return f"{_COMMIT_FILE} is missing"
    try:
        json.loads((path / "_CHECKPOINT_METADATA").read_text())
    except (OSError, ValueError) as error:
        return f"_CHECKPOINT_METADATA cannot be read: {error}"
    try:
        read_record(directory, step)
    except CheckpointError as error:
        return str(error)
    return None


def remove(directory: epath.Path, step: int) -> None:
    """Delete a step, and what an interrupted deletion has left; one process does this for all."""
    for leftover in directory.iterdir():
        if _DELETED.fullmatch(leftover.name):
            leftover.rmtree()
    path = directory / str(step)
    if not is_remote(path):
        # Renamed first: a kill half-way through a removal must not leave what looks like a damaged step.
        path = path.rename(path.with_name(f"{step}.deleted"))
    path.rmtree()


def is_remote(path: epath.Path) -> bool:
    """Whether a path names a bucket rather than a local file system."""
    return "://" in str(path)
