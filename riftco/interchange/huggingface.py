"""Hugging Face directories that another program wrote: `config.json`, safetensors, tokenizer files, chat template.

To write one, save a bundle (`riftco.bundle.save`): it is such a directory. Nothing in a directory is executed.
"""

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from riftco import bundle, tokenizers
from riftco.bundle.manifest import ADAPTER_CONFIG, strict_json
from riftco.bundle.weights import open_weights
from riftco.errors import BundleError, ConfigError
from riftco.models import DecoderConfig
from riftco.models.families import from_hf_config, params_from_published
from riftco.types import PyTree

DTYPES = ("float32", "bfloat16", "float16")
STORED = "stored"
"""The dtype that the files have."""
MAX_JSON = 1 << 24
"""The most bytes of a configuration."""


class Model(NamedTuple):
    """What a directory held: params, configuration, tokenizer, generation, chat template; None where absent."""

    params: PyTree
    config: DecoderConfig
    tokenizer: Any
    generation: dict[str, Any]
    chat_template: str | None


def load(directory: str | os.PathLike[str], *, with_tokenizer: bool = True, dtype: str | None = None) -> Model:
    """Read a Hugging Face directory of a supported family.

    The weights are read one leaf at a time: beside the params no more than one of their leaves is in memory. No digest
    is checked: there is none.

    Args:
        directory: contains `config.json` and `model.safetensors` or its shards.
        with_tokenizer: also read `tokenizer.json`, where there is one.
        dtype: of the params: "float32", "bfloat16", "float16", or "stored", that of the files. By default float32 on a
            CPU, which computes in it, and the files' own elsewhere.

    Returns:
        The `Model`; its tokenizer carries the chat template.

    Raises:
        BundleError: where a file is absent or damaged.
        ConfigError, ShapeError: where the configuration or the tensors are not ones that a family here can hold; the
            key or the tensor is named.
        TokenizerError: for a tokenizer that is not supported; the field is named.
    """
    place, wanted = Path(directory), weight_dtype(dtype)
    values = read_values(place)
    config = read_config(place, values)
    generation = _read_json(place / "generation_config.json") or {}
    # The tokenizer before the weights: what is refused is refused at once.
    tokenizer = None
    if with_tokenizer and (place / "tokenizer.json").is_file():
        tokenizer = tokenizers.load(place)
        if tokenizer.vocab_size > config.vocab_size:
            raise BundleError(
                f"{place / 'tokenizer.json'}: the vocabulary must fit the model's {config.vocab_size} rows; it has "
                f"{tokenizer.vocab_size} ids; the files are not of one model"
            )
    with open_weights(place) as tensors:
        params = params_from_published(tensors, config, values["model_type"], dtype=wanted)
    return Model(params, config, tokenizer, generation, tokenizers.read_chat_template(place))


def to_bundle(
    directory: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str = STORED,
    force: bool = False,
) -> str:
    """Write a bundle from a Hugging Face directory: the same model with an identity, at the stage "convert".

    Args:
        directory: as `load`.
        destination: where; it must not exist, unless `force`.
        dtype: of the weights; by default that of the files.
        force: replace an existing bundle.

    Returns:
        The artifact_id.

    Raises:
        BundleError, ConfigError, ShapeError, TokenizerError: as `load` and `riftco.bundle.save`.

    Warns:
        UserWarning: where there is no `tokenizer.json`; the bundle then takes and gives ids only.
    """
    model = load(directory, dtype=dtype)
    if model.tokenizer is None:
        other = sorted(path.name for path in Path(directory).glob("tokenizer.model"))
        found = f"it has {other[0]} alone, which is not supported" if other else "it has none"
        warnings.warn(
            f"{directory}: a tokenizer.json is needed for text; {found}; the model is converted without a tokenizer",
            stacklevel=2,
        )
    return bundle.save(
        destination,
        model.params,
        model.config,
        model.tokenizer,
        stage="convert",
        generation=model.generation,
        chat_template=model.chat_template,
        force=force,
    )


def read_values(place: Path) -> dict[str, Any]:
    """The content of a directory's `config.json`.

    Raises:
        BundleError: it is absent or not a JSON object of bounded size.
    """
    values = _read_json(place / "config.json")
    if values is None and (place / ADAPTER_CONFIG).is_file():
        raise BundleError(f"{place}: a whole model is required; this is an adapter; merge it first (riftco merge)")
    if values is None:
        raise BundleError(f"{place}: a model directory must contain config.json; it does not; check the path")
    return values


def weight_dtype(dtype: str | None) -> str | None:
    """What a `dtype` argument asks for: a name, or None for the dtype of the files.

    Raises:
        ConfigError: for another name.
    """
    if dtype is None:
        return "float32" if jax.default_backend() == "cpu" else None
    if dtype == STORED:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ConfigError(f"load: dtype must be one of {', '.join(DTYPES)} or {STORED}; got {dtype!r}")
    return name


def read_config(place: Path, values: dict[str, Any]) -> DecoderConfig:
    """The configuration that the content of a `config.json` describes; errors name the directory."""
    try:
        return from_hf_config(values)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_JSON:
        raise BundleError(
            f"{path}: it must have at most {MAX_JSON} bytes; it is longer; check that it is the right file"
        )
    values = strict_json(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise BundleError(f"{path}: it must be a JSON object; got {type(values).__name__}; the file is damaged")
    return values
