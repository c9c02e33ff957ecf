"""Whether policies are ranked live as simulated: the comparison, not its outcome."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.live import live_ranking
from experiments.live.live_ranking import METRICS, Ranked, figures_of, loads, pairs_of
from experiments.live.live_run import Played, Served, command_line
from experiments.study.compared import POLICIES
from tests.kit.pretended_play import pretend_play, pretended_side
from traces.arrivals import Workload

SETTING = live_ranking.Setting(
    policies=("clockwork", "edf_mh", "clipper"), seconds=1, warmup_s=0.25, calibration_s=0.5
)


def line(policy: str, live: float, simulated: float, *, load: str = "overload") -> Ranked:
    return Ranked(
        device="mixed",
        load=load,
        policy=policy,
        live=pretended_side(live),
        simulated=pretended_side(simulated),
        client_late_p99_ms=1.0,
    )


def test_a_pair_counts_when_the_simulator_tells_it_apart_and_agrees_when_live_does_alike() -> None:
    lines = [
        line("clockwork", live=50, simulated=60),
        line("clockwork1ms", live=70, simulated=61),  # as good as the same, simulated
        line("edf_mh", live=65, simulated=80),
        line("clipper", live=10, simulated=5),
    ]
    found = {(pair.higher, pair.lower): pair.same_order for pair in pairs_of(lines)}
    assert found == {
        ("edf_mh", "clockwork"): True,
        ("edf_mh", "clockwork1ms"): False,
        ("clockwork", "clipper"): True,
        ("clockwork1ms", "clipper"): True,
        ("edf_mh", "clipper"): True,
    }
    figures = figures_of(SETTING, lines)
    assert (figures["pairs_same_order"], figures["pairs"]) == (4, 5)
    assert figures["mixed_overload_pairs_same_order"] == 4


def test_latency_counts_only_at_a_load_that_can_be_carried() -> None:
    for load, metrics in METRICS.items():
        lines = [
            line("clockwork", live=50, simulated=50, load=load),
            line("edf_mh", live=80, simulated=80, load=load),
        ]
        assert [pair.metric for pair in pairs_of(lines)] == list(metrics)


def test_policies_of_different_loads_are_no_pair() -> None:
    lines = [
        line("clockwork", live=50, simulated=50),
        line("edf_mh", live=80, simulated=80, load="moderate"),
    ]
    assert pairs_of(lines) == []


def test_what_was_answered_too_little_to_be_simulated_is_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(workloads: Sequence[Workload], served: Served) -> Played:
        played = pretend_play(workloads, served)
        for run in played.runs:
            for row in run.rows.requests:
                row.outcome = "OVERLOADED"
        return played

    tight = {"tight": loads(SETTING)["tight"]}
    monkeypatch.setattr(live_ranking, "play", silent)
    monkeypatch.setattr(live_ranking, "loads", lambda _setting: tight)
    lines = live_ranking.STUDY.produce(replace(SETTING, policies=("edf_mh", "clipper")), tmp_path)
    assert [(line.live.goodput_rps, line.simulated) for line in lines] == [(0, None)] * 4
    assert pairs_of(lines) == []
    with (tmp_path / "live_ranking.csv").open(newline="") as file:
        assert [row["side"] for row in csv.DictReader(file)] == ["live"] * 4
    assert (tmp_path / "live_ranking.png").exists()


def test_the_loads_of_a_device_are_for_the_same_models_and_differ_in_their_rates() -> None:
    for device, by_load in loads(SETTING).items():
        assert set(by_load) == set(METRICS), device
        moderate, overload = (by_load[load].case for load in ("moderate", "overload"))
        assert moderate.cluster == overload.cluster
        asked = [case.workload.expected_requests() for case in (moderate, overload)]
        assert asked[0] < asked[1]


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Ranked], list[str], Path]:
    """Simulated runs for live ones, with the policies that servers were started with."""
    directory = tmp_path_factory.mktemp("live_ranking")
    started: list[str] = []

    def pretend(workloads: Sequence[Workload], served: Served) -> Played:
        played = pretend_play(workloads, served)
        started.append(played.policy)
        return played

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_ranking, "play", pretend)
        lines = live_ranking.STUDY.produce(SETTING, directory)
    return lines, started, directory


@pytest.mark.long
def test_every_policy_has_a_server_of_its_own_on_every_device_after_the_calibration(
    produced: tuple[list[Ranked], list[str], Path],
) -> None:
    assert produced[1] == ["edf_mh", *SETTING.policies] * len(loads(SETTING))


@pytest.mark.long
def test_both_sides_of_every_run_are_in_the_files(
    produced: tuple[list[Ranked], list[str], Path],
) -> None:
    lines, _, directory = produced
    assert [(line.device, line.policy, line.load) for line in lines] == [
        (device, policy, load)
        for device, cases in loads(SETTING).items()
        for policy in SETTING.policies
        for load in cases
    ]
    record = json.loads((directory / "live_ranking.json").read_text())
    for line in lines:
        for side in ("live", "simulated"):
            key = f"{line.case}_{line.policy}_{side}_goodput_rps"
            assert record["figures"][key] == getattr(line, side).goodput_rps
        assert line.simulated is not None
        assert line.live.offered == line.simulated.offered > 0
    assert len(record["pairs"]) == record["figures"]["pairs"]
    with (directory / "live_ranking.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(lines)
    drawn = (directory / "live_ranking.png").read_bytes()
    (directory / "live_ranking.png").unlink()
    live_ranking.STUDY.redraw(directory)
    assert len(drawn) > 10_000
    assert (directory / "live_ranking.png").stat().st_size == pytest.approx(len(drawn), rel=0.01)


@pytest.mark.long
def test_what_is_simulated_is_the_policy_that_was_played(
    produced: tuple[list[Ranked], list[str], Path],
) -> None:
    overload = {
        line.policy: line.simulated and line.simulated.goodput_rps
        for line in produced[0]
        if line.case == "mixed_overload"
    }
    assert len(set(overload.values())) == len(overload)


def test_a_server_cannot_be_started_with_what_its_command_line_lacks() -> None:
    with pytest.raises(ValueError, match="expected no more than"):
        command_line(replace(POLICIES["clockwork"], max_outstanding=3))
