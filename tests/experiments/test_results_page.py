"""What repeats a record, as the page of results says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from experiments.__main__ import called, declared
from experiments.bench import streams
from experiments.policies import classes
from experiments.policies.unseen import FAMILIES
from experiments.results_file import RESULTS
from experiments.study import results_page
from experiments.study.aims import AIMS
from experiments.study.results_page import IN_LOOPS, repeated_by
from experiments.study.study import from_command_line

MAKEFILE = Path(__file__).parents[2] / "Makefile"

SHED = [
    classes.Shed(
        tried=tried,
        num_models=1,
        load=2.0,
        goodput=0.5,
        price_points=1.0,
        highest=1.0,
        middle=0.5,
        lowest=0.1,
        order_points=40.0,
    )
    for tried in ("levels", "retries")
]


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


def test_what_was_not_measured_is_left_out_of_the_page_and_what_was_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    (tmp_path / "streams.json").write_text(json.dumps({"figures": {"steps": 7}}))
    template = "All.\n\n<!-- with streams{key} -->\nSteps: {{streams[steps]:.0f}}.\n\nEnd.\n"
    there = results_page.records()
    for key, found, shown in (
        ("", {}, False),
        ("", there, True),
        ("[steps]", there, True),
        ("[jitter_p99_ms]", there, False),
    ):
        text = results_page.measured_only(template.format(key=key), found).format(**found)
        assert text == ("All.\n\nSteps: 7.\n\nEnd.\n" if shown else "All.\n\nEnd.\n")


def test_the_page_names_what_the_studies_of_streams_and_classes_leave() -> None:
    left: dict[str, set[str]] = {
        "streams": {
            *(f"stories{each}" for each in ("", "_steps", "_crossed", "_violations")),
            *(f"{a}_{b}" for a in ("plain", "step") for b in ("request_bytes", "controller_us")),
            *("plain_worker_us", "step_worker_us"),
        },
        "classes": set(classes.figures(classes.Setting(), SHED)),
    }
    for part in ("modelled", "live"):
        left["streams"].add(f"{part}_streams_admitted")
        for share in streams.SHARES:
            left["streams"] |= streams._figures(f"{part}_{share:g}", 1, 0, 1, np.ones(1)).keys()
    for record, keys in left.items():
        named = set(re.findall(rf"{{{record}\[(.*?)\]", results_page.TEMPLATE.read_text()))
        assert named
        assert named <= keys
        assert {aim.key for aim in AIMS[record]} <= keys


def test_answers_count_as_a_part_of_the_bound_where_the_study_counts_them_so() -> None:
    assert set(IN_LOOPS) == {
        name for name, load in FAMILIES.items() if load.bound.startswith("rate")
    }


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
