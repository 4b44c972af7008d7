"""Which device jax runs on: one policy, decided before jax starts, from what the machine shows.

Looking costs nothing and touches no accelerator: an installed plugin is found by its module, a chip by the files that
its driver makes. A plugin whose chip is not there is never started, so a plain machine never waits for one.
"""

import glob
import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path

from riftco.errors import BackendError, ConfigError

DEVICES = ("auto", "cpu", "cuda", "tpu", "metal")
_PREFERENCE = ("tpu", "cuda", "metal")
_DEVICE_OF = {"gpu": "cuda", "mps": "metal"}  # jax's other names
# Plugins for Apple's GPUs, in the order they are taken: module, jax's name of the platform, distribution.
METAL_PLUGINS = (
    ("jax_plugins.mps", "mps", "jax-mps"),
    ("jax_plugins.metal", "metal", "metaljax"),
    ("jax_plugins.metal_plugin", "METAL", "jax-metal"),
)
JAX_OF_METAL = "0.4.34"  # the one that jax-metal was built for
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_GOOGLE = "0x1ae0"  # the PCI vendor of TPUs; other accelerators of that vendor have no libtpu beside them


def canonical(platform: str) -> str:
    """Our name of a platform that jax may name otherwise."""
    return _DEVICE_OF.get(platform.lower(), platform.lower())


def missing(device: str) -> str | None:
    """Why a device cannot be used here, as half a sentence; None where plugin and chip are both there.

    Args:
        device: "cpu", "cuda", "tpu" or "metal".
    """
    if device == "cpu":
        return None
    if device == "tpu":
        if not _installed("libtpu"):
            return "libtpu is not installed (pip install 'riftco[tpu]')"
        return None if _has_tpu() else "libtpu is installed, but this machine shows no TPU"
    if device == "cuda":
        if not any(_installed(name) for name in CUDA_PLUGINS):
            return "no CUDA plugin of jax is installed (pip install 'riftco[cuda12]' or 'riftco[cuda13]')"
        return None if _has_nvidia() else "a CUDA plugin is installed, but this machine shows no NVIDIA driver"
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return f"Metal needs macOS on Apple silicon; this is {sys.platform} on {platform.machine()}"
    if metal_plugin() is not None:
        return None
    if _installed("jax_plugins.metal_plugin"):
        fits = f"jax-metal works with jax {JAX_OF_METAL} alone"
        return f"{fits} and this is jax {_version('jax')} (pip install 'riftco[metal]')"
    return "no Metal plugin is installed (pip install 'riftco[metal]', or jax-mps or metaljax beside a newer jax)"


def metal_plugin() -> tuple[str, str] | None:
    """(distribution, jax's name of its platform) of the Metal plugin that this jax can use; None without one."""
    old = _version("jax") == JAX_OF_METAL
    for module, platform_name, distribution in METAL_PLUGINS:
        if _installed(module) and (distribution == "jax-metal") == old:
            return distribution, platform_name
    return None


def choose(device: str = "auto") -> str:
    """The device that a flag means on this machine: "cpu", "cuda", "tpu" or "metal".

    "auto" is the first name in JAX_PLATFORMS where that is set, which jax is left to start; else the first of TPU,
    CUDA, Metal that is there, else the CPU.

    Raises:
        ConfigError: an unknown name, in JAX_PLATFORMS too. BackendError: a named device is not there; the reason is in
            the message.
    """
    if device not in DEVICES:
        raise ConfigError(f"device: the name must be one of {', '.join(DEVICES)}; got {device!r}")
    if device == "auto":
        asked = os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
        asked = canonical(asked)
        if asked and asked not in DEVICES[1:]:
            raise ConfigError(
                f"device: JAX_PLATFORMS must begin with one of {', '.join(DEVICES[1:])}, which riftco runs on; got "
                f"{os.environ['JAX_PLATFORMS']!r}; unset it, or name a device by --device"
            )
        if asked:
            return asked
        return next((name for name in _PREFERENCE if missing(name) is None), "cpu")
    reason = missing(device)
    if reason is not None:
        raise BackendError(f"device: {device} was asked for; {reason}; use --device auto or --device cpu")
    return device


def select(device: str = "auto") -> str:
    """Make jax run on a device, and start it. Nothing falls back: a device that does not start is an error.

    Args:
        device: "auto", "cpu", "cuda", "tpu" or "metal"; see `choose`.

    Returns:
        The device chosen.

    Raises:
        ConfigError, BackendError: as `choose`; also where jax already runs on something else or cannot start.
    """
    chosen = choose(device)
    # The CPU stays available beside an accelerator, for what is prepared on the host.
    platforms = "cpu" if chosen == "cpu" else f"{_platform(chosen)},cpu"
    kept = os.environ.get("JAX_PLATFORMS") if device == "auto" else None
    os.environ["JAX_PLATFORMS"] = kept or platforms
    import jax

    jax.config.update("jax_platforms", kept or platforms)
    try:
        running = jax.default_backend()
    except Exception as error:  # jax and its plugins raise whatever they like
        reason = missing(chosen) or " ".join(str(error).split()) or type(error).__name__
        asked = "JAX_PLATFORMS asks for it" if kept else "it was asked for"
        raise BackendError(
            f"device: {chosen} did not start, and {asked}; {reason}; use --device cpu to go on without it"
        ) from error
    running = canonical(running)
    if running != chosen:
        raise BackendError(
            f"device: {chosen} was asked for; jax already runs on {running} in this process; start a new process"
        )
    return chosen


def _platform(device: str) -> str:
    """The name that jax has for a device."""
    plugin = metal_plugin() if device == "metal" else None
    return device if plugin is None else plugin[1]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _has_tpu() -> bool:
    if glob.glob("/dev/accel[0-9]*"):
        return True
    vendors = (Path(path).read_text().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor"))
    return bool(glob.glob("/dev/vfio/[0-9]*")) and _GOOGLE in vendors


def _has_nvidia() -> bool:
    # /dev/dxg is how a GPU looks from the Windows subsystem for Linux.
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))
