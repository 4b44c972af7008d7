"""Instructions whose parts are learned and whose combinations are not: data to measure generalization with.

An instruction names one or two operations on a list of words: "Reverse the words, then drop the first: ant, bee, fox".
Training rows have every operation alone and most ordered pairs. Some pairs are held out, in both orders: they are in
the test rows alone, where every operation in them is known, at its place in the pair, from other pairs.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from riftco.data import story_words
from riftco.data._checks import positive_integer, unsigned_integer
from riftco.data.splits import ExampleSplits, write_splits

Words = list[str]

OPERATIONS: dict[str, tuple[str, Callable[[Words], Words]]] = {
    "reverse": ("reverse the words", lambda words: words[::-1]),
    "sort": ("sort the words", sorted),
    "drop_first": ("drop the first word", lambda words: words[1:]),
    "drop_last": ("drop the last word", lambda words: words[:-1]),
    "double_first": ("say the first word twice", lambda words: [words[0], *words]),
    "rotate": ("move the first word to the end", lambda words: [*words[1:], words[0]]),
    "swap_ends": ("swap the first and the last word", lambda words: [words[-1], *words[1:-1], words[0]]),
    "spell_last": ("spell the last word", lambda words: [*words[:-1], "-".join(words[-1])]),
}
"""Operation -> (its words, what it does to a list of at least two)."""

_NAMES = tuple(OPERATIONS)
HELD_OUT: frozenset[tuple[str, str]] = frozenset(
    (first, _NAMES[(index + step) % len(_NAMES)]) for step in (3, 5) for index, first in enumerate(_NAMES)
)
"""The ordered pairs that no training row has; with each pair its reverse, since some operations commute."""


def generate_compositions(n: int, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Rows of {"prompt", "completion", "operations", "held_out"} in three splits.

    Args:
        n: training rows; validation and test have a quarter of that each, at least one row.
        seed: which rows; a longer training split of the same seed begins with the shorter one.

    Returns:
        {"train", "validation", "test"} -> rows. Validation asks for what training asks for, of other words. Every
        second test row is a held-out pair (`held_out` is true), the others are as in validation. No prompt is in two
        splits.

    Raises:
        ConfigError: n < 1, or a seed that is none.
    """
    count = positive_integer("generate_compositions", "n", n)
    seed = unsigned_integer("generate_compositions", "seed", seed)
    known: list[tuple[str, ...]] = [(name,) for name in _NAMES]
    known += [(a, b) for a in _NAMES for b in _NAMES if a != b and (a, b) not in HELD_OUT]
    pools: dict[str, Sequence[Sequence[tuple[str, ...]]]] = {
        "train": (known,),
        "validation": (known,),
        "test": (known, sorted(HELD_OUT)),
    }
    splits: dict[str, list[dict[str, Any]]] = {}
    for place, (split, choices) in enumerate(pools.items()):
        draw = random.Random(seed * len(pools) + place).randrange
        size = count if split == "train" else max(1, count // 4)
        splits[split] = []
        while len(splits[split]) < size:
            turn = choices[(len(splits[split]) + 1) % len(choices)]
            row = _row(turn[draw(len(turn))], draw)
            if _split_of(row["prompt"]) == split:
                splits[split].append(row)
    return splits


def write_compositions(out_dir: str | Path, n: int, seed: int = 0, *, force: bool = False) -> ExampleSplits:
    """`generate_compositions` as a directory of splits, which `load_examples` verifies.

    Args:
        out_dir: appears whole or not at all.
        n: training rows.
        seed: which rows.
        force: replace a directory of splits.

    Raises:
        DataError: the directory exists, or cannot be written. ConfigError: as `generate_compositions`.
    """
    rows = generate_compositions(n, seed)
    sides = {name: "".join(json.dumps(row) + "\n" for row in side).encode() for name, side in rows.items()}
    source = {"generator": "compositions", "rows": n}
    splits = ExampleSplits.of(source, "completion", seed, sides)
    write_splits(out_dir, splits, sides, force=force)
    return splits


def _split_of(prompt: str) -> str:
    """A word list belongs to one split for every seed, so that no split repeats another's questions."""
    words = prompt.rpartition(": ")[2]
    return ("train", "train", "validation", "test")[sum(map(ord, words)) % 4]


def _row(operations: tuple[str, ...], draw: Callable[[int], int]) -> dict[str, Any]:
    size, words = 3 + draw(3), []
    while len(words) < size:
        word = _VOCABULARY[draw(len(_VOCABULARY))]
        if word not in words:
            words.append(word)
    result = words
    for name in operations:
        result = OPERATIONS[name][1](result)
    text = ", then ".join(OPERATIONS[name][0] for name in operations)
    return {
        "prompt": f"{text[0].upper()}{text[1:]}: {', '.join(words)}",
        "completion": ", ".join(result),
        "operations": list(operations),
        "held_out": operations in HELD_OUT,
    }


_VOCABULARY = tuple(word for word in story_words.THINGS + story_words.ANIMALS if " " not in word)
