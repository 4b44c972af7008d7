"""Cross entropy from logits, and from the last hidden state without ever holding all logits."""

from typing import Any

import jax.numpy as jnp

from riftco.autodiff.box import unbox
from riftco.autodiff.control import scan
from riftco.autodiff.tape import Op
from riftco.errors import ConfigError, ShapeError
from riftco.ops import validate
from riftco.ops.elementwise import astype, exp, where
from riftco.ops.linalg import add_bias, dot
from riftco.ops.norm import statistics_dtype
from riftco.ops.reduce import logsumexp, sum
from riftco.ops.shape import broadcast_to, concatenate, reshape
from riftco.types import Array


def _columns(values: Any, shape: Any) -> Any:
    """[N] repeated along the vocabulary to [N, V]."""
    return broadcast_to(reshape(values, (shape[0], 1)), tuple(shape))


def _one_hot(targets: Any, size: int) -> Any:
    return targets[:, None] == jnp.arange(size, dtype=targets.dtype)[None, :]


def _poisoned(weights: Any, targets: Any, size: int) -> Any:
    """The weights, NaN where a counted target is outside the vocabulary: the gradient must not look sound."""
    wrong = ((targets < 0) | (targets >= size)) & (unbox(weights) != 0)
    return where(wrong, jnp.nan, weights)


def _rows(logits: Any, targets: Any, weights: Any, smoothing: float, z_loss: float) -> tuple[Any, Any]:
    """The weighted sum of the losses of all rows [N, V], and each row's logsumexp [N]."""
    wide = astype(logits, statistics_dtype(logits))
    lse = logsumexp(wide, -1)
    hot = _one_hot(targets, wide.shape[1])
    loss = lse - sum(where(hot, wide, 0.0), -1) * (1.0 - smoothing)
    if smoothing:
        loss = loss - sum(wide, -1) * (smoothing / wide.shape[1])
    if z_loss:
        loss = loss + z_loss * (lse * lse)
    # A target outside the vocabulary poisons the result; a row that is not counted contributes exactly 0.
    valid = (targets >= 0) & (targets < wide.shape[1])
    loss = where(valid, loss, jnp.nan) * astype(weights, wide.dtype)
    return sum(where(unbox(weights) == 0, 0.0, loss)), lse


def _dlogits(logits: Any, lse: Any, targets: Any, scale: Any, smoothing: float, z_loss: float) -> Any:
    """d(sum of scaled losses)/dlogits: scale * ((1 + 2 z lse) p - (1 - s) onehot - s/V)."""
    wide, shape = astype(logits, statistics_dtype(logits)), logits.shape
    p = exp(wide - _columns(lse, shape))
    if z_loss:
        p = p * _columns(1.0 + (2.0 * z_loss) * lse, shape)
    if smoothing:
        p = p - smoothing / shape[1]
    d = where(_one_hot(targets, shape[1]), p - (1.0 - smoothing), p) * _columns(scale, shape)
    idle = jnp.broadcast_to((unbox(scale) == 0)[:, None], shape)
    return astype(where(idle, 0.0, d), logits.dtype)


def _cross_entropy_fwd(logits: Any, targets: Any, weights: Any, smoothing: float, z_loss: float) -> Any:
    total, lse = _rows(logits, targets, weights, smoothing, z_loss)
    return total, (logits, lse, targets, weights)


def _cross_entropy_bwd(saved: Any, ct: Any, smoothing: float, z_loss: float) -> Any:
    logits, lse, targets, weights = saved
    scale = astype(_poisoned(weights, targets, logits.shape[1]), lse.dtype) * broadcast_to(ct, weights.shape)
    return _dlogits(logits, lse, targets, scale, smoothing, z_loss), None, None


_cross_entropy = Op(
    "cross_entropy",
    impl=lambda logits, targets, weights, **options: _rows(logits, targets, weights, **options)[0],
    fwd=_cross_entropy_fwd,
    bwd=_cross_entropy_bwd,
)


