"""Text to modules, by recursive descent: one method for each line of the grammar in docs/cajal.md."""

from collections.abc import Mapping
from fractions import Fraction

from riftco.cajal import sugar, terms, types
from riftco.cajal.diagnostics import Source, Span, refuse, shallow
from riftco.cajal.grammar import Grammar
from riftco.cajal.lexer import Token
from riftco.cajal.relations import Relation, relation
from riftco.cajal.terms import Definition, Module, Parameter, Term


@shallow
def parse(text: str, name: str = "") -> Module:
    """Read a module.

    Args:
        text: the program text.
        name: its file, for messages.

    Returns:
        Types, relations and definitions by name; sugar is gone from the definitions' terms.

    Raises:
        CajalSyntaxError: the text is no module.
        CajalTypeError: a name that is not declared before, declared twice, a wrong sort, count or arity.
    """
    return _Parser(Source(text, name), Module()).module()


@shallow
def parse_expression(text: str, module: Module | None = None, name: str = "") -> Term:
    """Read one expression.

    Args:
        text: the expression.
        module: whose types, relations and definitions it may name.
        name: where it comes from, for messages.

    Raises:
        CajalSyntaxError: the text is no expression.
        CajalTypeError: as for `parse`.
    """
    parser = _Parser(Source(text, name), module or Module())
    return parser.elaborated(parser.whole(parser.expression))


@shallow
def parse_type(text: str, module: Module | None = None) -> types.Type:
    """Read one type.

    Args:
        text: the type.
        module: whose aliases it may name.

    Raises:
        CajalSyntaxError: the text is no type.
        CajalTypeError: an alias is not declared, or a number is out of range.
    """
    parser = _Parser(Source(text), module or Module())
    return parser.whole(parser.type)


