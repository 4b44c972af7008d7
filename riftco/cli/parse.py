"""From argv, the environment and a YAML file to one options value: defaults < YAML < RIFTCO_* < flags.

The parser is argparse, fed from the dataclasses that hold the options. tyro was considered: its errors are boxes
of many lines, and the layers under the flags, with unknown keys answered by the nearest known one, would stand beside
it anyway; what is left for it to do is what argparse does.
"""

import argparse
import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from riftco.cli.options import Common, UsageError, field_name, flag_name, kinds, read

Options = TypeVar("Options")
PREFIX = "RIFTCO_"
NOT_OPTIONS = (
    "RIFTCO_TRACEBACK", "RIFTCO_ALLOW_OLD_JAX", "RIFTCO_GOLDEN", "RIFTCO_WRITE_GOLDEN", "RIFTCO_REQUIRE_ACCELERATOR",
    "RIFTCO_CACHE",
)  # fmt: skip
"""Variables with other meanings: tracebacks, an old jax, the test suite's numbers and devices; and RIFTCO_CI_*."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[\w-]+)\S*: ", r"\1 ", message).replace(
            "expected one argument", "needs a value"
        )
        raise UsageError(message.replace("expected at least one argument", "needs a value"))


def parse(
    options_type: type[Options],
    argv: Sequence[str],
    *,
    positional: str | None = None,
    environment: Mapping[str, str] | None = None,
    known_elsewhere: Callable[[], Iterable[str]] = tuple,
    passed_over: Iterable[str] = (),
) -> Options:
    """The options that a command line means.

    Args:
        options_type: a dataclass of `flag` fields.
        argv: what stands after the verb.
        positional: the field that a bare word fills, where there is one.
        environment: os.environ by default.
        known_elsewhere: gives the names that other verbs have, so that a RIFTCO_* variable for those is no error.
        passed_over: keys of a YAML file that mean nothing here and are no error.

    Raises:
        UsageError: an unknown flag or key, a value of the wrong kind, an unreadable YAML file.
    """
    given = _flags(options_type, argv, positional)
    from_environment = _environment(options_type, os.environ if environment is None else environment, known_elsewhere)
    file = given.get("config", from_environment.get("config"))
    from_file = _yaml(options_type, file, passed_over) if file else {}
    return options_type(**{**from_file, **from_environment, **given})


def wants_json(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    """Whether a command line asks for --json, read as `parse` reads it but past any other mistake in it."""
    environment = os.environ if environment is None else environment
    file = environment.get("RIFTCO_CONFIG")
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        name, equals, value = _dashed(word).partition("=")
        if name in ("--json", "--no-json"):
            return name == "--json"
        if name == "--config":
            file = value if equals else following
    with contextlib.suppress(UsageError):
        if "RIFTCO_JSON" in environment:
            return bool(read("json", kinds(Common)["json"], environment["RIFTCO_JSON"]))
        if file:
            return bool(read("json", kinds(Common)["json"], _mapping(file).get("json", False)))
    return False


def _flags(options_type: type, argv: Sequence[str], positional: str | None) -> dict[str, Any]:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, usage="")
    for name, kind in kinds(options_type).items():
        if kind.base is bool:
            parser.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction)
        elif kind.many:
            parser.add_argument(flag_name(name), dest=name, nargs="+", action="extend")
        else:
            parser.add_argument(flag_name(name), dest=name)
    found, rest = parser.parse_known_args([_dashed(word) for word in argv])
    values = {name: read(name, kinds(options_type)[name], value) for name, value in vars(found).items()}
    if unknown := [word for word in rest if word.startswith("-") and word not in ("-", "--")]:
        name = unknown[0].partition("=")[0]
        raise UsageError(
            f"there is no option {name}{_nearest(name, [flag_name(field) for field in kinds(options_type)])}"
        )
    words = [word for word in rest if word != "--"]
    if words and positional is None:
        raise UsageError(f"an option begins with --; got {words[0]!r}")
    if words and positional in values:
        raise UsageError(f"give {flag_name(positional)} once; got {words[0]!r} beside it")
    if words and positional is not None:
        kind = kinds(options_type)[positional]
        if len(words) > 1 and not kind.many:
            raise UsageError(f"one {flag_name(positional)} is wanted; got {words[1]!r} besides")
        values[positional] = read(positional, kind, words if kind.many else words[0])
    return values


def _dashed(word: str) -> str:
    """`--batch_size=4` as `--batch-size=4`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if re.match(r"--[A-Za-z]", word) else word


def _environment(
    options_type: type, environment: Mapping[str, str], known_elsewhere: Callable[[], Iterable[str]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in NOT_OPTIONS or variable.startswith(PREFIX + "CI_"):
            continue
        name = field_name(variable.removeprefix(PREFIX).lower())
        kind = kinds(options_type).get(name)
        if kind is not None:
            found[name] = _named(variable, name, kind, text.split() if kind.many else text)
        elif name not in known_elsewhere():
            known = [PREFIX + field.upper() for field in kinds(options_type)]
            raise UsageError(f"environment: {variable} is no option{_nearest(variable, known)}; unset it")
    return found


def _mapping(file: str) -> dict[Any, Any]:
    """What a YAML file holds."""
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config must be a file that can be read; {file}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config must be YAML; {file} is not: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"--config must be a mapping of options to values; {file} is a {type(content).__name__}")
    return content or {}


def _yaml(options_type: type, file: str, passed_over: Iterable[str]) -> dict[str, Any]:
    content = _mapping(file)
    if content.keys() == {"model", "train"}:
        raise UsageError(
            f"--config must be a mapping of options to values; {file} has the library's own form, which "
            "riftco.models.DecoderConfig and riftco.train.TrainConfig read (from_dict); give the config.yaml beside it"
        )
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = field_name(str(key).replace("-", "_"))
        kind = kinds(options_type).get(name)
        if kind is None and name in passed_over:
            continue
        if kind is None or name == "config":
            raise UsageError(f"{file}: {key!r} is no option{_nearest(name, list(kinds(options_type)))}")
        found[name] = _named(file, name, kind, [value] if kind.many and isinstance(value, str) else value)
    return found


def _named(where: str, name: str, kind: Any, value: Any) -> Any:
    try:
        return read(name, kind, value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower() if not name.isupper() else name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; see --help"
