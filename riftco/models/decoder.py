"""The decoder: one forward pass for every family, and its loss.

Blocks are pre-norm: `a = x + Attention(norm(x))`, `y = a + FeedForward(norm(a))`. They run under one `riftco.scan` over
the stacked layer axis, so compile time does not grow with depth. Incremental decoding is in decoding.py.
"""

import functools
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from riftco import layers, ops
from riftco.autodiff import checkpoint, scan
from riftco.autodiff.box import is_floating
from riftco.errors import ConfigError, ShapeError
from riftco.models.adapters import Adapters, attach, with_draw
from riftco.models.config import DecoderConfig
from riftco.models.rotary_tables import rope_tables
from riftco.tree import describe
from riftco.types import Array, Key, PyTree

# Above this many logits at a time the head and the loss are fused and run in chunks.
_FUSED_LOSS_LOGITS = 2**24
_LOSS_CHUNK = 512  # positions whose logits exist at a time


@dataclass(frozen=True)
class Block:
    """One layer as a scan body; hashable and equal for equal options, so a recorded scan is not traced twice."""

    config: DecoderConfig
    attention: str | None = None
    dtype: Any = None
    dropout: bool = False

    def __call__(self, x: Array, layer: PyTree, shared: PyTree) -> tuple[Array, tuple[()]]:
        """Carry [B, T, D] through one layer.

        Args:
            x: the residual stream.
            layer: the layer's params, and its dropout key where there is dropout.
            shared: what all layers read: rotary tables and segment ids, each possibly None.
        """
        chex.assert_rank(x, 3)
        params, key = layer
        rope, segment_ids = shared
        config = self.config
        params = cast(params, self.dtype)
        attend = functools.partial(
            ops.attention,
            window=config.sliding_window,
            q_segment_ids=segment_ids,
            kv_segment_ids=segment_ids,
            implementation=self.attention,
        )
        branch = layers.attention(
            params["attention"],
            layers.norm(params["attention_norm"], x, eps=config.norm_eps),
            head_dim=config.head_dim,
            eps=config.norm_eps,
            rope=rope,
            attend=attend,
        )
        x = x + self._drop(branch, key, 0)
        branch = layers.feed_forward(
            params["feed_forward"], layers.norm(params["feed_forward_norm"], x, eps=config.norm_eps), mlp=config.mlp
        )
        return x + self._drop(branch, key, 1), ()

    def _drop(self, x: Array, key: Any, which: int) -> Array:
        return ops.dropout(x, jax.random.fold_in(key, which), self.config.dropout) if self.dropout else x


def cast(params: PyTree, dtype: Any) -> PyTree:
    """Floating leaves in the compute dtype; gradients come back in the params' own.

    Packed weights stay as they are: their numbers are decoded to the dtype of what they are multiplied with.
    """
    if dtype is None:
        return params
    return jax.tree_util.tree_map(
        lambda leaf: ops.astype(leaf, dtype) if is_floating(leaf) else leaf,
        params,
        is_leaf=lambda node: isinstance(node, ops.NF4Array),
    )


def embed(params: PyTree, tokens: Array, config: DecoderConfig, positions: Any, dtype: Any) -> Array:
    """Token rows plus, for learned positions, position rows: [B, T, D].

    Args:
        params: the model's.
        tokens: [B, T].
        config: its configuration.
        positions: int [T] or [B, T]; None for 0 .. T-1.
        dtype: compute dtype or None.
    """
    x = layers.embedding(params["token_embedding"], tokens)
    if config.position == "learned":
        table = params["position_embedding"]["weight"]
        if positions is None:
            rows = ops.slice(table, (0, 0), (tokens.shape[1], config.width))
        else:
            rows = ops.take(table, positions, 0)
        x = x + ops.broadcast_to(rows, x.shape)
    return x if dtype is None else ops.astype(x, dtype)


