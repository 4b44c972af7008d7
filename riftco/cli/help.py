"""Help from the options' own declarations: text for a terminal, Markdown for docs/cli.md.

`python -m riftco.cli.help` writes the reference part of docs/cli.md anew.
"""

import dataclasses
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from riftco.cli.options import Kind, flag_name, kinds
from riftco.cli.verbs import BENCHES, VERBS, Action, actions

MARKER = "<!-- what follows is written by python -m riftco.cli.help -->"
_WIDTH = 110
_COLUMN = 34

PRECEDENCE = (
    "Flags take dashes or underscores. Options come from --config FILE, then RIFTCO_* variables (RIFTCO_BATCH_SIZE), "
    "then flags; the later wins."
)


def top() -> str:
    """What `riftco --help` prints."""
    rows = "\n".join(f"  {verb:<12}{text}" for verb, text in VERBS.items())
    return (
        "usage: riftco VERB [options]\n\nText to a trained model that writes, on JAX and XLA.\n\nverbs:\n"
        f"{rows}\n\n`riftco VERB --help` explains a verb; `riftco --version` prints the version. "
        "Start with `riftco quickstart`."
    )


def group(verb: str) -> str:
    """What `riftco data --help` prints."""
    if verb == "bench":
        lines = [f"  {name:<12}riftco bench {name} --help" for name in BENCHES]
    else:
        lines = [f"  {name:<12}{action.help}" for name, action in actions(verb).items()]
    return (
        f"usage: riftco {verb} {'|'.join(line.split()[0] for line in lines)} [options]\n\n{VERBS[verb]}\n\n"
        + "\n".join(lines)
    )


def verb(name: str, action: Action) -> str:
    """What `riftco NAME --help` prints."""
    word = f" {_word(action)}" if action.positional else ""
    parts = [f"usage: riftco {name}{word} [options]", "", _sentence(action.help)]
    if action.example:
        parts += ["", f"  {action.example}"]
    for heading, fields in _grouped(action.options):
        parts += ["", f"{heading or 'options'}:"]
        for field, kind in fields:
            left = f"  {_spelling(field, kind)}"
            text = textwrap.wrap(_explained(field, kind), _WIDTH - _COLUMN)
            if len(left) >= _COLUMN:
                parts += [left, *(" " * _COLUMN + line for line in text)]
            else:
                parts += [f"{left:<{_COLUMN}}{text[0]}", *(" " * _COLUMN + line for line in text[1:])]
    return "\n".join([*parts, "", *textwrap.wrap(PRECEDENCE, _WIDTH)])


def markdown() -> str:
    """The reference part of docs/cli.md: every verb with a table of its options."""
    parts: list[str] = []
    for name in VERBS:
        if name == "bench":
            parts += [
                "## riftco bench",
                "",
                f"{_sentence(VERBS[name])} "
                + " and ".join(f"`riftco bench {b} --help`" for b in BENCHES)
                + " list the options. Each race reads its own command line: it takes no `--config` and no `RIFTCO_*` "
                "variable, and its `--json` prints one line a row.",
                "",
            ]
            continue
        for sub, action in actions(name).items():
            parts += [f"## riftco {name} {sub}".rstrip(), "", _sentence(action.help), ""]
            if action.example:
                parts += ["```text", action.example, "```", ""]
            if action.positional:
                parts += [f"A bare word is `{flag_name(action.positional)}`.", ""]
            parts += ["| Option | Meaning |", "| --- | --- |"]
            for heading, fields in _grouped(action.options):
                if heading != "common":
                    parts += [f"| `{_escaped(_spelling(f, k))}` | {_escaped(_explained(f, k))} |" for f, k in fields]
            parts.append("")
    return "\n".join(parts)


def _word(action: Action) -> str:
    """What a bare word is: the forms that it has, where the option lists them, or its name."""
    field = next(field for field in dataclasses.fields(action.options) if field.name == action.positional)
    metavar = field.metadata["metavar"]
    return metavar if "|" in metavar else field.name.upper()


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _escaped(text: str) -> str:
    """Text for a table's cell, which a bar would end."""
    return text.replace("|", "\\|")


def _grouped(options: type) -> Iterator[tuple[str, list[tuple[dataclasses.Field[Any], Kind]]]]:
    """(heading, fields) in order of first appearance, what every verb has at the end."""
    found: dict[str, list[tuple[dataclasses.Field[Any], Kind]]] = {}
    for field in dataclasses.fields(options):
        found.setdefault(field.metadata["group"], []).append((field, kinds(options)[field.name]))
    common = found.pop("common", [])
    yield from found.items()
    yield "common", common


def _spelling(field: dataclasses.Field[Any], kind: Kind) -> str:
    if kind.base is bool:
        return flag_name(field.name) if field.default is False else f"{flag_name(field.name)} (--no-…)"
    return f"{flag_name(field.name)} {field.metadata['metavar'] or kind.metavar}"


def _explained(field: dataclasses.Field[Any], kind: Kind) -> str:
    shown = field.metadata["shown"]
    if shown is None and field.default is not False and field.default not in (None, (), ""):
        shown = (
            str(field.default).lower()
            if kind.base is bool
            else f"{field.default:g}"
            if kind.base is float
            else str(field.default)
        )
    return field.metadata["help"] + (f" (default: {shown})" if shown else "")


def _rewrite(path: Path) -> None:
    """Put the reference after the marker of a page."""
    before, marker, _ = path.read_text(encoding="utf-8").partition(MARKER)
    path.write_text(before + marker + "\n\n" + markdown(), encoding="utf-8")


if __name__ == "__main__":
    _rewrite(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/cli.md"))
