"""Which implementation a call runs, and the doors to the kernels: nothing else in riftco imports a kernel.

A named implementation is honoured or refused with the reason; `None` takes the first of the device's preferences that
supports the call. The choice is made while tracing, for the device that the trace is made for.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp

from riftco import _compat, backend
from riftco.errors import ConfigError, UnsupportedError
from riftco.pallas.core.visibility import Visibility
from riftco.pallas.folding import folding_vmap, joined, one_by_one, parted, rows_folding_vmap
from riftco.pallas.mesh import on_each_device

IMPLEMENTATIONS = ("plain", "blockwise", "pallas_tpu", "pallas_triton", "pallas_mosaic_gpu", "cudnn")
XLA = ("plain", "blockwise")

# The kernels: op and implementation to the module that holds its schedule.
KERNELS = {
    ("attention", "pallas_tpu"): "riftco.pallas.flash.tpu",
    ("attention", "pallas_triton"): "riftco.pallas.flash.triton",
    ("attention", "pallas_mosaic_gpu"): "riftco.pallas.flash.mosaic_gpu",
    ("attention", "cudnn"): "riftco.pallas.flash.cudnn",
    ("paged_attention", "pallas_tpu"): "riftco.pallas.paged.tpu",
    ("paged_attention", "pallas_triton"): "riftco.pallas.paged.triton",
    ("nf4_linear", "pallas_tpu"): "riftco.pallas.nf4.tpu",
    ("nf4_linear", "pallas_triton"): "riftco.pallas.nf4.triton",
}
# What `interpret` may be besides a bool: the parameters, by their type's name, of a kernel's own interpreter. cuDNN has
# no interpreter at all.
INTERPRETERS = {"pallas_tpu": "InterpretParams", "pallas_triton": "", "pallas_mosaic_gpu": "InterpretGPUParams"}
PLATFORM = {"pallas_tpu": "tpu", "pallas_triton": "cuda", "pallas_mosaic_gpu": "cuda", "cudnn": "cuda"}

# What None tries, in this order, before the XLA rules. Mosaic GPU and cuDNN are there for who names them: neither has
# been measured by us on hardware.
PREFERENCES = {"tpu": ("pallas_tpu",), "cuda": ("pallas_triton",)}


# One query at a time has no masked half to skip, and nothing to gain from blocks.
BLOCKWISE_QUERIES = 32

# What None ends at where no kernel is preferred, in words.
XLA_RULES = {
    "attention": f"blockwise from {BLOCKWISE_QUERIES} queries up, plain below",
    "paged_attention": "the pages gathered, then attention's own choice",
    "nf4_linear": "dequantised, then one product",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to trace for: its platform ("cpu", "tpu", "cuda", "metal", …) and its kind as the runtime names it."""

    platform: str
    kind: str = ""


_target = _compat.tracing_variable(None)


@contextlib.contextmanager
def target(platform: str, kind: str = "") -> Generator[Target, None, None]:
    """Traces inside choose kernels for this device, whatever this process runs on: for ahead-of-time compilation.

    jit caches programs by the target: a function that was jitted under one is traced again under another. A program
    that is compiled (`jit(f).lower(...)`) stays what it is. The target holds in the thread that sets it.

    Args:
        platform: "cpu", "tpu", "cuda" or "metal".
        kind: the device's kind as jax names it, such as "TPU v5 lite" (v5e) or "NVIDIA H200"; tiles may depend on it.
    """
    chosen = _device(platform, kind)
    with _target(chosen):
        yield chosen


def _device(platform: str, kind: str) -> Target:
    return Target(backend.canonical(platform), kind)


def current_target(*arrays: Any) -> Target:
    """The device that a trace made now is for.

    In this order: `target`, the mesh in context, the device of a concrete array, jax's default device, jax's default
    backend.
    """
    asked = _target.value
    if asked is not None:
        return asked
    meshed = _compat.device_in_context()
    if meshed is not None:
        return _device(*meshed)
    device = next((next(iter(x.devices())) for x in arrays if _is_placed(x)), None) or _default_device()
    return _device(device.platform, device.device_kind)


