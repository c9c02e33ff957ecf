"""Run a case."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time

from clockwright.units import NS_PER_S, ModelId
from controller.core import Scheduler
from controller.telemetry.tables import Telemetry
from experiments.simulator.case import Case, LostWorker
from experiments.simulator.clients import Clients
from experiments.simulator.controller import VirtualController, production_scheduler
from experiments.simulator.fleet import Fleet, FleetMembers, name_of
from experiments.simulator.loop import Loop
from experiments.simulator.model import simulated
from experiments.simulator.summary import Summary
from experiments.simulator.watch import Watch
from experiments.simulator.worker import Worker

# Limit on the wait for a response after the last arrival. Only a policy that refuses nothing, on workers
# that are gone, comes near it.
_PATIENCE_NS = 600 * NS_PER_S

# Between two looks of the garbage collector at the youngest objects; Python's own 700 costs 6 %.
_GC_ALLOCATIONS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    simulated_ns: int
    wall_s: float
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A case that has run. Equal cases give equal runs, but for the wall time."""

    case: Case
    summary: Summary
    #: Summary of each group of tenants or models that was asked for, without actions.
    groups: dict[str, Summary]
    #: Requests that had no response when the run was given up; 0 unless all workers are gone.
    num_unanswered: int
    #: How long tensors took the wires of all workers' links, both ways together.
    link_ns: int
    #: Time of all workers while requests arrived, from when each was asked for until it had gone.
    worker_ns: int
    wall_s: float = field(compare=False)
    #: CPU time that this process used during the run.
    cpu_s: float = field(compare=False)

    @property
    def num_requests(self) -> int:
        """Requests that arrived."""
        return self.summary.total().arrived

    def utilisations(self) -> dict[str, float]:
        """How busy each part was while requests arrived: `Summary.utilisations`, and `link`.

        The last is the mean of all workers' links, both ways.
        """
        num_wires = 2 * self.case.cluster.num_workers
        return {
            **self.summary.utilisations(0, self.case.duration_ns),
            "link": self.link_ns / (num_wires * self.case.duration_ns),
        }

    @property
    def requests_per_wall_s(self) -> float:
        """Requests simulated per second of wall time."""
        return self.num_requests / self.wall_s


def run(
    case: Case,
    *,
    bucket_ns: int = NS_PER_S,
    groups: Mapping[str, str] | None = None,
    telemetry: Telemetry | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    progress_ns: int = NS_PER_S,
    check: bool = False,
    make_scheduler: Callable[[Case], Scheduler] = production_scheduler,
    watch: Watch | None = None,
    pinned: Sequence[ModelId] = (),
    fleet: Fleet | None = None,
) -> Run:
    """Simulate a case from its beginning until its last request has a response.

    Args:
        case: what to run.
        bucket_ns: resolution of the summary over time.
        groups: tenant, or model of requests without one -> group in which they are counted apart.
        telemetry: takes a row per request and action, on virtual time; None is much faster.
        on_progress: called every `progress_ns` of virtual time; may write rows out.
        progress_ns: how often.
        check: assert the invariants of scheduler and worker cores after every event. Slow.
        make_scheduler: makes the case's scheduler; only a trial has another than production's.
        watch: hears of each request.
        pinned: models that an operator has pinned.
        fleet: how workers come and go; None: all are there all the time.
    """
    simulation = Simulation(
        case, bucket_ns, groups or {}, telemetry, check, make_scheduler, watch, pinned, fleet
    )
    loop, controller = simulation.loop, simulation.controller
    begin_s, begin_cpu_s = perf_counter(), process_time()
    end_ns = case.duration_ns
    # Objects that exist now live as long as the run. With thousands of models the collector would spend a
    # good part of the run looking at them. Who plays many short cases has frozen what is there for all of them:
    # half a million objects are walked in half a second, which is longer than such a run.
    freezes = not gc.get_freeze_count()
    gc.collect()
    if freezes:
        gc.freeze()
    # Requests and actions lie in no cycles, so their last reference frees them.
    thresholds = gc.get_threshold()
    gc.set_threshold(_GC_ALLOCATIONS, *thresholds[1:])
    try:
        while loop.now_ns < end_ns or (controller.num_open and loop.now_ns < end_ns + _PATIENCE_NS):
            until_ns = loop.now_ns + progress_ns
            loop.run(min(until_ns, end_ns) if loop.now_ns < end_ns else until_ns)
            if on_progress is not None:
                on_progress(
                    Progress(
                        simulated_ns=loop.now_ns,
                        wall_s=perf_counter() - begin_s,
                        summary=simulation.summary,
                    )
                )
    finally:
        gc.set_threshold(*thresholds)
        if freezes:
            gc.unfreeze()
    return Run(
        case=case,
        summary=simulation.summary,
        groups=simulation.groups,
        num_unanswered=controller.num_open,
        link_ns=sum(worker.link_busy_ns for worker in simulation.all_workers),
        worker_ns=simulation.worker_ns(end_ns),
        wall_s=perf_counter() - begin_s,
        cpu_s=process_time() - begin_cpu_s,
    )


