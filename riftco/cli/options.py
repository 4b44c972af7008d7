"""Options as frozen dataclasses: a field is a flag, its metadata the help.

`flag` declares a field. `read` turns text, or a YAML value, into what the field's annotation says. The kinds are bool,
int, float, str, each perhaps `| None`, `Literal[...]` and `tuple[str, ...]`.
"""

import dataclasses
import functools
import keyword
import types
import typing
from typing import Any, Literal

from riftco.errors import ConfigError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NONE = ("none", "null")


class UsageError(ConfigError):
    """The command line, a configuration file or the environment does not say something that can be done."""


def flag(
    default: Any, help: str, *, group: str = "", metavar: str = "", shown: str | None = None, none: Any = None
) -> Any:
    """A field of an options dataclass.

    Args:
        default: its value when nothing is given.
        help: what it does, without a full stop at the end.
        group: the heading it stands under; the dataclass's own options have none.
        metavar: what stands for the value in the help.
        shown: how the default is described; by default as it is.
        none: what the word none means, where that differs from giving nothing.
    """
    metadata = {"help": help, "group": group, "metavar": metavar, "shown": shown, "none": none}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """What every verb takes."""

    config: str | None = flag(
        None, "take options from a YAML file; flags and RIFTCO_* win", group="common", metavar="FILE"
    )
    json: bool = flag(False, "print one machine-readable line on stdout, everything else on stderr", group="common")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a field's annotation says about its values."""

    base: type
    optional: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()
    none: Any = None

    @property
    def metavar(self) -> str:
        """What stands for the value in the help."""
        if self.choices:
            return "|".join(self.choices)
        return {int: "N", float: "X", str: "TEXT"}.get(self.base, "") + (" …" if self.many else "")


@functools.cache
def kinds(options_type: type) -> dict[str, Kind]:
    """The kind of every field, in order."""
    hints = typing.get_type_hints(options_type)
    fields = dataclasses.fields(options_type)
    return {field.name: dataclasses.replace(_kind(hints[field.name]), none=field.metadata["none"]) for field in fields}


def _kind(hint: Any) -> Kind:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        return dataclasses.replace(_kind(members[0]), optional=True)
    if typing.get_origin(hint) is Literal:
        return Kind(str, choices=typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return Kind(str, many=True)
    return Kind(hint)


def flag_name(name: str) -> str:
    """`--learning-rate` for `learning_rate`; `--def` for `def_`, since a field's name is no keyword."""
    return "--" + name.rstrip("_").replace("_", "-")


def field_name(name: str) -> str:
    """`def_` for the key or variable `def`."""
    return name + "_" if keyword.iskeyword(name) else name


def read(name: str, kind: Kind, value: Any) -> Any:
    """A value of a field from text or from YAML.

    Raises:
        UsageError: it is not one; the message names the flag.
    """
    if kind.many:
        return tuple(value) if _all_text(value) else _refuse(name, "be text, or a list of texts", value)
    if value is None or (kind.optional and isinstance(value, str) and value.lower() in _NONE):
        return kind.none if kind.optional else _refuse(name, "have a value", value)
    if kind.choices:
        return value if value in kind.choices else _refuse(name, f"be one of {', '.join(kind.choices)}", value)
    if kind.base is bool:
        return _read_bool(name, value)
    if kind.base is str:
        if isinstance(value, str):
            return value
        # `resume: 300` in YAML is a number.
        return (
            str(value)
            if isinstance(value, int | float) and not isinstance(value, bool)
            else _refuse(name, "be text", value)
        )
    return _read_number(name, kind.base, value)


def _read_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    return word in _TRUE if word in _TRUE + _FALSE else _refuse(name, "be true or false", value)


def _read_number(name: str, base: type, value: Any) -> int | float:
    wanted = "be an integer" if base is int else "be a number"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return _refuse(name, wanted, value)
    if base is int and isinstance(value, float):
        return int(value) if value.is_integer() else _refuse(name, wanted, value)
    try:
        return base(value)  # text too: YAML reads 1e-3 as text
    except ValueError:
        return _refuse(name, wanted, value)


def _all_text(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _refuse(name: str, wanted: str, value: Any) -> typing.NoReturn:
    raise UsageError(f"{flag_name(name)} must {wanted}; got {value!r}")
