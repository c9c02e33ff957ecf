"""The benchmark of killed, stopped and replaced processes: what it counts, and that nothing is lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from experiments.bench_restart import (
    AIMS,
    PREVIOUS,
    Inquiry,
    Setting,
    account,
    back,
    faults,
    upgrade,
)


def ended(kind: str, end: str, took_s: float, **changes: float) -> Inquiry:
    return Inquiry(kind, 100.0, end, 100.0 + took_s, **{"num_ends": 1, **changes})  # type: ignore[arg-type]


def test_what_has_no_end_two_ends_or_a_late_answer_is_counted() -> None:
    fine = [ended("short", "OK", 0.05), ended("short", "NO_WORKER", 0.05), ended("long", "OK", 5.0)]
    assert account(fine) == {
        "requests": 3,
        "answered": 2,
        "asked_again": 0,
        "lost": 0,
        "double": 0,
        "late_success": 0,
    }
    assert account([Inquiry("short", 100.0)])["lost"] == 1
    # Its slack would have sufficed.
    assert account([ended("long", "NO_WORKER", 5.0)])["lost"] == 1
    assert account([ended("short", "OK", 0.05, num_ends=2)])["double"] == 1
    assert account([ended("short", "OK", 0.12)])["late_success"] == 1
    # The client itself stood still for longer than that.
    assert (
        account([ended("short", "OK", 0.12, stood_before_s=1.0, stood_s=1.03)])["late_success"] == 0
    )


def test_nothing_is_lost_when_the_only_controller_is_killed(tmp_path: Path) -> None:
    figures = back(Setting(times=1), tmp_path)
    assert figures["back_answered"] > 0
    assert figures["back_double"] == 0
    # How long it takes is the machine's; requests that it outlasts may be refused.
    if figures["controller_back_s"] < 10:
        assert figures["back_lost"] == 0


@pytest.mark.long
def test_nothing_is_lost_when_processes_are_killed_and_stopped(tmp_path: Path) -> None:
    figures = faults(Setting(times=1), tmp_path)
    assert {name: figures[name] for name in ("lost", "double")} == {"lost": 0, "double": 0}
    assert figures["standby_takeover_s"] > 0
    assert AIMS.keys() & figures.keys()


@pytest.mark.long
def test_processes_of_the_revision_before_are_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    command = ["git", "cat-file", "-e", f"{PREVIOUS}^{{commit}}"]
    if subprocess.run(command, cwd=Path(__file__).parent, check=False).returncode:
        pytest.skip(f"this copy of the project does not know revision {PREVIOUS}")
    figures = upgrade(Setting(), tmp_path)
    assert figures["upgrade_lost"] == 0
    assert figures["upgrade_double"] == 0
