"""Signals for scaling: what is short is named, and one more worker answers about what was foretold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import KindStatistics, Scheduler, SchedulerConfig, Statistics
from controller.process.schedulers import make_scheduler
from experiments.simulator import Case, Cluster, Network, copies_of, run
from modelzoo.profile import ProfileRow, load_profile
from traces.arrivals import ClosedLoop, Poisson, Workload

SECONDS = 4
RESNET = load_profile("table1").row_for("resnet50_v1b")


def case(
    *, workers: int, rate_rps: float, models: int, pages: int = 1376, slo_ms: int = 50
) -> Case:
    source = Poisson(
        models=range(models),
        rate_rps=rate_rps,
        slo_ns=slo_ms * NS_PER_MS,
        end_ns=SECONDS * NS_PER_S,
        seed=5,
    )
    hosted = copies_of(RESNET, models)
    return Case(
        workload=Workload(models=tuple(model.model_id for model in hosted), sources=(source,)),
        cluster=Cluster(models=hosted, num_workers=workers, num_pages=pages),
        duration_ns=SECONDS * NS_PER_S,
    )


def ran(given: Case) -> tuple[float, Statistics]:
    """Goodput, r/s, and what the scheduler says at the end of the arrivals."""
    schedulers: list[Scheduler] = []

    def make(given: Case) -> Scheduler:
        schedulers.append(make_scheduler(given.scheduler))
        return schedulers[0]

    found: list[Statistics] = []
    done = run(
        given,
        make_scheduler=make,
        on_progress=lambda _: found.append(schedulers[0].statistics()),
        progress_ns=SECONDS * NS_PER_S,
    )
    return done.summary.total().answered / SECONDS, found[0]


def kind_of(statistics: Statistics) -> KindStatistics:
    (kind,) = statistics.kinds
    return kind


def one_large_size() -> ProfileRow:
    """A network that runs 512 rows of 3 kB at a time, and nothing smaller."""
    return ProfileRow(
        name="gpu",
        weights_bytes=1,
        load_ns=NS_PER_MS,
        exec_ns={512: 26 * NS_PER_MS},
        input_bytes=3072,
        output_bytes=8,
    )


def test_a_cluster_with_room_is_short_of_nothing() -> None:
    _, statistics = ran(case(workers=3, rate_rps=600, models=9))
    kind = kind_of(statistics)
    assert (kind.num_workers, kind.one_more_rps) == (3, 0)
    assert 0.3 < kind.exec_busy < 0.7 > kind.load_busy
    # The last of them are still under way.
    assert kind.run_rps == pytest.approx(600, rel=0.1)


@pytest.mark.long
def test_overload_is_a_want_of_exec_time_and_one_more_worker_answers_what_is_foretold() -> None:
    for workers, rate_rps in ((1, 1200), (3, 3000), (2, 4000)):
        given = case(workers=workers, rate_rps=rate_rps, models=12)
        before_rps, statistics = ran(given)
        kind = kind_of(statistics)
        assert kind.dropped_for_exec_rps > 10 * kind.dropped_for_pages_rps
        assert kind.exec_busy > 0.9
        after_rps, _ = ran(replace(given, cluster=replace(given.cluster, num_workers=workers + 1)))
        assert kind.one_more_rps == pytest.approx(after_rps - before_rps, rel=0.2)


def test_models_that_do_not_fit_are_a_want_of_pages_and_of_the_bus_that_fills_them() -> None:
    given = case(workers=1, rate_rps=600, models=250, pages=700, slo_ms=100)
    before_rps, statistics = ran(given)
    kind = kind_of(statistics)
    assert kind.dropped_for_pages_rps > 10 * kind.dropped_for_exec_rps
    assert kind.dropped_for_loads_rps > 10 * kind.dropped_for_exec_rps
    assert kind.evictions_per_s > 50
    assert kind.load_busy > 0.9
    after_rps, _ = ran(replace(given, cluster=replace(given.cluster, num_workers=2)))
    assert kind.one_more_rps == pytest.approx(after_rps - before_rps, rel=0.2)


def test_a_link_that_carries_less_than_the_lane_runs_is_what_is_short_and_no_exec_time() -> None:
    # A request has 602 kB of inputs: the link carries 200 of them a second.
    given = replace(
        case(workers=1, rate_rps=450, models=3, slo_ms=100),
        network=Network(bytes_per_s=120_000_000),
    )
    before_rps, statistics = ran(given)
    kind = kind_of(statistics)
    assert kind.dropped_for_links_rps > 10 * kind.dropped_for_exec_rps
    assert kind.exec_busy < 0.8
    after_rps, _ = ran(replace(given, cluster=replace(given.cluster, num_workers=2)))
    assert kind.one_more_rps == pytest.approx(after_rps - before_rps, rel=0.25)


def test_a_device_of_one_large_size_runs_as_many_rows_as_a_thin_link_brings() -> None:
    # 512 rows of 3 kB are 38 ms on the wire, the EXEC takes 26 ms: it is the wire that is short.
    row = one_large_size()
    hosted = copies_of(row, 1)
    wire_bytes_per_s = 41_666_666
    end_ns = SECONDS * NS_PER_S
    loop = ClosedLoop(model=0, concurrency=2048, slo_ns=60 * NS_PER_S, end_ns=end_ns)
    given = Case(
        workload=Workload(models=(hosted[0].model_id,), closed_loops=(loop,)),
        cluster=Cluster(models=hosted),
        duration_ns=end_ns,
        network=Network(bytes_per_s=wire_bytes_per_s),
    )
    summary = run(given, bucket_ns=NS_PER_S).summary
    answered_rps = summary.total(NS_PER_S, end_ns).answered / (SECONDS - 1)
    assert answered_rps > 0.9 * wire_bytes_per_s / row.input_bytes


def test_workers_behind_thin_links_are_not_idle_until_the_links_are_learned() -> None:
    # 512 rows of 3 kB are 88 ms on each wire, the EXEC takes 26 ms: the second batch is there too late.
    row = one_large_size()
    hosted = copies_of(row, 1)
    wire_bytes_per_s, num_workers = 125_000_000 // 7, 7
    begin_ns, end_ns = 5 * NS_PER_S // 4, 7 * NS_PER_S // 4
    loop = ClosedLoop(model=0, concurrency=2048 * num_workers, slo_ns=60 * NS_PER_S, end_ns=end_ns)
    given = Case(
        workload=Workload(models=(hosted[0].model_id,), closed_loops=(loop,)),
        cluster=Cluster(models=hosted, num_workers=num_workers),
        duration_ns=end_ns,
        network=Network(bytes_per_s=wire_bytes_per_s),
        scheduler=SchedulerConfig(policy="clockwork"),  # others take these SLOs for batch clients'
    )
    summary = run(given, bucket_ns=NS_PER_S // 4).summary
    # Two of a link's delays may be events, so that its length is known after three batches.
    answered_rps = summary.total(begin_ns, end_ns).answered / 0.5
    assert answered_rps > 0.9 * num_workers * wire_bytes_per_s / row.input_bytes
