"""GGUF files out of models, one tensor at a time; equal models give equal bytes."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from riftco.errors import BundleError, ConfigError, RiftcoError
from riftco.files import new_file
from riftco.interchange.gguf import identity
from riftco.interchange.gguf.architectures import NATIVE, ROPE_FREQS, Form, config_keys, form_of, rope_factors
from riftco.interchange.gguf.configurations import CONFIG
from riftco.interchange.gguf.container import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING
from riftco.interchange.gguf.tensor_types import BY_NAME, CHUNK, FILE_TYPES, FLOAT16_MAX, TensorType, quantize
from riftco.interchange.gguf.tensors import Rule, interleave, rules
from riftco.interchange.gguf.vocabulary import native_keys, refusal, to_keys
from riftco.models import DecoderConfig, check_params, flatten, parameter_count
from riftco.models.names import named_spec
from riftco.tokenizers import Tokenizer
from riftco.types import PyTree

VERSION = 3
_QUANTIZATION_VERSION = 2
_NUMBERS = {name: number for number, (name, _) in SCALARS.items()}
_LAYOUTS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Written(NamedTuple):
    """What `write` made."""

    path: Path
    """The file."""
    architecture: str
    """llama, qwen2, qwen3 or gpt2; or riftco, which only riftco reads."""
    reason: str | None
    """Why it is riftco; None for the others."""


def export(model: Any, path: str | os.PathLike[str], *, type: str = "f32", **options: Any) -> Written:
    """`write` for a whole model: its tokenizer, chat template and settings go along, and a bundle's identity.

    Args:
        model: a `riftco.bundle.Bundle`, or a `Model` that `load` or `huggingface.load` gave.
        path: the file.
        type: as `write`.
        **options: `name` and `force` of `write`.

    Returns:
        What was written.

    Raises:
        BundleError, ConfigError: as `write`.
    """
    parts = {
        "chat_template": model.chat_template,
        "generation": model.generation,
        "manifest": getattr(model, "manifest", None),
    }
    return write(path, model.params, model.config, model.tokenizer, type=type, **{**parts, **options})


def write(
    path: str | os.PathLike[str],
    params: PyTree,
    config: DecoderConfig,
    tokenizer: Tokenizer | None = None,
    *,
    type: str = "f32",
    chat_template: str | None = None,
    generation: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
    name: str = "riftco",
    force: bool = False,
) -> Written:
    """Write a model as one GGUF file, version 3.

    Matrices are stored as `type`; where a row does not hold whole blocks they are f16. Under q4_0 and q4_1 the head, or
    the embedding that it is tied to, is q8_0. Scales, biases and learned positions are always f32.

    Args:
        path: the file.
        params: plain floating weights, finite: float32, bfloat16 or float16.
        config: the decoder that they belong to.
        tokenizer: its tokenizer, or None.
        type: "f32", "f16", "bf16", "q8_0", "q4_0" or "q4_1".
        chat_template: the Jinja template of a chat model.
        generation: sampling defaults, as in a bundle.
        manifest: `Bundle.manifest` of the bundle that the model is from; its identity and lineage go along.
        name: `general.name`.
        force: replace an existing file.

    Returns:
        What was written: a configuration or a tokenizer that GGUF's architectures cannot express makes the file
        architecture riftco, lossless in f32 but of no use to other programs, and `reason` says why.

    Raises:
        BundleError: the file exists or cannot be written, the params are not the configuration's plain weights, a value
            is not finite or beyond the type's range, or the tokenizer has more ids than the model has rows.
        ConfigError: for an unknown type.
    """
    if type not in FILE_TYPES:
        raise ConfigError(f"gguf.write: type must be one of {', '.join(FILE_TYPES)}; got {type!r}")
    leaves = _host_leaves(params, config)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise BundleError(
            f"gguf.write: the vocabulary must fit the model; the tokenizer has {tokenizer.vocab_size} ids, the model "
            f"{config.vocab_size} rows; write the tokenizer that the model was trained with"
        )
    form = form_of(config)
    unnamed = None if tokenizer is None else refusal(tokenizer)
    form = Form(NATIVE, unnamed) if unnamed is not None and form.reason is None else form
    wanted = rules(config, form.architecture)
    kinds = [_kind(rule, type, config) for rule in wanted]
    tensors = [(rule.name, rule.shape, kind) for rule, kind in zip(wanted, kinds, strict=True)]
    factors = None if form.architecture == NATIVE else rope_factors(config)
    if factors is not None:
        tensors.append((ROPE_FREQS, factors.shape, BY_NAME["F32"]))
    metadata = _general(form.architecture, type, name, config) | config_keys(config, form.architecture)
    metadata[CONFIG] = json.dumps(config.to_dict(), sort_keys=True, separators=(",", ":"))
    metadata |= _tokenizer_keys(tokenizer, unnamed, config)
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    dtypes = {leaf: str(array.dtype) for leaf, array in leaves.items()}
    arrays = {
        parameter: leaves[leaf.name] if layer is None else leaves[leaf.name][layer]
        for parameter, (leaf, layer) in named_spec(config).items()
    }
    is_exact = all(
        kind.name in ("F32", _LAYOUTS[str(arrays[parameter].dtype)])
        for rule, kind in zip(wanted, kinds, strict=True)
        for parameter in rule.parameters
    )
    try:
        metadata |= identity.keys(FILE_TYPES[type], dtypes, is_exact, manifest, generation or {})
    except (TypeError, ValueError) as error:
        raise BundleError(f"gguf.write: generation and fingerprints must be JSON values; {error}") from error
    header, digest_at = _header(metadata, tensors)
    place = Path(path)
    try:
        with new_file(place, replace=force) as file:
            file.write(header)
            digest = _Digest(file)
            for rule, kind in zip(wanted, kinds, strict=True):
                digest.pad()
                _write_tensor(digest, rule, kind, arrays)
            if factors is not None:
                digest.pad()
                digest.write(factors.astype("<f4").tobytes())
            digest.pad()
            file.seek(digest_at)
            file.write(digest.hexdigest().encode())
    except FileExistsError as error:
        raise BundleError(
            f"gguf.write: {place} must not exist; it does; choose another path or pass force=True"
        ) from error
    except OSError as error:
        raise BundleError(f"gguf.write: {place} cannot be written: {error.strerror}") from error
    return Written(place, *form)


def _host_leaves(params: PyTree, config: DecoderConfig) -> dict[str, NDArray]:
    try:
        check_params(params, config)
    except RiftcoError as error:
        raise BundleError(
            f"gguf.write: a file holds a model's plain weights; {error}; merge adapters and dequantize packed "
            "weights first"
        ) from error
    leaves = {name: np.asarray(leaf) for name, leaf in flatten(params, config).items()}
    for name, leaf in leaves.items():
        if str(leaf.dtype) not in _LAYOUTS:
            raise BundleError(f"gguf.write: params must be {', '.join(_LAYOUTS)}; {name} is {leaf.dtype}; cast it")
    return leaves


def _kind(rule: Rule, type: str, config: DecoderConfig) -> TensorType:
    """How a tensor is stored."""
    if len(rule.shape) == 1 or rule.name in ("position_embd.weight", "position_embedding.weight"):
        return BY_NAME["F32"]
    head = ("output.weight", "language_model_head.weight")
    if config.tie_embeddings:
        head = ("token_embd.weight", "token_embedding.weight")
    kind = BY_NAME["Q8_0" if type in ("q4_0", "q4_1") and rule.name in head else type.upper()]
    return kind if rule.shape[-1] % kind.block == 0 else BY_NAME["F16"]


def _general(architecture: str, type: str, name: str, config: DecoderConfig) -> dict[str, Any]:
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.size_label": _size_label(parameter_count(config)),
        "general.file_type": FILE_TYPES[type],
        "general.quantization_version": _QUANTIZATION_VERSION,
    }


def _size_label(count: int) -> str:
    for limit, letter in ((10**9, "B"), (10**6, "M")):
        if count >= limit:
            return f"{count / limit:.3g}{letter}"
    return f"{count / 1000:.3g}K"


def _tokenizer_keys(tokenizer: Tokenizer | None, unnamed: str | None, config: DecoderConfig) -> dict[str, Any]:
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    return native_keys(tokenizer) if unnamed is not None else to_keys(tokenizer, config.vocab_size)  # type: ignore[arg-type]


def _header(
    metadata: Mapping[str, Any], tensors: Iterable[tuple[str, tuple[int, ...], TensorType]]
) -> tuple[bytes, int]:
    """The bytes before the data section, padded, and where the digest stands in them."""
    described = list(tensors)
    out = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(described), len(metadata)))
    digest_at = 0
    for key, value in metadata.items():
        out += _text(key) + _value(value)
        digest_at = len(out) - 64 if key == identity.DIGEST else digest_at
    offset = 0
    for name, shape, kind in described:
        out += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind.number, offset)
        offset += _padded(kind.byte_count(int(np.prod(shape, dtype=object))))
    return bytes(out.ljust(_padded(len(out)), b"\0")), digest_at


def _padded(count: int) -> int:
    return -(-count // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A value with its type before it: bool, int (uint32), float (float32), str, list of str, or a NumPy array."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    if isinstance(value, np.ndarray):
        number = _NUMBERS[value.dtype.name]
        return struct.pack("<IIQ", ARRAY, number, len(value)) + value.astype(SCALARS[number][1]).tobytes()
    name = {bool: "bool", int: "uint32", float: "float32"}[type(value)]
    return struct.pack("<I", _NUMBERS[name]) + np.array(value).astype(SCALARS[_NUMBERS[name]][1]).tobytes()


class _Digest:
    """The data section: a file that counts and hashes what goes into it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._count = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._count += len(data)

    def pad(self) -> None:
        self.write(bytes(_padded(self._count) - self._count))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _write_tensor(digest: _Digest, rule: Rule, kind: TensorType, arrays: Mapping[str, NDArray]) -> None:
    parts = [arrays[name] for name in rule.parameters]
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    flat = (interleave(array, rule.heads) if rule.heads else array).reshape(-1)
    limit = FLOAT16_MAX if kind.name not in ("F32", "BF16") else np.inf
    for at in range(0, flat.size, CHUNK):
        values = flat[at : at + CHUNK].astype(np.float32)
        if not np.isfinite(values).all():
            raise BundleError(
                f"gguf.write: every weight must be finite; {rule.name} has one that is not; nothing is written"
            )
        if np.abs(values).max() > limit:
            raise BundleError(
                f"gguf.write: {kind.name} holds values up to {limit}; {rule.name} has larger ones; write bf16 or f32"
            )
        digest.write(quantize(values, kind))
