"""What post-training minimises, for full weights and for adapters beside a frozen base: responses, and preferences.

Each is a `riftco.train.Objective`: the step, the loop, checkpoints and evaluation are those of pretraining.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import riftco
from riftco import layers, ops
from riftco.autodiff import checkpoint, scan
from riftco.errors import ConfigError
from riftco.models.adapters import Adapters, attach, check_adapters, with_draw
from riftco.models.config import DecoderConfig
from riftco.models.decoder import head, hidden_states
from riftco.train import Objective
from riftco.train.mesh import replicated
from riftco.train.objective import Figures
from riftco.types import Array, Key, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Supervised(Objective):
    """The next token of examples whose weights say what counts; all weights are trained, or adapters alone.

    Attributes:
        adapters: what is fixed about the adapters that are trained (`template_of`); None trains all weights. With
            adapters the base is `frozen[0]`.
        facts: JSON values that a resumed run must agree on.
    """

    adapters: Adapters | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_random(self) -> bool:
        """Whether the model or the adapters have dropout."""
        return super().is_random or (self.adapters is not None and self.adapters.dropout > 0.0)

    def init(self, key: Key) -> PyTree:
        """Not drawn from a seed: post-training starts from a model. Raises ConfigError."""
        raise ConfigError("finetune: a start is required; none was given; give train(..., params=)")

    def check(self, params: PyTree) -> None:
        """Refuse params that are not the configuration's, or adapters that are not like those declared."""
        if self.adapters is None:
            super().check(params)
        else:
            check_adapters(dataclasses.replace(self.adapters, weights=params), self.config)

    def abstract(self) -> PyTree:
        """Of the weights, or of the adapters'."""
        return super().abstract() if self.adapters is None else self.adapters.weights

    def decay_mask(self) -> PyTree:
        """As in pretraining; of adapters both matrices decay."""
        return super().decay_mask() if self.adapters is None else jax.tree.map(lambda _: True, self.adapters.weights)

    def shardings(self, mesh: Mesh) -> PyTree:
        """As in pretraining; adapters are small, and everywhere."""
        if self.adapters is None:
            return super().shardings(mesh)
        return jax.tree.map(lambda _: replicated(mesh), self.adapters.weights)

    def parts(self, params: PyTree, frozen: tuple[PyTree, ...]) -> tuple[PyTree, Adapters | None]:
        """The weights, and the adapters beside them, of the model that is trained."""
        if self.adapters is None:
            return params, None
        return frozen[0], dataclasses.replace(self.adapters, weights=params)

    def loss(
        self,
        params: PyTree,
        batch: Mapping[str, Any],
        *frozen: PyTree,
        reduction: str,
        dropout_key: Key | None = None,
        **options: Any,
    ) -> tuple[Array, Figures]:
        """The cross entropy of the targets with weight; see `Objective.loss`."""
        weights, adapters = self.parts(params, frozen)
        return super().loss(weights, batch, reduction=reduction, dropout_key=dropout_key, adapters=adapters, **options)

    def flops_per_token(self, context: int) -> float:
        """As in pretraining where all weights are trained; not counted beside a frozen base."""
        return super().flops_per_token(context) if self.adapters is None else 0.0

    def identity(self) -> dict[str, Any]:
        """The facts."""
        return dict(self.facts)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Preferences(Supervised):
    """Direct preference optimisation: of two answers, the first should gain on the second, beyond the reference.

    The loss of a pair is −log σ(z), z = β ((log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r))) with c the chosen and
    r the rejected answer. The reference is the frozen start `frozen[0]`, without adapters.

    Attributes:
        beta: β > 0, how far the policy may go from the reference.

    Source:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 7.  Oracle: riftco.oracle.preferences.dpo_loss.
    """

    beta: float = 0.1
    unit = "pair"

    def loss(
        self,
        params: PyTree,
        batch: Mapping[str, Any],
        *frozen: PyTree,
        reduction: str,
        dropout_key: Key | None = None,
        **options: Any,
    ) -> tuple[Array, Figures]:
        """The loss over pairs, the share with z > 0 as "accuracy", and z as "margin"; see `Objective.loss`.

        A row holds the chosen answer as segment 1 and the rejected one as segment 2 (`riftco.data.PreferenceSource`);
        a row without a weight is no pair and counts nothing. Dropout is the policy's alone.
        """
        weights, adapters = self.parts(params, frozen)
        reference = answer_differences(frozen[0], batch, self.config, **options)
        policy = answer_differences(weights, batch, self.config, adapters=adapters, dropout_key=dropout_key, **options)
        z = (policy - reference) * self.beta  # [B]
        is_pair = _pairs(batch).astype(z.dtype)
        loss = ops.sum(preference_loss(z) * is_pair)
        z = riftco.stop_gradient(z)
        figures = {"accuracy": jnp.sum(jnp.where(z > 0, is_pair, 0.0)), "margin": jnp.sum(z * is_pair)}
        if reduction == "sum":
            return loss, figures
        share = 1.0 / jnp.maximum(jnp.sum(is_pair), 1.0)
        return loss * share, {name: value * share for name, value in figures.items()}

    def count(self, batch: Mapping[str, Any]) -> Array:
        """How many pairs there are, float32."""
        return jnp.sum(_pairs(batch))

    def flops_per_token(self, context: int) -> float:
        """Not counted: two models run."""
        return 0.0


