"""The flags that several verbs share: the model's shape, the device; and the configuration that they mean."""

import dataclasses
from typing import Any, Literal

from riftco.cli.options import Common, UsageError, flag, flag_name
from riftco.errors import ConfigError

_MODEL = "model"

Dtype = Literal["float32", "bfloat16"]
Attention = Literal["plain", "blockwise", "pallas_tpu", "pallas_triton", "pallas_mosaic_gpu", "cudnn"]
"""What `riftco.train.config` and `riftco.ops.attend` offer; said again because help starts without jax."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions(Common):
    """Where jax runs."""

    device: Literal["auto", "cpu", "cuda", "tpu", "metal"] = flag(
        "auto", "what to run on; auto is the first of TPU, CUDA, Metal that is there, else the CPU", group="common"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(Common):
    """The shape of a decoder. None is "as the preset says", or as follows from the others."""

    preset: str | None = flag(
        None, "a named shape that the other flags change: tiny, small, base, llama-tiny, gpt2, smollm2-135m, …",
        group=_MODEL, metavar="NAME", shown="tiny",
    )  # fmt: skip
    vocab_size: int | None = flag(None, "token ids", group=_MODEL, shown="the tokenizer's, or the preset's")
    max_seq_length: int | None = flag(
        None, "the context: how many tokens are seen at once", group=_MODEL, shown="the preset's"
    )
    layers: int | None = flag(None, "blocks", group=_MODEL, shown="the preset's")
    heads: int | None = flag(None, "query heads", group=_MODEL, shown="the preset's")
    kv_heads: int | None = flag(None, "key and value heads", group=_MODEL, shown="--heads, or the preset's")
    head_dim: int | None = flag(None, "the width of a head", group=_MODEL, shown="--width / --heads")
    width: int | None = flag(None, "the residual stream", group=_MODEL, shown="the preset's")
    hidden: int | None = flag(None, "the feed-forward width", group=_MODEL, shown="4 · width, or the preset's")
    norm: Literal["layer", "rms"] | None = flag(
        None, "the normalization; rms without --preset is also --mlp swiglu --position rope", group=_MODEL,
        shown="layer",
    )  # fmt: skip
    norm_eps: float | None = flag(None, "added inside its root", group=_MODEL, shown="1e-05")
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] | None = flag(
        None, "the feed-forward's activation", group=_MODEL, shown="gelu_tanh"
    )
    position: Literal["learned", "rope"] | None = flag(None, "how positions enter", group=_MODEL, shown="learned")
    rope_theta: float | None = flag(None, "the base of RoPE's angles", group=_MODEL, shown="10000")
    bias: bool | None = flag(None, "biases on the linears of the blocks", group=_MODEL, shown="with layer norm")
    head_bias: bool | None = flag(None, "a bias on the language-model head", group=_MODEL, shown="no")
    qkv_bias: bool | None = flag(None, "biases on query, key and value", group=_MODEL, shown="as --bias")
    qk_norm: bool | None = flag(None, "RMSNorm over each head's query and key", group=_MODEL, shown="no")
    sliding_window: int | None = flag(
        None, "how many keys a query sees, its own included; none for all", group=_MODEL, shown="the preset's", none=0
    )
    tie_embeddings: bool | None = flag(None, "the head is the token embedding", group=_MODEL, shown="as the preset")
    dropout: float | None = flag(None, "the rate while training", group=_MODEL, shown="0")


def check_attention(config: Any, implementation: str | None) -> None:
    """Refuse an implementation that cannot run here. Raises UsageError."""
    from riftco.train import check_attention as check

    try:
        check(config, implementation)
    except NotImplementedError as error:
        raise UsageError(f"--attention {implementation} cannot be had here; {error}") from error


def decoder_config(options: ModelOptions, vocab_size: int | None = None) -> Any:
    """The `DecoderConfig` that the flags mean.

    Args:
        options: the flags.
        vocab_size: instead of --vocab-size and the preset's.

    Raises:
        ConfigError: a preset or a combination that does not exist, in the words of the flags.
    """
    from riftco.models.presets import PRESETS, preset

    name = options.preset or "tiny"
    given = {
        ("context" if field.name == "max_seq_length" else field.name): value
        for field in dataclasses.fields(ModelOptions)
        if field.metadata["group"] == _MODEL
        and field.name != "preset"
        and (value := getattr(options, field.name)) is not None
    }
    if given.get("sliding_window") == 0:
        given["sliding_window"] = None
    if vocab_size is not None:
        given["vocab_size"] = vocab_size
    base = PRESETS.get(name, {})
    if "width" in given and base.get("hidden") == 4 * base.get("width", 0):
        given.setdefault("hidden", 4 * given["width"])
    # The biases and activations that a preset leaves to the rest of the form follow a changed norm.
    if options.preset is None and given.get("norm") == "rms":
        given.setdefault("mlp", "swiglu")
        given.setdefault("position", "rope")
    if "heads" in given and base.get("kv_heads") == base.get("heads"):
        given.setdefault("kv_heads", given["heads"])
    try:
        return preset(name, **given)
    except ConfigError as error:
        raise ConfigError(_in_flags(str(error))) from error


def _in_flags(message: str) -> str:
    """`DecoderConfig: width must …` with the names that were typed."""
    message = message.removeprefix("DecoderConfig: ")
    for who in ("preset: the name", "preset: an override"):
        message = message.replace(who, "--preset") if message.startswith(who) else message
    first, _, rest = message.partition(" ")
    names = {"context": "max_seq_length"}
    known = {field.name for field in dataclasses.fields(ModelOptions)} | set(names)
    return f"{flag_name(names.get(first, first))} {rest}" if first in known else message
