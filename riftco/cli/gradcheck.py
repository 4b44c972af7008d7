"""`riftco gradcheck`: every op and module against its oracle and finite differences, as a table."""

import dataclasses
from typing import Any

from riftco.cli.console import Console
from riftco.cli.model_options import DeviceOptions
from riftco.cli.options import flag
from riftco.cli.verbs import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradcheckOptions(DeviceOptions):
    """Options of `gradcheck`."""

    only: tuple[str, ...] = flag((), "ops and modules by name", metavar="NAME …", shown="all")


def run(options: GradcheckOptions, console: Console) -> dict[str, Any]:
    """Run the registry and print the table; exit status 1 where a row fails."""
    from riftco import backend

    backend.select(options.device)
    from riftco import gradcheck

    console.note(f"checking {', '.join(options.only) or 'every op and module; this takes some minutes'}")
    rows = gradcheck.rows(options.only)
    console.say(gradcheck.table(rows))
    failed = [row.subject for row in rows if not row.passed]
    return {
        "checks": len(rows),
        "failed": len(failed),
        "subjects_failed": list(dict.fromkeys(failed)),
        "rows": [dataclasses.asdict(row) for row in rows],
        "exit_status": 1 if failed else 0,
    }


ACTIONS = {
    "": Action(
        GradcheckOptions,
        run,
        "check every derivative against its oracle and finite differences",
        "only",
        "riftco gradcheck softmax attention",
    ),
}
