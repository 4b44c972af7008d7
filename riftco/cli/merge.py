"""`riftco merge`: a base and its adapters in, one plain model out."""

import dataclasses
from pathlib import Path
from typing import Any

from riftco.cli import models
from riftco.cli.console import Console
from riftco.cli.model_options import DeviceOptions
from riftco.cli.options import UsageError, flag
from riftco.cli.verbs import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeOptions(DeviceOptions):
    """Options of `merge`."""

    model: str | None = flag(
        None, "the base: a bundle, a run directory, a Hugging Face directory or a .gguf file", metavar="PATH"
    )
    adapter: str | None = flag(None, "a run of finetune, its final/, or a directory that PEFT wrote", metavar="DIR")
    out_dir: str | None = flag(None, "where the merged model goes, a bundle", metavar="DIR")
    force: bool = flag(False, "replace a bundle that is there")


def run(options: MergeOptions, console: Console) -> dict[str, Any]:
    """Load both, merge, measure, write."""
    from riftco import backend
    from riftco.tune import merged

    path = models.require(options.model)
    if not options.adapter:
        raise UsageError("--adapter is required: a run of finetune, its final/, or a directory that PEFT wrote")
    if not options.out_dir:
        raise UsageError("--out-dir is required: where the merged model goes")
    models.locate(path)
    backend.select(options.device)
    found = merged.merge_to_bundle(path, options.adapter, options.out_dir, force=options.force)
    for name, difference in found.differences.items():
        console.say(
            f"against the {name.replace('_', ' ')}: logits differ by at most {difference.max_abs:.3g}, "
            f"KL {difference.kl:.3g}, the likeliest token agrees at {difference.argmax_agreement:.1%}"
        )
    console.say(f"saved {options.out_dir}, {found.artifact_id}; riftco generate {options.out_dir} --prompt '…'")
    return {
        "out_dir": Path(options.out_dir),
        "artifact_id": found.artifact_id,
        "base": found.base,
        "adapter": found.adapter,
        "logit_difference": {name: difference._asdict() for name, difference in found.differences.items()},
    }


ACTIONS = {
    "": Action(
        MergeOptions, run, "fold adapters into their base: one model, that needs neither", None,
        "riftco merge --model runs/small --adapter runs/tuned --out-dir models/tuned",
    )
}  # fmt: skip
