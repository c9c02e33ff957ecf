"""Settings are declared once: a field of a config dataclass has its default, flag, bounds and help.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ServerConfig:
        port: int = setting(8001, help="Port of clients; 0: any free one.", least=0, most=65535)
        max_open_bytes: int = setting(1 << 30, above=0, unit=MIB, help="MiB of all open requests.")

        def __post_init__(self) -> None:
            check(self)

`check` applies the bounds. `parameters` makes the flags `--port` and `--max-open-mib` of it, and `Flags` holds the values
of a command line until a command makes the config.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_type_hints

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a flag whose field counts in bytes or nanoseconds."""

    size: int
    #: The ends of the field's name and of the flag's.
    field: str
    flag: str
    kind: type


MIB = Unit(1 << 20, "_bytes", "_mib", int)
MS = Unit(NS_PER_MS, "_ns", "_ms", float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a config, as a flag. It has at most one lower bound."""

    #: Without help the flag is hidden.
    help: str
    #: The flag's name without dashes. Empty: the field's name, with the end of the unit.
    flag: str = ""
    unit: Unit | None = None
    above: float | None = None
    least: float | None = None
    most: float | None = None
    metavar: str | None = None
    #: The flag's type, if it is not the field's.
    kind: Any = None
    #: Makes the field's value of the flag's.
    read: Callable[[Any], Any] | None = None
    #: Makes the flag's value of a text.
    parser: Callable[[str], Any] | None = None


class _Place(NamedTuple):
    setting: Setting
    field: dataclasses.Field[Any]
    #: The config that has the field, and the name of this part in the whole. Empty: it is the whole.
    owner: type[Any]
    part: str


def setting(
    default: Any = MISSING,  # noqa: ANN401
    *,
    default_factory: Any = MISSING,  # noqa: ANN401
    **what: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401  as dataclasses.field
    """Declare a field that is a flag; `what` are the fields of `Setting`. With a factory the flag's default is None."""
    default = {"default": default, "default_factory": default_factory}
    return field(**default, metadata={"setting": Setting(**what)})


def part(kind: type[Any], *, without: tuple[str, ...] = ()) -> Any:  # noqa: ANN401
    """Declare a field that is a config of its own. Its settings are flags too, except those `without`."""
    return field(default_factory=kind, metadata={"part": kind, "without": without})


def check(config: Any) -> None:  # noqa: ANN401  any config
    """Check every setting against its bounds. None is always allowed.

    Raises ConfigError if a setting is out of its bounds.
    """
    for own in dataclasses.fields(config):
        if "setting" in own.metadata and (value := getattr(config, own.name)) is not None:
            _check(own.name, own.metadata["setting"], value)


def _check(name: str, one: Setting, value: Any, size: int = 1) -> None:  # noqa: ANN401
    """Check a value in units of `size` bytes or nanoseconds; bounds are in bytes or nanoseconds."""
    low = one.above if one.least is None else one.least
    # These comparisons are false for NaN too.
    fits = value != float("inf")
    words = "a number"
    if low is not None:
        fits = fits and (value * size > low if one.least is None else value * size >= low)
        words = f"more than {low / size:g}" if one.least is None else f"{low / size:g} or more"
    if one.most is not None:
        fits = fits and value * size <= one.most
        words = f"{(low or 0) / size:g} to {one.most / size:g}"
    if not fits:
        raise ConfigError(f"{name} is {value}, expected {words}")


def _places(kind: type[Any], name: str = "", without: tuple[str, ...] = ()) -> dict[str, _Place]:
    """The settings of a config and of its parts by flag, its own first."""
    found: dict[str, _Place] = {}
    parts: dict[str, _Place] = {}
    for own in dataclasses.fields(kind):
        one: Setting | None = own.metadata.get("setting")
        if one is not None and own.name not in without:
            end = own.name if one.unit is None else own.name.removesuffix(one.unit.field)
            flag = one.flag or (end if one.unit is None else end + one.unit.flag)
            found[flag] = _Place(one, own, kind, name)
        elif "part" in own.metadata:
            parts |= _places(own.metadata["part"], own.name, own.metadata["without"])
    return found | parts


def _default(place: _Place) -> Any:  # noqa: ANN401
    """The flag's default, in its unit. None if it is unset."""
    one, value = place.setting, place.field.default
    if value is MISSING or value is None:
        return None
    return value if one.unit is None else one.unit.kind(value / one.unit.size)


def parameters(kind: type[Any], without: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """The flags of a config for typer, except those `without`."""
    # Configs are also imported without a command line.
    import typer

    made = []
    for flag, place in _places(kind).items():
        if flag in without:
            continue
        one, default = place.setting, _default(place)
        hint: Any = one.kind or (one.unit and one.unit.kind)
        hint = hint or get_type_hints(place.owner)[place.field.name]
        option = typer.Option(
            _spelled(flag),
            help=one.help,
            metavar=one.metavar,
            hidden=not one.help,
            parser=one.parser,
        )
        hint = hint | None if default is None else hint
        keyword = inspect.Parameter.KEYWORD_ONLY
        made.append(
            inspect.Parameter(flag, keyword, default=default, annotation=Annotated[hint, option])
        )
    return made


class Flags(Generic[C]):
    """The values of a config's flags on a command line. A flag that is missing has its default, or None."""

    def __init__(self, kind: type[C], **said: Any) -> None:  # noqa: ANN401
        self.kind = kind
        self._places = _places(kind)
        if unknown := said.keys() - self._places.keys():
            raise TypeError(f"{kind.__name__} has no flags {sorted(unknown)}")
        self._said = said

    def __getitem__(self, flag: str) -> Any:  # noqa: ANN401
        """The value of a flag in the flag's unit, or its default."""
        return self._said[flag] if flag in self._said else _default(self._places[flag])

    def saying(self, **more: Any) -> Flags[C]:  # noqa: ANN401
        """The same flags with some other values."""
        return Flags(self.kind, **{**self._said, **more})

    def common(self, kind: type[Any]) -> Flags[Any]:
        """Those flags that another config has too."""
        return Flags(
            kind, **{flag: self._said[flag] for flag in _places(kind) if flag in self._said}
        )

    def make(self, **more: Any) -> C:  # noqa: ANN401
        """Make the config; `more` are fields that are no flags, or not flags of this command.

        Raises ConfigError if a setting is out of its bounds, or does not go with another.
        """
        found: dict[tuple[str, type[Any]], dict[str, Any]] = {}
        for flag, (one, own, owner, name) in self._places.items():
            value = self._said.get(flag)
            if value is None:
                continue  # the default
            if one.read is not None:
                value = one.read(value)
            elif one.unit is not None:
                _check(_spelled(flag), one, value, one.unit.size)
                value = round(value * one.unit.size)
            found.setdefault((name, owner), {})[own.name] = value
        whole = found.pop(("", self.kind), {})
        parts = {name: owner(**values) for (name, owner), values in found.items()}
        return self.kind(**{**whole, **parts, **more})

    def spell(self) -> list[str]:
        """Spell them on a command line."""
        return spell(self._said)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def spell(said: Mapping[str, Any]) -> list[str]:
    """Spell flags by name on a command line, without those that are None, False or empty."""
    return [
        _spelled(name) if value is True else f"{_spelled(name)}={value}"
        for name, found in said.items()
        for value in (found if isinstance(found, list) else [found])
        if value is not None and value is not False and value != ""
    ]
