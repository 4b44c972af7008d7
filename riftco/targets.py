"""Chips that one can compile for without holding one, by the compilers of the extra `aot`.

A target is written `v5e:2x4` (a TPU slice by its grid of chips) or `h200`. libtpu compiles for TPU, jax's CUDA plugin
for NVIDIA; neither needs a driver, a toolkit or a chip, and jax itself stays on the CPU.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from riftco.errors import BackendError, ConfigError
from riftco.pallas import dispatch

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

    @contextlib.contextmanager
    def tracing(self) -> Generator[None, None, None]:
        """Traces and lowerings inside are for these chips: kernels are chosen, and tiles sized, for them."""
        import jax
        import numpy as np

        mesh = jax.sharding.Mesh(np.asarray(self.devices[:1]), ("chips",))
        with dispatch.target(self.platform, self.kind), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield

    def compile(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function compiled for the first chip, as jax's Compiled: memory_analysis, cost_analysis, as_text.

        Args:
            function: what to jit.
            arguments: trees of arrays or ShapeDtypeStruct; only shapes and dtypes matter.
        """
        import jax

        sharding = jax.sharding.SingleDeviceSharding(self.devices[0])
        described = jax.tree_util.tree_map(
            lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), x.dtype, sharding=sharding), arguments
        )
        with self.tracing():
            # A fresh function: jax caches traces by function, and another target's trace is another program.
            return jax.jit(lambda *args: function(*args)).lower(*described).compile()


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


def _tpu(name: str) -> tuple[Any, ...]:
    _require("libtpu", "TPU")
    # libtpu else looks for a TPU VM's metadata server, and for a lock that only one process may hold.
    for variable, value in {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }.items():
        os.environ.setdefault(variable, value)
    return _topology(name, platform="tpu", topology_name=name)


def _nvidia(config: str) -> tuple[Any, ...]:
    _require("jax_cuda12_plugin", "NVIDIA")
    return _topology("h200", platform="cuda", target_config=config, topology="1x1x1")


def _topology(name: str, **arguments: Any) -> tuple[Any, ...]:
    from jax.experimental import topologies

    try:
        return tuple(topologies.get_topology_desc(**arguments).devices)
    except Exception as error:  # the compilers raise whatever they like
        reason = " ".join(str(error).split())
        raise BackendError(f"target: {name} cannot be described: {reason}") from error


def _require(module: str, maker: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise BackendError(
            f"target: the compiler for {maker} chips ({module}) is not installed; make an environment for it with "
            "pip install 'riftco[aot]'"
        )
