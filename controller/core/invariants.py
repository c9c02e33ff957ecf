"""Assertions that must hold after every event. Linear in everything; for tests and debugging."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from clockwright.units import NS_PER_MS, WorkerId
from clockwright.wire.actions import EvictWeights, Infer, LoadWeights
from controller.core.alarms import Alarms
from controller.core.books import Books, own_requests
from controller.core.events import Command, SendAction, WriteOffAction
from controller.core.scheduler import Scheduler
from controller.core.state import Model, Phase, Request, WorkerState

# One request has no more entries than this among the expiries that count. A request that is watched sooner for a
# while, and then for the same time as before, has two; more have not been seen. A trail would have hundreds.
_MAX_ENTRIES = 8


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError when the scheduler's books contradict each other."""
    books, predicts = scheduler._books, scheduler.traits.predicts
    workers = list(books.workers.values())
    models = list(books.models.values())
    assert books.num_idle == sum(not worker.in_flight for worker in workers)
    assert books.num_busy_lanes == sum(bool(worker.exec_lane) for worker in workers)
    ends = [(worker.load_end_ns, worker.sequence, worker) for worker in workers]
    assert books.load_lanes.order == sorted(ends)
    unusual = {worker.link for worker in workers if not worker.link.is_usual}
    assert books.load_lanes.unusual == unusual
    for worker in workers:
        lane = worker.load_lane
        assert worker.load_end_ns <= lane.available_ns(scheduler._now_ns)
        assert not lane or worker.load_end_ns == lane.end_ns
        _check_pages(worker)
        _check_exec_lane(worker, predicts=predicts)
        _check_copies(worker)
    # Gathered once: a look through all actions for each model would take most of the time of the tests.
    sent_of: defaultdict[Model, list[Request]] = defaultdict(list)
    for worker in workers:
        for action in worker.in_flight.values():
            sent_of[action.copy.model] += own_requests(action) if action.shared else action.requests
    for model in models:
        sent = sent_of.get(model, ())
        # Most models are idle at any time, and there is nothing to add up then.
        if (
            model.queue
            or sent
            or model.num_sent
            or model.demand_ns
            or model.num_unlike
            or model.extra_rows.total
        ):
            _check_queue(model, sent)
        if model.suspended:
            assert not model.suspended.keys() & (model.ready.keys() | model.copies.keys())
    assert books.suspended.keys() == {model for model in models if model.suspended}
    assert books.pinned.keys() == {model for model in models if model.pinned}
    waiting = sum([len(model.queue) for model in models])
    num_sent = sum([request.phase is Phase.SENT for request in books.requests.values()])
    assert len(books.requests) == waiting + num_sent, "an open request is neither waiting nor sent"
    if predicts:
        _check_expiries(scheduler._alarms, books)


def size_of(scheduler: Scheduler) -> int:
    """How many things `check` looks at; found in time linear in workers."""
    books = scheduler._books
    held = sum([len(worker.copies) + len(worker.in_flight) for worker in books.workers.values()])
    num_open = len(books.requests) + len(scheduler._alarms.expiries)
    return len(books.workers) + len(books.models) + num_open + held


def check_commands(scheduler: Scheduler, commands: Sequence[Command], now_ns: int) -> None:
    """Raise AssertionError when what the last event led to makes no sense, whatever came of it."""
    lost: WorkerId | None = None
    for command in commands:
        in_doubt, lost = lost, None
        if isinstance(command, WriteOffAction):
            lost = command.worker_id
        if not isinstance(command, SendAction):
            continue
        action = command.action
        if isinstance(action, LoadWeights | Infer):
            assert now_ns <= action.earliest_ns <= command.expected_begin_ns <= action.latest_ns
            assert action.expected_duration_ns >= 0
        if isinstance(action, Infer):
            assert len(command.request_ids) == len(action.rows) > 0
            assert 0 < sum(action.rows) <= action.batch_size
        if isinstance(action, EvictWeights):
            worker = scheduler._books.workers.get(command.worker_id)
            in_flight = worker.in_flight.values() if worker else ()
            # A copy whose load was lost is evicted at once, pinned or not: nothing tells whether it is there. Infers
            # behind that load come back as not run.
            is_doubted = in_doubt == command.worker_id
            # One event may evict weights, load them again for its next request, and run them.
            for sent in in_flight:
                if isinstance(sent.action, Infer) and sent.action.action_id < action.action_id:
                    is_other = sent.action.model_id != action.model_id
                    assert is_other or is_doubted, "evicted in flight"
            model = scheduler._books.models.get(action.model_id)
            pinned = model is not None and model.pinned
            assert not pinned or is_doubted, "evicted though it is pinned"


