"""Workers that come and go in the simulator, and who decides how many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.planning.clairvoyant import Tried, fewest, hours_of
from experiments.planning.scalers import KnownLoad, NumberWanted, QueueLength
from experiments.policies.autoscale import STUDY, Setting
from experiments.simulator import Case, Cluster, Run, copies_of, run
from experiments.simulator.fleet import Fleet, FleetScaler
from experiments.study.aims import AIMS
from modelzoo.profile import ProfileRow
from traces.arrivals import TraceReplay, Workload

ROW = ProfileRow(
    name="slow",
    weights_bytes=100 << 20,
    load_ns=10 * NS_PER_MS,
    exec_ns={1: NS_PER_S, 2: 1800 * NS_PER_MS, 4: 3400 * NS_PER_MS},
    input_bytes=1000,
    output_bytes=1000,
)


def case_of(rates_rps: Sequence[float], *, workers: int = 40, slo_s: float = 4) -> Case:
    """So many requests per second in each minute, to ten models of a second each."""
    models = copies_of(ROW, 10)
    per_minute = np.rint(np.array(rates_rps) * 60 / len(models) * 100).astype(np.int32)
    source = TraceReplay(
        counts=np.repeat(per_minute[None, :], len(models), axis=0),
        models=np.arange(len(models)),
        slo_ns=round(slo_s * NS_PER_S),
        seed=1,
        scale=0.01,
    )
    return Case(
        workload=Workload(models=tuple(m.model_id for m in models), sources=(source,)),
        cluster=Cluster(models=models, num_workers=workers),
        duration_ns=60 * NS_PER_S * len(rates_rps),
        seed=1,
    )


def played(case: Case, scaler: FleetScaler, first: int) -> Run:
    return run(case, bucket_ns=10 * NS_PER_S, fleet=Fleet(scaler=scaler, num_first=first))


def test_the_forecast_is_ahead_of_a_ramp_for_which_a_queue_asks_too_late() -> None:
    """A worker more is needed each minute, and takes a minute to start."""
    case = case_of([4.0] * 5 + [4.0 + more for more in range(1, 11)] + [14.0] * 2)
    forecast = played(case, NumberWanted(), 6)
    queue = played(case, QueueLength(target=2.0), 6)
    assert queue.summary.total().num_refused > 1.5 * forecast.summary.total().num_refused
    assert forecast.worker_ns < queue.worker_ns


def test_a_worker_costs_from_when_it_is_asked_for_until_it_has_finished() -> None:
    """One more is there in the third minute, and was asked for at the begin of the second."""
    case = case_of([0.5, 0.5, 3.0, 0.5, 0.5], workers=4)
    done = played(case, KnownLoad([1, 1, 4, 1, 1], 60 * NS_PER_S), 1)
    total = done.summary.total()
    assert total.answered > 0.98 * total.arrived
    assert done.num_unanswered == 0
    # What drains runs for some seconds more.
    assert 5 + 3 * 2 <= done.worker_ns / (60 * NS_PER_S) < 5 + 3 * 2.2


def test_a_fleet_says_what_it_cannot_be() -> None:
    case = case_of([1.0], workers=2)
    with pytest.raises(ConfigError, match="3 first workers, expected 1 to 2"):
        played(case, NumberWanted(), 3)
    with pytest.raises(ConfigError, match="expected some times of 0 or more"):
        Fleet(scaler=NumberWanted(), starts_ns=())


def test_the_clairvoyant_takes_workers_where_they_miss_the_least() -> None:
    work = [4.0, 10.0, 4.0, 4.0, 8.0, 8.0]

    def play(needs: Sequence[int]) -> Tried:
        """Each worker that is missing misses 100 requests."""
        return [
            (workers, max(0, round(100 * (need - workers))))
            for workers, need in zip(needs, work, strict=True)
        ]

    exact = fewest(work, play, num_requests=10_000, target=0.9999)
    assert exact == [4, 10, 4, 4, 8, 8]
    # A lone peak costs a start as well, so it is where the first misses are.
    some = fewest(work, play, num_requests=10_000, target=0.97)
    assert hours_of(some) < hours_of(exact)
    assert sum(missed for _, missed in play(some)) <= 300
    assert some[1] < 10


def test_the_study_leaves_a_record_with_what_its_aims_are_of(tmp_path: Path) -> None:
    setting = Setting(
        trace="",
        loads=("region",),
        scalers=("forecast",),
        minutes=3,
        rate_rps=3.0,
        tries=0,
        most=12,
    )
    points = STUDY.produce(setting, tmp_path)
    best, forecast = points
    assert (best.scaler, best.hours_over_clairvoyant) == ("clairvoyant", 1.0)
    assert sum(minute.arrived for minute in forecast.minutes) == forecast.requests
    missed = sum(minute.missed for minute in forecast.minutes)
    assert forecast.attainment_pct == pytest.approx(100 * (1 - missed / forecast.requests))
    figures = STUDY.figures_of(setting, points)
    aimed = {aim.key for aim in AIMS["autoscale"] if aim.key.startswith("region")}
    assert aimed <= set(figures)
    assert (tmp_path / "autoscale.png").exists()
    assert (tmp_path / "autoscale_minutes.csv").exists()
