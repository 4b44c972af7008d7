"""`riftco report`: a run directory as one HTML file."""

import dataclasses
from typing import Any

from riftco.cli.console import Console
from riftco.cli.options import Common, UsageError, flag
from riftco.cli.verbs import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions(Common):
    """Options of `report`."""

    out_dir: str | None = flag(None, "the run directory", metavar="DIR")
    output: str | None = flag(None, "where the page goes", metavar="FILE", shown="report.html in the run directory")


def run(options: ReportOptions, console: Console) -> dict[str, Any]:
    """Write the page."""
    from riftco.report import write_report

    if not options.out_dir:
        raise UsageError("--out-dir is required: a run directory, such as runs/quickstart")
    path = write_report(options.out_dir, options.output)
    console.say(f"{path}: open it in a browser")
    return {"path": path}


ACTIONS = {
    "": Action(
        ReportOptions,
        run,
        "write curves, figures and samples of a run, finished or not, as one HTML file",
        "out_dir",
        "riftco report runs/quickstart",
    )
}
