"""Cajal: a typed, linear language whose programs are multilinear maps. NumPy only.

`parse` reads a program, `check` types it, `evaluate` and `evaluate_all` run it on values, `compile` makes its map.
Types are built by `types`, terms without text by `terms`, or traced from Python by `dsl`.
"""

from riftco.cajal import dsl, functional, terms, types, values
from riftco.cajal.checker import check
from riftco.cajal.compiler import compile
from riftco.cajal.core import nodes
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
from riftco.cajal.printer import erase, to_text
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
    "dsl",
    "encode",
    "enumerate_values",
    "erase",
    "evaluate",
    "evaluate_all",
    "functional",
    "nodes",
    "parse",
    "parse_expression",
    "parse_type",
    "relation",
    "terms",
    "to_text",
    "types",
    "values",
]
