"""What a run trains and what it minimises: by default all weights of a decoder, on the next token.

The step, the loop and evaluation know nothing else about a model; post-training (riftco/tune) puts other objectives in
its place. What is trained is a pytree that the optimizer changes. What is frozen goes to the compiled step as arguments
of its own: it is neither donated nor differentiated, and no constant of the program.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from riftco import models
from riftco.models import DecoderConfig
from riftco.train.mesh import shardings
from riftco.train.throughput import flops_per_token
from riftco.types import Array, Key, PyTree

Figures = dict[str, Array]
"""What a loss reports beside itself, by the names that records have; reduced as the loss is."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """All weights of a decoder, trained on the next token. Sub-classes train or minimise something else.

    Attributes:
        config: the decoder.
        frozen: pytrees that the loss reads and that do not change.
        unit: what a loss is the mean over.
    """

    config: DecoderConfig
    frozen: tuple[PyTree, ...] = ()
    unit = "token"

    @property
    def is_random(self) -> bool:
        """Whether the loss draws dropout masks."""
        return self.config.dropout > 0.0

    def init(self, key: Key) -> PyTree:
        """Fresh values of what is trained, float32."""
        return models.init(key, self.config)

    def check(self, params: PyTree) -> None:
        """Refuse a start that does not fit. Raises ShapeError, DTypeError."""
        models.check_params(params, self.config)

    def abstract(self) -> PyTree:
        """What is trained, as `jax.ShapeDtypeStruct` leaves."""
        return models.abstract(self.config)

    def decay_mask(self) -> PyTree:
        """A bool for each leaf that is trained: whether weight decay applies to it."""
        return models.decay_mask(self.config)

    def shardings(self, mesh: Mesh) -> PyTree:
        """A `NamedSharding` for each leaf that is trained."""
        return shardings(self.config, mesh)

    def loss(
        self,
        params: PyTree,
        batch: Mapping[str, Any],
        *frozen: PyTree,
        reduction: str,
        dropout_key: Key | None = None,
        **options: Any,
    ) -> tuple[Array, Figures]:
        """What is minimised, and what else there is to say about a batch.

        Args:
            params: what is trained.
            batch: "tokens" and "targets", int32 [B, T], and perhaps "weights", "segment_ids", "positions".
            *frozen: the objective's own, as arguments of the compiled program.
            reduction: "mean", or "sum" for accumulation; the mean is the sum over `count`.
            dropout_key: turns dropout on.
            **options: `attention`, `grad_checkpoint`, `dtype` and the like of `riftco.models.forward`.
        """
        value = models.loss(
            params, batch["tokens"], batch["targets"], self.config, weights=batch.get("weights"),
            segment_ids=batch.get("segment_ids"), positions=batch.get("positions"),
            reduction=reduction, dropout_key=dropout_key, **options,
        )  # fmt: skip
        return value, {}

    def count(self, batch: Mapping[str, Any]) -> Array:
        """What a sum of losses is divided by, float32."""
        weights = batch.get("weights")
        return jnp.float32(batch["targets"].size) if weights is None else jnp.sum(weights, dtype=jnp.float32)

    def flops_per_token(self, context: int) -> float:
        """Floating-point operations that a step spends on a token; 0 where not known."""
        return flops_per_token(self.config, context)

    def identity(self) -> dict[str, Any]:
        """JSON values that a resumed run must agree on, beside the model's and the run's configuration."""
        return {}

    def with_dropout(self, rate: float | None) -> "Objective":
        """The same with another rate of the model's dropout; None leaves it."""
        if rate is None:
            return self
        return dataclasses.replace(self, config=dataclasses.replace(self.config, dropout=rate))

    def trained_count(self) -> int:
        """How many scalars are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract()))
