"""Products with packed weights, by the rule that runs without a kernel. The packed weight is held fixed."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from riftco import ops, oracle
from riftco.autodiff import grad
from riftco.errors import ConfigError, DTypeError, GradError, ShapeError, UnsupportedError
from riftco.ops.spec.kinds import BadInput, Call, Draw, OpSpec, Sample, call


def _run(x: Any, bias: Any = None, *, q: Any) -> Any:
    return ops.nf4_linear(x, q, bias)


def _forward(x: Any, bias: Any = None, *, q: Any) -> Any:
    return oracle.nf4_linear(x, q, bias)


def _backward(args: tuple[Any, ...], dy: Any, kwargs: Any) -> tuple[Any, ...]:
    dx, _, *dbias = oracle.nf4_linear_vjp(args[0], kwargs["q"], *args[1:], dy)
    return dx, *dbias


def _linear(draw: Draw, out: int, width: int, leading: tuple[int, ...], bias: bool, **options: Any) -> Call:
    with jax.ensure_compile_time_eval():
        q = ops.quantize_nf4(jnp.asarray(draw.normal(out, width), jnp.float32), **options)
    x = draw.normal(*leading, width)
    return call(x, draw.normal(out), q=q) if bias else call(x, q=q)


_X, _W = jnp.ones((2, 6)), jnp.ones((5, 6))


def _q() -> Any:
    return ops.quantize_nf4(_W)


def _grad_of_weight() -> Any:
    return grad(lambda q: ops.sum(ops.nf4_linear(_X, q)))(_q())


_NF4_LINEAR = OpSpec(
    "nf4_linear",
    "product",
    (
        Sample("bias, blocks that cross rows", lambda draw: _linear(draw, 5, 13, (2, 3), True, block_size=32)),
        Sample("rows of whole blocks", lambda draw: _linear(draw, 3, 64, (4,), False, double_quant=False)),
        Sample("an odd tail", lambda draw: _linear(draw, 11, 9, (2,), False, block_size=32)),
    ),
    (
        BadInput("width", lambda: ops.nf4_linear(_X[:, :5], _q()), ShapeError, "x must be [..., in]"),
        BadInput("no packed weight", lambda: ops.nf4_linear(_X, cast(Any, _W)), DTypeError, "q must be an NF4Array"),
        BadInput("integers", lambda: ops.nf4_linear(_X.astype(jnp.int32), _q()), DTypeError, "floating"),
        BadInput("bias's dtype", lambda: ops.nf4_linear(_X, _q(), jnp.ones(5, jnp.bfloat16)), DTypeError, "one dtype"),
        BadInput("bias's size", lambda: ops.nf4_linear(_X, _q(), jnp.ones(4)), ShapeError, "bias [D]"),
        BadInput("no such name", lambda: ops.nf4_linear(_X, _q(), implementation="fast"), ConfigError, "one of plain"),
        BadInput(
            "no such rule",
            lambda: ops.nf4_linear(_X, _q(), implementation="blockwise"),
            UnsupportedError,
            "nf4_linear[blockwise]",
        ),
        BadInput(
            "the weight's derivative",
            _grad_of_weight,
            GradError,
            "only floating arrays can be differentiated",
        ),
    ),
    run=_run,
    forward=_forward,
    backward=_backward,
)


SPECS = (_NF4_LINEAR,)
