"""README's two pictures: a quick variant of one, and the whole of the other."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from controller.telemetry import OK
from experiments.policies import floors, lanes, overload
from experiments.policies.floors import FORMS, QUICK_OVERLOAD
from experiments.study.results_page import Figure


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], Path]:
    directory = tmp_path_factory.mktemp("overload")
    FORMS["overload"](directory)
    figures: dict[str, float] = json.loads((directory / "overload.json").read_text())["figures"]
    return figures, directory


def test_under_overload_only_who_refuses_answers_in_time(
    quick: tuple[dict[str, float], Path],
) -> None:
    figures, _ = quick
    for server in overload.SERVERS:
        # A second's arrivals may be answered in the next.
        light = figures[f"{server}_x0.25_goodput_rps"]
        assert light == pytest.approx(figures["offered_x0.25_rps"], rel=0.02)
        heavy = figures[f"{server}_x1.5_goodput_rps"]
        if server in ("edf_mh", "clockwork"):
            assert 0.75 * figures["capacity_rps"] < heavy <= figures["capacity_rps"]
        else:
            assert heavy < 0.05 * figures["capacity_rps"]


def test_the_picture_of_overload_leaves_numbers_a_table_and_a_picture(
    quick: tuple[dict[str, float], Path],
) -> None:
    _, directory = quick
    assert floors.faults("overload", directory) == []
    with (directory / "overload.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(overload.SERVERS) * len(QUICK_OVERLOAD.loads)
    assert (directory / "overload.png").stat().st_size < 150_000


def test_the_picture_of_lanes_has_everything_once_and_nothing_late(tmp_path: Path) -> None:
    FORMS["lanes"](tmp_path)
    assert floors.faults("lanes", tmp_path) == []
    asked, ran = lanes.simulate()
    assert all(request.departure_ms < request.deadline_ms for request in asked)
    assert {request.outcome for request in asked} == {OK, "COLD", "OVERLOADED"}
    assert {action.lane for action in ran} == {"LOAD", "INFER"}
    assert max(action.num_requests for action in ran) == 4
    # While weights are loaded, another model runs.
    assert any(
        load.lane == "LOAD"
        and run.lane == "INFER"
        and run.model != load.model
        and run.begin_ms < load.end_ms
        and load.begin_ms < run.end_ms
        for load in ran
        for run in ran
    )
    figures = json.loads((tmp_path / "lanes.json").read_text())["figures"]
    assert figures["num_answered"] + figures["num_refused"] == len(asked)
    assert (tmp_path / "lanes.png").stat().st_size < 150_000


def test_a_number_that_is_said_to_be_the_most_is_rounded_up() -> None:
    assert [f"{Figure(x):most2}" for x in (0.00411, 1.1, 87)] == ["0.0042", "1.1", "87"]
    assert f"{Figure(0.4481):p1}" == "44.8"
