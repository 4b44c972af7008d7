"""From any format to any other, with an identity: whatever comes in becomes a bundle first, and goes out of that.

So a foreign model has the same artifact_id whichever way it takes, and each format is read and written in one place.
The bundle in between lies beside the destination and is gone at the end. One model is in memory at a time.
"""

import gc
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from riftco import bundle, ops
from riftco.bundle.directories import keep_source, published
from riftco.bundle.manifest import MANIFEST, read_manifest
from riftco.bundle.packed import QUANTIZATION
from riftco.bundle.reading import Bundle
from riftco.bundle.weights import open_weights
from riftco.errors import BundleError, ConfigError
from riftco.interchange import huggingface, onnx_graph, verification
from riftco.interchange.huggingface import DTYPES, STORED
from riftco.interchange.loading import GGUF_FILE, load_config, load_model, locate
from riftco.interchange.onnx_graph.sidecar import OPSETS, read_sidecar
from riftco.interchange.verification import BOUNDS, Difference
from riftco.models import parameter_count
from riftco.models.adapters import HEAD, projections
from riftco.models.config import DecoderConfig
from riftco.models.families import refusal
from riftco.models.packed import is_packed, layer_of, replaced, weight_of
from riftco.ops import NF4Array
from riftco.types import PyTree

FORMATS = ("riftco", "hf", "gguf", "onnx")
VERIFIED_BELOW = 2_000_000_000
"""Models with fewer parameters are compared with their source unless that is turned off."""
_MARKERS = {"riftco": MANIFEST, "hf": MANIFEST, "gguf": GGUF_FILE, "onnx": onnx_graph.SIDECAR}


class Converted(NamedTuple):
    """What `convert` made."""

    path: Path
    """The directory."""
    source_kind: str
    """bundle, huggingface, gguf or onnx."""
    artifact_id: str
    """Of the bundle that was written, or that the other files were written from and name."""
    form: str
    """The model_type or architecture that others know it by; riftco where only riftco does."""
    reason: str | None
    """Why the form is riftco."""
    difference: Difference | None
    """Of the logits of source and result; None where they were not compared."""
    notes: tuple[str, ...]
    """What else there is to know: what was decoded, what was not compared and why."""


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str,
    dtype: str | None = None,
    type: str | None = None,
    opset: int | None = None,
    verify: bool | None = None,
    force: bool = False,
) -> Converted:
    """Write a model in another format; nothing is left behind by a conversion that fails.

    "riftco" and "hf" write a bundle, which is a Hugging Face directory with an identity; a bundle that is not cast is
    copied byte for byte. "gguf" writes `model.gguf`, "onnx" two graphs with the tokenizer's files. Equal arguments give
    equal bytes.

    Args:
        source: a bundle, plain or packed, a run directory with its `final/`, a Hugging Face directory, a .gguf file, a
            directory that holds one, or one that an earlier conversion to ONNX wrote.
        destination: a directory that does not exist or is empty, unless `force`.
        to: "riftco", "hf", "gguf" or "onnx".
        dtype: for riftco and hf: "float32", "bfloat16" or "float16"; by default what the weights have.
        type: for gguf: "f32" (the default), "f16", "bf16", "q8_0", "q4_0" or "q4_1".
        opset: for onnx: 23 (the default) or 18.
        verify: compare the logits of source and result; by default for fewer than 2·10⁹ parameters.
        force: replace what an earlier conversion wrote there; a directory of anything else is never replaced.

    Returns:
        A `Converted`.

    Raises:
        ConfigError: for an option that is wrong, or that the format does not have.
        BundleError: the source is missing or damaged, the destination is taken, or the result answers differently than
            rounding to its type explains.
        RiftcoError: what loading the source or writing the result refuses.

    Warns:
        UserWarning: the source has no tokenizer that can be read; the result takes and gives ids only.
    """
    _check_options(to, dtype, type, opset)
    place, kind = locate(source)
    target = Path(os.path.abspath(destination))
    keep_source("convert", target, place)
    is_empty = target.is_dir() and not any(target.iterdir())
    marker = next((name for name in _MARKERS.values() if (target / name).is_file()), _MARKERS[to])
    notes: list[str] = []
    with published(target, force=force or is_empty, marker=marker, what="the result of a convert") as fresh:
        fresh.rmdir()  # the writers make it themselves
        config = load_config(place)
        is_compared = parameter_count(config) < VERIFIED_BELOW if verify is None else verify
        expected = _logits(place) if is_compared else None
        middle, rounding = _as_bundle(place, kind, fresh, to, dtype, notes)
        artifact_id = read_manifest(middle)["artifact_id"]
        if kind != "huggingface" and not (middle / "tokenizer.json").is_file():  # huggingface.to_bundle says it itself
            warnings.warn(f"{source}: it has no tokenizer; the result takes and gives ids only", stacklevel=2)
        form, reason = _write(middle, fresh, to, type, opset)
        if middle not in (place, fresh):
            shutil.rmtree(middle)
        difference = None
        if expected is not None:
            bound = max(BOUNDS[name] for name in (rounding, type, "float32") if name is not None)
            difference = _compare(fresh, to, config, expected, bound, notes)
    return Converted(target, kind, artifact_id, form, reason, difference, tuple(notes))


