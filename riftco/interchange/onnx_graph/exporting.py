"""Writing the graphs of a model, a tensor at a time."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from riftco.bundle.directories import published
from riftco.bundle.manifest import file_digest, pretty_json
from riftco.errors import BundleError, ConfigError, RiftcoError, UnsupportedError
from riftco.interchange.onnx_graph.sidecar import (
    DATA_FILE,
    DTYPES,
    GRAPHS,
    OPSETS,
    SIDECAR,
    Sidecar,
    checked_artifact,
)
from riftco.models import DecoderConfig, check_params, flatten
from riftco.models.names import named_spec
from riftco.models.rotary_tables import rope_tables

EXTERNAL_BYTES = 1_500_000_000
"""From this many bytes of tensors on they have a file of their own: one protobuf message ends at 2 GiB."""


def export(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    opset: int = 23,
    external_bytes: int = EXTERNAL_BYTES,
    force: bool = False,
) -> dict[str, str]:
    """Write a model as two ONNX graphs, with its tokenizer and its identity beside them.

    `prefill.onnx` runs a prompt and gives its keys and values; `decode.onnx` goes on from them. Both take a mask for
    padding on either side, any batch and any length within the context, and fail on ids outside the vocabulary, empty
    input, a mask that does not fit and rows longer than the context. Weights are float32; half-precision ones are
    widened exactly, and `load` narrows them again. The bytes depend on the model, the opset and `external_bytes` alone.

    Args:
        model: what `riftco.bundle.load`, `riftco.interchange.huggingface.load` or `load` gave, or anything with their
            attributes `params`, `config`, `tokenizer`, `generation` and `chat_template`. A bundle's identity goes
            along (attribute `manifest`), so load it in its own dtype: `to_bundle` refuses weights that were cast.
        directory: where; it must not exist, unless `force`.
        opset: 23, with operators for attention, rotary embedding and RMSNorm; or 18, for older runtimes.
        external_bytes: with more bytes of tensors than this, both graphs share one file of them, `model.onnx_data`.
        force: replace a directory that `export` wrote.

    Returns:
        {file name: SHA-256} of the files beside `riftco_onnx.json`.

    Raises:
        ConfigError: for another opset.
        UnsupportedError: for weights in another dtype than float32, bfloat16 or float16.
        BundleError: where the destination exists or cannot be written, the params are not the configuration's plain
            weights (adapters and packed weights are refused, by name), a value is not finite, or the tokenizer has more
            ids than the model has rows.
    """
    if opset not in OPSETS:
        raise ConfigError(
            f"export: opset must be one of {', '.join(map(str, OPSETS))}; got {opset!r}; choose one of them"
        )
    # Late, since the library takes a second to import.
    from riftco.interchange.onnx_graph import layout

    config, tokenizer = model.config, model.tokenizer
    leaves = _plain_leaves(model.params, config)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise BundleError(
            f"export: the vocabulary must fit the model; the tokenizer has {tokenizer.vocab_size} ids, the model "
            f"{config.vocab_size} rows; export the tokenizer that the model was trained with"
        )
    manifest = getattr(model, "manifest", None)
    sidecar = Sidecar(
        opset,
        {},
        config,
        {name: str(leaf.dtype) for name, leaf in leaves.items()},
        None if tokenizer is None else tokenizer.fingerprint(),
        None if manifest is None else checked_artifact(manifest, "export"),
    )
    tensor = tensors_of(leaves, config)
    external = sum(4 * math.prod(shape) for shape in layout.weights_of(config).values()) > external_bytes
    with published(Path(directory), force=force, marker=SIDECAR, what="an export") as place:
        files = sidecar.files
        for kind, name in GRAPHS.items():
            parts = layout.graph_parts(config, kind, opset, external=external, metadata=sidecar.metadata)
            files[name] = _write(place / name, parts, tensor)
        if external:
            files[DATA_FILE] = _write(place / DATA_FILE, layout.data_parts(config), tensor)
        _write_text(place, model, config)
        for path in sorted(place.iterdir()):
            if path.name not in files:
                files[path.name] = file_digest(path)
        (place / SIDECAR).write_bytes(sidecar.to_bytes())
    return dict(files)


class Place(NamedTuple):
    """Where a tensor of the graph is in the params: a leaf and a layer, None for a leaf that no layer owns."""

    leaf: str
    layer: int | None


def places(config: DecoderConfig) -> dict[str, Place]:
    """{name in the graph: place in the params}; not the rotary tables, which follow from the configuration."""
    return {name: Place(leaf.name, layer) for name, (leaf, layer) in named_spec(config).items()}


def rotary(config: DecoderConfig) -> dict[str, np.ndarray]:
    """The tables of every position, float32 [C, K/2], by their name in the graph."""
    if config.position != "rope":
        return {}
    cos, sin = rope_tables(config, np.arange(config.context), np.float32)
    return {"rope.cos": np.asarray(cos), "rope.sin": np.asarray(sin)}


def tensors_of(leaves: dict[str, np.ndarray], config: DecoderConfig) -> Callable[[str], np.ndarray]:
    """A function that gives a tensor of the graph by name, float32 and row-major.

    Raises (the function):
        BundleError: for a value that is not finite.
    """
    where, tables = places(config), rotary(config)

    def tensor(name: str) -> np.ndarray:
        if name in tables:
            return np.ascontiguousarray(tables[name])
        leaf, layer = where[name]
        array = leaves[leaf] if layer is None else leaves[leaf][layer]
        if not np.isfinite(array).all():
            raise BundleError(f"export: every weight must be finite; {name} is not; export an earlier checkpoint")
        return np.ascontiguousarray(array, np.float32)

    return tensor


def _plain_leaves(params: Any, config: DecoderConfig) -> dict[str, np.ndarray]:
    try:
        check_params(params, config)
        leaves = {name: np.asarray(leaf) for name, leaf in flatten(params, config).items()}
    except RiftcoError as error:
        raise BundleError(
            f"export: a graph holds a model's plain weights and nothing else; {error}; merge adapters and dequantize "
            "packed weights first"
        ) from error
    for name, leaf in leaves.items():
        if str(leaf.dtype) not in DTYPES:
            raise UnsupportedError(
                f"export: weights must be one of {', '.join(DTYPES)}; {name} is {leaf.dtype}; cast it"
            )
    return leaves


def _write(path: Path, parts: Iterable[Any], tensor: Callable[[str], np.ndarray]) -> str:
    """Write the parts of a file; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for part in parts:
            data = part.data if part.data is not None else tensor(part.tensor).astype("<f4", copy=False).data
            file.write(data)
            digest.update(data)
    return digest.hexdigest()


def _write_text(place: Path, model: Any, config: DecoderConfig) -> None:
    """The files that a bundle has beside its weights, byte for byte as a bundle has them."""
    if model.tokenizer is not None:
        model.tokenizer.save(place)
        fields = model.tokenizer.tokenizer_config(model_max_length=config.context)
        (place / "tokenizer_config.json").write_bytes(pretty_json(fields))
    if model.generation:
        (place / "generation_config.json").write_bytes(pretty_json(dict(model.generation)))
    if model.chat_template is not None:
        (place / "chat_template.jinja").write_bytes(model.chat_template.encode())
