"""Whether policies are ranked live as simulated: the comparison, not its outcome."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.live import live_ranking
from experiments.live.live_ranking import LOADS, Ranked, cases, figures_of, pairs_of
from tests.kit.pretended_play import pretend_play, pretended_side

SETTING = live_ranking.Setting(
    policies=("edf_mh", "clipper"), seconds=1, warmup_s=0.25, calibration_s=0.5
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


def test_a_pair_counts_if_the_simulator_tells_it_apart_and_agrees_if_live_has_the_same_order() -> (
    None
):
    lines = [
        line("clockwork", live=50, simulated=60),
        line("clockwork1ms", live=70, simulated=61),  # within the aim of `truth`
        line("edf_mh", live=65, simulated=80),
        line("clipper", live=10, simulated=5),
        line("edf_mh", live=65, simulated=200, load="moderate"),  # of another load: no pair
    ]
    found = {(pair["higher"], pair["lower"]): pair["same_order"] for pair in pairs_of(lines)}
    assert found == {
        ("edf_mh", "clockwork"): True,
        ("edf_mh", "clockwork1ms"): False,
        ("clockwork", "clipper"): True,
        ("clockwork1ms", "clipper"): True,
        ("edf_mh", "clipper"): True,
    }
    assert figures_of(SETTING, lines) == {"pairs": 5, "pairs_same_order": 4}


@pytest.mark.parametrize("load", LOADS)
def test_latency_counts_only_at_a_load_that_can_be_carried(load: str) -> None:
    lines = [line(name, live=of, simulated=of, load=load) for name, of in (("a", 50), ("b", 80))]
    assert {pair["metric"] for pair in pairs_of(lines)} == set(LOADS[load])


def test_the_loads_of_a_device_are_for_the_same_models_and_differ_in_their_rates() -> None:
    for moderate, overload in cases(SETTING).values():
        assert moderate.case.cluster == overload.case.cluster
        asked = [served.case.workload.expected_requests() for served in (moderate, overload)]
        assert asked[0] < asked[1]


def test_each_policy_is_played_and_simulated_under_each_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = {"mixed": cases(SETTING)["mixed"]}
    monkeypatch.setattr(live_ranking, "play", pretend_play)
    monkeypatch.setattr(live_ranking, "cases", lambda _setting: mixed)
    lines = live_ranking.STUDY.produce(replace(SETTING), tmp_path)
    assert [(each.policy, each.load) for each in lines] == [
        (policy, load) for policy in SETTING.policies for load in LOADS
    ]
    assert all(each.simulated is not None for each in lines)
    with (tmp_path / "live_ranking.csv").open(newline="") as file:
        assert [row["side"] for row in csv.DictReader(file)] == ["live", "simulated"] * 4