def _counted(who: str, targets: Any, size: int, weights: Any, ignore_index: Any, time_range: Any) -> Any:
    """The weight of each target: the given one, 0 where it is ignored or outside the range."""
    w = jnp.ones(targets.shape, jnp.float32) if weights is None else validate.floating(who, "weights", weights)
    validate.require(
        who, tuple(w.shape) == tuple(targets.shape), f"weights must be {list(targets.shape)}, as targets", list(w.shape)
    )
    if ignore_index is not None:
        w = jnp.where(targets == ignore_index, 0.0, w)
    if time_range is not None:
        offset, count = time_range
        time = targets.shape[-1] if targets.ndim else 0
        if not (0 <= offset and count >= 1 and offset + count <= time):
            raise ShapeError(f"{who}: the time range must lie inside [0, {time}); got offset {offset}, count {count}.")
        t = jnp.arange(time)
        inside = jnp.broadcast_to((t >= offset) & (t < offset + count), w.shape)
        w = jnp.where(inside, w, 0.0)
    if validate.concrete(targets) is not None and validate.concrete(w) is not None:
        validate.in_range(who, "targets that are counted", jnp.where(w == 0, 0, targets), size)
    return w


def _check_options(who: str, label_smoothing: float, z_loss: float, reduction: str) -> None:
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(f"{who}: label_smoothing must be in [0, 1); got {label_smoothing}.")
    if z_loss < 0.0:
        raise ConfigError(f"{who}: z_loss must not be negative; got {z_loss}.")
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"{who}: reduction must be 'mean' or 'sum'; got {reduction!r}.")


def _reduce(total: Any, weights: Any, reduction: str) -> Any:
    if reduction == "sum":
        return total
    count = jnp.sum(weights.astype(total.dtype))
    return total / jnp.where(count == 0, jnp.ones((), total.dtype), count)


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    weights: Array | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    time_range: tuple[int, int] | None = None,
    reduction: str = "mean",
) -> Array:
    """The mean negative log-likelihood, in nats, of the targets under the softmax of the logits.

    A counted position contributes `(1-s) (-log p[target]) + s mean_v(-log p[v]) + z logsumexp²`, times its weight; the
    mean divides by the sum of the weights, and is 0 when nothing is counted. Computed in float32 or wider.

    Args:
        logits: floating array [..., V].
        targets: integer array [...], entries in [0, V).
        weights: floating array like targets; not differentiated.
        ignore_index: targets equal to it are not counted.
        label_smoothing: s, in [0, 1).
        z_loss: z, at least 0.
        time_range: (offset, count) on the targets' last axis; positions outside are not counted.
        reduction: "mean" or "sum".

    Returns:
        A scalar.

    Raises:
        ShapeError: if shapes differ. IndexRangeError: if a concrete counted target is outside [0, V); under jit the
        result is NaN. ConfigError: if an option is out of range.

    Gradient:
        dlogits = weight/total * ((1 + 2 z lse) p - (1-s) onehot - s/V), exactly 0 where nothing is counted. Saves the
        logits and each row's logsumexp. Any order.
    """
    who = "cross_entropy"
    logits = validate.floating(who, "logits", logits)
    targets = validate.wide_integer(validate.integer(who, "targets", targets))
    fits = logits.ndim >= 1 and tuple(logits.shape[:-1]) == tuple(targets.shape)
    validate.require(
        who, fits, "logits must be [..., V] for targets [...]", f"{list(logits.shape)}, {list(targets.shape)}"
    )
    _check_options(who, label_smoothing, z_loss, reduction)
    w = _counted(who, targets, logits.shape[-1], weights, ignore_index, time_range)
    flat = reshape(logits, (-1, logits.shape[-1]))
    total = _cross_entropy(flat, jnp.reshape(targets, -1), jnp.reshape(w, -1), smoothing=label_smoothing, z_loss=z_loss)
    return _reduce(total, w, reduction)


# ------------------------------------------------------------------------------------------------ fused with the head


def _logits(x: Any, weight: Any, bias: Any) -> Any:
    out = dot(x, weight, contract=(1, 1))
    return out if bias is None else add_bias(out, bias)


def _chunked_value(xs: Any, targets: Any, ws: Any, weight: Any, bias: Any, smoothing: float, z_loss: float) -> Any:
    def body(total: Any, chunk: Any, weight: Any, bias: Any) -> Any:
        x, t, w = chunk
        return total + _rows(_logits(x, weight, bias), t, w, smoothing, z_loss)[0], ()

    zero = jnp.zeros((), statistics_dtype(xs))
    return scan(body, zero, (xs, targets, ws), weight, bias)[0]