def check_no_gpu_idles(scheduler: Scheduler, now_ns: int) -> None:
    """Raise AssertionError when a worker does nothing while a request waits that it could answer in time.

    It has no action in flight and no wake-up. Only for policies that predict, and run what they can.
    """
    begin_ns = now_ns + scheduler.config.dispatch_delay_ns
    models = scheduler._books.models.values()
    for worker in scheduler._books.workers.values():
        wakeup_ns = worker.load_wakeup_ns or worker.exec_wakeup_ns
        if worker.in_flight or worker.draining or wakeup_ns is not None:
            continue
        for model in models:
            readiness = model.ready.get(worker)
            if not model.queue or readiness is None:
                continue
            copy = worker.copies.get(model)
            if copy is None:
                if any(not other.draining for other in model.copies):
                    continue  # theirs to run
                idle = sum(
                    c.num_pages
                    for c in worker.copies.values()
                    if not c.model.queue and not c.model.pinned
                )
                if worker.num_free_pages + idle < readiness.num_pages:
                    continue
            estimates = readiness.estimates
            load_ns = 0 if copy else estimates.load_ns + NS_PER_MS
            for request in model.queue:
                if request.rows <= estimates.sizes[-1]:
                    # Policies take estimates to grow with the batch size.
                    exec_ns = max(estimates.exec_ns[: estimates.cover[request.rows] + 1])
                    assert begin_ns + load_ns + exec_ns > request.due_ns, (
                        f"request {request.request_id} of {model.model_id} waits, "
                        f"{worker.worker_id} is idle"
                    )


def _check_expiries(alarms: Alarms, books: Books) -> None:
    """Every open request is looked at again some time, and leaves no trail of entries for that."""
    watched = Counter(
        request.request_id
        for at_ns, _, request in alarms.expiries
        if request.phase is not Phase.DONE and at_ns == request.watch_ns
    )
    assert watched.keys() == books.requests.keys(), (
        "an open request is not watched, or a closed one is"
    )
    assert max(watched.values(), default=0) <= _MAX_ENTRIES, "a request is watched again and again"


def _check_copies(worker: WorkerState) -> None:
    infers = Counter(
        sent.copy for sent in worker.in_flight.values() if isinstance(sent.action, Infer)
    )
    for copy in worker.copies.values():
        model = copy.model
        pins = infers.get(copy, 0)
        assert copy.num_pins == pins, f"{model.model_id}: {copy.num_pins} pins, {pins} Infers"
        assert copy.resident is (model not in worker.loading)
        suspension = model.suspended.get(worker) if model.suspended else None
        readiness = suspension.readiness if suspension else model.ready.get(worker)
        assert readiness is None or copy.estimates is readiness.estimates
        # To its model, a copy on a worker that drains is gone already, or where it is suspended.
        seen = not worker.draining and suspension is None
        assert model.copies.get(worker) is (copy if seen else None)


def _check_pages(worker: WorkerState) -> None:
    used = sum(copy.num_pages for copy in worker.copies.values())
    assert worker.num_free_pages >= 0, f"{worker.worker_id}: pages oversubscribed"
    assert used + worker.num_free_pages == worker.num_pages, f"{worker.worker_id}: pages leaked"


def _check_exec_lane(worker: WorkerState, *, predicts: bool) -> None:
    """Executions have well-formed windows and a purpose; that they never overlap, `Timeline.push` asserts."""
    infers = [s for s in worker.in_flight.values() if isinstance(s.action, Infer)]
    assert len(infers) == len(worker.exec_lane)
    model = worker.idle_with
    if model is not None:
        assert not infers, f"{worker.worker_id}: busy, but listed as idle"
        assert worker in model.copies
        assert worker in model.idle[worker.gpu_kind]
    for sent in infers:
        action = sent.action
        begin_ns = sent.expected_begin_ns - sent.back_ns
        assert action.earliest_ns <= begin_ns <= action.latest_ns, (
            f"action {action.action_id}: begin {begin_ns} outside "
            f"[{action.earliest_ns}, {action.latest_ns}]"
        )
        if not predicts or sent.shared or sent.tries:
            continue
        due_ns = [
            request.deadline_ns if request.decide_ns else request.due_ns
            for request in sent.requests
        ]
        assert max(due_ns) >= sent.expected_end_ns, (
            f"action {action.action_id} misses every deadline"
        )


def _check_queue(model: Model, sent: Sequence[Request]) -> None:
    # One loop, because a generator for each sum doubled what the audit of a test costs.
    due_ns, num_unlike, num_weighed, extra_rows, demand_ns = 0, 0, 0, 0, 0
    for request in model.queue:
        assert request.due_ns >= due_ns, f"{model.model_id}: its queue is out of order"
        assert request.phase is Phase.WAITING
        due_ns = request.due_ns
        num_unlike += request.rows > 1 or request.row_worth != 1.0
        num_weighed += request.row_worth != 1.0
        extra_rows += request.rows - 1
        demand_ns += request.demand_ns
    assert (model.num_unlike, model.num_weighed) == (num_unlike, num_weighed)
    assert model.extra_rows.total == extra_rows == model.extra_rows.before(1 << 62)
    assert model.num_sent == len(sent)
    demand_ns += sum([request.demand_ns for request in sent])
    assert model.demand_ns == demand_ns, (
        f"{model.model_id}: demand {model.demand_ns}, {demand_ns} is open"
    )
