"""Tensor names and orientations of the published families, both ways, checked to be one to one.

A rule maps one published tensor to one or several parameters: they are joined along the output axis (GPT-2's fused
query, key and value) and transposed where the family stores [in, out] (GPT-2's Conv1D).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from riftco.errors import ConfigError, ShapeError
from riftco.models.config import DecoderConfig
from riftco.models.families.table import FAMILIES, family_of, refusal
from riftco.models.names import named_spec
from riftco.tree import describe


@dataclasses.dataclass(frozen=True)
class Rule:
    """One published tensor: its name, the parameters it is made of, and whether it is stored [in, out]."""

    published: str
    parameters: tuple[str, ...]
    transposed: bool = False


_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.project": "mlp.c_proj",
}
# (prefix of the base model, block list, block table, the rest)
_LAYOUTS: dict[str, tuple[str, str, dict[str, str], dict[str, str]]] = {
    "llama": ("model.", "layers", _LLAMA_BLOCK, {"token_embedding": "embed_tokens", "final_norm": "norm"}),
    "gpt2": (
        "transformer.", "h", _GPT2_BLOCK, {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"},
    ),
}  # fmt: skip
_HEAD = "lm_head.weight"
# Buffers that older files carry beside the weights; they follow from the configuration.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def rules(config: DecoderConfig, family: str | None = None) -> list[Rule]:
    """The rules of a family for one configuration, in the order of `named`.

    Raises:
        ConfigError: where the family cannot express the configuration, or two parameters would share a name.
    """
    family = family_of(config) if family is None else family
    if reason := refusal(config, family):
        raise ConfigError(f"tensor names: the configuration must be one that {family} can express; {reason}")
    layout = FAMILIES[family].layout
    grouped: dict[str, list[str]] = {}
    for name in named_spec(config):
        grouped.setdefault(_published(name, layout), []).append(name)
    found = []
    for published, parameters in grouped.items():
        if len(parameters) > 1 and not (layout == "gpt2" and ".attn.c_attn." in published):
            raise ConfigError(f"tensor names: {' and '.join(parameters)} would both be called {published}")
        is_conv1d = (
            layout == "gpt2" and ".h." in published and published.endswith(".weight") and ".ln_" not in published
        )
        found.append(Rule(published, tuple(parameters), is_conv1d))
    return found


def _published(name: str, layout: str) -> str:
    if layout == "native":
        return name
    prefix, blocks, block_table, table = _LAYOUTS[layout]
    stem, _, leaf = name.rpartition(".")
    leaf = "weight" if leaf == "scale" else leaf
    if stem == "language_model_head":
        return _HEAD
    if not stem.startswith("blocks."):
        return f"{prefix}{table[stem]}.{leaf}"
    _, layer, part = stem.split(".", 2)
    return f"{prefix}{blocks}.{layer}.{block_table[part]}.{leaf}"


def published_names(config: DecoderConfig, family: str | None = None) -> dict[str, str]:
    """{dotted parameter name: published tensor name}; GPT-2's query, key and value share their fused tensor."""
    return {name: rule.published for rule in rules(config, family) for name in rule.parameters}


def to_published(
    arrays: Mapping[str, Any], config: DecoderConfig, family: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a family from the parameters of `named`, one at a time.

    Args:
        arrays: {dotted name: array}, as `named` gives it.
        config: the decoder.
        family: a model_type; by default `family_of(config)`.

    Yields:
        (published name, C-contiguous NumPy array) with the parameters' dtype.
    """
    for rule in rules(config, family):
        parts = [np.asarray(arrays[name]) for name in rule.parameters]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # safetensors writes the memory as it lies, so a transposed view must be copied into row-major order.
        yield rule.published, np.ascontiguousarray(joined.T if rule.transposed else joined)


def from_published(tensors: Mapping[str, Any], config: DecoderConfig, family: str | None = None) -> dict[str, Any]:
    """The parameters of `from_named` from a family's tensors.

    The prefix of the base model may be absent, as in GPT-2's first release. A tied head may be stored as well; it must
    then equal the embedding.

    Args:
        tensors: {published name: array}; a lazy mapping is read once per tensor.
        config: the decoder.
        family: a model_type; by default `family_of(config)`.

    Returns:
        {dotted name: array} for `riftco.models.from_named`.

    Raises:
        ShapeError: for a missing, additional, colliding or wrongly shaped tensor, or a stored head that differs from
            the embedding it is tied to; it is named.
    """
    family = family_of(config) if family is None else family
    layout, wanted = FAMILIES[family].layout, rules(config, family)
    present = _canonical_keys(tensors, layout)
    is_extra_head = config.tie_embeddings and layout != "native" and _HEAD in present
    known = {rule.published for rule in wanted} | ({_HEAD} if is_extra_head else set())
    if missing := [rule.published for rule in wanted if rule.published not in present]:
        raise ShapeError(f"{family} tensors: {_few(missing)} missing; the file is incomplete or of another model")
    if extra := [present[name] for name in present if name not in known]:
        raise ShapeError(
            f"{family} tensors: only the configuration's tensors may be there; got {_few(extra)}; merge adapters and "
            "dequantize packed weights first"
        )
    shapes = {name: leaf.layer_shape for name, (leaf, _) in named_spec(config).items()}
    arrays: dict[str, Any] = {}
    for rule in wanted:
        tensor = tensors[present[rule.published]]
        rows = [shapes[name][0] for name in rule.parameters]
        joined = (sum(rows), *shapes[rule.parameters[0]][1:])
        expected = joined[::-1] if rule.transposed else joined
        if tuple(tensor.shape) != expected:
            raise ShapeError(
                f"{family} tensors: {present[rule.published]} must be {list(expected)}; got {describe(tensor)}; "
                "config.json and the weights must be of one model"
            )
        array = np.asarray(tensor)
        array = array.T if rule.transposed else array
        pieces = np.split(array, np.cumsum(rows)[:-1]) if len(rows) > 1 else [array]
        arrays.update(zip(rule.parameters, pieces, strict=True))
    if is_extra_head and not np.array_equal(np.asarray(tensors[present[_HEAD]]), arrays["token_embedding.weight"]):
        raise ShapeError(
            f"{family} tensors: {present[_HEAD]} must equal the embedding that tie_word_embeddings ties it to; they "
            "differ; set tie_word_embeddings to false or drop it"
        )
    return arrays


def _canonical_keys(tensors: Mapping[str, Any], layout: str) -> dict[str, str]:
    """{name with the base model's prefix: name as stored}, without buffers."""
    if layout == "native":
        return {name: name for name in tensors}
    prefix = _LAYOUTS[layout][0]
    present: dict[str, str] = {}
    for name in tensors:
        if name.endswith(_BUFFERS):
            continue
        canonical = name if name.startswith((prefix, "lm_head.")) else prefix + name
        if canonical in present:
            raise ShapeError(f"tensors: {present[canonical]} and {name} are the same parameter; drop one")
        present[canonical] = name
    return present


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
