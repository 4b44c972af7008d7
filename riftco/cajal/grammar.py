"""The grammar of types and of index arithmetic: one method for each line, each reads what it is named for."""

from collections.abc import Callable

from riftco.cajal import types
from riftco.cajal.diagnostics import CajalError, Source, refuse
from riftco.cajal.lexer import Reader
from riftco.cajal.relations import Arithmetic, Name, Number, Operation
from riftco.cajal.terms import Module

_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


class Grammar(Reader):
    """A reader that knows the declarations so far."""

    def __init__(self, source: Source, module: Module) -> None:
        super().__init__(source)
        self.found = Module(dict(module.types), dict(module.relations), dict(module.defs))

    # Types

    def type(self) -> types.Type:
        """Read `sum ["=>" ty]`."""
        left = self.sum()
        return types.Dictionary(left, self.type()) if self.took("=>") else left

    def sum(self) -> types.Type:
        """Read `prod {"+" prod}`."""
        start, parts = self.next.start, [self.product()]
        while self.took("+"):
            parts.append(self.product())
        return parts[0] if len(parts) == 1 else self.made(start, lambda: types.Sum(parts))

    def product(self) -> types.Type:
        """Read `pow {"*" pow}`."""
        start, parts = self.next.start, [self.power()]
        while self.took("*"):
            parts.append(self.power())
        return parts[0] if len(parts) == 1 else self.made(start, lambda: types.Product(parts))

    def power(self) -> types.Type:
        """Read `tatom {"^" INT}`."""
        start, base = self.next.start, self.type_atom()
        while self.took("^"):
            count = self.number("what follows `^`")
            base = self.made(start, lambda base=base, count=count: types.power(base, count))
        return base

    def type_atom(self) -> types.Type:
        """Read `"1" | "Fin" INT | ID | "(" ty ")"`."""
        token = self.next
        if token.kind == "int" and token.text == "1":
            self.take()
            return types.Unit()
        if self.took("Fin"):
            count = self.number("what follows `Fin`")
            return self.made(token.start, lambda: types.fin(count))
        if self.took("("):
            found = self.type()
            self.want(")", "after a type in parentheses")
            return found
        if token.kind == "id":
            self.take()
            if token.text not in self.found.types:
                known = ", ".join(self.found.types) or "none"
                refuse(
                    "type-unknown",
                    f"type: an alias must be declared before its use; {token.text}{{0}} is not; declared: {known}",
                    (self.here(token), "not declared"), variable=token.text,
                )  # fmt: skip
            return self.found.types[token.text]
        return self.fail("a type must begin with 1, Fin, a name or `(`")

    def made(self, start: int, make: Callable[[], types.Type]) -> types.Type:
        """A type, or the reason against it with its place."""
        try:
            return make()
        except CajalError as error:
            refuse("type-size", f"type: {error}{{0}}", (self.span(start), "out of range"))

    # Index arithmetic

    def predicate(self) -> Arithmetic:
        """Read `conj {"or" conj}`."""
        return self.left_chain(self.conjunction, "or")

    def conjunction(self) -> Arithmetic:
        """Read `neg {"and" neg}`."""
        return self.left_chain(self.negation, "and")

    def negation(self) -> Arithmetic:
        """Read `"not" neg | cmp`."""
        start = self.next.start
        if self.took("not"):
            return Operation("not", (self.negation(),), self.span(start))
        left = self.additive()
        if self.peek(*_COMPARISONS):
            operator = self.take().text
            return Operation(operator, (left, self.additive()), self.span(start))
        return left

    def additive(self) -> Arithmetic:
        """Read `term {("+" | "-") term}`."""
        return self.left_chain(self.multiplicative, "+", "-")

    def multiplicative(self) -> Arithmetic:
        """Read `fac {("*" | "%") fac}`."""
        return self.left_chain(self.factor, "*", "%")

    def left_chain(self, part: Callable[[], Arithmetic], *operators: str) -> Arithmetic:
        """Read parts with operators between them, which group to the left."""
        start, left = self.next.start, part()
        while self.peek(*operators):
            operator = self.take().text
            left = Operation(operator, (left, part()), self.span(start))
        return left

    def factor(self) -> Arithmetic:
        """Read `INT | ID | "(" pred ")"`."""
        token = self.next
        if token.kind == "int":
            return Number(int(self.take().text), self.here(token))
        if token.kind == "id":
            return Name(self.take().text, self.here(token))
        if self.took("("):
            found = self.predicate()
            self.want(")", "after an index expression in parentheses")
            return found
        return self.fail("an index expression must begin with a number, a name or `(`")
