"""Every derivative against its twin and against centred differences: the ops, the loops, and whole modules.

`rows` runs the checks and `table` lays them out. What an op is tried on stands in riftco/ops/spec; how, in
riftco/ops/check.py. Module tensors are moved one at a time, so a row names the tensor.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco import _compat, layers, models, ops, oracle
from riftco.autodiff import check_grads, checkpoint, scan, vjp
from riftco.errors import ConfigError
from riftco.models.config import DecoderConfig
from riftco.models.decoder import Block, rope_for
from riftco.ops.check import CheckResult, check_bad_input, check_op, error_between, failed
from riftco.ops.spec import REGISTRY, gaps
from riftco.ops.spec.tolerances import DIFFERENCES, MODULES
from riftco.tree import named_leaves
from riftco.types import PyTree

_COLUMNS = ("float64", "float32", "bfloat16", "differences", "second order", "bad input")
_EPS = 1e-5


def rows(only: Iterable[str] = ()) -> list[CheckResult]:
    """Run the checks.

    Args:
        only: names of ops, of "scan" and "checkpoint", and of modules; all of them when empty.

    Returns:
        One row for each comparison.

    Raises:
        ConfigError: if a name is not known.
    """
    chosen = tuple(only)
    checks: dict[str, Callable[[], list[CheckResult]]] = {name: functools.partial(_op_rows, name) for name in REGISTRY}
    checks |= {name: functools.partial(_loop_rows, name) for name in _LOOPS}
    checks |= {name: functools.partial(_module_rows, name) for name in MODULE_CHECKS}
    for name in chosen:
        if name not in checks:
            raise ConfigError(f"gradcheck: {name!r} is not an op or module; choose from {', '.join(checks)}.")
    found = [] if chosen else [failed(line.partition(":")[0], "", "registry", line) for line in gaps()]
    for name in chosen or checks:
        found += checks[name]()
    return found


def table(results: Sequence[CheckResult]) -> str:
    """One line for each op and module, with the worst error of each kind of check; then every failure in full."""
    subjects = dict.fromkeys(result.subject for result in results)
    width = max([len(subject) for subject in subjects] + [4])
    lines = [f"{'':<{width}}  {'rows':>4}  " + "  ".join(f"{column:>12}" for column in _COLUMNS)]
    for subject in subjects:
        mine = [result for result in results if result.subject == subject]
        cells = [_cell([result for result in mine if result.check == column]) for column in _COLUMNS]
        verdict = "ok" if all(result.passed for result in mine) else "FAILED"
        lines.append(f"{subject:<{width}}  {len(mine):>4}  " + "  ".join(f"{c:>12}" for c in cells) + f"  {verdict}")
    bad = [result for result in results if not result.passed]
    for result in bad:
        reason = result.message or f"error {result.error:.3g}, accepted {result.tolerance:.3g}"
        lines.append(f"FAILED {result.subject} [{result.sample}] {result.check}: {reason}")
    lines.append(f"{len(results) - len(bad)} of {len(results)} checks passed.")
    return "\n".join(lines)


def _cell(mine: Sequence[CheckResult]) -> str:
    if not mine:
        return "-"
    if mine[0].check == "bad input":
        return f"{sum(result.passed for result in mine)}/{len(mine)}"
    return f"{max(result.error for result in mine):.1e}"


def _op_rows(name: str) -> list[CheckResult]:
    spec = REGISTRY[name]
    found = [result for sample in spec.samples for result in check_op(spec, sample)]
    return found + [check_bad_input(spec, bad) for bad in spec.bad_inputs]


# ------------------------------------------------------------------------------------------------ loops


def _loop(x: Any, w: Any) -> Any:
    def body(carry: Any, step: Any, w: Any) -> Any:
        carry = ops.tanh(carry * w + step)
        return carry, carry * step

    return scan(body, x[0], x, w)


def _checkpointed(x: Any, w: Any) -> Any:
    return checkpoint(lambda x, w: ops.tanh(ops.linear(x, w)) * x)(x, ops.reshape(ops.concatenate([w, w, w]), (3, 3)))


_LOOPS: dict[str, Callable[..., Any]] = {"scan": _loop, "checkpoint": _checkpointed}


def _loop_rows(name: str) -> list[CheckResult]:
    rng = np.random.default_rng(5)
    args = (rng.standard_normal((2, 3)), rng.standard_normal(3))
    found = []
    for order, check in ((1, "differences"), (2, "second order")):
        try:
            error = check_grads(_LOOPS[name], args, order=order, directions=1, tolerance=np.inf).error
            found.append(CheckResult(name, "two steps", check, error, DIFFERENCES[order]))
        except Exception as error:
            found.append(failed(name, "two steps", check, f"{type(error).__name__}: {error}"))
    return found


# ------------------------------------------------------------------------------------------------ modules

GPT = DecoderConfig(5, 4, 4, 2, 2, 6)
LLAMA = DecoderConfig(5, 4, 4, 2, 2, 6, kv_heads=1, norm="rms", mlp="swiglu", position="rope")
_TOKENS = np.array([[0, 3, 1], [4, 2, 2]], np.int32)
_TARGETS = np.array([[3, 1, 4], [2, 2, 0]], np.int32)


def _parameters(config: DecoderConfig) -> PyTree:
    """Generic values for every tensor, biases and scales included."""
    rng = np.random.default_rng(11)
    shapes = jax.eval_shape(lambda: models.init(jax.random.key(0), config))
    return jax.tree_util.tree_map(lambda leaf: 0.1 + 0.4 * rng.standard_normal(leaf.shape), shapes)


def _layer(config: DecoderConfig) -> PyTree:
    return jax.tree_util.tree_map(lambda leaf: leaf[0], _parameters(config)["blocks"])


def _activations() -> np.ndarray:
    return np.random.default_rng(12).standard_normal((2, 3, 4))


def _block(config: DecoderConfig, tensors: Mapping[str, Any]) -> Any:
    x = tensors["input"]
    layer = {name: value for name, value in tensors.items() if name != "input"}
    return Block(config)(x, (layer, None), (rope_for(config, x.shape[1], None, x.dtype), None))[0]


def _attention(tensors: Mapping[str, Any]) -> Any:
    return layers.attention(tensors, tensors["input"], head_dim=GPT.head_dim)


def _linear(tensors: Mapping[str, Any]) -> Any:
    return layers.linear(tensors, tensors["input"])


def _feed_forward(tensors: Mapping[str, Any]) -> Any:
    return layers.feed_forward(tensors, tensors["input"], mlp="gelu")


def _loss(config: DecoderConfig, tensors: PyTree) -> Any:
    return models.loss(tensors, jnp.asarray(_TOKENS), jnp.asarray(_TARGETS), config)


def _with_input(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"input": _activations(), **tensors}


# Each module: the function, and its tensors by name.
MODULE_CHECKS: dict[str, tuple[Callable[[PyTree], Any], Callable[[], PyTree]]] = {
    "linear layer": (_linear, lambda: _with_input(_layer(GPT)["attention"]["query"])),
    "feed-forward": (_feed_forward, lambda: _with_input(_layer(GPT)["feed_forward"])),
    "attention module": (_attention, lambda: _with_input(_layer(GPT)["attention"])),
    "block": (functools.partial(_block, GPT), lambda: _with_input(_layer(GPT))),
    "llama block": (functools.partial(_block, LLAMA), lambda: _with_input(_layer(LLAMA))),
    "decoder loss": (functools.partial(_loss, GPT), lambda: _parameters(GPT)),
    "llama loss": (functools.partial(_loss, LLAMA), lambda: _parameters(LLAMA)),
}
_CONFIGS = {"decoder loss": GPT, "llama loss": LLAMA}


def _module_rows(name: str) -> list[CheckResult]:
    f, make = MODULE_CHECKS[name]
    try:
        return _check_module(name, f, make())
    except Exception as error:
        return [failed(name, "all tensors", "differences", f"{type(error).__name__}: {error}")]


def _check_module(name: str, f: Callable[[PyTree], Any], tensors: PyTree) -> list[CheckResult]:
    """Differences tensor by tensor, one second-order direction, and the gradient in bfloat16 against float64."""
    rng = np.random.default_rng(13)
    with _compat.enable_x64(True):
        start = jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.float64), tensors)
        value = jax.jit(f)
        out = value(start)
        weight = jnp.asarray(rng.standard_normal(out.shape))

        def gradient(tensors: PyTree, weight: Any) -> PyTree:
            out, pull = vjp(f, tensors)
            return pull(weight.astype(out.dtype))[0]

        compiled = jax.jit(gradient)
        exact = compiled(start, weight)
        found = []
        if name in _CONFIGS:
            twin = _oracle_loss(tensors, _CONFIGS[name])
            found.append(CheckResult(name, "value", "float64", error_between(out, twin), MODULES["float64"]))
        flat, tree = jax.tree_util.tree_flatten(start)
        for index, (tensor, slope) in enumerate(named_leaves(exact)):
            step = rng.standard_normal(slope.shape)

            def moved(by: float, index: int = index, step: Any = step) -> Any:
                return value(tree.unflatten([x + by * step if i == index else x for i, x in enumerate(flat)]))

            quotient = float(jnp.sum(weight * (moved(_EPS) - moved(-_EPS)))) / (2 * _EPS)
            error = _relative(quotient, float(jnp.sum(slope * step)))
            found.append(CheckResult(name, tensor, "differences", error, DIFFERENCES[1]))
        found.append(_second_order(name, compiled, gradient, start, weight, rng))
    # Outside the wider context, so that nothing runs in float64 by default.
    narrow = jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.bfloat16), tensors)
    rough = jax.jit(gradient)(narrow, jnp.asarray(np.asarray(weight), jnp.float32))
    pairs = zip(jax.tree_util.tree_leaves(rough), jax.tree_util.tree_leaves(exact), strict=True)
    error = max(float(error_between(a, b)) if a.dtype == jnp.bfloat16 else np.inf for a, b in pairs)
    found.append(CheckResult(name, "all tensors", "bfloat16", error, MODULES["bfloat16"]))
    return found


def _second_order(
    name: str, compiled: Any, gradient: Any, start: PyTree, weight: Any, rng: np.random.Generator
) -> CheckResult:
    direction, across = (
        jax.tree_util.tree_map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), start) for _ in "ab"
    )
    moved = [
        compiled(jax.tree_util.tree_map(lambda x, d: x + by * d, start, direction), weight)  # noqa: B023
        for by in (_EPS, -_EPS)
    ]
    second = jax.jit(lambda tensors, u: vjp(lambda t: gradient(t, weight), tensors)[1](u)[0])(start, across)
    difference = jax.tree_util.tree_map(lambda a, b: (a - b) / (2 * _EPS), *moved)
    error = _relative(_dot(across, difference), _dot(second, direction))
    return CheckResult(name, "all tensors", "second order", error, DIFFERENCES[2])


def _relative(quotient: float, derivative: float) -> float:
    """Small slopes count as much as large ones, down to where rounding in the quotient takes over."""
    return abs(quotient - derivative) / max(1e-3, abs(quotient), abs(derivative))


def _dot(x: PyTree, y: PyTree) -> float:
    return sum(float(jnp.sum(a * b)) for a, b in zip(*map(jax.tree_util.tree_leaves, (x, y)), strict=True))


def _oracle_loss(tensors: PyTree, config: DecoderConfig) -> Any:
    named = {name: np.asarray(x) for name, x in models.named(tensors, config).items()}
    return oracle.decoder_loss(
        named,
        _TOKENS,
        _TARGETS,
        heads=config.heads,
        kv_heads=config.kv_heads,
        norm=config.norm,
        mlp=config.mlp,
        position=config.position,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
    )