class _Parser(Grammar):
    """The rules of the grammar; each reads what it is named for."""

    def __init__(self, source: Source, module: Module) -> None:
        super().__init__(source, module)
        self.places: dict[tuple[str, str], Span] = {}
        taken = terms.names_in(definition.expr for definition in module.defs.values())
        taken |= {name for definition in module.defs.values() for name, _ in definition.context}
        taken |= {token.text for token in self.tokens if token.kind == "id"}
        self.elaborator = sugar.Elaborator(self.found.defs, taken)

    def elaborated(self, term: Term) -> Term:
        return self.elaborator.expand(term, {})

    # Declarations

    def module(self) -> Module:
        while self.next.kind != "end":
            start = self.next.start
            if self.took("type"):
                self.alias(start)
            elif self.took("rel"):
                self.relation(start)
            elif self.took("def"):
                self.definition(start)
            else:
                self.fail("a declaration must begin with `type`, `rel` or `def`")
        return self.found

    def declared(self, kind: str, known: Mapping[str, object]) -> Token:
        """The name of a declaration, which must be new among its kind."""
        token = self.identifier(f"what a `{kind}` declares")
        place = self.here(token)
        if token.text in known:
            refuse(
                f"{kind}-twice",
                f"{kind}: every {kind} must have a name of its own; {token.text}{{0}} is declared already{{1}}",
                (place, "declared again"), (self.places.get((kind, token.text)), "declared first"),
                variable=token.text,
            )  # fmt: skip
        self.places[kind, token.text] = place
        return token

    def alias(self, start: int) -> None:
        name = self.declared("type", self.found.types).text
        self.want("=", "after the name of a type")
        self.found.types[name] = self.type()

    def relation(self, start: int) -> None:
        token = self.declared("rel", self.found.relations)
        self.want("(", "before the parameters of a relation")
        (query, query_type), (key, key_type) = first, second = self.parameter(), self.comma_parameter()
        self.distinct((first, second))
        self.want(")", "after the two parameters of a relation")
        self.want("=", "before the predicate of a relation")
        predicate = self.predicate()
        self.found.relations[token.text] = relation(
            token.text, query_type, key_type, predicate, names=(query, key), span=self.here(token)
        )

    def comma_parameter(self) -> Parameter:
        self.want(",", "between the two parameters of a relation")
        return self.parameter()

    def definition(self, start: int) -> None:
        token = self.declared("def", self.found.defs)
        self.want("(", "before the parameters of a definition")
        context = () if self.took(")") else tuple(self.listed(self.parameter, ")"))
        self.distinct(context)
        result, result_span = None, None
        if self.took(":"):
            at = self.next.start
            result = self.type()
            result_span = self.span(at)
        self.want("=", "before the body of a definition")
        self.elaborator.current = token.text, self.here(token)
        body = self.elaborated(self.expression())
        if result is not None:
            body = terms.Ascribe(
                body, result, span=body.span, reason=f"the declared result of {token.text}", type_span=result_span
            )
        self.found.defs[token.text] = Definition(token.text, body, context, result, span=self.here(token))

    def parameter(self) -> Parameter:
        token = self.identifier("a parameter")
        self.want(":", "after the name of a parameter")
        return Parameter(token.text, self.type(), self.here(token))

    def distinct(self, context: tuple[Parameter, ...]) -> None:
        first: dict[str, Span | None] = {}
        for parameter in context:
            if parameter[0] in first:
                refuse(
                    "context-twice",
                    f"context: every parameter must have a name of its own; {parameter[0]}{{0}} is there already{{1}}",
                    (parameter.span, "again"), (first[parameter[0]], "first"), variable=parameter[0],
                )  # fmt: skip
            first[parameter[0]] = parameter.span

    # Expressions

    def expression(self) -> Term:
        start, left = self.next.start, self.sequence()
        while self.peek("<|>", "<"):
            weight = None
            if not self.took("<|>"):
                weight = self.weight()
            left = terms.Choice(left, self.sequence(), weight, span=self.span(start))
        return left

    def weight(self) -> Fraction:
        start = self.take().start
        above = self.number("the weight of a choice")
        self.want("/", "inside the weight of a choice")
        below = self.number("the weight of a choice")
        self.want(">", "after the weight of a choice")
        if not 0 <= above <= below or below == 0:
            refuse(
                "choice-weight", f"choice: a weight must be from 0 to 1; got {above}/{below}{{0}}",
                (self.span(start), "not from 0 to 1"),
            )  # fmt: skip
        return Fraction(above, below)

    def sequence(self) -> Term:
        start, left = self.next.start, self.operand()
        while self.took(";"):
            left = terms.Sequence(left, self.operand(), span=self.span(start))
        return left

    def operand(self) -> Term:
        start = self.next.start
        if self.took("let"):
            token = self.identifier("what a `let` binds")
            self.want("=", "after the name that a `let` binds")
            bound = self.expression()
            self.want("in", "after the bound expression of a `let`")
            body = self.expression()
            return terms.Let(token.text, bound, body, span=self.span(start), name_span=self.here(token))
        if self.took("case"):
            scrutinee = self.expression()
            self.want("of", "after the scrutinee of a `case`")
            if not self.peek("|"):
                self.fail("a `case` must have an arm, `| pattern -> expression`")
            arms = []
            while self.took("|"):
                arms.append(self.arm())
            return terms.Case(scrutinee, tuple(arms), span=self.span(start))
        return self.prefix()

    def arm(self) -> terms.Arm:
        start, index, token = self.next.start, None, None
        if self.next.kind == "int":
            index = self.number("a pattern")
        elif self.peek("inl", "inr", "inj"):
            index = self.injection()
            token = self.identifier("what a pattern binds")
        elif not self.took("_"):
            self.fail("a pattern must be a number, `_`, or inl, inr or inj with a name")
        span = self.span(start)
        self.want("->", "after a pattern")
        name, place = (None, None) if token is None else (token.text, self.here(token))
        return terms.Arm(index, name, self.expression(), span=span, name_span=place)

    def injection(self) -> int:
        word = self.take().text
        return self.number("what follows `inj`") if word == "inj" else int(word == "inr")

    def prefix(self) -> Term:
        start = self.next.start
        if self.peek("inl", "inr", "inj"):
            index = self.injection()
            return terms.Inject(index, self.prefix(), span=self.span(start))
        return self.postfix()

    def postfix(self) -> Term:
        start, found = self.next.start, self.atom()
        while True:
            if self.took("."):
                index = self.number("what follows `.`")
                found = terms.Project(found, index, span=self.span(start))
            elif self.took("["):
                index = self.predicate()
                self.want("]", "after an index")
                found = sugar.IndexProject(found, index, span=self.span(start))
            elif self.took("@"):
                related = self.known_relation() if self.next.kind == "id" else None
                self.want("(", "before the query of a lookup")
                query = self.expression()
                self.want(")", "after the query of a lookup")
                found = terms.Lookup(found, query, related, span=self.span(start))
            else:
                return found

    def known_relation(self) -> Relation:
        token = self.take()
        if token.text not in self.found.relations:
            known = ", ".join(self.found.relations) or "none"
            refuse(
                "lookup-relation",
                f"lookup: a relation must be declared before its use; {token.text}{{0}} is not; declared: {known}",
                (self.here(token), "not declared"), variable=token.text,
            )  # fmt: skip
        return self.found.relations[token.text]

    def atom(self) -> Term:
        token = self.next
        start = token.start
        if token.kind in ("int", "id") and self.peek(":", ahead=1):
            self.at += 2
            type = self.type_atom()
            if token.kind == "int":
                return terms.letter(int(token.text), type, span=self.span(start))
            return sugar.IndexLetter(token.text, type, span=self.span(start))
        if token.kind == "id":
            self.take()
            if not self.took("("):
                return terms.Variable(token.text, span=self.here(token))
            arguments = () if self.took(")") else tuple(self.listed(self.expression, ")"))
            return sugar.Call(token.text, arguments, span=self.span(start))
        if self.took("error"):
            return terms.Error(span=self.span(start))
        if self.took("("):
            return self.parenthesised(start)
        if self.took("["):
            body = self.expression()
            index, count = self.bound()
            self.want("]", "after a comprehension")
            return sugar.Comprehension(body, index.text, count, span=self.span(start), index_span=self.here(index))
        if self.took("{"):
            return self.dictionary(start)
        if self.took("dict"):
            self.want("(", "after `dict`")
            keys = self.expression()
            self.want(",", "between keys and values")
            values = self.expression()
            self.want(")", "after keys and values")
            return terms.KeysValues(keys, values, span=self.span(start))
        if token.kind == "int":
            self.fail("a number must have its type behind it, as in 0:Fin 2")
        return self.fail("an expression must begin here")

    def parenthesised(self, start: int) -> Term:
        if self.took(")"):
            return terms.Unit(span=self.span(start))
        first = self.expression()
        if self.took("as"):
            at = self.next.start
            type = self.type()
            place = self.span(at)
            self.want(")", "after an annotated expression")
            return terms.Ascribe(first, type, span=self.span(start), type_span=place)
        if self.took(","):
            components = (first, *self.listed(self.expression, ")"))
            return terms.Tuple(components, span=self.span(start))
        self.want(")", "after an expression in parentheses")
        return first

    def entry(self) -> tuple[Term, Term]:
        key = self.expression()
        self.want("->", "between a key and its value")
        return key, self.expression()

    def dictionary(self, start: int) -> Term:
        key, value = first = self.entry()
        if self.peek("for"):
            index, count = self.bound()
            self.want("}", "after a comprehension")
            return sugar.Comprehension(
                value, index.text, count, key, span=self.span(start), index_span=self.here(index)
            )
        entries = [first]
        if self.took(","):
            entries += self.listed(self.entry, "}")
        else:
            self.want("}", "after the last entry")
        return terms.Dictionary(tuple(entries), span=self.span(start))

    def bound(self) -> tuple[Token, int]:
        self.want("for", "after what is repeated")
        token = self.identifier("what `for` binds")
        self.want("<", "after an index")
        return token, self.number("the bound of an index")
