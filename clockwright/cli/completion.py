"""`clockwright completion`: the script by which a shell completes commands, flags and choices.

Typer completes what it knows of a command, so no other library is needed. The command's own flags for that
(`--install-completion`) are left out: they guess the shell and write into the user's files.
"""

from __future__ import annotations

import enum
from typing import Annotated

import typer
import typer.completion as of_typer

_PROGRAM = "clockwright"
#: Set by the script when a shell asks; typer looks for the name.
VARIABLE = "_CLOCKWRIGHT_COMPLETE"


class Shell(enum.Enum):
    """Shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Shell of the script.")]) -> None:
    """Print a script for shell completion of this command.

    bash: eval "$(clockwright completion bash)" in ~/.bashrc.

    zsh: eval "$(clockwright completion zsh)" in ~/.zshrc, after compinit.

    fish: clockwright completion fish > ~/.config/fish/completions/clockwright.fish
    """
    # Typer lists no names that it exports; a test asks a shell.
    script = of_typer.get_completion_script  # type: ignore[attr-defined]
    print(script(prog_name=_PROGRAM, complete_var=VARIABLE, shell=shell.value))


def answer_shells() -> None:
    """Let typer know the shells that may ask for completions; cheap, and called where one asks."""
    of_typer.completion_init()  # type: ignore[attr-defined]
