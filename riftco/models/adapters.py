"""Low-rank adapters beside the linear layers: which layers have them, what they hold, and how they are applied.

An adapted layer computes `x Wᵀ + b + scale · (dropout(x) Aᵀ) Bᵀ` (Hu et al. 2021, arXiv:2106.09685, eq. 3). The base
stays where it is, as its own argument: only the adapters are differentiated. Making, merging and saving them is in
riftco/tune.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from riftco import ops
from riftco.autodiff.box import is_floating
from riftco.errors import ConfigError, DTypeError, ShapeError
from riftco.models.config import DecoderConfig
from riftco.models.specification import spec
from riftco.tree import describe, with_value
from riftco.types import Array, Key, PyTree

HEAD = "language_model_head"
_BLOCKS = "blocks."


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights"],
    meta_fields=["rank", "alpha", "targets", "rslora", "dropout"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Adapters:
    """The adapters of one model: trainable arrays, and what is fixed about them. A pytree of the arrays.

    Args:
        weights: nested dicts like the params, with "lora_a" [R, in] and "lora_b" [out, R] where they have "weight";
            those of blocks are stacked on a leading layer axis.
        rank: R.
        alpha: numerator of the scale.
        targets: the adapted projections, names of `projections`, in its order.
        rslora: whether the scale is `alpha / √rank` (Kalajdzievski 2023, arXiv:2312.03732) and not `alpha / rank`.
        dropout: rate on the adapters' input where a dropout key is given, in [0, 1).
    """

    weights: PyTree
    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """(projection, A, B) of each target, in order."""
        for target in self.targets:
            node = self.weights
            for part in path_of(target):
                node = node[part]
            yield target, node["lora_a"], node["lora_b"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["lora_a", "lora_b_transposed", "key"], meta_fields=["scale", "rate"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """One layer's adapter: what `riftco.layers.linear` adds to its output. A [R, in], and B transposed, [R, out].

    With B transposed outside the loop over layers its gradient is R rows, not R columns, inside: on a CPU such a
    product is many times faster.
    """

    lora_a: Any
    lora_b_transposed: Any
    key: Any
    scale: float
    rate: float

    def __call__(self, x: Array) -> Array:
        """[..., in] to [..., out], in x's dtype."""
        if self.key is not None:
            x = ops.dropout(x, self.key, self.rate)
        rows = ops.reshape(x, (-1, x.shape[-1]))
        # The scale meets the rank's few columns and not the output's many.
        narrow = ops.linear(rows, ops.astype(self.lora_a, x.dtype)) * self.scale
        out = ops.matmul(narrow, ops.astype(self.lora_b_transposed, x.dtype))
        return ops.reshape(out, (*x.shape[:-1], out.shape[-1]))


def with_draw(layer: Mapping[str, Any], number: Any) -> Mapping[str, Any]:
    """A layer whose adapter draws the dropout mask of this number: for one that is applied several times in a step."""
    adapter = layer.get("adapter")
    if not isinstance(adapter, Branch) or adapter.key is None:
        return layer
    return {**layer, "adapter": dataclasses.replace(adapter, key=jax.random.fold_in(adapter.key, number))}


# ------------------------------------------------------------------------------------------------ targets


