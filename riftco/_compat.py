"""The only file that branches on the jax version.

riftco supports jax 0.10.2 to 0.12.x. jax 0.4.34 is admitted for Apple's `jax-metal` alone, whose last release was
built for it; anywhere else an old jax is refused with the remedy.
"""

import contextlib
import contextvars
import inspect
import os
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
from jax import core, lax

from riftco import backend

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
MINIMUM_JAX = (0, 10, 2)


def _refuse_old_jax() -> None:
    if JAX_VERSION >= MINIMUM_JAX or os.environ.get("RIFTCO_ALLOW_OLD_JAX") == "1":
        return
    plugin = backend.metal_plugin()
    if plugin is not None and plugin[0] == "jax-metal":
        return
    raise ImportError(
        f"riftco: jax >= 0.10.2 is required; jax {jax.__version__} is installed. Run "
        "`pip install -U 'jax>=0.10.2,<0.13'`, or set RIFTCO_ALLOW_OLD_JAX=1 to try the single-device core on it."
    )


_refuse_old_jax()


class _Variable:
    """What `jax.make_user_context` gives, for a jax that has none; programs are not cached by it."""

    def __init__(self, default: Any) -> None:
        self._variable = contextvars.ContextVar("riftco", default=default)

    @property
    def value(self) -> Any:
        return self._variable.get()

    @contextlib.contextmanager
    def __call__(self, value: Any) -> Generator[None, None, None]:
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)


def tracing_variable(default: Any) -> Any:
    """A variable, of this thread, that programs are cached by: its `value`, and `with variable(value):`."""
    return jax.make_user_context(default) if hasattr(jax, "make_user_context") else _Variable(default)


enable_x64: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # type: ignore[attr-defined]
"""A context manager that turns 64-bit types on or off."""

_typeof: Any = getattr(jax, "typeof", None) or getattr(core, "get_aval", None)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` varies inside a `shard_map` that checks them; empty elsewhere."""
    return _axes(_typeof(x))


def _axes(type_: Any) -> frozenset[str]:
    # The attribute of array types is `vma`; the shapes that `eval_shape` gives bear it inside `manual_axis_type`.
    manual = getattr(type_, "manual_axis_type", None)
    return frozenset(getattr(manual, "varying", None) or getattr(type_, "vma", None) or ())


def mark_varying(x: Any, axes: frozenset[str]) -> Any:
    """`x`, typed as varying over `axes` as well; the values do not change."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def belongs_to_same_trace(x: Any, y: Any) -> bool:
    """Whether jax made both while tracing one function: a constant from outside a loop is no peer of its slices."""
    return _trace(x) is _trace(y)


def _trace(x: Any) -> Any:
    trace = getattr(x, "_trace", None)
    # Before 0.4.36 a trace object is made anew for each look at one trace, and `main` is what stays.
    main = getattr(trace, "main", None)
    return trace if main is None else main


def automatic_mesh(devices: Any, axes: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh over an array of devices whose axes XLA's partitioner looks after; old versions know no other kind."""
    kinds = getattr(jax.sharding, "AxisType", None)
    options = {} if kinds is None else {"axis_types": (kinds.Auto,) * len(axes)}
    return jax.sharding.Mesh(devices, axes, **options)


def in_mesh(mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager[Any]:
    """Makes a mesh the one in context while tracing, which is part of what jax caches traces by."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def mesh_around(arrays: Any) -> Any:
    """The abstract mesh in context, or else the one in the arrays' types (explicit axes put it there); None without."""
    get_mesh = getattr(jax.sharding, "get_abstract_mesh", None)
    if get_mesh is None:
        return None
    meshes = [get_mesh(), *(getattr(getattr(_typeof(x), "sharding", None), "mesh", None) for x in arrays)]
    return next((mesh for mesh in meshes if mesh is not None and not mesh.empty), None)


def uncut_axes(mesh: Any) -> dict[str, int]:
    """The axes of a mesh that no `shard_map` has cut, with their sizes: the partitioner's and the explicit ones."""
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind != jax.sharding.AxisType.Manual}


def device_in_context() -> tuple[str, str] | None:
    """Platform and kind of the devices of the mesh in context; None without a mesh."""
    get_mesh = getattr(jax.sharding, "get_abstract_mesh", None)
    device = None if get_mesh is None else getattr(get_mesh(), "abstract_device", None)
    return None if device is None or device.platform is None else (device.platform, device.device_kind)


def shard_map(function: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` over all uncut axes of a mesh, without checks of what varies over them.

    Over explicit axes it takes arguments as they lie, so that those are laid as `in_specs` say first.
    """
    axes = uncut_axes(mesh)
    explicit = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind.name == "Explicit"}
    cut = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(axes), check_vma=False
    )
    if not explicit:
        return cut

    def names(part: Any) -> Any:
        kept = tuple(n for n in (part if isinstance(part, tuple) else (part,)) if n in explicit)
        return kept or None

    def lay(spec: Any, argument: Any) -> Any:
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*map(names, spec)))
        return jax.tree_util.tree_map(lambda x: jax.sharding.reshard(x, where), argument)

    return lambda *arguments: cut(*map(lay, in_specs, arguments))


def _inside_shard_map() -> bool:
    get_mesh = getattr(jax.sharding, "get_abstract_mesh", None)
    return get_mesh is not None and bool(getattr(get_mesh(), "manual_axes", ()))


def scan(body: Callable[..., Any], init: Any, xs: Any, length: int | None, reverse: bool, unroll: int | bool) -> Any:
    """`lax.scan` whose carry may start less varying than it ends (inside `shard_map(check_vma=True)`).

    `lax.scan` asks for equal types in and out; a carry of zeros joins with values that differ between devices and so
    changes its type. The types are raised until they hold still, which ends because the axes are finitely many.
    """
    leaves, tree = jax.tree_util.tree_flatten(init)
    if _inside_shard_map():
        while True:
            first = jax.tree_util.tree_map(lambda x: lax.index_in_dim(x, 0, keepdims=False), xs)
            out, _ = jax.eval_shape(body, jax.tree_util.tree_unflatten(tree, leaves), first)
            wanted = [_axes(o) for o in jax.tree_util.tree_leaves(out)]
            raised = [mark_varying(leaf, axes) for leaf, axes in zip(leaves, wanted, strict=True)]
            if all(new is old for new, old in zip(raised, leaves, strict=True)):
                break
            leaves = raised
    return lax.scan(body, jax.tree_util.tree_unflatten(tree, leaves), xs, length=length, reverse=reverse, unroll=unroll)


def _teach_the_barrier() -> None:
    """Give `lax.optimization_barrier` the rules under vmap and jvp that jax has for it from 0.5 on, and a transpose."""
    from jax._src.lax.lax import optimization_barrier_p
    from jax.interpreters import ad, batching

    def jvp(primals: Any, tangents: Any) -> Any:
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return optimization_barrier_p.bind(*primals), optimization_barrier_p.bind(*tangents)

    batching.primitive_batchers[optimization_barrier_p] = lambda args, dims: (optimization_barrier_p.bind(*args), dims)
    ad.primitive_jvps[optimization_barrier_p] = jvp
    ad.primitive_transposes[optimization_barrier_p] = lambda cts, *_: tuple(map(ad.instantiate_zeros, cts))


if JAX_VERSION < (0, 5):
    _teach_the_barrier()


def is_concrete(x: Any) -> bool:
    """Whether the values of `x` can be looked at now (it is not being traced by jax)."""
    return not isinstance(x, core.Tracer)


def shape_dtype(shape: tuple[int, ...], dtype: Any, axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    """A type that varies over `axes` of the surrounding `shard_map`."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = type(_typeof(jnp.zeros(())).manual_axis_type)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind(varying=axes))