def _for_device_of(*arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """Kernels called inside size their tiles for the arrays' device: below vmap's rules they see only tracers."""
    device = current_target(*arrays)
    return contextlib.nullcontext() if device == current_target() else _target(device)


def _is_placed(x: Any) -> bool:
    return isinstance(x, jax.Array) and _compat.is_concrete(x)


def _default_device() -> Any:
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None:
        return jax.devices()[0]
    return jax.devices(default)[0] if isinstance(default, str) else default


# ------------------------------------------------------------------------------------------------ choosing


def check_name(op: str, implementation: str) -> None:
    """Raises ConfigError unless the name is one of `IMPLEMENTATIONS`."""
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"{op}: implementation must be None or one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}."
        )


def check(op: str, implementation: str | None, interpret: Any) -> None:
    """Raises what `choose` would raise for any call with these two: ConfigError or UnsupportedError."""
    if implementation is not None:
        check_name(op, implementation)
    kind = type(interpret).__name__
    if not isinstance(interpret, bool) and kind not in INTERPRETERS.values():
        raise ConfigError(
            f"{op}: interpret must be True, False or an interpreter's own parameters "
            f"({', '.join(filter(None, INTERPRETERS.values()))}); got {interpret!r}."
        )
    if interpret and implementation in (None, *XLA):
        rule = implementation or "None"
        raise UnsupportedError(f"{op}[{rule}]: not a kernel, so there is nothing to interpret; name a kernel.")
    if interpret and not isinstance(interpret, bool) and INTERPRETERS.get(implementation or "", "") != kind:
        raise UnsupportedError(
            f"{op}[{implementation}]: {kind} are another interpreter's parameters; leave interpret True or False."
        )


def attention_rule(queries: int) -> str:
    """The XLA rule of attention that serves so many queries."""
    return "blockwise" if queries >= BLOCKWISE_QUERIES else "plain"


