"""Models and tokenizers out of GGUF files."""

import hashlib
import os
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from riftco.bundle import save
from riftco.errors import BundleError, ConfigError
from riftco.interchange.gguf import identity
from riftco.interchange.gguf.architectures import NATIVE, ROPE_FREQS
from riftco.interchange.gguf.configurations import architecture_of, read_config
from riftco.interchange.gguf.container import Header, read_header
from riftco.interchange.gguf.tensors import check_tensors, read_factors, read_leaves, rules
from riftco.interchange.gguf.vocabulary import PREFIX, from_keys
from riftco.interchange.huggingface import STORED, Model
from riftco.models import DecoderConfig, spec, unflatten
from riftco.tokenizers import Tokenizer

_DTYPES = ("float32", "bfloat16", "float16")
_BLOCK = 1 << 22
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
_TEMPLATE = "tokenizer.chat_template"


def load(path: str | os.PathLike[str], *, with_tokenizer: bool = True, dtype: str = "float32") -> Model:
    """Read a GGUF file of a supported architecture: llama, qwen2, qwen3, gpt2, or riftco's own.

    Weights are dequantised one stretch at a time, so that beside the params no more than a leaf is in memory. Nothing
    in the file is executed. The tensors of a file that riftco wrote are checked against their digest.

    Args:
        path: the file.
        with_tokenizer: also read the tokenizer, where there is one.
        dtype: of the params: "float32", "bfloat16", "float16", or "stored", what they had before riftco wrote the file
            (float32 for other files).

    Returns:
        The `Model`.

    Raises:
        BundleError: the file is not GGUF, is damaged, or contradicts itself; the field is named.
        ConfigError: a key says something that this decoder does not have; it is named.
        ShapeError: a tensor is missing, additional, or of another shape; it is named.
        TokenizerError: the tokenizer is one that is not supported; the key is named.
    """
    if dtype not in (*_DTYPES, STORED):
        raise ConfigError(f"gguf.load: dtype must be one of {', '.join(_DTYPES)} or {STORED}; got {dtype!r}")
    header = read_header(path)
    architecture = architecture_of(header)
    is_own = identity.is_own(header)
    with open(header.path, "rb") as file:
        config = _config(file, header)
        wanted = rules(config, architecture)
        factors = frozenset({ROPE_FREQS} & header.tensors.keys() if architecture != NATIVE else ())
        check_tensors(header, wanted, factors | _tied_head(header, config))
        if is_own and not identity.is_requantized(header):
            _check_digest(file, header)
        # The tokenizer before the weights: what is refused is refused at once.
        tokenizer = _tokenizer(header, config) if with_tokenizer else None
        leaves = read_leaves(file, header, config, wanted, _dtypes(header, config, dtype))
    # Copies are made behind one's back; without waiting, all leaves would be there twice.
    params = {name: jax.block_until_ready(jnp.asarray(leaves.pop(name))) for name in spec(config)}
    return Model(unflatten(params), config, tokenizer, _generation(header), _chat_template(header))


def load_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """The configuration of a GGUF file, without its weights.

    Raises:
        BundleError, ConfigError: as `load`.
    """
    header = read_header(path)
    with open(header.path, "rb") as file:
        return _config(file, header)


