"""`riftco aot`: a training or decoding step compiled for chips that are not here, and what it would need there."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from riftco.backend import CUDA_PLUGINS
from riftco.cli.console import Console
from riftco.cli.model_options import Attention, Dtype, ModelOptions, decoder_config
from riftco.cli.options import UsageError, flag, flag_name
from riftco.cli.verbs import Action
from riftco.errors import BackendError

_STEP = "step"
_TRAIN_ALONE = ("grad_accumulation_steps", "page_size", "attention", "grad_checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AotOptions(ModelOptions):
    """Options of `aot`."""

    target: str | None = flag(
        None,
        "the chips: a TPU slice by its grid, such as v5e:2x4, or one GPU",
        group=_STEP,
        metavar="v4:XxYxZ|v5e:XxY|v5p:XxYxZ|v6e:XxY|h200",
        shown="",
    )
    step: Literal["train", "decode"] = flag(
        "train", "one update, or one token of every row over a full cache", group=_STEP
    )
    batch_size: int = flag(16, "rows of a micro-batch, or of the cache; all chips together", group=_STEP)
    grad_accumulation_steps: int = flag(1, "micro-batches in an update", group=_STEP)
    page_size: int | None = flag(None, "scalars in a page of Adam's moments", group=_STEP, shown="not paged")
    dtype: Dtype = flag(  # noqa: RUF009
        "float32", "of activations and products; a decoding step's weights and cache too", group=_STEP
    )
    attention: Attention | None = flag(  # noqa: RUF009
        None, "how attention is computed", group=_STEP, shown="the fastest there"
    )
    grad_checkpoint: Literal["none", "block"] = flag(
        "none", "block keeps each block's input and runs the block again backwards", group=_STEP
    )
    mesh: str | None = flag(
        None, "chips by axis: data=4, or data=2,fsdp=2", group=_STEP, metavar="AXES", shown="data over all chips"
    )


def run(options: AotOptions, console: Console) -> dict[str, Any]:
    """Compile, and print what the compiler says."""
    if options.target is None:
        raise UsageError("--target must name the chips; got none; write --target v5e:2x4 or --target h200")
    with _muted():  # jax loads every plugin when it is first used
        _stay_on_the_cpu()
        from riftco import aot, targets

    config = decoder_config(options)
    with _muted():
        plan = _plan(aot, targets.chips(options.target), config, options)
    console.note(f"compiling for {plan.place.name} …")
    with _muted():
        report = plan.compile()
    rows = options.batch_size * options.grad_accumulation_steps
    what = (
        f"{rows} × {config.context} tokens" if report.step == "train" else f"a token of {rows} rows of {config.context}"
    )
    _show(report, what, console)
    summary = report.to_dict()
    if report.fits:
        return summary
    sentence = aot.too_large(report.step, f"{size(report.memory or 0)} of one {report.kind}", size(report.total))
    console.note(f"riftco: {sentence}")
    return {**summary, "error": sentence, "exit_status": 1}


def size(count: int) -> str:
    """Bytes in words."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"


# Reads what is muted, and gives it back if it does not end in the mark of an orderly end: the process has died.
_END = b"\0riftco: done\0"
_WATCH = f"import sys; x = sys.stdin.buffer.read(); x.endswith({_END!r}) or sys.stderr.buffer.write(x[-20000:])"


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Keep the compilers' logs and jax's warnings to themselves, unless tracebacks are asked for as well.

    The logs (that there is no driver, say) are written past Python. The warnings, such as that Pallas's Triton backend
    will go one day, are for those who write kernels. A compiler that aborts takes this process with it; then the end
    of what it wrote is shown by another, which watches.
    """
    if os.environ.get("RIFTCO_TRACEBACK", "0") not in ("", "0"):
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    watcher = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WATCH], stdin=subprocess.PIPE)
    assert watcher.stdin is not None
    try:
        with warnings.catch_warnings():
            os.dup2(watcher.stdin.fileno(), 2)
            watcher.stdin.close()
            warnings.simplefilter("ignore")
            yield
    finally:
        os.write(2, _END)
        os.dup2(kept, 2)
        os.close(kept)
        try:
            watcher.wait(timeout=10)
        except subprocess.TimeoutExpired:  # something that a compiler started still holds the pipe
            watcher.kill()
            watcher.wait()


def _stay_on_the_cpu() -> None:
    """Keep jax on the CPU, whatever plugins are installed."""
    from importlib.util import find_spec

    if not any(find_spec(module) for module in ("libtpu", *CUDA_PLUGINS)):
        raise BackendError(
            "aot: the compilers of the extra aot must be installed; neither libtpu nor jax's CUDA plugin is; make an "
            "environment for them with pip install 'riftco[aot]'"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_platforms", "cpu")


def _plan(aot: Any, place: Any, config: Any, options: AotOptions) -> Any:
    from riftco.train import TrainConfig

    if options.step == "decode":
        if given := [name for name in _TRAIN_ALONE if getattr(options, name) != _default(name)]:
            raise UsageError(f"{flag_name(given[0])} belongs to --step train; leave it out")
        return aot.plan_decode(place, config, batch_size=options.batch_size, dtype=options.dtype, mesh=options.mesh)
    names = [field.name for field in dataclasses.fields(TrainConfig) if hasattr(options, field.name)]
    settings: dict[str, Any] = {name: getattr(options, name) for name in names} | {"dropout": None}
    return aot.plan_train(place, config, TrainConfig(**settings))


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(AotOptions) if field.name == name)


def _show(report: Any, what: str, console: Console) -> None:
    axes = ", ".join(f"{name}={count}" for name, count in report.mesh.items() if count > 1)
    where = f"{report.chips} chips of {report.target}" if report.chips > 1 else f"one chip of {report.target}"
    if report.memory is None:
        room = ""
    else:
        room = f" of {size(report.memory)} on each chip: it {'fits' if report.fits else 'does not fit'}"
    counted = ""
    if report.counted_flops is not None:
        counted = f"; {report.counted_flops:.3g} counted by the compiler on each chip, loops once"
    kernels = ", ".join(f"{name} × {count}" for name, count in report.kernels.items()) or "none; all is XLA's own code"
    console.say(f"{report.step} step, {what}, on {where} ({report.kind})" + (f", {axes}" if axes else ""))
    console.say(f"  arguments    {size(report.arguments):>10}")
    console.say(f"  outputs      {size(report.outputs):>10}  besides those that overwrite arguments")
    console.say(f"  temporaries  {size(report.temporaries):>10}")
    console.say(f"  code         {size(report.code):>10}")
    console.say(f"  total        {size(report.total):>10}{room}")
    console.say(f"  FLOPs        {report.flops:>10.3g}  by the model's formula, all chips{counted}")
    console.say(f"  kernels      {kernels}")
    if report.attention is not None:
        console.say(f"  attention    {report.attention}")


ACTIONS = {
    "": Action(
        AotOptions, run, "compile a step for chips that are not here", "target",
        "riftco aot --target v5e:2x4 --preset gpt2 --dtype bfloat16 --batch-size 64", "pretrain",
    )
}  # fmt: skip
