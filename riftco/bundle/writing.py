"""Saving a bundle."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from riftco.bundle.directories import published
from riftco.bundle.manifest import MANIFEST, file_digest, new_manifest, pretty_json
from riftco.bundle.safetensors_writer import Tensors
from riftco.bundle.weights import SHARD_BYTES, write_weights
from riftco.errors import BundleError, RiftcoError
from riftco.models import DecoderConfig, check_params, flatten, named, unflatten
from riftco.models.families import Published, to_hf_config
from riftco.types import PyTree

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(
    directory: str | os.PathLike[str],
    params: PyTree,
    config: DecoderConfig,
    tokenizer: Any,
    *,
    stage: str = "pretrain",
    parent: str | None = None,
    fingerprints: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    dtype: Any = None,
) -> str:
    """Write a bundle: a directory that transformers opens where a published family can express the configuration.

    The bytes depend on the arguments alone, and the directory appears whole or not at all.

    Args:
        directory: where; it must not exist, unless `force`.
        params: plain floating weights, finite, in whatever dtype they have.
        config: the decoder that they belong to.
        tokenizer: a `riftco.tokenizers` tokenizer, or None for a model over bare ids.
        stage: what made the weights, such as "pretrain" or "finetune".
        parent: the artifact_id of the bundle that this one was made from.
        fingerprints: JSON values that identify the training run and its data.
        generation: sampling defaults for `generation_config.json` (temperature, top_k, eos_token_id, …); token ids
            that it does not give come from the tokenizer.
        chat_template: the Jinja template of a chat model.
        force: replace an existing bundle.
        shard_bytes: the most bytes of tensors in one file; 5 GB, as elsewhere.
        dtype: cast the weights to this one as they are written, one tensor at a time.

    Returns:
        The artifact_id.

    Raises:
        BundleError: where the destination exists or cannot be written, the params are not the configuration's plain
            weights (adapters and packed weights are refused, by name), a value is not finite, or the tokenizer has
            more ids than the model has rows.
        DomainError: where a weight is too large for `dtype`; its tensor is named.
    """
    tensors = Published(_plain_arrays(params, config), config, dtype=dtype)
    dtypes = {str(tensors.dtype_of(name)) for name in tensors}
    stored = dtypes.pop() if len(dtypes) == 1 else "float32"
    return publish(
        Path(directory),
        tensors,
        lambda **ids: to_hf_config(config, dtype=stored, **ids),
        config,
        tokenizer,
        lineage={"stage": stage, "parent": parent, "fingerprints": fingerprints or {}},
        generation=generation,
        chat_template=chat_template,
        force=force,
        shard_bytes=shard_bytes,
    )


def publish(
    directory: Path,
    tensors: Tensors,
    describe: Callable[..., dict[str, Any]],
    config: DecoderConfig,
    tokenizer: Any,
    *,
    lineage: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    chat_template: str | None,
    force: bool,
    shard_bytes: int,
) -> str:
    """Write the files of a bundle, whatever its tensors are; the arguments of `save`.

    Args:
        directory: where.
        tensors: the weights, under the names that they have in the file.
        describe: from token ids to the content of config.json.
        config: the decoder.
        tokenizer: a tokenizer, or None.
        lineage: stage, parent and fingerprints.
        generation: see `save`.
        chat_template: see `save`.
        force: see `save`.
        shard_bytes: see `save`.

    Returns:
        The artifact_id.
    """
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise BundleError(
            f"bundle: the vocabulary must fit the model; the tokenizer has {tokenizer.vocab_size} ids, the model "
            f"{config.vocab_size} rows; save the tokenizer that the model was trained with"
        )
    settings = _generation_settings(generation, tokenizer)
    ids = {name: settings.get(name) for name in TOKEN_IDS}
    # Refuse bad lineage before a large write begins.
    new_manifest({}, **lineage)
    with published(directory, force=force) as place:
        (place / CONFIG).write_bytes(pretty_json(describe(**ids)))
        (place / GENERATION).write_bytes(pretty_json(settings))
        write_weights(place, tensors, shard_bytes)
        if tokenizer is not None:
            tokenizer.save(place)
            (place / TOKENIZER_CONFIG).write_bytes(
                pretty_json(tokenizer.tokenizer_config(model_max_length=config.context))
            )
        if chat_template is not None:
            (place / CHAT_TEMPLATE).write_bytes(chat_template.encode())
        files = {path.name: file_digest(path) for path in sorted(place.iterdir())}
        manifest = new_manifest(files, **lineage)
        (place / MANIFEST).write_bytes(pretty_json(manifest))
    return manifest["artifact_id"]


def _plain_arrays(params: PyTree, config: DecoderConfig) -> dict[str, np.ndarray]:
    """The params by per-layer name on the host, or a refusal that names the leaf."""
    try:
        check_params(params, config)
        host = {name: np.asarray(leaf) for name, leaf in flatten(params, config).items()}
    except RiftcoError as error:
        raise BundleError(
            f"bundle: a bundle holds a model's plain weights and nothing else; {error}; merge adapters and dequantize "
            "packed weights first"
        ) from error
    for name, array in host.items():
        if not np.isfinite(array).all():
            raise BundleError(f"bundle: every weight must be finite; {name} is not; save an earlier checkpoint")
    return named(unflatten(host), config)


def _generation_settings(generation: Mapping[str, Any] | None, tokenizer: Any) -> dict[str, Any]:
    settings = dict(generation or {})
    for name in TOKEN_IDS:
        known = getattr(tokenizer, name.replace("_token_id", "_id"), None)
        if name not in settings and known is not None:
            settings[name] = known
    try:
        pretty_json(settings)
    except (TypeError, ValueError) as error:
        raise BundleError(f"bundle: generation must be JSON values; {error}") from error
    return settings
