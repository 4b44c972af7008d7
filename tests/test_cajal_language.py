"""Text to terms and back: grammar, sugar, what is refused with which words, and Python functions as programs."""

import copy
import pickle
from fractions import Fraction

import pytest

from riftco import cajal
from riftco.cajal import dsl, sugar, terms, types
from tests.cajal_programs import ILL_TYPED, LEAKS, PROGRAMS

BIT = types.fin(2)
V = terms.Variable


def last(text):
    return list(cajal.parse(text).defs.values())[-1]


def checked(text):
    definition = last(text)
    return cajal.check(definition.expr, definition.context)


# Types


@pytest.mark.parametrize(
    ("text", "dimension", "printed"),
    [
        ("1", 1, "1"), ("Fin 2", 2, "Fin 2"), ("1 + 1", 2, "Fin 2"), ("1 * (1 + 1)", 3, "1 * Fin 2"),
        ("Fin 2 => 1 * Fin 2", 6, "Fin 2 => 1 * Fin 2"), ("(Fin 10)^15", 150, "Fin 10^15"),
        ("Fin 2^3", 6, "Fin 2^3"), ("1 + 1 + 1", 3, "Fin 3"), ("(1 + 1) + 1", 3, "Fin 2 + 1"),
        ("1^1", 1, "1^1"), ("Fin 1", 1, "Fin 1"), ("Fin 2 => Fin 3 => 1", 6, "Fin 2 => Fin 3 => 1"),
        ("(Fin 2 => Fin 3) => 1", 6, "(Fin 2 => Fin 3) => 1"), ("(1 * Fin 2)^2 * 1", 7, "(1 * Fin 2)^2 * 1"),
        ("(1 => 1) + 1", 2, "(1 => 1) + 1"), ("(1 * 1) * 1", 3, "1^2 * 1"), ("(Fin 2 + 1)^2", 6, "(Fin 2 + 1)^2"),
    ],
)  # fmt: skip
def test_types(text, dimension, printed):
    type = cajal.parse_type(text)
    assert (type.dimension, str(type)) == (dimension, printed)
    assert cajal.parse_type(printed) is type
    assert pickle.loads(pickle.dumps(type)) is type and copy.deepcopy(type) is type


def test_types_that_differ():
    different = ["1", "Fin 1", "1^1", "Fin 2", "Fin 2 + 1", "1 + Fin 2", "Fin 3", "1 * 1 * 1", "(1 * 1) * 1", "1 => 1"]
    assert len({cajal.parse_type(text) for text in different}) == len(different)


def test_sizes_without_bound():
    huge = types.power(types.power(types.power(types.fin(2**16), 2**16), 2**16), 2**16)
    assert huge.dimension == 2**64 and huge.cardinality == 2**63
    with pytest.raises(cajal.CajalEncodingError, match="at most 4096"):
        cajal.enumerate_values(huge)


# Grammar


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("x; y; z", terms.Sequence(terms.Sequence(V("x"), V("y")), V("z"))),
        ("x <|> y; z", terms.Choice(V("x"), terms.Sequence(V("y"), V("z")))),
        ("x <1/3> y <|> z", terms.Choice(terms.Choice(V("x"), V("y"), Fraction(1, 3)), V("z"))),
        ("inl inj 2 x.0", terms.Inject(0, terms.Inject(2, terms.Project(V("x"), 0)))),
        ("(inr x).0.1", terms.Project(terms.Project(terms.Inject(1, V("x")), 0), 1)),
        ("let x = y in x; z", terms.Let("x", V("y"), terms.Sequence(V("x"), V("z")))),
        ("x; let y = z in y <|> w", terms.Sequence(V("x"), terms.Let("y", V("z"), terms.Choice(V("y"), V("w"))))),
        ("((x))", V("x")),
        ("(x, y)", terms.Tuple((V("x"), V("y")))),
        ("[x for i < 1]", terms.Tuple((V("x"),))),
        ("[x[1 - i] for i < 2]", terms.Tuple((terms.Project(V("x"), 1), terms.Project(V("x"), 0)))),
        ("x[(7 - 2 * 2) % 2]", terms.Project(V("x"), 1)),
        ("1:Fin 3", terms.letter(1, types.fin(3))),
        ("(inj 1 () as Fin 3)", terms.letter(1, types.fin(3))),
        ("[i:Fin 2 for i < 2]", terms.Tuple((terms.letter(0, BIT), terms.letter(1, BIT)))),
        ("{i:Fin 2 -> x for i < 2}",
         terms.Dictionary(((terms.letter(0, BIT), V("x")), (terms.letter(1, BIT), V("x"))))),
        ("dict(x, y) @ (z).0", terms.Project(terms.Lookup(terms.KeysValues(V("x"), V("y")), V("z")), 0)),
        ("case x of | 0 -> y | inr z -> z | _ -> ()",
         terms.Case(V("x"), (terms.Arm(0, None, V("y")), terms.Arm(1, "z", V("z")),
                             terms.Arm(None, None, terms.Unit())))),
        ("case x of | 0 -> case y of | 0 -> z | 1 -> w",
         terms.Case(V("x"), (terms.Arm(0, None, terms.Case(V("y"), (terms.Arm(0, None, V("z")),
                                                                   terms.Arm(1, None, V("w"))))),))),
    ],
)  # fmt: skip
def test_grammar(text, term):
    assert cajal.parse_expression(text) == term
    assert cajal.parse_expression("\n# note\n" + text.replace(" ", " \n") + " # end") == term
    assert cajal.parse_expression(cajal.to_text(term)) == term


