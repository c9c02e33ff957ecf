"""Actions, which the controller sends to a worker, and results, which the worker sends back.

There are three actions: `LoadWeights`, `Infer`, `EvictWeights` (LOAD, INFER, UNLOAD in the paper). Times are
on the clock of the process that holds the value: the controller's in the controller and the simulator, the
worker's in a worker. Only the link between them translates.

These classes are built once or more per request, so they are slotted but not frozen: a frozen one takes
0.6 us to build, a slotted one 0.27 us. They are not changed after they are built.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from clockwright.units import ActionId, ModelId


@dataclass(slots=True, kw_only=True)
class LoadWeights:
    """Copy a model's weights into free pages of the weights cache."""

    action_id: ActionId
    model_id: ModelId
    earliest_ns: int
    latest_ns: int
    expected_duration_ns: int


@dataclass(slots=True, kw_only=True)
class EvictWeights:
    """Free the pages of a model's weights. Changes metadata only; always succeeds."""

    action_id: ActionId
    model_id: ModelId


@dataclass(slots=True, kw_only=True)
class Infer:
    """Run one batch of one resident model."""

    action_id: ActionId
    model_id: ModelId
    #: A compiled size. The rows of the requests sum to it, or to less when a request of several
    #: rows fits no smaller size; the rest of the batch is zeros.
    batch_size: int
    #: Number of rows of each request, in payload order.
    rows: tuple[int, ...]
    earliest_ns: int
    latest_ns: int
    expected_duration_ns: int


@dataclass(slots=True)
class FromFronts:
    """The tensors of an Infer that travel directly between its worker and fronts."""

    #: The number of the front that waits for outputs, for each request; 0: they go to the controller.
    fronts: tuple[int, ...]
    #: Bytes of the inputs that come from these fronts, by their number in the payload.
    awaited: dict[int, int]


Action = LoadWeights | EvictWeights | Infer


class ActionError(enum.IntEnum):
    """Why a worker refused or failed an action. The numbers are the wire's."""

    NONE = 0
    #: The window had passed. This is expected now and then, and not a fault.
    TOO_LATE = 1
    UNKNOWN_MODEL = 2
    NO_PAGES = 3
    ALREADY_RESIDENT = 4
    NOT_RESIDENT = 5
    #: Batch size, rows or payload do not fit the model.
    BAD_INPUT = 6
    #: The engine failed.
    DEVICE = 7
    #: The controller took the action back before it had begun.
    WITHDRAWN = 8


@dataclass(slots=True)
class StepTime:
    """Begin and end of a step, and the time that the device itself was busy with it."""

    begin_ns: int
    end_ns: int
    duration_ns: int
    #: How much longer it would have taken without work that the step before had already done, which the next
    #: step may have to do itself.
    spared_ns: int = 0


@dataclass(slots=True, kw_only=True)
class Result:
    """A worker's report on one action. Steps that were not reached are None."""

    action_id: ActionId
    error: ActionError = ActionError.NONE
    message: str = ""
    #: When the worker had received the action with all its inputs.
    received_ns: int = 0
    load: StepTime | None = None
    input: StepTime | None = None
    exec: StepTime | None = None
    output: StepTime | None = None
    #: When the lane was done with an Infer whose window had closed. Those behind it did not begin before, unless they
    #: overtook it.
    turn_ns: int | None = None
    #: By their places in the action, why requests failed while others of their batch did not. Their outputs say so.
    failed: dict[int, str] | None = None
