"""What post-training starts from and comes back to: a base with an identity, and the adapters that belong to it."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from riftco import bundle
from riftco.bundle.adapters import AdapterBundle
from riftco.bundle.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, file_digest, read_manifest
from riftco.errors import BundleError
from riftco.interchange import load_model
from riftco.interchange.huggingface import weight_dtype
from riftco.interchange.loading import locate
from riftco.models import DecoderConfig
from riftco.models.packed import is_packed, with_layout
from riftco.ops import NF4Array
from riftco.tree import named_leaves
from riftco.tune.quantization import quantize
from riftco.types import PyTree

PACKED = "quantization"
"""The fingerprint by which adapters say how their base was packed."""


@dataclasses.dataclass(frozen=True)
class Base:
    """A model, and who it is.

    Attributes:
        path: where it came from.
        params: its weights, plain or packed.
        config: its configuration.
        tokenizer: its tokenizer, or None; carries the chat template where there is one.
        generation: sampling defaults.
        chat_template: its own template, or None.
        identity: the artifact_id of a bundle, else the digest of configuration and weights.
        manifest: of a bundle, else None.
    """

    path: Path
    params: PyTree
    config: DecoderConfig
    tokenizer: Any
    generation: dict[str, Any]
    chat_template: str | None
    identity: str
    manifest: dict[str, Any] | None = None

    @property
    def is_packed(self) -> bool:
        """Whether its linear weights are in 4 bits."""
        return is_packed(self.params)

    @property
    def packed_from(self) -> str | None:
        """The identity of the model that was packed, for a base in 4 bits that says so."""
        return self.manifest["parent_artifact_id"] if self.manifest is not None and self.is_packed else None


def load_base(path: str | os.PathLike[str], *, dtype: str | None = None) -> Base:
    """A model from a bundle, a run directory, a Hugging Face directory or a .gguf file.

    Args:
        path: where.
        dtype: see `riftco.interchange.load`.

    Raises:
        BundleError, ConfigError, ShapeError, TokenizerError: as `riftco.interchange.load_model`.
    """
    place, kind = locate(path)
    if kind == "bundle":
        found = bundle.load(place, dtype=weight_dtype(dtype))
        about = (found.params, found.config, found.tokenizer, found.generation, found.chat_template)
        return Base(place, *about, found.artifact_id, found.manifest)
    model = load_model(place, dtype=dtype)
    identity = bundle.weights_id(model.params, model.config)
    return Base(place, model.params, model.config, model.tokenizer, model.generation, model.chat_template, identity)


def packed_digest(params: PyTree, config: DecoderConfig) -> str:
    """SHA-256 (hex) of all packed weights: codes, maxima and offsets in the canonical order."""
    digest = hashlib.sha256()
    leaves = jax.tree.leaves(with_layout(params, config, "linear"), is_leaf=lambda node: isinstance(node, NF4Array))
    for number, weight in enumerate(leaves):
        if isinstance(weight, NF4Array):
            for name, leaf in named_leaves(weight):
                digest.update(f"{number}.{name}\0".encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()


def find_adapter(path: str | os.PathLike[str]) -> Path:
    """The directory of the adapters behind a path: itself, or `final/` of a run.

    Raises:
        BundleError: there are none; the message says what is there instead.
    """
    place = Path(path)
    for candidate in (place, place / "final"):
        if (candidate / ADAPTER_CONFIG).is_file():
            return candidate
    if not place.exists():
        raise BundleError(f"adapter: {place} must exist; it does not; give a run directory, its final/, or a PEFT one")
    if any((candidate / bundle.MANIFEST).is_file() for candidate in (place, place / "final")):
        raise BundleError(
            f"adapter: {place} must hold adapters; it holds a whole model, which needs none; use it as the model"
        )
    if (place / "metrics.jsonl").is_file():
        raise BundleError(f"adapter: {place} is a run that has not finished; go on with riftco finetune --resume auto")
    raise BundleError(f"adapter: {place} must hold {ADAPTER_CONFIG}, or final/ with one; it holds neither; check it")


def load_adapter(path: str | os.PathLike[str], base: Base) -> AdapterBundle:
    """The adapters behind a path, refused where they belong to another base or were merged into this one.

    Raises:
        BundleError: as `find_adapter`, `riftco.bundle.load_adapters` and `riftco.bundle.check_base`.
    """
    place = find_adapter(path)
    known = {} if base.manifest is None else base.manifest["fingerprints"]
    # The refusals before the tensors, whose shapes would be a less clear one.
    if (place / bundle.MANIFEST).is_file():
        manifest = read_manifest(place)
        # Adapters of qlora name the plain base; the one in 4 bits that they were trained beside serves too.
        was_packed = PACKED in manifest["fingerprints"] and manifest["parent_artifact_id"] == base.packed_from
        bundle.check_base(manifest, base.packed_from if was_packed else base.identity, known)
    elif known.get(bundle.MERGED) == adapter_identity(place):
        raise BundleError(f"adapter: {place} was merged into this base already; adapters are merged once")
    return bundle.load_adapters(place, base.config)


def adapter_identity(place: Path) -> str:
    """The artifact_id of adapters, or the digest of their tensors where another program wrote them."""
    if (place / bundle.MANIFEST).is_file():
        return read_manifest(place)["artifact_id"]
    return file_digest(place / ADAPTER_WEIGHTS)


def trained_beside(base: Base, adapter: str | os.PathLike[str], found: AdapterBundle) -> PyTree:
    """The params that adapters were trained beside: for packed ones the base in 4 bits, else the base as it is.

    A run's own `base/` is taken where it is there; else the base is packed again, as it was.

    Args:
        base: plain or packed.
        adapter: the path that was given.
        found: what `load_adapter` made of it.

    Raises:
        BundleError: where packing does not give the same bits.
    """
    about = {} if found.manifest is None else found.manifest["fingerprints"].get(PACKED)
    if not about:
        return base.params
    kept = find_adapter(adapter).parent / "base"
    if base.is_packed:
        packed = base.params
    elif _was_packed_so(kept, about):
        packed = bundle.load(kept).params
    else:
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), base.params)
        packed = quantize(wide, base.config, block_size=about["block_size"], double_quant=about["double_quant"])
    if packed_digest(packed, base.config) != about["packed"]:
        raise BundleError(
            "adapter: the base in 4 bits must be the one it was trained beside; these bits are others; give the run "
            "directory, which has base/"
        )
    if base.is_packed:
        return packed
    as_base = lambda leaf, own: leaf if isinstance(leaf, NF4Array) else leaf.astype(own.dtype)
    return jax.tree.map(as_base, packed, base.params, is_leaf=lambda node: isinstance(node, NF4Array))


def _was_packed_so(place: Path, about: Mapping[str, Any]) -> bool:
    """Whether a directory is the packed base that adapters speak of, and not another model of that name."""
    return (place / bundle.MANIFEST).is_file() and read_manifest(place)["fingerprints"].get(PACKED) == about
