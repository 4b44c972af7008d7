"""`riftco convert`: a model in another format, compared with its source."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any, Literal

from riftco.cli import models
from riftco.cli.console import Console
from riftco.cli.model_options import DeviceOptions
from riftco.cli.options import UsageError, flag
from riftco.cli.verbs import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(DeviceOptions):
    """Options of `convert`."""

    model: str | None = flag(
        None, "a bundle, a run directory, a Hugging Face directory, a .gguf file, or what convert wrote", metavar="PATH"
    )
    to: Literal["riftco", "hf", "gguf", "onnx"] | None = flag(
        None, "the format: riftco and hf are one, a Hugging Face directory with an identity"
    )
    out_dir: str | None = flag(None, "the directory to write: gguf makes model.gguf in it", metavar="DIR")
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(
        None, "of the weights of riftco and hf", shown="as they are"
    )
    type: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"] | None = flag(
        None, "of the matrices of gguf", shown="f32"
    )
    opset: Literal["18", "23"] | None = flag(None, "of onnx; 18 is for older runtimes", shown="23")
    verify: bool | None = flag(
        None, "compare the logits of source and result on a few rows", shown="below 2 billion parameters"
    )
    force: bool = flag(False, "replace what convert wrote there before")


def run(options: ConvertOptions, console: Console) -> dict[str, Any]:
    """Convert, then say what was made."""
    from riftco import backend

    path = models.require(options.model)
    if options.to is None:
        raise UsageError("--to is required: riftco, hf, gguf or onnx")
    if not options.out_dir:
        raise UsageError("--out-dir is required: the directory to write")
    for name, formats in {"dtype": ("riftco", "hf"), "type": ("gguf",), "opset": ("onnx",)}.items():
        if getattr(options, name) is not None and options.to not in formats:
            raise UsageError(f"--{name} is for --to {' and '.join(formats)}; got --to {options.to}; leave it out")
    backend.select(options.device)
    from riftco import interchange

    if os.path.lexists(options.out_dir) and not options.force and not _is_empty(Path(options.out_dir)):
        raise UsageError(f"--out-dir {options.out_dir} exists; name another directory, or replace it with --force")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        done = interchange.convert(
            path,
            options.out_dir,
            to=options.to,
            dtype=options.dtype,
            type=options.type,
            opset=None if options.opset is None else int(options.opset),
            verify=options.verify,
            force=options.force,
        )
    notes = [*(str(warning.message) for warning in caught if warning.category is UserWarning), *done.notes]
    for note in notes:
        console.note(note)
    files = {file.name: file.stat().st_size for file in sorted(done.path.iterdir())}
    console.say(f"{done.path}: {options.to} from {done.source_kind}, {sum(files.values()):,} bytes")
    for name, size in files.items():
        console.say(f"  {name:<32}{size:>16,}")
    console.say(f"  artifact_id  {done.artifact_id}")
    if done.reason is not None:
        console.say(f"  only riftco opens it: {done.reason}")
    if done.difference is not None:
        console.say(f"  against the source: {done.difference}")
    return {
        "out_dir": done.path,
        "to": options.to,
        "from": done.source_kind,
        "files": files,
        "artifact_id": done.artifact_id,
        "form": done.form,
        "reason": done.reason,
        "verification": None if done.difference is None else done.difference._asdict(),
        "notes": notes,
    }


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())


ACTIONS = {
    "": Action(
        ConvertOptions, run, "write a model in another format and compare it with its source", "model",
        "riftco convert runs/quickstart --to gguf --type q8_0 --out-dir exports/gguf",
    )
}  # fmt: skip
