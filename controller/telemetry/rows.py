"""The rows of telemetry: one of a request that is over, one of an action.

Apart from the tables, which mypyc compiles (`make native`): it takes none of msgspec's records. The garbage collector
leaves these alone, however many there are.
"""

from __future__ import annotations

import msgspec

from clockwright.units import ActionId, ModelId, RequestId, WorkerId
from clockwright.wire.actions import StepTime


class RequestRow(msgspec.Struct, gc=False, array_like=True):
    """One request, complete once it was answered, refused or cancelled."""

    #: The controller's number of the request; `clockwright explain` takes it.
    request_id: RequestId
    #: The model of the request.
    model_id: ModelId
    #: Rows of the request: its share of a batch.
    rows: int
    #: When its first byte arrived, or shortly before: a lower bound.
    arrival_ns: int
    #: Latency objective; the deadline is `arrival_ns + slo_ns`.
    slo_ns: int
    #: The tenant of the request; empty: no tenant.
    tenant: str = ""
    #: When the answer or refusal was given to the front.
    departure_ns: int = 0
    #: "OK", "CANCELLED" or the name of a `Refusal`.
    outcome: str = ""
    #: Predictions when the scheduler refused it, as in `RefuseRequest`; 0 for all other requests.
    load_ns: int = 0
    exec_ns: int = 0
    queue_ns: int = 0
    margin_ns: int = 0
    #: The weights were not resident on arrival. This and the columns below are set for answered requests only.
    cold: bool = False
    #: The worker that answered it.
    worker_id: WorkerId | None = None
    #: The Infer that answered it.
    action_id: ActionId | None = None
    #: Compiled size of its batch.
    batch_size: int = 0
    #: Departure as predicted when the Infer was sent.
    expected_departure_ns: int = 0
    #: When it was decided that it would be answered or refused, if its client asked for that
    #: (`decide_within_ms`); 0: it did not.
    decided_ns: int = 0
    #: What its client said that an answer is worth (`weight`).
    weight: float = 1.0


class ActionRow(msgspec.Struct, gc=False, array_like=True):
    """One action, complete once its result arrived or its worker was lost."""

    #: The controller's number of the action.
    action_id: ActionId
    #: "LoadWeights", "Infer" or "EvictWeights".
    type: str
    #: The worker of the action.
    worker_id: WorkerId
    #: The model of the action.
    model_id: ModelId
    #: Infer only: compiled batch size, rows in the batch, and number of requests.
    batch_size: int = 0
    rows: int = 0
    num_requests: int = 0
    #: When it was given to the worker's link.
    sent_ns: int = 0
    #: The window; none for EvictWeights.
    earliest_ns: int | None = None
    latest_ns: int | None = None
    #: As predicted when sent.
    expected_begin_ns: int = 0
    expected_duration_ns: int = 0
    #: When the worker received it, and when the controller received the result.
    received_ns: int = 0
    result_ns: int = 0
    #: "NONE", the name of an `ActionError`, or "WORKER_LOST".
    error: str = ""
    #: None: the step was not reached. `begin_ns` and `end_ns` are the worker's times on the controller's clock;
    #: `duration_ns` is how long the device was busy.
    load: StepTime | None = None
    input: StepTime | None = None
    exec: StepTime | None = None
    output: StepTime | None = None
