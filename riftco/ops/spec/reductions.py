"""Reductions, the functions normalised by one, and normalisation layers."""

import jax.numpy as jnp
import numpy as np

from riftco import ops
from riftco.errors import DomainError, DTypeError, ShapeError
from riftco.ops.spec.kinds import BadInput, OpSpec, Sample, call

_X = jnp.ones((2, 3))


def _reduction(name: str, *more: Sample, empty: bool) -> OpSpec:
    function = getattr(ops, name)
    bad = [
        BadInput("axis", lambda: function(_X, 2), ShapeError, "axis must be"),
        BadInput("integers", lambda: function(jnp.arange(3)), DTypeError, "floating dtype"),
    ]
    if empty:
        bad.append(BadInput("nothing", lambda: function(jnp.ones((2, 0)), 1), ShapeError, "must not be empty"))
    return OpSpec(
        name,
        "reduction",
        (
            Sample("everything", lambda draw: call(draw.normal(2, 3))),
            Sample("negative axis", lambda draw: call(draw.normal(2, 3), axis=-1)),
            Sample(
                "two axes, kept", lambda draw: call(draw.normal(2, 3, 4), axis=(0, 2), keepdims=True), thorough=True
            ),
            Sample("scalar", lambda draw: call(draw.normal())),
            *more,
        ),
        tuple(bad),
    )


def _softmax_like(name: str, *more: Sample) -> OpSpec:
    function = getattr(ops, name)
    return OpSpec(
        name,
        "normalized",
        (
            Sample("last axis", lambda draw: call(draw.normal(2, 5))),
            Sample("first axis", lambda draw: call(draw.normal(3, 2), axis=0), thorough=True),
            Sample("one entry", lambda draw: call(draw.normal(2, 1))),
            Sample("large", lambda draw: call(1e3 * draw.normal(2, 3)), differences=0),
            Sample(
                "some absent",
                lambda draw: call(np.array([[-np.inf, 0.5, 1.0], [2.0, -np.inf, -np.inf]])),
                differences=0,
            ),
            Sample("all absent", lambda _: call(np.array([[-np.inf, -np.inf], [0.0, 1.0]])), jit_only=True),
            *more,
        ),
        (
            BadInput("axis", lambda: function(_X, 2), ShapeError, "axis must be"),
            BadInput("integers", lambda: function(jnp.arange(3)), DTypeError, "floating dtype"),
            BadInput("all -inf", lambda: function(jnp.full((2, 3), -jnp.inf)), DomainError, "-inf alone"),
            BadInput("NaN", lambda: function(jnp.array([0.0, jnp.nan])), DomainError, "NaN or +inf"),
            BadInput("+inf", lambda: function(jnp.array([0.0, jnp.inf])), DomainError, "NaN or +inf"),
        ),
    )


_CUMSUM = OpSpec(
    "cumsum",
    "reduction",
    (
        Sample("last axis", lambda draw: call(draw.normal(2, 5))),
        Sample("first axis", lambda draw: call(draw.normal(3, 2), axis=0)),
        Sample("negative axis", lambda draw: call(draw.normal(2, 3, 4), axis=-2)),
    ),
    (
        BadInput("axis", lambda: ops.cumsum(_X, 2), ShapeError, "axis must be"),
        BadInput("integers", lambda: ops.cumsum(jnp.arange(3)), DTypeError, "floating dtype"),
    ),
)

_LAYER_NORM = OpSpec(
    "layer_norm",
    "normalized",
    (
        Sample("rows", lambda draw: call(draw.normal(2, 5), draw.normal(5), draw.normal(5))),
        Sample(
            "rank 3", lambda draw: call(draw.normal(2, 3, 4), draw.positive(4), draw.normal(4), eps=1e-3), thorough=True
        ),
        Sample("one row, far from 0", lambda draw: call(draw.normal(7) + 8.0, draw.normal(7), draw.normal(7))),
        Sample("constant row", lambda draw: call(np.full((1, 3), 2.0), draw.normal(3), draw.normal(3), eps=1.0)),
    ),
    (
        BadInput("scale", lambda: ops.layer_norm(_X, jnp.ones(2), jnp.ones(3)), ShapeError, "scale must be [D]"),
        BadInput("eps", lambda: ops.layer_norm(_X, jnp.ones(3), jnp.ones(3), eps=0.0), DomainError, "eps"),
        BadInput(
            "two dtypes",
            lambda: ops.layer_norm(_X, jnp.ones(3, jnp.bfloat16), jnp.ones(3)),
            DTypeError,
            "one dtype",
        ),
    ),
)

_RMS_NORM = OpSpec(
    "rms_norm",
    "normalized",
    (
        Sample("rows", lambda draw: call(draw.normal(2, 5), draw.normal(5))),
        Sample("rank 4", lambda draw: call(draw.normal(2, 3, 2, 4), draw.positive(4), eps=1e-6), thorough=True),
        Sample("zero row", lambda draw: call(np.zeros((1, 3)), draw.normal(3), eps=1.0)),
    ),
    (
        BadInput("scale", lambda: ops.rms_norm(_X, jnp.ones((1, 3))), ShapeError, "scale must be [D]"),
        BadInput("eps", lambda: ops.rms_norm(_X, jnp.ones(3), eps=-1.0), DomainError, "eps"),
    ),
)

_TIES = Sample("ties", lambda _: call(np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]]), axis=1), differences=0)

SPECS = (
    _reduction("sum", empty=False),
    _reduction("mean", empty=True),
    _reduction("max", _TIES, empty=True),
    _softmax_like("logsumexp", Sample("kept", lambda draw: call(draw.normal(2, 3), axis=0, keepdims=True))),
    _softmax_like("softmax"),
    _softmax_like("log_softmax"),
    _CUMSUM,
    _LAYER_NORM,
    _RMS_NORM,
)
