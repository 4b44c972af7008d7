"""One training step as one compiled function: forward, hand-written backward, clipping, Adam.

The whole step takes effect or none of it does. A loss, a gradient or a candidate that is not finite leaves every array
as it was, and so does a step whose number is not the state's: when the host learns late that step k failed, the steps
that it had already sent after it have changed nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import riftco
from riftco.errors import ShapeError
from riftco.models import DecoderConfig
from riftco.ops.attend import choose
from riftco.optim import AdamState, accumulate, adam, schedule
from riftco.train.config import TrainConfig
from riftco.train.mesh import batch_sharding, in_context, replicated
from riftco.train.objective import Figures, Objective
from riftco.train.randomness import streams
from riftco.types import Array, PyTree


class TrainState(NamedTuple):
    """What training changes; a pytree, donated to every step."""

    params: PyTree
    """What is trained, float32: the weights as `riftco.models.init` nests them, or what the objective says."""
    optimizer: AdamState
    """Adam's state; `optimizer.step` is the number of updates made."""


class StepMetrics(NamedTuple):
    """What one step reports; scalars on the device."""

    loss: Array
    """float32: the mean loss of the counted targets, in nats, before the update."""
    grad_norm: Array
    """float32: the global gradient norm before clipping."""
    clip_scale: Array
    """float32: what the gradients were multiplied by."""
    learning_rate: Array
    """float32: the rate of this update."""
    targets: Array
    """int32: how many targets were counted, all devices and micro-batches together."""
    ok: Array
    """bool: whether the update took effect."""
    figures: Figures
    """float32: what the objective reports beside the loss, by name; empty for pretraining."""


Step = Callable[..., tuple[TrainState, StepMetrics]]


