"""A declared study: what it writes, and what its command line may ask."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import pytest

from clockwright.errors import ConfigError
from experiments.study.bench import Findings, bench, need_cores
from experiments.study.compared import Compared
from experiments.study.pictures import Curve, Panel, tail
from experiments.study.report import write_csv
from experiments.study.study import (
    ONLY_RECORD,
    SHARE,
    Column,
    Paper,
    Row,
    Study,
    StudyRecord,
    beside_paper,
    chosen,
    from_command_line,
    over,
    own_rows,
)
from modelzoo.profile import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Compared):
    """Two policies, asked for squares."""

    policies: tuple[str, ...] = ("clockwork", "edf_mh")
    sizes: tuple[int, ...] = (1, 2)
    factor: float = 0.5
    seed: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """A point."""

    policy: str
    size: int
    area: float
    busy: Annotated[float, SHARE]
    most: Annotated[float, Column(figure="most_size{size}_area")]
    hidden_ms: Annotated[float, ONLY_RECORD]
    parts: tuple[float, ...] = ()


def measure(setting: Setting, policy: str, size: int) -> Square:
    area = float(size**2)
    return Square(policy=policy, size=size, area=area, busy=0.25, most=9.0, hidden_ms=1 / 3)


def sides(_setting: Setting, points: Sequence[Square]) -> Iterator[Row]:
    for point in points:
        yield {"policy": point.policy, "size": point.size, "side": point.area**0.5}


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    curve = Curve(
        x=[row["size"] for row in recorded.rows],
        y=[row["area"] for row in recorded.rows],
        label="area",
    )
    paper = Curve(x=[2.0], y=[recorded.figures["paper_size2_area"]], label="paper", marker="x")
    latency = Curve(x=(1.0, 2.0), y=(), label="latency")
    return [
        [Panel(title="Squares grow", x="size", y="area, m2", curves=[curve, paper])],
        [tail("Tails", "latency, ms", [latency], (50.0, 99.0), marks={2.0: "the paper"})],
    ]


STUDY = Study(
    name="squares",
    setting=Setting(),
    ask=over(measure, policy="policies", size="sizes"),
    key="{policy}_size{size}",
    figures=lambda setting, points: {"num_points": float(len(points))},
    tables={"": own_rows, "_sides": sides},
    paper=(
        Paper("size2_area", 4.1, "never told"),
        Paper("size1_area", 2.0, "smaller"),
        Paper("size1_late", 0.0),
    ),
    title="Squares grow with their sides.",
    panels=panels,
    extra=lambda setting, points: {"sizes": setting.sizes},
)


def test_a_study_leaves_a_record_tables_and_a_picture(tmp_path: Path) -> None:
    points = STUDY.produce(directory=tmp_path, options="--seed 3")
    assert [(p.policy, p.size) for p in points] == [
        (policy, size) for policy in ("clockwork", "edf_mh") for size in (1, 2)
    ]
    record = json.loads((tmp_path / "squares.json").read_text())
    assert record["command"] == "python -m experiments squares --seed 3"
    assert record["seeds"] == [3]
    assert record["sizes"] == [1, 2]
    assert record["setting"]["factor"] == 0.5
    assert (tmp_path / "squares.png").stat().st_size > 10_000
    assert (tmp_path / "squares_sides.csv").read_text().splitlines()[:2] == [
        "policy,size,side",
        "clockwork,1,1",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """A part of a point."""

    area: float
    rest: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A point that has parts."""

    size: int
    left: Annotated[Half, Column()]
    right: Annotated[Half | None, Column(figure="{key}_{part}")]


