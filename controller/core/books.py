"""The state of requests, models, copies, workers and pages, and the calls that tell the policy of changes.

Only the books change this state, and only they tell the policy. A policy keeps heaps of what could run
or be loaded next; those stay right only if every change that matters reaches it. So each change obliges
the books to tell, in this order, and `tests/core/test_books.py` reads this table and holds them to it:

| change          | what it changes                                       | the policy hears                   |
|-----------------|-------------------------------------------------------|------------------------------------|
| `enqueue`       | phase, open requests, queue, demand, rows             |                                    |
| `came`          | nothing: requests were queued, or estimates changed   | queue_changed demand_changed       |
| `take_out`      | queue, demand, rows                                   | queue_changed demand_changed       |
| `close`         | phase, open requests                                  |                                    |
| `dropped`       | nothing: a request is refused that was never sent     | refused                            |
| `begin_infer`   | phase, queue, pins, LRU order, timeline, in flight    | queue_changed                      |
| `begin_probe`   | pins, LRU order, timeline, in flight                  |                                    |
| `disown`        | `num_sent`, demand: its action is in doubt, or too late | demand_changed                     |
| `end_infer`     | pins, `num_sent`, demand, timeline                    | demand_changed                     |
| `infer_over`    | nothing: an Infer succeeded, its requests are settled | infer_ended unpark                 |
| `exec_freed`    | nothing: one failed, or its worker is gone, likewise  | unpark                             |
| `begin_load`    | copies, pages, loading, timeline, in flight           | demand_changed queue_changed       |
| `load_near_end` | nothing: an Infer may be planned behind each load     | (queue_changed)*                   |
| `end_load`      | resident, loading, timeline                           | queue_changed                      |
| `fail_load`     | copies, pages, loading, timeline                      | copy_gone demand_changed           |
| `drop`          | copies, pages, loading                                | copy_gone demand_changed           |
| `suspend`       | copies and readiness as one model sees them           | (copy_gone demand_changed)?        |
| `restore`       | likewise                                              | queue_changed demand_changed       |
| `drain`         | copies and readiness as models see them               | (copy_gone demand_changed)*        |
| `lose`          | workers, copies, pages, readiness, in flight          | (copy_gone demand_changed)*        |
| `ready`         | readiness                                             |                                    |
| `forget`        | readiness                                             |                                    |
| `moved`         | nothing: fewer workers hold the model than before     | queue_changed                      |
| `clock_changed` | clock, estimates of each model there                  |                                    |

The policy hears of two changes later. It hears of requests that arrive together once per model, after all of them
are judged: `enqueue` is silent, `came` tells. And after `end_infer`, `Results` answers, refuses or requeues the
requests. Then `infer_over` or `exec_freed` tells.

Weak spots. A policy hears of refusals at arrival and in the queue (`dropped`), not of requests that were sent in
vain. Whether it should has not been measured. `moved` leaves out
`demand_changed`, though Appendix B's allocation is computed from the copies: each of them was dropped just
before, and told of.

The life of a request, which the same test reads:

| from    | to      | by                                                                |
|---------|---------|-------------------------------------------------------------------|
| -       | WAITING | `enqueue`: it was admitted                                        |
| WAITING | SENT    | `begin_infer`                                                     |
| SENT    | WAITING | `enqueue`: its action failed, is overdue, or too late; some worker may be in time |
| WAITING | DONE    | `close`: refused, or its client left                              |
| SENT    | DONE    | `close`: answered, refused, or its client left                    |

The life of a copy:

| from     | to       | by                                                  |
|----------|----------|-----------------------------------------------------|
| -        | loading  | `begin_load`                                        |
| loading  | resident | `end_load`                                          |
| loading  | gone     | `fail_load`, or `lose` with its worker              |
| resident | gone     | `drop` while not pinned, or `lose` with its worker  |
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import count

from clockwright.errors import Refusal
from clockwright.units import ActionId, GpuKind, ModelId, RequestId, WorkerId
from clockwright.wire.actions import Infer
from controller.core.estimator import Estimates, EstimateTable
from controller.core.events import ActionSucceeded
from controller.core.link import LinkPlan
from controller.core.load_lanes import LoadLanes
from controller.core.policy import Policy
from controller.core.shortages import Shortages
from controller.core.state import (
    DONE,
    MANY_COPIES,
    SENT,
    WAITING,
    Batch,
    Copy,
    Model,
    Readiness,
    Request,
    SentAction,
    Suspension,
    WorkerState,
    due_ns_of,
)

_NONE = 0, 0


class Books:
    """Requests, models and workers by their ids; the changes of the table."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.models: dict[ModelId, Model] = {}
        self.workers: dict[WorkerId, WorkerState] = {}
        #: Requests that have no response yet.
        self.requests: dict[RequestId, Request] = {}
        #: Workers without an action in flight.
        self.num_idle = 0
        #: Workers with something on their exec lanes.
        self.num_busy_lanes = 0
        self.load_lanes = LoadLanes()
        #: Models that are pinned, in order. That is an operator's wish and changes nothing that a policy keeps.
        self.pinned: dict[Model, None] = {}
        #: Models that are suspended on some worker, in order.
        self.suspended: dict[Model, None] = {}
        #: Work and shortages of each kind of worker.
        self.shortages = Shortages()
        self._sequence = count()

    # --- requests -------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """A request waits in its model's queue: it is admitted, or was sent in vain."""
        self.requests[request.request_id] = request
        model = request.model
        queue = model.queue
        if not queue or request.due_ns >= queue[-1].due_ns:
            queue.append(request)
        else:
            insort(queue, request, key=due_ns_of)
        request.phase = WAITING
        if request.rows > 1 or request.row_worth != 1.0:
            _count_unlike(model, request, 1)
        model.demand_ns += request.demand_ns

    def came(self, model: Model) -> None:
        """Requests of the model were queued, or the estimates of some that wait changed."""
        self._policy.queue_changed(model)
        self._policy.demand_changed(model)

    def take_out(self, request: Request) -> None:
        """A waiting request leaves its queue; closing it is another matter."""
        model = request.model
        position = bisect_left(model.queue, request.due_ns, key=due_ns_of)
        while model.queue[position] is not request:
            position += 1
        del model.queue[position]
        if request.rows > 1 or request.row_worth != 1.0:
            _count_unlike(model, request, -1)
        model.demand_ns -= request.demand_ns
        self._policy.queue_changed(model)
        self._policy.demand_changed(model)

    def close(self, request: Request) -> None:
        """A request has its response, or its client left."""
        request.phase = DONE
        del self.requests[request.request_id]

    def dropped(self, request: Request, refusal: Refusal, now_ns: int) -> None:
        """A request that arrives, or waited, is refused before it was sent anywhere."""
        self.shortages.dropped(request, refusal, now_ns)
        self._policy.refused(request, refusal, now_ns=now_ns)

    # --- Infer ----------------------------------------------------------------------------------

    def begin_infer(self, sent: SentAction, batch: Batch, now_ns: int) -> None:
        """A batch goes to its copy's worker; its requests leave the queue."""
        copy, action, requests = sent.copy, sent.action, sent.requests
        worker, model, action_id = copy.worker, copy.model, action.action_id
        del model.queue[batch.first : batch.first + batch.count]
        for request in requests:
            request.phase = SENT
            request.action_id = action_id
        if model.num_unlike:
            for request in requests:
                if request.rows > 1 or request.row_worth != 1.0:
                    _count_unlike(model, request, -1)
        model.num_sent += len(requests)
        copy.num_pins += 1
        worker.touch(model)
        self.num_busy_lanes += not worker.exec_lane
        worker.exec_lane.push(
            action_id,
            begin_ns=sent.expected_begin_ns,
            duration_ns=action.expected_duration_ns,
            now_ns=now_ns,
        )
        if worker.idle_with is not None:
            worker.leave_idle()
        self.num_idle -= not worker.in_flight
        worker.in_flight[action_id] = sent
        self._policy.queue_changed(model)

    def begin_probe(self, sent: SentAction, now_ns: int) -> None:
        """A request goes to a worker that is avoided, too; it stays where it is."""
        copy, action = sent.copy, sent.action
        worker = copy.worker
        copy.num_pins += 1
        worker.touch(copy.model)
        self.num_busy_lanes += not worker.exec_lane
        worker.exec_lane.push(
            action.action_id,
            begin_ns=sent.expected_begin_ns,
            duration_ns=action.expected_duration_ns,
            now_ns=now_ns,
        )
        worker.leave_idle()
        self.num_idle -= not worker.in_flight
        worker.in_flight[action.action_id] = sent

    def disown(self, sent: SentAction, request: Request) -> None:
        """Take a request away from an Infer in flight: it is about to wait again."""
        sent.shared = True
        request.action_id = None
        model = request.model
        model.num_sent -= 1
        model.demand_ns -= request.demand_ns
        self._policy.demand_changed(model)

    def end_infer(self, sent: SentAction, end_ns: int) -> None:
        """An Infer, no longer in flight, ended or was refused at `end_ns`."""
        copy, model, worker = sent.copy, sent.copy.model, sent.copy.worker
        worker.exec_lane.complete(sent.action.action_id, end_ns=end_ns)
        if not worker.exec_lane:
            self.num_busy_lanes -= 1
            if len(model.copies) >= MANY_COPIES and worker in model.copies:
                worker.idle_with = model
                model.idle.setdefault(worker.gpu_kind, {})[worker] = None
        copy.num_pins -= 1
        requests = own_requests(sent) if sent.shared else sent.requests
        model.num_sent -= len(requests)
        for request in requests:
            model.demand_ns -= request.demand_ns
        self._policy.demand_changed(model)

    def infer_over(
        self, sent: SentAction, event: ActionSucceeded, batch_size: int, now_ns: int
    ) -> None:
        """An Infer of so many rows succeeded, and its requests have their responses."""
        counts, model, requests = sent.copy.worker.counts, sent.copy.model, sent.requests
        counts.exec_ns += event.duration_ns
        counts.num_run += len(requests)
        counts.ran[model] = counts.ran.get(model, _NONE)[0] + batch_size, requests[0].slo_ns
        self._policy.infer_ended(sent, event, now_ns)
        self._policy.unpark(sent.copy.worker)

    def exec_freed(self, worker: WorkerState) -> None:
        """An Infer of the worker failed, or the worker is gone; its requests wait again, or are refused."""
        self._policy.unpark(worker)

    # --- copies ---------------------------------------------------------------------------------

    def begin_load(self, sent: SentAction, now_ns: int) -> None:
        """The copy of a LoadWeights takes its pages."""
        copy, action = sent.copy, sent.action
        worker, model = copy.worker, copy.model
        for infer in infers_of(worker, model):  # behind a load that failed; they find this one
            infer.copy = copy
            copy.num_pins += 1
        worker.copies[model] = copy
        if worker not in model.suspended:  # else it is a probe
            model.copies[worker] = copy
        worker.num_free_pages -= copy.num_pages
        worker.load_lane.push(
            action.action_id,
            begin_ns=sent.expected_begin_ns,
            duration_ns=action.expected_duration_ns,
            now_ns=now_ns,
        )
        self.load_lanes.changed(worker, now_ns)
        self.num_idle -= not worker.in_flight
        worker.in_flight[action.action_id] = sent
        worker.loading[model] = copy
        self._policy.demand_changed(model)
        self._policy.queue_changed(model)

    def find_resident(self, model: Model, worker: WorkerState, readiness: Readiness) -> None:
        """A worker that has just joined holds a copy of the model since before."""
        copy = Copy(model, worker, readiness.num_pages, readiness.estimates, resident=True)
        worker.copies[model] = model.copies[worker] = copy
        worker.num_free_pages -= copy.num_pages
        assert worker.num_free_pages >= 0, f"worker {worker.worker_id} holds more than its cache"
        self._policy.demand_changed(model)
        self._policy.queue_changed(model)

    def load_near_end(self, worker: WorkerState) -> None:
        """Time has passed: an Infer may be planned behind the loads of a worker now."""
        for copy in worker.loading.values():
            self._policy.queue_changed(copy.model)

    def end_load(self, sent: SentAction, end_ns: int, now_ns: int) -> None:
        """A LoadWeights ended at `end_ns`, on the clock of the lane: its copy is in place."""
        copy = sent.copy
        copy.worker.load_lane.complete(sent.action.action_id, end_ns=end_ns)
        self.load_lanes.changed(copy.worker, now_ns)
        counts = copy.worker.counts
        counts.load_ns += sent.action.expected_duration_ns
        counts.num_loads += 1
        copy.resident = True
        del copy.worker.loading[copy.model]
        self._policy.queue_changed(copy.model)

    def fail_load(self, sent: SentAction, now_ns: int) -> None:
        """A LoadWeights failed, or was refused."""
        sent.copy.worker.load_lane.complete(sent.action.action_id, end_ns=now_ns)
        self.load_lanes.changed(sent.copy.worker, now_ns)
        self.drop(sent.copy)

    def drop(self, copy: Copy) -> None:
        """A copy is evicted, or lost."""
        worker, model = copy.worker, copy.model
        worker.leave_idle()
        del worker.copies[model]
        model.copies.pop(worker, None)  # gone already when the worker drains, or is suspended
        worker.loading.pop(model, None)
        worker.num_free_pages += copy.num_pages
        self._policy.copy_gone(copy)
        self._policy.demand_changed(model)

    # --- actions in flight ----------------------------------------------------------------------

    def take_result(self, worker: WorkerState, action_id: ActionId) -> SentAction | None:
        """Take an action out of flight. Returns None if the worker has no action of this number."""
        sent = worker.in_flight.pop(action_id, None)
        if sent is not None:
            self.num_idle += not worker.in_flight
        return sent

    # --- models ---------------------------------------------------------------------------------

    def add_model(self, model_id: ModelId) -> None:
        """Requests for a model may arrive from now on."""
        assert model_id not in self.models, f"model {model_id} added twice"
        self.models[model_id] = Model(model_id, next(self._sequence))

    def remove_model(self, model_id: ModelId) -> Model | None:
        """Admit no more requests for a model. Its open requests and copies are still there."""
        model = self.models.pop(model_id, None)
        if model is not None:
            model.removed = True
            self.suspended.pop(model, None)
            self.shortages.forget(model)
        return model

    def pin(self, model: Model, *, pinned: bool) -> None:
        """Copies of the model make room for nothing from now on; or they may again."""
        model.pinned = pinned
        if pinned:
            self.pinned[model] = None
        else:
            self.pinned.pop(model, None)

    def ready(self, model: Model, worker: WorkerState, readiness: Readiness) -> None:
        """A worker holds the model in host memory."""
        model.ready_on(worker, readiness)

    def estimates_used(self) -> set[Estimates]:
        """All estimates that are in use. Takes O(models + workers)."""
        used = set()
        for worker in self.workers.values():
            used.update([copy.estimates for copy in worker.copies.values()])
        for model in self.models.values():
            used.update([readiness.estimates for readiness in model.ready.values()])
            used.update([each.readiness.estimates for each in model.suspended.values()])
        return used

    def forget(self, model: Model, worker: WorkerState) -> bool:
        """A worker drops a removed model. Returns whether it held it."""
        held_it = model.not_ready_on(worker)
        self._suspension_over(model)
        return held_it

    def moved(self, model: Model) -> None:
        """A worker is no longer there for the model, and its waiting requests were judged again."""
        self._policy.queue_changed(model)

    def suspend(self, model: Model, worker: WorkerState, suspension: Suspension) -> None:
        """To the model, it is from now on as if the worker did not have it."""
        model.not_ready_on(worker)
        model.suspended[worker] = suspension
        if not model.removed:
            self.suspended[model] = None
        worker.leave_idle()
        copy = model.copies.pop(worker, None)
        if copy is not None:
            self._policy.copy_gone(copy)
            self._policy.demand_changed(model)

    def restore(self, model: Model, worker: WorkerState) -> None:
        """The model sees the worker again."""
        model.ready_on(worker, model.suspended.pop(worker).readiness)
        self._suspension_over(model)
        copy = worker.copies.get(model)
        if copy is not None:
            model.copies[worker] = copy
        self._policy.queue_changed(model)
        self._policy.demand_changed(model)

    def _suspension_over(self, model: Model) -> None:
        """Forget the model's suspension if no worker has it suspended any more."""
        if not model.suspended:
            self.suspended.pop(model, None)

    # --- workers --------------------------------------------------------------------------------

    def join(
        self,
        worker_id: WorkerId,
        gpu_kind: GpuKind,
        num_pages: int,
        link: LinkPlan,
        *,
        load_lookahead_ns: int,
        now_ns: int,
    ) -> None:
        """A worker with an empty cache and no models is there."""
        assert worker_id not in self.workers, f"worker {worker_id} joined twice"
        self.num_idle += 1
        counts = self.shortages.of_kind(gpu_kind)
        counts.changed(1, now_ns)
        worker = self.workers[worker_id] = WorkerState(
            worker_id,
            gpu_kind,
            num_pages,
            num_pages,
            next(self._sequence),
            link,
            exec_lookahead_ns=self._policy.lookahead_ns,
            load_lookahead_ns=load_lookahead_ns,
            counts=counts,
        )
        self.load_lanes.add(worker)
        self._count_kinds()

    def _count_kinds(self) -> None:
        """Note on each worker whether there are others of another kind."""
        workers = self.workers.values()
        beside_others = len({worker.gpu_kind for worker in workers}) > 1
        for worker in workers:
            worker.beside_others = beside_others

    def clock_changed(
        self, worker: WorkerState, clock_mhz: int, estimates: EstimateTable
    ) -> list[Model]:
        """A worker's GPU runs at another clock; returns the models there with waiting requests."""
        left_mhz, worker.clock_mhz = worker.clock_mhz, clock_mhz
        estimates.forget_clocks(
            worker.gpu_kind,
            (
                other.clock_mhz
                for other in self.workers.values()
                if other.gpu_kind == worker.gpu_kind
            ),
        )
        waiting = []
        for model in self.models.values():
            readiness = model.ready.get(worker)
            if readiness is None:
                suspension = model.suspended.get(worker)
                if suspension is None:
                    continue
                readiness = suspension.readiness
            readiness.estimates = estimates.at_clock(
                worker.gpu_kind,
                clock_mhz,
                readiness.architecture_id,
                known=readiness.estimates,
                known_mhz=left_mhz,
            )
            if worker in model.ready:
                model.ready_on(worker, readiness)
            copy = worker.copies.get(model)
            if copy is not None:
                copy.estimates = readiness.estimates
            if model.queue:
                waiting.append(model)
        return waiting

    def drain(self, worker: WorkerState) -> list[Model]:
        """A worker gets nothing new; returns the models that have to do without it.

        It finishes what it has. To its models it is as if it were gone: they see neither its copies nor
        that it is ready.
        """
        worker.draining = True
        worker.leave_idle()
        models = list(worker.copies)
        # Nothing brings back what is to go.
        for model in (*self.models.values(), *models):
            if model.suspended.pop(worker, None) is not None:
                self._suspension_over(model)
        for copy in worker.copies.values():
            if copy.model.copies.pop(worker, None) is None:
                continue  # it is suspended
            self._policy.copy_gone(copy)
            self._policy.demand_changed(copy.model)
        for model in self.models.values():
            if model.not_ready_on(worker) and model.queue and model not in worker.copies:
                models.append(model)
        return models

    def lose(self, worker: WorkerState, now_ns: int) -> tuple[list[SentAction], dict[Model, None]]:
        """A worker is gone; returns what it had in flight, and the models that have to do without it."""
        del self.workers[worker.worker_id]
        self.load_lanes.remove(worker)
        self._count_kinds()
        worker.counts.changed(-1, now_ns)
        worker.settle(confirmed=False)  # a GPU that failed may have been slow before
        in_flight = list(worker.in_flight.values())
        worker.in_flight.clear()
        self.num_idle -= not in_flight
        touched = dict.fromkeys(worker.copies)
        for copy in list(worker.copies.values()):
            self.drop(copy)
        for model in self.models.values():
            model.loose.pop(worker, None)
            if model.not_ready_on(worker):
                self._suspension_over(model)
                if model.queue:
                    touched[model] = None
        return in_flight, touched


