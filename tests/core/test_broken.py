"""One worker of several is broken: the others do as well as they would without it.

The workers here are played: an action begins when its lane is free, and takes what the profile says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import Final

import pytest

from clockwright.units import (
    NS_PER_MS,
    NS_PER_S,
    ArchitectureId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from clockwright.wire.actions import ActionError, Infer, LoadWeights
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AnswerRequest,
    Event,
    ModelAdded,
    ModelReady,
    RequestArrived,
    SendAction,
    TimerFired,
    WithdrawAction,
    WorkerJoined,
)

MS = NS_PER_MS
EXEC_NS: Final = {1: 5 * MS, 2: 6 * MS, 4: 8 * MS, 8: 12 * MS}
LOAD_NS: Final = 8 * MS
WAY_NS: Final = MS // 5
FAULTS: Final = ("fails runs", "hangs", "is slow", "fails loads", "says too late")
#: What happens before is not counted, as a cluster may need a moment to find out.
GRACE_NS: Final = NS_PER_S


@dataclass(slots=True)
class Played:
    """A worker: which fault it has, and when its lanes are free."""

    fault: str = ""
    exec_free_ns: int = 0
    load_free_ns: int = 0
    begins_ns: dict[int, int] = field(default_factory=dict)


class Cluster:
    """A scheduler, played workers, and open-loop clients."""

    def __init__(
        self, policy: str, faults: list[str], *, num_models: int = 15, pages: int = 100
    ) -> None:
        self.scheduler = Scheduler(SchedulerConfig(policy=policy))
        self.now_ns = 0
        self.serial = count()
        self.agenda: list[tuple[int, int, Event]] = []
        self.deadlines: dict[RequestId, int] = {}
        self.in_time = 0
        self.models = [ModelId(f"m{number}") for number in range(num_models)]
        self.workers = {
            WorkerId(f"w{number}"): Played(fault) for number, fault in enumerate(faults)
        }
        self.cancelled: set[int] = set()
        for model in self.models:
            self.tell(ModelAdded(model_id=model))
        for worker in self.workers:
            self.tell(WorkerJoined(worker_id=worker, gpu_kind=GpuKind("k"), num_pages=pages))
            for model in self.models:
                self.tell(
                    ModelReady(
                        worker_id=worker,
                        model_id=model,
                        architecture_id=ArchitectureId("a"),
                        num_pages=2,
                        load_ns=LOAD_NS,
                        exec_ns=EXEC_NS,
                    )
                )

    def run(self, *, rate: float, slo_ms: int, seconds: int = 2) -> int:
        """Requests answered in time that arrived after the grace."""
        draw = random.Random(1)
        at_ns = 0
        for number in count(1):
            at_ns += int(draw.expovariate(rate) * NS_PER_S)
            if at_ns > seconds * NS_PER_S:
                break
            request = RequestArrived(
                request_id=RequestId(number),
                model_id=draw.choice(self.models),
                rows=1,
                arrival_ns=at_ns,
                slo_ns=slo_ms * MS,
            )
            self.deadlines[request.request_id] = at_ns + request.slo_ns
            heappush(self.agenda, (at_ns, next(self.serial), request))
        until_ns = seconds * NS_PER_S + 10 * slo_ms * MS
        while True:
            wakeup_ns = self.scheduler.next_wakeup_ns()
            due_ns = self.agenda[0][0] if self.agenda else None
            if wakeup_ns is not None and (due_ns is None or wakeup_ns < due_ns):
                if wakeup_ns > until_ns:
                    return self.in_time
                self.now_ns = max(self.now_ns, wakeup_ns)
                self.tell(TimerFired())
            elif due_ns is not None and due_ns <= until_ns:
                _, _, event = heappop(self.agenda)
                self.now_ns = max(self.now_ns, due_ns)
                if isinstance(event, ActionSucceeded | ActionFailed):
                    withdrawn = getattr(event, "error", None) is ActionError.WITHDRAWN
                    if event.action_id in self.cancelled and not withdrawn:
                        continue
                self.tell(event)
            else:
                return self.in_time

    def tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event, now_ns=self.now_ns):
            match command:
                case SendAction(action=LoadWeights() | Infer()):
                    self.play(command)
                case WithdrawAction():
                    self.withdraw(command)
                case AnswerRequest():
                    deadline_ns = self.deadlines[command.request_id]
                    assert self.now_ns <= deadline_ns or self.scheduler.config.policy in (
                        "clipper",
                        "infaas",
                    )
                    arrived = deadline_ns
                    if self.now_ns <= deadline_ns and arrived > GRACE_NS:
                        self.in_time += 1

    def withdraw(self, command: WithdrawAction) -> None:
        worker = self.workers[command.worker_id]
        begin_ns = worker.begins_ns.get(command.action_id, 0)
        if begin_ns > self.now_ns + WAY_NS:
            self.cancelled.add(command.action_id)
            result = ActionFailed(
                worker_id=command.worker_id,
                action_id=command.action_id,
                error=ActionError.WITHDRAWN,
            )
            heappush(self.agenda, (self.now_ns + 2 * WAY_NS, next(self.serial), result))

    def play(self, command: SendAction) -> None:
        action = command.action
        assert isinstance(action, LoadWeights | Infer)
        worker = self.workers[command.worker_id]
        received_ns = self.now_ns + WAY_NS
        is_run = isinstance(action, Infer)
        duration_ns = EXEC_NS[action.batch_size] if isinstance(action, Infer) else LOAD_NS
        begin_ns = max(received_ns, worker.exec_free_ns if is_run else worker.load_free_ns)
        if is_run:
            begin_ns = max(begin_ns, worker.begins_ns.get(-hash(action.model_id), 0))
        error = ActionError.NONE
        if worker.fault == "is slow":
            duration_ns *= 10
        if worker.fault == ("fails runs" if is_run else "fails loads"):
            error, duration_ns = ActionError.DEVICE, MS // 5
        elif is_run and worker.fault == "says too late":
            error, duration_ns = ActionError.TOO_LATE, 0
        elif is_run and worker.fault == "fails loads":
            error, duration_ns = ActionError.NOT_RESIDENT, 0
        elif begin_ns > action.latest_ns:
            error, duration_ns = ActionError.TOO_LATE, 0
        end_ns = begin_ns + duration_ns
        worker.begins_ns[action.action_id] = begin_ns
        if is_run:
            worker.exec_free_ns = max(worker.exec_free_ns, end_ns)
        else:
            worker.load_free_ns = max(worker.load_free_ns, end_ns)
            worker.begins_ns[-hash(action.model_id)] = end_ns
        if worker.fault == "hangs" and is_run:
            worker.exec_free_ns = 1 << 60
            return
        result: Event
        if error is ActionError.NONE:
            result = ActionSucceeded(
                worker_id=command.worker_id,
                action_id=action.action_id,
                begin_ns=begin_ns,
                end_ns=end_ns,
                duration_ns=duration_ns,
                received_ns=received_ns,
            )
        else:
            result = ActionFailed(
                worker_id=command.worker_id,
                action_id=action.action_id,
                error=error,
                message="broken",
                received_ns=received_ns,
            )
        heappush(self.agenda, (end_ns + WAY_NS, next(self.serial), result))


@cache
def goodput_without(policy: str, num_workers: int, rate: float) -> int:
    return Cluster(policy, [""] * num_workers).run(rate=rate, slo_ms=100)


@pytest.mark.parametrize(
    ("num_workers", "load"),
    [
        (2, 1.5),
        (4, 0.5),
        pytest.param(2, 0.5, marks=pytest.mark.long),
        pytest.param(4, 1.5, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("policy", ["clockwork", "edf_mh"])
def test_a_broken_worker_takes_nothing_from_the_others(
    policy: str, fault: str, num_workers: int, load: float
) -> None:
    rate = load * (num_workers - 1) * 300
    without = goodput_without(policy, num_workers - 1, rate)
    beside = Cluster(policy, [fault] + [""] * (num_workers - 1)).run(rate=rate, slo_ms=100)
    assert beside >= 0.95 * without
