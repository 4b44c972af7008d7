"""`riftco_onnx.json`: what an exported directory consists of, and which model it is.

It pins the digest of every file beside it and carries the configuration, the dtypes that the weights had before they
became float32, and the manifest of the bundle that was exported, whose `artifact_id` is the model's identity.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from riftco.bundle.manifest import new_manifest, pretty_json, strict_json
from riftco.errors import BundleError, RiftcoError
from riftco.models import DecoderConfig, spec

SIDECAR = "riftco_onnx.json"
FORMAT = "riftco-onnx"
FORMAT_VERSION = 1
GRAPH_VERSION = 1
"""Of the graphs that this code builds: another number, another graph for the same configuration."""
OPSETS = {18: 8, 23: 11}
"""Each opset with the version of the file format that came with it."""
GRAPHS = {"prefill": "prefill.onnx", "decode": "decode.onnx"}
DATA_FILE = "model.onnx_data"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
DTYPES = ("float32", "bfloat16", "float16")

_KEYS = ("format", "format_version", "graph_version", "opset", "files", "config", "dtypes", "tokenizer", "artifact")
_MOST_BYTES = 4 * 2**20
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


class Sidecar(NamedTuple):
    """The checked content.

    Attributes:
        opset: 18 or 23.
        files: {name: SHA-256} of every other file.
        config: the decoder.
        dtypes: {leaf of the params: dtype it had}.
        tokenizer: the fingerprint of the tokenizer, or None.
        artifact: the manifest of the exported bundle, or None for a model that had no identity.
    """

    opset: int
    files: dict[str, str]
    config: DecoderConfig
    dtypes: dict[str, str]
    tokenizer: str | None
    artifact: dict[str, Any] | None

    @property
    def is_external(self) -> bool:
        """Whether the tensors are in a file of their own."""
        return DATA_FILE in self.files

    @property
    def metadata(self) -> dict[str, str]:
        """What the graphs say about the identity."""
        return {"artifact_id": (self.artifact or {}).get("artifact_id", ""), "tokenizer": self.tokenizer or ""}

    def to_bytes(self) -> bytes:
        """The file."""
        values = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "graph_version": GRAPH_VERSION,
            **self._asdict(),
            "config": self.config.to_dict(),
        }
        return pretty_json(values)


def checked_artifact(manifest: Mapping[str, Any], who: str) -> dict[str, Any]:
    """A bundle's manifest that is consistent with its own identity.

    Raises:
        BundleError: where it is not; `who` is in the message.
    """
    try:
        files = dict(manifest["files"])
        again = new_manifest(
            files,
            stage=manifest["stage"],
            parent=manifest["parent_artifact_id"],
            fingerprints=manifest["fingerprints"],
        )
    except (BundleError, KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{who}: the artifact must be a bundle's manifest; it is not: {error}") from error
    if again != manifest:
        raise BundleError(f"{who}: artifact_id must be the digest of the manifest; it is not; the file was changed")
    return again


def read_sidecar(directory: Path) -> Sidecar:
    """The sidecar of an exported directory, checked by itself.

    Raises:
        BundleError: where it is absent, too large, or not what `export` writes.
    """
    path = directory / SIDECAR
    if not path.is_file():
        raise BundleError(
            f"{directory}: an exported directory must contain {SIDECAR}; it does not; only graphs that riftco wrote "
            "can be read"
        )
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise BundleError(f"{path}: it must have at most {_MOST_BYTES} bytes; it has more; export the model again")
    values = strict_json(data, str(path))
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise BundleError(f"{path}: format must be {FORMAT!r}; this file belongs to something else")
    for key, wanted in (("format_version", FORMAT_VERSION), ("graph_version", GRAPH_VERSION)):
        if type(values.get(key)) is not int or values[key] != wanted:
            raise BundleError(
                f"{path}: {key} must be {wanted}; got {values.get(key)!r}; install a riftco that reads it"
            )
    if unknown := sorted(set(values) ^ set(_KEYS)):
        raise BundleError(f"{path}: its keys must be {', '.join(_KEYS)}; {', '.join(unknown)} is unknown or missing")
    if type(values["opset"]) is not int or values["opset"] not in OPSETS:
        raise BundleError(f"{path}: opset must be one of {', '.join(map(str, OPSETS))}; got {values['opset']!r}")
    _check_files(path, values["files"])
    config = _read_config(path, values["config"])
    dtypes, tokenizer, artifact = values["dtypes"], values["tokenizer"], values["artifact"]
    if (
        not isinstance(dtypes, dict)
        or set(dtypes) != set(spec(config))
        or not all(name in tuple(DTYPES) for name in dtypes.values())
    ):
        raise BundleError(
            f"{path}: dtypes must give one of {', '.join(DTYPES)} for each leaf of the params; it does not"
        )
    if tokenizer is not None and not _is_digest(tokenizer):
        raise BundleError(f"{path}: tokenizer must be a fingerprint (64 hex digits) or null; got {tokenizer!r}")
    if (tokenizer is not None) != ("tokenizer.json" in values["files"]):
        raise BundleError(f"{path}: tokenizer and tokenizer.json must be there together; only one is")
    if artifact is not None:
        if not isinstance(artifact, dict):
            raise BundleError(f"{path}: artifact must be an object or null; got {type(artifact).__name__}")
        artifact = checked_artifact(artifact, str(path))
    sidecar = Sidecar(values["opset"], values["files"], config, dtypes, tokenizer, artifact)
    # One byte string for one content.
    if data != sidecar.to_bytes():
        raise BundleError(f"{path}: it must be spelled as riftco spells it; it is not; the file was changed")
    return sidecar


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _HEX_DIGEST.fullmatch(value) is not None


def _check_files(path: Path, files: Any) -> None:
    if not isinstance(files, dict) or not all(_is_digest(digest) for digest in files.values()):
        raise BundleError(f"{path}: files must map file names to SHA-256 digests; it is damaged")
    if unknown := sorted(set(files) - {*GRAPHS.values(), DATA_FILE, *TEXT_FILES}):
        raise BundleError(f"{path}: files must list only what riftco writes; got {', '.join(unknown)}; remove it")
    if missing := [name for name in GRAPHS.values() if name not in files]:
        raise BundleError(f"{path}: files must list {missing[0]}; it does not; the file is damaged")


def _read_config(path: Path, values: Any) -> DecoderConfig:
    if not isinstance(values, dict):
        raise BundleError(f"{path}: config must be a JSON object; got {type(values).__name__}")
    try:
        config = DecoderConfig.from_dict(values)
    except RiftcoError as error:
        raise BundleError(f"{path}: {error}") from error
    if json.dumps(config.to_dict(), sort_keys=True) != json.dumps(values, sort_keys=True):
        raise BundleError(
            f"{path}: config must give every field as it is resolved; it does not; export the model again"
        )
    return config
