"""`riftco cajal check|run|compile|show`: Cajal programs from files, with diagnostics that underline the source."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from riftco import cajal
from riftco.cajal import terms
from riftco.cli.console import Console
from riftco.cli.options import Common, UsageError, flag
from riftco.cli.verbs import Action


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions(Common):
    """Options of `cajal check`, which the other actions take too."""

    file: str | None = flag(None, "a program", metavar="FILE")
    def_: str | None = flag(None, "one definition of it", metavar="NAME", shown="all to check, the last one otherwise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(CheckOptions):
    """Options of `cajal run`."""

    arg: tuple[str, ...] = flag((), "a closed expression for each parameter, as in x='1:Fin 2'", metavar="NAME=EXPR …")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions(CheckOptions):
    """Options of `cajal compile`."""

    semiring: Literal["natural", "boolean", "probability", "float"] = flag("natural", "what the coefficients are")
    entries: int = flag(20, "how many coefficients are printed")


class _Refused(Exception):
    """A program is wrong; what is wrong has been printed."""

    def __init__(self, error: cajal.CajalError) -> None:
        super().__init__()
        self.error = error


def run_check(options: CheckOptions, console: Console) -> dict[str, Any]:
    """Check every definition, or one, and print its type and what it uses."""
    module = _module(options)
    names = list(module.defs) if options.def_ is None else [_definition(options, module).name]
    found: dict[str, str] = {}
    wrong: list[cajal.CajalError] = []
    for name in names:
        definition = module.defs[name]
        try:
            node = cajal.check(definition.expr, definition.context)
        except cajal.CajalError as error:
            wrong.append(error)
            continue
        found[name] = f"({', '.join(f'{x}: {type}' for x, type in definition.context)}) -> {node.type}"
        console.say(f"{name}{found[name]}")
    if wrong:
        diagnostics = [diagnostic for error in wrong for diagnostic in error.diagnostics]
        raise _Refused(cajal.CajalError("\n".join(map(str, wrong)), diagnostics))
    return {"types": found}


def run_run(options: RunOptions, console: Console) -> dict[str, Any]:
    """Print every result of a definition at closed arguments."""
    module = _module(options)
    definition = _definition(options, module)
    cajal.check(definition.expr, definition.context)
    term = definition.expr
    for parameter, argument in reversed(list(_arguments(options, definition, module))):
        name, type = parameter
        bound = terms.Ascribe(argument, type, reason=f"the parameter {name}", type_span=parameter.span)
        term = terms.Let(name, bound, term)
    node = cajal.check(term, ())
    results = cajal.evaluate_all(node, {})
    for value in results:
        console.say(str(value))
    vector = sum((cajal.encode(value, node.type) for value in results), start=[0.0] * node.type.dimension)
    return {"def": definition.name, "type": node.type, "results": list(map(str, results)), "vector": list(vector)}


def run_compile(options: CompileOptions, console: Console) -> dict[str, Any]:
    """Print the size of a definition's map and its first coefficients."""
    definition = _definition(options, _module(options))
    found = cajal.compile(definition.expr, definition.context, options.semiring)
    console.say(
        f"{definition.name}: {' × '.join(map(str, found.input_dimensions)) or '()'} -> {found.output_dimension}"
    )
    console.say(f"{found.nnz:,} of {math.prod(found.shape):,} coefficients are not zero")
    for place, value in zip(found.indices[: options.entries].tolist(), found.values, strict=False):
        console.say(f"  {place} {value}")
    if found.nnz > options.entries:
        console.say("  …")
    return {
        "def": definition.name,
        "semiring": options.semiring,
        "input_dimensions": found.input_dimensions,
        "output_dimension": found.output_dimension,
        "nnz": found.nnz,
    }


def run_show(options: CheckOptions, console: Console) -> dict[str, Any]:
    """Print a definition as the checker typed it: patterns written out, calls and comprehensions gone."""
    definition = _definition(options, _module(options))
    node = cajal.check(definition.expr, definition.context)
    text = cajal.to_text(dataclasses.replace(definition, expr=cajal.erase(node), result=None))
    console.say(text)
    return {"def": definition.name, "type": node.type, "text": text, "nodes": sum(1 for _ in cajal.nodes(node))}


def _module(options: CheckOptions) -> cajal.Module:
    if options.file is None:
        raise UsageError("a file with a program is required")
    try:
        text = Path(options.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise cajal.CajalSyntaxError(f"{options.file} must be UTF-8 text; {error}") from None
    return cajal.parse(text, options.file)


def _definition(options: CheckOptions, module: cajal.Module) -> cajal.Definition:
    if not module.defs:
        raise UsageError(f"{options.file} has no definition")
    name = next(reversed(module.defs)) if options.def_ is None else options.def_
    if name not in module.defs:
        raise UsageError(f"--def must name a definition of {options.file}: {', '.join(module.defs)}; got {name!r}")
    return module.defs[name]


def _arguments(options: RunOptions, definition: cajal.Definition, module: cajal.Module) -> Iterator[tuple[Any, Any]]:
    """Each parameter with its expression."""
    given: dict[str, str] = {}
    for text in options.arg:
        name, equals, expression = text.partition("=")
        if not equals:
            raise UsageError(f"--arg must be NAME=EXPRESSION; got {text!r}")
        given[name.strip()] = expression
    wanted = dict(definition.context)
    if given.keys() != wanted.keys():
        known = ", ".join(f"{name}: {type}" for name, type in wanted.items()) or "nothing"
        raise UsageError(
            f"--arg must give each parameter of {definition.name} ({known}) once; got {', '.join(given) or 'none'}"
        )
    for parameter in definition.context:
        yield parameter, cajal.parse_expression(given[parameter[0]], module, f"--arg {parameter[0]}")


def _reported(run: Any) -> Any:
    """An action whose diagnostics are printed with their source underlined."""

    def reported(options: Any, console: Console) -> dict[str, Any]:
        try:
            return {"file": options.file, **run(options, console)}
        except _Refused as refused:
            error = refused.error
        except cajal.CajalError as raised:
            if not raised.diagnostics:
                raise
            error = raised
        console.note(error.render())
        console.note(f"\n{len(error.diagnostics)} error{'s' if len(error.diagnostics) > 1 else ''} in {options.file}")
        found = [
            {
                "code": diagnostic.code,
                "message": diagnostic.message,
                "variable": diagnostic.variable,
                "spans": [[span.line, span.column, span.start, span.end] for span in diagnostic.spans],
            }
            for diagnostic in error.diagnostics
        ]
        return {"file": options.file, "diagnostics": found, "exit_status": 1}

    return reported


ACTIONS = {
    "check": Action(
        CheckOptions, _reported(run_check), "check types and linear usage; print the type of each definition", "file",
        "riftco cajal check swap.cajal",
    ),
    "run": Action(
        RunOptions, _reported(run_run), "run a definition on closed expressions; print every result", "file",
        "riftco cajal run swap.cajal --def swap --arg x='(0:Fin 2, 1:Fin 2)'",
    ),
    "compile": Action(
        CompileOptions, _reported(run_compile), "compile a definition; print the size and the coefficients of its map",
        "file",
        "riftco cajal compile swap.cajal --def swap",
    ),
    "show": Action(
        CheckOptions, _reported(run_show), "print a definition as the checker typed it, without sugar", "file",
        "riftco cajal show swap.cajal --def swap",
    ),
}  # fmt: skip
