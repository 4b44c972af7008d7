"""Cajal: a typed, linear language whose programs are multilinear maps. NumPy only.

`parse` reads a program, `check` types it, `evaluate` and `evaluate_all` run it on values, `compile` makes its map.
Types are built by `types`, terms without text by `terms`, or traced from Python by `dsl`.
"""

from riftco.cajal import terms, types, values
from riftco.cajal.checker import check
from riftco.cajal.compiler import compile
from riftco.cajal.diagnostics import (
    CajalEncodingError,
    CajalError,
    CajalEvaluationError,
    CajalLoweringError,
    CajalSyntaxError,
    CajalTypeError,
    Diagnostic,
    Source,
    Span,
)
from riftco.cajal.encoding import decode, encode, enumerate_values
from riftco.cajal.evaluation import evaluate, evaluate_all
from riftco.cajal.maps import MultilinearMap
from riftco.cajal.parser import parse, parse_expression, parse_type
from riftco.cajal.relations import Relation, relation
from riftco.cajal.terms import Definition, Module

__all__ = [
    "CajalEncodingError",
    "CajalError",
    "CajalEvaluationError",
    "CajalLoweringError",
    "CajalSyntaxError",
    "CajalTypeError",
    "Definition",
    "Diagnostic",
    "Module",
    "MultilinearMap",
    "Relation",
    "Source",
    "Span",
    "check",
    "compile",
    "decode",
    "encode",
    "enumerate_values",
    "evaluate",
    "evaluate_all",
    "parse",
    "parse_expression",
    "parse_type",
    "relation",
    "terms",
    "types",
    "values",
]
