"""`pallas_call` for each kind of chip, so that a kernel states its schedule and nothing about jax's versions.

A bare `pallas_call` means another backend on another jax; the compiler's parameters are always given here.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from riftco import _compat


def shape_like(shape: tuple[int, ...], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output, varying over the mesh axes of shard_map that any of its operands varies over."""
    axes = frozenset[str]().union(*(_compat.varying_axes(x) for x in jax.tree_util.tree_leaves(operands)))
    return _compat.shape_dtype(shape, dtype, axes)


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: Any = False,
    **options: Any,
) -> Callable[..., Any]:
    """A Triton kernel: every program of the grid runs on its own, in any order.

    Args:
        kernel: takes the refs of inputs and outputs.
        name: how profilers and error messages name it.
        grid: programs along each axis, the first CUDA's x; jax folds an axis of more than 65535 into it.
        out_shape: from `shape_like`, or a tree of them.
        num_warps: warps of a program.
        num_stages: depth of the loads' pipeline.
        interpret: run by the HLO interpreter.
        options: `in_specs`, `out_specs`, `input_output_aliases`, `cost_estimate` of `pallas_call`.
    """
    params = _compat.triton_params(num_warps=num_warps, num_stages=num_stages)
    return pl.pallas_call(
        kernel, name=name, grid=grid, out_shape=out_shape, compiler_params=params, interpret=bool(interpret), **options
    )


def tpu_call(
    kernel: Callable[..., None],
    *,
    name: str,
    out_shape: Any,
    semantics: tuple[Any, ...],
    vmem_limit_bytes: int | None = None,
    interpret: Any = False,
    **options: Any,
) -> Callable[..., Any]:
    """A Mosaic kernel for TPU: the grid runs in order, "arbitrary" axes may carry scratch from step to step.

    Args:
        kernel: takes the refs of prefetched scalars, inputs, outputs and scratch.
        name: how profilers and error messages name it.
        out_shape: from `shape_like`, or a tree of them.
        semantics: "parallel" or "arbitrary" for each grid axis.
        vmem_limit_bytes: of one kernel; None for the compiler's default, about 16 MiB.
        interpret: True runs the HLO interpreter; an InterpretParams the TPU one, which looks for races.
        options: `grid_spec`, or `grid`, `in_specs`, `out_specs`; `cost_estimate`, `input_output_aliases`.
    """
    params = _compat.tpu_params(dimension_semantics=semantics, vmem_limit_bytes=vmem_limit_bytes)
    return pl.pallas_call(
        kernel, name=name, out_shape=out_shape, compiler_params=params, interpret=interpret, **options
    )


def mosaic_gpu_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: dict[str, int],
    warpgroups: int,
    out_shape: Any,
    scratch: Any,
    approximate: bool = False,
    interpret: Any = False,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel for Hopper: every block of the grid runs on its own, in any order.

    Args:
        kernel: takes the refs of inputs, outputs and scratch, as often as there are warpgroups; the axis
            "warpgroup" tells them apart.
        name: how profilers and error messages name it.
        grid: the blocks along each named axis; the first varies fastest. It is CUDA's x, of up to 2^31 - 1 blocks; the
            second and the third are y and z, of up to 65535.
        warpgroups: groups of 128 threads that a block has.
        out_shape: from `shape_like`, or a tuple of them.
        scratch: a tree of Mosaic GPU's scratch types.
        approximate: take the chip's fast exponentials, logarithms and tanh.
        interpret: True runs Mosaic GPU's interpreter; an InterpretGPUParams is handed to it, to look for races.
    """
    plgpu = _compat.mosaic_gpu()

    def body(*refs: Any) -> None:
        kernel(*refs)

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out_shape,
        scratch_types=scratch,
        grid=tuple(grid.values())[::-1],  # Pallas's last axis is CUDA's first
        grid_names=tuple(grid)[::-1],
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=approximate),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
    )