def _chunked_fwd(
    xs: Any, targets: Any, ws: Any, weight: Any, bias: Any, smoothing: float, z_loss: float, needs: tuple[bool, ...]
) -> Any:
    """The value, and at once the gradients for a unit cotangent: no logits outlive their chunk, none is made twice."""
    dtype = statistics_dtype(xs)
    wanted = [p if needed else None for p, needed in zip((weight, bias), (*needs[3:], False), strict=False)]

    def body(carry: Any, chunk: Any, weight: Any, bias: Any) -> Any:
        total, dweight, dbias = carry
        x, t, w = chunk
        logits = _logits(x, weight, bias)
        value, lse = _rows(logits, t, w, smoothing, z_loss)
        d = _dlogits(logits, lse, t, astype(_poisoned(w, t, weight.shape[0]), dtype), smoothing, z_loss)
        dbias = None if dbias is None else dbias + astype(sum(d, 0), dtype)
        dweight = None if dweight is None else dweight + astype(dot(d, x, contract=(0, 0)), dtype)
        return (total + value, dweight, dbias), dot(d, weight, contract=(1, 0))

    start = (
        jnp.zeros((), dtype),
        *(None if p is None else jnp.zeros(p.shape, dtype) for p in wanted),
    )
    (total, dweight, dbias), dxs = scan(body, start, (xs, targets, ws), weight, bias)
    dweight, dbias = (None if p is None else astype(d, p.dtype) for d, p in zip((dweight, dbias), wanted, strict=True))
    return total, (dxs, dweight, dbias)


def _chunked_bwd(saved: Any, ct: Any, smoothing: float, z_loss: float) -> Any:
    dxs, dweight, dbias = saved
    scaled = [None if d is None else d * broadcast_to(astype(ct, d.dtype), d.shape) for d in (dxs, dweight, dbias)]
    return scaled[0], None, None, scaled[1], scaled[2]


_chunked = Op("linear_cross_entropy", impl=_chunked_value, fwd=_chunked_fwd, bwd=_chunked_bwd, takes_needs=True)


def linear_cross_entropy(
    x: Array,
    weight: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    weights: Array | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    time_range: tuple[int, int] | None = None,
    reduction: str = "mean",
    chunk_size: int = 512,
) -> Array:
    """`cross_entropy(linear(x, weight, bias), targets, ...)`, never holding the logits of more than one chunk.

    Args:
        x: last hidden states [..., D].
        weight: the head [V, D], of x's dtype.
        targets: integer array [...].
        bias: [V], or None.
        weights: as `cross_entropy`.
        ignore_index: as `cross_entropy`.
        label_smoothing: as `cross_entropy`.
        z_loss: as `cross_entropy`.
        time_range: as `cross_entropy`.
        reduction: as `cross_entropy`.
        chunk_size: how many positions' logits exist at a time.

    Returns:
        A scalar.

    Raises:
        As `cross_entropy` and `linear`.

    Gradient:
        computed chunk by chunk beside the value, from dlogits: dx = dlogits W, dW = dlogitsᵀ x, db = sum dlogits.
        Saves dx, and of the other two what is wanted. Any order.
    """
    who = "linear_cross_entropy"
    x, weight = validate.floating(who, "x", x), validate.floating(who, "weight", weight)
    targets = validate.wide_integer(validate.integer(who, "targets", targets))
    validate.same_dtype(who, x, weight, *(() if bias is None else (bias,)))
    fits = x.ndim >= 1 and weight.ndim == 2 and x.shape[-1] == weight.shape[1] and x.shape[:-1] == targets.shape
    validate.require(
        who,
        fits,
        "x must be [..., D], weight [V, D] and targets [...]",
        f"{list(x.shape)}, {list(weight.shape)} and {list(targets.shape)}",
    )
    _check_options(who, label_smoothing, z_loss, reduction)
    if chunk_size < 1:
        raise ConfigError(f"{who}: chunk_size must be at least 1; got {chunk_size}.")
    w = _counted(who, targets, weight.shape[0], weights, ignore_index, time_range)
    flat, t, flat_w = reshape(x, (-1, x.shape[-1])), jnp.reshape(targets, -1), jnp.reshape(w, -1)
    n = flat.shape[0]
    chunks = max(1, -(-n // chunk_size))
    size = -(-n // chunks)
    missing = chunks * size - n  # rows of weight 0 fill the last chunk
    if missing:
        flat = concatenate([flat, jnp.zeros((missing, flat.shape[1]), flat.dtype)], 0)
        t, flat_w = jnp.pad(t, (0, missing)), jnp.pad(flat_w, (0, missing))
    total = _chunked(
        reshape(flat, (chunks, size, flat.shape[1])),
        jnp.reshape(t, (chunks, size)),
        jnp.reshape(flat_w, (chunks, size)),
        weight,
        bias,
        smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return _reduce(total, w, reduction)
