"""Values out of a TOML document. A ConfigError names the place, what was found and what is expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from clockwright.errors import ConfigError

Table = Mapping[str, object]


def section(document: Table, name: str) -> Table:
    """Give a table of the document; empty if it is not there."""
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: found {value!r}, expected a table")
    return value


def tables(document: Table, name: str, above: str = "") -> list[tuple[str, Table]]:
    """Give the tables of a list, each with its place in words; there is at least one.

    Args:
        document: where the list is.
        name: of the list.
        above: the place of `document` in words, with a dot behind it; empty: the whole.
    """
    value, name = document.get(name), above + name
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{name}: expected tables [[{name}]]")
    if not value:
        raise ConfigError(f"{name}: expected at least one table [[{name}]]")
    return [(f"{name}[{number}]", item) for number, item in enumerate(value)]


def check_keys(
    table: Table, where: str, *, required: Collection[str], allowed: Collection[str]
) -> None:
    """Refuse keys that do not belong there, and ask for those that are missing."""
    for key in table:
        if key not in allowed:
            nearest = get_close_matches(key, allowed, n=1)
            hint = f" (nearest: {nearest[0]!r})" if nearest else ""
            raise ConfigError(f"{where}: there is no {key!r}{hint}")
    for key in sorted(required):
        if key not in table:
            raise ConfigError(f"{where}: {key!r} is missing")


def one_of(value: object, names: Collection[str], where: str) -> str:
    """Give a value that has to be one of some names."""
    if isinstance(value, str) and value in names:
        return value
    nearest = get_close_matches(str(value), names, n=1)
    hint = f" (nearest: {nearest[0]!r})" if nearest else ""
    shown = ", ".join(sorted(names)[:8])
    raise ConfigError(f"{where}: found {value!r}{hint}, expected one of {shown}")


def number(table: Table, key: str, where: str) -> float:
    """Give a number that has to be there."""
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {key} is {value!r}, expected a number")
    return value


def integer(table: Table, key: str, where: str, default: int) -> int:
    """Give a whole number, not negative."""
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where}: {key} is {value!r}, expected a whole number of 0 or more")
    return value


def time_ns(table: Table, key: str, where: str, unit_ns: int, default: int | None = None) -> int:
    """Give a time in ns; `unit_ns` is the unit in the file."""
    if key not in table and default is not None:
        return default
    return span_ns(number(table, key, where), f"{where}: {key}", unit_ns)


def span_ns(value: float, where: str, unit_ns: int) -> int:
    """Turn a number of units into ns."""
    if not 0 <= value < 1e9:  # false for NaN too
        raise ConfigError(f"{where} is {value!r}, expected 0 or more")
    return round(value * unit_ns)
