"""Few rows that hold every pair of options: most faults need two options together, hardly any needs three."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows, one value for each factor, such that any two values of two factors stand together in one of them.

    Greedy and without chance: each row begins with the first pair that is still missing and takes, factor by factor,
    the value that completes most of the missing ones.

    Args:
        factors: for each option its values, all hashable.
    """
    names = list(factors)
    missing = {
        frozenset(((a, x), (b, y))) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    order = [
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for pair in order:
        if frozenset(pair) not in missing:
            continue
        row = dict(pair)
        for name in names:
            if name not in row:
                row[name] = max(
                    factors[name],
                    key=lambda value, name=name: sum(
                        frozenset(((name, value), other)) in missing for other in row.items()
                    ),
                )
        missing -= {frozenset(two) for two in itertools.combinations(row.items(), 2)}
        rows.append({name: row[name] for name in names})
    return rows


def label(row: Mapping[str, Any]) -> str:
    """A row as the name of a test."""
    return "-".join(f"{name}={value}" for name, value in row.items())
