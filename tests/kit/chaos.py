"""A scheduler against workers that do as they like: every event, every error, in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from clockwright.actions import ActionError, EvictWeights, Infer, LoadWeights
from clockwright.units import (
    NS_PER_MS,
    ActionId,
    ArchitectureId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AdmissionClosed,
    AnswerRequest,
    ClockSeen,
    CloseWorker,
    Command,
    Event,
    ForgetModel,
    ModelAdded,
    ModelReady,
    ModelRemoved,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    SendAction,
    TimerFired,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from controller.core.invariants import check_no_gpu_idles
from controller.core.policy import PolicyKind

MS = NS_PER_MS
NUM_STEPS = 1500
# What a worker may answer; the rest, which contradict the controller's books, come more rarely.
ORDINARY_ERRORS = [ActionError.TOO_LATE] * 6 + [ActionError.DEVICE, ActionError.BAD_INPUT]
ERRORS = [error for error in ActionError if error is not ActionError.NONE]


@dataclass(slots=True)
class Device:
    """What a worker has and does, by what it was told and by what it answered."""

    num_free_pages: int
    profiles: dict[ModelId, ModelReady] = field(default_factory=dict)
    resident: set[ModelId] = field(default_factory=set)
    loading: dict[ModelId, ActionId] = field(default_factory=dict)
    actions: dict[ActionId, SendAction] = field(default_factory=dict)
    draining: bool = False


class Chaos:
    """One random life of a scheduler.

    Chance decides when an action ends and how, which models and workers come and go, and what is
    cancelled.
    """

    def __init__(self, seed: int, policy: str, kind: PolicyKind | None = None) -> None:
        self.random = random.Random(seed)
        self.scheduler = Scheduler(
            SchedulerConfig(
                policy=policy,
                batch_slo_ns=self.random.choice([100 * MS, 10_000 * MS]),
                dispatch_delay_ns=self.random.choice([0, MS // 2]),
                margin_ns=self.random.choice([0, 5 * MS]),
                max_outstanding=self.random.choice([2, 8]),
                fill_free_pages=self.random.random() < 0.5,
                action_timeout_ns=self.random.choice([50, 5000]) * MS,
            ),
            kind,
        )
        self.now_ns = 0
        self.devices: dict[WorkerId, Device] = {}
        self.models: dict[ModelId, ModelReady] = {}
        self.deadlines_ns: dict[RequestId, int] = {}
        #: Answered, refused or cancelled.
        self.closed: set[RequestId] = set()
        self.num_answers = 0
        self._num_workers = 0
        self._num_models = 0

    def run(self) -> None:
        for _ in range(2):
            self.join()
        for _ in range(4):
            self.add_model()
        for _ in range(NUM_STEPS):
            self.step()
        self.tell(AdmissionClosed())
        while True:
            busy = [worker_id for worker_id, device in self.devices.items() if device.actions]
            if busy:
                self.finish(self.random.choice(busy), honest=True)
            wakeup_ns = self.scheduler.next_wakeup_ns()
            if wakeup_ns is not None:
                self.now_ns = max(self.now_ns, wakeup_ns)
                self.tell(TimerFired())
            elif not busy:
                break
        assert self.closed == self.deadlines_ns.keys(), "a request without a response"
        assert self.scheduler.num_open_requests == 0

    def step(self) -> None:
        if self.random.random() < 0.6:
            self.advance(int(self.random.expovariate(1) * self.random.choice([0.05, 0.5, 3]) * MS))
        (kind,) = self.random.choices(
            [
                self.arrive,
                self.finish_any,
                self.cancel,
                self.join,
                self.lose,
                self.drain,
                self.add_model,
                self.remove_model,
                self.make_ready,
                self.look_at_clock,
            ],
            [400, 420, 80, 15, 3, 4, 18, 5, 20, 10],
        )
        kind()

    def advance(self, time_ns: int) -> None:
        until_ns = self.now_ns + time_ns
        while (wakeup_ns := self.scheduler.next_wakeup_ns()) is not None and wakeup_ns <= until_ns:
            self.now_ns = max(self.now_ns, wakeup_ns)
            self.tell(TimerFired())
            following_ns = self.scheduler.next_wakeup_ns()
            assert following_ns is None or following_ns > self.now_ns, "the timer fires in vain"
        self.now_ns = until_ns

    # --- what happens ---------------------------------------------------------------------------

    def arrive(self) -> None:
        if self.random.random() < 0.8:
            self.tell(self.request())
        else:
            count = self.random.randint(2, 9)
            self.tell(RequestsArrived(requests=tuple(self.request() for _ in range(count))))

    def request(self) -> RequestArrived:
        request = RequestArrived(
            request_id=RequestId(len(self.deadlines_ns) + 1),
            model_id=self.random.choice([*self.models, ModelId("unknown")]),
            rows=self.random.choice([1, 1, 1, 2, 3, 5]),
            arrival_ns=max(0, self.now_ns - self.random.choice([0, 0, MS // 10, 3 * MS])),
            slo_ns=self.random.choice([5, 20, 50, 100, 400, 3000]) * MS,
        )
        self.deadlines_ns[request.request_id] = request.arrival_ns + request.slo_ns
        return request

    def cancel(self) -> None:
        if open_ids := [request for request in self.deadlines_ns if request not in self.closed]:
            request_id = self.random.choice(open_ids)
            self.closed.add(request_id)
            self.tell(RequestCancelled(request_id=request_id))

    def join(self) -> None:
        if len(self.devices) == 4:
            return
        self._num_workers += 1
        worker_id, num_pages = WorkerId(f"w{self._num_workers}"), self.random.randint(4, 16)
        self.devices[worker_id] = Device(num_pages)
        # One kind: load priorities are computed from the first worker's estimates.
        self.tell(WorkerJoined(worker_id=worker_id, gpu_kind=GpuKind("k"), num_pages=num_pages))

    def lose(self) -> None:
        if self.devices:
            worker_id = self.random.choice(list(self.devices))
            del self.devices[worker_id]
            self.tell(WorkerLost(worker_id=worker_id))

    def look_at_clock(self) -> None:
        if self.devices:
            worker_id = self.random.choice(list(self.devices))
            clock_mhz = self.random.choice([1000, 1400, 1400, 1400])
            self.tell(ClockSeen(worker_id=worker_id, clock_mhz=clock_mhz))

    def drain(self) -> None:
        if self.devices:
            worker_id = self.random.choice(list(self.devices))
            self.devices[worker_id].draining = True
            self.tell(WorkerDraining(worker_id=worker_id))

    def add_model(self) -> None:
        if len(self.models) == 10:
            return
        self._num_models += 1
        model_id = ModelId(f"m{self._num_models}")
        number = self.random.randint(0, 4)
        sizes = [(1,), (1, 2, 4), (1, 2, 4, 8), (4,), (1, 3)][number]
        self.models[model_id] = ModelReady(
            worker_id=WorkerId(""),
            model_id=model_id,
            architecture_id=ArchitectureId(f"a{number}"),
            num_pages=1 + number % 4,
            load_ns=(1 + 3 * number) * MS,
            exec_ns={size: (1 + number) * (1 + size) * MS // 4 for size in sizes},
        )
        self.tell(ModelAdded(model_id=model_id))

    def remove_model(self) -> None:
        if self.models:
            model_id = self.random.choice(list(self.models))
            del self.models[model_id]
            self.tell(ModelRemoved(model_id=model_id))

    def make_ready(self) -> None:
        for worker_id, device in list(self.devices.items()):
            for model_id, model in self.models.items():
                if model_id not in device.profiles and not device.draining:
                    device.profiles[model_id] = model
                    self.tell(
                        ModelReady(
                            worker_id=worker_id,
                            model_id=model_id,
                            architecture_id=model.architecture_id,
                            num_pages=model.num_pages,
                            load_ns=model.load_ns,
                            exec_ns=model.exec_ns,
                        )
                    )
                    return

    def finish_any(self) -> None:
        busy = [worker_id for worker_id, device in self.devices.items() if device.actions]
        if busy:
            self.finish(self.random.choice(busy), honest=False)

    def finish(self, worker_id: WorkerId, *, honest: bool) -> None:
        """One action of the worker ends; unless `honest` any one, in any way."""
        device = self.devices[worker_id]
        action_id = next(iter(device.actions))
        if not honest and self.random.random() < 0.2:
            action_id = self.random.choice(list(device.actions))
        action = device.actions[action_id].action
        if isinstance(action, Infer) and self.random.random() < 0.7:  # mostly behind its load
            action_id = device.loading.get(action.model_id, action_id)
        command = device.actions.pop(action_id)
        action = command.action
        assert not isinstance(action, EvictWeights)
        error = ActionError.NONE
        if not honest and self.random.random() < 0.15:
            error = self.random.choice(ORDINARY_ERRORS)
            if self.random.random() < 0.03:
                error = self.random.choice(ERRORS)
        if isinstance(action, LoadWeights):
            del device.loading[action.model_id]
            if error is ActionError.NONE:
                device.resident.add(action.model_id)
            else:
                device.num_free_pages += device.profiles[action.model_id].num_pages
        elif action.model_id in device.loading:
            error = ActionError.TOO_LATE
        elif action.model_id not in device.resident:
            error = ActionError.NOT_RESIDENT
        if error is not ActionError.NONE:
            self.tell(ActionFailed(worker_id=worker_id, action_id=action_id, error=error))
            return
        end_ns = self.now_ns - self.random.randint(0, MS // 5)
        profile = device.profiles[action.model_id]
        duration_ns = profile.load_ns
        if isinstance(action, Infer):
            duration_ns = profile.exec_ns[action.batch_size]
        # No more than that: a larger batch is expected to take longer (clockwork.py).
        scale = self.random.choice([0.8, 1, 1, 1.2])
        self.tell(
            ActionSucceeded(
                worker_id=worker_id,
                action_id=action_id,
                begin_ns=min(command.expected_begin_ns, end_ns),
                end_ns=end_ns,
                duration_ns=int(duration_ns * scale),
            )
        )

    # --- what comes of it -----------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        for command in self.scheduler.handle(event, now_ns=self.now_ns):
            self.take(command)
        check_no_gpu_idles(self.scheduler, self.now_ns)

    def take(self, command: Command) -> None:
        match command:
            case SendAction():
                self.take_action(command, self.devices[command.worker_id])
            case AnswerRequest() | RefuseRequest():
                assert command.request_id not in self.closed, "a second response"
                self.closed.add(command.request_id)
                if isinstance(command, AnswerRequest):
                    assert self.now_ns <= self.deadlines_ns[command.request_id]
                    self.num_answers += 1
            case ForgetModel():
                device = self.devices[command.worker_id]
                assert command.model_id not in device.resident
                models = [sent.action.model_id for sent in device.actions.values()]
                assert command.model_id not in models, "forgotten while in use"
                device.profiles.pop(command.model_id, None)
            case CloseWorker():
                device = self.devices.pop(command.worker_id)
                assert command.reason or not device.actions, "told to leave while at work"

    def take_action(self, command: SendAction, device: Device) -> None:
        action = command.action
        num_pages = device.profiles[action.model_id].num_pages
        if isinstance(action, EvictWeights):
            device.resident.remove(action.model_id)
            device.num_free_pages += num_pages
            return
        assert not device.draining
        assert self.now_ns <= action.earliest_ns <= command.expected_begin_ns <= action.latest_ns
        if isinstance(action, LoadWeights):
            assert action.model_id not in device.resident
            assert action.model_id not in device.loading
            device.num_free_pages -= num_pages
            assert device.num_free_pages >= 0
            device.loading[action.model_id] = action.action_id
        else:
            assert action.model_id in device.resident or action.model_id in device.loading
            assert sum(action.rows) <= action.batch_size
            assert len(action.rows) == len(command.request_ids)
            assert self.closed.isdisjoint(command.request_ids)
        device.actions[action.action_id] = command