def load_tokenizer(path: str | os.PathLike[str]) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer and the chat template of a GGUF file, without its tensors; None for what it does not have.

    Raises:
        BundleError, TokenizerError: as `load`.
    """
    header = read_header(path)
    template, tokenizer = _chat_template(header), from_keys(header.metadata, str(header.path))
    return (None if tokenizer is None else tokenizer.with_chat_template(template)), template


def read_lineage(path: str | os.PathLike[str]) -> identity.Lineage | None:
    """Where the model of a file came from; None for files that riftco did not write.

    Raises:
        BundleError: as `load`.
    """
    return identity.lineage(read_header(path))


def to_bundle(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], *, dtype: str = STORED, force: bool = False
) -> str:
    """Write a bundle from a GGUF file.

    Where the file holds the weights of a bundle exactly, that bundle comes back, with the same artifact_id. Of other
    files a new one is made, at the stage "convert", whose parent is the bundle that the file names, if it names one.

    Args:
        path: the file.
        directory: where; it must not exist, unless `force`.
        dtype: of the weights; another than "stored" makes a new bundle.
        force: replace an existing bundle.

    Returns:
        The artifact_id.

    Raises:
        BundleError, ConfigError, ShapeError, TokenizerError: as `load` and `riftco.bundle.save`.
    """
    model, origin = load(path, dtype=dtype), read_lineage(path)
    settings: dict[str, Any] = {"stage": "convert", "parent": None}
    if origin is not None:
        settings = {"stage": "convert", "parent": origin.artifact_id}
        if dtype == STORED and origin.is_exact and origin.stage is not None:
            settings = {"stage": origin.stage, "parent": origin.parent, "fingerprints": origin.fingerprints}
    return save(
        directory,
        model.params,
        model.config,
        model.tokenizer,
        generation=model.generation,
        chat_template=model.chat_template,
        force=force,
        **settings,
    )


def _config(file: BinaryIO, header: Header) -> DecoderConfig:
    factors = None if architecture_of(header) == NATIVE else read_factors(file, header)
    return read_config(header, factors, is_tied=_is_tied(file, header))


def _is_tied(file: BinaryIO, header: Header) -> bool:
    """Whether the head is the embedding: no tensor of its own, or one with the same bytes."""
    head, embedding = header.tensors.get("output.weight"), header.tensors.get("token_embd.weight")
    if head is None or embedding is None:
        return True
    if (head.kind, head.shape) != (embedding.kind, embedding.shape):
        return False
    for at in range(0, head.byte_count, _BLOCK):
        count, blocks = min(_BLOCK, head.byte_count - at), []
        for info in (head, embedding):
            file.seek(info.offset + at)
            blocks.append(file.read(count))
        if blocks[0] != blocks[1]:
            return False
    return True


def _tied_head(header: Header, config: DecoderConfig) -> frozenset[str]:
    """A head that is stored although it is tied, as old gpt2 files have it."""
    return frozenset({"output.weight"} if config.tie_embeddings and not identity.is_own(header) else ())


def _check_digest(file: BinaryIO, header: Header) -> None:
    digest = hashlib.sha256()
    file.seek(header.data_start)
    while block := file.read(_BLOCK):
        digest.update(block)
    if header.metadata.get(identity.DIGEST) != digest.hexdigest():
        raise BundleError(
            f"{header.path}: the tensors must have the digest of {identity.DIGEST}; they have not: the file was "
            "truncated or changed; copy it again"
        )


def _dtypes(header: Header, config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Leaf name -> NumPy dtype."""
    stored = identity.mapping(header, "riftco.dtypes") if dtype == STORED else {}
    if any(name not in _DTYPES for name in stored.values()):
        raise BundleError(f"{header.path}: riftco.dtypes must name floating dtypes; got {stored}; it is damaged")
    return {name: jnp.dtype(stored.get(name, "float32" if dtype == STORED else dtype)) for name in spec(config)}


def _tokenizer(header: Header, config: DecoderConfig) -> Tokenizer | None:
    listed = header.metadata.get(f"{PREFIX}tokens")
    if isinstance(listed, list) and len(listed) != config.vocab_size:
        raise BundleError(
            f"{header.path}: {PREFIX}tokens must have one token a row of the embedding; got {len(listed)} for "
            f"{config.vocab_size} rows; the file is damaged"
        )
    tokenizer = from_keys(header.metadata, str(header.path))
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise BundleError(
            f"{header.path}: the vocabulary must fit the model's {config.vocab_size} rows; it has "
            f"{tokenizer.vocab_size} ids; the file is damaged"
        )
    return None if tokenizer is None else tokenizer.with_chat_template(_chat_template(header))


def _generation(header: Header) -> dict[str, Any]:
    """Sampling defaults and the ids that begin, end and fill up a text, in the words of generation_config.json."""
    if identity.is_own(header):
        return identity.mapping(header, "riftco.generation")
    metadata = header.metadata
    settings: dict[str, Any] = {}
    for role, names in (("bos", ("bos",)), ("eos", ("eos", "eot", "eom")), ("pad", ("padding",))):
        found = [metadata.get(f"{PREFIX}{name}_token_id") for name in names]
        ids = list(dict.fromkeys(id for id in found if isinstance(id, int)))
        if ids:
            settings[f"{role}_token_id"] = ids[0] if len(ids) == 1 else ids
    for key, name in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value):
            settings[name] = float(str(np.float32(value))) if isinstance(value, float) else value
    return settings


def _chat_template(header: Header) -> str | None:
    template = header.metadata.get(_TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise BundleError(f"{header.path}: {_TEMPLATE} must be text; got {template!r:.80}; the file is damaged")
    return template
