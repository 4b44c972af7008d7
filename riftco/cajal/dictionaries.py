"""The typing rules of dictionaries and lookups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from riftco.cajal import core, terms, types
from riftco.cajal.core import Node, make
from riftco.cajal.diagnostics import refuse
from riftco.cajal.scopes import Checked, Scope, Want, each, needs_type, origin, parts_of, variable_of
from riftco.cajal.terms import Term
from riftco.cajal.usage import Part, Usage, additive, multiplicative


class Rules(Protocol):
    """The checker, as these rules need it."""

    def check(self, term: Term, scope: Scope, want: Want | None = None) -> Checked:
        """Check a term."""
        ...

    def alike(self, parts: Sequence[tuple[Term, Scope, str]], want: Want | None) -> tuple[list[Node], list[Usage]]:
        """Check terms that must have one type."""
        ...


def literal(rules: Rules, term: terms.Dictionary, scope: Scope, want: Want | None) -> Checked:
    """`{key -> value, …}`: keys share their variables, values share theirs, and the two are different."""
    if not term.entries:
        refuse("dictionary-empty", "dictionary: it must have an entry; this{0} has none", (term.span, "empty"))
    wanted = _dictionary_want(term, want)
    sides = [
        [(entry[side], scope, f"{what} {i}") for i, entry in enumerate(term.entries)]
        for side, what in enumerate(("key", "value"))
    ]
    (keys, of_keys), (values, of_values) = each(
        [lambda: rules.alike(sides[0], wanted[0]), lambda: rules.alike(sides[1], wanted[1])]
    )
    parts = [
        Part(additive("dictionary", parts_of(sides[0], of_keys)), "a key", term.span),
        Part(additive("dictionary", parts_of(sides[1], of_values)), "a value", term.span),
    ]
    usage = multiplicative("dictionary", term.span, parts)
    made = types.Dictionary(keys[0].type, values[0].type)
    return make(core.Dictionary, made, tuple(zip(keys, values, strict=True)), span=term.span), usage


def keys_values(rules: Rules, term: terms.KeysValues, scope: Scope, want: Want | None) -> Checked:
    """`dict(keys, values)` is the dictionary of their components."""
    checked: list[Checked] = []
    for product, wanted in zip((term.keys, term.values), _dictionary_want(term, want), strict=True):
        if wanted is not None and isinstance(product, terms.Tuple):
            power = types.power(wanted.type, max(1, len(product.components)))
            wanted = dataclasses.replace(wanted, type=power)
        else:
            wanted = None
        node, usage = rules.check(product, scope, wanted)
        if not isinstance(node.type, types.Product) or any(part is not node.type.parts[0] for part in node.type.parts):
            refuse(
                "dict-type",
                f"dict: keys and values{{0}} must be products of equal types; this{{1}} has the type {node.type}",
                (term.span, "the dictionary"),
                (product.span, f"has the type {node.type}"),
            )
        checked.append((node, usage))
    (keys, of_keys), (values, of_values) = checked
    assert isinstance(keys.type, types.Product) and isinstance(values.type, types.Product)
    if len(keys.type.parts) != len(values.type.parts):
        refuse(
            "dict-length",
            f"dict: there must be as many keys{{0}} as values{{1}}; got {len(keys.type.parts)} and "
            f"{len(values.type.parts)}",
            (term.keys.span, f"{len(keys.type.parts)} keys"),
            (term.values.span, f"{len(values.type.parts)} values"),
        )
    parts = [Part(of_keys, "the keys", term.keys.span), Part(of_values, "the values", term.values.span)]
    usage = multiplicative("dict", term.span, parts)
    made = types.Dictionary(keys.type.parts[0], values.type.parts[0])
    entries = tuple(zip(_components(keys), _components(values), strict=True))
    return make(core.Dictionary, made, entries, span=term.span), usage


def lookup(rules: Rules, term: terms.Lookup, scope: Scope, want: Want | None) -> Checked:
    """`dictionary @R(query)`: keys are finite and of the relation's type, or of the query's."""
    related = term.relation
    asked = None
    if needs_type(term.dictionary) and related is not None and want is not None:
        asked = Want(types.Dictionary(related.key, want.type), f"relation {related.name}", related.span)
    dictionary, of_dictionary = rules.check(term.dictionary, scope, asked)
    bound, places = origin(term.dictionary, scope)
    if not isinstance(dictionary.type, types.Dictionary):
        refuse(
            "lookup-type",
            f"lookup: what stands before `@`{{0}} must be a dictionary; it{{1}} has the type {dictionary.type}{bound}",
            (term.span, "the lookup"),
            (term.dictionary.span, f"has the type {dictionary.type}"),
            *places,
            variable=variable_of(term.dictionary),
        )
    key = dictionary.type.key
    if not key.is_enum:
        refuse(
            "lookup-finite",
            f"lookup: keys{{1}} of a lookup{{0}} must have a finite type, a sum of 1; they have the type {key}{bound}",
            (term.span, "the lookup"),
            (term.dictionary.span, f"keys have the type {key}"),
            *places,
            variable=variable_of(term.dictionary),
        )
    if related is not None and related.key is not key:
        refuse(
            "lookup-key",
            f"lookup: keys{{0}} must have the type {related.key} of the keys of {related.name}{{1}}; they have the "
            f"type {key}",
            (term.dictionary.span, f"keys have the type {key}"),
            (related.span, f"relates keys of {related.key}"),
            variable=related.name,
        )
    if related is None:
        asked = Want(key, "the keys of the dictionary", term.dictionary.span)
    else:
        asked = Want(related.query, f"relation {related.name}", related.span)
    query, of_query = rules.check(term.query, scope, asked)
    parts = [
        Part(of_dictionary, "the dictionary", term.dictionary.span),
        Part(of_query, "the query", term.query.span),
    ]
    usage = multiplicative("lookup", term.span, parts)
    return make(core.Lookup, dictionary.type.value, dictionary, query, related, span=term.span), usage


def _dictionary_want(term: Term, want: Want | None) -> tuple[Want | None, Want | None]:
    """What is asked of the keys and of the values of a dictionary."""
    if want is None:
        return None, None
    if not isinstance(want.type, types.Dictionary):
        refuse(
            "dictionary-type",
            f"dictionary: a dictionary{{0}} has a type `key => value`; {want.reason}{{1}} asks for {want.type}",
            (term.span, "a dictionary"),
            (want.span, f"asks for {want.type}"),
        )
    key, value = want.type.key, want.type.value
    return Want(key, f"a key of {want.reason}", want.span), Want(value, f"a value of {want.reason}", want.span)


def _components(node: Node) -> tuple[Node, ...]:
    """The components of a product; those of a tuple are there already."""
    if isinstance(node, core.Tuple):
        return node.components
    assert isinstance(node.type, types.Product)
    return tuple(make(core.Project, part, node, i, span=node.span) for i, part in enumerate(node.type.parts))