def kernel(op: str, implementation: str) -> Any:
    """The module with the schedule of a kernel.

    Raises:
        UnsupportedError: there is none, or this installation cannot load it.
    """
    name = KERNELS.get((op, implementation))
    if name is None:
        have = [i for o, i in KERNELS if o == op]
        raise UnsupportedError(
            f"{op}[{implementation}]: there is no such kernel; use None, 'plain' or one of {', '.join(have)}."
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UnsupportedError(f"{op}[{implementation}]: this installation cannot load it: {reason}") from error


def refusal(op: str, implementation: str, device: Target, interpret: Any, *call: Any) -> str | None:
    """Why a kernel cannot run a call, as a sentence; None if it can.

    Args:
        op: a key of `KERNELS`.
        implementation: a kernel's name.
        device: where the call is to run.
        interpret: whether an interpreter runs it, so that no device is needed.
        call: what the kernel module's `unsupported` takes.
    """
    try:
        module = kernel(op, implementation)
    except UnsupportedError as error:
        return str(error)
    wanted = PLATFORM[implementation]
    remedy = "interpret=True runs it by its interpreter" if implementation in INTERPRETERS else "nothing interprets it"
    if device.platform != wanted and (not interpret or implementation not in INTERPRETERS):
        return f"{op}[{implementation}]: it needs a {wanted} device and this call is for {device.platform}; {remedy}."
    reason = (None if interpret else _unfit(module, device)) or module.unsupported(*call)
    return None if reason is None else f"{op}[{implementation}]: {reason}"


def _unfit(module: Any, device: Target) -> str | None:
    """Why a device of the kernel's platform will not do; None if it will."""
    unfit = getattr(module, "unfit", None)
    return None if unfit is None else unfit(device.kind)


def choose(op: str, implementation: str | None, fallback: str, interpret: Any, arrays: Any, *call: Any) -> str:
    """The implementation that a call runs.

    Args:
        op: a key of `KERNELS`.
        implementation: the caller's; None takes the first preference of the device that supports the call.
        fallback: the XLA rule that None ends at.
        interpret: as the caller gave it.
        arrays: arrays that tell the device.
        call: what the kernel module's `unsupported` takes.

    Raises:
        ConfigError: for an unknown name, or an `interpret` that is nothing of the kind. UnsupportedError: a named
            kernel cannot run the call, or `interpret` was asked of what is no kernel.
    """
    check(op, implementation, interpret)
    if implementation is None:
        device = current_target(*arrays)
        for name in PREFERENCES.get(device.platform, ()):
            if refusal(op, name, device, False, *call) is None:
                return name
        return fallback
    if implementation in XLA:
        return implementation
    reason = refusal(op, implementation, current_target(*arrays), interpret, *call)
    if reason is not None:
        raise UnsupportedError(reason)
    return implementation


def explain(device: Target | None = None) -> list[tuple[str, str, str]]:
    """For each op, its XLA rules and its kernels: (op, implementation, what None makes of it on the device)."""
    device = device or current_target()
    preferred = PREFERENCES.get(device.platform, ())
    rows = []
    for op, rule in XLA_RULES.items():
        when = "where no kernel supports the call" if preferred else f"on {device.platform}"
        rows.append((op, "XLA", f"taken {when}: {rule}"))
        for name in (name for of, name in KERNELS if of == op):
            try:
                module = kernel(op, name)
            except UnsupportedError as error:
                rows.append((op, name, str(error).split(": ", 1)[1]))
                continue
            if missing := getattr(module, "UNAVAILABLE", None):
                rows.append((op, name, missing))
                continue
            if PLATFORM[name] != device.platform:
                remedy = "; interpret=True runs it on any" if name in INTERPRETERS else ""
                rows.append((op, name, f"needs a {PLATFORM[name]} device{remedy}"))
            elif reason := _unfit(module, device):
                rows.append((op, name, reason))
            elif name in preferred:
                rows.append((op, name, "taken where it supports the call"))
            else:
                rows.append((op, name, "run where it is named"))
    return rows


# ------------------------------------------------------------------------------------------------ attention


def attention(
    how: str, q: Any, k: Any, v: Any, sees: Visibility, scale: float, cap: float | None, interpret: Any
) -> tuple[Any, Any]:
    """The output [B, T, H, K] and the natural logsumexp [B, H, T] float32 of a Flash kernel; vmap folds into B."""
    module = kernel("attention", how)

    def call(q: Any, k: Any, v: Any, sees: Visibility) -> tuple[Any, Any]:
        return module.forward(q, k, v, sees, scale=scale, cap=cap, interpret=interpret)

    def fits(q: Any, k: Any, v: Any, sees: Visibility) -> bool:
        return module.unsupported(q, k, v, sees, cap) is None

    spread = on_each_device(call, ("BTHK", "BSGK", "BSGK", "B"), ("BTHK", "BHT"))
    with _for_device_of(q, k, v):
        return folding_vmap(spread, fits)(q, k, v, sees)


def attention_backward(
    how: str,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    ct: Any,
    sees: Visibility,
    scale: float,
    cap: float | None,
    interpret: Any,
) -> tuple[Any, Any, Any]:
    """The cotangents of q, k and v from what `attention` took and gave, and the output's cotangent."""
    module = kernel("attention", how)

    def call(q: Any, k: Any, v: Any, out: Any, lse: Any, ct: Any, sees: Visibility) -> tuple[Any, Any, Any]:
        return module.backward(q, k, v, out, lse, ct, sees, scale=scale, cap=cap, interpret=interpret)

    def fits(q: Any, k: Any, v: Any, *others: Any) -> bool:
        return module.unsupported(q, k, v, others[-1], cap) is None

    takes = ("BTHK", "BSGK", "BSGK", "BTHK", "BHT", "BTHK", "B")
    spread = on_each_device(call, takes, ("BTHK", "BSGK", "BSGK"))
    with _for_device_of(q, k, v):
        return folding_vmap(spread, fits)(q, k, v, out, lse, ct, sees)


# ------------------------------------------------------------------------------------------------ paged attention


def paged_attention(
    how: str,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    lengths: Any,
    query_lengths: Any,
    page_indices: Any,
    window: int | None,
    cap: float | None,
    scale: float,
    interpret: Any,
) -> Any:
    """The output [B, T, H, K] of a paged kernel; rows past `query_lengths` are 0. vmap folds into rows and pages."""
    module = kernel("paged_attention", how)

    def run(q: Any, k_pages: Any, v_pages: Any, lengths: Any, query_lengths: Any, page_indices: Any) -> Any:
        return module.forward(
            q,
            k_pages,
            v_pages,
            lengths,
            query_lengths,
            page_indices,
            window=window,
            cap=cap,
            scale=scale,
            interpret=interpret,
        )

    # Any row may read any page, so every device has all pages.
    spread = on_each_device(run, ("BTHK", "GPNK", "GPNK", "B", "B", "B"), "BTHK")
    call = jax.custom_batching.custom_vmap(spread)

    @call.def_vmap
    def rule(size: int, batched: Any, q: Any, k_pages: Any, v_pages: Any, *row_arrays: Any) -> tuple[Any, bool]:
        given = (q, k_pages, v_pages, *row_arrays)
        q, lengths, query_lengths, page_indices = (
            joined(x, is_batched, size)
            for x, is_batched in zip((q, *row_arrays), (batched[0], *batched[3:]), strict=True)
        )
        if batched[1] or batched[2]:
            # One pool for all: pools stand behind each other, and each row's page numbers move to its own.
            pages = (k_pages if batched[1] else v_pages).shape[2]
            k_pages, v_pages = (
                jnp.moveaxis(x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape)), 0, 1)
                for x, is_batched in ((k_pages, batched[1]), (v_pages, batched[2]))
            )
            k_pages, v_pages = (jnp.reshape(x, (x.shape[0], -1, *x.shape[3:])) for x in (k_pages, v_pages))
            first = jnp.repeat(jnp.arange(size, dtype=jnp.int32) * pages, page_indices.shape[0] // size)
            page_indices = page_indices + first[:, None]
        if module.unsupported(q, k_pages, v_pages, page_indices, window, cap) is not None:
            return one_by_one(call, batched, given), True
        return parted(call(q, k_pages, v_pages, lengths, query_lengths, page_indices), size), True

    with _for_device_of(q, k_pages, v_pages):
        return call(q, k_pages, v_pages, lengths, query_lengths, page_indices)


# ------------------------------------------------------------------------------------------------ NF4


def nf4_matmul(how: str, x: Any, codes: Any, scales: Any, block_size: int, interpret: Any) -> Any:
    """The product of x [M, K] and the decoded weight [N, K], transposed: [M, N] in x's dtype; layout in pallas/nf4."""
    module = kernel("nf4_linear", how)

    def call(x: Any, codes: Any, scales: Any) -> Any:
        return module.matmul(x, codes, scales, block_size=block_size, interpret=interpret)

    with _for_device_of(x, codes):
        return rows_folding_vmap(on_each_device(call, ("B", "", ""), "B"))(x, codes, scales)


def nf4_input_gradient(how: str, dy: Any, codes: Any, scales: Any, width: int, block_size: int, interpret: Any) -> Any:
    """The product of dy [M, N] and the decoded weight [N, K]: [M, K] in dy's dtype."""
    module = kernel("nf4_linear", how)

    def call(dy: Any, codes: Any, scales: Any) -> Any:
        return module.input_gradient(dy, codes, scales, width=width, block_size=block_size, interpret=interpret)

    with _for_device_of(dy, codes):
        return rows_folding_vmap(on_each_device(call, ("B", "", ""), "B"))(dy, codes, scales)
