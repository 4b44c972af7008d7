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
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from riftco import _compat
from riftco.errors import BackendError, ConfigError
from riftco.pallas import dispatch

# Bytes of memory of one chip. Source: the makers' data sheets; Google's GB are 2^30 bytes, NVIDIA's 10^9.
MEMORY = {"v4": 32 << 30, "v5e": 16 << 30, "v5p": 95 << 30, "v6e": 32 << 30, "h200": 141 * 10**9}
TPU_GENERATIONS = ("v4", "v5e", "v5p", "v6e")
EXAMPLES = "v5e:2x4, v6e:2x2 or h200"

# What XLA wants to know of an H200 SXM, in the words of its GpuTargetConfigProto. Source: NVIDIA H200 datasheet and the
# CUDA C++ programming guide, compute capability 9.0.
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
  device_memory_size: 151397597184
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
    devices: tuple[Any, ...]

    @property
    def kind(self) -> str:
        """As the runtime names it, such as "TPU v5 lite" or "NVIDIA H200"."""
        return self.devices[0].device_kind

    @property
    def memory(self) -> int | None:
        """Bytes of one device's memory; None for a chip that was described by a file.

        A device is a chip, but for v4, whose chips libtpu describes as two cores with half the memory each.
        """
        generation, _, grid = self.name.partition(":")
        if generation not in MEMORY:
            return None
        return MEMORY[generation] * math.prod(map(int, grid.split("x") if grid else ())) // len(self.devices)

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
        ConfigError: the name is none. BackendError: the compiler for it is not installed or refuses the grid.
    """
    name = target.strip().lower()
    generation, _, grid = name.partition(":")
    if name == "h200":
        return Chips(name, "cuda", _nvidia(H200))
    if generation not in TPU_GENERATIONS or not re.fullmatch(r"\d+x\d+(x\d+)?", grid):
        raise ConfigError(f"target: it must name chips, such as {EXAMPLES}; got {target!r}")
    return Chips(name, "tpu", _tpu(name))


def nvidia_from_file(path: Path | str) -> Chips:
    """The chip that a dumped GpuTargetConfigProto (text) describes; see experiments/kernels_hardware.py."""
    return Chips(Path(path).stem, "cuda", _nvidia(Path(path).read_text()))


def describe_attached() -> str | None:
    """The GPU of this process as the text that `nvidia_from_file` reads; None where the runtime has no such text."""
    return _compat.gpu_target_config()


def _tpu(name: str) -> tuple[Any, ...]:
    _require("libtpu", "TPU")
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
    grid = [int(part) for part in name.partition(":")[2].split("x")]
    # A host has 2 x 2 chips unless the slice is smaller; libtpu must be told.
    small = {"chips_per_host_bounds": (*grid, 1)} if len(grid) == 2 and math.prod(grid) < 4 else {}
    return _topology(name, platform="tpu", topology_name=name, **small)


def _nvidia(config: str) -> tuple[Any, ...]:
    _require("jax_cuda12_plugin", "NVIDIA")
    if not _has_ptxas():
        raise BackendError(
            "target: NVIDIA chips need ptxas, the assembler that jax's wheels leave out; there is none on PATH, in "
            "/usr/local/cuda or in /opt/cuda; pip install nvidia-cuda-nvcc-cu12"
        )
    return _topology("h200", platform="cuda", target_config=config, topology="1x1x1")


def _topology(name: str, **arguments: Any) -> tuple[Any, ...]:
    from jax.experimental import topologies

    try:
        return tuple(topologies.get_topology_desc(**arguments).devices)
    except Exception as error:  # the compilers raise whatever they like
        reason = " ".join(str(error).split())
        raise BackendError(f"target: {name} cannot be described: {reason}") from error


def _has_ptxas() -> bool:
    """Whether XLA will find the assembler: without it, some programs end the process instead of raising."""
    places = [Path("/usr/local/cuda/bin"), Path("/opt/cuda/bin")]
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.cuda_nvcc")
        places += [Path(place) / "bin" for place in (spec.submodule_search_locations or ())] if spec else []
    return shutil.which("ptxas") is not None or any((place / "ptxas").exists() for place in places)


def _require(module: str, maker: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise BackendError(
            f"target: the compiler for {maker} chips ({module}) is not installed; make an environment for it with "
            "pip install 'riftco[aot]'"
        )
