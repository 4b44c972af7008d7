"""Random programs: the type of every result, text and back, and the sum of results beside the map.

300 in the default suite. The slow lane runs 10,000 for types and text, and 2,000 over every environment up to 256; what
it found is committed as tests/golden/cajal_random_programs.json, which RIFTCO_WRITE_GOLDEN=1 writes anew.
"""

import collections
import contextlib
import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from riftco import cajal
from tests.cajal_generator import Generator

RECORD = Path(__file__).parent / "golden" / "cajal_random_programs.json"
KINDS = {
    "Variable",
    "Unit",
    "Error",
    "Inject",
    "Tuple",
    "Project",
    "Sequence",
    "Let",
    "Case",
    "Choice",
    "Dictionary",
    "Lookup",
}


def checked(generator, definition):
    """The typed term; text and back give it and the term again."""
    module = cajal.Module(relations=dict(generator.relations))
    node = cajal.check(definition.expr, definition.context)
    assert node.type is definition.result and node.free.items() <= dict(definition.context).items()
    assert cajal.parse_expression(cajal.to_text(definition.expr), module) == definition.expr
    again = cajal.check(cajal.parse_expression(cajal.to_text(node), module), definition.context)
    assert again is node
    return node


def environments(generator, definition, *, each, most):
    """Every environment where there are few values, else some."""
    names = [name for name, _ in definition.context]
    lists = [generator.some_values(type, each) for _, type in definition.context]
    return [dict(zip(names, row, strict=True)) for row in itertools.islice(itertools.product(*lists), most)]


def compare(node, found, env):
    """The results of a program beside its map by program and by coefficients; gives how many results there were."""
    results = cajal.evaluate_all(node, env)
    assert all(result.type is node.type for result in results)
    total = sum((cajal.encode(result, node.type) for result in results), np.zeros(node.type.dimension))
    vectors = [cajal.encode(env[name], type) for name, type in found.context]
    np.testing.assert_array_equal(total, found.apply(*vectors))
    terms = found.values.astype(np.float64)
    for axis, vector in enumerate(vectors):
        terms = terms * vector[found.indices[:, axis + 1]]
    by_coefficients = np.bincount(found.indices[:, 0], weights=terms, minlength=found.output_dimension)
    np.testing.assert_array_equal(total, by_coefficients)
    if not node.chooses:
        # A key that fails stops the deterministic interpreter alone; where it goes on there is one result.
        with contextlib.suppress(cajal.CajalEvaluationError):
            assert results == [cajal.evaluate(node, env)]
    return len(results)


def test_300_random_programs():
    generator, kinds = Generator(17), collections.Counter()
    several = 0
    for number in range(300):
        definition = generator.program()
        node = checked(generator, definition) if number % 2 else cajal.check(definition.expr, definition.context)
        kinds.update({type(inner).__name__ for inner in cajal.nodes(node)})
        found = cajal.compile(node, definition.context)
        for env in environments(generator, definition, each=4, most=8):
            several += compare(node, found, env) > 1
    assert kinds.keys() == KINDS and min(kinds.values()) > 20
    assert several > 50


def test_random_programs_weigh_and_are_possible():
    generator = Generator(23, weighted=True)
    for _ in range(40):
        definition = generator.program()
        node = checked(generator, definition)
        found = cajal.compile(node, definition.context, "probability")
        for env in environments(generator, definition, each=2, most=2):
            vectors = [cajal.encode(env[name], type) for name, type in definition.context]
            dense = found.values.astype(np.float64)
            for axis, vector in enumerate(vectors):
                dense = dense * vector[found.indices[:, axis + 1]]
            dense = np.bincount(found.indices[:, 0], weights=dense, minlength=found.output_dimension)
            np.testing.assert_allclose(found.apply(*vectors), dense, rtol=1e-12, atol=1e-12)
    generator = Generator(29)
    for _ in range(40):
        definition = generator.program()
        count, possible = (cajal.compile(definition.expr, definition.context, s) for s in ("natural", "boolean"))
        assert (count.indices == possible.indices).all() and possible.values.all()


@pytest.mark.slow
def test_10000_random_programs_have_the_types_that_the_checker_says():
    generator, kinds, widest = Generator(1), collections.Counter(), 0
    for _ in range(10_000):
        definition = generator.program()
        node = checked(generator, definition)
        kinds.update({type(inner).__name__ for inner in cajal.nodes(node)})
        widest = max(widest, node.type.dimension, *(type.dimension for _, type in definition.context))
        for env in environments(generator, definition, each=2, most=1):
            assert all(result.type is node.type for result in cajal.evaluate_all(node, env))
    assert kinds.keys() == KINDS
    record(
        "types",
        {"programs": 10_000, "seed": 1, "failures": 0, "widest": widest, "constructors": dict(sorted(kinds.items()))},
    )


@pytest.mark.slow
def test_2000_random_programs_equal_their_maps_in_every_environment():
    generator, programs, count, most = Generator(2), 0, 0, 0
    while programs < 2_000:
        definition = generator.program()
        sizes = [type.cardinality for _, type in definition.context]
        if None in sizes or math.prod(sizes) > 256:
            continue
        node = cajal.check(definition.expr, definition.context)
        found = cajal.compile(node, definition.context)
        for env in environments(generator, definition, each=256, most=256):
            most = max(most, compare(node, found, env))
            count += 1
        programs += 1
    record("maps", {"programs": programs, "seed": 2, "failures": 0, "environments": count, "most_results": most})


def record(name, found):
    """Compare with the committed record, or write it."""
    known = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    if os.environ.get("RIFTCO_WRITE_GOLDEN") == "1":
        RECORD.write_text(json.dumps({**known, name: found}, indent=2) + "\n")
        return
    assert found == known[name]
