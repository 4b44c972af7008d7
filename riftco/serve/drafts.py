"""Guessing tokens from the text itself: what followed the last time the same few tokens stood there.

Source: Saxena 2023, "Prompt Lookup Decoding"; Leviathan et al. 2022, arXiv:2211.17192, for verifying guesses.
"""

from collections.abc import Sequence

_LONGEST, _SHORTEST = 4, 2


def prompt_lookup(tokens: Sequence[int], count: int) -> list[int]:
    """At most `count` tokens that may follow: those after the latest earlier place of the longest matching end."""
    for length in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
        end = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == end:
                return list(tokens[start + length : start + length + count])
    return []
