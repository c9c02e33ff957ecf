"""New versions under load, and what requests have to do with copies and classes: the studies, in short."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core.config import BATCH_SLO_NS
from controller.front.oip.classes import RISING
from controller.telemetry.tables import OK, Telemetry
from experiments.bench.versions import Inquired, Setting, judge, play, together
from experiments.bounds import Cost, density_rate
from experiments.clockwork_paper import cases
from experiments.policies import classes
from experiments.simulator import copies_of, run
from modelzoo.profile import load_profile
from traces.arrivals import Poisson


def inquired(sent_s: float, made_by: int, named: int = 0) -> Inquired:
    return Inquired(sent_s, sent_s + 0.1, made_by=made_by, named=named or made_by)


def test_requests_without_an_answer_and_answers_of_the_wrong_version_are_counted() -> None:
    calm = [inquired(0, 1), inquired(0.6, 1)]
    fine = [*calm, inquired(1, 1), inquired(1.05, 2), inquired(1.12, 1), inquired(2, 2)]
    assert judge(fine, [(1, 1.5)])["torn"] == 0
    assert judge([*fine, Inquired(3.0)], [(1, 1.5)])["lost"] == 1
    assert judge([*fine, inquired(3, 2, 1)], [(1, 1.5)])["torn"] == 1
    # Version 2 had answered before it was sent.
    assert judge([*fine, inquired(3, 1)], [(1, 1.5)])["torn"] == 1


def test_a_ratio_is_known_with_its_spread_and_with_what_nothing_but_the_machine_makes_of_it() -> (
    None
):
    calm = [Inquired(0.0, 0.1, made_by=1, named=1), Inquired(0.8, 1.0, made_by=1, named=1)]
    rounds = [
        judge([*calm, Inquired(1.2, 1.2 + took_s, made_by=1, named=1)], [(1, 1.5)])
        for took_s in (0.2, 0.4, 0.8)
    ]
    found = together(rounds)
    assert (found["requests"], found["replacements"]) == (9, 3)
    assert [round(each["calm_p99_ratio"], 3) for each in rounds] == [2, 2, 2]
    assert found["p99_ratio_min"] < found["p99_ratio"] < found["p99_ratio_max"]
    assert found["p99_ratio"] == rounds[1]["p99_ratio"]
    assert found["while_p99_ms"] == pytest.approx(400)


@pytest.mark.parametrize("part", ["one", "two"])
def test_no_request_is_lost_or_torn_while_versions_come_and_go(part: str) -> None:
    setting = Setting(times=2, rate=50, calm_s=0.2, slo_ms=600_000)
    asked, replaced = asyncio.run(play(setting, part))
    found = judge(asked, replaced)
    assert (found["lost"], found["torn"]) == (0, 0), {each.fault for each in asked}
    assert found["versions_seen"] == 3


def answered(*, shadows: bool) -> tuple[float, float]:
    """Shares of requests that are answered at 1.5 times what a GPU can do, and of the copies of all of them."""
    row = load_profile("table1").row_for("resnet50_v1b")
    end_ns, slo_ns = 4 * NS_PER_S, 100 * NS_PER_MS
    rate_rps = 1.5 * density_rate([Cost(row.exec_ns)], slo_ns=slo_ns)
    sources = [
        Poisson(models=(model,), rate_rps=rate_rps, slo_ns=each_ns, end_ns=end_ns, seed=model)
        for model, each_ns in ((0, slo_ns), (1, BATCH_SLO_NS))[: 1 + shadows]
    ]
    case = cases.case_of(
        copies_of(row, 2), sources, seed=1, end_ns=end_ns, num_gpus=1, noise=cases.NOISE
    )
    telemetry = Telemetry(1 << 30)
    run(replace(case), telemetry=telemetry)
    shares = []
    for wanted_ns in (slo_ns, BATCH_SLO_NS):
        rows = [
            each.outcome == OK and each.departure_ns < end_ns
            for each in telemetry.requests
            if each.slo_ns == wanted_ns
        ]
        shares.append(sum(rows) / max(len(rows), 1))
    return shares[0], shares[1]


def test_copies_for_a_shadow_displace_no_request_however_many_they_are() -> None:
    without, _ = answered(shadows=False)
    beside, of_copies = answered(shadows=True)
    assert 0.6 < without < 0.7
    assert beside >= without - 0.005
    # While nothing was idle, none of them ran.
    assert of_copies < 0.02


def test_classes_are_shed_in_order_and_the_lowest_is_not_starved() -> None:
    setting = classes.Setting(loads=(2.0,), measured_ns=2 * NS_PER_S, seeds=(1,), nums_models=(1,))
    levels, retries = classes.STUDY.ask(setting)
    assert levels.highest > 0.95
    assert levels.highest > levels.middle + 0.2 > levels.lowest + 0.4
    assert levels.lowest > RISING / 4
    assert retries.highest > retries.lowest + 0.5
    assert max(levels.price_points, retries.price_points) < 5
