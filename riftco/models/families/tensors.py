"""Tensor names and orientations of the published families, checked to be one to one, and params read by them.

A rule maps one published tensor to one or several parameters: they are joined along the output axis (GPT-2's fused
query, key and value) and transposed where the family stores [in, out] (GPT-2's Conv1D).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco.errors import ConfigError, DTypeError, ShapeError
from riftco.models.config import DecoderConfig
from riftco.models.families.table import FAMILIES, family_of, refusal
from riftco.models.names import named_spec
from riftco.models.specification import LeafSpec, spec, unflatten
from riftco.types import PyTree


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
    source = _Source(tensors, config, family)
    arrays: dict[str, Any] = {}
    for rule in source.rules:
        arrays.update(zip(rule.parameters, source.read(rule), strict=True))
    source.check_tied_head(arrays.get("token_embedding.weight"))
    return arrays


def params_from_published(
    tensors: Mapping[str, Any], config: DecoderConfig, family: str | None = None, *, dtype: Any = None
) -> PyTree:
    """The params out of a family's tensors, one leaf after another.

    Beside the params no more than one of their leaves is in memory, and one tensor, where the mapping reads its tensors
    when they are asked for.

    Args:
        tensors: as `from_published`.
        config: the decoder.
        family: a model_type; by default `family_of(config)`.
        dtype: of the params; None is that of the tensors.

    Returns:
        Nested dicts of jax arrays, blocks stacked on the layer axis: `from_named(from_published(…))`.

    Raises:
        ShapeError: as `from_published`, and for layers of different dtypes that are not to be cast.
        DTypeError: for a tensor that is not floating.
    """
    source = _Source(tensors, config, family)
    leaves: dict[str, Any] = {}
    for rules_of_layers in source.by_leaf().values():
        made: list[np.ndarray] = []
        for layer, rule in enumerate(rules_of_layers):
            pieces = source.read(rule)
            given = pieces[0].dtype
            if not jnp.issubdtype(given, jnp.floating):
                raise DTypeError(
                    f"{source.family} tensors: {rule.published} must be floating; got {given}; dequantize it first"
                )
            wanted = given if dtype is None else jnp.dtype(dtype)
            if len(rules_of_layers) == 1:
                made = [piece[None].astype(wanted, copy=False) for piece in pieces]
                break
            if not made:
                made = [np.empty((len(rules_of_layers), *piece.shape), wanted) for piece in pieces]
            if wanted != made[0].dtype:
                raise ShapeError(
                    f"{source.family} tensors: all layers of a parameter must share a dtype, since they are stacked; "
                    f"{rule.published} is {given}, the first is {made[0].dtype}; load with a dtype"
                )
            for stacked, piece in zip(made, pieces, strict=True):
                stacked[layer] = piece
            del pieces
        for leaf, _ in source.leaves_of(rules_of_layers[0]):
            # Copies are made behind one's back; without waiting, many leaves would be there twice.
            leaves[leaf.name] = jax.block_until_ready(jnp.array(made[0] if leaf.per_layer else made[0][0]))
            del made[0]
            if leaf.name == "token_embedding.weight":
                source.check_tied_head(leaves[leaf.name])
    return unflatten({name: leaves[name] for name in spec(config)})


class _Source:
    """A family's tensors, their names and shapes checked against a configuration before anything is read."""

    def __init__(self, tensors: Mapping[str, Any], config: DecoderConfig, family: str | None) -> None:
        self.tensors, self.config = tensors, config
        self.family = family_of(config) if family is None else family
        layout = FAMILIES[self.family].layout if self.family in FAMILIES else "native"
        if config.layers > len(tensors):  # before there are rules for each
            raise ShapeError(
                f"{self.family} tensors: {config.layers} layers need as many tensors at least; there are "
                f"{len(tensors)}; the configuration is of another model"
            )
        self.rules = rules(config, self.family)
        self.present = _canonical_keys(tensors, layout)
        self.has_extra_head = config.tie_embeddings and layout != "native" and _HEAD in self.present
        known = {rule.published for rule in self.rules} | ({_HEAD} if self.has_extra_head else set())
        if missing := [rule.published for rule in self.rules if rule.published not in self.present]:
            raise ShapeError(
                f"{self.family} tensors: {_few(missing)} missing; the file is incomplete or of another model"
            )
        if extra := [name for canonical, name in self.present.items() if canonical not in known]:
            raise ShapeError(
                f"{self.family} tensors: only the configuration's tensors may be there; got {_few(extra)}; merge "
                "adapters and dequantize packed weights first"
            )
        self._leaves = named_spec(config)
        self._rows = {
            rule.published: [self._leaves[name][0].layer_shape[0] for name in rule.parameters] for rule in self.rules
        }
        for rule in self.rules:
            self._check_shape(rule)

    def _check_shape(self, rule: Rule) -> None:
        name = self.present[rule.published]
        joined = (sum(self._rows[rule.published]), *self._leaves[rule.parameters[0]][0].layer_shape[1:])
        expected = joined[::-1] if rule.transposed else joined
        shape_of = getattr(self.tensors, "shape_of", None)
        shape = tuple(self.tensors[name].shape) if shape_of is None else shape_of(name)
        if shape != expected:
            raise ShapeError(
                f"{self.family} tensors: {name} must be {list(expected)}; got {list(shape)}; config.json and the "
                "weights must be of one model"
            )

    def read(self, rule: Rule) -> list[np.ndarray]:
        """One tensor as the parameters that it is made of, [out, in]."""
        array = np.asarray(self.tensors[self.present[rule.published]])
        array = array.T if rule.transposed else array
        rows = self._rows[rule.published]
        return np.split(array, np.cumsum(rows)[:-1]) if len(rows) > 1 else [array]

    def leaves_of(self, rule: Rule) -> list[tuple[LeafSpec, int | None]]:
        """The leaf and the layer of each parameter of a rule."""
        return [self._leaves[name] for name in rule.parameters]

    def by_leaf(self) -> dict[str, list[Rule]]:
        """The rules of all layers of a leaf together, in the order of the layers."""
        grouped: dict[str, list[Rule]] = {}
        for rule in self.rules:
            grouped.setdefault(self.leaves_of(rule)[0][0].name, []).append(rule)
        return grouped

    def check_tied_head(self, embedding: Any) -> None:
        """A head that is stored although it is tied must be the embedding."""
        if not self.has_extra_head:
            return
        head = np.asarray(self.tensors[self.present[_HEAD]])
        if not np.array_equal(head.astype(embedding.dtype), np.asarray(embedding), equal_nan=True):
            raise ShapeError(
                f"{self.family} tensors: {self.present[_HEAD]} must equal the embedding that tie_word_embeddings "
                "ties it to; they differ; set tie_word_embeddings to false or drop it"
            )


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
