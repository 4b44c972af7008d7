"""Linear usage: what a term consumes, and how the parts of a term share it.

Parts of a product of maps (`;`, `let`, scrutinee and branches, keys and values, dictionary and query) must consume
different names: *multiplicative*. Parts of a sum of maps (components, branches, sides of `<|>`, entries) must consume
the same names: *additive*. `error` consumes nothing and swallows anything.
"""

import dataclasses
from collections.abc import Sequence

from riftco.cajal.diagnostics import CajalTypeError, Diagnostic, Place, Span, diagnostic


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a term consumes.

    Attributes:
        names: the consumed names, each with the place of one use.
        absorbs: whether any other name may be counted as consumed.
    """

    names: dict[str, Span | None]
    absorbs: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a term: its usage, what it is called in messages, and its place."""

    usage: Usage
    label: str
    span: Span | None


def multiplicative(rule: str, span: Span | None, parts: Sequence[Part]) -> Usage:
    """The usage of parts that must consume different names.

    Raises:
        CajalTypeError: two parts consume one name; one diagnostic a name.
    """
    names: dict[str, Span | None] = {}
    owner: dict[str, Part] = {}
    found: list[Diagnostic] = []
    for part in parts:
        for name, place in part.usage.names.items():
            if name in names:
                message = (
                    f"{rule}: its parts{{2}} must use different variables; {name} is used in {owner[name].label}{{0}} "
                    f"and again in {part.label}{{1}}; use it once"
                )
                places: list[Place] = [(names[name], "used here"), (place, "and again"), (span, f"the {rule}")]
                found.append(diagnostic(f"{rule}-twice", message, *places, variable=name))
            else:
                names[name], owner[name] = place, part
    if found:
        raise CajalTypeError(found)
    return Usage(names, any(part.usage.absorbs for part in parts))


def additive(rule: str, parts: Sequence[Part]) -> Usage:
    """The usage of parts that must consume the same names, but for parts that absorb.

    Raises:
        CajalTypeError: a part lacks a name; one diagnostic a name.
    """
    names: dict[str, Span | None] = {}
    owner: dict[str, Part] = {}
    for part in parts:
        for name, place in part.usage.names.items():
            names.setdefault(name, place)
            owner.setdefault(name, part)
    found: list[Diagnostic] = []
    for name, place in names.items():
        lacking = [part for part in parts if name not in part.usage.names and not part.usage.absorbs]
        if lacking:
            message = (
                f"{rule}: every part must use the same variables; {name} is used in {owner[name].label}{{0}} but not "
                f"in {lacking[0].label}{{1}}; use it in both or in neither"
            )
            places: list[Place] = [(place, "used here"), (lacking[0].span, "not used here")]
            found.append(diagnostic(f"{rule}-usage", message, *places, variable=name))
    if found:
        raise CajalTypeError(found)
    return Usage(names, all(part.usage.absorbs for part in parts))


def closed(
    usage: Usage, name: str, rule: str, binder: Span | None, body: Span | None
) -> tuple[Usage, list[Diagnostic]]:
    """The usage outside the scope of a name, and what is wrong if its scope did not consume it.

    Args:
        usage: the usage inside the scope.
        name: the name that goes out of scope.
        rule: what bound it.
        binder: where it is bound.
        body: its scope.
    """
    found = []
    if name not in usage.names and not usage.absorbs:
        message = (
            f"{rule}: a variable must be used once; {name}{{0}} is never used in its scope{{1}}; use or discard it"
        )
        places: list[Place] = [(binder, "bound here"), (body, f"never uses {name}")]
        found.append(diagnostic(f"{rule}-unused", message, *places, variable=name))
    return Usage({used: place for used, place in usage.names.items() if used != name}, usage.absorbs), found
