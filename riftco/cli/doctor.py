"""`riftco doctor`: versions, devices, what works, and what each missing extra would add."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import time
from typing import Any

from riftco.cli.console import Console
from riftco.cli.model_options import DeviceOptions
from riftco.cli.options import flag
from riftco.cli.verbs import Action
from riftco.errors import RiftcoError

_PACKAGES = (
    "jax", "jaxlib", "numpy", "chex", "orbax-checkpoint", "etils", "safetensors", "regex", "jinja2", "gguf", "onnx",
    "rich", "PyYAML",
)  # fmt: skip
_EXTRAS = {
    "test": (
        "pytest xdist hypothesis optax tokenizers onnxruntime",
        "the test suite, and the peers of riftco bench",
    ),
    "parity": ("torch transformers", "checks against transformers and PyTorch"),
    "flax": ("flax", "models as nnx modules"),
    "tpu": ("libtpu", "training and generating on TPUs"),
    "cuda12": ("jax_cuda12_plugin", "training and generating on NVIDIA GPUs, CUDA 12"),
    "cuda13": ("jax_cuda13_plugin", "training and generating on NVIDIA GPUs, CUDA 13"),
    "metal": ("jax_plugins.metal_plugin", "the single-device core on Apple silicon"),
    "aot": ("libtpu jax_cuda12_plugin", "compiling for chips that are not here"),
    "docs": ("mkdocs", "building the documentation site"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions(DeviceOptions):
    """Options of `doctor`."""

    kernels: bool = flag(False, "say which kernels there are, and which one each op takes on the device, and why")


def run(options: DoctorOptions, console: Console) -> dict[str, Any]:
    """Look, and try the smallest of everything."""
    import riftco
    from riftco import backend

    packages = {"riftco": riftco.__version__, "python": platform.python_version()}
    packages |= {name: _version(name) for name in _PACKAGES}
    console.say(f"{platform.platform()}, {os.cpu_count()} cores")
    for name, version in packages.items():
        console.say(f"  {name:<18}{version or 'MISSING: pip install riftco installs it'}")

    chosen = backend.select(options.device)
    import jax

    devices = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
    console.say(f"\ndevices (--device {options.device} is {chosen})")
    for text in devices:
        console.say(f"  {text}")
    reasons = {name: reason for name in ("tpu", "cuda", "metal") if (reason := backend.missing(name)) is not None}
    for name, reason in reasons.items():
        console.say(f"  no {name}: {reason}")

    console.say("\nworks")
    checks = {name: _attempt(check) for name, check in _CHECKS.items()}
    for name, problem in checks.items():
        console.say(f"  {name:<40}{'yes' if problem is None else f'NO: {problem}'}")

    kernels = _kernels(console) if options.kernels else None

    console.say("\nextras")
    extras = {name: all(_there(module) for module in modules.split()) for name, (modules, _) in _EXTRAS.items()}
    for name, present in extras.items():
        what = _EXTRAS[name][1]
        console.say(f"  {name:<10}" + (f"there: {what}" if present else f"pip install 'riftco[{name}]' adds {what}"))
    broken = [name for name, problem in checks.items() if problem is not None]
    return {
        "packages": packages,
        "device": chosen,
        "devices": devices,
        "missing_devices": reasons,
        "checks": {name: problem or "yes" for name, problem in checks.items()},
        "extras": extras,
        **({} if kernels is None else {"kernels": kernels}),
        "exit_status": 1 if broken else 0,
    }


def _kernels(console: Console) -> list[dict[str, str]]:
    """What `implementation=None` takes on the device, and why."""
    from riftco.pallas import current_target, explain

    device = current_target()
    console.say(f"\nkernels (on {device.platform} {device.kind})".rstrip())
    rows = explain(device)
    for op, implementation, reason in rows:
        console.say(f"  {op:<18}{implementation:<19}{reason}")
    return [{"op": op, "implementation": name, "reason": reason} for op, name, reason in rows]


def _train_step() -> None:
    import jax
    import jax.numpy as jnp

    import riftco
    from riftco import models, optim

    config = models.DecoderConfig(vocab_size=16, context=8, width=8, heads=2, layers=1, hidden=16)
    params = models.init(jax.random.key(0), config)
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    init, update = optim.adam(1e-2)

    def step(params: Any, state: Any) -> Any:
        _, grads = riftco.value_and_grad(lambda p: models.loss(p, tokens, tokens, config))(params)
        return update(grads, state, params)

    stats = jax.jit(step)(params, init(params))[2]
    if not bool(stats.ok):
        raise RiftcoError("the step was not finite")


def _generation() -> None:
    import jax

    import riftco
    from riftco import models

    config = models.preset("llama-tiny", vocab_size=32, context=16, layers=1)
    ids = riftco.generate(models.init(jax.random.key(0), config), config, [1, 2], max_tokens=2, temperature=0)
    if len(ids) != 2:
        raise RiftcoError(f"two tokens were asked for; {len(ids)} came")


def _derivatives() -> None:
    import jax.numpy as jnp

    import riftco
    from riftco import ops

    riftco.check_grads(lambda x: ops.tanh(ops.matmul(x, x)), (jnp.linspace(-1.0, 1.0, 4).reshape(2, 2),))


def _tokenizer() -> None:
    from riftco import tokenizers

    made = tokenizers.train("bpe", "low lower lowest", vocab_size=260, pattern="gpt2")
    if made.decode(made.encode("lowest low")) != "lowest low":
        raise RiftcoError("the text did not come back")


_CHECKS = {
    "tokenizer: there and back": _tokenizer,
    "derivatives against finite differences": _derivatives,
    "a compiled training step": _train_step,
    "generation": _generation,
}


def _attempt(check: Any) -> str | None:
    """None, or what went wrong in one line: the other checks are still of use."""
    started = time.monotonic()
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())} (after {time.monotonic() - started:.1f} s)"
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


ACTIONS = {"": Action(DoctorOptions, run, "say what this machine can do", None, "riftco doctor")}
