"""Ops that move elements, and gathers."""

import jax.numpy as jnp
import numpy as np

from riftco import ops, oracle
from riftco.errors import DTypeError, IndexRangeError, ShapeError
from riftco.ops.spec.kinds import BadInput, OpSpec, Sample, call

_X = jnp.ones((2, 3))


def _int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


_RESHAPE = OpSpec(
    "reshape",
    "exact",
    (
        Sample("one size inferred", lambda draw: call(draw.normal(2, 3), shape=(3, -1))),
        Sample("flat", lambda draw: call(draw.normal(1, 5), shape=(5,))),
        Sample("scalar", lambda draw: call(draw.normal(), shape=(1, 1))),
        Sample("to a scalar", lambda draw: call(draw.normal(1, 1), shape=())),
    ),
    (
        BadInput("another count", lambda: ops.reshape(_X, (4,)), ShapeError, "must hold 6 elements"),
        BadInput("two inferred", lambda: ops.reshape(_X, (-1, -1)), ShapeError, "must hold 6 elements"),
    ),
)

_TRANSPOSE = OpSpec(
    "transpose",
    "exact",
    (
        Sample("reversed", lambda draw: call(draw.normal(2, 3))),
        Sample("cycle", lambda draw: call(draw.normal(2, 3, 4), axes=(1, 2, 0))),
        Sample("negative axes", lambda draw: call(draw.normal(2, 3, 1), axes=(-1, 0, -2))),
    ),
    (
        BadInput("repeated axis", lambda: ops.transpose(_X, (0, 0)), ShapeError, "permutation"),
        BadInput("axis out of range", lambda: ops.transpose(_X, (0, 2)), ShapeError, "axis must be"),
    ),
)

_BROADCAST = OpSpec(
    "broadcast_to",
    "reduction",
    (
        Sample("new axis", lambda draw: call(draw.normal(3), shape=(2, 3))),
        Sample("size 1", lambda draw: call(draw.normal(2, 1, 3), shape=(2, 4, 3))),
        Sample("scalar", lambda draw: call(draw.normal(), shape=(1, 5))),
        Sample("itself", lambda draw: call(draw.normal(2, 3), shape=(2, 3))),
    ),
    (
        BadInput("another size", lambda: ops.broadcast_to(_X, (2, 4)), ShapeError, "does not broadcast"),
        BadInput("fewer axes", lambda: ops.broadcast_to(_X, (3,)), ShapeError, "does not broadcast"),
    ),
)

_CONCATENATE = OpSpec(
    "concatenate",
    "exact",
    (
        Sample("last axis", lambda draw: call([draw.normal(2, 3), draw.normal(2, 1)])),
        Sample(
            "first of three",
            lambda draw: call([draw.normal(1, 3), draw.normal(2, 3), draw.normal(4, 3)], axis=0),
            thorough=True,
        ),
        Sample("one array", lambda draw: call([draw.normal(5)], axis=-1)),
    ),
    (
        BadInput("none", lambda: ops.concatenate([]), ShapeError, "at least one array"),
        BadInput("unequal", lambda: ops.concatenate([_X, jnp.ones((3, 3))]), ShapeError, "agree but for axis 1"),
        BadInput("two dtypes", lambda: ops.concatenate([_X, jnp.ones((2, 3), jnp.bfloat16)]), DTypeError, "one dtype"),
    ),
    # The twin takes the list as its only argument, and answers with the list's own cotangents.
    backward=lambda args, dy, kwargs: (list(oracle.concatenate_vjp(args[0], dy, **kwargs)),),
)

_SPLIT = OpSpec(
    "split",
    "exact",
    (
        Sample("equal parts", lambda draw: call(draw.normal(2, 6), sections=3)),
        Sample("sizes", lambda draw: call(draw.normal(5, 2), sections=[1, 4], axis=0)),
        Sample("negative axis", lambda draw: call(draw.normal(2, 3, 4), sections=[2, 1], axis=-2)),
    ),
    (
        BadInput("uneven", lambda: ops.split(_X, 2), ShapeError, "2 equal parts"),
        BadInput("sizes", lambda: ops.split(_X, [1, 1]), ShapeError, "add up to 3"),
    ),
)

_SLICE = OpSpec(
    "slice",
    "exact",
    (
        Sample("a box", lambda draw: call(draw.normal(4, 5), starts=(1, 0), limits=(3, 4))),
        Sample("strides", lambda draw: call(draw.normal(5, 7), starts=(0, 1), limits=(5, 7), strides=(2, 3))),
        Sample("an entry", lambda draw: call(draw.normal(3), starts=(1,), limits=(2,))),
    ),
    (
        BadInput("too far", lambda: ops.slice(_X, (0, 0), (2, 4)), ShapeError, "box inside [2, 3]"),
        BadInput("negative", lambda: ops.slice(_X, (-1, 0), (2, 3)), ShapeError, "box inside [2, 3]"),
        BadInput("missing axis", lambda: ops.slice(_X, (0,), (2,)), ShapeError, "box inside [2, 3]"),
    ),
)

