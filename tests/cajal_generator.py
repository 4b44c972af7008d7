"""Random well-typed Cajal programs: every constructor, linear by construction."""

import random
from fractions import Fraction

from riftco import cajal
from riftco.cajal import terms, types
from riftco.cajal.scopes import needs_type

UNIT = types.Unit()
Use = tuple[tuple[str, types.Type], ...]


class Generator:
    """A source of programs; the same seed gives the same programs."""

    def __init__(self, seed: int, *, weighted: bool = False) -> None:
        self.random = random.Random(seed)
        self.weighted = weighted
        self.names = 0
        self.relations: dict[str, cajal.Relation] = {}

    # Types

    def enum(self) -> types.Type:
        pick = self.random.random()
        if pick < 0.1:
            return UNIT
        if pick < 0.85:
            return types.fin(self.random.randint(1, 3))
        return types.Sum((types.fin(self.random.randint(1, 2)), UNIT))

    def type(self, depth: int = 2, *, dictionaries: bool = True) -> types.Type:
        pick = self.random.random()
        if depth == 0 or pick < 0.4:
            return self.enum()
        parts = [self.type(depth - 1, dictionaries=dictionaries) for _ in range(self.random.randint(2, 3))]
        if pick < 0.6:
            return types.Sum(parts)
        if pick < 0.9 or not dictionaries:
            return types.Product(parts) if pick < 0.8 else types.power(parts[0], self.random.randint(1, 3))
        return types.Dictionary(self.enum(), parts[0])

    # Terms

    def fresh(self) -> str:
        self.names += 1
        return f"x{self.names}"

    def split(self, use: Use) -> tuple[Use, Use]:
        left = tuple(pair for pair in use if self.random.random() < 0.5)
        return left, tuple(pair for pair in use if pair not in left)

    def typed(self, use: Use, want: types.Type, fuel: int) -> terms.Term:
        """A term where no type is known from around it."""
        found = self.term(use, want, fuel)
        return terms.Ascribe(found, want) if needs_type(found) or self.random.random() < 0.1 else found

    def term(self, use: Use, want: types.Type, fuel: int) -> terms.Term:
        """A term of a type that consumes exactly some variables."""
        if len(use) == 1 and use[0][1] is want and self.random.random() < 0.6:
            return terms.Variable(use[0][0])
        if fuel <= 0:
            return self.finished(use, want)
        pick = self.random.random()
        left, right = self.split(use)
        if pick < 0.3:
            return self.formed(use, want, fuel)
        if pick < 0.42:
            name, bound = self.fresh(), self.type(1)
            return terms.Let(
                name, self.typed(left, bound, fuel - 1), self.term((*right, (name, bound)), want, fuel - 1)
            )
        if pick < 0.55:
            return self.cased(left, right, want, fuel)
        if pick < 0.63:
            return terms.Sequence(self.term(left, UNIT, fuel - 1), self.term(right, want, fuel - 1))
        if pick < 0.7:
            weight = Fraction(self.random.randint(0, 3), 3) if self.weighted else None
            return terms.Choice(self.term(use, want, fuel - 1), self.term(use, want, fuel - 1), weight)
        if pick < 0.8:
            parts = [self.type(0) for _ in range(self.random.randint(1, 3))]
            parts[at := self.random.randrange(len(parts))] = want
            return terms.Project(self.typed(use, types.Product(parts), fuel - 1), at)
        if pick < 0.95:
            return self.looked_up(left, right, want, fuel)
        return terms.Error()

    def formed(self, use: Use, want: types.Type, fuel: int) -> terms.Term:
        left, right = self.split(use)
        match want:
            case types.Sum(parts):
                index = self.random.randrange(len(parts))
                return terms.Inject(index, self.term(use, parts[index], fuel - 1))
            case types.Product(parts):
                return terms.Tuple(tuple(self.term(use, part, fuel - 1) for part in parts))
            case types.Dictionary(key, value):
                count = self.random.randint(1, 3)
                if self.random.random() < 0.3:
                    keys, values = types.power(key, count), types.power(value, count)
                    return terms.KeysValues(self.typed(left, keys, fuel - 1), self.typed(right, values, fuel - 1))
                entries = ((self.term(left, key, fuel - 1), self.term(right, value, fuel - 1)) for _ in range(count))
                return terms.Dictionary(tuple(entries))
        return terms.Sequence(self.term(left, UNIT, fuel - 1), self.term(right, UNIT, fuel - 1))

    def cased(self, left: Use, right: Use, want: types.Type, fuel: int) -> terms.Term:
        sum = types.fin(self.random.randint(1, 3)) if self.random.random() < 0.5 else self.type(1)
        if not isinstance(sum, types.Sum):
            sum = types.Sum((sum, UNIT))
        scrutinee = self.typed(left, sum, fuel - 1)
        arms: list[terms.Arm] = []
        rest = len(sum.parts)
        while rest > 0 and sum.parts[rest - 1] is UNIT:
            rest -= 1
        use_rest = rest < len(sum.parts) and self.random.random() < 0.4
        for index, part in enumerate(sum.parts):
            if use_rest and index >= rest:
                arms.append(terms.Arm(None, None, self.term(right, want, fuel - 1)))
                break
            if part is UNIT and self.random.random() < 0.5:
                arms.append(terms.Arm(index, None, self.term(right, want, fuel - 1)))
                continue
            name = self.fresh()
            arms.append(terms.Arm(index, name, self.term((*right, (name, part)), want, fuel - 1)))
        if arms[-1].index is not None:
            self.random.shuffle(arms)
        return terms.Case(scrutinee, tuple(arms))

    def looked_up(self, left: Use, right: Use, want: types.Type, fuel: int) -> terms.Term:
        key, query, relation = self.enum(), None, None
        if self.random.random() < 0.5:
            query, name = self.enum(), f"R{len(self.relations)}"
            relation = cajal.relation(name, query, key, lambda q, k: self.random.random() < 0.4)
            self.relations[name] = relation
        held = self.typed(left, types.Dictionary(key, want), fuel - 1)
        return terms.Lookup(held, self.term(right, query or key, fuel - 1), relation)

    def finished(self, use: Use, want: types.Type) -> terms.Term:
        """A small term that consumes some variables."""
        kept = next((pair for pair in use if pair[1] is want), None)
        found = self.closed(want) if kept is None else terms.Variable(kept[0])
        for pair in use:
            if pair is not kept:
                found = terms.Sequence(self.discarded(terms.Variable(pair[0]), pair[1]), found)
        return found

    def discarded(self, term: terms.Term, type: types.Type) -> terms.Term:
        """A term of type 1 that consumes another."""
        match type:
            case types.Sum(parts):
                names = [self.fresh() for _ in parts]
                bodies = (self.discarded(terms.Variable(name), part) for name, part in zip(names, parts, strict=True))
                arms = (terms.Arm(i, name, body) for i, (name, body) in enumerate(zip(names, bodies, strict=True)))
                return terms.Case(term, tuple(arms))
            case types.Product(parts):
                at = self.random.randrange(len(parts))
                return self.discarded(terms.Project(term, at), parts[at])
            case types.Dictionary(key, value):
                return self.discarded(terms.Lookup(term, self.closed(key)), value)
        return term

    def closed(self, want: types.Type) -> terms.Term:
        match want:
            case types.Sum(parts):
                index = self.random.randrange(len(parts))
                return terms.Inject(index, self.closed(parts[index]))
            case types.Product(parts):
                return terms.Tuple(tuple(map(self.closed, parts)))
            case types.Dictionary(key, value):
                count = self.random.randint(1, 3)
                return terms.Dictionary(tuple((self.closed(key), self.closed(value)) for _ in range(count)))
        return terms.Unit()

    # Programs

    def program(self, *, fuel: int = 3, most_dimensions: int = 64) -> cajal.Definition:
        """A definition of up to four parameters, checked by nobody yet."""
        self.names, self.relations = 0, {}
        context: list[tuple[str, types.Type]] = []
        for name in "abcd"[: self.random.choice((0, 1, 1, 2, 2, 3, 4))]:
            context.append((name, self.type(self.random.randint(0, 2))))
        result = self.type()
        if max(type.dimension for _, type in [*context, ("", result)]) > most_dimensions:
            return self.program(fuel=fuel, most_dimensions=most_dimensions)
        body = terms.Ascribe(self.term(tuple(context), result, fuel), result)
        return cajal.Definition("f", body, tuple(context), result)

    def some_values(self, type: types.Type, count: int) -> list[cajal.values.Value]:
        """Every value of a type if there are few, else a few of them; dictionaries as closed terms make them."""
        if type.cardinality is not None and type.cardinality <= count:
            return cajal.enumerate_values(type)
        made = (cajal.evaluate(terms.Ascribe(self.closed(type), type), {}) for _ in range(count))
        return list(made)


def size(term: terms.Term) -> int:
    """How many constructors a term has."""
    return 1 + sum(map(size, term.parts))
