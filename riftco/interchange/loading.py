"""One door to a model, whoever wrote it: a bundle, a Hugging Face directory, or a .gguf file."""

import os
from pathlib import Path

from riftco.bundle.manifest import MANIFEST
from riftco.errors import BundleError
from riftco.interchange import huggingface
from riftco.interchange.huggingface import STORED, Model, weight_dtype
from riftco.models import DecoderConfig
from riftco.types import PyTree


def load(path: str | os.PathLike[str], *, dtype: str | None = None) -> tuple[PyTree, DecoderConfig]:
    """The params and the configuration of a model.

    Args:
        path: a bundle, a Hugging Face directory, a run directory with a finished `final/`, or a .gguf file.
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
    return huggingface.load(place, with_tokenizer=with_tokenizer, dtype=dtype)


def locate(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """Where the model behind a path is, and its kind: "bundle", "huggingface" or "gguf".

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
    if (place / "metrics.jsonl").is_file() or (place / "checkpoints").is_dir():
        raise BundleError(
            f"model: {place} is a run that has not finished, so it has no final/; finish it with riftco pretrain "
            "--resume auto"
        )
    files = sorted(place.glob("*.gguf"))
    if len(files) == 1:
        return files[0], "gguf"
    raise BundleError(
        f"model: {place} holds neither {MANIFEST}, config.json, final/ nor one .gguf file; give a bundle, a model "
        "directory or a .gguf file"
    )