@pytest.mark.parametrize(
    ("text", "line", "column", "wanted"),
    [
        ("def f( = x", 1, 8, "a parameter must be a name"),
        ("def f() = ", 1, 11, "an expression must begin here"),
        ("def f() = (x", 1, 13, "`)` must stand"),
        ("def f() = x ?", 1, 13, "no word of the language"),
        ("def _() = x", 1, 5, "must be a name"),
        ("def in() = x", 1, 5, "must be a name"),
        ("x", 1, 1, "a declaration must begin"),
        ("def f() =\n  case x of 0 -> x", 2, 13, "must have an arm"),
        ("def f() = 3", 1, 11, "must have its type behind it"),
        ("def f() = [x for i < n]", 1, 22, "the bound of an index must be a number"),
        ("def f() = x.y", 1, 13, "must be a number"),
        ("type A = 2", 1, 10, "a type must begin with"),
        ("def f() = x <1> y", 1, 15, "`/` must stand"),
        ("def f() = {x -> y", 1, 18, "`}` must stand"),
        ("def f() = 1:Fin 99999999999999", 1, 17, "at most 12 digits"),
        ("rel R(q: 1) = q == q", 1, 11, "`,` must stand"),
        ("def f() = (x as 1", 1, 18, "`)` must stand"),
        ("def f() = let x y", 1, 17, "`=` must stand"),
        ("def f() = case x of | y -> z", 1, 23, "a pattern must be"),
    ],
)
def test_a_text_that_is_no_program_is_refused_with_its_place(text, line, column, wanted):
    with pytest.raises(cajal.CajalSyntaxError) as caught:
        cajal.parse(text)
    (found,) = caught.value.diagnostics
    assert wanted in found.message
    assert [(span.line, span.column) for span in found.spans] == [(line, column)]
    assert "^" in caught.value.render()


def test_what_nests_too_deeply_or_grows_too_large_is_refused(monkeypatch):
    for text in ("(" * 5000 + ")" * 5000, "inl " * 5000 + "()", "(" * 5000):
        with pytest.raises(cajal.CajalError, match=r"less deeply|expression must begin"):
            cajal.parse_expression(text)
    monkeypatch.setattr(sugar, "MAX_NODES", 1000)
    with pytest.raises(cajal.CajalTypeError, match="at most 1000 nodes"):
        cajal.parse_expression("[" * 6 + "x" + "".join(f" for i{n} < 20]" for n in range(6)))


def test_calls_are_lets_with_fresh_names():
    module = cajal.parse(
        "def g(x: Fin 2, y: 1) = y; case x of | inj 0 z -> z | inj 1 z -> z\ndef f(x: Fin 2, z: 1): 1 = g(x, g(x_1, z))"
        .replace("x_1", "0:Fin 2")
    )  # fmt: skip
    names = terms.names_in([module.defs["f"].expr])
    assert {"x", "z"} < names and len(names) == 2 + 2 * 4
    definition = module.defs["f"]
    assert cajal.check(definition.expr, definition.context).free.keys() == {"x", "z"}


