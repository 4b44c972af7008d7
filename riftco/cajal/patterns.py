"""Patterns: which arm of a `case` each summand has."""

from riftco.cajal import terms, types
from riftco.cajal.diagnostics import refuse


def covered(term: terms.Case, scrutinee: types.Sum) -> list[terms.Arm]:
    """The arm of each summand, in the order of the sum.

    Raises:
        CajalTypeError: an arm is missing, unreachable, out of range, or a number where the summand is not 1.
    """
    found: dict[int, terms.Arm] = {}
    count = len(scrutinee.parts)
    for position, arm in enumerate(term.arms):
        if arm.index is None:
            numbers = [i for i in range(count) if i not in found]
            if position != len(term.arms) - 1 or not numbers:
                why = "comes last" if position != len(term.arms) - 1 else "must have a summand left to match"
                refuse(
                    "case-rest",
                    f"case: the pattern `_`{{0}} {why}; the case{{1}} has {count} summands",
                    (arm.span, "matches nothing that is left" if not numbers else "not the last"),
                    (term.span, "the case"),
                )
        else:
            numbers = [arm.index]
        for number in numbers:
            if not 0 <= number < count:
                refuse(
                    "case-index",
                    f"case: a pattern{{0}} must name a summand of the scrutinee{{1}}, below {count}; got {number}",
                    (arm.span, f"summand {number}"),
                    (term.scrutinee.span, f"has the type {scrutinee}"),
                )
            if number in found:
                refuse(
                    "case-again",
                    f"case: each summand has one arm; summand {number}{{0}} has one already{{1}}",
                    (arm.span, "again"),
                    (found[number].span, "first"),
                )
            if arm.name is None and not isinstance(scrutinee.parts[number], types.Unit):
                refuse(
                    "case-payload",
                    f"case: the pattern {written(arm)}{{0}} matches a summand that is 1; summand {number} of the "
                    f"scrutinee{{1}} is {scrutinee.parts[number]}; write `inj {number} x`",
                    (arm.span, f"matches summand {number}"),
                    (term.scrutinee.span, f"has the type {scrutinee}"),
                )
            found[number] = arm
    if missing := [number for number in range(count) if number not in found]:
        refuse(
            "case-missing",
            f"case: every summand must have an arm; the case{{0}} has none for {', '.join(map(str, missing[:5]))}"
            f"{' …' if len(missing) > 5 else ''} of the scrutinee{{1}}",
            (term.span, "the case"),
            (term.scrutinee.span, f"has the type {scrutinee}"),
        )
    return [found[number] for number in range(count)]


def written(arm: terms.Arm) -> str:
    """A pattern as text."""
    return "`_`" if arm.index is None else f"{arm.index}" if arm.name is None else f"inj {arm.index} {arm.name}"
