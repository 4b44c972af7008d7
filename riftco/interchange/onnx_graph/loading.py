"""Reading our own graphs back: what was exported, bit for bit, or a refusal that names the difference.

Nothing is parsed but the sidecar. The graphs follow from the configuration, so they are built again and compared with
the files byte for byte while the tensors between are read; an input of any size is refused before it takes memory.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from riftco import bundle
from riftco.bundle.directories import published
from riftco.bundle.manifest import file_digest, strict_json
from riftco.errors import BundleError, RiftcoError
from riftco.interchange import huggingface
from riftco.interchange.huggingface import STORED
from riftco.interchange.onnx_graph.exporting import places, rotary
from riftco.interchange.onnx_graph.sidecar import DATA_FILE, GRAPHS, TEXT_FILES, Sidecar, read_sidecar
from riftco.models import DecoderConfig, parameter_count, spec, unflatten
from riftco.types import PyTree

# No graph spends less on a layer's nodes; it keeps a false number of layers from filling memory with nodes.
_LEAST_BYTES_PER_LAYER = 1000
_MOST_TEXT_BYTES = 256 * 2**20
# Cosines of two machines' libraries may differ in the last place.
_TABLE_TOLERANCE = 1e-6


class Model(huggingface.Model):
    """What a directory held, as `riftco.interchange.huggingface.Model`; None where absent.

    Attributes:
        manifest: the `riftco.json` of the bundle that was exported: stage, lineage, artifact_id; or None. It belongs to
            this one model: a copy with other fields (`_replace`) has none.
    """

    manifest: dict[str, Any] | None = None


def load(directory: str | os.PathLike[str], *, with_tokenizer: bool = True) -> Model:
    """Read a directory that `export` wrote.

    Args:
        directory: contains `riftco_onnx.json` and what it lists.
        with_tokenizer: also build the tokenizer, where there is one.

    Returns:
        The `Model`: weights, in the dtypes they had before the export, and tokenizer are bit for bit what was exported.

    Raises:
        BundleError: where a file is absent, damaged, larger than its configuration allows, or not the one graph that
            riftco writes for the configuration; the file and the first difference are named.
    """
    place = Path(directory)
    sidecar = read_sidecar(place)
    params = _read_params(place, sidecar)
    for name in TEXT_FILES:
        if name in sidecar.files:
            _check_text(place / name, sidecar.files[name])
    try:
        tokenizer = _read_tokenizer(place, sidecar) if with_tokenizer else None
        generation = {}
        if "generation_config.json" in sidecar.files:
            path = place / "generation_config.json"
            generation = strict_json(path.read_bytes(), str(path))
            if not isinstance(generation, dict):
                raise BundleError(f"{path}: it must be a JSON object; got {type(generation).__name__}; it is damaged")
        template = None
        if "chat_template.jinja" in sidecar.files:
            template = (place / "chat_template.jinja").read_bytes().decode()
    except BundleError:
        raise
    except (RiftcoError, OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{place}: {error}") from error
    model = Model(params, sidecar.config, tokenizer, generation, template)
    model.manifest = sidecar.artifact
    return model


def to_bundle(
    directory: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str = STORED,
    force: bool = False,
) -> str:
    """Write the bundle that a directory was exported from, with its identity.

    Args:
        directory: what `export` wrote of a bundle.
        destination: where; it must not exist, unless `force`.
        dtype: of the weights; another than "stored" makes a new bundle, at the stage "convert", whose parent is the
            exported one.
        force: replace an existing bundle.

    Returns:
        The artifact_id, that of the exported bundle.

    Raises:
        BundleError: as `load`, where the export had no identity, or where what was read is not the model of that
            identity.
    """
    model = load(directory)
    if model.manifest is None:
        raise BundleError(f"{directory}: it must come from a bundle; it has no artifact_id; use load and bundle.save")
    lineage = {"stage": "convert", "parent": model.manifest["artifact_id"]}
    if dtype == STORED:
        names = {"stage": "stage", "parent": "parent_artifact_id", "fingerprints": "fingerprints"}
        lineage = {name: model.manifest[key] for name, key in names.items()}
    with published(Path(destination), force=force) as place:
        place.rmdir()
        found = bundle.save(
            place,
            model.params,
            model.config,
            model.tokenizer,
            generation=model.generation,
            chat_template=model.chat_template,
            dtype=None if dtype == STORED else jnp.dtype(dtype),
            **lineage,
        )
        if dtype == STORED and found != model.manifest["artifact_id"]:
            raise BundleError(
                f"{directory}: the model must be the one of its artifact_id; saved again it has another; the files "
                "were changed together, or the bundle was saved with shards of another size"
            )
    return found


def _read_params(place: Path, sidecar: Sidecar) -> PyTree:
    from riftco.interchange.onnx_graph import layout

    config = sidecar.config
    _check_least_size(place, sidecar)
    plans = {
        name: layout.graph_parts(config, kind, sidecar.opset, external=sidecar.is_external, metadata=sidecar.metadata)
        for kind, name in GRAPHS.items()
    }
    if sidecar.is_external:
        plans[DATA_FILE] = layout.data_parts(config)
    for name, parts in plans.items():
        _check_size(place / name, parts)
    leaves = {name: np.empty(leaf.shape, jnp.dtype(sidecar.dtypes[name])) for name, leaf in spec(config).items()}
    receive = _receiver(leaves, config)
    for name, parts in plans.items():
        _compare(place / name, parts, receive, sidecar.files[name])
    return unflatten({name: jax.block_until_ready(jnp.asarray(leaves.pop(name))) for name in spec(config)})


def _check_least_size(place: Path, sidecar: Sidecar) -> None:
    """Before anything is built from the configuration: the files must be large enough for it."""
    config = sidecar.config
    least = dict.fromkeys(GRAPHS.values(), config.layers * _LEAST_BYTES_PER_LAYER)
    for name in [DATA_FILE] if sidecar.is_external else list(least):
        least[name] = least.get(name, 0) + 4 * parameter_count(config)
    for name, size in least.items():
        path = place / name
        if not path.is_file():
            raise BundleError(f"{path}: it must be there; it is missing; copy the whole directory again")
        if path.stat().st_size < size:
            raise BundleError(
                f"{path}: the configuration needs at least {size} bytes; it has {path.stat().st_size}; the file is cut "
                "off or of another model"
            )


def _check_size(path: Path, parts: list[Any]) -> None:
    """Before anything as large as the configuration is held."""
    wanted, found = sum(part.size for part in parts), path.stat().st_size
    if found == wanted:
        return
    raise BundleError(
        f"{path}: what riftco writes for the configuration has {wanted} bytes; this file has {found} and differs first "
        f"in {_first_difference(path, parts)}; it was changed, or another program wrote it"
    )


def _first_difference(path: Path, parts: list[Any]) -> str:
    """Among what stands before the first tensor; the length of the graph may differ for any reason."""
    with open(path, "rb") as file:
        for part in parts:
            if part.data is None or (file.read(part.size) != part.data and not part.is_length):
                return part.what
    return "its end"


Receive = Callable[[Path, Any, np.ndarray], None]


def _receiver(leaves: dict[str, np.ndarray], config: DecoderConfig) -> Receive:
    """What takes a tensor: the first time it is stored, after that it must be the same."""
    where, tables = places(config), rotary(config)
    stored: set[str] = set()

    def receive(path: Path, part: Any, array: np.ndarray) -> None:
        if part.tensor in tables:
            if not np.allclose(array, tables[part.tensor], rtol=0, atol=_TABLE_TOLERANCE):
                raise BundleError(
                    f"{path}: {part.what} must follow from the configuration; it does not; it was changed"
                )
            return
        leaf, layer = where[part.tensor]
        own = leaves[leaf][() if layer is None else layer]
        if part.tensor not in stored:
            if not np.isfinite(array).all():
                raise BundleError(f"{path}: {part.what} must be finite; it is not; the file was changed")
            with np.errstate(over="ignore"):
                own[...] = array.astype(own.dtype)
            stored.add(part.tensor)
        if not np.array_equal(own.astype(np.float32).view(np.uint32), array.view(np.uint32)):
            raise BundleError(
                f"{path}: {part.what} must hold {own.dtype} values, the same in each file; it does not; the file was "
                "changed"
            )

    return receive


def _compare(path: Path, parts: list[Any], receive: Receive, digest: str) -> None:
    """Read a file beside what it must be; bytes that are not a tensor's must be equal."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for part in parts:
            if part.data is None:
                array = np.empty(part.shape, "<f4")
                _fill(file, path, array)
                found.update(array.data)
                receive(path, part, array)
                continue
            data = file.read(part.size)
            found.update(data)
            if data != part.data:
                raise BundleError(
                    f"{path}: {part.what} must be the one that riftco writes for the configuration; it is not; the "
                    "file was changed, or another program wrote it"
                )
        if file.read(1):
            raise BundleError(f"{path}: nothing may follow the graph; something does; the file was changed")
    if found.hexdigest() != digest:
        raise BundleError(f"{path}: its SHA-256 must be the one in the sidecar; it is not; the file was changed")