def test_a_module_comes_back():
    for text in PROGRAMS.values():
        module = cajal.parse(text)
        again = cajal.parse(cajal.to_text(module))
        assert again == module
    listed = cajal.relation("S", BIT, types.fin(3), [(0, 2), (1, 0)])
    empty = cajal.relation("T", BIT, BIT, [])
    odd = cajal.parse("rel U(a: Fin 9, b: Fin 9) = not (a - (b - 1)) * 2 == 4 and (a < 3 or b > 2 or a - b - 1 == 0)")
    module = cajal.Module({}, {"S": listed, "T": empty, **odd.relations}, {})
    assert cajal.parse(cajal.to_text(module)) == module


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_typed_term_comes_back_as_itself(name):
    module = cajal.parse(PROGRAMS[name])
    definition = list(module.defs.values())[-1]
    node = cajal.check(definition.expr, definition.context)
    text = cajal.to_text(node)
    assert cajal.check(cajal.parse_expression(text, module), definition.context) is node
    assert cajal.parse_expression(cajal.to_text(definition.expr), module) == definition.expr


# The checker


@pytest.mark.parametrize(
    ("code", "variable", "places", "text"), ILL_TYPED, ids=[f"{i}-{row[0]}" for i, row in enumerate(ILL_TYPED)]
)
def test_an_ill_typed_program_is_refused_with_rule_places_and_variable(code, variable, places, text):
    with pytest.raises(cajal.CajalTypeError) as caught:
        for definition in cajal.parse(text).defs.values():
            cajal.check(definition.expr, definition.context)
    (found,) = caught.value.diagnostics
    assert (found.code, found.variable) == (code, variable)
    assert [(span.line, span.column) for span in found.spans] == places
    message = str(caught.value)
    rule = message.split(":")[0]
    assert rule.split("-")[0] in (code.split("-")[0], "for", "index")
    for line, column in places:
        assert f"line {line}, column {column}" in message
    assert variable is None or f"{variable} " in message
    assert found.render().count("^") >= len(places)


@pytest.mark.parametrize("text", LEAKS)
def test_a_binder_does_not_leak_out_of_its_scope(text):
    with pytest.raises(cajal.CajalTypeError) as caught:
        checked(text)
    assert {d.variable for d in caught.value.diagnostics} == {"x"}
    assert {d.code for d in caught.value.diagnostics} > {"variable-unknown"}


def test_there_are_thirty_and_more():
    assert len(ILL_TYPED) >= 30


@pytest.mark.parametrize(
    "text",
    [
        "def f(x: Fin 2, y: Fin 2): Fin 2 = error",
        "def f(x: Fin 2): Fin 2 * Fin 2 = (x, error)",
        "def f(x: Fin 2, y: 1): 1 = case x of | 0 -> y | 1 -> error",
        "def f(x: Fin 2, y: 1): 1 = case x of | 0 -> error | 1 -> y",
        "def f(x: 1): 1 = let y = () in (error; x <|> x; error)",
        "def f(x: 1): 1 = x <|> error",
        "def f(x: Fin 2 + Fin 2): Fin 2 = case x of | inl y -> y | inr z -> error",
        "def f(x: Fin 2): Fin 2 = (let y = x in y) <|> (let y = x in y)",
        "def f(x: 1) = {0:Fin 2 -> error, 1:Fin 2 -> x} @ (0:Fin 2)",
        "def f(x: 1) = case 0:Fin 2 of | 0 -> error | 1 -> x",
        "def f(x: Fin 2): 1 + Fin 2 = let y = (inr x as 1 + Fin 2) in y",
        "def g(x: 1): 1 = let y = x in y def f(y: 1): 1 = g(y)",
        "rel R(q: 1, k: Fin 2) = q == k def f(x: 1): 1 = {inl () -> x} @R(())",
    ],
)
def test_what_error_absorbs_and_where_types_come_from(text):
    checked(text)