def test_a_part_of_a_point_has_a_column_for_each_of_its_fields(tmp_path: Path) -> None:
    points = [
        Halves(size=1, left=Half(area=1.0), right=Half(area=2.0, rest=3.0)),
        Halves(size=2, left=Half(area=4.0), right=None),
    ]
    study = replace(STUDY, key="size{size}", paper=(), tables={"": own_rows}, panels=None)
    replace(study, ask=lambda _setting: points).produce(directory=tmp_path)  # type: ignore[arg-type,return-value]
    head, *rows = (tmp_path / "squares.csv").read_text().splitlines()
    assert head == "size,left_area,left_rest,right_area,right_rest"
    assert rows == ["1,1,,2,3", "2,4,,,"]
    figures = json.loads((tmp_path / "squares.json").read_text())["figures"]
    del figures["num_points"]
    assert figures == {
        "size1_left_area": 1.0,
        "size1_area": 2.0,
        "size1_rest": 3.0,
        "size2_left_area": 4.0,
    }


def test_a_picture_is_drawn_again_of_the_table_without_asking(tmp_path: Path) -> None:
    def refuse(_setting: Setting) -> Iterator[Square]:
        raise AssertionError("asked")

    STUDY.produce(directory=tmp_path)
    picture = tmp_path / "squares.png"
    drawn = picture.read_bytes()
    picture.unlink()
    replace(STUDY, ask=refuse).redraw(tmp_path)
    assert picture.read_bytes() == drawn
    (tmp_path / "squares.csv").write_text("policy,size\nedf_mh,1\n")
    with pytest.raises(ConfigError, match="no 'area' in the record of squares; run it"):
        STUDY.redraw(tmp_path)


def test_a_field_is_spelt_once_and_is_a_column_and_a_figure(tmp_path: Path) -> None:
    STUDY.produce(directory=tmp_path)
    with (tmp_path / "squares.csv").open(newline="", encoding="utf-8") as file:
        first, *_ = csv.DictReader(file)
    assert first == {"policy": "clockwork", "size": "1", "area": "1", "busy": "0.25", "most": "9"}
    figures = json.loads((tmp_path / "squares.json").read_text())["figures"]
    of_one = {key: number for key, number in figures.items() if key.startswith("edf_mh_size2")}
    assert of_one == {
        "edf_mh_size2_area": 4.0,
        "edf_mh_size2_busy_pct": 25.0,
        "edf_mh_size2_hidden_ms": 1 / 3,
    }
    assert figures["most_size2_area"] == 9.0
    assert figures["num_points"] == 4.0
    assert figures["paper_size2_area"] == 4.1


def test_a_gap_above_a_tenth_has_a_reason_beside_it() -> None:
    figures = {"clockwork_near": 105.0, "clockwork_far": 120.0, "far": 100.0, "clockwork_none": 1.0}
    papers = (
        Paper("near", 100.0, "other devices"),
        Paper("far", 100.0, "other devices"),
        Paper("far", 99.0, "other devices", ("{key}",)),
        Paper("absent", 100.0, "other devices"),
        Paper("none", 0.0, "nothing to divide by"),
    )
    table = beside_paper(papers, figures, ("clockwork", "edf_mh"))
    assert [(row["figure"], row["reason"]) for row in table] == [
        ("clockwork_near", ""),
        ("clockwork_far", "other devices"),
        ("far", ""),
    ]


def test_every_plain_field_of_a_setting_is_an_option() -> None:
    asked, words = from_command_line(
        "squares", Setting(), ["--policies", "clipper", "--sizes", "4", "5", "--factor", "2"]
    )
    assert asked == Setting(policies=("clipper",), sizes=(4, 5), factor=2.0)
    assert words == "--policies clipper --seed 3 --sizes 4 5 --factor 2.0"
    assert from_command_line("squares", asked, words.split())[0] == asked
    quiet = Setting(noise=Noise())
    assert from_command_line("squares", quiet, []) == (quiet, "--seed 3")


@pytest.mark.parametrize("policies", [("clockwerk",), (), ("clipper", "clipper")])
def test_policies_that_are_unknown_missing_or_named_twice_are_refused(
    policies: tuple[str, ...],
) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Compared(policies=policies)