def template_of(adapters: Adapters) -> Adapters:
    """The adapters with shapes for arrays: what is fixed about them."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), adapters.weights)
    return dataclasses.replace(adapters, weights=shapes)


def _pairs(batch: Mapping[str, Any]) -> Array:
    return jnp.any(batch["weights"] != 0, axis=1).astype(jnp.float32)


def preference_loss(z: Array) -> Array:
    """−log σ(z), elementwise, as the logsumexp of 0 and −z: without overflow, and smooth at 0.

    Args:
        z: floating [B].

    Gradient:
        −σ(−z).
    """
    column = ops.reshape(-z, (-1, 1))
    return ops.logsumexp(ops.concatenate([column, jnp.zeros(column.shape, column.dtype)], 1), -1)


def answer_differences(
    params: PyTree,
    batch: Mapping[str, Any],
    config: DecoderConfig,
    *,
    adapters: Adapters | None = None,
    dropout_key: Key | None = None,
    **options: Any,
) -> Array:
    """The difference log π(segment 1) − log π(segment 2) of each row, float32 [B]; the sum over the tokens with weight.

    The logits of one row exist at a time, and are made again for its gradient.

    Args:
        params: the model's, plain or packed.
        batch: "tokens", "targets", "weights", "segment_ids", "positions", [B, T].
        config: its configuration.
        adapters: low-rank adapters, or None.
        dropout_key: turns dropout on.
        **options: `attention`, `grad_checkpoint`, `dtype` of `riftco.models.forward`.
    """
    params = attach(params, adapters, config, dropout_key)
    x = hidden_states(
        params, batch["tokens"], config, dropout_key=dropout_key, segment_ids=batch["segment_ids"],
        positions=batch["positions"], **options,
    )  # fmt: skip
    signed = jnp.where(batch["segment_ids"] == 1, -batch["weights"], batch["weights"])

    def row(x: Array, targets: Array, weights: Array, number: Array, last: PyTree) -> Array:
        last = with_draw(last, number)
        return ops.cross_entropy(layers.linear(last, x), targets, weights=weights, reduction="sum")

    def body(carry: Any, rows: Any, last: PyTree) -> Any:
        return carry, checkpoint(row)(*rows, last)

    rows = (x, batch["targets"], signed, jnp.arange(x.shape[0]))
    return scan(body, (), rows, head(params, config, options.get("dtype")))[1]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scored(Supervised):
    """The same loss for evaluation, and with it the share of targets that are the likeliest token, as "accuracy".

    Only sums, and no gradient: the logits of one row exist at a time.
    """

    def loss(
        self,
        params: PyTree,
        batch: Mapping[str, Any],
        *frozen: PyTree,
        reduction: str,
        dropout_key: Key | None = None,
        **options: Any,
    ) -> tuple[Array, Figures]:
        """The sums over the targets with weight; see `Objective.loss`."""
        weights, adapters = self.parts(params, frozen)
        weights = attach(weights, adapters, self.config)
        x = hidden_states(
            weights, batch["tokens"], self.config, segment_ids=batch.get("segment_ids"),
            positions=batch.get("positions"), **options,
        )  # fmt: skip
        last = head(weights, self.config, options.get("dtype"))

        def row(rows: Any) -> tuple[Array, Array]:
            x, targets, weight = rows
            logits = layers.linear(last, x)
            right = jnp.argmax(logits, -1).astype(targets.dtype) == targets
            loss = ops.cross_entropy(logits, targets, weights=weight, reduction="sum")
            return loss, jnp.sum(jnp.where(right & (weight > 0), 1.0, 0.0))

        counted = batch.get("weights")
        counted = jnp.ones(x.shape[:2], jnp.float32) if counted is None else counted
        losses, right = jax.lax.map(row, (x, batch["targets"], counted))
        return jnp.sum(losses), {"accuracy": jnp.sum(right)}
