"""`clockwright policies`: every policy by name, what it is, and its options, as its own code says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from clockwright.cli.flags import Json
from clockwright.errors import ConfigError

#: Flags of `up`, `controller` that are one scheduling policy's alone, by policy.
FLAGS_OF = {
    "edf_mh": ("--tenant-weight", "--isolation"),
    "clipper": ("--batching", "--batch-delay-ms"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOption:
    """One option of a policy."""

    name: str
    #: As Python writes it; empty: the option is required.
    default: str
    #: What its docstring says.
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHelp:
    """One policy, for people."""

    #: "scheduling" (`up --policy`) or "selection" (`app add --policy`).
    kind: str
    name: str
    words: str
    options: tuple[PolicyOption, ...]


def policies(
    name: Annotated[str, typer.Argument(help="One policy; by default all.")] = "",
    json: Json = False,
) -> None:
    """List the policies for `up --policy` and `app add --policy`, with their options."""
    from rich.console import Console
    from rich.padding import Padding

    from clockwright.cli.show import print_json

    found = [row for row in known() if name in ("", row.name)]
    if not found:
        names = ", ".join(row.name for row in known())
        raise ConfigError(f"policy is {name!r}, expected one of {names}")
    if json:
        print_json([asdict(row) for row in found])
        return
    console = Console(highlight=False, markup=False)
    titles = {
        "scheduling": "Scheduling (clockwright up --policy NAME, with the flags named):",
        "selection": "Selection (clockwright app add --policy NAME --option NAME=VALUE):",
    }
    for kind, title in titles.items():
        mine = [row for row in found if row.kind == kind]
        if mine:
            console.print(title)
        for row in mine:
            console.print(Padding(f"{row.name}: {row.words}", (0, 0, 0, 2)))
            for option in row.options:
                default = f" (by default {option.default})" if option.default else " (needed)"
                words = f"{option.name}{default * (kind == 'selection')}: {option.words}"
                console.print(Padding(words, (0, 0, 0, 6)))


def known() -> list[PolicyHelp]:
    """Describe every policy, built in or brought by another package."""
    from importlib.metadata import entry_points

    from controller.core.policies import POLICIES
    from controller.process.schedulers import GROUP
    from controller.selection.plugins import plugin_policies
    from controller.selection.policies import BUILT_IN

    flags = _flag_help()
    found = [
        PolicyHelp(
            kind="scheduling",
            name=name,
            words=_first_sentence(kind.make),
            options=tuple(
                PolicyOption(name=flag, default="", words=flags[flag])
                for flag in FLAGS_OF.get(name, ())
            ),
        )
        for name, kind in POLICIES.items()
    ]
    found += [
        PolicyHelp(kind="scheduling", name=name, words="a package brings it", options=())
        for name in sorted(entry_points(group=GROUP).names - POLICIES.keys())
    ]
    found += [
        PolicyHelp(
            kind="selection",
            name=name,
            words=_first_sentence(policy),
            options=tuple(_options(policy)),
        )
        for name, policy in {**BUILT_IN, **plugin_policies()}.items()
    ]
    return found


def _flag_help() -> dict[str, str]:
    from dataclasses import fields
    from typing import get_type_hints

    from controller.process.cli import SchedulerFlags

    hints = get_type_hints(SchedulerFlags, include_extras=True)
    found = {}
    for field in fields(SchedulerFlags):
        (option,) = hints[field.name].__metadata__
        # In an annotation, typer takes the first name for a default until it makes the command.
        named = str(option.default)
        flag = named if named.startswith("--") else f"--{field.name.replace('_', '-')}"
        found[flag] = re.sub(r"^Of policy \w+: ", "", option.help)
    return found


def _options(policy: type[Any]) -> Iterator[PolicyOption]:
    said = _arguments(inspect.getdoc(policy.__init__) or "")
    for parameter in inspect.signature(policy).parameters.values():
        default = "" if parameter.default is parameter.empty else repr(parameter.default)
        yield PolicyOption(name=parameter.name, default=default, words=said.get(parameter.name, ""))


def _arguments(docstring: str) -> dict[str, str]:
    """Read what follows `Args:`; lines that are indented deeper go on with the one above."""
    _, _, text = docstring.partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in text.split("\n\n")[0].splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] += f" {line.strip()}"
    return found


def _first_sentence(described: Callable[..., object]) -> str:
    text = inspect.getdoc(described) or "its author says nothing"
    return " ".join(text.split("\n\n")[0].split())