def rope_for(config: DecoderConfig, length: int, positions: Any, dtype: Any) -> tuple[Array, Array] | None:
    """The rotary tables that `positions` need, or None for learned positions."""
    if config.position != "rope":
        return None
    if positions is None:
        return rope_tables(config, np.arange(length), dtype)
    tables = rope_tables(config, np.arange(config.context), dtype)
    return tuple(ops.take(table, positions, 0) for table in tables)  # type: ignore[return-value]


def _check_tokens(tokens: Any, config: DecoderConfig, positions: Any) -> tuple[Any, Any]:
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ShapeError(f"forward: tokens must be integers [B, T]; got {describe(tokens)}.")
    if tokens.shape[1] > config.context and positions is None:
        raise ShapeError(
            f"forward: at most {config.context} positions fit the context; got {tokens.shape[1]}. Cut the row, or "
            "generate with riftco.generate, which slides."
        )
    if positions is not None:
        positions = jnp.asarray(positions)
        if positions.shape not in (tokens.shape, tokens.shape[1:]):
            raise ShapeError(f"forward: positions must be [T] or [B, T]; got {describe(positions)}.")
        if positions.ndim == 1:
            positions = jnp.broadcast_to(positions, tokens.shape)
    return tokens, positions


def hidden_states(
    params: PyTree,
    tokens: Array,
    config: DecoderConfig,
    *,
    attention: str | None = None,
    grad_checkpoint: str = "none",
    dropout_key: Key | None = None,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    dtype: Any = None,
    unroll: int | bool = 1,
    adapters: Adapters | None = None,
) -> Array:
    """The stream after the last block and the final norm, [B, T, D]; options as `forward`."""
    params = attach(params, adapters, config, dropout_key)
    if grad_checkpoint not in ("none", "block"):
        raise ConfigError(f"forward: grad_checkpoint must be 'none' or 'block'; got {grad_checkpoint!r}.")
    tokens, positions = _check_tokens(tokens, config, positions)
    dtype = None if dtype is None else jnp.dtype(dtype)
    x = embed(params, tokens, config, positions, dtype)
    keys = None
    if dropout_key is not None and config.dropout > 0.0:
        keys = jax.random.split(jax.random.fold_in(dropout_key, 1), config.layers)
        x = ops.dropout(x, jax.random.fold_in(dropout_key, 0), config.dropout)
    block = Block(config, attention, dtype, keys is not None)
    body = checkpoint(block) if grad_checkpoint == "block" else block
    shared = (rope_for(config, tokens.shape[1], positions, x.dtype), segment_ids)
    x, _ = scan(body, x, (params["blocks"], keys), shared, unroll=unroll)
    return layers.norm(cast(params["final_norm"], dtype), x, eps=config.norm_eps)


def head(params: PyTree, config: DecoderConfig, dtype: Any) -> PyTree:
    """What `layers.linear` needs for the language-model head; a tied one has the embedding's weight [V, D]."""
    own = params.get("language_model_head", {})
    return cast({**own, "weight": params["token_embedding"]["weight"]} if config.tie_embeddings else own, dtype)


def _attached(params: PyTree, config: DecoderConfig, options: dict[str, Any]) -> tuple[PyTree, dict[str, Any]]:
    """The params with their adapters beside them, and the options that are left."""
    rest = {name: value for name, value in options.items() if name != "adapters"}
    return attach(params, options.get("adapters"), config, options.get("dropout_key")), rest