def test_all_that_is_wrong_side_by_side_is_said_at_once():
    with pytest.raises(cajal.CajalTypeError) as caught:
        checked("def f(x: Fin 2, y: 1) = (x.0, case y of | 0 -> (), z)")
    assert [found.code for found in caught.value.diagnostics] == ["project-index", "case-type", "variable-unknown"]


def test_terms_without_text():
    swap = terms.Tuple((terms.Project(V("x"), 1), terms.Project(V("x"), 0)))
    assert cajal.check(swap, [("x", types.power(BIT, 2))]) is checked("def f(x: Fin 2^2) = (x.1, x.0)")
    assert cajal.check(swap, {"x": types.power(BIT, 2)}).type is types.power(BIT, 2)
    with pytest.raises(cajal.CajalTypeError, match="x is used in component 0 but not in component 1") as e:
        cajal.check(terms.Tuple((V("x"), V("y"))), [("x", BIT), ("y", BIT)])
    assert e.value.diagnostics[0].spans == ()
    for name in ("case", "_", "x y", "", 3):
        with pytest.raises(cajal.CajalTypeError, match="identifier"):
            cajal.check(terms.Let(name, terms.Unit(), terms.Unit()), [])  # type: ignore[arg-type]
    with pytest.raises(cajal.CajalTypeError, match="must have an entry"):
        cajal.check(terms.Dictionary(()), [])
    with pytest.raises(cajal.CajalTypeError, match="must have a component"):
        cajal.check(terms.Tuple(()), [])
    with pytest.raises(cajal.CajalTypeError, match="must have a type"):
        cajal.check(V("x"), [("x", "Fin 2")])  # type: ignore[list-item]
    with pytest.raises(cajal.CajalError, match=r"riftco\.cajal\.terms"):
        cajal.check("x", [])  # type: ignore[arg-type]


def test_shared_parts_are_checked_once():
    term = V("x")
    for _ in range(40):
        term = terms.Project(terms.Tuple((term, term)), 0)
    assert cajal.check(term, [("x", BIT)]).type is BIT


# Python functions as programs


def test_a_function_is_traced_to_the_same_program():
    letter = types.fin(10)
    word = types.power(letter, 15)

    @dsl.program
    def f(xs: word, ys: word) -> word:
        return dsl.case(xs[0], {0: [ys[14 - i] for i in range(15)], dsl.otherwise: ys})

    text = last("type C = Fin 10 def f(xs: C^15, ys: C^15): C^15 = "
                "case xs[0] of | 0 -> [ys[14 - i] for i < 15] | _ -> ys")  # fmt: skip
    assert (f, f.context, f.result) == (text, text.context, text.result)
    assert cajal.check(f.expr, f.context) is cajal.check(text.expr, text.context)


def test_every_form_can_be_traced():
    either = types.Sum((BIT, types.Unit()))

    @dsl.program
    def f(x: either, y: BIT, d: types.Dictionary(BIT, BIT)):
        def first(z):
            return dsl.let(z, lambda w: w)

        picked = dsl.case(x, {0: first, 1: lambda u: u >> dsl.letter(1, BIT)})
        return dsl.choose(dsl.lookup({}.get("none", dsl.dictionary((dsl.letter(0, BIT), d @ picked))), y), dsl.error())

    text = last(
        "def f(x: Fin 2 + 1, y: Fin 2, d: Fin 2 => Fin 2) = {0:Fin 2 -> d @ (case x of | inj 0 z -> let w = z in w "
        "| inj 1 u -> u; 1:Fin 2)} @ (y) <|> error"
    )
    assert cajal.check(f.expr, f.context) is cajal.check(text.expr, text.context)


def test_messages_about_a_traced_program_point_to_its_lines():
    @dsl.program
    def f(x: BIT, y: BIT):
        return (x, y)

    with pytest.raises(cajal.CajalTypeError) as caught:
        cajal.check(f.expr, f.context)
    assert "test_cajal_language.py: line" in str(caught.value)
    for wrong in (lambda x: bool(x), lambda x: list(x), lambda x: x[x], lambda x: "x", lambda x: True):

        def traced(x: BIT):
            return wrong(x)  # noqa: B023

        with pytest.raises(cajal.CajalError, match="dsl"):
            dsl.program(traced)
    with pytest.raises(cajal.CajalError, match="must be annotated with a type"):
        dsl.program(lambda x: x)
