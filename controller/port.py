"""The port of a controller: one question, `Ask`, and one answer, `Told`, for all fronts.

A front in the controller's own process calls with these records; one elsewhere sends the same records in frames
(`controller.front.remote.link_frames`). Tensors travel separately: in a frame, a record says where each lies.

Behind the port a request passes stages (`PortStage`), each of which answers, refuses or passes on: quotas, then sequences,
streams or pipelines if it is to one, applications, the prediction cache, the runtime. A stage that has to hear how a request
ends gives itself as the sink of what it passes on.

A module apart from the runtime, because protocols that mypyc compiles (`make native`) accept compiled classes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from clockwright.errors import Refusal
from clockwright.units import (
    NAME_CHARS_MAX,
    SLO_NS_MAX,
    TIME_NS_MAX,
    WEIGHT_MAX,
    WEIGHT_MIN,
    ActionId,
    ModelId,
    RequestId,
)
from clockwright.wire.actions import Action
from clockwright.wire.bulk import Buffer
from clockwright.wire.frame_headers import APART

Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
Time = Annotated[int, Meta(gt=-TIME_NS_MAX, lt=TIME_NS_MAX)]
SloNs = Annotated[int, Meta(gt=0, le=SLO_NS_MAX)]
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Words = Annotated[str, Meta(max_length=1 << 16)]
#: Where a tensor lies, as in `clockwright.wire.frames`.
Place = Annotated[int, Meta(ge=APART, lt=1 << 62)]
#: Bounds of a quota of which one refusal tells more.
Bound = Literal["rate_rps", "slo_ns_min", "slo_ns_max"]
#: Figure of the refusal of a step: so many answers of its request were given before, so it does not begin again.
ANSWERS: Final = "answers"
#: What a response says in addition to its tensors.
Parameters = dict[str, bool | int | str]
#: What answers and refusals of steps say: how many steps of the sequence have counted, this one included if it did.
STEP: Final = "sequence_step"


class AskedStep(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Which step of which sequence a request is (`controller.stages.sequences`)."""

    #: What its client calls the sequence.
    sequence: int | Name
    #: It is the first, or the last.
    start: bool = False
    end: bool = False
    #: Outputs that are state are wanted in the answer too.
    wants_state: bool = False
    #: With `start`: steps will come this often; 0: the client does not say.
    every_ns: Annotated[int, Meta(ge=0, le=SLO_NS_MAX)] = 0

    def leaves(self, found: int, expected: int) -> bool:
        """Whether it only ends its sequence, because it has none of the inputs that steps have."""
        return self.end and not self.start and not found and expected > 0


