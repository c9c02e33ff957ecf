"""The comparison of live and simulated runs: its plumbing, and that they do not drift apart.

How near they are on a quiet machine is measured by `experiments.live.truth`.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, PAGE_BYTES, ModelId
from experiments.clockwork_paper.cases import case_of
from experiments.live import truth
from experiments.live.calibration import calibrate, calibration_workloads, measured_row
from experiments.live.live_run import Played, Served, hosted, play
from experiments.live.rehearsal import sides
from experiments.simulator import Case, Cluster, HostedModel, Network
from experiments.study import results_page
from experiments.study.beside import Beside
from experiments.study.compared import POLICIES
from experiments.study.sides import RunRows, simulated
from experiments.study.study import read_table
from modelzoo.profile import Noise, ProfileRow
from tests.kit.pretended_play import ROW, pretend_live, pretend_play
from traces.arrivals import ClosedLoop, FixedRate, Poisson, Workload

MS, US = NS_PER_MS, NS_PER_US

SETTING = truth.Setting(seconds=2, warmup_s=1, calibration_s=1.0, repeats=2, seed=5)


def calibration_runs(network: Network, start_delay_ns: int = 60 * US) -> list[RunRows]:
    cluster = Cluster(
        models=(HostedModel(ModelId("net"), ROW),),
        copy_bytes_per_s=1 << 60,
        start_delay_ns=start_delay_ns,
    )
    return [
        pretend_live(
            Case(workload=workload, cluster=cluster, network=network, duration_ns=workload.end_ns)
        ).rows
        for workload in calibration_workloads("net", 1.0)
    ]


def test_calibration_finds_what_the_simulator_was_told() -> None:
    alone, crowd = calibration_runs(Network(delay_ns=300 * US, client_delay_ns=450 * US))
    found = calibrate(alone, crowd)
    assert found.start_delay_ns == 60 * US
    assert set(found.network.down_samples_ns) == {300 * US}
    assert set(found.network.up_samples_ns) == {300 * US}
    assert set(found.network.client_samples_ns) == {900 * US}
    assert found.describe()["up_us_p99"] == 300.0


def test_measured_delays_are_played_back_by_the_simulator() -> None:
    alone, crowd = calibration_runs(Network(delay_ns=200 * US, jitter_ns=200 * US))
    found = calibrate(alone, crowd)
    again = calibrate(*calibration_runs(found.network, found.start_delay_ns))
    for name, value in found.describe().items():
        assert again.describe()[name] == pytest.approx(value, rel=0.3, abs=20), name


def test_a_server_that_answered_nobody_cannot_be_calibrated() -> None:
    alone, crowd = calibration_runs(Network())
    with pytest.raises(ValueError, match="0 requests of one client"):
        calibrate(replace(alone, requests=()), crowd)


def test_overheads_of_a_rehearsal_are_those_of_its_requests_that_nobody_delayed() -> None:
    alone, crowd = calibration_runs(Network())
    found = calibrate(alone, crowd)
    assert calibrate(alone, crowd, alone) == found
    # Each of several clients waits for the others.
    assert calibrate(alone, crowd, crowd) == found


def test_measured_durations_replace_those_that_the_worker_reported() -> None:
    runs = calibration_runs(Network())
    reported = replace(ROW, load_ns=9 * MS, exec_ns={1: 10 * MS, 2: 3 * MS, 4: 16 * MS, 8: 40 * MS})
    row, samples_ns = measured_row(reported, [action for run in runs for action in run.actions])
    # Six clients never fill a batch of eight, which keeps its proportion to that of four.
    assert row.exec_ns == {**ROW.exec_ns, 8: 20 * MS}
    assert row.load_ns == 2 * MS
    assert {size: set(some) for size, some in samples_ns.items()} == {
        size: {exec_ns} for size, exec_ns in row.exec_ns.items()
    }
    assert measured_row(reported, ()) == (reported, {})
    _, crowd = runs
    seldom = [action for action in crowd.actions if action.exec and action.batch_size == 4]
    ten = [action for action in crowd.actions if action.exec and action.batch_size == 2][:10]
    for action in ten[:3]:
        assert action.exec is not None
        action.exec = replace(action.exec, duration_ns=2 * action.exec.duration_ns)
    _, samples_ns = measured_row(reported, [*ten, *seldom[:2]])
    # One that came up twice has its own median, and varies as the other does.
    base_ns = ROW.exec_ns[4]
    assert Counter(samples_ns[4]) == {base_ns: 7, 2 * base_ns: 3}


def test_durations_in_two_heaps_stay_in_two_heaps() -> None:
    _, crowd = calibration_runs(Network())
    few = [action for action in crowd.actions if action.exec is not None][:40]
    for number, action in enumerate(few):
        assert action.exec is not None
        action.batch_size = 1
        duration_ns = 30 * MS if number % 4 == 0 else 10 * MS
        action.exec = replace(action.exec, duration_ns=duration_ns)
    row, samples_ns = measured_row(ROW, few)
    assert row.exec_ns[1] == 10 * MS
    assert Counter(samples_ns[1]) == {10 * MS: 30, 30 * MS: 10}
    models = hosted(replace(row, name="heaps"))
    case = case_of(
        models,
        [Poisson(models=(0,), rate_rps=10, slo_ns=NS_PER_S, end_ns=20 * NS_PER_S, seed=1)],
        seed=1,
        end_ns=20 * NS_PER_S,
        noise=Noise(exec_sigma=0.3),
    )
    case = replace(case, cluster=replace(case.cluster, exec_samples_ns={"heaps": samples_ns}))
    with pytest.raises(ConfigError, match="measured durations of net, which no model has"):
        replace(case.cluster, exec_samples_ns={"net": samples_ns})
    alone = [a.exec.duration_ns for a in simulated(case).actions if a.exec and a.batch_size == 1]
    assert set(alone) == {10 * MS, 30 * MS}
    assert sum(ns == 30 * MS for ns in alone) / len(alone) == pytest.approx(0.25, abs=0.1)


def test_what_is_played_live_is_told_apart_by_workload() -> None:
    open_loop = Workload(
        models=("net-0", "net-1"),
        sources=(
            Poisson(models=(0, 1), rate_rps=60, slo_ns=10 * NS_PER_S, end_ns=NS_PER_S, seed=1),
        ),
    )
    closed_loop = Workload(
        models=("net-1",),
        closed_loops=(
            ClosedLoop(model=0, concurrency=2, slo_ns=10 * NS_PER_S, end_ns=NS_PER_S // 2),
        ),
    )
    case = case_of(hosted(ROW, 2), seed=1, end_ns=NS_PER_S, num_pages=4)
    served = Served(case=replace(case, scheduler=POLICIES["edf_mh"]))
    played = play([open_loop, closed_loop, open_loop], served)
    assert played.policy == "edf_mh"
    assert {name: row.exec_ns for name, row in played.rows.items()} == {
        "net-0": ROW.exec_ns,
        "net-1": ROW.exec_ns,
    }
    first, second, third = played.runs
    expected = list(open_loop)
    for one in (first, third):
        assert len(one.rows.requests) == len(one.report) == len(expected)
        assert one.report.is_open.all()
        # Nothing is answered before it is due.
        departures = sorted(row.departure_ns - one.rows.origin_ns for row in one.rows.requests)
        assert all(
            departure_ns >= request.time_ns
            for departure_ns, request in zip(departures, expected, strict=True)
        )
    assert len(second.rows.requests) == (~second.report.is_open).sum()
    assert {row.model_id for row in second.rows.requests} == {"net-1"}
    for one in played.runs:
        ids = {row.action_id for row in one.rows.actions}
        assert {row.action_id for row in one.rows.requests if row.action_id is not None} <= ids


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("truth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truth, "play", pretend_play)
        truth.STUDY.produce(SETTING, directory, options="--seed 5")
    return directory


@pytest.mark.long
def test_every_case_has_a_line_for_every_metric(table: Path) -> None:
    with (table / "truth.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["metric"]) for row in rows] == [
        (name, metric)
        for name in truth.cases(SETTING)
        for metric in ("goodput_rps", "p50_ms", "p99_ms")
    ]
    for row in rows:
        live, simulated = float(row["live"]), float(row["simulated"])
        assert float(row["live_min"]) <= live <= float(row["live_max"])
        assert float(row["gap_pct"]) == pytest.approx(100 * (simulated / live - 1), abs=0.01)
    assert (table / "truth.png").stat().st_size > 10_000


@pytest.mark.long
def test_the_worst_gaps_stand_beside_those_of_each_case(table: Path) -> None:
    record = json.loads((table / "truth.json").read_text())
    figures = record["figures"]
    for metric in ("goodput", "p50", "p99"):
        gaps = [figures[f"{case}_{metric}_gap_pct"] for case in truth.cases(SETTING)]
        assert abs(figures[f"{metric}_gap_pct"]) == max(map(abs, gaps))
    # Whatever is above its aim says why.
    for row in record["comparison"]:
        assert bool(row["reason"]) == (abs(row["gap_pct"]) > row["aim_pct"])
    case = record["cases"]["processor"]
    assert case["rows"]["cifar_resnet20_v1"]["exec_ns"]
    assert case["calibration"]["start_delay_us"] == pytest.approx(30)
    assert record["command"] == "python -m experiments truth --seed 5"


@pytest.mark.parametrize(
    ("silent_from", "reason"),
    [
        pytest.param(2, "no request was answered in 2 of 2 live runs", marks=pytest.mark.long),
        # The first of the repeats is answered.
        (3, "no request was answered in 1 of 2 live runs"),
        pytest.param(0, "no request was answered in 2 of 2 live runs", marks=pytest.mark.long),
    ],
)
def test_a_case_without_an_answer_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_from: int, reason: str
) -> None:
    both = {name: truth.cases(SETTING)["steady"] for name in ("answered", "silent")}

    def half_silent(workloads: Sequence[Workload], served: Served) -> Played:
        played = pretend_play(workloads, served)
        for run in played.runs[silent_from:] if served is both["silent"] else ():
            for row in run.rows.requests:
                row.outcome = "OVERLOADED"
        return played

    both["silent"] = replace(both["silent"])
    monkeypatch.setattr(truth, "cases", lambda _setting: both)
    monkeypatch.setattr(truth, "play", half_silent)
    truth.STUDY.produce(SETTING, tmp_path)
    rows = read_table(tmp_path / "truth.csv")
    silent = [row for row in rows if row["case"] == "silent"]
    assert [(row["live_min"], row["gap_pct"], row["reason"]) for row in silent] == [
        (0, "", reason)
    ] * 3
    assert all(row["gap_pct"] != "" for row in rows if row["case"] == "answered")
    record = json.loads((tmp_path / "truth.json").read_text())
    # Nobody knows the worst gap of all cases.
    assert "answered_p99_gap_pct" in record["figures"]
    assert not {"p99_gap_pct", "silent_p99_gap_pct"} & set(record["figures"])
    # The page has the table of what was recorded.
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    assert f"| {reason} |" in results_page.Record(tmp_path / "truth.json").beside_live
    assert (tmp_path / "truth.png").stat().st_size > 10_000


def test_a_case_that_was_answered_too_little_to_be_measured_is_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent_at_first(workloads: Sequence[Workload], served: Served) -> Played:
        played = pretend_play(workloads, served)
        for run in played.runs[:2]:
            for row in run.rows.requests:
                row.outcome = "OVERLOADED"
        return played

    monkeypatch.setattr(truth, "play", silent_at_first)
    served = truth.cases(SETTING)["steady"]
    line = truth.compare("steady", "p50", "p50_ms", truth.play_case(SETTING, served))
    assert line.live > 0
    assert (line.simulated, line.gap_pct) == (None, None)
    assert line.reason.startswith("not simulated: 0 requests of one client")


@pytest.mark.long
def test_both_sides_are_asked_the_same(table: Path) -> None:
    record = json.loads((table / "truth.json").read_text())
    begin_ns, end_ns = SETTING.stretch_ns
    for name, served in truth.cases(SETTING).items():
        workload = served.case.workload
        if workload.closed_loops:
            continue
        due = [request for request in workload if begin_ns <= request.time_ns < end_ns]
        described = record["cases"][name]
        for side in (*described["live"], *described["simulated"]):
            assert side["offered"] == len(due), name


@pytest.mark.long
def test_a_live_server_answers_what_the_simulator_says_where_the_device_sets_the_pace() -> None:
    # Half of the requests, and what fits into ten EXECs of SLO. EXECs are so long that other work on the machine costs few
    # of the 33 answers; a policy or an estimate that differs live costs most of them.
    row = ProfileRow(name="slow", weights_bytes=PAGE_BYTES, load_ns=10 * MS, exec_ns={1: 400 * MS})
    end_ns = 10 * NS_PER_S
    source = FixedRate(models=(0,), rate_rps=5, slo_ns=4000 * MS, end_ns=end_ns, seed=1)
    case = case_of(hosted(row), [source], seed=1, end_ns=end_ns, num_pages=8, noise=Noise())
    (run,) = play([case.workload], Served(case=case)).runs
    both = Beside(**sides(run, simulated(case), 0, 2 * end_ns))
    assert both.simulated is not None
    assert both.live.offered == both.simulated.offered == 49
    assert both.live.goodput_pct == pytest.approx(both.simulated.goodput_pct, rel=0.15)
    # Batches of one, each on its own, one after the other.
    assert all(action.rows == 1 for action in run.rows.actions if action.type == "Infer")
