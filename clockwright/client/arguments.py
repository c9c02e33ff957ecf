"""Checks the arguments of `Client` and `Operator` before anything is sent.

Without these checks a wrong type raises an exception of protobuf or gRPC, which names neither the argument nor the
expected type.
"""

from __future__ import annotations

import math
import types
from numbers import Integral, Real

from clockwright.errors import BadRequestError, ClockwrightError
from clockwright.foreign import printable


def check(
    name: str,
    value: object,
    kind: type | types.UnionType,
    expected: str,
    error: type[ClockwrightError] = BadRequestError,
) -> None:
    """Check the type of an argument.

    Raises:
        BadRequestError: it is not, or `error`; names the argument, what was found and what is `expected`.
    """
    if not isinstance(value, kind):
        raise error(f"{name}: found {shown(value)}, expected {expected}")


def check_text(name: str, value: object, error: type[ClockwrightError] = BadRequestError) -> None:
    """Check that an argument is a text that a message can hold; raises as `check`."""
    check(name, value, str, "a text", error)
    if not str(value).isascii() and any("\ud800" <= char <= "\udfff" for char in str(value)):
        raise error(f"{name}: found {shown(value)}, expected a text without halves of characters")


def check_flag(name: str, value: object) -> None:
    """Check that an argument is True or False, Python's or numpy's; raises as `check`."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise BadRequestError(f"{name}: found {shown(value)}, expected True or False")


def number(name: str, value: object, expected: str) -> float:
    """Return an argument as a float; raises as `check`."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    raise BadRequestError(f"{name}: found {shown(value)}, expected {expected}")


def whole_number(name: str, value: object, expected: str) -> int:
    """Return an argument as an int of 64 bits; raises as `check`."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        found = int(value)
        if -(1 << 63) <= found < 1 << 63:
            return found
    raise BadRequestError(f"{name}: found {shown(value)}, expected {expected}")


def shown(value: object) -> str:
    """Write a value of any kind for an error, shortened."""
    return f"{printable(repr(value), 80)} ({type(value).__name__})"