class Simulation:
    """Controller, workers, links and clients of one run, wired together."""

    def __init__(
        self,
        case: Case,
        bucket_ns: int,
        groups: Mapping[str, str],
        telemetry: Telemetry | None,
        check: bool,
        make_scheduler: Callable[[Case], Scheduler],
        watch: Watch | None,
        pinned: Sequence[ModelId],
        fleet: Fleet | None = None,
        loop: Loop | None = None,
    ) -> None:
        """Wire them; several may share a loop, if the clients that hand out arrivals are wired last."""
        self._case = case
        self._check = check
        self.loop = loop or Loop()
        self.summary = Summary(bucket_ns, case.cluster.num_workers)
        self.groups = {
            name: Summary(bucket_ns, case.cluster.num_workers)
            for name in sorted({*groups.values()})
        }
        self.controller = VirtualController(
            case,
            self.loop,
            self.summary,
            telemetry=telemetry,
            groups={who: self.groups[name] for who, name in groups.items()},
            on_closed=self._closed,
            check=check,
            make_scheduler=make_scheduler,
            watch=watch,
            pinned=pinned,
        )
        cluster = case.cluster
        self._models = {
            kind.name: simulated(cluster, kind)
            for kind in map(cluster.kind_of, range(cluster.num_workers))
        }
        self._workers: dict[int, Worker] = {}
        #: All there ever were.
        self.all_workers: list[Worker] = []
        self._starts = [0] * case.cluster.num_workers
        #: Workers that a fault took and has not given back.
        self._gone: set[int] = set()
        self._members: FleetMembers | None = None
        if fleet is None:
            for index in range(case.cluster.num_workers):
                self._start(index)
        else:
            self._members = FleetMembers(
                fleet, case, self.loop, self.controller, self.summary, self._start
            )
        for lost in case.faults.lost_workers:
            self.loop.at(lost.at_ns, self._lose, lost)
        self.controller.clients = Clients(
            case.workload,
            self.loop,
            random.Random(f"clients {case.seed}"),
            until_ns=case.duration_ns,
            round_trip_ns=2 * case.network.client_delay_ns,
            jitter_ns=case.network.client_jitter_ns,
            samples_ns=case.network.client_samples_ns,
            refusal_pause_ns=case.refusal_pause_ns,
            submit=self.controller.submit,
        )

    def worker_ns(self, until_ns: int) -> int:
        """Time of all workers together, until a time; a fault's gaps count."""
        if self._members is None:
            return until_ns * self._case.cluster.num_workers
        return self._members.paid_ns(until_ns)

    def _start(self, index: int) -> None:
        """A worker process starts and registers, unless a fault holds it down."""
        if index in self._gone or index in self._workers:
            return
        cluster = self._case.cluster
        worker = Worker(
            name_of(index),
            self._case,
            index,
            self._starts[index],
            self._models[cluster.kind_of(index).name],
            self.loop,
            self.controller.result,
            check=self._check,
        )
        self._starts[index] += 1
        self._workers[index] = worker
        self.all_workers.append(worker)
        self.controller.join(worker, cluster)

    def _lose(self, lost: LostWorker) -> None:
        self._gone.add(lost.worker)
        worker = self._workers.pop(lost.worker, None)
        if worker is not None:
            worker.kill()
            self.loop.at(
                self.loop.now_ns + self._case.faults.detection_ns, self.controller.lose, worker
            )
        if lost.back_ns is not None:
            self.loop.at(lost.back_ns, self._come_back, lost.worker)

    def _come_back(self, index: int) -> None:
        self._gone.discard(index)
        self._start(index)

    def _closed(self, worker: Worker) -> None:
        """The controller let a worker go; it drops everything and registers again."""
        worker.kill()
        if self._workers.get(worker.index) is worker:
            del self._workers[worker.index]
            if self._members is not None and self._members.has_gone(worker.index):
                return
            again_ns = self.loop.now_ns + self._case.faults.rejoin_ns
            self.loop.at(again_ns, self._start, worker.index)
