"""Programs as maps: coefficients, vectors off the basis, laws, and sizes."""

import tracemalloc

import numpy as np
import pytest

from riftco import cajal

REVERSAL = """
type C = Fin 10
def f(xs: C^15, ys: C^15): C^15 = case xs[0] of | 0 -> [ys[14 - i] for i < 15] | _ -> ys
"""


def compiled(text, semiring="natural"):
    definition = list(cajal.parse(text).defs.values())[-1]
    return cajal.compile(definition.expr, definition.context, semiring)


@pytest.mark.tiny
def test_conditional_reversal_has_the_published_coefficients():
    found = compiled(REVERSAL)
    assert (found.input_dimensions, found.output_dimension, found.nnz) == ((150, 150), 150, 1500)
    assert (found.values == 1).all() and found.values.dtype == np.int64
    place, letter = np.divmod(np.arange(150), 10)
    want = {
        (out, letter_0, (14 - place[out] if letter_0 == 0 else place[out]) * 10 + letter[out])
        for out in range(150)
        for letter_0 in range(10)
    }
    assert {tuple(row) for row in found.indices.tolist()} == {tuple(map(int, row)) for row in want}
    assert found.mode_ranks() == (150, 2, 150)
    blocks = found.blocks(0)
    assert [block[0].tolist() for block in blocks] == [[0], list(range(1, 10))]
    assert [block[1].nnz for block in blocks] == [150, 150]


def test_conditional_reversal_compiles_small():
    tracemalloc.start()
    try:
        assert compiled(REVERSAL).nnz == 1500
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50e6
