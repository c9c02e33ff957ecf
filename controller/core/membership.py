"""Workers that join, drain, change their clock or are lost, and the models that they hold."""

from __future__ import annotations

from collections.abc import Iterator

from clockwright.errors import Refusal
from clockwright.units import WorkerId
from clockwright.wire.actions import Infer
from controller.core.admission import Verdict
from controller.core.alarms import STOOD_STILL_NS
from controller.core.books import infers_of, requests_run
from controller.core.dispatch import Dispatch
from controller.core.estimator import EstimateTable
from controller.core.events import (
    ClockSeen,
    CloseWorker,
    ForgetModel,
    LearnedLink,
    LearnedStart,
    LearnedTimes,
    ModelAdded,
    ModelPinned,
    ModelReady,
    ModelRemoved,
    ModelWanted,
    Recalled,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from controller.core.link import LinkPlan
from controller.core.parts import CoreParts
from controller.core.requests import Requests
from controller.core.state import Model, Readiness, WorkerState


class Membership:
    """Adds and removes workers and models, and places the requests that they leave behind."""

    def __init__(self, parts: CoreParts, requests: Requests, dispatch: Dispatch) -> None:
        self._config = parts.config
        self._books = parts.books
        self._alarms = parts.alarms
        self._health = parts.health
        self._dispatch = dispatch
        self._requests = requests
        self._commands = parts.commands
        self._predicts = parts.traits.predicts
        self._estimates = EstimateTable(finds_densest=parts.config.edf_mh.densest)
        #: Links of an earlier controller's workers, until they come.
        self._links: dict[WorkerId, LearnedLink] = {}

    def recalled(self, event: Recalled, now_ns: int) -> None:
        """Have models and workers that come begin with what an earlier controller had learned."""
        self._estimates.recall(event.times)
        self._books.shortages.recall(event.starts)
        self._links = {link.worker_id: link for link in event.links}

    def learned_times(self) -> Iterator[LearnedTimes | None]:
        """Say what was learned of actions; see `EstimateTable.learned`."""
        return self._estimates.learned()

    def learned_starts(self) -> list[LearnedStart]:
        """Say how long starts of workers took. Takes O(kinds)."""
        return self._books.shortages.learned_starts()

    def learned_links(self) -> list[LearnedLink]:
        """Say what was learned of links that are not usual. Takes O(workers)."""
        links = [
            LearnedLink(
                worker_id=worker_id,
                out_length_ns=worker.link.out.length_ns,
                out_ns_per_byte=worker.link.out.ns_per_byte,
                back_length_ns=worker.link.back.length_ns,
                back_ns_per_byte=worker.link.back.ns_per_byte,
            )
            for worker_id, worker in self._books.workers.items()
            if not worker.link.is_usual and (worker.link.length_ns or worker.link.is_thin)
        ]
        return [*links, *self._links.values()]

    def worker_joined(self, event: WorkerJoined, now_ns: int) -> None:
        """Add a worker with an empty cache."""
        config = self._config
        link = LinkPlan(
            least_ns=config.dispatch_delay_ns,
            tolerance_ns=config.window_ns // 2,
            unusual=self._books.load_lanes.unusual,
        )
        if (learned := self._links.pop(event.worker_id, None)) is not None:
            link.recall(learned, now_ns)
        self._books.join(
            event.worker_id,
            event.gpu_kind,
            event.num_pages,
            link,
            load_lookahead_ns=config.lookahead_ns,
            now_ns=now_ns,
        )
        workers = list(self._books.workers.values())
        if len(workers) == 2 and workers[0].watched:  # from now on it can be done without
            self._alarms.look_sooner(workers[0], now_ns + STOOD_STILL_NS)

    def clock_seen(self, event: ClockSeen, now_ns: int) -> None:
        """Plan with the estimates of the clock at which the worker's GPU runs now."""
        worker = self._books.workers.get(event.worker_id)
        if worker is None:
            return
        same = worker.clock_mhz == event.clock_mhz
        worker.settle(confirmed=same)
        if same:
            return
        waiting = self._books.clock_changed(worker, event.clock_mhz, self._estimates)
        self._dispatch.load_lane_freed()
        for model in waiting:
            self._books.came(model)
        for model in waiting:
            self._dispatch.place(model, now_ns)

    def worker_draining(self, event: WorkerDraining, now_ns: int) -> None:
        """Give a worker nothing new, and close its link once it has finished what it has."""
        worker = self._books.workers.get(event.worker_id)
        if worker is None or worker.draining:
            return
        models = self._books.drain(worker)
        self.place_pinned(now_ns)
        for model in models:
            self._requests.reconsider(model, Refusal.NO_WORKER, now_ns)
        if not worker.in_flight:
            self.let_go(worker, "", now_ns)

    def worker_lost(self, event: WorkerLost, now_ns: int) -> None:
        """Remove a worker whose link broke."""
        worker = self._books.workers.get(event.worker_id)
        if worker is not None:
            self._books.shortages.worker_lost(worker)
            self._remove_worker(worker, now_ns)

    def let_go(self, worker: WorkerState, reason: str, now_ns: int) -> None:
        """Close a worker's link. An empty reason means that it is drained."""
        if reason:
            self._books.shortages.worker_lost(worker)
        self._commands.append(CloseWorker(worker_id=worker.worker_id, reason=reason))
        self._remove_worker(worker, now_ns)

    def _remove_worker(self, worker: WorkerState, now_ns: int) -> None:
        for request in requests_run(worker):  # they may be what ended the worker
            request.lost_on |= {worker.worker_id}
        in_flight, touched = self._books.lose(worker, now_ns)
        for sent in in_flight:
            if sent.requests:
                self._books.end_infer(sent, now_ns)
                self._requests.resort(sent.copy.model, now_ns)
                self._requests.put_back(sent, Refusal.WORKER_LOST, now_ns)
                touched[sent.copy.model] = None
        self._books.exec_freed(worker)
        self.place_pinned(now_ns)
        for model in touched:
            self._requests.reconsider(model, Refusal.WORKER_LOST, now_ns)

    def model_added(self, event: ModelAdded, now_ns: int) -> None:
        """Admit requests for a model from now on."""
        self._books.add_model(event.model_id)

    def model_ready(self, event: ModelReady, now_ns: int) -> None:
        """Load a model on a worker that holds it in host memory, where there is a reason."""
        worker = self._books.workers.get(event.worker_id)
        if worker is None:
            return
        model = self._books.models.get(event.model_id)
        if model is None:
            self._commands.append(ForgetModel(worker_id=event.worker_id, model_id=event.model_id))
            return
        if self._estimates.crowded:
            self._estimates.keep_used(self._books.estimates_used())
        estimates = self._estimates.profiled(
            worker.gpu_kind,
            worker.clock_mhz,
            event.architecture_id,
            load_ns=event.load_ns,
            exec_ns=event.exec_ns,
            profile_mhz=event.clock_mhz,
        )
        self._dispatch.load_lane_freed()
        if not worker.draining:
            readiness = Readiness(event.num_pages, event.architecture_id, estimates)
            if worker.ready_ns is None:
                worker.ready_ns = now_ns
                self._books.shortages.worker_ready(worker, now_ns, is_resident=event.resident)
            self._books.ready(model, worker, readiness)
            model.output_row_bytes = event.output_row_bytes
            if event.resident:
                self._books.find_resident(model, worker, readiness)
            self.place_pinned(now_ns)
            for sick in self._health.replaced(model, now_ns):
                self._requests.trust_changed(sick, [model], now_ns)
            if event.resident and model.queue:
                self._dispatch.place(model, now_ns)
            elif len(model.copies) < len(model.ready):
                self._dispatch.seek_copy(model, now_ns)

    def model_wanted(self, event: ModelWanted, now_ns: int) -> None:
        """Load a model that was not asked because it is cold."""
        model = self._books.models.get(event.model_id)
        if model is not None:
            self._dispatch.want(model, event.until_ns, now_ns)

    def model_pinned(self, event: ModelPinned, now_ns: int) -> None:
        """Keep a model resident, or let it make room again."""
        model = self._books.models.get(event.model_id)
        if model is not None:
            self._books.pin(model, pinned=event.pinned)
            self.place_pinned(now_ns)
            if not event.pinned:
                self._dispatch.may_make_room(model, now_ns)

    def place_pinned(self, now_ns: int) -> None:
        """Load pinned models without a copy, and refuse requests that pinned models leave no room for."""
        if self._books.pinned:
            self._dispatch.load_pinned(now_ns)
            if not self._predicts:
                for model in self._books.models.values():
                    if model.queue and not model.has_room_beside_pins():
                        self._requests.reconsider(model, Refusal.NO_WORKER, now_ns)

    def model_removed(self, event: ModelRemoved, now_ns: int) -> None:
        """Refuse a model's requests, and free its pages."""
        model = self._books.remove_model(event.model_id)
        if model is None:
            return
        for request in list(model.queue):
            self._requests.leave_queue(request, now_ns)
            self._requests.refuse(request, Verdict(Refusal.MODEL_REMOVED))
        if model.pinned:
            self._books.pin(model, pinned=False)
        for worker in [*model.ready, *model.suspended]:
            for action_id, sent in worker.in_flight.items():
                if sent.copy.model is not model:
                    continue
                if isinstance(sent.action, Infer):
                    self._requests.withdraw(action_id)
                else:
                    self._requests.take_back(worker, sent)
            self.forget(worker, model, now_ns)
        self.place_pinned(now_ns)

    def forget(self, worker: WorkerState, model: Model, now_ns: int) -> None:
        """Free a removed model's pages and tell the worker, once no action of it is in flight."""
        copy = worker.copies.get(model)
        if copy is not None:
            if not copy.resident or copy.num_pins:
                return
            self._dispatch.evict(copy)
            self._dispatch.pages_freed(worker, now_ns)
        elif infers_of(worker, model):
            return  # behind a load that failed
        self._health.forget(worker, model)
        if self._books.forget(model, worker):
            self._commands.append(ForgetModel(worker_id=worker.worker_id, model_id=model.model_id))
