"""Values: both interpreters, encoding, decoding, enumeration; and results beside the map, on every fixture."""

import itertools

import numpy as np
import pytest

from riftco import cajal
from riftco.cajal import terms, types, values
from tests.cajal_programs import PROGRAMS

BIT = types.fin(2)


def last(text):
    return list(cajal.parse(text).defs.values())[-1]


def value(text):
    return cajal.evaluate(cajal.parse_expression(text), {})


def some(type):
    """Every value of a type, or a few dictionaries."""
    if type.cardinality is not None:
        return cajal.enumerate_values(type)
    texts = (
        "{0:Fin 2 -> 1:Fin 2}", "{1:Fin 2 -> 0:Fin 2, 0:Fin 2 -> 0:Fin 2}", "{0:Fin 2 -> 1:Fin 2, 0:Fin 2 -> 1:Fin 2}",
        "{1:Fin 2 -> 0:Fin 2 <|> 1:Fin 2}", "{0:Fin 2 <|> 1:Fin 2 -> (error as Fin 2)}",
    )  # fmt: skip
    return [cajal.evaluate_all(cajal.parse_expression(text), {})[0] for text in texts]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_sum_of_the_results_is_the_map_for_every_environment(name):
    definition = last(PROGRAMS[name])
    node = cajal.check(definition.expr, definition.context)
    found = cajal.compile(definition.expr, definition.context)
    support = cajal.compile(definition.expr, definition.context, "boolean")
    by_coefficients = cajal.MultilinearMap.from_coo(
        found.input_dimensions, found.output_dimension, found.indices, found.values
    )
    assert found.values.dtype == np.int64 and (found.values > 0).all()
    assert (support.indices == found.indices).all() and support.values.all()
    count = 0
    for inputs in itertools.product(*(some(type) for _, type in definition.context)):
        env = dict(zip((name for name, _ in definition.context), inputs, strict=True))
        results = cajal.evaluate_all(definition.expr, env)
        assert all(result.type is node.type for result in results)
        total = sum((cajal.encode(result, node.type) for result in results), np.zeros(node.type.dimension))
        vectors = [cajal.encode(one, one.type) for one in inputs]
        np.testing.assert_array_equal(total, found.apply(*vectors))
        np.testing.assert_array_equal(total, by_coefficients.apply(*vectors))
        np.testing.assert_array_equal(total != 0, support.apply(*vectors))
        if not node.chooses:
            try:
                single = cajal.evaluate(definition.expr, env)
            except cajal.CajalEvaluationError:
                assert len(results) != 1 or isinstance(results[0], values.Error)
            else:
                assert results == [single]
                np.testing.assert_array_equal(cajal.encode(single, node.type), total)
        count += 1
    assert count >= 1


# Laziness, choice, lookups


def test_a_component_waits_until_it_is_asked_for():
    failing = "{0:Fin 2 -> 0:Fin 2} @ (1:Fin 2)"
    assert value(f"({failing}, 1:Fin 2).1") == value("1:Fin 2")
    with pytest.raises(cajal.CajalEvaluationError, match="exactly one key; 0 match"):
        value(f"({failing}, 1:Fin 2).0")
    pair = value(f"({failing}, 1:Fin 2)")
    np.testing.assert_array_equal(cajal.encode(pair, pair.type), [0, 0, 0, 1])
    assert str(pair) == "(error, 1:Fin 2)"
    assert value(f"{{0:Fin 2 -> {failing}, 1:Fin 2 -> 0:Fin 2}} @ (1:Fin 2)") == value("0:Fin 2")
    for strict in (f"(inl {failing} as Fin 2 + 1)", f"let x = {failing} in x", f"case {failing} of | _ -> ()"):
        with pytest.raises(cajal.CajalEvaluationError, match="exactly one key"):
            value(strict)


