"""What riftco adds to its files: where the model came from, its settings, and a digest of the data section.

The digest proves that the tensors are the ones that were written. A file whose `general.file_type` is no longer the one
recorded was quantised anew by another program: it is a model of its own then, and the record only names its origin.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from riftco.bundle.manifest import strict_json
from riftco.errors import BundleError
from riftco.interchange.gguf.container import Header

PREFIX = "riftco."
DIGEST = "riftco.data_sha256"
FORMAT = "riftco.format_version"
FORMAT_VERSION = 1
_FILE_TYPE = "riftco.file_type"
_TEXTS = ("riftco.artifact_id", "riftco.stage", "riftco.parent_artifact_id")


class Lineage(NamedTuple):
    """What a file says about where its model came from."""

    artifact_id: str | None
    """Of the bundle that it was written from; None where there was none."""
    stage: str | None
    """What made those weights."""
    parent: str | None
    """The artifact_id of the bundle before that one."""
    fingerprints: dict[str, Any]
    """Of the training run and its data."""
    is_exact: bool
    """Whether the file holds those weights bit for bit, so that the same bundle can be written again."""


def keys(
    file_type: int,
    dtypes: Mapping[str, str],
    is_exact: bool,
    manifest: Mapping[str, Any] | None,
    generation: Mapping[str, Any],
) -> dict[str, Any]:
    """The keys of a file that is about to be written, with zeros in the place of the digest."""
    manifest = manifest or {}
    found = {
        "riftco.artifact_id": manifest.get("artifact_id"),
        "riftco.stage": manifest.get("stage"),
        "riftco.parent_artifact_id": manifest.get("parent_artifact_id"),
    }
    return {
        FORMAT: FORMAT_VERSION,
        _FILE_TYPE: file_type,
        "riftco.is_exact": is_exact,
        "riftco.dtypes": _compact(dtypes),
        "riftco.generation": _compact(generation),
        "riftco.fingerprints": _compact(manifest.get("fingerprints") or {}),
        **{key: value for key, value in found.items() if value is not None},
        DIGEST: "0" * 64,
    }


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def is_own(header: Header) -> bool:
    """Whether riftco wrote the file.

    Raises:
        BundleError: by a version of the format that is not read here.
    """
    version = header.metadata.get(FORMAT)
    if version is not None and version != FORMAT_VERSION:
        raise BundleError(f"{header.path}: {FORMAT} must be {FORMAT_VERSION}; got {version!r:.80}; update riftco")
    return version is not None


def is_requantized(header: Header) -> bool:
    """Whether another program stored the tensors anew."""
    return header.metadata.get("general.file_type") != header.metadata.get(_FILE_TYPE)


def lineage(header: Header) -> Lineage | None:
    """The lineage of a file that riftco wrote; None for others.

    Raises:
        BundleError: a key is damaged; it is named.
    """
    if not is_own(header):
        return None
    for key in _TEXTS:
        if not isinstance(header.metadata.get(key, ""), str):
            raise BundleError(f"{header.path}: {key} must be text; got {header.metadata[key]!r:.80}; it is damaged")
    is_exact = header.metadata.get("riftco.is_exact") is True and not is_requantized(header)
    artifact_id, stage, parent = (header.metadata.get(key) for key in _TEXTS)
    return Lineage(artifact_id, stage, parent, mapping(header, "riftco.fingerprints"), is_exact)


def mapping(header: Header, key: str) -> dict[str, Any]:
    """A key that holds a JSON object; {} where it is absent.

    Raises:
        BundleError: it is something else.
    """
    text = header.metadata.get(key, "{}")
    values = strict_json(text.encode() if isinstance(text, str) else b"", f"{header.path}: {key}")
    if not isinstance(values, dict):
        raise BundleError(f"{header.path}: {key} must be a JSON object; got {type(values).__name__}; it is damaged")
    return values
