"""Matrix products, the rotary embedding, and losses."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from riftco import ops, oracle
from riftco.errors import ConfigError, DTypeError, IndexRangeError, ShapeError
from riftco.ops.spec.kinds import BadInput, Draw, OpSpec, Sample, call

_X = jnp.ones((2, 3))
_IDS = jnp.array([0, 1])

_MATMUL = OpSpec(
    "matmul",
    "product",
    (
        Sample("matrices", lambda draw: call(draw.normal(2, 3), draw.normal(3, 5))),
        Sample("batches", lambda draw: call(draw.normal(2, 1, 3), draw.normal(2, 3, 4))),
        Sample("vectors as matrices", lambda draw: call(draw.normal(1, 7), draw.normal(7, 1))),
    ),
    (
        BadInput("inner size", lambda: ops.matmul(_X, _X), ShapeError, "[..., M, N] and [..., N, O]"),
        BadInput("rank 1", lambda: ops.matmul(_X, jnp.ones(3)), ShapeError, "[..., M, N] and [..., N, O]"),
        BadInput("two dtypes", lambda: ops.matmul(_X, jnp.ones((3, 2), jnp.bfloat16)), DTypeError, "one dtype"),
    ),
)

_EINSUM = OpSpec(
    "einsum",
    "product",
    (
        Sample("product", lambda draw: call(draw.normal(2, 3), draw.normal(3, 5), spec="ij,jk->ik")),
        Sample("heads", lambda draw: call(draw.normal(1, 2, 2, 3), draw.normal(1, 4, 2, 3), spec="bthk,bshk->bhts")),
        Sample(
            "three",
            lambda draw: call(draw.normal(2), draw.normal(2, 3), draw.normal(3), spec="i,ij,j->"),
            thorough=True,
        ),
        Sample(
            "axes summed alone", lambda draw: call(draw.normal(2, 3, 4), draw.normal(4), spec="abc,c->b"), thorough=True
        ),
        Sample("one operand", lambda draw: call(draw.normal(2, 3), spec="ab->ba")),
    ),
    (
        BadInput("no arrow", lambda: ops.einsum("ij,jk", _X, _X), ShapeError, "'->'"),
        BadInput("sizes", lambda: ops.einsum("ij,jk->ik", _X, _X), ShapeError, "one size a letter"),
        BadInput("repeated letter", lambda: ops.einsum("ii->i", _X), ShapeError, "once"),
    ),
    run=lambda *operands, spec: ops.einsum(spec, *operands),
    forward=lambda *operands, spec: oracle.einsum(spec, *operands),
    backward=lambda args, dy, kwargs: oracle.einsum_vjp(kwargs["spec"], *args, dy),
)

_LINEAR = OpSpec(
    "linear",
    "product",
    (
        Sample("bias", lambda draw: call(draw.normal(2, 3), draw.normal(4, 3), draw.normal(4))),
        Sample("no bias, rank 3", lambda draw: call(draw.normal(2, 1, 3), draw.normal(5, 3)), thorough=True),
        Sample("one vector", lambda draw: call(draw.normal(3), draw.normal(1, 3), draw.normal(1))),
    ),
    (
        BadInput("sizes", lambda: ops.linear(_X, jnp.ones((3, 2))), ShapeError, "weight [O, I]"),
        BadInput("bias", lambda: ops.linear(_X, jnp.ones((4, 3)), jnp.ones(3)), ShapeError, "bias [D]"),
        BadInput("two dtypes", lambda: ops.linear(_X, jnp.ones((4, 3), jnp.bfloat16)), DTypeError, "one dtype"),
    ),
)

_ADD_BIAS = OpSpec(
    "add_bias",
    "reduction",
    (
        Sample("matrix", lambda draw: call(draw.normal(2, 3), draw.normal(3))),
        Sample("rank 3", lambda draw: call(draw.normal(2, 1, 5), draw.normal(5))),
        Sample("vector", lambda draw: call(draw.normal(3), draw.normal(3))),
    ),
    (
        BadInput("sizes", lambda: ops.add_bias(_X, jnp.ones(2)), ShapeError, "bias [D]"),
        BadInput("rank", lambda: ops.add_bias(_X, jnp.ones((2, 3))), ShapeError, "bias [D]"),
    ),
)


def _rope_call(draw: Draw, batch: int, time: int, heads: int, width: int, *, rows: bool = False) -> Any:
    angles = draw.normal(*((batch,) if rows else ()), time, width // 2)
    return call(draw.normal(batch, time, heads, width), np.cos(angles), np.sin(angles))


_Q = jnp.ones((1, 2, 1, 4))

_ROPE = OpSpec(
    "rope",
    "product",
    (
        Sample("one table", lambda draw: _rope_call(draw, 2, 3, 2, 4)),
        Sample("a table a row", lambda draw: _rope_call(draw, 2, 3, 1, 2, rows=True), thorough=True),
        Sample("one position", lambda draw: _rope_call(draw, 1, 1, 3, 6)),
    ),
    (
        BadInput(
            "odd width",
            lambda: ops.rope(jnp.ones((1, 2, 1, 3)), jnp.ones((2, 1)), jnp.ones((2, 1))),
            ShapeError,
            "K even",
        ),
        BadInput("table", lambda: ops.rope(_Q, jnp.ones((2, 4)), jnp.ones((2, 4))), ShapeError, "cos and sin must be"),
        BadInput(
            "two dtypes",
            lambda: ops.rope(_Q, jnp.ones((2, 2), jnp.bfloat16), jnp.ones((2, 2), jnp.bfloat16)),
            DTypeError,
            "one dtype",
        ),
    ),
)

# ------------------------------------------------------------------------------------------------ losses


def _ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


_OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01}

_CROSS_ENTROPY = OpSpec(
    "cross_entropy",
    "normalized",
    (
        Sample("mean", lambda draw: call(draw.normal(4, 5), draw.integers(5, 4))),
        Sample("sum of a batch", lambda draw: call(draw.normal(2, 2, 5), draw.integers(5, 2, 2), reduction="sum")),
        Sample("scalar target", lambda draw: call(draw.normal(5), np.int32(2))),
        Sample(
            "weights", lambda draw: call(draw.normal(4, 5), draw.integers(5, 4), weights=np.array([0.5, 0, 2, 1.0]))
        ),
        Sample(
            "ignored", lambda draw: call(draw.normal(4, 5), _ids(0, -100, 4, -100), ignore_index=-100), thorough=True
        ),
        Sample(
            "smoothing and z-loss", lambda draw: call(draw.normal(4, 5), draw.integers(5, 4), **_OPTIONS), thorough=True
        ),
        Sample(
            "time range", lambda draw: call(draw.normal(2, 2, 5), draw.integers(5, 2, 2), time_range=(1, 1), **_OPTIONS)
        ),
        Sample("nothing counted", lambda draw: call(draw.normal(4, 5), _ids(-1, -1, -1, -1), ignore_index=-1)),
        Sample("±1e4", lambda draw: call(np.array([[1e4, -1e4, 0.0]]), _ids(1)), differences=0),
        Sample(
            "bad ids where nothing is counted",
            lambda draw: call(draw.normal(4, 5), _ids(99, 1, -3, 2), weights=np.array([0.0, 1.0, 0.0, 0.5])),
        ),
        Sample("bad id", lambda draw: call(draw.normal(3, 5), _ids(1, 5, 2)), jit_only=True),
        Sample("negative id", lambda draw: call(draw.normal(3, 5), _ids(1, -1, 2)), jit_only=True),
    ),
    (
        BadInput("id", lambda: ops.cross_entropy(_X, jnp.array([0, 3])), IndexRangeError, "must be in [0, 3)"),
        BadInput("negative id", lambda: ops.cross_entropy(_X, jnp.array([0, -1])), IndexRangeError, "got -1"),
        BadInput("shapes", lambda: ops.cross_entropy(_X, jnp.zeros((2, 3), jnp.int32)), ShapeError, "[..., V]"),
        BadInput("float targets", lambda: ops.cross_entropy(_X, jnp.ones(2)), DTypeError, "integer dtype"),
        BadInput("smoothing", lambda: ops.cross_entropy(_X, _IDS, label_smoothing=1.0), ConfigError, "[0, 1)"),
        BadInput("z-loss", lambda: ops.cross_entropy(_X, _IDS, z_loss=-1.0), ConfigError, "negative"),
        BadInput("reduction", lambda: ops.cross_entropy(_X, _IDS, reduction="max"), ConfigError, "'mean' or 'sum'"),
        BadInput("time range", lambda: ops.cross_entropy(_X, _IDS, time_range=(1, 2)), ShapeError, "time range"),
        BadInput("weights", lambda: ops.cross_entropy(_X, _IDS, weights=jnp.ones(3)), ShapeError, "weights must be"),
    ),
    backward=lambda args, dy, kwargs: oracle.cross_entropy_vjp(args[0], args[1], dy, **kwargs)[
        :2
    ],  # the third is its weights'
)


def _linear_loss(x: Any, weight: Any, targets: Any, bias: Any = None, **options: Any) -> Any:
    return ops.linear_cross_entropy(x, weight, targets, bias=bias, **options)


def _linear_loss_twin(x: Any, weight: Any, targets: Any, bias: Any = None, **options: Any) -> Any:
    options.pop("chunk_size", None)
    return oracle.linear_cross_entropy(x, weight, targets, bias=bias, **options)


def _linear_loss_vjp(args: tuple[Any, ...], dy: Any, kwargs: Any) -> tuple[Any, ...]:
    options = {name: value for name, value in kwargs.items() if name != "chunk_size"}
    x, weight, targets, bias = (*args, None)[:4]
    return oracle.linear_cross_entropy_vjp(x, weight, targets, dy, bias=bias, **options)


_HEAD = jnp.ones((4, 3))

_LINEAR_CROSS_ENTROPY = OpSpec(
    "linear_cross_entropy",
    "loss",
    (
        Sample("one chunk", lambda draw: call(draw.normal(4, 3), draw.normal(5, 3), draw.integers(5, 4))),
        Sample(
            "three chunks, the last filled up",
            lambda draw: call(draw.normal(7, 3), draw.normal(5, 3), draw.integers(5, 7), draw.normal(5), chunk_size=3),
            thorough=True,
        ),
        Sample(
            "all options",
            lambda draw: call(
                draw.normal(2, 4, 3),
                draw.normal(5, 3),
                np.where(draw.booleans(2, 4), draw.integers(5, 2, 4), np.int32(-100)),
                draw.normal(5),
                weights=draw.positive(2, 4),
                ignore_index=-100,
                time_range=(1, 3),
                chunk_size=4,
                reduction="sum",
                **_OPTIONS,
            ),
            differences=0,
        ),
        Sample("one position", lambda draw: call(draw.normal(3), draw.normal(5, 3), np.int32(2)), differences=0),
        Sample(
            "bad id",
            lambda draw: call(draw.normal(4, 3), draw.normal(5, 3), _ids(1, 5, 2, 0), chunk_size=2),
            jit_only=True,
        ),
    ),
    (
        BadInput(
            "id", lambda: ops.linear_cross_entropy(_X, _HEAD, jnp.array([0, 4])), IndexRangeError, "must be in [0, 4)"
        ),
        BadInput("sizes", lambda: ops.linear_cross_entropy(_X, jnp.ones((4, 2)), _IDS), ShapeError, "weight [V, D]"),
        BadInput(
            "chunk size", lambda: ops.linear_cross_entropy(_X, _HEAD, _IDS, chunk_size=0), ConfigError, "chunk_size"
        ),
    ),
    run=_linear_loss,
    forward=_linear_loss_twin,
    backward=_linear_loss_vjp,
)

SPECS = (_MATMUL, _EINSUM, _LINEAR, _ADD_BIAS, _ROPE, _CROSS_ENTROPY, _LINEAR_CROSS_ENTROPY)
