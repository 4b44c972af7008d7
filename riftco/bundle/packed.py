"""The packed bundle: a bundle whose linear weights are stored in 4 bits, and which names the model that was packed.

The tensors are those of bitsandbytes (bitsandbytes.py), so transformers opens the directory where a published family
has a linear layer for each of ours. GPT-2's fused one has no place for weights packed apart; such a model is stored as
model_type "riftco". Codes lie in canonical order on disk and in the kernels' order where a kernel will read them.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco.bundle.bitsandbytes import from_bitsandbytes, to_bitsandbytes
from riftco.bundle.safetensors_writer import Ready
from riftco.bundle.weights import SHARD_BYTES
from riftco.bundle.writing import publish
from riftco.errors import BundleError, RiftcoError
from riftco.models.adapters import path_of, projections
from riftco.models.config import DecoderConfig
from riftco.models.families import FAMILIES, family_of, from_hf_config, published_names, to_hf_config
from riftco.models.names import layer_name, named_spec
from riftco.models.packed import check_packed, layer_of, stacked, weight_of, with_layout
from riftco.models.specification import spec, unflatten
from riftco.ops import NF4Array
from riftco.tree import named_leaves
from riftco.types import PyTree

QUANTIZATION = "quantization_config"
_STATE_KEYS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4")


def save_packed(
    directory: str | os.PathLike[str],
    params: PyTree,
    config: DecoderConfig,
    tokenizer: Any,
    *,
    base: str | None,
    stage: str = "quantize",
    fingerprints: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write packed params as they are: no byte of a packed weight changes.

    Args:
        directory: where; it must not exist, unless `force`.
        params: from `riftco.tune.quantize`.
        config: their configuration.
        tokenizer: see `save`.
        base: the artifact_id of the model that was packed, or its `weights_id`.
        stage: see `save`.
        fingerprints: see `save`.
        generation: see `save`.
        chat_template: see `save`.
        force: see `save`.
        shard_bytes: see `save`.

    Returns:
        The artifact_id.

    Raises:
        BundleError: where the params are not packed, or as `save`.
    """
    try:
        check_packed(params, config)
    except RiftcoError as error:
        raise BundleError(f"bundle: a packed bundle holds a model packed by riftco.tune.quantize; {error}") from error
    family = _family(config)
    tensors = _tensors(with_layout(params, config, "linear"), config, family)
    for name, array in tensors.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            raise BundleError(f"bundle: every number must be finite; {name} is not; save an earlier checkpoint")
    dtype, packed = str(params["token_embedding"]["weight"].dtype), weight_of(params, next(iter(projections(config))))
    about = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": packed.double_quant,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        # Named, or transformers would leave the head alone although it is packed.
        "llm_int8_skip_modules": ["lm_head"] if config.tie_embeddings else [],
    }
    return publish(
        Path(directory),
        Ready(tensors),
        lambda **ids: {**to_hf_config(config, family=family, dtype=dtype, **ids), QUANTIZATION: about},
        config,
        tokenizer,
        lineage={"stage": stage, "parent": base, "fingerprints": fingerprints or {}},
        generation=generation,
        chat_template=chat_template,
        force=force,
        shard_bytes=shard_bytes,
    )


def _family(config: DecoderConfig) -> str:
    family = family_of(config)
    return "riftco" if FAMILIES[family].layout == "gpt2" else family


def _tensors(params: PyTree, config: DecoderConfig, family: str) -> dict[str, np.ndarray]:
    """Every tensor of the file by name."""
    dtype, called = str(params["token_embedding"]["weight"].dtype), published_names(config, family)
    found: dict[str, np.ndarray] = {}
    weights = {".".join((*path_of(name), "weight")): weight_of(params, name) for name in projections(config)}
    plain = {name: np.asarray(leaf) for name, leaf in named_leaves(params) if name in spec(config)}
    for name, (leaf, layer) in named_spec(config).items():
        if leaf.name in weights:
            weight = weights[leaf.name]
            found |= to_bitsandbytes(weight if layer is None else layer_of(weight, layer), called[name], dtype)
        else:
            found[called[name]] = np.ascontiguousarray(plain[leaf.name] if layer is None else plain[leaf.name][layer])
    return found


def read_packed(
    values: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, dtype: Any = None
) -> tuple[PyTree, DecoderConfig]:
    """The packed params of a directory; no weight is decoded.

    Args:
        values: the content of config.json.
        tensors: the tensors of the directory.
        dtype: of the leaves that are not packed; None is that of the file.

    Raises:
        BundleError: for another kind of packing, or a tensor that is missing, additional or of another shape.
    """
    about = values[QUANTIZATION]
    kind = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    if not isinstance(about, dict) or any(about.get(key) != value for key, value in kind.items()):
        raise BundleError(f"config.json: {QUANTIZATION} must be bitsandbytes in 4 bits, nf4; got {about!r}")
    config = from_hf_config({key: value for key, value in values.items() if key != QUANTIZATION})
    family = values["model_type"]
    called, left = published_names(config, family), set(tensors)

    def plain(name: str) -> np.ndarray:
        full = called[name]
        if full not in tensors:
            raise BundleError(f"bundle: the tensor {full} must be there; it is not; copy the directory again")
        left.discard(full)
        array = tensors[full]
        return array if dtype is None else array.astype(jnp.dtype(dtype))

    def packed(name: str) -> NF4Array:
        keys = [called[name], *(f"{called[name]}.{key}" for key in _STATE_KEYS)]
        left.difference_update(keys)
        return from_bitsandbytes({key: tensors[key] for key in keys if key in tensors}, called[name])

    linear = {".".join((*path_of(name), "weight")) for name in projections(config)}
    leaves: dict[str, Any] = {}
    for name, leaf in spec(config).items():
        rows = [layer_name(name, i) for i in range(config.layers)] if leaf.per_layer else [name]
        if name in linear:
            parts = [packed(row) for row in rows]
            leaves[name] = stacked(parts) if leaf.per_layer else parts[0]
        else:
            arrays = [plain(row) for row in rows]
            leaves[name] = jnp.asarray(np.stack(arrays) if leaf.per_layer else arrays[0])
    if left:
        raise BundleError(f"bundle: only the configuration's tensors may be there; got {sorted(left)[0]}; remove it")
    params = unflatten(leaves)
    check_packed(params, config)
    return with_layout(params, config), config