def triton_params(num_warps: int, num_stages: int) -> Any:
    """Compiler parameters that make a `pallas_call` a Triton kernel."""
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def tpu_params(dimension_semantics: tuple[Any, ...], vmem_limit_bytes: int | None) -> Any:
    """Compiler parameters that make a `pallas_call` a TPU kernel."""
    from jax.experimental.pallas import tpu

    return tpu.CompilerParams(dimension_semantics=dimension_semantics, vmem_limit_bytes=vmem_limit_bytes)


HAS_MOSAIC_GPU = JAX_VERSION >= (0, 11)
"""Whether Pallas for Hopper is the one that riftco's kernels are written for: earlier ones name and infer less."""


def mosaic_gpu() -> Any:
    """Pallas's namespace for Mosaic GPU; only where `HAS_MOSAIC_GPU`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu


def cuda_runtime() -> int | None:
    """The version of CUDA's runtime, such as 12090 for 12.9; None without a CUDA plugin."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cuda_runtime_get_version()


# cuDNN's attention. The public `jax.nn.dot_product_attention` hands its logsumexp out in the output's dtype, asks this
# process for a cuDNN while tracing, and has a backward only as jax's own derivative rule; these are what lies below it.


def cudnn_attention(q: Any, k: Any, v: Any, *, scale: float, causal: bool, window: int | None) -> tuple[Any, Any]:
    """The output [B, T, H, K] and natural logsumexp [B, H, T] float32 of cuDNN's fused attention."""
    cudnn, absent, options = _cudnn(q, scale, causal, window)
    bind = cudnn._dot_product_attention_fwd_p_wrapper.bind
    out, lse = bind(q, k, v, *absent, is_training=True, **options)
    return out, lse


def cudnn_attention_backward(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, scale: float, causal: bool, window: int | None
) -> tuple[Any, Any, Any]:
    """The cotangents of q, k and v by cuDNN's fused attention."""
    cudnn, absent, options = _cudnn(q, scale, causal, window)
    bind = cudnn._dot_product_attention_bwd_p_wrapper.bind
    dq, dk, dv = bind(q, k, v, *absent, lse, out, dout, **options)
    return dq, dk, dv


def _cudnn(q: Any, scale: float, causal: bool, window: int | None) -> tuple[Any, list[Any], dict[str, Any]]:
    """Jax's module, the operands that are not used (bias, lengths, offsets, page tables), and the static options."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    options = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_fwd_rule).parameters:
        options["score_mod"] = None
    return cudnn, [jnp.zeros((0,), q.dtype)] * 7, options


def gpu_target_config() -> str | None:
    """XLA's description of this process's GPU, a GpuTargetConfigProto as text; None where the runtime gives none."""
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    return getattr(xla_client.get_topology_for_devices(jax.devices()), "target_config", None)
