"""One door to a model, whoever wrote it: a bundle, a Hugging Face directory, a .gguf file, or our ONNX directory."""

import os
from pathlib import Path

import jax

from riftco.bundle.manifest import MANIFEST
from riftco.bundle.packed import QUANTIZATION
from riftco.errors import BundleError
from riftco.interchange import huggingface
from riftco.interchange.huggingface import STORED, Model, weight_dtype
from riftco.interchange.onnx_graph.sidecar import SIDECAR as ONNX_SIDECAR
from riftco.interchange.onnx_graph.sidecar import read_sidecar
from riftco.models import DecoderConfig
from riftco.types import PyTree

GGUF_FILE = "model.gguf"
"""The file of a directory that a conversion to GGUF writes."""


def load(path: str | os.PathLike[str], *, dtype: str | None = None) -> tuple[PyTree, DecoderConfig]:
    """The params and the configuration of a model.

    Args:
        path: a bundle, a Hugging Face directory, a run directory with a finished `final/`, a .gguf file, a directory
            with one such file, or one that `onnx_graph.export` wrote.
        dtype: of the params: "float32", "bfloat16", "float16", or "stored", that of the files. By default float32 on a
            CPU, which computes in it, and the files' own elsewhere.

    Returns:
        (params, config), for `riftco.models.forward` and everything else that takes them.

    Raises:
        BundleError: nothing is there, or a file is damaged; it is named.
        ConfigError, ShapeError: a configuration or tensors that no family here can hold; the key is named.
    """
    model = load_model(path, dtype=dtype, with_tokenizer=False)
    return model.params, model.config


def load_model(path: str | os.PathLike[str], *, dtype: str | None = None, with_tokenizer: bool = True) -> Model:
    """Everything that a path holds: params, config, tokenizer, generation settings, chat template.

    Args:
        path: as `load`.
        dtype: as `load`.
        with_tokenizer: also read the tokenizer, where there is one.

    Returns:
        The `Model`; its tokenizer is None where there is none, and carries the chat template.

    Raises:
        BundleError, ConfigError, ShapeError: as `load`. TokenizerError: for a tokenizer that is not supported.
    """
    place, kind = locate(path)
    wanted = weight_dtype(dtype)
    if kind == "gguf":
        from riftco.interchange import gguf

        return gguf.load(place, with_tokenizer=with_tokenizer, dtype=STORED if wanted is None else wanted)
    if kind == "bundle":
        from riftco import bundle

        found = bundle.load(place, dtype=wanted)
        return Model(found.params, found.config, found.tokenizer, found.generation, found.chat_template)
    if kind == "onnx":
        from riftco.interchange import onnx_graph

        model = onnx_graph.load(place, with_tokenizer=with_tokenizer)
        return (
            model if wanted is None else model._replace(params=jax.tree.map(lambda x: x.astype(wanted), model.params))
        )
    return huggingface.load(place, with_tokenizer=with_tokenizer, dtype=dtype)


def load_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """The configuration of a model, without its weights.

    Raises:
        BundleError, ConfigError: as `load`.
    """
    place, kind = locate(path)
    if kind == "gguf":
        from riftco.interchange import gguf

        return gguf.load_config(place)
    if kind == "onnx":
        return read_sidecar(place).config
    values = huggingface.read_values(place)
    if kind == "bundle":
        # Packed weights are a matter of the tensors; only bundles have them.
        values.pop(QUANTIZATION, None)
    return huggingface.read_config(place, values)


def locate(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """Where the model behind a path is, and its kind: "bundle", "huggingface", "gguf" or "onnx".

    Raises:
        BundleError: there is none; the message says what is there instead.
    """
    place = Path(path)
    if not place.exists():
        raise BundleError(f"model: {place} must exist; it does not; give a bundle, a model directory or a .gguf file")
    if place.is_file():
        if place.suffix.lower() == ".gguf":
            return place, "gguf"
        raise BundleError(f"model: {place} must be a directory or end in .gguf; got another file; give one of those")
    for candidate in (place, place / "final"):
        if (candidate / MANIFEST).is_file():
            return candidate, "bundle"
        if (candidate / "config.json").is_file():
            return candidate, "huggingface"
    if (place / ONNX_SIDECAR).is_file():
        return place, "onnx"
    if (place / "metrics.jsonl").is_file() or (place / "checkpoints").is_dir():
        raise BundleError(
            f"model: {place} is a run that has not finished, so it has no final/; finish it with riftco pretrain "
            "--resume auto"
        )
    files = sorted(place.glob("*.gguf"))
    if len(files) == 1:
        return files[0], "gguf"
    raise BundleError(
        f"model: {place} holds neither {MANIFEST}, config.json, final/, {ONNX_SIDECAR} nor one .gguf file; give a "
        "bundle, a model directory or a .gguf file"
    )
