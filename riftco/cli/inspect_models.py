"""What the files of a model or of adapters say about it, by format; no weight is read."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from riftco.cli import tokenizer as tokenizer_verb
from riftco.cli.console import Console

_LINEAGE = ("stage", "artifact_id", "parent_artifact_id")
_KINDS = {
    "bundle": "a bundle, every digest verified",
    "packed": "a packed bundle, every digest verified",
    "huggingface": "a Hugging Face directory",
    "gguf": "a GGUF file",
    "onnx": "an ONNX directory",
    "adapter": "adapters",
}


def show_container(place: Path, kind: str, console: Console) -> dict[str, Any]:
    """Print one table about the files of a model: whose they are, how the weights are stored, the tokenizer.

    Args:
        place: as `riftco.interchange.locate` gives it.
        kind: likewise.
        console: where it goes.

    Returns:
        The facts; `kind` is "packed" for a packed bundle.
    """
    from riftco import tokenizers

    facts = {"gguf": _gguf, "onnx": _onnx}.get(kind, _directory)(place)
    tokenizer, source = None, place if kind == "gguf" else place / "tokenizer.json"
    if source.is_file() and facts.pop("has_tokenizer", True):
        tokenizer = tokenizers.load(place)
        facts["tokenizer"] = tokenizer_verb.describe(tokenizer)
    facts["chat_template"] = None if tokenizer is None else tokenizer.chat_template
    _print(place, facts, console)
    return facts


def show_adapters(place: Path, console: Console) -> dict[str, Any]:
    """Print one table about an adapter directory, ours or PEFT's."""
    from riftco.bundle.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST, strict_json
    from riftco.bundle.reading import verify_files
    from riftco.bundle.safetensors_reader import SafetensorsFile

    manifest = verify_files(place) if (place / MANIFEST).is_file() else {}
    settings = strict_json((place / ADAPTER_CONFIG).read_bytes(), str(place / ADAPTER_CONFIG))
    with SafetensorsFile(place / ADAPTER_WEIGHTS) as tensors:
        weights, scalars = _stored(tensors)
    facts = {
        "kind": "adapter",
        "stage": manifest.get("stage"),
        "artifact_id": manifest.get("artifact_id"),
        "base_id": manifest.get("parent_artifact_id"),
        "base": settings.get("base_model_name_or_path"),
        "method": settings.get("peft_type"),
        "rank": settings.get("r"),
        "alpha": settings.get("lora_alpha"),
        "rslora": settings.get("use_rslora"),
        "targets": settings.get("target_modules"),
        "weights": weights,
        "parameters": scalars,
        "files": manifest.get("files"),
    }
    _print(place, facts, console)
    return {**facts, "path": place}


def _directory(place: Path) -> dict[str, Any]:
    """A bundle, packed or not, or another program's directory."""
    from riftco import bundle
    from riftco.bundle.packed import QUANTIZATION
    from riftco.bundle.weights import open_weights
    from riftco.interchange import huggingface

    is_bundle = (place / bundle.MANIFEST).is_file()
    manifest = bundle.verify(place) if is_bundle else {}
    packing = huggingface.read_values(place).get(QUANTIZATION)
    with open_weights(place) as tensors:
        weights, _ = _stored(tensors)
    facts = {"kind": "packed" if packing else "bundle" if is_bundle else "huggingface", "weights": weights}
    if packing:
        double = packing.get("bnb_4bit_use_double_quant")
        facts["packing"] = f"{packing.get('bnb_4bit_quant_type')}, maxima {'in 8 bits' if double else 'in float32'}"
    return {**facts, **{name: manifest.get(name) for name in (*_LINEAGE, "files")}}


def _gguf(place: Path) -> dict[str, Any]:
    from riftco.interchange import gguf

    header, lineage = gguf.read_header(place), gguf.read_lineage(place)
    origin = (None, None, None) if lineage is None else (lineage.stage, lineage.artifact_id, lineage.parent)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for info in header.tensors.values():
        counts[info.kind.name] += 1
        sizes[info.kind.name] += info.byte_count
    return {
        "kind": "gguf",
        "architecture": header.metadata.get("general.architecture"),
        "version": header.version,
        "name": header.metadata.get("general.name"),
        "weights": {name: {"tensors": counts[name], "bytes": sizes[name]} for name in counts},
        "exact": None if lineage is None else lineage.is_exact,
        **dict(zip(_LINEAGE, origin, strict=True)),
        "has_tokenizer": header.metadata.get("tokenizer.ggml.model", "none") != "none",
    }


def _onnx(place: Path) -> dict[str, Any]:
    from riftco.interchange.onnx_graph.sidecar import read_sidecar

    sidecar = read_sidecar(place)
    artifact = sidecar.artifact or {}
    return {
        "kind": "onnx",
        "opset": sidecar.opset,
        "weights_before": sorted(set(sidecar.dtypes.values())),
        "files": sidecar.files,
        **{name: artifact.get(name) for name in _LINEAGE},
    }


def _stored(tensors: Any) -> tuple[dict[str, dict[str, int]], int]:
    """How many tensors and bytes there are of each dtype, from the headers alone; and all scalars."""
    found: dict[str, dict[str, int]] = {}
    scalars = 0
    for name in tensors:
        size, dtype = math.prod(tensors.shape_of(name)), tensors.dtype_of(name)
        entry = found.setdefault(str(dtype), {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += size * dtype.itemsize
        scalars += size
    return found, scalars


def _print(place: Path, facts: dict[str, Any], console: Console) -> None:
    console.say(f"{place}: {_KINDS[facts['kind']]}")
    for name, value in facts.items():
        if value is None or name in ("kind", "files", "has_tokenizer"):
            continue
        if name == "tokenizer":
            value = "{type}, {vocab_size:,} ids".format(**value)
        elif name == "chat_template":
            value = f"{len(value):,} characters"
        elif name == "weights":
            value = "; ".join(f"{v['tensors']} {k}, {v['bytes']:,} bytes" for k, v in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        console.say(f"  {name:<20}{value}")
