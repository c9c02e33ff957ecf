"""A scheduler driven by hand: events go in through `handle`, and what comes out is compared."""

from __future__ import annotations

from clockwright.errors import Refusal
from clockwright.units import (
    NS_PER_MS,
    ActionId,
    ArchitectureId,
    GpuKind,
    ModelId,
    RequestId,
    WorkerId,
)
from clockwright.wire.actions import ActionError, EvictWeights, Infer, LoadWeights
from controller.core import Scheduler, SchedulerConfig
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AnswerRequest,
    Command,
    Event,
    ModelAdded,
    ModelReady,
    RefuseRequest,
    RequestArrived,
    SendAction,
    TimerFired,
    WorkerJoined,
)
from controller.core.policy import PolicyKind

MS = NS_PER_MS
A, B = ModelId("a"), ModelId("b")
GPU, GPU2 = WorkerId("gpu"), WorkerId("gpu2")
NO_DELAY = SchedulerConfig(policy="clockwork", dispatch_delay_ns=0, margin_ns=0)


class CoreBench:
    """A scheduler under test, its clock, and shorthands for what happens to it."""

    def __init__(
        self, config: SchedulerConfig = NO_DELAY, kind: PolicyKind | None = None, *, now_ns: int = 0
    ) -> None:
        self.scheduler = Scheduler(config, kind)
        self.now_ns = now_ns
        #: What the workers were told to do and have not answered, in order.
        self.in_flight: dict[ActionId, SendAction] = {}
        self.num_requests = 0

    def tell(self, event: Event, *, at_ms: float | None = None) -> list[Command]:
        if at_ms is not None:
            self.now_ns = int(at_ms * MS)
        if isinstance(event, ActionSucceeded | ActionFailed):
            self.in_flight.pop(event.action_id, None)
        commands = self.scheduler.handle(event, now_ns=self.now_ns)
        for command in sends(commands):
            if not isinstance(command.action, EvictWeights):
                self.in_flight[command.action.action_id] = command
        return commands

    def join(self, worker: WorkerId = GPU, *, pages: int = 10) -> None:
        self.tell(WorkerJoined(worker_id=worker, gpu_kind=GpuKind("k"), num_pages=pages))

    def ready(
        self,
        model: ModelId = A,
        worker: WorkerId = GPU,
        *,
        pages: int = 2,
        load_ms: float = 8,
        exec_ms: dict[int, float] | None = None,
        resident: bool = False,
    ) -> list[Command]:
        exec_ns = {b: int(ms * MS) for b, ms in (exec_ms or {1: 10, 2: 14, 4: 20}).items()}
        return self.tell(
            ModelReady(
                worker_id=worker,
                model_id=model,
                architecture_id=ArchitectureId(model),
                num_pages=pages,
                load_ns=int(load_ms * MS),
                exec_ns=exec_ns,
                resident=resident,
            )
        )

    def request(
        self,
        model: ModelId = A,
        *,
        slo_ms: float = 100,
        rows: int = 1,
        num_bytes: int = 0,
        at_ms: float | None = None,
    ) -> list[Command]:
        if at_ms is not None:
            self.now_ns = int(at_ms * MS)
        self.num_requests += 1
        return self.tell(
            RequestArrived(
                request_id=RequestId(self.num_requests),
                model_id=model,
                rows=rows,
                arrival_ns=self.now_ns,
                slo_ns=int(slo_ms * MS),
                num_bytes=num_bytes,
            )
        )

    @property
    def now_ms(self) -> float:
        return self.now_ns / MS

    def done(
        self,
        action: int,
        begin_ms: float,
        end_ms: float,
        worker: WorkerId = GPU,
        *,
        received_ms: float | None = None,
        spared_ms: float = 0,
    ) -> list[Command]:
        self.now_ns = max(self.now_ns, int(end_ms * MS))
        return self.tell(
            ActionSucceeded(
                worker_id=worker,
                action_id=ActionId(action),
                begin_ns=int(begin_ms * MS),
                end_ns=int(end_ms * MS),
                duration_ns=int((end_ms - begin_ms) * MS),
                spared_ns=int(spared_ms * MS),
                received_ns=None if received_ms is None else int(received_ms * MS),
            )
        )

    def failed(
        self,
        action: int,
        error: ActionError,
        received_ms: float | None = None,
        *,
        at_ms: float,
        turn_ms: float | None = None,
        worker: WorkerId = GPU,
    ) -> list[Command]:
        return self.tell(
            ActionFailed(
                worker_id=worker,
                action_id=ActionId(action),
                error=error,
                message="words",
                received_ns=None if received_ms is None else int(received_ms * MS),
                turn_ns=None if turn_ms is None else int(turn_ms * MS),
            ),
            at_ms=at_ms,
        )

    def warm(
        self, model: ModelId = A, *, run_ms: float = 10, **ready: float | dict[int, float]
    ) -> None:
        """Bring a model onto GPU: request, load, infer of `run_ms`, all done at 1 s."""
        self.tell(ModelAdded(model_id=model))
        self.ready(model, **ready)  # type: ignore[arg-type]
        (load, *_rest) = actions(self.request(model, slo_ms=10_000))
        assert isinstance(load, LoadWeights)
        commands = self.done(load.action_id, 0, 8)
        (infer,) = actions(commands) or _rest
        self.done(infer.action_id, 1000 - run_ms, 1000)
        self.wait(self.now_ns)

    def wait(self, until_ns: int) -> list[SendAction]:
        """Let timers fire until then."""
        sent: list[SendAction] = []
        while (wakeup_ns := self.scheduler.next_wakeup_ns()) is not None and wakeup_ns <= until_ns:
            self.now_ns = max(self.now_ns, wakeup_ns)
            sent += sends(self.tell(TimerFired()))
        self.now_ns = max(self.now_ns, until_ns)
        return sent

    def finish(self, command: SendAction) -> list[SendAction]:
        """An action ends just when it was predicted to; timers fire meanwhile."""
        action = command.action
        assert not isinstance(action, EvictWeights)
        end_ns = command.expected_begin_ns + action.expected_duration_ns
        begun = self.wait(end_ns)
        succeeded = ActionSucceeded(
            worker_id=command.worker_id,
            action_id=action.action_id,
            begin_ns=command.expected_begin_ns,
            end_ns=end_ns,
            duration_ns=action.expected_duration_ns,
        )
        return begun + sends(self.tell(succeeded))


def actions(commands: list[Command]) -> list[LoadWeights | EvictWeights | Infer]:
    return [command.action for command in commands if isinstance(command, SendAction)]


def sends(commands: list[Command]) -> list[SendAction]:
    return [command for command in commands if isinstance(command, SendAction)]


def infers(commands: list[Command]) -> list[SendAction]:
    return [command for command in sends(commands) if isinstance(command.action, Infer)]


def loads(commands: list[Command]) -> list[tuple[WorkerId, ModelId]]:
    return [
        (command.worker_id, command.action.model_id)
        for command in commands
        if isinstance(command, SendAction) and isinstance(command.action, LoadWeights)
    ]


def refusals(commands: list[Command]) -> list[tuple[int, Refusal]]:
    return [
        (command.request_id, command.refusal)
        for command in commands
        if isinstance(command, RefuseRequest)
    ]


def answers(commands: list[Command]) -> list[int]:
    return [command.request_id for command in commands if isinstance(command, AnswerRequest)]
