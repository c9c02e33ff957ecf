"""The simulator driven by hand: requests, faults and the passing of time are the test's.

The scheduler, the ledger and the workers' cores are the product's; devices take the time that models'
rows say, and the controller's timer is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from clockwright.units import NS_PER_S, PAGE_BYTES, ModelId, RequestId, WorkerId
from controller.core import Scheduler
from controller.core.events import Event, RequestArrived
from controller.telemetry.rows import RequestRow
from controller.telemetry.tables import CANCELLED, Telemetry
from experiments.simulator import Case, Cluster, HostedModel, Network, Summary
from experiments.simulator.controller import VirtualController
from experiments.simulator.loop import Loop
from experiments.simulator.model import simulated
from experiments.simulator.worker import Worker
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Workload


def row(name: str, *, pages: int = 1, load_ns: int, exec_ns: dict[int, int]) -> ProfileRow:
    """What models of an architecture cost; their inputs and outputs take no time."""
    return ProfileRow(name=name, weights_bytes=pages * PAGE_BYTES, load_ns=load_ns, exec_ns=exec_ns)


class SimulatedCluster:
    """A scheduler, workers that join when they are told to, and what became of every request."""

    def __init__(
        self,
        scheduler: Scheduler,
        models: Sequence[HostedModel],
        *,
        seed: int = 0,
        exec_sigma: float = 0.0,
        delay_ns: int = 100_000,
    ) -> None:
        self.scheduler = scheduler
        self.loop = Loop()
        self.telemetry = Telemetry(1_000_000)
        self.deadlines: dict[RequestId, int] = {}
        self._case = Case(
            workload=Workload(models=(), sources=()),
            cluster=Cluster(models=tuple(models), noise=Noise(exec_sigma=exec_sigma)),
            duration_ns=NS_PER_S,
            network=Network(delay_ns=delay_ns),
            scheduler=scheduler.config,
            seed=seed,
        )
        self._models = simulated(self._case.cluster, self._case.cluster.kind_of(0))
        self._workers: dict[WorkerId, Worker] = {}
        self._controller = VirtualController(
            self._case,
            self.loop,
            Summary(NS_PER_S, 1),
            telemetry=self.telemetry,
            groups={},
            on_closed=Worker.kill,
            check=True,
            make_scheduler=lambda _: scheduler,
            tick_ns=1,
        )

    @property
    def now_ns(self) -> int:
        return self.loop.now_ns

    # --- what happens -------------------------------------------------------------------------

    def add_worker(self, name: str, num_pages: int) -> WorkerId:
        """Join a worker that has all models in host memory."""
        worker_id = WorkerId(name)
        case = replace(self._case, cluster=replace(self._case.cluster, num_pages=num_pages))
        worker = Worker(
            worker_id, case, 0, 0, self._models, self.loop, self._controller.result, check=True
        )
        self._workers[worker_id] = worker
        self._controller.join(worker, case.cluster)
        return worker_id

    def kill(self, worker_id: WorkerId) -> None:
        """A worker vanishes with all it had, and its link breaks."""
        worker = self._workers.pop(worker_id)
        worker.kill()
        self._controller.lose(worker)

    def request(self, model_id: ModelId, slo_ns: int, *, rows: int = 1) -> RequestId:
        """A request arrives now."""
        request = RequestArrived(
            request_id=RequestId(len(self.deadlines) + 1),
            model_id=model_id,
            rows=rows,
            arrival_ns=self.now_ns,
            slo_ns=slo_ns,
        )
        self.deadlines[request.request_id] = self.now_ns + slo_ns
        self._controller.ledger.open(request, None)
        self.tell(request)
        return request.request_id

    def withdraw(self, request_id: RequestId) -> None:
        """Whoever waits for an answer goes away."""
        self._controller.ledger.withdraw(request_id)

    def tell(self, event: Event) -> None:
        self._controller.ledger.tell(event)

    def at(self, time_ns: int, action: Callable[[], object]) -> None:
        """Do something at a virtual time."""

        def act(_: None) -> None:
            action()

        self.loop.at(time_ns, act, None)

    def run(self, until_ns: int) -> None:
        """Advance virtual time."""
        self.loop.run(until_ns)

    # --- what came of it ----------------------------------------------------------------------

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self._controller.ledger.requests

    @property
    def answers(self) -> dict[RequestId, RequestRow]:
        """Requests that a worker answered, in time or not."""
        return {row.request_id: row for row in self.telemetry.requests if row.worker_id is not None}

    @property
    def refusals(self) -> dict[RequestId, RequestRow]:
        return {
            row.request_id: row
            for row in self.telemetry.requests
            if row.worker_id is None and row.outcome != CANCELLED
        }

    @property
    def num_cancelled(self) -> int:
        return self.telemetry.total.cancelled

    def num_in_time(self) -> int:
        """Requests answered by their deadline."""
        return self.telemetry.total.answered

    def refusal_counts(self) -> Counter[str]:
        """How often each reason was given."""
        return Counter(row.outcome for row in self.refusals.values())
