"""The rows that tests/aot compiles hold every pair of options, and are few."""

import itertools

import pytest

from tests.aot.pairwise import label, pairwise

FACTORS = {"width": (64, 128), "repeats": (1, 3, 4, 8), "causal": (True, False), "window": (None, 48), "offset": "ab"}


@pytest.mark.tiny
@pytest.mark.parametrize("count", range(2, len(FACTORS) + 1))
def test_every_pair_is_in_a_row_and_rows_are_few(count):
    factors = dict(list(FACTORS.items())[:count])
    rows = pairwise(factors)
    for a, b in itertools.combinations(factors, 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(factors[a], factors[b]))
    assert all(list(row) == list(factors) for row in rows)
    sizes = sorted((len(values) for values in factors.values()), reverse=True)
    assert sizes[0] * sizes[1] <= len(rows) <= sizes[0] * sizes[1] + 2
    assert pairwise(factors) == rows and len({label(row) for row in rows}) == len(rows)