def _fill(file: BinaryIO, path: Path, array: np.ndarray) -> None:
    view = array.reshape(-1).view(np.uint8).data
    if file.readinto(view) != len(view):  # pyright: ignore[reportAttributeAccessIssue]
        raise BundleError(f"{path}: a tensor must have {len(view)} bytes; the file ends before; copy it again")


def _check_text(path: Path, digest: str) -> None:
    if not path.is_file():
        raise BundleError(f"{path}: it must be there; it is missing; copy the whole directory again")
    if path.stat().st_size > _MOST_TEXT_BYTES:
        raise BundleError(f"{path}: it must have at most {_MOST_TEXT_BYTES} bytes; it has {path.stat().st_size}")
    if file_digest(path) != digest:
        raise BundleError(f"{path}: its SHA-256 must be the one in the sidecar; it is not; the file was changed")


def _read_tokenizer(place: Path, sidecar: Sidecar) -> Any:
    if sidecar.tokenizer is None:
        return None
    from riftco import tokenizers

    tokenizer = tokenizers.load(place)
    if tokenizer.fingerprint() != sidecar.tokenizer:
        raise BundleError(f"{place / 'tokenizer.json'}: it must be the sidecar's tokenizer; it is another one")
    if tokenizer.vocab_size > sidecar.config.vocab_size:
        raise BundleError(
            f"{place / 'tokenizer.json'}: the vocabulary must fit the model's {sidecar.config.vocab_size} rows; it has "
            f"{tokenizer.vocab_size} ids; the files are not of one model"
        )
    return tokenizer
