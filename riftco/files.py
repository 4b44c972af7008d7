"""Files and directories that appear whole or not at all, and files of one JSON object a line.

What is written is made aside, flushed to the disk, renamed into place, and the rename made durable; whatever fails on
the way leaves the place as it was and nothing beside it. Errors name the place, not the temporary file. A process that
is killed cannot clean up: what it left is removed by the next one that writes to the same place.
"""

import contextlib
import errno
import glob
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

try:
    import fcntl
except ImportError:  # no locks: what the killed leave then stays
    fcntl = None

_SECONDS_TO_LOCK = 60  # so old is something made aside before it can be taken for left over


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file in one step: a reader finds the old content or the new, also after a power cut.

    Args:
        path: the file; its directory must exist.
        content: all of it; text is written as UTF-8, its line ends as they are.

    Raises:
        OSError: it cannot be written; the error's filename is `path`.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(aside, "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        _flush(target.parent)
    except OSError as error:
        raise _about(target, error) from error


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[BinaryIO]:
    """A fresh binary file beside `path` that takes its place when the block ends without an error.

    Args:
        path: the file; its directory is made if need be.
        replace: take the place of a file that is there.

    Yields:
        The file to fill; it can be read and written anywhere.

    Raises:
        FileExistsError: there is something at `path`, and not `replace`.
        OSError: it cannot be written; the error's filename is `path`.
    """
    target = Path(os.path.abspath(path))
    if os.path.lexists(target) and not replace:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(target)
        try:
            with open(aside, "x+b") as file, _locked(aside):
                yield file
                file.flush()
                os.fsync(file.fileno())
            _publish(aside, target, replace)
        finally:
            aside.unlink(missing_ok=True)
        _flush(target.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise _about(target, error) from error


@contextlib.contextmanager
def new_directory(destination: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """A fresh directory beside `destination` that takes its place when the block ends without an error.

    Args:
        destination: absent or an empty directory, unless `replace`.
        replace: set a directory that is there aside, and remove it once the new one has its place. Whether it is one
            that may be removed is for the caller to have found out.

    Yields:
        The directory to fill.

    Raises:
        OSError: the block raised one, or the directory cannot take its place; the error's filename is `destination`,
            which is then as it was.
    """
    target = Path(os.path.abspath(destination))
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    fresh, old = aside / "new", aside / "old"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(target)
        fresh.mkdir(parents=True)
        with _locked(aside):
            yield fresh
        for path in sorted(fresh.rglob("*")):
            _flush(path)
        _flush(fresh)
        if target.is_dir():
            # Without `replace` only an empty directory goes, so nothing that appeared meanwhile is lost.
            os.rename(target, old) if replace else target.rmdir()
        os.rename(fresh, target)
        _flush(target.parent)
    except OSError as error:
        raise _about(target, error) from error
    finally:
        if old.exists() and not target.exists():  # stopped between the two renames
            os.rename(old, target)
        shutil.rmtree(aside, ignore_errors=True)


def read_small(path: str | os.PathLike[str], most: int = 1 << 28) -> bytes:
    """The content of a file that comes with a model: a real file, of bounded size.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        ValueError: it is a device or a pipe, or too large. OSError: it cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError("a plain file is required; it is not one")
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"at most {most} bytes are read; it has more")
    return data


class Line(NamedTuple):
    """One line of a JSON-lines file."""

    number: int
    """From 1."""
    record: dict[str, Any] | None
    """What it holds; None where that is no JSON object."""
    is_whole: bool
    """Whether it has its end: the last line of a file that is being written, or was, may not."""


def json_lines(path: str | os.PathLike[str]) -> list[Line]:
    """Every line of a file that holds one JSON object a line, blank ones left out; [] where there is no file."""
    path = Path(path)
    if not path.is_file():
        return []
    # Not splitlines(): a JSON string may hold U+2028 and its like as they are.
    texts = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    return [Line(number, _object(text), number < len(texts)) for number, text in enumerate(texts, 1) if text.strip()]


@contextlib.contextmanager
def _locked(aside: Path) -> Iterator[None]:
    """While the block runs, others can see that what is made aside has a living owner."""
    if fcntl is None:
        yield
        return
    handle = os.open(aside, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove_left_over(target: Path) -> None:
    """Remove what killed processes made aside for this place, and put back what they had set aside of it."""
    if fcntl is None:
        return
    for aside in target.parent.glob(f".{glob.escape(target.name)}.????????.tmp"):
        try:
            handle = os.open(aside, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(handle).st_mtime < _SECONDS_TO_LOCK:
                continue
            if (aside / "old").exists() and not target.exists():  # killed between the two renames
                os.rename(aside / "old", target)
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)
        except OSError:  # somebody's, or not ours to remove
            continue
        finally:
            os.close(handle)


def _publish(aside: Path, target: Path, replace: bool) -> None:
    if not replace:
        try:
            os.link(aside, target)  # unlike a rename, a link never takes the place of what appeared meanwhile
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if os.path.lexists(target):
                raise
    os.replace(aside, target)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or a directory's names; only POSIX can do the latter."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _about(path: Path, error: OSError) -> OSError:
    """The error with the place in it instead of a temporary name."""
    return OSError(error.errno or errno.EIO, error.strerror or str(error), str(path))
