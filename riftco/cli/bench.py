"""`riftco bench train|tokenizer`: hands the command line to the race of that name."""

import importlib
from collections.abc import Sequence

from riftco.cli import help
from riftco.cli.verbs import BENCHES
from riftco.errors import ConfigError


def dispatch(words: Sequence[str]) -> int:
    """Run a race.

    Args:
        words: what stands after `riftco bench`.

    Returns:
        Its exit status.

    Raises:
        ConfigError: there is no such race.
    """
    if not words or words[0] in ("-h", "--help", "help"):
        print(help.group("bench"))
        return 0 if words else 2
    if words[0] not in BENCHES:
        raise ConfigError(f"bench: one of {', '.join(BENCHES)} is required; got {words[0]!r}")
    race = importlib.import_module(f"riftco.cli.bench_{words[0]}")
    try:
        return int(race.main(list(words[1:])) or 0)
    except SystemExit as stop:  # how argparse leaves, its sentence already printed
        return stop.code if isinstance(stop.code, int) else 2
