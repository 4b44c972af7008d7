"""Cajal programs for the tests: well-typed ones, which every part of the language is run on, and ill-typed ones."""

REVERSAL = """
type C = Fin 10
def f(xs: C^15, ys: C^15): C^15 = case xs[0] of | 0 -> [ys[14 - i] for i < 15] | _ -> ys
"""

# name: text. The last definition is the program.
PROGRAMS = {
    "identity": "def f(x: Fin 3): Fin 3 = x",
    "unit": "def f(): 1 = ()",
    "constant": "def f(): Fin 3 = inj 1 ()",
    "error": "def f(x: Fin 2): Fin 3 = error",
    "swap": "def f(x: Fin 2 * Fin 3): Fin 3 * Fin 2 = (x.1, x.0)",
    "inject": "def f(x: Fin 2): 1 + Fin 2 + 1 = inj 1 x",
    "left": "def f(x: Fin 2): Fin 2 + 1 = inl x",
    "not": "def f(x: Fin 2): Fin 2 = case x of | 0 -> 1:Fin 2 | 1 -> 0:Fin 2",
    "and": """type B = Fin 2
        def f(x: B, y: B): B = case x of | 0 -> (case y of | _ -> 0:B) | 1 -> y""",
    "rest": "def f(x: Fin 4, y: Fin 2): Fin 2 = case x of | 2 -> (case y of | 0 -> 1:Fin 2 | _ -> 0:Fin 2) | _ -> y",
    "payload": "def f(x: Fin 2 + 1, y: Fin 2): Fin 2 = case x of | inl z -> (case z of | _ -> y) | inr u -> u; y",
    "let": "def f(x: Fin 2 * Fin 2): Fin 2 = let y = x.0 in case y of | 0 -> 1:Fin 2 | 1 -> 0:Fin 2",
    "sequence": "def f(x: 1, y: 1 * 1): 1 * 1 = x; y",
    "choice": "def f(x: Fin 2): Fin 2 = x <|> x",
    "choice of components": "def f(x: Fin 2): Fin 2 * Fin 2 = (x <|> x, x)",
    "choice of tuples": "def f(x: Fin 2): Fin 2 * Fin 2 = (x, x) <|> (x, x) <|> error",
    "lookup": "def f(x: Fin 2, q: Fin 3): Fin 2 = {0:Fin 3 -> x, 1:Fin 3 -> x} @ (q)",
    "repeated keys": "def f(x: Fin 2, q: Fin 2): Fin 2 = {0:Fin 2 -> x, 0:Fin 2 -> x} @ (q)",
    "open keys": "def f(k: Fin 2, q: Fin 2): Fin 3 = {k -> 2:Fin 3, k -> 0:Fin 3} @ (q)",
    "failing value": "def f(q: Fin 2): Fin 2 = {0:Fin 2 -> (error as Fin 2), 1:Fin 2 -> 1:Fin 2} @ (q)",
    "open dictionary": "def f(k: Fin 2, v: Fin 2): Fin 2 => Fin 2 = {k -> v}",
    "given dictionary": "def f(d: Fin 2 => Fin 2, q: Fin 2): Fin 2 = d @ (q)",
    "unequal": """rel R(q: Fin 3, k: Fin 3) = q != k
        def f(x: Fin 2, q: Fin 3): Fin 2 = {i:Fin 3 -> x for i < 3} @R(q)""",
    "successor": """rel next(q: Fin 4, k: Fin 4) = k == (q + 1) % 4
        def f(q: Fin 4): Fin 4 = {i:Fin 4 -> i:Fin 4 for i < 4} @next(q)""",
    "many to one": """rel half(q: Fin 6, k: Fin 3) = k * 2 == q or k * 2 + 1 == q
        def f(q: Fin 6): Fin 3 = {i:Fin 3 -> i:Fin 3 for i < 3} @half(q)""",
    "empty relation": """rel never(q: Fin 2, k: Fin 2) = not (q == q)
        def f(q: Fin 2): Fin 2 = {0:Fin 2 -> 1:Fin 2} @never(q)""",
    "keys and values": "def f(k: Fin 2 ^ 3, v: Fin 2 ^ 3, q: Fin 2): Fin 2 = dict(k, v) @ (q)",
    "lookup next to a failure": "def f(q: Fin 2): Fin 2 = ({0:Fin 2 -> 1:Fin 2} @ (q), case q of | _ -> 0:Fin 2).1",
    "calls": """type B = Fin 2
        def flip(x: B): B = case x of | 0 -> 1:B | 1 -> 0:B
        def both(x: B, y: B): B = case x of | 0 -> (case y of | _ -> 0:B) | 1 -> y
        def f(x: B, y: B): B = flip(both(flip(x), flip(y)))""",
    "reverse": "def f(x: Fin 2 ^ 4): Fin 2 ^ 4 = [x[3 - i] for i < 4]",
    "nested comprehension": "def f(x: Fin 2 ^ 2 ^ 2): Fin 2 ^ 2 ^ 2 = [[x[j][i] for i < 2] for j < 2]",
    "one-tuple": "def f(x: Fin 2): Fin 2 ^ 1 = [x for i < 1]",
    "small reversal": """type C = Fin 3
        def f(xs: C ^ 3, ys: C ^ 3): C ^ 3 = case xs[0] of | 0 -> [ys[2 - i] for i < 3] | _ -> ys""",
    "enum key": "def f(q: 1 + Fin 2): Fin 2 = {(inr 1:Fin 2 as 1 + Fin 2) -> 1:Fin 2} @ (q)",
}

