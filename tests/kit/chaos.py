"""A scheduler against workers that do as they like: every event, every error, in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from clockwright.units import (
    NS_PER_MS,
    ActionId,
    ArchitectureId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from clockwright.wire.actions import ActionError, EvictWeights, Infer, LoadWeights, Result, StepTime
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    AdmissionClosed,
    AnswerRequest,
    ClockSeen,
    Command,
    Event,
    ModelAdded,
    ModelPinned,
    ModelReady,
    ModelRemoved,
    ModelWanted,
    PromiseRequest,
    RefuseRequest,
    RequestArrived,
    RequestsArrived,
    SendAction,
    WorkerDraining,
    WorkerJoined,
    WriteOffAction,
)
from controller.core.invariants import check_no_gpu_idles
from controller.core.policy import PolicyKind
from controller.ledger import Finished, Ledger, Sent

MS = NS_PER_MS
NUM_STEPS = 1500
# What a worker may answer; the rest, which contradict the controller's books, come more rarely.
ORDINARY_ERRORS = [ActionError.TOO_LATE] * 6 + [ActionError.DEVICE, ActionError.BAD_INPUT]
ERRORS = [error for error in ActionError if error is not ActionError.NONE]
FAULTS = ["", "", "", "runs fail", "loads fail", "silent"]
# Kinds of GPU, and how many times longer everything takes there. Load priorities are computed from the fastest.
PACE = {"k": 1, "old": 2}


@dataclass(slots=True)
class Device:
    """What a worker has and does, by what it was told and by what it answered."""

    worker_id: WorkerId
    num_free_pages: int
    gpu_kind: GpuKind
    profiles: dict[ModelId, ModelReady] = field(default_factory=dict)
    resident: set[ModelId] = field(default_factory=set)
    loading: dict[ModelId, ActionId] = field(default_factory=dict)
    actions: dict[ActionId, SendAction] = field(default_factory=dict)
    #: Those of the actions that it was told to drop.
    withdrawn: set[ActionId] = field(default_factory=set)
    draining: bool = False
    #: What it does wrong always, until it is mended: one of `FAULTS`.
    fault: str = ""


class Counting(Scheduler):
    """A scheduler whose commands are counted, and whose workers never answer what it writes off."""

    num_commands = 0

    def __init__(
        self, config: SchedulerConfig, kind: PolicyKind | None, devices: dict[WorkerId, Device]
    ) -> None:
        super().__init__(config, kind)
        self._devices = devices

    @override
    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        commands = super().handle(event, now_ns=now_ns)
        # The ledger notes a promise and a loss, and tells no other.
        for command in commands:
            if isinstance(command, WriteOffAction):
                device = self._devices[command.worker_id]
                del device.actions[command.action_id]
                device.withdrawn.discard(command.action_id)
            elif not isinstance(command, PromiseRequest):
                self.num_commands += 1
        return commands


class Chaos:
    """One random life of a scheduler.

    Chance decides when an action ends and how, which models and workers come and go, and what is
    cancelled.
    """

    def __init__(
        self,
        seed: int,
        policy: str,
        kind: PolicyKind | None = None,
        *,
        pins: bool = False,
        asks: bool = False,
    ) -> None:
        """`pins`: an operator pins models, and lets them go. `asks`: some clients ask for certainty."""
        self.pins, self.asks = pins, asks
        self.random = random.Random(seed)
        self.devices: dict[WorkerId, Device] = {}
        self.scheduler = Counting(
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
            self.devices,
        )
        self.now_ns = 0
        self.models: dict[ModelId, ModelReady] = {}
        self.num_answers = 0
        self._num_requests = 0
        self._num_workers = 0
        self._num_models = 0
        #: Commands that reached those they are for.
        self._num_carried_out = 0
        self.ledger: Ledger[Device, None] = Ledger(
            self.scheduler,
            clock=lambda: self.now_ns,
            telemetry=None,
            send=self.send,
            answer=self.answer,
            refuse=self.refuse,
            withdraw_action=self.withdraw_action,
            write_off=lambda _device, _sent: None,
            forget=self.forget,
            close=self.close,
            settled=self.settled,
            arm=lambda wakeup_ns: wakeup_ns,
        )

    def run(self) -> None:
        for _ in range(2):
            self.join()
        for _ in range(4):
            self.add_model()
        for _ in range(NUM_STEPS):
            self.step()
        # A policy that does not predict lets requests wait for as long as pins leave them no room.
        for model_id in self.models if self.pins else ():
            self.ledger.tell(ModelPinned(model_id=model_id, pinned=False))
        self.ledger.tell(AdmissionClosed())
        while True:
            busy = [worker_id for worker_id, device in self.devices.items() if device.actions]
            if busy:
                self.finish(self.random.choice(busy), honest=True)
            wakeup_ns = self.scheduler.next_wakeup_ns()
            if wakeup_ns is not None:
                self.advance(max(0, wakeup_ns - self.now_ns))
            elif not busy:
                break
        assert not self.ledger.requests, "a request without a response"
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
                self.break_or_mend,
                self.pin,
                self.want,
            ],
            [400, 420, 80, 15, 3, 4, 18, 5, 20, 10, 10, 15 * self.pins, 15],
        )
        kind()

    def advance(self, time_ns: int) -> None:
        until_ns = self.now_ns + time_ns
        while (due_ns := self.ledger.due_ns) is not None and due_ns <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.ledger.fire()
            following_ns = self.scheduler.next_wakeup_ns()
            assert following_ns is None or following_ns > self.now_ns, "the timer fires in vain"
        self.now_ns = until_ns

    # --- what happens ---------------------------------------------------------------------------

    def want(self) -> None:
        if self.models:
            until_ns = self.now_ns + self.random.choice([0, 5 * MS, 200 * MS])
            model_id = self.random.choice(sorted(self.models))
            self.ledger.tell(ModelWanted(model_id=model_id, until_ns=until_ns))

    def arrive(self) -> None:
        first = self._num_requests
        if self.random.random() < 0.8:
            self.ledger.tell(self.request())
        else:
            count = self.random.randint(2, 9)
            self.ledger.tell(RequestsArrived(requests=tuple(self.request() for _ in range(count))))
        for number in range(first + 1, self._num_requests + 1) if self.asks else ():
            if self.random.random() < 0.5:
                within_ns = self.random.choice([MS // 10, 2 * MS, 10 * MS, 200 * MS])
                self.ledger.decide(RequestId(number), within_ns)

    def request(self) -> RequestArrived:
        self._num_requests += 1
        request = RequestArrived(
            request_id=RequestId(self._num_requests),
            model_id=self.random.choice([*self.models, ModelId("unknown")]),
            rows=self.random.choice([1, 1, 1, 2, 3, 5]),
            arrival_ns=max(0, self.now_ns - self.random.choice([0, 0, MS // 10, 3 * MS])),
            slo_ns=self.random.choice([5, 20, 50, 100, 400, 3000]) * MS,
            weight=(1.0, 1.0, 0.001, 1.0, 4.0)[self._num_requests % 5],
            work_ahead_ns=20 * MS if self._num_requests % 4 == 3 else 0,
        )
        self.ledger.open(request, None)
        return request

    def cancel(self) -> None:
        if self.ledger.requests:
            self.ledger.withdraw(self.random.choice(list(self.ledger.requests)))

    def join(self) -> None:
        if len(self.devices) == 4:
            return
        self._num_workers += 1
        worker_id, num_pages = WorkerId(f"w{self._num_workers}"), self.random.randint(4, 16)
        kind = GpuKind(self.random.choice(list(PACE)))
        device = self.devices[worker_id] = Device(worker_id, num_pages, kind)
        self.ledger.join(
            device,
            WorkerJoined(worker_id=worker_id, gpu_kind=kind, num_pages=num_pages),
        )

    def lose(self) -> None:
        if self.devices:
            worker_id = self.random.choice(list(self.devices))
            del self.devices[worker_id]
            self.ledger.lose(worker_id)

    def break_or_mend(self) -> None:
        if self.devices:
            self.random.choice(list(self.devices.values())).fault = self.random.choice(FAULTS)

    def pin(self) -> None:
        if self.models:
            model_id = self.random.choice(list(self.models))
            pinned = self.random.random() < 0.7
            self.ledger.tell(ModelPinned(model_id=model_id, pinned=pinned))

    def look_at_clock(self) -> None:
        if self.devices:
            worker_id = self.random.choice(list(self.devices))
            clock_mhz = self.random.choice([1000, 1400, 1400, 1400])
            self.ledger.tell(ClockSeen(worker_id=worker_id, clock_mhz=clock_mhz))

    def drain(self) -> None:
        if self.devices:
            worker_id = self.random.choice(list(self.devices))
            self.devices[worker_id].draining = True
            self.ledger.tell(WorkerDraining(worker_id=worker_id))

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
        self.ledger.tell(ModelAdded(model_id=model_id))

    def remove_model(self) -> None:
        if self.models:
            model_id = self.random.choice(list(self.models))
            del self.models[model_id]
            self.ledger.tell(ModelRemoved(model_id=model_id))

    def make_ready(self) -> None:
        for worker_id, device in list(self.devices.items()):
            for model_id, model in self.models.items():
                if model_id not in device.profiles and not device.draining:
                    pace = PACE[device.gpu_kind]
                    model = replace(
                        model,
                        load_ns=model.load_ns * pace,
                        exec_ns={size: ns * pace for size, ns in model.exec_ns.items()},
                    )
                    device.profiles[model_id] = model
                    self.ledger.tell(
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
        busy = [
            worker_id
            for worker_id, device in self.devices.items()
            if device.actions and device.fault != "silent"
        ]
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
        if action_id in device.withdrawn:
            device.withdrawn.remove(action_id)
            if not honest and self.random.random() < 0.7:  # else it had begun
                error = ActionError.WITHDRAWN
        elif device.fault == ("runs fail" if isinstance(action, Infer) else "loads fail"):
            error = ActionError.DEVICE
        if isinstance(action, LoadWeights):
            del device.loading[action.model_id]
            if error is ActionError.NONE:
                device.resident.add(action.model_id)
            else:
                device.num_free_pages += device.profiles[action.model_id].num_pages
        elif error is ActionError.WITHDRAWN:
            pass
        elif action.model_id in device.loading:
            error = ActionError.TOO_LATE
        elif action.model_id not in device.resident:
            error = ActionError.NOT_RESIDENT
        if error is not ActionError.NONE:
            # True or not, and with errors that have none.
            turn_ns = (None, 0, self.now_ns, self.now_ns + 1000 * MS)[action_id % 4]
            result = Result(action_id=action_id, received_ns=0, error=error, turn_ns=turn_ns)
            self.ledger.finish(worker_id, result)
            return
        end_ns = self.now_ns - self.random.randint(0, MS // 5)
        profile = device.profiles[action.model_id]
        duration_ns = profile.load_ns
        if isinstance(action, Infer):
            duration_ns = profile.exec_ns[action.batch_size]
        # No more than that: a larger batch is expected to take longer (clockwork.py).
        scale = self.random.choice([0.8, 1, 1, 1.2])
        begin_ns = min(command.expected_begin_ns, end_ns)
        time = StepTime(begin_ns, end_ns, int(duration_ns * scale))
        result = Result(action_id=action_id, received_ns=0)
        if isinstance(action, Infer):
            result.exec = time
        else:
            result.load = time
        self.ledger.finish(worker_id, result)

    # --- what comes of it -----------------------------------------------------------------------

    def settled(self) -> None:
        # The ledger keeps silent about a second response, and about a command to a worker that is gone.
        assert self._num_carried_out == self.scheduler.num_commands, "a command for nobody"
        check_no_gpu_idles(self.scheduler, self.now_ns)

    def answer(
        self,
        request: RequestArrived,
        _kept: None,
        _command: AnswerRequest,
        _finished: Finished,
        now_ns: int,
        in_time: bool,
    ) -> None:
        self._num_carried_out += 1
        assert in_time, f"request {request.request_id} answered late at {now_ns} ns"
        self.num_answers += 1

    def refuse(
        self, _request: RequestArrived, _kept: None, _command: RefuseRequest, _now_ns: int
    ) -> None:
        self._num_carried_out += 1

    def withdraw_action(self, device: Device, action_id: ActionId) -> None:
        self._num_carried_out += 1
        assert action_id in device.actions, "withdrawn, and not under way"
        assert action_id not in device.withdrawn, "withdrawn twice"
        device.withdrawn.add(action_id)

    def forget(self, device: Device, model_id: ModelId) -> None:
        self._num_carried_out += 1
        assert model_id not in device.resident
        models = [command.action.model_id for command in device.actions.values()]
        assert model_id not in models, "forgotten while in use"
        device.profiles.pop(model_id, None)

    def close(self, device: Device, reason: str, _lost: Sequence[Sent]) -> None:
        self._num_carried_out += 1
        del self.devices[device.worker_id]
        assert reason or not device.actions, "told to leave while at work"

    def send(self, device: Device, sent: Sent) -> None:
        self._num_carried_out += 1
        command = sent.command
        action = command.action
        num_pages = device.profiles[action.model_id].num_pages
        if isinstance(action, EvictWeights):
            if device.loading.pop(action.model_id, None) is None:  # else the load was written off
                device.resident.remove(action.model_id)
            device.num_free_pages += num_pages
            # While the scheduler's other commands wait to be carried out.
            result = Result(action_id=action.action_id, received_ns=0)
            self.ledger.finish(device.worker_id, result)
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
            assert self.ledger.requests.keys() >= set(command.request_ids)
        device.actions[action.action_id] = command
