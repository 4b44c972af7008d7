"""Hugging Face directories that another program wrote: `config.json`, safetensors, `tokenizer.json`.

To write one, save a bundle (`riftco.bundle.save`): it is such a directory.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from riftco.bundle.manifest import strict_json
from riftco.bundle.weights import open_weights
from riftco.errors import BundleError
from riftco.models import DecoderConfig, from_named
from riftco.models.families import from_hf_config, from_published
from riftco.types import PyTree


class Model(NamedTuple):
    """What a directory held: params, configuration, tokenizer, generation, chat template; None where absent."""

    params: PyTree
    config: DecoderConfig
    tokenizer: Any
    generation: dict[str, Any]
    chat_template: str | None


def load(directory: str | os.PathLike[str], *, with_tokenizer: bool = True) -> Model:
    """Read a Hugging Face directory of a supported family.

    Nothing in the directory is executed, and no digest is checked: there is none.

    Args:
        directory: contains `config.json` and `model.safetensors` or its shards.
        with_tokenizer: also read `tokenizer.json`, where there is one.

    Returns:
        The `Model`, with weights in the dtype of the files.

    Raises:
        BundleError: where a file is absent or damaged.
        ConfigError, ShapeError: where the configuration or the tensors are not ones that a family here can hold.
    """
    place = Path(directory)
    values = _read_json(place / "config.json")
    if values is None:
        raise BundleError(f"{place}: a model directory must contain config.json; it does not; check the path")
    config = from_hf_config(values)
    with open_weights(place) as tensors:
        params = from_named(from_published(tensors, config, values["model_type"]), config)
    tokenizer = None
    if with_tokenizer and (place / "tokenizer.json").is_file():
        from riftco import tokenizers

        tokenizer = tokenizers.load(place)
    generation = _read_json(place / "generation_config.json") or {}
    return Model(params, config, tokenizer, generation, _read_chat_template(place))


def _read_chat_template(place: Path) -> str | None:
    """`chat_template.jinja`, or where older directories keep it: a string, or a list of named ones, in the config."""
    file = place / "chat_template.jinja"
    if file.is_file():
        return file.read_bytes().decode()
    stored = (_read_json(place / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(stored, list):
        stored = {entry.get("name"): entry.get("template") for entry in stored}.get("default")
    return stored if isinstance(stored, str) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    values = strict_json(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise BundleError(f"{path}: it must be a JSON object; got {type(values).__name__}; the file is damaged")
    return values
