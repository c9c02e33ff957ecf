"""Values out of a TOML document. A ConfigError names the place, what was found and what is expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from clockwright.errors import ConfigError

Table = Mapping[str, object]
T = TypeVar("T")


def build(kind: type[T], table: object, where: str, **known: object) -> T:
    """Make a value of a dataclass from a table of its fields.

    Args:
        kind: the dataclass.
        table: a value for each field that has no default, and for any others.
        where: the table's place; empty: it is the document.
        known: fields that the table may not say.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: found {table!r}, expected a table")
    asked = [field for field in fields(kind) if field.name not in known]  # type: ignore[arg-type]
    check_keys(
        table,
        where or "the case",
        required={f.name for f in asked if f.default is f.default_factory is MISSING},
        allowed=[field.name for field in asked],
    )
    hints = get_type_hints(kind)
    above = f"{where}." if where else ""
    found = {name: value_of(value, hints[name], above + name) for name, value in table.items()}
    return kind(**found, **known)


def value_of(value: object, hint: Any, where: str) -> Any:  # noqa: ANN401
    """Give a value that has to suit a type: a number, a word, a dataclass, or a tuple of any of these."""
    if hint is object:
        return value
    if is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    kinds = [kind for kind in get_args(hint) if kind not in (NoneType, Ellipsis)]
    if get_origin(hint) is Literal:
        return one_of(value, kinds, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: found {value!r}, expected a list")
        return tuple(value_of(one, kinds[0], f"{where}[{n}]") for n, one in enumerate(value))
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: found {value!r}, expected a table")
        return value
    plain = hint if isinstance(hint, type) else kinds[0]
    # A whole number is a float too, and a truth value is no number.
    if isinstance(value, bool) != (plain is bool) or not isinstance(
        value, (int, float) if plain is float else plain
    ):
        raise ConfigError(f"{where}: found {value!r}, expected {plain.__name__}")
    return value


def check_keys(
    table: Table, where: str, *, required: Collection[str], allowed: Collection[str]
) -> None:
    """Refuse keys that do not belong there, and ask for those that are missing."""
    for key in table:
        if key not in allowed:
            raise ConfigError(f"{where}: there is no {key!r}{_nearest(key, allowed)}")
    for key in sorted(required):
        if key not in table:
            raise ConfigError(f"{where}: {key!r} is missing")


def one_of(value: object, names: Collection[str], where: str) -> str:
    """Give a value that has to be one of some names."""
    if isinstance(value, str) and value in names:
        return value
    hint, shown = _nearest(str(value), names), ", ".join(sorted(names)[:8])
    raise ConfigError(f"{where}: found {value!r}{hint}, expected one of {shown}")


def _nearest(word: str, names: Collection[str]) -> str:
    nearest = get_close_matches(word, names, n=1)
    return f" (nearest: {nearest[0]!r})" if nearest else ""


def span_ns(value: float, where: str, unit_ns: int) -> int:
    """Turn a number of units into ns."""
    if not 0 <= value < 1e9:  # false for NaN too
        raise ConfigError(f"{where} is {value!r}, expected 0 or more")
    return round(value * unit_ns)
