"""Sick clusters, staged on virtual time with the real scheduler: what is found is what was staged."""

from __future__ import annotations

import dataclasses

import pytest

from clockwright.findings import diagnose
from clockwright.units import NS_PER_MS, NS_PER_S, WorkerId
from clockwright.v1 import control_pb2 as pb
from controller.core import Scheduler
from controller.front.services.recent import recent_actions, recent_requests
from controller.process.schedulers import make_scheduler
from controller.telemetry.tables import Telemetry
from experiments.simulator import Case, Cluster, copies_of, run
from experiments.simulator.case import WorkerKind, slower_kind
from modelzoo.profile import load_profile
from traces.arrivals import Poisson, Workload

SECONDS = 2
RESNET = load_profile("table1").row_for("resnet50_v1b")


def staged_beside_long_runs(rate_rps: float, fast_ns: int = NS_PER_MS // 2) -> pb.StatusResponse:
    """One worker with a model of 340 ms, asked with an SLO of 1.5 s, and two fast ones, asked with 100 ms."""
    slow = dataclasses.replace(RESNET, name="slow", exec_ns={1: 340 * NS_PER_MS})
    fast = dataclasses.replace(RESNET, name="fast", exec_ns={1: fast_ns})
    hosted = (*copies_of(slow, 1), *copies_of(fast, 2))
    end_ns = 5 * NS_PER_S
    sources = (
        Poisson(models=range(1), rate_rps=rate_rps, slo_ns=1500 * NS_PER_MS, end_ns=end_ns, seed=3),
        Poisson(models=range(1, 3), rate_rps=40, slo_ns=100 * NS_PER_MS, end_ns=end_ns, seed=4),
    )
    case = Case(
        workload=Workload(models=tuple(model.model_id for model in hosted), sources=sources),
        cluster=Cluster(models=hosted, num_workers=1, num_pages=1376),
        duration_ns=end_ns,
    )
    telemetry = Telemetry()
    run(case, telemetry=telemetry)
    recent = recent_requests(telemetry, since_ns=0, now_ns=end_ns)
    kind = pb.KindInfo(gpu_kind="V100", num_workers=1, dropped_for_exec_rps=10.0)
    return pb.StatusResponse(ready=True, recent=recent, kinds=[kind])


@pytest.mark.parametrize("rate_rps", [1.2, 8.0])
def test_a_model_whose_runs_are_longer_than_others_can_wait_is_named_first(
    rate_rps: float,
) -> None:
    status = staged_beside_long_runs(rate_rps)
    found = diagnose(status, [pb.WorkerInfo(worker_id="w", gpu_kind="V100")])
    assert [finding.name for finding in found] == ["long runs", "overload"]
    assert found[0].words.startswith("a run of slow-0 takes 340 ms, and ")
    assert "fast-0" in found[0].words
    assert "fast-1" in found[0].words
    assert "SLO from 100 ms" in found[0].words


def test_refusals_without_long_runs_or_of_busy_models_have_other_causes() -> None:
    assert not staged_beside_long_runs(0.5, fast_ns=30 * NS_PER_MS).recent.HasField("long_runs")
    assert not staged_beside_long_runs(0.001).recent.HasField("long_runs")


def staged(
    *, rate_rps: float, workers: int = 2, models: int = 4, pages: int = 1376, slow: bool = False
) -> list[str]:
    """Names of what is found after some seconds on workers, of which one may be slow."""
    hosted = copies_of(RESNET, models)
    end_ns = SECONDS * NS_PER_S
    source = Poisson(
        models=range(models), rate_rps=rate_rps, slo_ns=100 * NS_PER_MS, end_ns=end_ns, seed=5
    )
    kinds = (WorkerKind(),) * (workers - slow) + (slower_kind("slow", [RESNET], 2.0),) * slow
    case = Case(
        workload=Workload(models=tuple(model.model_id for model in hosted), sources=(source,)),
        cluster=Cluster(models=hosted, num_workers=workers, num_pages=pages, kinds=kinds),
        duration_ns=end_ns,
    )
    schedulers: list[Scheduler] = []

    def make(given: Case) -> Scheduler:
        schedulers.append(make_scheduler(given.scheduler))
        return schedulers[0]

    telemetry = Telemetry()
    found: list[list[str]] = []

    def look(_: object) -> None:
        statistics = schedulers[0].statistics()
        # An operator has two cards of one kind.
        of_kind = {WorkerId(row.worker_id): "V100" for row in statistics.workers}
        recent = recent_actions(telemetry, of_kind, since_ns=0, now_ns=end_ns)
        workers = [
            pb.WorkerInfo(
                worker_id=row.worker_id,
                gpu_kind="V100",
                num_pages=row.num_pages,
                num_free_pages=row.num_free_pages,
                suspended=list(row.suspended.values()),
                recent=recent.get(row.worker_id),
            )
            for row in statistics.workers
        ]
        status = pb.StatusResponse(
            ready=True,
            recent=recent_requests(telemetry, since_ns=0, now_ns=end_ns),
            kinds=[
                pb.KindInfo(
                    **{field.name: getattr(kind, field.name) for field in dataclasses.fields(kind)}
                )
                for kind in statistics.kinds
            ],
        )
        found.append([finding.name for finding in diagnose(status, workers)])

    run(case, make_scheduler=make, telemetry=telemetry, on_progress=look, progress_ns=end_ns)
    return found[0]


@pytest.mark.parametrize(
    ("stage", "first"),
    [
        ({"rate_rps": 300}, None),
        ({"rate_rps": 1500, "workers": 1}, "overload"),
        ({"rate_rps": 300, "slow": True}, "slow worker"),
        ({"rate_rps": 300, "workers": 1, "models": 60, "pages": 100}, "too few pages"),
    ],
)
def test_what_was_staged_is_found_first(stage: dict[str, float], first: str | None) -> None:
    names = staged(**stage)  # type: ignore[arg-type]
    assert next(iter(names), None) == first