class Streaming(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """How a request with several answers is to go on (`controller.stages.sequences.driven`)."""

    #: Each answer but the first is due so long after the one before.
    next_ns: SloNs
    #: Most answers.
    max_steps: Annotated[int, Meta(ge=1, lt=1 << 32)]
    #: How tokens are chosen, where the model generates: with 0 the most likely one; without a seed otherwise each time.
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    seed: Id | None = None


class Ask(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """One request to a model or an application."""

    #: Number of the description against which it was checked.
    target: Id
    #: Rows of each input.
    rows: Count
    #: When its first bytes came, on the clock of the process that holds the record.
    arrival_ns: Time
    #: The answer is due this long after the arrival.
    slo_ns: SloNs
    #: The tenant that it counts for; empty: no tenant.
    tenant: Name = ""
    #: What its client calls it; empty: it has no name.
    name: Name = ""
    #: User or session, for an application; may be empty.
    context: Name = ""
    #: The caller that may give feedback on an application's answer, or has the sequence; may be empty.
    owner: Words = ""
    #: The answer is to say where its time went, so the prediction cache is not looked into.
    explain: bool = False
    #: It is good to know where its time went, but no answer of the prediction cache is forgone for that.
    traced: bool = False
    #: It is to be refused or promised this long after its arrival; 0: its client does not ask for that.
    decide_within_ns: Annotated[int, Meta(ge=0, le=SLO_NS_MAX)] = 0
    #: What its answer is worth, where that to a usual request is worth 1.
    weight: Annotated[float, Meta(ge=WEIGHT_MIN, le=WEIGHT_MAX)] = 1.0
    #: Time that the rest of its pipeline needs after its answer; `slo_ns` leaves that time already.
    work_ahead_ns: Annotated[int, Meta(ge=0, le=SLO_NS_MAX)] = 0
    #: In a frame: the number by which the answer names it.
    ask_id: Id = 0
    #: In a frame: bytes of its inputs.
    lengths: tuple[Count, ...] = ()
    #: In a frame: where each lies in the front's memory; -1: in the payload, which holds those of all requests in
    #: their order; `APART`: the front keeps it. Empty: all are in the payload.
    places: tuple[Place, ...] = ()
    #: It is a step of a sequence; None: it stands alone.
    step: AskedStep | None = None
    #: Several answers are asked for; None: one.
    streaming: Streaming | None = None


class Course(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Where the time of an answered request went. Times without another word are since its arrival."""

    #: Parts that add up to the latency.
    queue_ns: int
    load_ns: int
    input_ns: int
    exec_ns: int
    output_ns: int
    network_ns: int
    #: When the load that it waited for ran, if its model was cold, and when its batch did.
    load_begin_ns: int
    load_end_ns: int
    exec_begin_ns: int
    exec_end_ns: int
    #: The latency: as it was, and as predicted when the batch was sent; and the EXEC's duration as predicted.
    latency_ns: int
    predicted_ns: int
    predicted_exec_ns: int
    batch_size: int
    worker: str
    cold: bool
    request_id: int
    action_id: int
    #: When it was promised, or sent, which is as good, if its client asked for certainty; 0: it did not.
    decided_ns: int = 0


class Answered(msgspec.Struct, array_like=True, tag=0, forbid_unknown_fields=True, gc=False):
    """A request is answered; its outputs come with this record, in the servable's order."""

    #: When this was predicted to happen, on the clock of the process that holds the record.
    expected_departure_ns: Time
    #: What an application says of its answer; None: nothing.
    parameters: Parameters | None = None
    #: Where its time went, if the request wants to know and a batch was run for it.
    course: Course | None = None
    ask_id: Id = 0
    #: In a frame: bytes of the outputs, and where they lie, as in `Ask`: in the memory of a worker.
    lengths: tuple[Count, ...] = ()
    places: tuple[Place, ...] = ()
    #: In a frame: a worker has sent them: its number, the action's, and the request's in the action.
    sent: tuple[Id, Id, Count] | None = None
    #: Others follow: the request stays open.
    more: bool = False


class Refused(msgspec.Struct, array_like=True, tag=1, forbid_unknown_fields=True, gc=False):
    """A request is not answered, for a reason that has a name."""

    refusal: Refusal
    #: What led to it, in ns unless the name says otherwise.
    figures: dict[str, int]
    #: What the figures do not say: the engine's words, for example.
    detail: str = ""
    #: Why, in words; empty: the figures say it (`controller.front.oip.refusals`).
    message: str = ""
    ask_id: Id = 0
    #: What its tenant may not have whatever comes: the bound of a quota, what it says, and, for a rate, until when.
    #: None: nothing.
    spent: tuple[Bound, Annotated[float, Meta(ge=0, le=1e18)], Time] | None = None


#: gRPC's NOT_FOUND, of a `Failed` that says that there is no such model, and INTERNAL, of one that is a bug's.
NOT_FOUND: Final = 5
INTERNAL: Final = 13


class Failed(msgspec.Struct, array_like=True, tag=2, forbid_unknown_fields=True):
    """A request is not answered, because something is wrong: the status that its client gets."""

    #: gRPC's number of it.
    code: Count
    text: str
    #: Trailing metadata; text in UTF-8.
    details: dict[str, bytes] = {}
    ask_id: Id = 0


class Stale(msgspec.Struct, array_like=True, tag=3, forbid_unknown_fields=True):
    """The description of the model or application has changed: the request is to begin again."""

    ask_id: Id = 0


Told = Answered | Refused | Failed | Stale


class Sink(Protocol):
    """Takes the answer to a request."""

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer], /) -> None:
        """Take the answer or the refusal: once, or never if the request is withdrawn. Must not raise or block.

        A request with several answers (`Ask.streaming`) is told each; the last one, or the refusal, has no `more`.

        It comes in a later turn of the event loop than the question. Only the outermost stage may refuse at once.

        Args:
            request_id: what asking it gave.
            told: the record, which is the sink's to change.
            outputs: tensor bytes per output of an answer, in the servable's order.
        """


S = TypeVar("S", contravariant=True)


class PortStage(Protocol[S]):
    """A part of a controller that takes requests to things of kind S."""

    def ask(self, subject: S, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        """Ask for an answer inside the SLO. The sink gets the answer, or the reason of its refusal.

        Inputs are bytes per tensor in the servable's order: kept, not copied, until the request is closed. Returns what
        `withdraw` takes.
        """

    def withdraw(self, request_id: RequestId) -> None:
        """Cancel a request: its sink is not called any more. Does nothing when the request is closed."""


class Link(Protocol):
    """The link to one worker. Its methods do not block or raise."""

    def send(self, action: Action, payload: Sequence[Buffer]) -> None:
        """Send an action at the next `flush`; `payload` is per request, per input tensor."""

    def flush(self, *, now: bool) -> None:
        """Have the actions leave: now, or with whatever else is sent in this turn of the event loop."""

    def look(self) -> None:
        """Take in what the worker has sent by now, without waiting for the event loop to say so."""

    def withdraw_action(self, action_id: ActionId) -> None:
        """Tell the worker to drop an action that it has not begun."""

    def write_off(self, action_id: ActionId) -> None:
        """Take in that the result of an action is lost. It may come after all."""

    def forget_model(self, model_id: ModelId) -> None:
        """Tell the worker to drop a model."""

    def close(self, reason: str) -> None:
        """Tell the worker to leave, and close."""