def test_a_command_line_says_how_much_is_asked_and_where_files_go(tmp_path: Path) -> None:
    STUDY.main(["--sizes", "3", "--policies", "edf_mh", "--directory", str(tmp_path)])
    record = json.loads((tmp_path / "squares.json").read_text())
    # Where files went is no part of what repeats them.
    assert record["command"] == "python -m experiments squares --policies edf_mh --seed 3 --sizes 3"
    STUDY.main(["--sizes", "4", "--policies", "edf_mh", "--directory", str(tmp_path), "--add"])
    figures = json.loads((tmp_path / "squares.json").read_text())["figures"]
    assert (figures["edf_mh_size3_area"], figures["edf_mh_size4_area"]) == (9.0, 16.0)
    sizes = [line.split(",")[1] for line in (tmp_path / "squares.csv").read_text().splitlines()]
    assert sizes == ["size", "3", "4"]


def test_rows_that_were_written_with_other_columns_keep_their_places(tmp_path: Path) -> None:
    words = ["--policies", "edf_mh", "--directory", str(tmp_path)]
    STUDY.main([*words, "--sizes", "3"])
    table = tmp_path / "squares.csv"
    with table.open(newline="") as file:
        (before,) = csv.DictReader(file)
    del before["busy"]
    names = ["gone", *reversed(before)]
    write_csv(table, names, [[{**before, "gone": "7"}[name] for name in names]])
    STUDY.main([*words, "--sizes", "4", "--add"])
    with table.open(newline="") as file:
        kept, new = csv.DictReader(file)
    assert kept == {**before, "busy": ""}
    assert (new["size"], new["area"], new["busy"]) == ("4", "16", "0.25")


def test_rows_that_do_not_say_which_point_they_are_are_not_added_to(tmp_path: Path) -> None:
    words = ["--policies", "edf_mh", "--directory", str(tmp_path)]
    STUDY.main([*words, "--sizes", "3"])
    table = tmp_path / "squares.csv"
    table.write_text(table.read_text().replace("size", "edge"))
    before = table.read_text()
    with pytest.raises(ConfigError, match=r"--add: found no column size in squares\.csv"):
        STUDY.main([*words, "--sizes", "4", "--add"])
    assert table.read_text() == before


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        STUDY.main(["--help"])
    said = capsys.readouterr().out
    assert all(
        option in said for option in ("--sizes", "--factor", "--add", "--draw", "--directory")
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """How a benchmark weighs."""

    times: int = 2
    what: tuple[str, ...] = ("a", "b")
    beside: str = field(default="", metadata={"said": "TREE"})

    def __post_init__(self) -> None:
        chosen("thing", self.what, ("a", "b"))


def weigh(setting: Weights) -> Findings:
    figures = {f"{name}_kg": 0.5 * setting.times for name in setting.what}
    return Findings(figures, {"scale": "new"}, fault="a is too light" * (setting.times < 2))


def test_a_benchmark_s_figures_are_named_as_they_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = bench("bench-weights", Weights(), weigh)
    assert not weights.main(["--times", "4", "--beside", "/a/tree", "--directory", str(tmp_path)])
    record = json.loads((tmp_path / "weights.json").read_text())
    assert record["figures"] == {"a_kg": 2.0, "b_kg": 2.0}
    assert record["command"] == "python -m experiments bench-weights --times 4 --beside TREE"
    assert (record["setting"]["beside"], record["scale"]) == ("TREE", "new")
    assert "a_kg" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="thing is 'c', expected some of a, b"):
        weights.main(["--what", "c"])


def test_benchmarks_share_a_record_and_what_is_broken_is_said_when_it_is_recorded(
    tmp_path: Path,
) -> None:
    for part in ("first", "second"):
        shared = bench(f"bench-{part}", Weights(), weigh, record="all", part=part)
        fault = shared.main(["--times", "1", "--directory", str(tmp_path)])
        assert fault == "a is too light"
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["figures"] == {"a_kg": 0.5, "b_kg": 0.5}
    assert record["first"]["keys"] == record["second"]["keys"] == ["a_kg", "b_kg"]


def test_a_benchmark_says_how_many_cores_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    need_cores(1)
    with pytest.raises(ConfigError, match="found 1 core, expected 2"):
        need_cores(2)