def _check_options(to: str, dtype: str | None, type: str | None, opset: int | None) -> None:
    if to not in FORMATS:
        raise ConfigError(f"convert: to must be one of {', '.join(FORMATS)}; got {to!r}")
    owners = {"dtype": ("riftco", "hf"), "type": ("gguf",), "opset": ("onnx",)}
    for name, value in {"dtype": dtype, "type": type, "opset": opset}.items():
        if value is not None and to not in owners[name]:
            raise ConfigError(
                f"convert: {name} belongs to {' and '.join(owners[name])}; got {value!r} for {to}; leave it out"
            )
    from riftco.interchange.gguf.tensor_types import FILE_TYPES

    known = {"dtype": tuple(DTYPES), "type": tuple(FILE_TYPES), "opset": tuple(OPSETS)}
    for name, value in {"dtype": dtype, "type": type, "opset": opset}.items():
        if value is not None and value not in known[name]:
            raise ConfigError(f"convert: {name} must be one of {', '.join(map(str, known[name]))}; got {value!r}")


# ------------------------------------------------------------------------------------------------ into a bundle


def _as_bundle(
    place: Path, kind: str, fresh: Path, to: str, dtype: str | None, notes: list[str]
) -> tuple[Path, str | None]:
    """A bundle of the source, and the dtype that its weights were rounded to, if they were.

    It is the source itself where that will do, `fresh` where a bundle is what is wanted, else one beside it.
    """
    is_bundle_wanted = to in ("riftco", "hf")
    made = fresh if is_bundle_wanted else fresh.parent / "bundle"
    if kind != "bundle":
        _from_foreign(place, kind, made, dtype or STORED)
        return made, dtype
    if dtype is not None and not _has_dtype(place, dtype):
        return made, _recast(bundle.load(place), made, dtype, notes)
    if _is_packed(place) and not is_bundle_wanted:
        return made, _recast(bundle.load(place), made, None, notes)
    manifest = bundle.verify(place)
    if is_bundle_wanted:
        fresh.mkdir()
        for name in (*manifest["files"], MANIFEST):
            shutil.copyfile(place / name, fresh / name)
        bundle.verify(fresh)
        return fresh, None
    return place, None


def _from_foreign(place: Path, kind: str, made: Path, dtype: str) -> None:
    if kind == "huggingface":
        huggingface.to_bundle(place, made, dtype=dtype)
    elif kind == "gguf":
        from riftco.interchange import gguf

        gguf.to_bundle(place, made, dtype=dtype)
    elif read_sidecar(place).artifact is not None:
        onnx_graph.to_bundle(place, made, dtype=dtype)
    else:  # exported from something that had no identity
        model = onnx_graph.load(place)
        settings = {"generation": model.generation, "chat_template": model.chat_template, "stage": "convert"}
        cast = None if dtype == STORED else jnp.dtype(dtype)
        bundle.save(made, model.params, model.config, model.tokenizer, dtype=cast, **settings)


