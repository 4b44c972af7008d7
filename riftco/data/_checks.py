"""Checks on options that several functions of this package share."""

import math
from typing import Any

from riftco.errors import ConfigError


def positive_integer(who: str, name: str, value: Any) -> int:
    """`value` as an int >= 1; a bool is not a number here. Raises ConfigError."""
    return _integer(who, name, value, minimum=1)


def unsigned_integer(who: str, name: str, value: Any) -> int:
    """`value` as an int in 0 .. 2^64 - 1. Raises ConfigError."""
    return _integer(who, name, value, minimum=0)


def fraction(who: str, name: str, value: Any) -> float:
    """`value` as a float strictly between 0 and 1. Raises ConfigError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value < 1:
        raise ConfigError(f"{who}: {name} must be a number between 0 and 1, both excluded; got {value!r}")
    return float(value)


def _integer(who: str, name: str, value: Any, *, minimum: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{who}: {name} must be an integer; got {value!r}")
    number = value.__index__()
    if not minimum <= number < 2**64:
        raise ConfigError(f"{who}: {name} must be an integer of at least {minimum}; got {number}")
    return number
