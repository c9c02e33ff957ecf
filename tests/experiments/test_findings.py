"""Sick clusters, staged on virtual time with the real scheduler: what is found is what was staged."""

from __future__ import annotations

import dataclasses

import pytest

from clockwright.findings import diagnose
from clockwright.units import NS_PER_MS, NS_PER_S, WorkerId
from clockwright.v1 import control_pb2 as pb
from controller.core import Scheduler
from controller.front.recent import recent_actions, recent_requests
from controller.schedulers import make_scheduler
from controller.telemetry import Telemetry
from experiments.simulator import Case, Cluster, copies_of, run
from experiments.simulator.case import WorkerKind, slower_kind
from modelzoo.profile import load_profile
from traces.arrivals import Poisson, Workload

SECONDS = 2
RESNET = load_profile("table1").row_for("resnet50_v1b")


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
