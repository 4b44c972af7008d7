"""What GGUF calls the parameters, in which order it keeps rotary rows, and how leaves are filled one tensor at a time.

The `llama` architecture turns neighbouring channels (2i, 2i + 1), the parameters here turn channels i and i + K/2, so
the rows of its query and key projections are interleaved in the file. `gpt2` keeps query, key and value in one tensor.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from riftco.errors import BundleError, ShapeError
from riftco.interchange.gguf.architectures import NATIVE, ROPE_FREQS
from riftco.interchange.gguf.container import Header, TensorInfo, read_blocks
from riftco.interchange.gguf.tensor_types import CHUNK, dequantize
from riftco.models import DecoderConfig, LeafSpec, spec
from riftco.models.names import layer_name, named_spec

_NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "final_norm": "output_norm",
    "language_model_head": "output",
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward.expand": "ffn_up",
    "feed_forward.project": "ffn_down",
}
_FUSED = ("attention.query", "attention.key", "attention.value")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of a file.

    Attributes:
        name: what the file calls it.
        parameters: the per-layer names of the parameters whose rows it holds, one after the other.
        shape: rows first.
        heads: how many heads' rows are interleaved; 0 for none.
    """

    name: str
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int = 0


def rules(config: DecoderConfig, architecture: str) -> list[Rule]:
    """The tensors of a model in the order of `riftco.models.named`, without `rope_freqs.weight`."""
    grouped: dict[str, list[tuple[str, LeafSpec]]] = {}
    for name, (leaf, _) in named_spec(config).items():
        grouped.setdefault(tensor_name(name, architecture), []).append((name, leaf))
    found = []
    for name, members in grouped.items():
        rows = sum(leaf.layer_shape[0] for _, leaf in members)
        heads = _interleaved_heads(members[0][1], config) if architecture == "llama" else 0
        shape = (rows, *members[0][1].layer_shape[1:])
        found.append(Rule(name, tuple(parameter for parameter, _ in members), shape, heads))
    return found


def _interleaved_heads(leaf: LeafSpec, config: DecoderConfig) -> int:
    stem = leaf.name.rpartition(".")[0]
    return {"blocks.attention.query": config.heads, "blocks.attention.key": config.kv_heads}.get(stem, 0)


def tensor_name(parameter: str, architecture: str) -> str:
    """What a file of an architecture calls a per-layer parameter."""
    if architecture == NATIVE:
        return parameter
    stem, _, leaf = parameter.rpartition(".")
    leaf = "weight" if leaf == "scale" else leaf
    if not stem.startswith("blocks."):
        return f"{_NAMES[stem]}.{leaf}"
    _, layer, part = stem.split(".", 2)
    table = "attn_qkv" if architecture == "gpt2" and part in _FUSED else _NAMES[part]
    return f"blk.{layer}.{table}.{leaf}"


def interleave(array: NDArray, heads: int) -> NDArray:
    """Rows of rotate-half heads (i, i + K/2) as the `llama` architecture keeps them (2i, 2i + 1)."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.swapaxes(halves, 1, 2).reshape(array.shape)


def deinterleave(array: NDArray, heads: int) -> NDArray:
    """The inverse of `interleave`."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(array.shape)


def check_tensors(header: Header, wanted: list[Rule], ignored: frozenset[str]) -> None:
    """Refuse a file whose tensors are not exactly those of the rules.

    Raises:
        ShapeError: for a missing, additional or wrongly shaped tensor; it is named.
    """
    names = {rule.name for rule in wanted}
    if missing := [rule.name for rule in wanted if rule.name not in header.tensors]:
        raise ShapeError(f"{header.path}: {_few(missing)} missing; the file is incomplete or of another model")
    if extra := [name for name in header.tensors if name not in names and name not in ignored]:
        raise ShapeError(
            f"{header.path}: only the architecture's tensors may be there; got {_few(extra)}, which "
            "would change the function"
        )
    for rule in wanted:
        if header.tensors[rule.name].shape != rule.shape:
            raise ShapeError(
                f"{header.path}: {rule.name} must be {list(rule.shape)}, as the keys say; got "
                f"{list(header.tensors[rule.name].shape)}; the file was changed"
            )


def read_leaves(
    file: BinaryIO, header: Header, config: DecoderConfig, wanted: list[Rule], dtypes: Mapping[str, Any]
) -> dict[str, NDArray]:
    """Every leaf of the params, filled in place: beside them no more than a chunk is in memory.

    Args:
        file: the file, open.
        header: of it; `check_tensors` has passed.
        config: the decoder.
        wanted: its rules.
        dtypes: leaf name -> dtype of the result.

    Raises:
        BundleError: for a value that is not finite, or a file that ends early; the tensor is named.
    """
    rows = {name: leaf.layer_shape[0] for name, (leaf, _) in named_spec(config).items()}
    where = {}
    for rule in wanted:
        first = 0
        for parameter in rule.parameters:
            where[parameter] = (rule, first)
            first += rows[parameter]
    leaves = {}
    for name, leaf in spec(config).items():
        out = np.empty(leaf.shape, dtypes[name])
        for layer in range(config.layers if leaf.per_layer else 1):
            rule, first = where[layer_name(name, layer) if leaf.per_layer else name]
            target = out[layer] if leaf.per_layer else out
            _fill(file, header.tensors[rule.name], first, target)
            if rule.heads:
                target[...] = deinterleave(target, rule.heads)
        leaves[name] = out
    return leaves


def _fill(file: BinaryIO, info: TensorInfo, first_row: int, target: NDArray) -> None:
    """The rows of a tensor from `first_row` on, as many as the target has."""
    start = first_row * (info.shape[-1] if len(info.shape) > 1 else 1)
    if start % info.kind.block or target.size % info.kind.block:
        raise ShapeError(f"{file.name}: {info.name} must be cut between blocks of {info.kind.name}; it cannot be")
    flat, at = target.reshape(-1), 0
    for data in read_blocks(file, info, start, target.size, CHUNK):
        with np.errstate(over="ignore"):  # looked for below
            values = dequantize(data, info.kind).astype(flat.dtype, copy=False)
        if not np.isfinite(values).all():
            raise BundleError(
                f"{file.name}: every weight must be finite; {info.name} has one that is not; the file is "
                f"damaged, or its values are beyond {flat.dtype}"
            )
        flat[at : at + len(values)] = values
        at += len(values)


def read_factors(file: BinaryIO, header: Header) -> NDArray[np.float32] | None:
    """The content of `rope_freqs.weight`; None where the file has no such tensor."""
    info = header.tensors.get(ROPE_FREQS)
    if info is None:
        return None
    if len(info.shape) != 1 or info.size > 1 << 16:
        raise ShapeError(f"{header.path}: {ROPE_FREQS} must be one number a pair of channels; got {list(info.shape)}")
    factors = np.empty(info.shape, np.float32)
    _fill(file, info, 0, factors)
    return factors


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
