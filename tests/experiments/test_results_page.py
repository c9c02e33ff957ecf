"""What repeats a record, as the page of results says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.__main__ import called, declared
from experiments.results_file import RESULTS
from experiments.study.results_page import repeated_by
from experiments.study.study import from_command_line

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def commands_of(record: object) -> Iterator[str]:
    """Every command of a record, those of its parts too."""
    if isinstance(record, dict):
        for key, value in record.items():
            if key == "command":
                yield value
            else:
                yield from commands_of(value)


def test_every_record_is_repeated_by_a_command_that_there_is() -> None:
    commands = [
        repeated_by(command)
        for path in sorted(RESULTS.rglob("*.json"))
        for command in commands_of(json.loads(path.read_text()))
    ]
    assert len(commands) > 40
    studies = {called(study.command or study.name, study.name): study for study in declared()}
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "experiments"], command
        name = called(words[3])
        assert name, command
        if study := studies.get(name):
            options = [word for word in words[4:] if word != "--add"]
            setting, again = from_command_line(name, study.setting, options)
            assert from_command_line(name, study.setting, shlex.split(again))[0] == setting


def test_every_figure_that_the_makefile_makes_is_a_study() -> None:
    lines = re.findall(r"^FIGURES .?= (.*)$", MAKEFILE.read_text(), re.M)
    names = " ".join(lines).split()
    assert len(names) > 10
    assert [name for name in names if called(name) != name] == []


@pytest.mark.parametrize(
    ("recorded", "today"),
    [
        ("python -m experiments.figures.fig5 --seed 5", "python -m experiments fig5 --seed 5"),
        ("python -m experiments.bench_live --native", "python -m experiments bench-live --native"),
        ("python -m experiments.controller_costs", "python -m experiments bench-controller-costs"),
        ("python -m experiments.gpu.fig6 --pages 9", "python -m experiments gpu-fig6 --pages 9"),
        ("python -m experiments fig5 --seed 5", "python -m experiments fig5 --seed 5"),
        ("make simulate-faults SEEDS=9", "python -m experiments simulate_faults --seeds 9"),
    ],
)
def test_a_record_whose_module_moved_is_repeated_by_its_name(recorded: str, today: str) -> None:
    assert repeated_by(recorded) == today


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fig55", "study is 'fig55', expected one of fig5, fig6"),
        ("gpu-probe --device best", "error: device 'best': expected cuda:N or torch:cpu"),
    ],
)
def test_a_study_that_cannot_be_run_is_an_error_in_one_line(words: str, expected: str) -> None:
    command = [sys.executable, "-m", "experiments", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1
