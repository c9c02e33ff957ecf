"""The `clockwright` command: finds the commands of all packages and combines them.

A command is an entry point of group `clockwright.commands`: its name is what people type, its value a
function with typer's annotations, or a `typer.Typer` with commands of its own. It is loaded when it is
typed or listed; so what it needs, beyond its flags, it imports when it runs, and `--help` comes at once.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import EntryPoint, distributions
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from clockwright import __version__
from clockwright.cli.completion import VARIABLE, answer_shells
from clockwright.errors import ClockwrightError, ConfigError, RefusedError
from clockwright.foreign import escaped
from clockwright.process import collect_rarely, keep_together

# Order of commands in help: first these, then the others by name.
_FIRST = (
    *("up", "up --ray", "controller", "front", "worker", "infer", "status", "top", "explain"),
    *("drain", "load"),
    *("simulate", "plan", "doctor", "models", "app", "policies", "keys", "quotas", "trace"),
    *("workers", "cells", "picker", "scaler", "certs", "completion"),
)
# Commands that serve until they are told to end.
_SERVERS = (["up"], ["controller"], ["front"], ["worker"])
# Who starts them learns from the exit code that starting them again with the same settings is of no use.
_SUPERVISED = (["front"], ["worker"])


class _Commands(TyperGroup):
    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(**settings)
        # The last command of a name wins, so ours come last: no other package replaces `up` unnoticed.
        points = sorted(_registered(), key=_is_ours)
        found = {point.name: point for point in points}
        others = sorted(found.keys() - set(_FIRST))
        #: Entry points, until their command is used.
        self.commands: Any = {name: found[name] for name in (*_FIRST, *others) if name in found}
        if not found:
            self.epilog = "No command is registered: install clockwright, or install it again."

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401  click's
        """Find a command; one whose name has a flag, such as `up --ray`, has flags of its own."""
        given = {argument.partition("=")[0] for argument in args[1:]}
        for name in self.commands:
            command, _, flag = name.partition(" ")
            if flag in given and command == args[0]:
                # Else a flag with a value would take it.
                words = ["--help"] if "--help" in args else args[1:]
                return super().resolve_command(ctx, [name, *words])
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: object, cmd_name: str) -> Any:  # noqa: ANN401
        point = self.commands.get(cmd_name)
        return None if point is None else _load(point)


app = typer.Typer(
    cls=_Commands,
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
    """Run the command. A known error is one line on standard error and exit code 1."""
    collect_rarely()
    if sys.argv[1:2] in _SERVERS:
        keep_together()
    if VARIABLE in os.environ:
        answer_shells()
    try:
        # Completion scripts use this name, however the command was started.
        app(prog_name="clockwright")
    except RefusedError as error:
        sys.exit(_for_a_terminal(f"refused: {error}"))
    except ClockwrightError as error:
        words = _for_a_terminal(f"error: {error}")
        if not (isinstance(error, ConfigError) and sys.argv[1:2] in _SUPERVISED):
            sys.exit(words)
        print(words, file=sys.stderr)
        sys.exit(os.EX_CONFIG)
    except KeyboardInterrupt:
        sys.exit(130)


def _for_a_terminal(words: str) -> str:
    """Escape terminal control characters: parts of the text may come from a server."""
    return "\n".join(map(escaped, words.split("\n")))


def _registered() -> list[EntryPoint]:
    """Find the commands of all installed packages; of a name, the one first on the path comes last."""
    points: list[EntryPoint] = []
    for distribution in reversed(list(distributions())):
        # Another package's file may be broken in any way.
        with suppress(Exception):
            points += distribution.entry_points.select(group="clockwright.commands")
    return points


def _is_ours(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "clockwright"


def _load(point: EntryPoint) -> Any:  # noqa: ANN401
    try:
        return _command(point.name, point.load())
    # Its package may be missing, and a module of another package may do anything: one that exits must not
    # take the help of all other commands with it.
    except (Exception, SystemExit) as error:
        why = str(error) or type(error).__name__
        reason = f"command {point.name} ({point.value}) cannot be loaded: {why}"

    def broken() -> None:
        raise ConfigError(reason)

    # With any arguments, also --help, it prints the reason.
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return _command(
        point.name, broken, help=reason, add_help_option=False, context_settings=anything
    )


def _command(name: str, found: Any, **settings: Any) -> Any:  # noqa: ANN401
    # Typer makes groups only, not the members of one.
    group = typer.Typer()
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name)
    else:
        group.command(name, **settings)(found)
    command = typer.main.get_group(group).commands[name]
    for each in (command, *getattr(command, "commands", {}).values()):
        # Lines end where the source's did, and the terminal's end elsewhere.
        each.help = "\n\n".join(
            " ".join(paragraph.split()) for paragraph in (each.help or "").split("\n\n")
        )
    return command
