"""README's two pictures: a quick variant of one, and the whole of the other. Of all pictures, what needs no eyes."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controller.telemetry.tables import OK
from experiments.__main__ import declared
from experiments.clockwork_paper import fig7
from experiments.policies import floors, lanes, overload
from experiments.policies.floors import FORMS, QUICK_OVERLOAD
from experiments.results_file import RESULTS
from experiments.study.pictures import BLACK, COLOURS, MOST_PANELS, Panel
from experiments.study.results_page import Figure
from experiments.study.study import read_table

# What ends the words of an axis, or begins them: a unit, or that it is counted.
_UNITS = re.compile(
    r"^(number|share) of |, (us|ms|s|minutes|h|r/s|rows|%|% of [a-z ]+|times [\d.]+ ms)( \(.*\))?$"
)


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


def test_overload_is_drawn_of_some_servers_too(tmp_path: Path) -> None:
    setting = replace(QUICK_OVERLOAD, servers=("edf_mh",), loads=(1.5,))
    overload.STUDY.produce(setting, tmp_path)
    assert (tmp_path / "overload.png").exists()
    (row,) = read_table(tmp_path / "overload.csv")
    assert 0 < row["refusal_p50_ms"] <= row["refusal_p99_ms"] <= setting.slo_ms


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


# --- what needs no eyes ---------------------------------------------------------------------------


def drawn() -> Iterator[tuple[str, str, Sequence[Sequence[Panel]]]]:
    """Every picture that is made of panels, of the records that are in the project; none of them is of a GPU."""
    for study in declared():
        is_recorded = (RESULTS / f"{study.name}.json").exists()
        if study.panels is not None and study.folder != "gpu" and is_recorded:
            yield study.name, study.title, study.drawn()


@pytest.fixture(scope="module")
def pictures() -> dict[str, tuple[str, Sequence[Sequence[Panel]]]]:
    return {name: (title, rows) for name, title, rows in drawn()}


Pictures = dict[str, tuple[str, Sequence[Sequence[Panel]]]]


def test_every_study_can_be_drawn_of_its_record(pictures: Pictures) -> None:
    assert len(pictures) >= 15
    assert all(rows and rows[0] for _, rows in pictures.values())


def test_what_no_panels_can_show_is_drawn_of_its_record_too(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "lanes.json", tmp_path)
    lanes.STUDY.main(["--draw", "--directory", str(tmp_path)])
    assert (tmp_path / "lanes.png").exists()


def test_a_sentence_stands_over_each_picture(pictures: Pictures) -> None:
    sentence = re.compile(r"[A-Z].* .* .*\.")
    titles = {name: title for name, (title, _) in pictures.items()}
    assert [name for name, title in titles.items() if not sentence.fullmatch(title)] == []


def test_a_picture_has_few_panels_and_each_a_title(pictures: Pictures) -> None:
    for name, (_, rows) in pictures.items():
        assert sum(map(len, rows)) <= MOST_PANELS, name
        assert max(map(len, rows)) <= 3, name
        assert all(len(panel.title.split()) >= 3 for row in rows for panel in row), name


def test_every_axis_has_a_unit_or_counts(pictures: Pictures) -> None:
    axes = [
        (name, words)
        for name, (_, rows) in pictures.items()
        for row in rows
        for panel in row
        for words, ticks in ((panel.x, panel.x_ticks), (panel.y, panel.y_ticks))
        # An axis of names has no unit, but says what they are names of.
        if not (words and ticks and re.search("[a-z]", "".join(ticks.values())))
    ]
    assert [pair for pair in axes if not _UNITS.search(pair[1])] == []


def test_curves_of_a_panel_look_unlike_without_their_colours(pictures: Pictures) -> None:
    for name, (_, rows) in pictures.items():
        for panel in (panel for row in rows for panel in row):
            assert {curve.colour for curve in panel.curves} <= {*COLOURS, BLACK}, name
            # A label beside the end of a curve does not say which of two it is where they cross; and some have none.
            looks = Counter((c.line, c.marker, c.width) for c in panel.curves if c.colour != BLACK)
            assert max(looks.values(), default=1) == 1, (name, panel.title)


def test_what_batch_clients_get_is_drawn_of_the_last_that_there_are() -> None:
    setting = fig7.Setting()
    turned = replace(setting, scenarios=tuple(reversed(setting.scenarios)))
    titles = [panel.title for row in fig7.STUDY.drawn(setting=turned) for panel in row]
    assert "What those 12 batch clients get meanwhile" in titles


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.png")), ids=lambda file: file.name)
def test_a_picture_is_small(file: Path) -> None:
    assert file.stat().st_size <= 150_000
