"""The comparison of live and simulated runs: its plumbing, and that they do not drift apart.

How near they are on a quiet machine is measured by `experiments.live.truth`.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, PAGE_BYTES, ModelId
from experiments.live import truth
from experiments.live.calibration import calibrate, calibration_workloads, measured_row
from experiments.live.live_run import LiveModel, LiveRun, play
from experiments.simulator import Case, Cluster, HostedModel, Network, run
from experiments.study.study import POLICIES
from modelzoo.profile import Noise, Profile, ProfileRow
from tests.kit.pretended_play import ROW, pretend_live, pretend_play
from traces.arrivals import ClosedLoop, FixedRate, Poisson, Workload

MS, US = NS_PER_MS, NS_PER_US

SETTING = truth.Setting(
    duration_ns=2 * NS_PER_S, warmup_ns=NS_PER_S, calibration_s=1.0, repeats=2, seed=5
)


def calibration_runs(network: Network) -> list[LiveRun]:
    return [
        pretend_live(
            Case(
                workload=workload,
                cluster=Cluster(
                    models=(HostedModel(ModelId("net"), ROW),),
                    copy_bytes_per_s=1 << 60,
                    start_delay_ns=60 * US,
                ),
                network=network,
                duration_ns=workload.end_ns,
            )
        )
        for workload in calibration_workloads("net", 1.0)
    ]


def test_calibration_finds_what_the_simulator_was_told() -> None:
    alone, crowd = calibration_runs(Network(delay_ns=300 * US, client_delay_ns=450 * US))
    found = calibrate(alone, crowd)
    assert found.start_delay_ns == 60 * US
    assert set(found.down_samples_ns) == {300 * US}
    assert set(found.up_samples_ns) == {300 * US}
    assert set(found.client_samples_ns) == {900 * US}
    assert found.describe()["up_us_p99"] == 300.0


def test_measured_delays_are_played_back_by_the_simulator() -> None:
    alone, crowd = calibration_runs(Network(delay_ns=200 * US, jitter_ns=200 * US))
    found = calibrate(alone, crowd)
    again = calibrate(
        *(
            pretend_live(
                Case(
                    workload=workload,
                    cluster=Cluster(
                        models=(HostedModel(ModelId("net"), ROW),),
                        copy_bytes_per_s=1 << 60,
                        start_delay_ns=found.start_delay_ns,
                    ),
                    network=Network(
                        delay_ns=0,
                        client_delay_ns=0,
                        down_samples_ns=found.down_samples_ns,
                        up_samples_ns=found.up_samples_ns,
                        client_samples_ns=found.client_samples_ns,
                    ),
                    duration_ns=workload.end_ns,
                )
            )
            for workload in calibration_workloads("net", 1.0)
        )
    )
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
    row, noise = measured_row(reported, runs)
    # Six clients never fill a batch of eight, which keeps its proportion to that of four.
    assert row.exec_ns == {**ROW.exec_ns, 8: 20 * MS}
    assert row.load_ns == 2 * MS
    assert noise == Noise()


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
    played = play(
        [open_loop, closed_loop, open_loop],
        models=[LiveModel(name="net", copies=2, batch_sizes=(1, 2, 4))],
        profile=Profile(name="test", rows={"net": ROW}),
        num_pages=4,
        scheduler=POLICIES["edf_mh"],
    )
    assert played.policy == "edf_mh"
    assert {name: row.exec_ns for name, row in played.rows.items()} == {
        "net-0": ROW.exec_ns,
        "net-1": ROW.exec_ns,
    }
    first, second, third = played.runs
    expected = list(open_loop)
    for one in (first, third):
        assert len(one.requests) == one.report.num_open == len(expected)
        assert one.report.num_closed == 0
        # Nothing is answered before it is due.
        departures = sorted(row.departure_ns - one.report.begin_ns for row in one.requests)
        assert all(
            departure_ns >= request.time_ns
            for departure_ns, request in zip(departures, expected, strict=True)
        )
    assert len(second.requests) == second.report.num_closed
    assert {row.model_id for row in second.requests} == {"net-1"}
    for one in played.runs:
        ids = {row.action_id for row in one.actions}
        assert {row.action_id for row in one.requests if row.action_id is not None} <= ids


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("truth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truth, "play", pretend_play)
        truth.produce(SETTING, directory)
    return directory


@pytest.mark.long
def test_every_case_has_a_line_for_every_metric(table: Path) -> None:
    names = [case.name for case in truth.cases(SETTING)]
    with (table / "truth.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["metric"]) for row in rows] == [
        (name, metric) for name in names for metric in ("goodput_rps", "p50_ms", "p99_ms")
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
        gaps = [figures[f"{case.name}_{metric}_gap_pct"] for case in truth.cases(SETTING)]
        assert abs(figures[f"{metric}_gap_pct"]) == max(map(abs, gaps))
    # Whatever is above its aim says why.
    for row in record["comparison"]:
        assert bool(row["reason"]) == (abs(row["gap_pct"]) > row["aim_pct"])
    case = record["cases"]["processor"]
    assert case["rows"]["cifar_resnet20_v1"]["exec_ns"]
    assert case["calibration"]["start_delay_us"] == pytest.approx(30)
    assert re.fullmatch(
        r"python -m experiments\.figures\.truth --seed 5 --slower 1 --seconds 2", record["command"]
    )


def test_slower_devices_are_asked_as_much_less() -> None:
    usual = truth.cases(SETTING)
    for before, after in zip(usual, truth.cases(replace(SETTING, slower=4)), strict=True):
        factor = 4 if before.rows else 1
        for row, slowed in zip(before.rows, after.rows, strict=True):
            assert slowed.load_ns == factor * row.load_ns
            assert slowed.exec_ns == {size: factor * ns for size, ns in row.exec_ns.items()}
        expected = before.workload.expected_requests()
        assert after.workload.expected_requests() == pytest.approx(expected / factor)
        for loop, slowed_loop in zip(
            before.workload.closed_loops, after.workload.closed_loops, strict=True
        ):
            assert slowed_loop.slo_ns == factor * loop.slo_ns


@pytest.mark.long
def test_a_live_run_is_simulated_with_its_requests_as_they_arrived(table: Path) -> None:
    record = json.loads((table / "truth.json").read_text())
    for case in truth.cases(SETTING):
        described = record["cases"][case.name]
        asked = [figures["arrived"] for figures in described["as_arrived"]]
        if case.workload.closed_loops:
            assert asked == []
        else:
            assert asked == [figures["arrived"] for figures in described["live"]]


@pytest.mark.long
def test_both_sides_are_asked_the_same(table: Path) -> None:
    record = json.loads((table / "truth.json").read_text())
    for case in truth.cases(SETTING):
        if case.workload.closed_loops:
            continue
        due = [
            request
            for request in case.workload
            if SETTING.warmup_ns <= request.time_ns < SETTING.duration_ns
        ]
        described = record["cases"][case.name]
        for figures in (*described["live"], *described["simulated"]):
            assert figures["arrived"] == len(due), case.name


@pytest.mark.long
def test_a_live_server_answers_what_the_simulator_says_where_the_device_sets_the_pace() -> None:
    # 20 of 40 requests per second, and what fits into an SLO of 500 ms. A machine that stands still for a
    # tenth of a second costs two answers of 60; a policy or an estimate that is another one live, dozens.
    row = ProfileRow(name="*", weights_bytes=PAGE_BYTES, load_ns=10 * MS, exec_ns={1: 50 * MS})
    end_ns = 5 * NS_PER_S // 2
    workload = Workload(
        models=("slow",),
        sources=(FixedRate(models=(0,), rate_rps=40, slo_ns=500 * MS, end_ns=end_ns, seed=1),),
    )
    model = LiveModel(name="slow", copies=1, batch_sizes=(1,))
    profile = Profile(name="slow", rows={"*": row})
    (live,) = play([workload], models=[model], profile=profile, num_pages=8).runs
    simulated = run(
        Case(
            workload=workload,
            cluster=Cluster(
                models=(HostedModel(ModelId("slow"), replace(row, name="slow")),), num_pages=8
            ),
            duration_ns=end_ns,
        )
    ).summary.total()
    answered = sum(request.outcome == "OK" for request in live.requests)
    assert len(live.requests) == simulated.arrived == 99
    assert simulated.answered == pytest.approx(58, abs=2)
    assert answered == pytest.approx(simulated.answered, rel=0.15)
    # Batches of one, each on its own, one after the other.
    assert all(action.rows == 1 for action in live.actions if action.type == "Infer")
