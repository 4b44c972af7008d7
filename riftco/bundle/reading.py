"""Loading a bundle, every digest verified first."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from riftco.bundle.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST, file_digest, read_manifest, strict_json
from riftco.bundle.packed import QUANTIZATION, read_packed, save_packed
from riftco.bundle.weights import open_weights
from riftco.bundle.writing import CHAT_TEMPLATE, CONFIG, GENERATION, save
from riftco.errors import BundleError, RiftcoError
from riftco.models import DecoderConfig
from riftco.models.families import from_hf_config, params_from_published
from riftco.models.packed import is_packed
from riftco.types import PyTree

_ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".npz")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A model as it was saved.

    Attributes:
        params: nested dicts of jax arrays, in the saved dtype; packed weights stay packed.
        config: the decoder.
        tokenizer: the tokenizer, or None where the bundle has none.
        manifest: the content of `riftco.json`: stage, files, lineage, artifact_id.
        generation: the content of `generation_config.json`.
        chat_template: the Jinja template, or None where the bundle has none.
    """

    params: PyTree
    config: DecoderConfig
    tokenizer: Any
    manifest: dict[str, Any]
    generation: dict[str, Any]
    chat_template: str | None = None

    @property
    def artifact_id(self) -> str:
        """The bundle's identity."""
        return self.manifest["artifact_id"]

    def save(self, directory: str | os.PathLike[str], **options: Any) -> str:
        """`riftco.bundle.save`, or `save_packed`, with this bundle's lineage and generation settings: equal bytes."""
        lineage = {
            "stage": self.manifest["stage"],
            "parent": self.manifest["parent_artifact_id"],
            "fingerprints": self.manifest["fingerprints"],
            "generation": self.generation,
            "chat_template": self.chat_template,
        }
        if is_packed(self.params):
            lineage["base"] = lineage.pop("parent")
            return save_packed(directory, self.params, self.config, self.tokenizer, **{**lineage, **options})
        return save(directory, self.params, self.config, self.tokenizer, **{**lineage, **options})


def verify(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Check every file of a bundle against its digest, without loading the model.

    Args:
        directory: the bundle.

    Returns:
        The manifest.

    Raises:
        BundleError: for a missing, damaged or additional file, by name.
    """
    place = Path(directory)
    if not place.is_dir():
        raise BundleError(f"bundle: {place} must be a directory; there is none; check the path")
    present = {path.name for path in place.iterdir()}
    if adapters := sorted(present.intersection(_ADAPTER_FILES)):
        raise BundleError(
            f"{place / adapters[0]}: a bundle holds merged weights; this is an adapter that is not merged; "
            "merge it first (riftco merge)"
        )
    return verify_files(place)


def verify_files(place: Path) -> dict[str, Any]:
    """The manifest of a directory whose files all have the digests that it lists.

    Raises:
        BundleError: for a missing, damaged or additional file, by name.
    """
    manifest = read_manifest(place)
    files, present = manifest["files"], {path.name for path in place.iterdir()}
    for name, digest in files.items():
        path = place / name
        if not path.is_file():
            raise BundleError(f"{path}: {MANIFEST} lists it; it is missing; copy the whole directory again")
        if file_digest(path) != digest:
            raise BundleError(
                f"{path}: its SHA-256 must be the one in {MANIFEST}; it is not: the file was truncated or changed; "
                "copy it again, or save the bundle anew"
            )
    if strangers := sorted(name for name in present - set(files) if name.endswith(_WEIGHT_SUFFIXES)):
        raise BundleError(f"{place / strangers[0]}: {MANIFEST} must list every weight file; not this one; remove it")
    return manifest


def load(directory: str | os.PathLike[str], *, dtype: Any = None) -> Bundle:
    """Load a bundle.

    Args:
        directory: what `save` wrote.
        dtype: cast the weights to this one while they are read.

    Returns:
        The `Bundle`; configuration, tokenizer and, without `dtype`, weights are bit for bit what was saved.

    Raises:
        BundleError: for a missing, damaged, additional or unsuitable file; the file is named.
    """
    place = Path(directory)
    manifest = verify(place)
    try:
        values = strict_json((place / CONFIG).read_bytes(), str(place / CONFIG))
        generation = strict_json((place / GENERATION).read_bytes(), str(place / GENERATION))
        with open_weights(place) as tensors:
            if isinstance(values, dict) and values.get(QUANTIZATION) is not None:
                params, config = read_packed(values, tensors, dtype=dtype)
            else:
                config = from_hf_config(values)
                params = params_from_published(tensors, config, dtype=dtype)
        tokenizer = _load_tokenizer(place, config) if "tokenizer.json" in manifest["files"] else None
        template = (place / CHAT_TEMPLATE).read_bytes().decode() if CHAT_TEMPLATE in manifest["files"] else None
    except BundleError:
        raise
    except (RiftcoError, OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{place}: {error}") from error
    return Bundle(params, config, tokenizer, manifest, generation, template)


def _load_tokenizer(place: Path, config: DecoderConfig) -> Any:
    from riftco import tokenizers

    tokenizer = tokenizers.load(place)
    if tokenizer.vocab_size > config.vocab_size:
        raise BundleError(
            f"{place / 'tokenizer.json'}: the vocabulary must fit the model's {config.vocab_size} rows; it has "
            f"{tokenizer.vocab_size} ids; the files are not of one model"
        )
    return tokenizer
