"""Adapters under the names and settings of PEFT: `adapter_config.json` and the tensors beside it, both ways.

GPT-2 keeps query, key and value in one layer, for which PEFT has one pair (A, B). Ours, with a pair each, stack their
A and put their B along a diagonal; `rank_pattern` and `alpha_pattern` say so, and the scale stays what it was. A pair
that came from PEFT has one A for all three, and goes back as it came.

Not here: directories and identities (adapters.py).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from riftco.errors import BundleError
from riftco.models.adapters import HEAD, Adapters, check_adapters, check_options, path_of, projections
from riftco.models.config import DecoderConfig
from riftco.models.families import FAMILIES, family_of
from riftco.models.families.tensors import rules
from riftco.models.specification import unflatten

PREFIX = "base_model.model."
_SIDES = {"lora_a": ".lora_A.weight", "lora_b": ".lora_B.weight"}
# Settings that say how to train, where to look, or what the tensors say as well. Any other must be empty.
_HARMLESS = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules "
    "exclude_modules lora_alpha lora_dropout fan_in_fan_out use_rslora init_lora_weights layers_to_transform "
    "layers_pattern rank_pattern alpha_pattern megatron_core loftq_config eva_config corda_config "
    "qalora_group_size".split()
)
_EMPTY = (None, False, "none", {}, [])
# Ways to begin that leave the base as it was; others (pissa, olora, loftq …) put a part of it into the adapter.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


def modules(config: DecoderConfig, family: str | None = None) -> dict[str, tuple[str, ...]]:
    """{module of the published model: the projections that it holds, one layer's}, by per-layer dotted names."""
    linear = {".".join(path_of(name)) for name in projections(config)}
    found: dict[str, tuple[str, ...]] = {}
    for rule in rules(config, family):
        parts = tuple(name.removesuffix(".weight") for name in rule.parameters if name.endswith(".weight"))
        if parts and all(_without_layer(part) in linear for part in parts):
            found[rule.published.removesuffix(".weight")] = parts
    return found


def _without_layer(name: str) -> str:
    if not name.startswith("blocks."):
        return name
    head, _, *rest = name.split(".")
    return ".".join((head, *rest))


def _projection(name: str) -> tuple[str, int]:
    """The projection and the layer of a per-layer dotted name; the head is of layer 0."""
    if name == HEAD:
        return HEAD, 0
    _, layer, rest = name.split(".", 2)
    return rest, int(layer)


# ------------------------------------------------------------------------------------------------ writing


def to_peft(
    adapters: Adapters, config: DecoderConfig, *, base_path: str | None = None, family: str | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The settings and the tensors by which PEFT loads these adapters onto the published model.

    Args:
        adapters: of the configuration.
        config: the decoder.
        base_path: `base_model_name_or_path`: where PEFT finds the base.
        family: a model_type; by default the one that the configuration is saved as.

    Returns:
        The content of `adapter_config.json`, and {tensor name: float array}, A [R, in] and B [out, R].

    Raises:
        ShapeError, DTypeError: for adapters of another configuration. ConfigError: where the family cannot express it.
    """
    check_adapters(adapters, config)
    family = family_of(config) if family is None else family
    arrays = {name: (np.asarray(a), np.asarray(b)) for name, a, b in adapters.pairs()}
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for module, parts in modules(config, family).items():
        pairs: list[Any] = []
        for part in parts:
            name, layer = _projection(part)
            a, b = arrays.get(name, (None, None))
            pairs.append(None if a is None or b is None else (a, b) if name == HEAD else (a[layer], b[layer]))
        if all(pair is None for pair in pairs):
            continue
        rows = [projections(config)[_projection(part)[0]][0] for part in parts]
        a, b = _joined(pairs, rows)
        ranks[_suffix(module, family)] = max(a.shape[0], ranks.get(_suffix(module, family), 0))
        tensors[f"{PREFIX}{module}{_SIDES['lora_a']}"] = a
        tensors[f"{PREFIX}{module}{_SIDES['lora_b']}"] = b
    wider = {module: rank for module, rank in ranks.items() if rank != adapters.rank}
    growth = lambda rank: math.sqrt(rank / adapters.rank) if adapters.rslora else rank / adapters.rank
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": adapters.rank,
        "lora_alpha": _number(adapters.alpha),
        "lora_dropout": adapters.dropout,
        "use_rslora": adapters.rslora,
        "rank_pattern": wider,
        "alpha_pattern": {module: _number(adapters.alpha * growth(rank)) for module, rank in wider.items()},
        "target_modules": sorted(ranks),
        "fan_in_fan_out": FAMILIES[family].layout == "gpt2",
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return settings, tensors


def _joined(pairs: list[Any], rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """One (A, B) for a layer that holds several projections, some without an adapter."""
    there = [pair for pair in pairs if pair is not None]
    first = there[0][0]
    shared = all(np.array_equal(first, a) for a, _ in there)
    rank = first.shape[0]
    a = first if shared else np.concatenate([a for a, _ in there])
    b = np.zeros((sum(rows), a.shape[0]), there[0][1].dtype)
    top = column = 0
    for pair, count in zip(pairs, rows, strict=True):
        if pair is not None:
            b[top : top + count, column : column + rank] = pair[1]
            column += 0 if shared else rank
        top += count
    return np.ascontiguousarray(a), b


def _suffix(module: str, family: str) -> str:
    """What PEFT matches a module by: its name inside a block, the head's whole."""
    layout = FAMILIES[family].layout
    if layout == "native":
        return _without_layer(module).removeprefix("blocks.")
    if module == "lm_head":
        return module
    return ".".join(module.split(".")[3:])  # model.layers.0.self_attn.q_proj, transformer.h.0.attn.c_attn


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)


# ------------------------------------------------------------------------------------------------ reading


def from_peft(
    settings: Mapping[str, Any],
    tensors: Mapping[str, Any],
    config: DecoderConfig,
    *,
    family: str | None = None,
    targets: tuple[str, ...] | None = None,
) -> Adapters:
    """The adapters that PEFT's settings and tensors describe, in float32.

    Args:
        settings: the content of `adapter_config.json`.
        tensors: {tensor name: array}.
        config: the decoder of the base.
        family: a model_type; by default the one that the configuration is saved as.
        targets: the projections that were adapted, where they are known: a fused layer is then taken apart as
            `to_peft` put it together. Otherwise all that it holds are adapted, with one A.

    Raises:
        BundleError: for a setting that changes the function in a way that riftco has not, or a tensor that is missing,
            additional, or of a wrong shape; it is named.
        ConfigError: for a rank, alpha or dropout out of range.
    """
    who = "adapter_config.json"
    rank, alpha, rslora, dropout = _options(settings)
    check_settings(settings)
    held = modules(config, family)
    found = _by_module(tensors, held)
    stacks: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    for module, sides in found.items():
        parts = [_projection(part) for part in held[module]]
        wanted = [name for name, _ in parts if targets is None or name in targets]
        rows = [projections(config)[name][0] for name, _ in parts]
        pairs = _parted(module, sides, parts, wanted, rows, rank)
        for (name, layer), pair in zip(parts, pairs, strict=True):
            if pair is not None:
                stacks.setdefault(name, {})[layer] = pair
    leaves: dict[str, np.ndarray] = {}
    chosen = tuple(name for name in projections(config) if name in stacks)
    for name in chosen:
        out, width = projections(config)[name]
        layers = range(1 if name == HEAD else config.layers)
        if missing := [layer for layer in layers if layer not in stacks[name]]:
            raise BundleError(
                f"adapter: every layer must have its adapter; {name} of layer {missing[0]} has none; adapters for some "
                "layers only are not supported"
            )
        for side, shape in ((0, (rank, width)), (1, (out, rank))):
            stack = [stacks[name][layer][side] for layer in layers]
            if any(array.shape != shape for array in stack):
                raise BundleError(
                    f"adapter: the {'AB'[side]} of {name} must be {list(shape)} for r = {rank} and this base; got "
                    f"{list(next(array.shape for array in stack if array.shape != shape))}; use the base that the "
                    "adapter was made for"
                )
            whole = stack[0] if name == HEAD else np.stack(stack)
            leaves[f"{'.'.join(path_of(name))}.{'lora_a' if side == 0 else 'lora_b'}"] = whole
    if not chosen:
        raise BundleError(f"{who}: the adapter must adapt something; its file holds no tensors")
    return Adapters(unflatten(leaves), rank, alpha, chosen, rslora, dropout)


def _options(settings: Mapping[str, Any]) -> tuple[int, float, bool, float]:
    return check_options(
        settings.get("r"),
        settings.get("lora_alpha"),
        settings.get("use_rslora") or False,
        settings.get("lora_dropout") or 0.0,
    )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that change what an adapter computes in a way that riftco has not; the key is named."""
    who = "adapter_config.json"
    if str(settings.get("peft_type")).upper() != "LORA":
        raise BundleError(f"{who}: peft_type must be LORA; got {settings.get('peft_type')!r}")
    for key, value in settings.items():
        if key not in _HARMLESS and value not in _EMPTY:
            raise BundleError(f"{who}: {key} must be absent or empty; got {value!r}, which is not supported")
    start = settings.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise BundleError(
            f"{who}: init_lora_weights must leave the base as it was; got {start!r}, which changes it; convert the "
            "adapter to plain LoRA with PEFT first"
        )
    ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    rank, alpha, rslora, _ = _options(settings)
    for module in {**ranks, **alphas}:
        own_rank, own_alpha, _, _ = check_options(ranks.get(module, rank), alphas.get(module, alpha), rslora, 0.0)
        scales = [a / (math.sqrt(r) if rslora else r) for a, r in ((alpha, rank), (own_alpha, own_rank))]
        if not math.isclose(*scales, rel_tol=1e-12):
            raise BundleError(
                f"{who}: rank_pattern and alpha_pattern must leave the scale as it is; they make it {scales[1]:g} for "
                f"{module} and it is {scales[0]:g} elsewhere, which is not supported"
            )


def _by_module(tensors: Mapping[str, Any], held: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, np.ndarray]]:
    """{module: its A and its B}, in float32; every tensor must be one of them."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in tensors:
        side = next((side for side, end in _SIDES.items() if name.endswith(end)), None)
        module = "" if side is None else name.removeprefix(PREFIX).removesuffix(_SIDES[side])
        # A file made from the bare base model lacks that model's prefix.
        module = next((known for known in held if module and module in (known, known.partition(".")[2])), None)
        if side is None or module is None:
            raise BundleError(
                f"adapter: every tensor must be the A or B of a linear layer of the base; {name} is not; use the base "
                "that the adapter was made for"
            )
        if side in found.setdefault(module, {}):
            raise BundleError(
                f"adapter: every tensor must be there once; {name} is there with and without its model's prefix; "
                "remove one"
            )
        found[module][side] = np.asarray(tensors[name]).astype(np.float32)
    for module, sides in found.items():
        if missing := [end for side, end in _SIDES.items() if side not in sides]:
            raise BundleError(f"adapter: {PREFIX}{module}{missing[0]} must be there; it is not; the file is incomplete")
    return found


def _parted(
    module: str,
    sides: Mapping[str, np.ndarray],
    parts: list[tuple[str, int]],
    wanted: list[str],
    rows: list[int],
    rank: int,
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """The pair of each projection that a module holds, None for those not wanted: the inverse of `_joined`."""
    a, b = sides["lora_a"], sides["lora_b"]
    if len(parts) == 1:
        return [(a, b)]
    whole = a.ndim == b.ndim == 2 and b.shape == (sum(rows), a.shape[0])
    if not whole or a.shape[0] not in (rank, rank * len(wanted)):
        raise BundleError(
            f"adapter: the tensors of {module} must be [{rank}, in] and [{sum(rows)}, {rank}], as r says; got "
            f"{list(a.shape)} and {list(b.shape)}; other ranks (rank_pattern) are not supported"
        )
    shared = a.shape[0] == rank
    pairs: list[tuple[np.ndarray, np.ndarray] | None] = []
    rest, top, column = b.copy(), 0, 0
    for (name, _), count in zip(parts, rows, strict=True):
        if name not in wanted:
            pairs.append(None)
        else:
            block = np.s_[top : top + count, column : column + rank]
            pairs.append((a[column : column + rank], b[block]))
            rest[block] = 0
            column += 0 if shared else rank
        top += count
    if rest.any():
        raise BundleError(
            f"adapter: B of {module} must be blocks for {', '.join(wanted)} alone; it is not, and other uses of "
            "rank_pattern are not supported"
        )
    return pairs