def make_optimizer(
    config: DecoderConfig, train_config: TrainConfig, objective: Objective | None = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Adam as a configuration describes it: (init, update) of `riftco.optim.adam`."""
    objective = objective or Objective(config=config)
    return adam(
        _rate(train_config),
        b1=train_config.beta1,
        b2=train_config.beta2,
        eps=train_config.eps,
        max_grad_norm=train_config.max_grad_norm,
        weight_decay=train_config.weight_decay,
        decay_mask=objective.decay_mask(),
        page_size=train_config.page_size,
    )


def check_attention(config: DecoderConfig, implementation: str | None) -> None:
    """Refuse an implementation of attention that cannot run here, as `riftco.ops.attention` would, but at once."""
    shape = lambda heads: jax.ShapeDtypeStruct((1, config.context, heads, config.head_dim), jnp.float32)
    choose(implementation, shape(config.heads), shape(config.kv_heads), shape(config.kv_heads))


def _rate(train_config: TrainConfig) -> Callable[[Any], Array]:
    return schedule(
        train_config.lr_schedule,
        peak=train_config.learning_rate,
        total_steps=train_config.max_steps,
        warmup_steps=train_config.warmup_steps,
        min_lr=train_config.min_lr,
    )


def init_state(
    config: DecoderConfig,
    train_config: TrainConfig,
    mesh: Mesh | None = None,
    params: PyTree = None,
    objective: Objective | None = None,
) -> TrainState:
    """A fresh state, made where it will live: no device ever holds more than its share.

    Args:
        config: the decoder.
        train_config: the run; its seed's init stream draws the weights.
        mesh: the mesh, or None for one device.
        params: what to start from instead; it is copied.
        objective: what is trained; None for all weights of the decoder.

    Returns:
        A `TrainState` with zero moments. The bits of the weights do not depend on the mesh.
    """
    objective = objective or Objective(config=config)
    init_optimizer, _ = make_optimizer(config, train_config, objective)
    if params is not None:
        objective.check(params)

    def make(params: PyTree) -> TrainState:
        if params is None:
            params = objective.init(streams(train_config.seed).init)
        return TrainState(params, init_optimizer(params))

    out = None if mesh is None else state_shardings(config, train_config, mesh, objective)
    # jit copies its inputs unless they are donated, so the caller's weights stay the caller's.
    return jax.jit(make, out_shardings=out)(jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params))


def abstract_state(
    config: DecoderConfig, train_config: TrainConfig, mesh: Mesh | None = None, objective: Objective | None = None
) -> TrainState:
    """The state as `jax.ShapeDtypeStruct` leaves, with shardings where there is a mesh: a target to restore into."""
    objective = objective or Objective(config=config)
    init_optimizer, _ = make_optimizer(config, train_config, objective)
    params = objective.abstract()
    state = TrainState(params, jax.eval_shape(init_optimizer, params))
    if mesh is None:
        return state
    placed = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return jax.tree.map(placed, state, state_shardings(config, train_config, mesh, objective))


def state_shardings(
    config: DecoderConfig, train_config: TrainConfig, mesh: Mesh, objective: Objective | None = None
) -> TrainState:
    """A `NamedSharding` for every leaf of the state: moments lie where their weights do.

    Moments in pages are replicated: a page holds parts of no particular axis.
    """
    params = (objective or Objective(config=config)).shardings(mesh)
    everywhere = replicated(mesh)
    moments = params if train_config.page_size is None else jax.tree.map(lambda _: everywhere, params)
    return TrainState(params, AdamState(everywhere, moments, moments))


def make_train_step(
    config: DecoderConfig, train_config: TrainConfig, mesh: Mesh | None = None, objective: Objective | None = None
) -> Step:
    """The jitted step of a run.

    Args:
        config: the decoder.
        train_config: the run: optimizer, accumulation, dropout, dtype, attention, block checkpointing.
        mesh: the mesh that the state and the batches lie on, or None for one device.
        objective: what is trained and minimised; None for all weights of the decoder, on the next token.

    Returns:
        step(state, batch, number, *objective.frozen) -> (state, `StepMetrics`). The state alone is donated. `batch`
        maps "tokens" and "targets" to int32 [B, T], and optionally "weights" to float32, "segment_ids" and "positions"
        to int32, of that shape; B is batch_size × grad_accumulation_steps, and row r belongs to micro-batch
        r mod grad_accumulation_steps.
        `number` is the number of updates made so far; where it is not the state's, nothing changes and `ok` is False.
        The loss is Σ loss / Σ counted over all micro-batches and devices.

    Raises:
        ShapeError: while tracing, if the batch does not have B rows.
    """
    objective = (objective or Objective(config=config)).with_dropout(train_config.dropout)
    micro_batches = train_config.grad_accumulation_steps
    rate = _rate(train_config)
    _, update = make_optimizer(config, train_config, objective)
    dropout = streams(train_config.seed).dropout if objective.is_random else None
    where = None if mesh is None else state_shardings(config, train_config, mesh, objective)
    everywhere = None if mesh is None else replicated(mesh)
    options = {
        "attention": train_config.attention,
        "grad_checkpoint": train_config.grad_checkpoint,
        "dtype": train_config.dtype,  # said, not left to the params: a frozen base may be stored in another
    }

    def gradients(
        params: PyTree, batch: Mapping[str, Any], frozen: tuple[PyTree, ...], key: Any, reduction: str
    ) -> tuple[Array, Figures, PyTree]:
        def loss(params: PyTree) -> tuple[Array, Figures]:
            return objective.loss(params, batch, *frozen, reduction=reduction, dropout_key=key, **options)

        (value, figures), grads = riftco.value_and_grad(loss, has_aux=True)(params)
        return value, figures, (grads if where is None else jax.lax.with_sharding_constraint(grads, where.params))

    def key_of(number: Any, index: Any) -> Any:
        return None if dropout is None else jax.random.fold_in(jax.random.fold_in(dropout, number), index)

    def whole(params: PyTree, batch: Mapping[str, Any], number: Any, frozen: Any) -> tuple[Array, Figures, PyTree]:
        return gradients(params, batch, frozen, key_of(number, 0), "mean")

    def accumulated(
        params: PyTree, batch: Mapping[str, Any], number: Any, frozen: Any
    ) -> tuple[Array, Figures, PyTree]:
        def summed(params: PyTree, micro_batch: Any) -> Any:
            index, rows = micro_batch
            loss, figures, grads = gradients(params, rows, frozen, key_of(number, index), "sum")
            return (loss, objective.count(rows)), (figures, grads)

        split = lambda array: jnp.swapaxes(array.reshape(-1, micro_batches, *array.shape[1:]), 0, 1)
        indices = jnp.arange(micro_batches, dtype=jnp.int32)
        result = accumulate(summed, params, (indices, jax.tree.map(split, batch)))
        return result.loss, *result.gradients

    def step(
        state: TrainState, batch: Mapping[str, Any], number: Any, *frozen: PyTree
    ) -> tuple[TrainState, StepMetrics]:
        _check_batch(batch, train_config.rows_per_step)
        number = jnp.asarray(number, jnp.int32)
        # Every device works on its own rows with whole weights: left to itself the partitioner would split the products
        # instead, and exchange activations in every layer.
        gathered = state.params if mesh is None else jax.lax.with_sharding_constraint(state.params, everywhere)
        with in_context(mesh):
            work = whole if micro_batches == 1 else accumulated
            loss, figures, grads = work(gathered, batch, number, frozen)
        goes_on = jnp.isfinite(loss) & (number == state.optimizer.step)
        params, optimizer, stats = update(_poisoned(grads, goes_on), state.optimizer, state.params)
        learning_rate = rate(state.optimizer.step)
        counted = _counted(batch)
        metrics = StepMetrics(loss, stats.grad_norm, stats.clip_scale, learning_rate, counted, stats.ok, figures)
        return TrainState(params, optimizer), metrics

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(where, batch_sharding(mesh), everywhere, *(everywhere for _ in objective.frozen)),
        out_shardings=(where, everywhere),
    )


def _counted(batch: Mapping[str, Any]) -> Array:
    """How many targets count."""
    weights = batch.get("weights")
    return jnp.int32(batch["targets"].size) if weights is None else jnp.sum(weights != 0, dtype=jnp.int32)


def _poisoned(grads: PyTree, goes_on: Array) -> PyTree:
    """The gradients, with NaN added to the smallest leaf where the step must not take effect; Adam then refuses it."""
    leaves, structure = jax.tree.flatten(grads)
    smallest = min(range(len(leaves)), key=lambda index: leaves[index].size)
    leaf = leaves[smallest]
    leaves[smallest] = jnp.where(goes_on, leaf, jnp.full_like(leaf, jnp.nan))
    return jax.tree.unflatten(structure, leaves)


def _check_batch(batch: Mapping[str, Any], rows: int) -> None:
    tokens = batch["tokens"]
    if tokens.ndim != 2 or tokens.shape[0] != rows:
        raise ShapeError(
            f"train step: tokens must be [B, T] with B = batch_size × grad_accumulation_steps = {rows}; got "
            f"{list(tokens.shape)}; give the source that many rows"
        )
    chex.assert_equal_shape([array for array in batch.values() if array is not None])
