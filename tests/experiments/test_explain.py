"""Remedies that are stated for refusals, tried: a quick variant of `python -m experiments bench-explain`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clockwright.errors import Refusal
from clockwright.units import NS_PER_S, ModelId, RequestId
from controller.core.remedies import Remedy
from experiments.bench import explain
from experiments.bench.explain import Setting, Stated
from experiments.policies import floors
from experiments.simulator import run
from experiments.study.aims import limit_of

#: One GPU for three seconds, of which the second is one of overload.
QUICK = Setting(
    num_workers=1,
    num_busy=15,
    num_rare=60,
    num_pages=250,
    duration_ns=3 * NS_PER_S,
    cold_rps=80.0,
    cold_duration_ns=3 * NS_PER_S,
)

M = ModelId("m")


# More of what the last test of this file tries some of.
@pytest.mark.long
def test_remedies_that_are_stated_let_their_requests_succeed() -> None:
    case = explain.case_of(QUICK)
    found, num_requests = explain.refusals(case)
    assert num_requests > len(found) > 200
    # Every tenth of those with each kind of remedy, so that few are enough.
    chosen: list[Stated] = []
    for kind in ("workers", "slo", "slo_and_workers"):
        alike = [each for each in found if explain.kind_of(each) == kind]
        assert alike, kind
        chosen += alike[:: max(1, len(alike) // 12)]
    ends = explain.try_remedies(case, chosen)
    figures = explain.figures_of(num_requests, found, chosen, ends)
    assert figures["tried"] == len(chosen) == len(ends)
    assert figures["remedy_stated_share"] == 1.0
    assert figures["remedy_right_share"] >= limit_of("explain", "remedy_right_share")
    assert {"right_share_slo", "right_share_workers"} <= figures.keys()


@pytest.mark.long
def test_remedies_of_models_that_are_not_there_are_right_too() -> None:
    figures = explain.measure_case(explain.cold_case_of(QUICK), 20)
    assert figures["tried_of_cold"] >= 15
    assert figures["remedy_right_share"] >= limit_of("explain", "cold_remedy_right_share")


@pytest.mark.long
def test_a_model_that_is_pinned_lets_its_cold_requests_succeed() -> None:
    figures = explain.measure_case(explain.cold_case_of(QUICK), 1, 5)
    assert figures["tried_pinning"] == 5
    assert figures["right_share_pinning"] == 1.0
    assert figures["pinning_stated_share"] > 0.5


def test_without_its_remedy_a_request_is_refused_again_and_counts_as_wrong() -> None:
    case = explain.case_of(QUICK)
    found, num_requests = explain.refusals(case)
    # The SLO that each has is no longer one, though the run forks for it.
    chosen = [
        replace(each, remedy=Remedy(slo_ns=each.slo_ns)) for each in found[:: len(found) // 10]
    ]
    ends = explain.try_remedies(case, chosen)
    assert ends == {each.request_id: each.refusal for each in chosen}
    assert explain.figures_of(num_requests, found, chosen, ends)["remedy_right_share"] == 0.0


def test_to_ask_about_refusals_changes_no_schedule() -> None:
    case = explain.case_of(QUICK)

    listen = explain.Listen()
    assert run(case, watch=listen).summary == run(case).summary
    assert len(listen.stated) > 100


def test_figures_name_each_kind_of_remedy_and_each_reason() -> None:
    stated = [
        Stated(RequestId(1), M, Refusal.OVERLOADED, 100, Remedy(more_workers=1)),
        Stated(RequestId(2), M, Refusal.OVERLOADED, 100, Remedy(more_workers=2)),
        Stated(RequestId(3), M, Refusal.INFEASIBLE, 10, Remedy(slo_ns=30)),
        Stated(RequestId(4), M, Refusal.COLD, 10, Remedy()),
    ]
    ends = {RequestId(1): None, RequestId(2): Refusal.COLD, RequestId(3): None}
    figures = explain.figures_of(100, stated, stated, ends)
    assert figures["remedy_right_share"] == 0.5
    assert figures["remedy_stated_share"] == 0.75
    assert figures["right_share_workers"] == 0.5
    assert figures["right_share_of_infeasible"] == figures["right_share_slo"] == 1.0
    assert figures["slo_factor_max"] == 3.0
    less = explain.with_less(stated)
    assert [each.remedy.more_workers for each in less] == [0, 1]


def test_what_was_stated_and_what_was_right_is_what_was_recorded(tmp_path: Path) -> None:
    floors.FORMS["explain"](tmp_path)
    assert floors.faults("explain", tmp_path) == []
