"""Events that the scheduler is told, and commands that it gives.

Events are past tense, commands imperative. All times are `int` nanoseconds on the controller's
monotonic clock. Slotted, not frozen: one or more of these is built per request (0.27 us against 0.6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clockwright.errors import Refusal
from clockwright.units import ActionId, ArchitectureId, GpuKind, ModelId, RequestId, WorkerId
from clockwright.wire.actions import Action, ActionError

# --- events -----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class WorkerJoined:
    """A worker registered: one GPU without models yet.

    Its weights cache is empty but for models of which `ModelReady` says that they are resident. It says so of
    all of them before the scheduler hears of any other model there.
    """

    worker_id: WorkerId
    gpu_kind: GpuKind
    num_pages: int


@dataclass(slots=True, kw_only=True)
class ClockSeen:
    """A worker has looked at its GPU's clock, whether it has changed or not."""

    worker_id: WorkerId
    clock_mhz: int


@dataclass(slots=True, kw_only=True)
class WorkerDraining:
    """Send the worker nothing new; `CloseWorker` follows when all it has is answered."""

    worker_id: WorkerId


@dataclass(slots=True, kw_only=True)
class WorkerLost:
    """The worker vanished; whatever it had will not be answered by it."""

    worker_id: WorkerId


@dataclass(slots=True, kw_only=True)
class LearnedTimes:
    """How long the actions of one architecture took last on one kind of GPU at one clock, the oldest first."""

    gpu_kind: GpuKind
    clock_mhz: int
    architecture_id: ArchitectureId
    #: LoadWeights, which is what a cold model waits for.
    load_ns: Sequence[int]
    #: EXEC by compiled batch size, ascending.
    exec_ns: Mapping[int, Sequence[int]]


@dataclass(slots=True, kw_only=True)
class LearnedLink:
    """A worker's link in each direction: its length, and its time per byte. 0 where that does not matter."""

    worker_id: WorkerId
    out_length_ns: int
    out_ns_per_byte: float
    back_length_ns: int
    back_ns_per_byte: float


@dataclass(slots=True, kw_only=True)
class LearnedStart:
    """What was learned of a kind of worker: how many are wanted, and from when they were asked for until they were ready."""

    gpu_kind: GpuKind
    wanted: int
    #: Part of a second's work that one did per second; 0: that is not known.
    fullness: float = 0.0
    #: The latest last.
    starts_ns: Sequence[int] = ()
    #: How much more or less comes in each minute of an hour since time 0 than as a rule; empty: that is not known.
    season: Sequence[float] = ()


@dataclass(slots=True, kw_only=True)
class Recalled:
    """What an earlier controller had learned. Like a profile it counts as unconfirmed until something is measured.

    It holds for workers and models that come from now on. What was recalled earlier and not used is forgotten.
    """

    times: Sequence[LearnedTimes] = ()
    links: Sequence[LearnedLink] = ()
    starts: Sequence[LearnedStart] = ()


@dataclass(slots=True, kw_only=True)
class ModelAdded:
    """Requests for the model may arrive from now on.

    No id is ever given twice: what workers still do for a removed model, and are told to forget then,
    would be its successor's.
    """

    model_id: ModelId


@dataclass(slots=True, kw_only=True)
class ModelReady:
    """A worker has compiled and profiled a model and holds its weights in host memory."""

    worker_id: WorkerId
    model_id: ModelId
    architecture_id: ArchitectureId
    num_pages: int
    #: Seeds of the estimator, replaced by measurements as they come.
    load_ns: int
    exec_ns: Mapping[int, int]
    #: The clock that `exec_ns` was measured at; 0 where that is not known.
    clock_mhz: int = 0
    #: Size of one row's outputs; 0 where that is not known.
    output_row_bytes: int = 0
    #: The weights are in the worker's cache already, since an earlier controller.
    resident: bool = False


@dataclass(slots=True, kw_only=True)
class ModelRemoved:
    """No more requests; waiting ones are refused, running ones finish, then workers forget it."""

    model_id: ModelId


@dataclass(slots=True, kw_only=True)
class RequestArrived:
    """A client wants `rows` rows run together, answered by `arrival_ns + slo_ns`."""

    request_id: RequestId
    model_id: ModelId
    rows: int
    arrival_ns: int
    slo_ns: int
    #: The tenant, for fairness among those who share models. May be empty.
    tenant: str = ""
    #: Size of its inputs, which a worker's link has to carry; 0 where that is not known.
    num_bytes: int = 0
    #: What each row of an answer is worth, where that of a usual request is worth 1.
    weight: float = 1.0
    #: Time that the rest of its pipeline needs after this answer. The SLO leaves that time already.
    work_ahead_ns: int = 0


@dataclass(slots=True, kw_only=True)
class RequestsArrived:
    """Several requests that arrived together, so that they can run together.

    Dispatched one by one, the first would take the idle lane alone.
    """

    requests: tuple[RequestArrived, ...]


@dataclass(slots=True, kw_only=True)
class TurnedAway:
    """Requests were refused before they arrived, because `Scheduler.is_in_vain` said so: all like one, which has no number."""

    request: RequestArrived
    number: int


@dataclass(slots=True, kw_only=True)
class CertaintyAsked:
    """The client of a request that has just arrived wants to know within a time whether it will be answered.

    An event of its own, so that requests whose clients do not ask cost nothing.
    """

    request_id: RequestId
    #: The request is refused or promised this long after its arrival.
    within_ns: int