_UPDATE = OpSpec(
    "dynamic_update_slice",
    "exact",
    (
        Sample("a box", lambda draw: call(draw.normal(4, 5), draw.normal(2, 3), [_int32(1)[0], _int32(2)[0]])),
        Sample(
            "a row of rank 3", lambda draw: call(draw.normal(2, 3, 2), draw.normal(2, 1, 2), [0, 2, 0]), thorough=True
        ),
        Sample("all of it", lambda draw: call(draw.normal(3), draw.normal(3), [0])),
        Sample(
            "past the end",
            lambda draw: call(draw.normal(4, 5), draw.normal(2, 3), list(_int32(1, 4))),
            jit_only=True,
        ),
        Sample(
            "negative start",
            lambda draw: call(draw.normal(4, 5), draw.normal(2, 3), list(_int32(-1, 0))),
            jit_only=True,
        ),
    ),
    (
        BadInput(
            "larger", lambda: ops.dynamic_update_slice(_X, jnp.ones((3, 3)), (0, 0)), ShapeError, "must fit inside"
        ),
        BadInput(
            "past the end",
            lambda: ops.dynamic_update_slice(_X, jnp.ones((1, 2)), (0, 2)),
            IndexRangeError,
            "start on axis 1 must be in [0, 2)",
        ),
        BadInput(
            "negative start",
            lambda: ops.dynamic_update_slice(_X, jnp.ones((1, 2)), (-1, 0)),
            IndexRangeError,
            "start on axis 0",
        ),
    ),
)

_TAKE = OpSpec(
    "take",
    "exact-sum",
    (
        Sample("rows, repeated", lambda draw: call(draw.normal(5, 3), _int32(4, 0, 4))),
        Sample("matrix of indices", lambda draw: call(draw.normal(5, 3), draw.integers(5, 2, 3)), thorough=True),
        Sample("last axis", lambda draw: call(draw.normal(2, 3, 4), draw.integers(4, 2), axis=-1)),
        Sample("one row", lambda draw: call(draw.normal(5, 3), np.int32(2))),
        Sample("narrow indices", lambda draw: call(draw.normal(300), np.array([7, 0], np.int8), axis=0)),
        Sample("out of range", lambda draw: call(draw.normal(5, 3), _int32(1, 5, -1)), jit_only=True),
    ),
    (
        BadInput("past the end", lambda: ops.take(_X, jnp.array([0, 2])), IndexRangeError, "must be in [0, 2)"),
        BadInput("negative", lambda: ops.take(_X, jnp.array([-1])), IndexRangeError, "got -1"),
        BadInput("floats", lambda: ops.take(_X, jnp.array([1.0])), DTypeError, "integer dtype"),
        BadInput("axis", lambda: ops.take(_X, jnp.array([0]), 2), ShapeError, "axis must be"),
    ),
)

_TAKE_ALONG = OpSpec(
    "take_along_axis",
    "exact-sum",
    (
        Sample("last axis", lambda draw: call(draw.normal(2, 5), draw.integers(5, 2, 3), axis=1)),
        Sample("first axis", lambda draw: call(draw.normal(5, 2), draw.integers(5, 1, 2), axis=0)),
        Sample("negative axis", lambda draw: call(draw.normal(2, 3, 4), draw.integers(3, 2, 6, 4), axis=-2)),
        Sample(
            "out of range",
            lambda draw: call(draw.normal(2, 3), _int32(0, 3, -1, 2).reshape(2, 2), axis=1),
            jit_only=True,
        ),
    ),
    (
        BadInput(
            "past the end",
            lambda: ops.take_along_axis(_X, jnp.array([[3], [0]]), 1),
            IndexRangeError,
            "must be in [0, 3)",
        ),
        BadInput(
            "unmatched",
            lambda: ops.take_along_axis(_X, jnp.zeros((3, 1), jnp.int32), 1),
            ShapeError,
            "must match [2, 3] but for axis 1",
        ),
    ),
)

SPECS = (
    _RESHAPE,
    _TRANSPOSE,
    _BROADCAST,
    _CONCATENATE,
    _SPLIT,
    _SLICE,
    _UPDATE,
    _TAKE,
    _TAKE_ALONG,
)
