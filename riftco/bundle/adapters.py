"""The adapter bundle: a PEFT directory with an identity, which names the base that it belongs to.

`adapter_config.json` and `adapter_model.safetensors` are PEFT's (peft.py); `riftco.json` beside them has the digests,
the base's id as `parent_artifact_id`, and which projections are adapted. Directories without it are foreign: they load
and name no base.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco.bundle.directories import published
from riftco.bundle.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MANIFEST,
    file_digest,
    new_manifest,
    pretty_json,
    strict_json,
)
from riftco.bundle.peft import from_peft, to_peft
from riftco.bundle.reading import verify_files
from riftco.bundle.safetensors_reader import SafetensorsFile
from riftco.bundle.safetensors_writer import Ready, write_file
from riftco.errors import BundleError, RiftcoError
from riftco.models.adapters import Adapters
from riftco.models.config import DecoderConfig
from riftco.models.specification import flatten
from riftco.types import PyTree

_FACTS = "adapters"
MERGED = "merged_adapter"
"""The fingerprint by which a bundle says which adapter it was merged from."""


@dataclasses.dataclass(frozen=True)
class AdapterBundle:
    """Adapters as they were saved.

    Attributes:
        adapters: float32.
        settings: the content of `adapter_config.json`.
        manifest: the content of `riftco.json`, or None for a directory that PEFT wrote.
    """

    adapters: Adapters
    settings: dict[str, Any]
    manifest: dict[str, Any] | None

    @property
    def artifact_id(self) -> str | None:
        """The adapters' identity."""
        return None if self.manifest is None else self.manifest["artifact_id"]

    @property
    def base_id(self) -> str | None:
        """The identity of the base that they belong to."""
        return None if self.manifest is None else self.manifest["parent_artifact_id"]


def weights_id(params: PyTree, config: DecoderConfig) -> str:
    """An identity for a base that is no bundle: SHA-256 over its configuration and its weights as float32.

    Args:
        params: plain weights; float16 and bfloat16 ones have the id of the float32 weights that they are equal to.
        config: their configuration.
    """
    digest = hashlib.sha256(pretty_json(config.to_dict()))
    for name, leaf in flatten(params, config).items():
        digest.update(name.encode() + b"\0")
        digest.update(np.ascontiguousarray(np.asarray(leaf), np.float32).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def save_adapters(
    directory: str | os.PathLike[str],
    adapters: Adapters,
    config: DecoderConfig,
    *,
    base: str,
    base_path: str | None = None,
    stage: str = "finetune",
    fingerprints: Mapping[str, Any] | None = None,
    force: bool = False,
) -> str:
    """Write adapters as PEFT does, and whose they are.

    Args:
        directory: where; it must not exist, unless `force`.
        adapters: finite, not merged.
        config: the base's configuration.
        base: the base's artifact_id, or its `weights_id` where it is no bundle.
        base_path: where PEFT finds the base.
        stage: what made them.
        fingerprints: JSON values that identify the training run, its data, and how the base was packed.
        force: replace an existing adapter bundle.

    Returns:
        The artifact_id.

    Raises:
        BundleError: where the destination exists or cannot be written, a value is not finite, or `base` is no id.
        ShapeError, DTypeError: for adapters of another configuration.
    """
    settings, tensors = to_peft(adapters, config, base_path=base_path)
    for name, array in tensors.items():
        if not np.isfinite(array.astype(np.float32)).all():
            raise BundleError(f"adapter: every value must be finite; {name} is not; save an earlier checkpoint")
    if not isinstance(base, str):
        raise BundleError(f"adapter: base must be the artifact_id of the base (64 hex digits); got {base!r}")
    facts = {**(fingerprints or {}), _FACTS: {"targets": list(adapters.targets)}}
    new_manifest({}, stage=stage, parent=base, fingerprints=facts)
    with published(Path(directory), force=force, marker=ADAPTER_CONFIG, what="an adapter") as place:
        (place / ADAPTER_CONFIG).write_bytes(pretty_json(settings))
        write_file(place / ADAPTER_WEIGHTS, Ready(tensors), tensors, {"format": "pt"})
        files = {path.name: file_digest(path) for path in sorted(place.iterdir())}
        manifest = new_manifest(files, stage=stage, parent=base, fingerprints=facts)
        (place / MANIFEST).write_bytes(pretty_json(manifest))
    return manifest["artifact_id"]


def load_adapters(
    directory: str | os.PathLike[str], config: DecoderConfig, *, base: str | None = None
) -> AdapterBundle:
    """Load adapters that `save_adapters` or PEFT wrote.

    Args:
        directory: with `adapter_config.json` and `adapter_model.safetensors`.
        config: the base's configuration.
        base: the base's artifact_id or `weights_id`, which the adapters must name; None asks for none. Adapters that
            PEFT wrote name none and are taken.

    Returns:
        An `AdapterBundle`.

    Raises:
        BundleError: for another base, or a missing, damaged or unsupported file; it is named.
    """
    place = Path(directory)
    if not (place / ADAPTER_CONFIG).is_file():
        raise BundleError(f"adapter: {place} must hold {ADAPTER_CONFIG}; it does not; give the directory of an adapter")
    if not (place / ADAPTER_WEIGHTS).is_file():
        raise BundleError(
            f"adapter: {place} must hold {ADAPTER_WEIGHTS}; it does not; weights in .bin files are pickles, which run "
            "code when read: save them as safetensors"
        )
    manifest = verify_files(place) if (place / MANIFEST).is_file() else None
    if manifest is not None:
        check_base(manifest, base)
    settings = strict_json((place / ADAPTER_CONFIG).read_bytes(), str(place / ADAPTER_CONFIG))
    if not isinstance(settings, dict):
        raise BundleError(f"{place / ADAPTER_CONFIG}: it must be a JSON object; it is damaged")
    try:
        with SafetensorsFile(place / ADAPTER_WEIGHTS) as tensors:
            adapters = from_peft(settings, tensors, config, targets=_targets(manifest))
    except BundleError:
        raise
    except RiftcoError as error:
        raise BundleError(f"{place}: {error}") from error
    return AdapterBundle(jax.tree.map(jnp.asarray, adapters), settings, manifest)


def _targets(manifest: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    facts = {} if manifest is None else manifest["fingerprints"].get(_FACTS)
    targets = facts.get("targets") if isinstance(facts, dict) else None
    return tuple(targets) if isinstance(targets, list) else None


def check_base(
    manifest: Mapping[str, Any], base: str | None, base_fingerprints: Mapping[str, Any] | None = None
) -> None:
    """Refuse a base that adapters do not belong to, or that they were merged into already.

    Args:
        manifest: of the adapter bundle.
        base: the id of the base at hand; None asks for nothing.
        base_fingerprints: of the base's own manifest, where it has one.

    Raises:
        BundleError: for another base.
    """
    if base_fingerprints is not None and base_fingerprints.get(MERGED) == manifest["artifact_id"]:
        raise BundleError(
            "adapter: adapters are merged once; this base was made by merging these very adapters; use it as it is"
        )
    if base is not None and manifest["parent_artifact_id"] != base:
        raise BundleError(
            f"adapter: it belongs to the base {manifest['parent_artifact_id']}; this one is {base}; use the base that "
            "the adapter was made for"
        )
