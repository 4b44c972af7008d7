"""Arithmetic, elementary functions and activations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco import ops, oracle
from riftco.errors import ConfigError, DomainError, DTypeError, ShapeError
from riftco.ops.spec.kinds import BadInput, OpSpec, Sample, call


def _integers(name: str) -> BadInput:
    return BadInput("integers", lambda: getattr(ops, name)(jnp.arange(3)), DTypeError, "floating dtype")


def _concrete(name: str, value: float, fragment: str) -> BadInput:
    return BadInput(f"entry {value}", lambda: getattr(ops, name)(jnp.array([1.0, value])), DomainError, fragment)


_ARRAY: Any = jnp.ones(3)
_EXTREME = [-1e3, -20.0, 0.0, 20.0, 1e3]


def _unary(name: str, *, positive: bool = False, extreme: bool = False, bad: tuple[BadInput, ...] = ()) -> OpSpec:
    def entries(*shape: int) -> Sample:
        return Sample(
            "x".join(map(str, shape)) or "scalar",
            lambda draw: call(draw.positive(*shape) if positive else draw.normal(*shape)),
        )

    samples = [entries(2, 3), entries(), entries(1, 5)]
    if extreme:
        samples.append(Sample("far out", lambda _: call(np.array(_EXTREME)), differences=0))
    return OpSpec(name, "elementwise", tuple(samples), (_integers(name), *bad))


def _binary(name: str, *, bad: tuple[BadInput, ...] = ()) -> OpSpec:
    function = getattr(ops, name)
    return OpSpec(
        name,
        "elementwise",
        (
            Sample("2x3", lambda draw: call(draw.normal(2, 3), draw.positive(2, 3))),
            Sample("scalars", lambda draw: call(draw.normal(), draw.positive())),
            Sample("number on the right", lambda draw: call(draw.normal(1, 5), 2.5)),
            Sample("number on the left", lambda draw: call(-3, draw.positive(2, 3)), thorough=True),
        ),
        (
            BadInput("broadcasting", lambda: function(jnp.ones((2, 3)), jnp.ones(3)), ShapeError, "broadcast_to"),
            BadInput("integers", lambda: function(jnp.arange(3), jnp.arange(3)), DTypeError, "floating dtype"),
            BadInput("two dtypes", lambda: function(jnp.ones(3), jnp.ones(3, jnp.bfloat16)), DTypeError, "one dtype"),
            *bad,
        ),
    )


def _with_ties(name: str) -> OpSpec:
    spec = _binary(name)
    tied = Sample("ties", lambda _: call(np.array([1.0, 2.0, -1.0]), np.array([1.0, 0.5, -1.0])), differences=1)
    return OpSpec(spec.name, spec.tolerance, (*spec.samples, tied), spec.bad_inputs)


# ------------------------------------------------------------------------------------------------ dropout, astype


def _keep(x, key, rate):  # type: ignore[no-untyped-def]
    """The mask that the op draws: that it is drawn so is part of its contract (equal keys drop equal entries)."""
    return np.ones(np.shape(x), bool) if rate == 0 else np.asarray(jax.random.bernoulli(key, 1.0 - rate, np.shape(x)))


_DROPOUT = OpSpec(
    "dropout",
    "elementwise",
    (
        Sample("half", lambda draw: call(draw.normal(4, 5), jax.random.key(3), rate=0.5)),
        Sample("tenth, scalar", lambda draw: call(draw.normal(), jax.random.key(4), rate=0.1)),
        Sample("rate 0", lambda draw: call(draw.normal(2, 3), jax.random.key(3), rate=0.0)),
    ),
    (
        BadInput("rate 1", lambda: ops.dropout(jnp.ones(3), jax.random.key(0), 1.0), ConfigError, "[0, 1)"),
        BadInput("no key", lambda: ops.dropout(jnp.ones(3), None, 0.5), DTypeError, "key is required"),
    ),
    forward=lambda x, key, *, rate: oracle.dropout(x, _keep(x, key, rate), rate),
    backward=lambda args, dy, kwargs: oracle.dropout_vjp(args[0], _keep(*args, **kwargs), dy, **kwargs),
)

_ASTYPE = OpSpec(
    "astype",
    "elementwise",
    (
        Sample("to float32", lambda draw: call(draw.normal(2, 3), dtype=jnp.float32), differences=0),
        Sample("to bfloat16", lambda draw: call(draw.normal(1, 5), dtype=jnp.bfloat16), differences=0, thorough=True),
    ),
    (BadInput("to integers", lambda: ops.astype(jnp.ones(3), jnp.int32), DTypeError, "must be floating"),),
)

# ------------------------------------------------------------------------------------------------ where, pow

_WHERE = OpSpec(
    "where",
    "exact",
    (
        Sample("two arrays", lambda draw: call(draw.booleans(2, 3), draw.normal(2, 3), draw.normal(2, 3))),
        Sample("number on the right", lambda draw: call(draw.booleans(1, 5), draw.normal(1, 5), -2.0)),
        Sample("number on the left", lambda draw: call(draw.booleans(2, 3), 0.5, draw.normal(2, 3))),
        Sample("scalars", lambda draw: call(draw.booleans(), draw.normal(), draw.normal())),
        Sample(
            "NaN on the side not taken",
            lambda draw: call(np.array([True, False]), np.array([1.0, np.nan]), np.array([np.nan, 2.0])),
            differences=0,
        ),
    ),
    (
        BadInput("condition", lambda: ops.where(jnp.ones(3), jnp.ones(3), 0.0), DTypeError, "must be boolean"),
        BadInput(
            "condition's shape",
            lambda: ops.where(jnp.ones((), bool), jnp.ones(3), jnp.ones(3)),
            ShapeError,
            "the condition must have the shape",
        ),
        BadInput("two numbers", lambda: ops.where(jnp.ones(3, bool), 1.0, 0.0), DTypeError, "must be an array"),
    ),
)

_POW = OpSpec(
    "pow",
    "elementwise",
    (
        Sample("square", lambda draw: call(draw.normal(2, 3), exponent=2)),
        Sample("cube, as a float", lambda draw: call(draw.normal(1, 5), exponent=3.0), thorough=True),
        Sample("fraction", lambda draw: call(draw.positive(2, 3), exponent=1.5), thorough=True),
        Sample("reciprocal, scalar", lambda draw: call(draw.positive(), exponent=-1)),
        Sample("exponent 1", lambda draw: call(draw.normal(2, 3), exponent=1)),
        Sample("exponent 0 at 0", lambda draw: call(np.array([0.0, 2.0]), exponent=0)),
    ),
    (
        BadInput("integers", lambda: ops.pow(jnp.arange(3), 2), DTypeError, "floating dtype"),
        BadInput("array exponent", lambda: ops.pow(jnp.ones(3), _ARRAY), DTypeError, "Python number"),
        BadInput("root of a negative", lambda: ops.pow(jnp.array([-1.0]), 0.5), DomainError, "fractional exponent"),
        BadInput("1 / 0", lambda: ops.pow(jnp.array([0.0]), -2), DomainError, "negative exponent"),
    ),
)

_GELU = OpSpec(
    "gelu",
    "elementwise",
    (
        Sample("exact", lambda draw: call(draw.normal(2, 3))),
        Sample("tanh", lambda draw: call(draw.normal(1, 5), approximate=True), thorough=True),
        Sample("scalar", lambda draw: call(draw.normal())),
        Sample("far out", lambda _: call(np.array(_EXTREME)), differences=0),
        Sample("tanh, far out", lambda _: call(np.array(_EXTREME), approximate=True), differences=0),
    ),
    (_integers("gelu"),),
)

_SWIGLU = OpSpec(
    "swiglu",
    "elementwise",
    (
        Sample("2x3", lambda draw: call(draw.normal(2, 3), draw.normal(2, 3))),
        Sample("scalars", lambda draw: call(draw.normal(), draw.normal())),
        Sample("far out", lambda _: call(np.array(_EXTREME), np.ones(5)), differences=0),
    ),
    (
        BadInput("two shapes", lambda: ops.swiglu(jnp.ones((2, 3)), jnp.ones(3)), ShapeError, "one shape"),
        BadInput("integers", lambda: ops.swiglu(jnp.arange(3), jnp.arange(3)), DTypeError, "floating dtype"),
    ),
)


def _with_infinities(spec: OpSpec, values: list[float]) -> OpSpec:
    sample = Sample("infinities and NaN", lambda _: call(np.array(values)), differences=0)
    return OpSpec(spec.name, spec.tolerance, (*spec.samples, sample), spec.bad_inputs)


SPECS = (
    _binary("add"),
    _binary("sub"),
    _binary("mul"),
    _binary(
        "div",
        bad=(
            BadInput("a zero", lambda: ops.div(jnp.ones(2), jnp.array([1.0, 0.0])), DomainError, "must not be 0"),
            BadInput("the number 0", lambda: ops.div(jnp.ones(2), 0), DomainError, "must not be"),
        ),
    ),
    _with_ties("maximum"),
    _with_ties("minimum"),
    _unary("neg"),
    _unary("exp"),
    _unary("log", positive=True, bad=(_concrete("log", 0.0, "must be positive"),)),
    _unary("sqrt", positive=True, bad=(_concrete("sqrt", -1.0, "must not be negative"),)),
    _unary("rsqrt", positive=True, bad=(_concrete("rsqrt", 0.0, "must be positive"),)),
    _unary("tanh", extreme=True),
    _unary("sigmoid", extreme=True),
    _unary("erf", extreme=True),
    _with_infinities(_unary("relu", extreme=True), [-np.inf, np.inf, np.nan, 0.0]),
    _unary("relu2", extreme=True),
    _with_infinities(_unary("silu", extreme=True), [-np.inf, np.inf, np.nan, 0.0]),
    _GELU,
    _SWIGLU,
    _DROPOUT,
    _ASTYPE,
    _WHERE,
    _POW,
)
