"""Chips that one can compile for without holding one, by the compilers of the extra `aot`.

A target is written `v5e:2x4` (a TPU slice by its grid of chips) or `h200`. libtpu compiles for TPU, jax's CUDA plugin
for NVIDIA; neither needs a driver or a chip, and jax itself stays on the CPU. NVIDIA's assembler, ptxas, is of the CUDA
toolkit or of the package nvidia-cuda-nvcc-cu12.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from riftco import _compat, backend
from riftco.errors import BackendError, ConfigError
from riftco.pallas import dispatch

# Bytes of memory of one chip: Google's GB are 2^30. Source: the data sheets of Cloud TPU.
TPU_MEMORY = {"v4": 32 << 30, "v5e": 16 << 30, "v5p": 95 << 30, "v6e": 32 << 30}
EXAMPLES = "v5e:2x4, v6e:2x2 or h200"

# The slices that can be had; libtpu describes many more. Source: Cloud TPU's pages on v4, v5e, v5p and v6e.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_MOST_CHIPS = {"v4": 4096, "v5p": 6144}  # of the generations whose slices are cubes, and larger ones made of cubes

# What XLA wants to know of an H200 SXM, in the words of its GpuTargetConfigProto. Source: NVIDIA H200 datasheet and the
# CUDA C++ programming guide, compute capability 9.0. The memory is what CUDA gives out of the 141 GB, 139.8 GiB.
H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 150109945856
  memory_bandwidth: 4800000000000
  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Chips:
    """Devices to compile for: a description, nothing that runs."""

    name: str
    platform: str  # "tpu" or "cuda"
    devices: tuple[Any, ...]  # one a chip
    memory: int | None = None  # bytes of one chip; None where that is not known

    @property
    def kind(self) -> str:
        """As the runtime names it, such as "TPU v5 lite" or "NVIDIA H200"."""
        return self.devices[0].device_kind

    @contextlib.contextmanager
    def tracing(self, mesh: Any = None) -> Generator[None, None, None]:
        """Traces and lowerings inside are for these chips: kernels are chosen, and tiles sized, for them.

        Args:
            mesh: of these chips, or None for the first one alone.
        """
        import jax
        import numpy as np

        mesh = jax.sharding.Mesh(np.asarray(self.devices[:1]), ("chips",)) if mesh is None else mesh
        with dispatch.target(self.platform, self.kind), _compat.in_mesh(mesh):
            yield

    def described(self, arguments: Any, sharding: Any = None) -> Any:
        """A tree of arrays or shapes as ShapeDtypeStruct that lie on these chips.

        Args:
            arguments: only shapes and dtypes matter.
            sharding: of every leaf; None puts them on the first chip.
        """
        import jax

        sharding = jax.sharding.SingleDeviceSharding(self.devices[0]) if sharding is None else sharding
        place = lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), x.dtype, sharding=sharding)
        return jax.tree_util.tree_map(place, arguments)

    def lower(self, function: Callable[..., Any], *arguments: Any, mesh: Any = None, **options: Any) -> Any:
        """A function lowered for these chips: jax's Lowered, whose `as_text` shows kernels before they are compiled.

        Args:
            function: what to jit.
            arguments: trees of arrays or ShapeDtypeStruct. Without a mesh only shapes and dtypes matter; with one every
                leaf is a ShapeDtypeStruct with a sharding on it.
            mesh: of these chips, or None for the first one alone.
            options: of `jax.jit`.
        """
        import jax

        arguments = self.described(arguments) if mesh is None else arguments
        with self.tracing(mesh):
            # A fresh function: jax caches traces by function, and another target's trace is another program.
            return jax.jit(lambda *args: function(*args), **options).lower(*arguments)

    def compile(self, function: Callable[..., Any], *arguments: Any, mesh: Any = None, **options: Any) -> Any:
        """A function compiled for these chips, as jax's Compiled: memory_analysis, cost_analysis, as_text.

        Arguments as `lower`.
        """
        return self.lower(function, *arguments, mesh=mesh, **options).compile()


def chips(target: str) -> Chips:
    """The chips that a target names.

    Args:
        target: such as "v5e:2x4", "v6e:2x2" or "h200".

    Raises:
        ConfigError: the name is none, or the generation has no such slice. BackendError: the compiler for it is not
            installed, or refuses it.
    """
    name = target.strip().lower()
    generation, _, grid = name.partition(":")
    if name == "h200":
        return _nvidia(name, H200)
    if generation not in TPU_MEMORY:
        raise ConfigError(f"target: it must name chips, such as {EXAMPLES}; got {target!r}")
    if not _is_slice(generation, grid):
        raise ConfigError(
            f"target: it must name chips, such as {EXAMPLES}; got {target!r}; the slices of {generation} are "
            f"{_slices(generation)}"
        )
    return Chips(name, "tpu", _tpu(name, grid), TPU_MEMORY[generation])


def nvidia_from_file(path: Path | str) -> Chips:
    """The chip that a dumped GpuTargetConfigProto (text) describes; see experiments/kernels_hardware.py.

    Raises:
        ConfigError: the file cannot be read. BackendError: as `chips`.
    """
    try:
        return _nvidia(Path(path).stem, Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"target: a description must be a text file that can be read; {path}: {error}") from error


def describe_attached() -> str | None:
    """The GPU of this process as the text that `nvidia_from_file` reads; None where the runtime has no such text."""
    return _compat.gpu_target_config()


def _is_slice(generation: str, grid: str) -> bool:
    if generation not in _MOST_CHIPS:
        return grid in _FLAT
    if grid in _CUBES or not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", grid):
        return grid in _CUBES
    sides = [int(side) for side in grid.split("x")]
    return (
        sides == sorted(sides) and all(side % 4 == 0 for side in sides) and math.prod(sides) <= _MOST_CHIPS[generation]
    )


def _slices(generation: str) -> str:
    """The slices of a generation, in words."""
    if generation not in _MOST_CHIPS:
        return ", ".join(_FLAT)
    return f"{', '.join(_CUBES)}, and AxBxC with A <= B <= C, all multiples of 4, up to {_MOST_CHIPS[generation]} chips"


def _tpu(name: str, grid: str) -> tuple[Any, ...]:
    _require(("libtpu",), "TPU")
    # libtpu otherwise looks for a TPU VM's metadata server, and for a lock that only one process may hold.
    for variable, value in {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": "disabled",
        "TPU_STDERR_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {}
    if grid == "1x1":  # a host has 2 x 2 chips otherwise; libtpu must be told
        options["chips_per_host_bounds"] = (1, 1, 1)
    if name.startswith("v4:"):  # the two cores of a chip as one device with all its memory, as jax runs it
        options["chip_config_name"] = "megacore"
    return _topology(name, platform="tpu", topology_name=name, **options)


def _nvidia(name: str, config: str) -> Chips:
    _require(backend.CUDA_PLUGINS, "NVIDIA")
    if not _has_ptxas():
        raise BackendError(
            "target: NVIDIA chips need ptxas, the assembler that jax's wheels leave out; there is none on PATH, in "
            "CUDA_ROOT, /usr/local/cuda or /opt/cuda; pip install nvidia-cuda-nvcc-cu12"
        )
    _require_scratch()
    memory = re.search(r"device_memory_size:\s*(\d+)", config)
    devices = _topology(name, platform="cuda", target_config=config, topology="1x1x1")
    return Chips(name, "cuda", devices, int(memory[1]) if memory else None)


def _topology(name: str, **arguments: Any) -> tuple[Any, ...]:
    from jax.experimental import topologies

    try:
        return tuple(topologies.get_topology_desc(**arguments).devices)
    except Exception as error:  # the compilers raise whatever they like
        reason = " ".join(str(error).split())
        raise BackendError(f"target: {name} cannot be described: {reason[:400]}") from error


def _has_ptxas() -> bool:
    """Whether XLA will find the assembler: without it, some programs end the process instead of raising."""
    roots = [Path(os.environ.get("CUDA_ROOT") or "/usr/local/cuda"), Path("/usr/local/cuda"), Path("/opt/cuda")]
    for package in ("nvidia.cuda_nvcc", "nvidia.cu13"):
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            roots += [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return shutil.which("ptxas") is not None or any((root / "bin" / "ptxas").exists() for root in roots)


def _require_scratch() -> None:
    """Refuse where XLA and ptxas cannot pass files to each other: some versions of XLA end the process there."""
    place = os.environ.get("TMPDIR") or "/tmp"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(8 << 20))  # more than a program is
    except OSError as error:
        raise BackendError(
            f"target: NVIDIA's assembler needs a directory for temporary files; {place}: {error.strerror or error}; "
            "set TMPDIR to one with room"
        ) from error


def _require(modules: tuple[str, ...], maker: str) -> None:
    """Refuse where none of the modules, any of which would do, is installed."""
    if not any(importlib.util.find_spec(module) for module in modules):
        raise BackendError(
            f"target: the compiler for {maker} chips ({' or '.join(modules)}) is not installed; make an environment "
            "for it with pip install 'riftco[aot]'"
        )