def forward(params: PyTree, tokens: Array, config: DecoderConfig, **options: Any) -> Array:
    """Logits of every position.

    Args:
        params: as `riftco.models.init` makes them, or packed (`riftco.tune.quantize`).
        tokens: integers [B, T], T <= context, entries in [0, V).
        config: the configuration that the params belong to.
        **options: `attention`, an implementation of `ops.attention` or None for the fastest; `grad_checkpoint`, "none"
            or "block"; `dropout_key`, a key that turns dropout on; `segment_ids`, int [B, T], positions attend within
            their own segment; `positions`, int [T] or [B, T]; `dtype`, the compute dtype (None for the params' own);
            `unroll`, how many layers of the scan are laid out in one iteration; `adapters`, low-rank adapters beside
            the linear layers (`riftco.tune.lora_init`), or None.

    Returns:
        [B, T, V] in the compute dtype.

    Raises:
        ShapeError: if the tokens do not fit. IndexRangeError: for a concrete id out of range; under jit its row is NaN.
    """
    params, options = _attached(params, config, options)
    x = hidden_states(params, tokens, config, **options)
    return layers.linear(head(params, config, options.get("dtype")), x)


def loss(
    params: PyTree,
    tokens: Array,
    targets: Array,
    config: DecoderConfig,
    *,
    weights: Array | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **options: Any,
) -> Array:
    """The mean cross entropy, in nats, of the counted targets.

    Args:
        params: as `riftco.models.init` makes them, or packed (`riftco.tune.quantize`).
        tokens: integers [B, T].
        targets: integers [B, T]; what each position should predict.
        config: the configuration that the params belong to.
        weights: floating [B, T], how much each target counts; None for 1.
        reduction: "mean" over the counted targets, or "sum", for accumulation that is exact in tokens.
        label_smoothing: see `ops.cross_entropy`.
        z_loss: see `ops.cross_entropy`.
        **options: see `forward`.

    Returns:
        A scalar in float32 or wider. Large logits are never held whole: head and loss then run chunk by chunk.
    """
    params, options = _attached(params, config, options)
    x = hidden_states(params, tokens, config, **options)
    last = head(params, config, options.get("dtype"))
    extra = {"weights": weights, "reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss}
    targets = jnp.asarray(targets)
    if targets.size * config.vocab_size <= _FUSED_LOSS_LOGITS:
        return ops.cross_entropy(layers.linear(last, x), targets, **extra)
    if "adapter" in last or isinstance(last["weight"], ops.NF4Array):
        return _chunked_loss(last, x, targets, **extra)
    return ops.linear_cross_entropy(x, last["weight"], targets, bias=last.get("bias"), **extra)


def _chunked_loss(
    last: PyTree, x: Array, targets: Array, *, weights: Array | None, reduction: str, **extra: Any
) -> Array:
    """`linear_cross_entropy` for a head that is packed or adapted: each chunk's logits are made again for its gradient.

    Args:
        last: the head's params.
        x: [B, T, D].
        targets: integers [B, T].
        weights: floating [B, T], or None.
        reduction: "mean" or "sum".
        **extra: see `ops.cross_entropy`.
    """
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else jnp.asarray(weights)
    size = min(_LOSS_CHUNK, targets.size)
    missing = -targets.size % size  # rows of weight 0 fill the last chunk
    flat = ops.reshape(x, (-1, x.shape[-1]))
    if missing:
        flat = ops.concatenate([flat, jnp.zeros((missing, flat.shape[1]), flat.dtype)], 0)
    cut = lambda rows: jnp.pad(jnp.reshape(rows, -1), (0, missing)).reshape(-1, size)

    def chunk(x: Array, targets: Array, weights: Array, number: Array, last: PyTree) -> Array:
        last = with_draw(last, number)
        return ops.cross_entropy(layers.linear(last, x), targets, weights=weights, reduction="sum", **extra)

    def body(total: Array, rows: Any, last: PyTree) -> tuple[Array, tuple[()]]:
        return total + checkpoint(chunk)(*rows, last), ()

    chunks = flat.shape[0] // size
    rows = (ops.reshape(flat, (-1, size, flat.shape[1])), cut(targets), cut(weights), jnp.arange(chunks))
    total, _ = scan(body, jnp.zeros((), jnp.promote_types(x.dtype, jnp.float32)), rows, last)
    if reduction == "sum":
        return total
    count = jnp.sum(weights.astype(total.dtype))
    return total / jnp.where(count == 0, jnp.ones((), total.dtype), count)