def own_requests(sent: SentAction) -> list[Request]:
    """Requests of an Infer that neither wait again nor run elsewhere, whether they are open or not."""
    action_id = sent.action.action_id
    return [request for request in sent.requests if request.action_id == action_id]


def requests_run(worker: WorkerState) -> Sequence[Request]:
    """Requests that a worker runs, as far as can be told: its oldest Infer's, once the load before it has ended."""
    infers = (sent for sent in worker.in_flight.values() if isinstance(sent.action, Infer))
    oldest = next(infers, None)
    return () if oldest is None or loads_before(worker, oldest) else oldest.requests


def loads_before(worker: WorkerState, infer: SentAction) -> list[SentAction]:
    """The load that an Infer was planned behind, if the worker has not answered it: one or none."""
    action_id = infer.action.action_id
    return [
        sent
        for sent in worker.in_flight.values()
        if sent.copy is infer.copy
        and not isinstance(sent.action, Infer)
        and sent.action.action_id < action_id
    ]


def infers_of(worker: WorkerState, model: Model) -> list[SentAction]:
    """Infers of the model that the worker has not answered."""
    return [
        sent
        for sent in worker.in_flight.values()
        if sent.copy.model is model and isinstance(sent.action, Infer)
    ]


def _count_unlike(model: Model, request: Request, number: int) -> None:
    """A request that is unlike others joins its model's queue (1), or leaves it (-1)."""
    model.num_unlike += number
    model.num_weighed += number * (request.row_worth != 1.0)
    if request.rows > 1:
        model.extra_rows.add(request.due_ns, number * (request.rows - 1))