@functools.lru_cache(maxsize=256)
def projections(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """{name: (out, in)} of every linear layer that may be adapted or packed, in reference order.

    Names are those of the params, "attention.query" standing for that of every block. A tied head has no weight of its
    own and is not among them.
    """
    return {
        leaf.name.removeprefix(_BLOCKS).removesuffix(".weight"): (leaf.layer_shape[0], leaf.layer_shape[1])
        for leaf in spec(config).values()
        if leaf.initializer == "xavier_uniform"
    }


def path_of(projection: str) -> tuple[str, ...]:
    """Where a projection lies in the params: ("blocks", "attention", "query"), ("language_model_head",)."""
    return (HEAD,) if projection == HEAD else ("blocks", *projection.split("."))


def match_targets(targets: Sequence[str], config: DecoderConfig) -> tuple[str, ...]:
    """The projections that some target names, in reference order.

    A target matches the projections in whose dotted names it stands as whole segments: "query" and "attention.query"
    match attention.query, "attention" all four of attention, "quer" nothing.

    Args:
        targets: at least one name.
        config: the decoder.

    Raises:
        ConfigError: for no targets, a bare string, or a target that matches nothing; what there is, is named.
    """
    available = projections(config)
    there = f"this model has {', '.join(available)}"
    if isinstance(targets, str):
        raise ConfigError(f"adapters: targets must be a list of names; got the text {targets!r}; put it in a list")
    targets = list(targets)
    if not targets or not all(isinstance(target, str) and target for target in targets):
        raise ConfigError(f"adapters: targets must name at least one projection; got {targets!r}; {there}")
    found: set[str] = set()
    for target in targets:
        matching = [name for name in available if f".{target}." in f".{'.'.join(path_of(name))}."]
        if not matching:
            tied = HEAD.endswith(target) and config.tie_embeddings
            why = "the head is the token embedding here (tie_embeddings); " if tied else ""
            raise ConfigError(
                f"adapters: every target must be whole segments of a projection's name; {target!r} is not; {why}{there}"
            )
        found.update(matching)
    return tuple(name for name in available if name in found)


# ------------------------------------------------------------------------------------------------ checks


def check_options(rank: Any, alpha: Any, rslora: Any, dropout: Any) -> tuple[int, float, bool, float]:
    """The options of `Adapters` as plain Python values.

    Raises:
        ConfigError: for a rank below 1, an alpha or a scale that is not finite and positive as a float32, or a rate
            outside [0, 1).
    """
    try:
        number = 0 if isinstance(rank, bool) else operator.index(rank)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"adapters: rank must be an integer of at least 1; got {rank!r}")
    if not isinstance(rslora, (bool, np.bool_)):
        raise ConfigError(f"adapters: rslora must be True or False; got {rslora!r}")
    try:
        value, rate = float(alpha), float(dropout)
    except (TypeError, ValueError):
        raise ConfigError(f"adapters: alpha and dropout must be numbers; got {alpha!r} and {dropout!r}") from None
    scale = value / (math.sqrt(number) if rslora else number)
    with np.errstate(over="ignore", under="ignore"):
        sound = all(np.isfinite(np.float32(x)) and np.float32(x) > 0 for x in (value, scale))
    if not sound:
        raise ConfigError(f"adapters: alpha, and alpha over rank, must be finite and positive; got alpha {alpha!r}")
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"adapters: dropout must lie in [0, 1); got {dropout!r}; use 0.0 for none")
    return number, value, bool(rslora), rate


def check_adapters(adapters: Any, config: DecoderConfig) -> None:
    """Refuse adapters that are not the configuration's: projections, shapes, floating arrays.

    Raises:
        DTypeError: for what is no `Adapters`, or a leaf that is not floating.
        ShapeError: for a projection that the model does not have or a leaf of another shape; it is named.
    """
    if not isinstance(adapters, Adapters):
        raise DTypeError(
            f"adapters: they must come from riftco.tune.lora_init or a loaded adapter; got {type(adapters).__name__}"
        )
    available = projections(config)
    if unknown := [target for target in adapters.targets if target not in available]:
        raise ShapeError(
            f"adapters: every projection must be the model's; {', '.join(unknown)} are not; use the base that the "
            "adapters were made for"
        )
    for target, a, b in adapters.pairs():
        out, width = available[target]
        stack = () if target == HEAD else (config.layers,)
        for name, leaf, shape in (
            ("lora_a", a, (*stack, adapters.rank, width)),
            ("lora_b", b, (*stack, out, adapters.rank)),
        ):
            if tuple(getattr(leaf, "shape", ())) != shape:
                raise ShapeError(
                    f"adapters: {target}.{name} must be {list(shape)}; got {describe(leaf)}; use the base that the "
                    "adapters were made for"
                )
            if not is_floating(leaf):
                raise DTypeError(f"adapters: {target}.{name} must be floating; got {describe(leaf)}")


# ------------------------------------------------------------------------------------------------ applying


def attach(params: PyTree, adapters: Adapters | None, config: DecoderConfig, dropout_key: Key | None = None) -> PyTree:
    """The params with a `Branch` beside each adapted weight; no array is copied.

    Args:
        params: the base, plain or packed.
        adapters: None changes nothing.
        config: the decoder.
        dropout_key: turns the adapters' dropout on; each layer and projection draws its own.
    """
    if adapters is None:
        return params
    check_adapters(adapters, config)
    places = {name: index for index, name in enumerate(projections(config))}
    for target, a, b in adapters.pairs():
        key = None
        if dropout_key is not None and adapters.dropout > 0.0:
            # The model's own dropout folds 0 and 1 into the key: it draws what it drew without adapters.
            key = jax.random.fold_in(dropout_key, 2 + places[target])
            key = key if target == HEAD else jax.random.split(key, config.layers)
        b = ops.transpose(b, (*range(b.ndim - 2), b.ndim - 1, b.ndim - 2))
        params = with_value(params, (*path_of(target), "adapter"), Branch(a, b, key, adapters.scale, adapters.dropout))
    return params
