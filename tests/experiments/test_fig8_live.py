"""Figure 8 live, in small: its case, and what is made of both sides; no server, no time."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US
from experiments.live import fig8_live
from experiments.live.calibration import Calibration
from experiments.live.fig8_live import (
    LiveLine,
    Setting,
    calibrated,
    case_of,
    figures_of,
    fits,
    record_of,
    served_of,
)
from experiments.live.open_loop import Account, End
from experiments.live.rehearsal import MeasuredCase, measured
from experiments.simulator import Case, CpuCosts, Network, run
from experiments.study.results_page import TEMPLATE
from experiments.study.sides import side_of, simulated_record
from tests.kit.pretended_play import pretend_play, pretended_side
from traces.minutes import MinuteTrace

LINE = "gpus6"
SETTING = Setting(
    lines=(LINE,), seconds=8, warmup=2, num_functions=200, num_copies=2, closed_loop_s=0.5
)
OK: End = ("ok", "")


@pytest.fixture(scope="module", autouse=True)
def small_line() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fig8_live.LINES, LINE, (2, 300.0))
        yield


@pytest.fixture(scope="module")
def trace() -> MinuteTrace:
    return SETTING.minutes(LINE)


@pytest.fixture(scope="module")
def case(trace: MinuteTrace) -> Case:
    return case_of(SETTING, LINE, trace, seed=8, seconds=10)


def test_the_stretch_has_the_line_s_rate_whatever_the_hour_has(case: Case) -> None:
    assert case.duration_ns == 10 * NS_PER_S
    assert case.workload.expected_requests() == pytest.approx(3000)
    assert case.cluster.num_workers == 2
    assert len(case.workload.models) == 2 * 61


@pytest.mark.parametrize(
    ("controller_us", "worker_us", "client_us", "fit"),
    [(7e6, 5e6, 2e6, True), (8.5e6, 1e6, 1e6, False), (3e6, 6e6, 3e6, False)],
)
def test_processes_keep_to_cores_as_long_as_each_core_has_room(
    controller_us: float, worker_us: float, client_us: float, fit: bool
) -> None:
    used_us = {"controller": controller_us, "worker": worker_us, "client": client_us}
    assert fits(used_us, 10.0) is fit


def test_the_server_has_the_models_and_the_devices_of_the_simulator(case: Case) -> None:
    server = served_of(replace(SETTING, native=True), case)
    served = {name: model for model in server.models for name in model.model_ids}
    assert set(served) == set(case.workload.models)
    assert server.profile.noise == case.cluster.noise
    for model in case.cluster.models:
        assert server.profile.row_for(model.model_id) == model.row
        assert served[model.model_id].batch_sizes == tuple(model.row.exec_ns)
    assert set(server.environment) == {"PYTHONPATH", "PYTHONSAFEPATH"}


def test_the_simulator_s_record_is_that_of_its_own_summary(case: Case) -> None:
    side = side_of(simulated_record(case), 0, 10 * NS_PER_S)
    total = run(case).summary.total()
    assert side.offered == total.arrived
    assert side.goodput_pct == pytest.approx(100 * total.answered / total.arrived)
    refused = side.late_per_million + side.refused_per_million
    assert refused == pytest.approx(1e6 * total.num_refused / total.arrived)
    assert side.p50_ms == pytest.approx(total.latency_ns(50) / NS_PER_MS, rel=0.02)


def test_what_the_controller_is_charged_is_no_delay_of_links_any_more(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fig8_live, "play", pretend_play)
    served = served_of(SETTING, case)
    idle = calibrated(served, SETTING)
    free, charged = (
        measured(served, idle.runs, idle.rows, costs).case
        for costs in (None, CpuCosts(front_ns=100 * NS_PER_US, result_ns=50 * NS_PER_US))
    )
    assert charged.costs.front_ns == 100 * NS_PER_US
    for name, cost_us in (("down_samples_ns", 100), ("up_samples_ns", 50)):
        before, after = getattr(free.network, name), getattr(charged.network, name)
        assert len(before) > 10
        assert after == tuple(max(0, ns - cost_us * NS_PER_US) for ns in before)
    assert charged.cluster.start_delay_ns == free.cluster.start_delay_ns == 30_000
    assert charged.cluster.models == case.cluster.models
    assert charged.workload is case.workload


def account(*ends: tuple[End, float]) -> Account:
    """A request every 10 ms, each sent 2 ms after it was due; with its end, that many ms after it was due."""
    due_ns = np.arange(len(ends), dtype=np.int64) * 10 * NS_PER_MS
    done_ns = due_ns + np.array([round(ms * NS_PER_MS) for _, ms in ends], np.int64)
    kinds = [end for end, _ in ends]
    return Account(due_ns, due_ns + 2 * NS_PER_MS, done_ns, kinds, 100, len(ends) / 100)


def test_a_request_s_time_begins_when_it_was_due() -> None:
    seen = account((OK, 50.0), (OK, 101.0), (("refused", "LATE"), 80.0), (("refused", "COLD"), 1.0))
    side = side_of(record_of(seen), 0, NS_PER_S)
    assert side.offered == 4
    assert side.goodput_pct == 25
    # The second was answered within 100 ms of its sending, but not of when it was due.
    assert side.late_per_million == 500_000
    assert side.refused_per_million == 250_000


def line(name: str, case: Case, live: float, simulated: float) -> LiveLine:
    network = Network(down_samples_ns=(1,), up_samples_ns=(1,), client_samples_ns=(1,))
    calibration = Calibration(network=network, start_delay_ns=1)
    return LiveLine(
        line=name,
        live=pretended_side(live),
        simulated=pretended_side(simulated),
        measured=MeasuredCase(case=case, calibration=calibration),
        pinned=True,
        cpu_us={"controller": 100.0, "client": 20.0},
        busy={"controller": 0.5, "client": 0.1},
        ends={"live": {"OK": 1}, "simulated": {"OK": 1}},
        client_late_p99_ms=0.2,
        remarks=[],
        load_averages=(0.0, 1.0),
    )


def test_the_record_names_each_line_also_where_they_are_played_one_by_one(
    case: Case, tmp_path: Path
) -> None:
    lines = [line("one", case, 98.0, 99.0), line("two", case, 100.0, 96.0)]
    replace(fig8_live.STUDY, ask=lambda _setting: lines).produce(SETTING, tmp_path / "both")
    left = iter(lines)
    study = replace(fig8_live.STUDY, ask=lambda _setting: [next(left)])
    for add in (False, True):
        study.produce(SETTING, tmp_path, add=add)
    figures = json.loads((tmp_path / "fig8_live.json").read_text())["figures"]
    # No figure is about all lines, of which a run may have one.
    assert figures == json.loads((tmp_path / "both" / "fig8_live.json").read_text())["figures"]
    assert figures["two_sim_gap_pct"] == pytest.approx(-4)
    assert figures["one_sim_gap_pct"] == pytest.approx(100 / 98)
    assert figures["one_goodput_pct"] == 98
    assert figures["one_simulated_goodput_pct"] == 99
    assert figures["one_cpu_us"] == 120
    with (tmp_path / "fig8_live.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["line"], row["side"]) for row in rows] == [
        ("one", "live"), ("one", "simulated"), ("two", "live"), ("two", "simulated"),
    ]  # fmt: skip


def test_the_page_of_results_asks_for_numbers_that_the_record_has(case: Case) -> None:
    lines = [line(name, case, 99.0, 99.0) for name in ("gpus6", "gpus20")]
    figures = fig8_live.STUDY.figures_of(SETTING, lines)
    wanted = set(re.findall(r"\{fig8_live\[(\w+)\]", TEMPLATE.read_text(encoding="utf-8")))
    assert wanted
    assert wanted <= figures.keys()
    assert figures_of(SETTING, lines).keys() <= figures.keys()


@pytest.mark.parametrize("asked", [{"seconds": 0.5}, {"lines": ("gpus7",)}, {"policy": "best"}])
def test_what_cannot_be_asked_for_is_refused(asked: dict[str, Any]) -> None:
    (name,) = asked
    with pytest.raises(ConfigError, match=name):
        Setting(**asked)
