"""Programs as maps: coefficients, vectors off the basis, laws, semirings, imports, sizes; the functional language."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from riftco import cajal
from riftco.cajal import MultilinearMap, functional, types
from riftco.cajal.functional import Bool, Nat, false, function, if_, iterate, numeral, succ, true, variable
from tests.cajal_programs import PROGRAMS, REVERSAL


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


def test_plain_reversal():
    found = compiled("type C = Fin 10 def f(x: C^15): C^15 = [x[14 - i] for i < 15]")
    assert found.nnz == 150 and found.mode_ranks() == (150, 150)
    rows = np.arange(150)
    assert (found.indices[:, 1] == (14 - rows // 10) * 10 + rows % 10).all()


OFF_BASIS = [
    ("def f(s: 1, x: Fin 2): Fin 2 = s; x", [[4], [2, 3]], [8, 12]),
    ("def f(s: 1, x: Fin 2): Fin 2 = let y = x in s; y", [[4], [2, 3]], [8, 12]),
    ("def f(c: Fin 2, x: Fin 2): Fin 2 = case c of | _ -> x", [[2, 3], [5, 7]], [25, 35]),
    ("def f(c: 1 * 1 + 1, x: Fin 2): Fin 2 = case c of | inl p -> p.1; x | 1 -> x", [[9, 2, 1], [8, 12]], [24, 36]),
    ("def f(d: Fin 2 => 1, q: Fin 2): 1 = d @ (q)", [[5, 7], [2, 3]], [31]),
    ("def f(x: 1, q: Fin 2): 1 = {0:Fin 2 -> x, 1:Fin 2 -> x} @ (q)", [[12], [1, 1]], [24]),
    ("def f(k: Fin 2, v: Fin 2): Fin 2 => Fin 2 = {k -> v}", [[2, 3], [5, 7]], [10, 15, 14, 21]),
    ("def f(x: Fin 2): Fin 2 = x <|> x <|> error", [[2.5, -1]], [5, -2]),
]


@pytest.mark.parametrize(("text", "vectors", "want"), OFF_BASIS)
def test_vectors_that_encode_no_value(text, vectors, want):
    found = compiled(text)
    np.testing.assert_array_equal(found.apply(*vectors), want)
    np.testing.assert_array_equal(MultilinearMap.from_dense(found.to_dense()).apply(*vectors), want)


def test_choice_adds_coefficients_and_weights_share_them():
    assert compiled("def f(): Fin 3 = 0:Fin 3 <|> 0:Fin 3 <|> 2:Fin 3").to_dense().tolist() == [2, 0, 1]
    assert compiled("def f(): Fin 3 = 0:Fin 3 <|> 0:Fin 3 <|> 2:Fin 3", "boolean").to_dense().tolist() == [
        True,
        False,
        True,
    ]
    weighted = compiled("def f(x: Fin 2): Fin 2 = x <1/3> (case x of | _ -> 0:Fin 2 <1/4> error)", "probability")
    assert weighted.values.tolist() == [Fraction(1, 2), Fraction(1, 6), Fraction(1, 3)]
    dense = weighted.to_dense()
    assert dense.dtype == np.float64
    np.testing.assert_allclose(dense.sum(axis=0), [0.5, 0.5])  # one less the mass of error
    np.testing.assert_allclose(weighted.apply([1, 0]), [0.5, 0])
    assert compiled("def f(x: 1): 1 = x <0/1> x", "probability").values.tolist() == [1]
    for text, semiring in (("def f(x: 1) = x <|> x", "probability"), ("def f(x: 1) = x <1/2> x", "natural"),
                           ("def f(x: 1) = x <1/2> x", "boolean"), ("def f(x: 1) = x <1/2> x", "float")):  # fmt: skip
        with pytest.raises(
            cajal.CajalLoweringError, match=rf"in the semiring {semiring} must have .*line 1, column 15"
        ):
            compiled(text, semiring)
    with pytest.raises(cajal.CajalLoweringError, match="semiring must be one of"):
        compiled("def f() = ()", "tropical")


def test_probabilities_of_results_sum_to_one_less_the_errors():
    found = compiled("""
        rel near(q: Fin 3, k: Fin 3) = q == k or q == k + 1
        def f(q: Fin 3): Fin 2 = {i:Fin 3 -> (0:Fin 2 <1/4> 1:Fin 2) <2/3> error for i < 3} @near(q)
    """, "probability")  # fmt: skip
    np.testing.assert_allclose(found.to_dense(), [[1 / 6, 1 / 3, 1 / 3], [1 / 2, 1, 1]])


@pytest.mark.parametrize("predicate", ["q == k", "q != k", "k == (q + 1) % 3", "k < 2", "q * k == 2", "not q == q"])
def test_relations_agree_with_brute_force(predicate):
    found = compiled(f"""rel R(q: Fin 4, k: Fin 3) = {predicate}
        def f(q: Fin 4, x: Fin 3): Fin 3 = {{0:Fin 3 -> x, 1:Fin 3 -> x, 2:Fin 3 -> x, 1:Fin 3 -> x}} @R(q)""")
    holds = lambda q, k: eval(predicate, {"q": q, "k": k})
    want = np.zeros((3, 4, 3))
    for q in range(4):
        want[:, q, :] = np.eye(3) * sum(holds(q, k) for k in (0, 1, 2, 1))
    np.testing.assert_array_equal(found.to_dense(), want)


@pytest.mark.parametrize("name", PROGRAMS)
def test_maps_are_linear_in_each_input_and_equal_to_their_parts(name, rng):
    found = compiled(PROGRAMS[name])
    inputs = [rng.normal(size=width) for width in found.input_dimensions]
    base = found.apply(*inputs)
    for axis, width in enumerate(found.input_dimensions):
        other = rng.normal(size=width)
        with_axis = lambda x, axis=axis: found.apply(*inputs[:axis], x, *inputs[axis + 1 :])
        left = with_axis(2.5 * inputs[axis] - 0.5 * other)
        np.testing.assert_allclose(left, 2.5 * base - 0.5 * with_axis(other), rtol=0, atol=1e-12)
        blocks = found.blocks(axis)
        rest = inputs[:axis] + inputs[axis + 1 :]
        parts = sum((inputs[axis][where].sum() * part.apply(*rest) for where, part in blocks), np.zeros(len(base)))
        np.testing.assert_allclose(parts, base, rtol=0, atol=1e-12)
    if math.prod(found.shape) < 10**5:
        dense = found.to_dense()
        again = MultilinearMap.from_dense(dense)
        assert (again.indices == found.indices).all() and (again.values == found.values).all()
        letters = "oabcd"[: dense.ndim]
        subscripts = ",".join(f"r{letter}" for letter in letters)
        np.testing.assert_array_equal(np.einsum(f"{subscripts}->{letters}", *found.factors()), dense)
        ranks = tuple(np.linalg.matrix_rank(np.moveaxis(dense, i, 0).reshape(n, -1)) for i, n in enumerate(dense.shape))
        assert ranks == found.mode_ranks()
    integers = [rng.integers(-(2**10), 2**10, size=width) for width in found.input_dimensions]
    imported = MultilinearMap.from_coo(found.input_dimensions, found.output_dimension, found.indices, found.values)
    np.testing.assert_array_equal(found.apply(*integers), imported.apply(*integers))


def test_counts_stay_exact_beyond_int64():
    doublings = "".join(f"let x{i + 1} = x{i} <|> x{i} in " for i in range(70))
    text = f"def f(x0: 1): 1 = {doublings}x70"
    (value,) = compiled(text).values
    assert value == 2**70 and isinstance(value, int)
    chain = "".join(f"let x{i + 1} = x{i} <|> x{i} in " for i in range(62)) + "x62"
    (value,) = compiled(f"def f(x0: 1): 1 = ({chain}) <|> ({chain})").values
    assert value == 2**63
    assert compiled(text, "boolean").values.tolist() == [True]
    assert compiled(text, "float").values.tolist() == [2.0**70]


def test_what_has_too_many_coefficients_still_applies_by_its_program():
    text = f"type C = Fin 10 def f({', '.join(f'x{i}: C' for i in range(9))}): 1 = " + "; ".join(
        f"(case x{i} of | _ -> ())" for i in range(9)
    )
    found = compiled(text)
    assert found.apply(*[np.ones(10)] * 9).tolist() == [1e9]
    with pytest.raises(cajal.CajalLoweringError, match="at most 4194304 coefficients"):
        found.nnz  # noqa: B018


def test_imports():
    sparse = MultilinearMap.from_coo((2, 2), 2, [[0, 0, 1], [1, 1, 0]], [2.0, -1.0])
    np.testing.assert_array_equal(sparse.apply([3, 4], [5, 6]), [36, -20])
    bilinear = MultilinearMap.from_dense([[[1, 2], [3, 4]]])
    assert bilinear.apply([1, 2], [3, 4]).tolist() == [61] and bilinear.values.dtype == np.int64
    assert MultilinearMap.from_dense([[1, 2], [3, 4]]).mode_ranks() == (2, 2)
    assert MultilinearMap.from_dense([[0.5, 1.5], [1, 3]]).mode_ranks() == (1, 1)
    assert bilinear.program is None and sparse.context is None
    flat = MultilinearMap.from_coo((2, 2), 2, [1, 6], [2.0, -1.0])
    assert (flat.indices == sparse.indices).all()
    zero = MultilinearMap.from_coo((2,), 3, [], [])
    assert (zero.nnz, zero.apply([1, 1]).tolist(), zero.to_dense().shape) == (0, [0, 0, 0], (3, 2))
    constant = MultilinearMap.from_coo((), 2, [[1]], [7])
    assert constant.apply().tolist() == [0, 7] and constant.to_dense().tolist() == [0, 7]
    with pytest.raises(ValueError, match="read-only"):
        sparse.values[0] = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultilinearMap.from_coo((2,), 2, [[0, 1], [0, 1]], [1, 2]), "given once"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[0, 2]], [1]), "from 0 to 1"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[-1, 0]], [1]), "from 0 to 1"),
        (lambda: MultilinearMap.from_coo((2,), 2, [4], [1]), "from 0 to 3"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[0, 1]], [0]), "must not be zero"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[0, 1]], [np.nan]), "finite"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[0, 1]], [np.inf]), "finite"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[0.0, 1.0]], [1]), "indices must be integers"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[0, 1]], [1j]), "integers or floats"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[0, 1, 0]], [1]), "indices must be"),
        (lambda: MultilinearMap.from_coo((2,), 2, [[0, 1]], [1, 2]), "indices must be"),
        (lambda: MultilinearMap.from_coo((0,), 2, [], []), "at least 1"),
        (lambda: MultilinearMap.from_dense(3.0), "an axis for the output"),
        (lambda: MultilinearMap.from_dense([[np.nan]]), "finite"),
        (lambda: compiled(PROGRAMS["swap"]).to_dense(limit=24), "at most 24 elements"),
        (lambda: compiled(PROGRAMS["swap"]).apply([1, 2]), "shape"),
        (lambda: compiled(PROGRAMS["swap"]).apply(), "1 vectors are required"),
        (lambda: compiled(PROGRAMS["swap"]).apply([1, 2, 3, 4, np.inf]), "finite"),
        (lambda: compiled(PROGRAMS["swap"]).factors(limit=24), "at most 24 elements"),
        (lambda: compiled(PROGRAMS["swap"]).blocks(1), "axis must be below 1"),
    ],
)
def test_what_is_no_map_is_refused(make, message):
    with pytest.raises(cajal.CajalError, match=message):
        make()


def test_the_context_gives_the_order_of_the_inputs():
    definition = list(cajal.parse(PROGRAMS["payload"]).defs.values())[-1]
    found = cajal.compile(definition.expr, definition.context)
    turned = cajal.compile(definition.expr, definition.context[::-1])
    np.testing.assert_array_equal(found.to_dense().transpose(0, 2, 1), turned.to_dense())
    node = cajal.check(definition.expr, definition.context)
    assert found.program is node and cajal.compile(node, definition.context).program is node
    with pytest.raises(cajal.CajalLoweringError, match="context must give x"):
        cajal.compile(node, [("y", types.fin(2))])
    assert found.context == tuple(definition.context)


# The functional language


def test_booleans_and_functions():
    x, y = variable("x", Bool), variable("y", Bool)
    both = if_(x, y, if_(y, false, false))
    found = functional.compile(both, [("x", Bool), ("y", Bool)])
    for a in (0, 1):
        for b in (0, 1):
            want = [1, 0] if a == b == 0 else [0, 1]
            np.testing.assert_array_equal(found.apply(np.eye(2)[a], np.eye(2)[b]), want)
    flip = function(Bool, lambda b: if_(b, false, true))
    assert str(flip.type) == "Bool ⊸ Bool" and flip.type.dimension == 4
    np.testing.assert_array_equal(functional.compile(flip).to_dense(), [0, 1, 1, 0])
    np.testing.assert_array_equal(functional.compile(flip(x), {"x": Bool}).to_dense(), [[0, 1], [1, 0]])
    twice = function(Bool >> Bool, lambda f: function(Bool, lambda b: f(b)))
    assert str(twice.type) == "(Bool ⊸ Bool) ⊸ Bool ⊸ Bool"
    np.testing.assert_array_equal(functional.compile(twice(flip)(true)).to_dense(), [0, 1])
    curried = function(Bool, lambda a: function(Bool, lambda b: if_(a, b, if_(b, false, false))))
    dense = functional.compile(curried).to_dense().reshape(2, 2, 2)  # output, second argument, first argument
    np.testing.assert_array_equal(dense.transpose(0, 2, 1), found.to_dense())
    f = variable("f", Bool >> Bool)
    applied = functional.compile(f(x), [("f", Bool >> Bool), ("x", Bool)])
    np.testing.assert_array_equal(applied.apply([1, 2, 3, 4], [5, 7]), [19, 43])


def test_naturals_and_iteration():
    n = variable("n", Nat(4))
    np.testing.assert_array_equal(functional.compile(succ(n), {"n": Nat(4)}).to_dense(), np.eye(4, k=-1))
    assert functional.compile(numeral(2, Nat(4))).to_dense().tolist() == [0, 0, 1, 0]
    parity = iterate(variable("b", Bool), lambda b: if_(b, false, true), n)
    found = functional.compile(parity, [("b", Bool), ("n", Nat(4))])
    flip = np.array([[0, 1], [1, 0]])
    want = np.stack([np.linalg.matrix_power(flip, i) for i in range(4)], axis=-1)
    np.testing.assert_array_equal(found.to_dense(), want)
    plus = iterate(variable("m", Nat(5)), succ, variable("n", Nat(3)))
    sums = functional.compile(plus, [("m", Nat(5)), ("n", Nat(3))])
    for m in range(5):
        for k in range(3):
            want = np.eye(5)[m + k] if m + k < 5 else np.zeros(5)  # past the bound there is nothing
            np.testing.assert_array_equal(sums.apply(np.eye(5)[m], np.eye(3)[k]), want)
    assert functional.compile(plus, [("m", Nat(5)), ("n", Nat(3))], "boolean").values.all()


def test_what_is_not_linear_or_of_the_wrong_type_is_refused():
    x, f, n = variable("x", Bool), variable("f", Bool >> Bool), variable("n", Nat(3))
    for make, message in [
        (lambda: function(Bool, lambda b: true), "used exactly once"),
        (lambda: function(Bool, lambda b: if_(b, b, b)), "again in the branches"),
        (lambda: if_(x, x, true), "not in the second branch"),
        (lambda: if_(n, true, true), "Bool and two equal types"),
        (lambda: if_(x, true, n), "Bool and two equal types"),
        (lambda: f(n), "does not take"),
        (lambda: x(x), "does not take"),
        (lambda: f(f(x)), "again in the argument"),
        (lambda: succ(x), "a natural is required"),
        (lambda: iterate(true, lambda b: f(b), n), "nothing but its argument; it uses f"),
        (lambda: iterate(true, lambda b: if_(b, numeral(0, Nat(2)), numeral(1, Nat(2))), n), "must give the type Bool"),
        (lambda: iterate(true, lambda b: b, x), "the count must be a natural"),
        (lambda: iterate(n, succ, n), "again in the count"),
        (lambda: numeral(3, Nat(3)), "from 0 to 2"),
        (lambda: Nat(0), "at least 1"),
        (lambda: functional.compile(x), "x must be in the context"),
        (lambda: functional.compile(true, {"x": Bool}), "x is never used"),
        (lambda: functional.compile(x, {"x": Nat(2)}), "x has the type Bool; the context gives"),
        (lambda: functional.compile(x, {"x": Bool}, "probability"), "no choice to weigh"),
    ]:
        with pytest.raises(cajal.CajalError, match=message):
            make()
    outside = variable("x9", Bool)
    with pytest.raises(cajal.CajalTypeError):
        functional.compile(function(Bool, lambda b: true) if False else if_(outside, true, false))