def test_lookups_with_no_match_and_with_two():
    two = "{0:Fin 2 -> 1:Fin 3, 0:Fin 2 -> 1:Fin 3, 1:Fin 2 -> 2:Fin 3}"
    with pytest.raises(cajal.CajalEvaluationError, match=r"exactly one key; 2 match 0:Fin 2; use evaluate_all"):
        value(f"{two} @ (0:Fin 2)")
    every = lambda text: [str(found) for found in cajal.evaluate_all(cajal.parse_expression(text), {})]
    assert every(f"{two} @ (0:Fin 2)") == ["1:Fin 3", "1:Fin 3"]
    assert every("{0:Fin 2 -> 1:Fin 3} @ (1:Fin 2)") == ["error"]
    assert every(f"{two} @ (0:Fin 2 <|> 1:Fin 2)") == ["1:Fin 3", "1:Fin 3", "2:Fin 3"]
    assert every("{0:Fin 2 <|> 0:Fin 2 -> ()} @ (0:Fin 2)") == ["()", "()"]


def test_results_are_counted_by_derivation_and_components_are_not_multiplied_out():
    every = lambda text: cajal.evaluate_all(cajal.parse_expression(text), {})
    assert len(every("0:Fin 2 <|> 0:Fin 2 <|> (error as Fin 2)")) == 3
    assert len(every("let x = 0:Fin 2 <|> 1:Fin 2 in (x <|> x)")) == 4
    (pair,) = every("(0:Fin 2 <|> 1:Fin 2, 1:Fin 2)")
    np.testing.assert_array_equal(cajal.encode(pair, pair.type), [1, 1, 0, 1])
    assert len(every("(0:Fin 2 <|> 1:Fin 2, 1:Fin 2).0")) == 2
    (held,) = every("{0:Fin 2 <|> 1:Fin 2 -> 0:Fin 2 <|> 1:Fin 2}")
    np.testing.assert_array_equal(cajal.encode(held, held.type), [1, 1, 1, 1])
    assert str(held) == "{0:Fin 2 <|> 1:Fin 2 -> 0:Fin 2 <|> 1:Fin 2}"
    assert [str(found) for found in every("(error as 1); 0:Fin 2")] == ["error"]


def test_the_deterministic_interpreter_refuses_choice():
    for text in ("() <|> ()", "(() <|> (), ()).1", "() <1/2> ()"):
        with pytest.raises(cajal.CajalEvaluationError, match=r"must not choose; `<\|>` \(line 1"):
            value(text)
    pair = cajal.evaluate_all(cajal.parse_expression("(() <|> (), ())"), {})[0]
    second = terms.Project(terms.Variable("x"), 1)
    assert cajal.evaluate(second, {"x": pair}) == values.unit()
    with pytest.raises(cajal.CajalEvaluationError, match="a suspended part chooses"):
        cajal.evaluate(terms.Project(terms.Variable("x"), 0), {"x": pair})
    with pytest.raises(cajal.CajalEvaluationError, match="comes to error"):
        value("(error as 1)")


def test_environments():
    swap = last(PROGRAMS["swap"])
    with pytest.raises(cajal.CajalTypeError, match="x"):
        cajal.evaluate(swap.expr, {})
    node = cajal.check(swap.expr, swap.context)
    with pytest.raises(cajal.CajalEvaluationError, match="x must be a value of type Fin 2 \\* Fin 3; it is missing"):
        cajal.evaluate(node, {})
    with pytest.raises(cajal.CajalEvaluationError, match="it is of type Fin 2"):
        cajal.evaluate_all(node, {"x": value("0:Fin 2")})
    with pytest.raises(cajal.CajalEvaluationError, match="must hold values"):
        cajal.evaluate(node, {"x": 3})  # type: ignore[dict-item]
    env = {"x": value("(0:Fin 2, 2:Fin 3)")}
    assert str(cajal.evaluate(node, env)) == "(2:Fin 3, 0:Fin 2)" and list(env) == ["x"]


# Encoding