def _is_packed(place: Path) -> bool:
    return huggingface.read_values(place).get(QUANTIZATION) is not None


def _has_dtype(place: Path, dtype: str) -> bool:
    """Whether every tensor of a bundle has a dtype already."""
    with open_weights(place) as tensors:
        return {str(tensors.dtype_of(name)) for name in tensors} == {dtype}


def _recast(found: Bundle, made: Path, dtype: str | None, notes: list[str]) -> str:
    """Write a bundle anew: plain weights of a dtype, None for that of the embedding; gives the dtype."""
    name = dtype or str(found.params["token_embedding"]["weight"].dtype)
    params = found.params
    if is_packed(params):
        params = _decoded(params, found.config, jnp.dtype(name))
        notes.append(f"the packed weights were decoded to {name}; what is written is a plain model")
    bundle.save(
        made,
        params,
        found.config,
        found.tokenizer,
        stage="convert",
        parent=found.artifact_id,
        generation=found.generation,
        chat_template=found.chat_template,
        dtype=jnp.dtype(name),
    )
    return name


def _decoded(params: PyTree, config: DecoderConfig, dtype: Any) -> PyTree:
    """Plain params out of packed ones, a layer's matrix at a time."""
    for name in projections(config):
        weight = weight_of(params, name)
        if isinstance(weight, NF4Array):
            layers = [weight] if name == HEAD else [layer_of(weight, layer) for layer in range(config.layers)]
            arrays = [ops.dequantize_nf4(layer, dtype) for layer in layers]
            params = replaced(params, name, arrays[0] if name == HEAD else jnp.stack(arrays))
    return params


# ------------------------------------------------------------------------------------------------ out of a bundle


def _write(middle: Path, fresh: Path, to: str, type: str | None, opset: int | None) -> tuple[str, str | None]:
    """Write the result from its bundle; the form that others know it by, and why that is riftco where it is."""
    if to == "gguf":
        from riftco.interchange import gguf

        fresh.mkdir()
        written = gguf.export(bundle.load(middle), fresh / GGUF_FILE, type=type or "f32")
        return written.architecture, written.reason
    if to == "onnx":
        onnx_graph.export(bundle.load(middle), fresh, opset=opset or 23)
        return "onnx", None
    config = load_config(middle)
    form = huggingface.read_values(middle)["model_type"]
    return form, _why_native(config) if form == "riftco" else None


def _why_native(config: DecoderConfig) -> str:
    """Why no published family takes a configuration: the reason of the one that it is closest to."""
    return refusal(config, "gpt2" if config.position == "learned" else "llama") or "its tensors are packed apart"


# ------------------------------------------------------------------------------------------------ comparing


def _logits(place: Path) -> Any:
    model = load_model(place, dtype="float32", with_tokenizer=False)
    found = verification.logits(model.params, model.config)
    del model
    gc.collect()  # before another model is loaded
    return found


def _compare(
    fresh: Path, to: str, config: DecoderConfig, expected: Any, bound: float, notes: list[str]
) -> Difference | None:
    """How far the result is from its source, or a refusal."""
    found = verification.onnx_logits(fresh, config) if to == "onnx" else _logits(fresh)
    if found is None:
        notes.append("onnxruntime is not installed, so the graphs were not run; pip install onnxruntime")
        return None
    difference = verification.compare(expected, found)
    if not difference.relative <= bound:
        raise BundleError(
            f"convert: the logits must be those of the source up to a relative difference of {bound:g}; it is "
            f"{difference.relative:.2g} ({difference}); choose a finer type, or keep the result with --no-verify"
        )
    return difference
