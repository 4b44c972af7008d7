"""`riftco.json`: what a bundle consists of, and the identity that follows from it.

The artifact id is the SHA-256 of the canonical JSON (sorted keys, no spaces, UTF-8) of the manifest without the id.
Since the manifest pins the digest of every other file, the id stands for weights, configuration, tokenizer, stage and
lineage together. Digests prove consistency, not authorship: nothing is signed.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from riftco.errors import BundleError

FORMAT = "riftco-bundle"
FORMAT_VERSION = 1
MANIFEST = "riftco.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
MERGE_RECORD = "merge.json"  # what riftco merge measured; beside a bundle, and no part of it
_KEYS = ("format", "format_version", "stage", "files", "parent_artifact_id", "fingerprints", "artifact_id")
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


def pretty_json(value: Any) -> bytes:
    """The one spelling that bundle files use: sorted, indented by two, UTF-8, a newline at the end."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def strict_json(data: bytes, name: str) -> Any:
    """Parse JSON that has no duplicate keys and no NaN.

    Raises:
        BundleError: where it is not such JSON; `name` is in the message.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
        return dict(pairs)

    def refuse(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        return json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{name}: it must be JSON; {error}; the file is damaged") from error


def artifact_id(manifest: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the canonical JSON of a manifest without its `artifact_id`."""
    rest = {key: value for key, value in manifest.items() if key != "artifact_id"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def new_manifest(
    files: Mapping[str, str], *, stage: str, parent: str | None, fingerprints: Mapping[str, Any]
) -> dict[str, Any]:
    """A complete manifest over {file name: digest}.

    Raises:
        BundleError: for a blank stage, a parent that is no artifact id, or fingerprints that are not JSON.
    """
    if not isinstance(stage, str) or not stage.strip():
        raise BundleError(f"bundle: stage must be a word such as 'pretrain'; got {stage!r}")
    if parent is not None and not (isinstance(parent, str) and _HEX_DIGEST.fullmatch(parent)):
        raise BundleError(f"bundle: parent must be the artifact_id of a bundle (64 hex digits); got {parent!r}")
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "stage": stage,
        "files": dict(files),
        "parent_artifact_id": parent,
        "fingerprints": dict(fingerprints),
    }
    try:
        return {**manifest, "artifact_id": artifact_id(manifest)}
    except (TypeError, ValueError) as error:
        raise BundleError(f"bundle: fingerprints must be JSON values; {error}") from error


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a bundle, checked by itself: form, version, spelling, file names, identity.

    Raises:
        BundleError: where it is absent or not what `save` writes.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"{directory}: a bundle must contain {MANIFEST}; it does not; for a directory that another program wrote "
            "use riftco.interchange.huggingface.load"
        )
    data = path.read_bytes()
    manifest = strict_json(data, str(path))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{path}: format must be {FORMAT!r}; this file belongs to something else")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise BundleError(
            f"{path}: format_version must be {FORMAT_VERSION}; got {manifest.get('format_version')!r}; "
            "install a riftco that reads it"
        )
    if sorted(manifest) != sorted(_KEYS):
        raise BundleError(f"{path}: its keys must be {', '.join(_KEYS)}; got {', '.join(manifest)}; it is damaged")
    files = manifest["files"]
    if not isinstance(files, dict) or not all(_is_entry(name, digest) for name, digest in files.items()):
        raise BundleError(f"{path}: files must map plain file names to SHA-256 digests; it is damaged")
    # One byte string per manifest, so that one identity never has two forms.
    if data != pretty_json(manifest) or manifest["artifact_id"] != artifact_id(manifest):
        raise BundleError(f"{path}: artifact_id must be the digest of the rest; it is not; the file was changed")
    return manifest


def _is_entry(name: str, digest: Any) -> bool:
    plain = (
        name not in ("", ".", "..", MANIFEST) and not re.search(r"[/\\\x00]", name) and os.path.basename(name) == name
    )
    return plain and isinstance(digest, str) and _HEX_DIGEST.fullmatch(digest) is not None