def test_encodings():
    for text, vector in [
        ("()", [1]), ("1:Fin 3", [0, 1, 0]), ("((), 1:Fin 2)", [1, 0, 1]), ("(inr 0:Fin 2 as 1 + Fin 2)", [0, 1, 0]),
        ("{0:Fin 2 -> 1:Fin 3}", [0, 0, 1, 0, 0, 0]), ("{0:Fin 2 -> 1:Fin 3, 0:Fin 2 -> 1:Fin 3}", [0, 0, 2, 0, 0, 0]),
    ]:  # fmt: skip
        found = value(text)
        vector_found = cajal.encode(found, found.type)
        assert vector_found.dtype == np.float64 and vector_found.tolist() == vector
    with pytest.raises(cajal.CajalEncodingError, match="must have the type Fin 3"):
        cajal.encode(value("0:Fin 2"), types.fin(3))
    np.testing.assert_array_equal(cajal.encode(values.Error(BIT), BIT), [0, 0])


def test_decoding_inverts_encoding_and_refuses_what_is_no_value():
    for text in ("1", "Fin 3", "Fin 2 + 1 * Fin 3", "Fin 2^2 * (1 + Fin 2)", "Fin 1", "1^1"):
        type = cajal.parse_type(text)
        listed = cajal.enumerate_values(type)
        assert len(listed) == type.cardinality == len({str(one) for one in listed})
        for one in listed:
            vector = cajal.encode(one, type)
            assert cajal.decode(vector, type) == one == cajal.decode(vector + 1e-12, type)
    for text, vector, message in [
        ("Fin 2", [0, 0], "no summand is active"), ("Fin 2", [1, 1], "summands 0 and 1 are active"),
        ("Fin 2", [0.5, 0], r"\(\) must be coded by 1"), ("1", [1 + 1e-6], "coded by 1"),
        ("Fin 2", [1, 0, 0], r"shape \(2,\)"), ("Fin 2", [1, np.nan], "finite"), ("Fin 2", [[1, 0]], "shape"),
        ("Fin 2 * 1", [1, 0, 0], "coded by 1"), ("Fin 2 => 1", [1, 0], "share one matrix"),
    ]:  # fmt: skip
        with pytest.raises(cajal.CajalEncodingError, match=message):
            cajal.decode(vector, cajal.parse_type(text))
    with pytest.raises(cajal.CajalEncodingError, match="tolerance"):
        cajal.decode([1.0], types.Unit(), tolerance=0)


def test_enumeration():
    assert [str(one) for one in cajal.enumerate_values(cajal.parse_type("Fin 2 * (1 + Fin 2)"))] == [
        f"({left}, {right})" for left in ("0:Fin 2", "1:Fin 2")
        for right in ("0:(1 + Fin 2)", "inj 1 0:Fin 2", "inj 1 1:Fin 2")
    ]  # fmt: skip
    with pytest.raises(cajal.CajalEncodingError, match="at most 4096 values; it has 10000; raise limit"):
        cajal.enumerate_values(cajal.parse_type("Fin 10^4"))
    assert len(cajal.enumerate_values(cajal.parse_type("Fin 10^4"), limit=10**4)) == 10**4
    with pytest.raises(cajal.CajalEncodingError, match="dictionaries"):
        cajal.enumerate_values(cajal.parse_type("1 * (1 => 1)"))


def test_values_by_hand():
    either = cajal.parse_type("1 + Fin 2")
    made = values.tuple_of([values.inject(either, 1, values.inject(BIT, 0)), values.inject(either, 0), values.unit()])
    assert made == value("((inr 0:Fin 2 as 1 + Fin 2), (inl () as 1 + Fin 2), ())")
    assert made != value("((inl () as 1 + Fin 2), (inl () as 1 + Fin 2), ())") and hash(made) == hash(made)
    for wrong in (
        lambda: values.inject(BIT, 2),
        lambda: values.inject(either, 1),
        lambda: values.inject(types.Unit(), 0),
    ):
        with pytest.raises(cajal.CajalEvaluationError, match="has no summand"):
            wrong()
