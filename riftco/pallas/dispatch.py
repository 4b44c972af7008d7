"""Which implementation a call runs, and the doors to the kernels: nothing else in riftco imports a kernel.

A named implementation is honoured or refused with the reason; `None` takes the first of the device's preferences that
supports the call. The choice is made while tracing, for the device that the trace is made for.
"""

import contextlib
import contextvars
import dataclasses
import importlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp

from riftco import _compat
from riftco.errors import ConfigError, UnsupportedError
from riftco.pallas.core.visibility import Visibility
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
NO_INTERPRETER = ("cudnn",)
PLATFORM = {"pallas_tpu": "tpu", "pallas_triton": "cuda", "pallas_mosaic_gpu": "cuda", "cudnn": "cuda"}

# What None tries, in this order, before the XLA rules. Mosaic GPU and cuDNN are there for who names them: neither has
# been measured by us on hardware.
PREFERENCES = {"tpu": ("pallas_tpu",), "cuda": ("pallas_triton",)}


_ALIASES: dict[str, str] = {"gpu": "cuda", "mps": "metal"}


# What None ends at where no kernel is preferred, in words.
XLA_RULES = {
    "attention": "blockwise from 32 queries up, plain below",
    "paged_attention": "the pages gathered, then attention's own choice",
    "nf4_linear": "dequantised, then one product",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to trace for: its platform ("cpu", "tpu", "cuda", "metal", …) and its kind as the runtime names it."""

    platform: str
    kind: str = ""


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("riftco_target", default=None)


@contextlib.contextmanager
def target(platform: str, kind: str = "") -> Generator[Target, None, None]:
    """Traces inside choose kernels for this device, whatever this process runs on: for ahead-of-time compilation.

    Args:
        platform: "cpu", "tpu", "cuda" or "metal".
        kind: the device's kind, such as "TPU v5e" or "NVIDIA H200"; tile sizes may depend on it.
    """
    chosen = Target(_ALIASES.get(platform.lower(), platform.lower()), kind)
    token = _target.set(chosen)
    try:
        yield chosen
    finally:
        _target.reset(token)


def current_target(*arrays: Any) -> Target:
    """The device that a trace made now is for.

    In this order: `target`, the mesh in context, the device of a concrete array, jax's default device, jax's default
    backend.
    """
    asked = _target.get()
    if asked is not None:
        return asked
    meshed = _compat.device_in_context()
    if meshed is not None:
        return Target(_ALIASES.get(meshed[0].lower(), meshed[0].lower()), meshed[1])
    device = next((next(iter(x.devices())) for x in arrays if _is_placed(x)), None) or _default_device()
    platform = str(device.platform).lower()
    return Target(_ALIASES.get(platform, platform), device.device_kind)


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
    remedy = (
        "nothing interprets it" if implementation in NO_INTERPRETER else "interpret=True runs it by its interpreter"
    )
    if device.platform != wanted and (not interpret or implementation in NO_INTERPRETER):
        return f"{op}[{implementation}]: it needs a {wanted} device and this call is for {device.platform}; {remedy}."
    unfit = getattr(module, "unfit", None)  # where not every device of the platform will do
    reason = None if interpret or unfit is None else unfit(device.kind)
    reason = reason or module.unsupported(*call)
    return None if reason is None else f"{op}[{implementation}]: {reason}"


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
        ConfigError: for an unknown name. UnsupportedError: a named kernel cannot run the call, or `interpret` was
            asked of what is no kernel.
    """
    if implementation is None and not interpret:
        device = current_target(*arrays)
        for name in PREFERENCES.get(device.platform, ()):
            if refusal(op, name, device, False, *call) is None:
                return name
        return fallback
    name = fallback if implementation is None else implementation
    check_name(op, name)
    if name in XLA:
        if interpret:
            raise UnsupportedError(f"{op}[{name}]: not a kernel, so there is nothing to interpret; name a kernel.")
        return name
    reason = refusal(op, name, current_target(*arrays), interpret, *call)
    if reason is not None:
        raise UnsupportedError(reason)
    return name


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
                remedy = "" if name in NO_INTERPRETER else "; interpret=True runs it on any"
                rows.append((op, name, f"needs a {PLATFORM[name]} device{remedy}"))
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

    spread = on_each_device(call, ("BTHK", "BSGK", "BSGK", "B"), ("BTHK", "BHT"))
    return _folding_vmap(spread)(q, k, v, sees)


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

    takes = ("BTHK", "BSGK", "BSGK", "BTHK", "BHT", "BTHK", "B")
    spread = on_each_device(call, takes, ("BTHK", "BSGK", "BSGK"))
    return _folding_vmap(spread)(q, k, v, out, lse, ct, sees)


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
        q, lengths, query_lengths, page_indices = (
            _joined(x, is_batched, size)
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
        return _parted(call(q, k_pages, v_pages, lengths, query_lengths, page_indices), size), True

    return call(q, k_pages, v_pages, lengths, query_lengths, page_indices)


# ------------------------------------------------------------------------------------------------ NF4


def nf4_matmul(how: str, x: Any, codes: Any, scales: Any, block_size: int, interpret: Any) -> Any:
    """The product of x [M, K] and the decoded weight [N, K], transposed: [M, N] in x's dtype; layout in pallas/nf4."""
    module = kernel("nf4_linear", how)

    def call(x: Any, codes: Any, scales: Any) -> Any:
        return module.matmul(x, codes, scales, block_size=block_size, interpret=interpret)

    return _rows_folding_vmap(on_each_device(call, ("B", "", ""), "B"))(x, codes, scales)


def nf4_input_gradient(how: str, dy: Any, codes: Any, scales: Any, width: int, block_size: int, interpret: Any) -> Any:
    """The product of dy [M, N] and the decoded weight [N, K]: [M, K] in dy's dtype."""
    module = kernel("nf4_linear", how)

    def call(dy: Any, codes: Any, scales: Any) -> Any:
        return module.input_gradient(dy, codes, scales, width=width, block_size=block_size, interpret=interpret)

    return _rows_folding_vmap(on_each_device(call, ("B", "", ""), "B"))(dy, codes, scales)


def _rows_folding_vmap(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(x [M, ..], weight…)` whose vmap over x alone folds into M; over weights it takes them one by one."""
    folded = jax.custom_batching.custom_vmap(call)

    @folded.def_vmap
    def rule(size: int, batched: Any, x: Any, *weight: Any) -> tuple[Any, bool]:
        if not any(batched[1:]):
            return _parted(folded(_joined(x, batched[0], size), *weight), size), True
        every = (
            a if is_batched else jnp.broadcast_to(a[None], (size, *a.shape))
            for a, is_batched in zip((x, *weight), batched, strict=True)
        )
        return jax.lax.map(lambda one: folded(*one), tuple(every)), True

    return folded


# ------------------------------------------------------------------------------------------------ vmap


def _joined(x: Any, is_batched: bool, size: int) -> Any:
    """The axis of vmap and the leading axis as one."""
    x = x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.reshape(x, (size * x.shape[1], *x.shape[2:]))


def _parted(x: Any, size: int) -> Any:
    return jnp.reshape(x, (size, x.shape[0] // size, *x.shape[1:]))


def _folding_vmap(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose arguments and results all lead with the batch axis, with vmap's axis folded into that one.

    Kernels then never meet jax's batching rules, which some schedules (scalar prefetch, Mosaic GPU) do not have.
    """
    folded = jax.custom_batching.custom_vmap(call)

    @folded.def_vmap
    def rule(size: int, batched: Any, *arguments: Any) -> tuple[Any, Any]:
        joined = jax.tree_util.tree_map(lambda x, b: _joined(x, b, size), arguments, tuple(batched))
        result = jax.tree_util.tree_map(lambda x: _parted(x, size), folded(*joined))
        return result, jax.tree_util.tree_map(lambda _: True, result)

    return folded
