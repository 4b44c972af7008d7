"""Meshes by name, and the shardings that follow from a model's specification.

Two axes: `data` splits the rows of a batch; `fsdp` splits them too, and besides one large axis of every matrix and its
moments. Weights are replicated over `data`. XLA's partitioner adds the communication.
"""

import contextlib
import itertools
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from riftco import _compat
from riftco.errors import BackendError, ConfigError
from riftco.models import DecoderConfig, spec, unflatten
from riftco.models.specification import LeafSpec
from riftco.types import PyTree

AXES = ("data", "fsdp")


def parse_axes(text: str) -> dict[str, int]:
    """The size of every axis that a flag describes, such as {"data": 4, "fsdp": 1} for "data=4".

    Raises:
        ConfigError: if the text does not describe a mesh.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if name not in AXES or name in sizes or not re.fullmatch("[0-9]{1,9}", count) or int(count) < 1:
            raise ConfigError(
                f"mesh: axes are written data=N or data=N,fsdp=M with N, M >= 1; got {text!r}; write data=2,fsdp=2, say"
            )
        sizes[name] = int(count)
    return {name: sizes.get(name, 1) for name in AXES}


def parse_mesh(text: str | None, devices: list[Any] | None = None) -> Mesh | None:
    """The mesh that a flag describes.

    Args:
        text: "data=4", "fsdp=8", "data=2,fsdp=2"; None for one device, or `data` over all devices where several
            processes run.
        devices: which devices to take them from, in order; all of them by default.

    Returns:
        A mesh with the axes data and fsdp, or None for a single device.

    Raises:
        ConfigError: if the text does not describe a mesh.
        BackendError: if there are fewer devices, or several processes run and the mesh leaves devices out.
    """
    devices = jax.devices() if devices is None else devices
    if text is None:
        if jax.process_count() == 1:
            return None
        text = f"data={len(devices)}"
    sizes = parse_axes(text)
    wanted = math.prod(sizes.values())
    if wanted > len(devices):
        raise BackendError(
            f"mesh: {text} needs {wanted} devices; there are {len(devices)} ({devices[0].platform}); use a smaller mesh"
        )
    if jax.process_count() > 1 and wanted != len(devices):
        raise BackendError(
            f"mesh: with {jax.process_count()} processes every device takes part; {text} uses {wanted} of "
            f"{len(devices)}; make the product {len(devices)}"
        )
    grid = np.array(devices[:wanted], dtype=object).reshape(tuple(sizes.values()))
    return _compat.automatic_mesh(grid, AXES)


def partition(leaf: LeafSpec, mesh: Mesh) -> PartitionSpec:
    """The axis of a leaf that `fsdp` splits: of a matrix the largest that divides evenly, of anything smaller none.

    The layers, which scan walks one by one, are never split.
    """
    count = mesh.shape["fsdp"]
    sizes = [(size, place) for place, size in enumerate(leaf.shape) if leaf.axes[place] != "layers"]
    even = [(size, -place) for size, place in sizes if size % count == 0]
    if count == 1 or not even or len(leaf.layer_shape) < 2:
        return PartitionSpec()
    place = -max(even)[1]
    return PartitionSpec(*(None,) * place, "fsdp")


def shardings(config: DecoderConfig, mesh: Mesh) -> PyTree:
    """A `NamedSharding` for every weight of a model, nested as the params."""
    return unflatten({name: NamedSharding(mesh, partition(leaf, mesh)) for name, leaf in spec(config).items()})


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over all devices."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def in_context(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Traces inside know the mesh: its devices decide which kernels run, and each runs them on its own rows."""
    return contextlib.nullcontext() if mesh is None else _compat.in_mesh(mesh)


def process_rows(mesh: Mesh | None, rows: int, micro_batch: int) -> tuple[int, int] | None:
    """Which rows of a batch this process feeds, start .. stop-1; None for all of them.

    Args:
        mesh: the mesh, or None.
        rows: of the whole batch.
        micro_batch: rows of one micro-batch, which must divide by the devices.

    Raises:
        ConfigError: if the rows do not divide, or this process's rows are not one stretch.
    """
    if mesh is None:
        return None
    if micro_batch % mesh.size:
        raise ConfigError(
            f"mesh: the rows of a micro-batch must be a multiple of the {mesh.size} devices; got batch_size "
            f"{micro_batch}; change batch_size or the mesh"
        )
    if jax.process_count() == 1:
        return None
    slices = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    bounds = sorted({index[0].indices(rows)[:2] for index in slices if index is not None})
    if any(left[1] != right[0] for left, right in itertools.pairwise(bounds)):
        raise ConfigError("mesh: the rows of a process must be one stretch; list the devices process by process")
    return bounds[0][0], bounds[-1][1]


def place_batch(arrays: PyTree, mesh: Mesh | None, rows: int) -> PyTree:
    """Host arrays on the devices, each row where it belongs.

    The arrays are copied first: on a CPU jax may otherwise read a NumPy buffer while its owner writes to it again.

    Args:
        arrays: pytree of NumPy arrays that lead with this process's rows.
        mesh: the mesh, or None.
        rows: of the whole batch.
    """
    arrays = jax.tree.map(lambda array: np.array(array, copy=True), arrays)
    if mesh is None:
        return jax.device_put(arrays)
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(arrays, sharding)
    whole = lambda array: jax.make_array_from_process_local_data(sharding, array, (rows, *array.shape[1:]))
    return jax.tree.map(whole, arrays)
