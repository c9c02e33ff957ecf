"""Shells complete the command by the scripts that it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def environment(tmp_path: Path) -> dict[str, str]:
    """One in which `clockwright` is this tree's, wherever its script lies."""
    program = tmp_path / "clockwright"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m clockwright.cli "$@"\n')
    program.chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def script_for(shell: str, tmp_path: Path) -> str:
    done = subprocess.run(
        ["clockwright", "completion", shell],
        env=environment(tmp_path), capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("clockwright", "mod"), {"models"}),
        (("clockwright", "models", "p"), {"pin"}),
        (("clockwright", "load", "--ra"), {"--rate"}),
        (("clockwright", "completion", ""), {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes_commands_flags_and_choices(
    tmp_path: Path, typed: tuple[str, ...], offered: set[str]
) -> None:
    words = " ".join(f"'{word}'" for word in typed)
    asked = (
        f"{script_for('bash', tmp_path)}\nCOMP_WORDS=({words})\nCOMP_CWORD={len(typed) - 1}\n"
        "_clockwright_completion clockwright\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    done = subprocess.run(
        ["bash", "-c", asked],
        env=environment(tmp_path), capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_that_names_them_and_that_they_can_read(
    tmp_path: Path, shell: str
) -> None:
    script = script_for(shell, tmp_path)
    assert f"_CLOCKWRIGHT_COMPLETE=complete_{shell}" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, timeout=100, check=True)