# code, variable, places (line, column), text. The text begins on line 1.
ILL_TYPED = [
    ("variable-unknown", "y", [(1, 16), (1, 7)], "def f(y1: 1) = y; y1"),
    ("context-unused", "y", [(1, 13), (1, 25)], "def f(x: 1, y: Fin 2) = x"),
    ("context-unused", "x", [(1, 7), (1, 21)], "def f(x: 1, y: 1) = y <|> error"),
    ("context-twice", "x", [(1, 13), (1, 7)], "def f(x: 1, x: 1) = x"),
    ("tuple-usage", "x", [(1, 29), (1, 32)], "def f(x: Fin 2, y: 1) = y; (x, ())"),
    ("tuple-type", None, [(1, 22), (1, 14)], "def f(x: 1): Fin 2 = (x, x)"),
    ("variable-type", "x", [(1, 26), (1, 18), (1, 7)], "def f(x: Fin 2): Fin 3 = x"),
    ("unit-type", None, [(1, 18), (1, 10)], "def f(): Fin 2 = ()"),
    ("inject-type", None, [(1, 26), (1, 18)], "def f(x: Fin 2): 1 * 1 = inj 0 x"),
    ("inject-index", None, [(1, 11), (1, 11)], "def f() = 5:Fin 2"),
    ("inject-untyped", None, [(1, 15)], "def f(x: 1) = inl x"),
    ("error-untyped", None, [(1, 15)], "def f(x: 1) = error"),
    ("project-index", "x", [(1, 23), (1, 23), (1, 7)], "def f(x: Fin 2 ^ 2) = x.2"),
    ("project-index", "x", [(1, 19), (1, 19), (1, 7)], "def f(x: Fin 2) = x.0"),
    ("sequence-twice", "x", [(1, 15), (1, 18), (1, 15)], "def f(x: 1) = x; x"),
    ("variable-type", "x", [(1, 29), (1, 29), (1, 7)], "def f(x: Fin 2, y: Fin 2) = x; y"),
    ("let-twice", "x", [(1, 23), (1, 28), (1, 15)], "def f(x: 1) = let y = x in x; y"),
    ("let-unused", "y", [(1, 15), (1, 25)], "def f() = let y = () in ()"),
    ("let-shadow", "x", [(1, 19), (1, 7)], "def f(x: 1) = let x = () in x"),
    ("case-type", "x", [(1, 15), (1, 20), (1, 7)], "def f(x: 1) = case x of | 0 -> ()"),
    ("case-missing", None, [(1, 19), (1, 24)], "def f(x: Fin 3) = case x of | 0 -> ()"),
    ("case-again", None, [(1, 41), (1, 31)], "def f(x: Fin 2) = case x of | 0 -> () | 0 -> () | 1 -> ()"),
    ("case-index", None, [(1, 41), (1, 24)], "def f(x: Fin 1) = case x of | 0 -> () | 1 -> ()"),
    ("case-rest", None, [(1, 31), (1, 19)], "def f(x: Fin 2) = case x of | _ -> () | 1 -> ()"),
    ("case-payload", None, [(1, 35), (1, 28)], "def f(x: Fin 2 + 1) = case x of | 0 -> () | 1 -> ()"),
    ("case-unused", "y", [(1, 39), (1, 44)], "def f(x: Fin 2 + 1) = case x of | inl y -> () | inr u -> u"),
    ("case-shadow", "x", [(1, 39), (1, 7)], "def f(x: Fin 2 + 1) = case x of | inl x -> x | inr x -> x"),
    ("case-usage", "y", [(1, 42), (1, 51)], "def f(x: Fin 2, y: 1) = case x of | 0 -> y | 1 -> ()"),
    ("case-twice", "x", [(1, 24), (1, 36), (1, 19)], "def f(x: Fin 2) = case x of | 0 -> x | 1 -> x"),
    ("ascribe-type", None, [(1, 51), (1, 36)], "def f(x: Fin 2) = case x of | 0 -> 0:Fin 2 | 1 -> 0:Fin 3"),
    ("choice-usage", "x", [(1, 15), (1, 21)], "def f(x: 1) = x <|> ()"),
    ("choice-weight", None, [(1, 17)], "def f(x: 1) = x <3/2> x"),
    ("dictionary-usage", "k", [(1, 20), (1, 29)], "def f(k: Fin 2) = {k -> (), 0:Fin 2 -> ()}"),
    ("dictionary-twice", "x", [(1, 20), (1, 25), (1, 19)], "def f(x: Fin 2) = {x -> x}"),
    ("dictionary-type", None, [(1, 18), (1, 10)], "def f(): Fin 2 = {() -> ()}"),
    ("dict-length", None, [(1, 42), (1, 45)], "def f(k: Fin 2 ^ 2, v: Fin 2 ^ 3) = dict(k, v)"),
    ("dict-type", None, [(1, 33), (1, 38)], "def f(k: Fin 2, v: Fin 2 ^ 3) = dict(k, v)"),
    ("lookup-type", "x", [(1, 25), (1, 25), (1, 7)], "def f(x: Fin 2, q: 1) = x @ (q)"),
    ("lookup-finite", "d", [(1, 42), (1, 42), (1, 7)], "def f(d: Fin 2 * 1 => 1, q: Fin 2 * 1) = d @ (q)"),
    ("variable-type", "q", [(1, 39), (1, 34), (1, 22)], "def f(d: Fin 2 => 1, q: Fin 3) = d @ (q)"),
    ("lookup-key", "R", [(2, 30), (1, 5)], "rel R(q: 1, k: 1) = q == k\ndef f(d: Fin 2 => 1, q: 1) = d @R(q)"),
    ("lookup-twice", "x", [(1, 31), (1, 37), (1, 19)], "def f(x: Fin 2) = {0:Fin 2 -> x} @ (x)"),
    ("relation-finite", "R", [(1, 5)], "rel R(q: 1 * 1, k: 1) = q == k def f() = ()"),
    ("relation-sort", "R", [(1, 5), (1, 21)], "rel R(q: 1, k: 1) = q + k def f() = ()"),
    ("index-sort", None, [(1, 20), (1, 22)], "def f(x: 1 ^ 2) = [x[i < 1] for i < 2]"),
    ("index-unbound", "j", [(1, 22)], "def f(x: 1 ^ 2) = [x[j] for i < 2]"),
    ("index-shadow", "i", [(1, 30), (1, 41)], "def f(x: 1 ^ 2) = [[x[i] for i < 2] for i < 2]"),
    ("call-unknown", "f", [(1, 15), (1, 5)], "def f(x: 1) = f(x)"),
    ("call-arity", "g", [(2, 15), (1, 5)], "def g(x: 1) = x\ndef f(x: 1) = g(x, x)"),
    ("type-unknown", "B", [(1, 10)], "def f(x: B) = x"),
    ("type-size", None, [(1, 10)], "def f(x: Fin 0) = x"),
    ("def-twice", "f", [(2, 5), (1, 5)], "def f() = ()\ndef f() = ()"),
]

LEAKS = [
    "def f() = (let x = () in ()); x",
    "def f(y: Fin 1) = (case y of | inj 0 x -> ()); x",
]
