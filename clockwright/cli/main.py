"""The `clockwright` command: finds the commands of all floors and makes one of them.

A command is an entry point of group `clockwright.commands`: its name is what people type, its value a
function with typer's annotations, or a `typer.Typer` with commands of its own. It is loaded when it is
typed or listed; so what it needs, beyond its flags, it imports when it runs, and `--help` comes at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from clockwright import __version__
from clockwright.errors import ClockwrightError, ConfigError, RefusedError

GROUP = "clockwright.commands"

# As help lists them: what a newcomer types first comes first. Any others follow, by name.
_ORDER = [
    "up",
    "controller",
    "worker",
    "infer",
    "status",
    "drain",
    "simulate",
    "replay",
    "models",
    "app",
    "trace",
]


class Commands(TyperGroup):
    """All commands that are installed; a broken one breaks no other."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(**settings)
        found = {point.name: point for point in entry_points(group=GROUP)}
        rank = {name: index for index, name in enumerate(_ORDER)}
        self._points = {
            name: found[name] for name in sorted(found, key=lambda name: (rank.get(name, 99), name))
        }
        if not found:
            self.epilog = "No command is registered: install clockwright, or install it again."

    @override
    def list_commands(self, ctx: object) -> list[str]:
        return list(self._points)

    @override
    def get_command(self, ctx: object, cmd_name: str) -> Any:
        point = self._points.get(cmd_name)
        return None if point is None else _load(point)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Deep network serving with latency you can promise.",
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command; a fault that has a name is one line on standard error and exit code 1."""
    try:
        app()
    except RefusedError as error:
        sys.exit(f"refused: {error}")
    except ClockwrightError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _load(point: EntryPoint) -> Any:  # noqa: ANN401
    try:
        command = point.load()
    except (
        Exception
    ) as error:  # its floor may be missing, and a stranger's module does what it likes
        return _broken(
            point.name, f"command {point.name} ({point.value}) cannot be loaded: {error}"
        )
    if isinstance(command, typer.Typer):
        group = typer.main.get_group(command)
        group.name = point.name
        return group
    return _single(point.name, command)


def _single(name: str, function: Any, **settings: Any) -> Any:  # noqa: ANN401
    alone = typer.Typer(add_completion=False)
    alone.command(name, **settings)(function)
    return typer.main.get_command(alone)


def _broken(name: str, reason: str) -> Any:  # noqa: ANN401
    def broken() -> None:
        raise ConfigError(reason)

    return _single(
        name,
        broken,
        help=reason,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