@dataclass(slots=True, kw_only=True)
class RequestCancelled:
    """The client left: forget the request, and give no response."""

    request_id: RequestId


@dataclass(slots=True, kw_only=True)
class ModelWanted:
    """A model is cold, and is about to be asked, or was not asked for that: load it, where nothing else wants the lane."""

    model_id: ModelId
    #: Until when it is tried again after each load that ends; 0: it is tried now, or not at all.
    until_ns: int = 0


@dataclass(slots=True, kw_only=True)
class ModelPinned:
    """An operator wants a model's weights to stay where they are, and to be somewhere; or no longer.

    No copy of a pinned model is evicted. Where it has none, one is loaded before anything else, if other pinned
    models and what runs leave the pages for it.
    """

    model_id: ModelId
    pinned: bool


@dataclass(slots=True, kw_only=True)
class ActionSucceeded:
    """A worker did what it was asked. Times are of the load or exec step."""

    worker_id: WorkerId
    action_id: ActionId
    begin_ns: int
    end_ns: int
    duration_ns: int
    #: As of `StepTime`: predictions do not count on it.
    spared_ns: int = 0
    #: When the worker had the action; None where that is not known.
    received_ns: int | None = None
    #: When the inputs of an Infer were in place; likewise.
    staged_ns: int | None = None
    #: How long the controller's process held the action back, and may have left its result unread, because it was
    #: busy. Neither is the link's doing.
    unsent_ns: int = 0
    unread_ns: int = 0


@dataclass(slots=True, kw_only=True)
class ActionFailed:
    """A worker refused an action or failed at it."""

    worker_id: WorkerId
    action_id: ActionId
    error: ActionError
    message: str = ""
    #: When the worker had the action; None where that is not known.
    received_ns: int | None = None
    #: When the lane was done with an Infer whose window had closed; likewise.
    turn_ns: int | None = None
    #: As of an action that succeeded.
    unsent_ns: int = 0


@dataclass(slots=True, kw_only=True)
class TenantsWeighed:
    """Tenants' shares of the GPUs are other ones from now on."""

    #: Tenant -> how many times the fair share of one that is named neither here nor in the settings.
    weights: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class AdmissionClosed:
    """The controller is shutting down: refuse what arrives, finish what is admitted."""


@dataclass(slots=True, kw_only=True)
class TimerFired:
    """The time that `next_wakeup_ns` named has come."""


Event = (
    Recalled
    | WorkerJoined
    | ClockSeen
    | WorkerDraining
    | WorkerLost
    | ModelAdded
    | ModelReady
    | ModelRemoved
    | RequestArrived
    | RequestsArrived
    | TurnedAway
    | CertaintyAsked
    | RequestCancelled
    | ModelWanted
    | ModelPinned
    | ActionSucceeded
    | ActionFailed
    | TenantsWeighed
    | AdmissionClosed
    | TimerFired
)

# --- commands ---------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class SendAction:
    """Send an action to a worker. For an Infer, with the payloads of `request_ids` in order."""

    worker_id: WorkerId
    action: Action
    request_ids: tuple[RequestId, ...] = ()
    #: When the scheduler thinks the action will begin on the worker's lane.
    expected_begin_ns: int = 0


@dataclass(slots=True, kw_only=True)
class AnswerRequest:
    """Answer with rows `first_row` to `first_row + rows` of an Infer's outputs."""

    request_id: RequestId
    action_id: ActionId
    worker_id: WorkerId
    #: Index of the request in the action, which is its place in the payload.
    index: int
    batch_size: int
    #: No resident copy at arrival.
    cold: bool
    #: Predicted departure at the time the Infer was sent.
    expected_departure_ns: int


@dataclass(slots=True, kw_only=True)
class RefuseRequest:
    """Refuse with a reason; `message()` says it in words."""

    request_id: RequestId
    model_id: ModelId
    refusal: Refusal
    slo_ns: int
    #: Predicted at the time of refusal; zero where it does not apply.
    load_ns: int = 0
    exec_ns: int = 0
    queue_ns: int = 0
    #: Kept free for the answer's way back.
    margin_ns: int = 0
    #: Where the numbers do not say it: the engine's words, for example.
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class PromiseRequest:
    """A request that asks for certainty is promised while it waits: a lane has a place for it.

    One that is sent before it has to be decided has no such command: from then on it is as good as promised.
    """

    request_id: RequestId


@dataclass(slots=True, kw_only=True)
class WithdrawAction:
    """Take an action back from a worker that has not begun it.

    The action stays in the books until its result comes: `ActionError.WITHDRAWN` when it had not begun,
    else the outcome of its run.
    """

    worker_id: WorkerId
    action_id: ActionId


@dataclass(slots=True, kw_only=True)
class WriteOffAction:
    """Count an action as over: its result is lost, as a later one proves. Should it come after all, it is dropped."""

    worker_id: WorkerId
    action_id: ActionId


@dataclass(slots=True, kw_only=True)
class ForgetModel:
    """Tell a worker that it will get no more actions for a model."""

    worker_id: WorkerId
    model_id: ModelId


@dataclass(slots=True, kw_only=True)
class CloseWorker:
    """Let a worker go: drained, or its state can no longer be known (then `reason` is not empty).

    In the second case the scheduler has already forgotten it; no `WorkerLost` is needed.
    """

    worker_id: WorkerId
    reason: str = ""


Command = (
    SendAction
    | WithdrawAction
    | WriteOffAction
    | AnswerRequest
    | RefuseRequest
    | PromiseRequest
    | ForgetModel
    | CloseWorker
)
