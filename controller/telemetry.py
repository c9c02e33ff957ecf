"""What happened: two append-only tables, a row per request and a row per action.

Every figure, live or simulated, is computed from these rows. All times are nanoseconds on the
controller's monotonic clock unless a column says otherwise; its zero is arbitrary, so only
differences mean anything outside the process.

The tables keep the last rows in memory; `controller.telemetry_writer` has them written to a folder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from clockwright.actions import StepTime
from clockwright.errors import Denial, Refusal
from clockwright.units import ActionId, ModelId, RequestId, WorkerId

#: Rows kept per table. About 100 MB when both are full.
CAPACITY = 200_000

#: Whoever looks for one row looks through so many.
NUM_SOUGHT = 20_000

# Records that are counted in one go, a third of a millisecond's work.
_COUNTED_TOGETHER: Final = 256

OK = "OK"
CANCELLED = "CANCELLED"


@dataclass(slots=True)
class RequestRow:
    """One request, complete once it was answered, refused or cancelled."""

    #: The controller's number of the request, which `clockwright explain` takes.
    request_id: RequestId
    #: The model that was asked.
    model_id: ModelId
    #: Rows of the request, that is its share of a batch.
    rows: int
    #: When its first bytes came, or a little before (controller/front/turns.py).
    arrival_ns: int
    #: Latency objective; the deadline is `arrival_ns + slo_ns`.
    slo_ns: int
    #: Who asked; empty: nobody in particular.
    tenant: str = ""
    #: When the answer or refusal was handed to the front end.
    departure_ns: int = 0
    #: "OK", "CANCELLED" or the name of a `Refusal`.
    outcome: str = ""
    #: What was predicted when the scheduler refused it, as in `RefuseRequest`; 0 for all others.
    load_ns: int = 0
    exec_ns: int = 0
    queue_ns: int = 0
    margin_ns: int = 0
    #: No resident copy at arrival. Known for answered requests only, like all that follows.
    cold: bool = False
    #: The worker that answered it.
    worker_id: WorkerId | None = None
    #: The Infer that answered it.
    action_id: ActionId | None = None
    #: Compiled size of its batch.
    batch_size: int = 0
    #: Departure as predicted when the Infer was sent.
    expected_departure_ns: int = 0


@dataclass(slots=True)
class ActionRow:
    """One action, complete once its result arrived or its worker was lost."""

    #: The controller's number of the action.
    action_id: ActionId
    #: "LoadWeights", "Infer" or "EvictWeights".
    type: str
    #: Who was to do it.
    worker_id: WorkerId
    #: The model that it is about.
    model_id: ModelId
    #: Infer only: compiled batch size, rows in it, and requests they came from.
    batch_size: int = 0
    rows: int = 0
    num_requests: int = 0
    #: When it was handed to the worker's link.
    sent_ns: int = 0
    #: The window; none for EvictWeights.
    earliest_ns: int | None = None
    latest_ns: int | None = None
    #: As predicted when sent.
    expected_begin_ns: int = 0
    expected_duration_ns: int = 0
    #: When the worker had it in hand, and when the controller had the result.
    received_ns: int = 0
    result_ns: int = 0
    #: "NONE", the name of an `ActionError`, or "WORKER_LOST".
    error: str = ""
    #: Steps that were not reached are None. `begin_ns` and `end_ns` by the worker's wall clock,
    #: translated; `duration_ns` is how long the device itself was busy.
    load: StepTime | None = None
    input: StepTime | None = None
    exec: StepTime | None = None
    output: StepTime | None = None


#: The values of a `RequestRow`, in its order. A tuple is made in a tenth of the time.
RequestRecord = tuple[
    RequestId,
    ModelId,
    int,
    int,
    int,
    str,
    int,
    str,
    int,
    int,
    int,
    int,
    bool,
    WorkerId | None,
    ActionId | None,
    int,
    int,
]

#: The values of an `ActionRow`, in its order.
ActionRecord = tuple[
    ActionId,
    str,
    WorkerId,
    ModelId,
    int,
    int,
    int,
    int,
    int | None,
    int | None,
    int,
    int,
    int,
    int,
    str,
    StepTime | None,
    StepTime | None,
    StepTime | None,
    StepTime | None,
]


@dataclass(slots=True)
class Counts:
    """What became of requests since start: those to one model, or all."""

    #: Requests that were answered in time.
    answered: int = 0
    #: Those of them whose model was not resident when they arrived.
    cold_starts: int = 0
    #: All others, by "CANCELLED" or the name of a `Refusal`.
    unanswered: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        """All of them."""
        return self.answered + self.unanswered.total()

    @property
    def cancelled(self) -> int:
        """Those that nobody waited for any more."""
        return self.unanswered[CANCELLED]

    @property
    def refusals(self) -> Counter[str]:
        """Those that were refused, by the name of a `Refusal`."""
        refusals = Counter(self.unanswered)
        del refusals[CANCELLED]
        return refusals

    def add(self, outcome: str, *, cold: bool) -> None:
        """Count a request that is over."""
        if outcome == OK:
            self.answered += 1
            self.cold_starts += cold
        else:
            self.unanswered[outcome] += 1


class Telemetry:
    """The last rows of both tables, and totals."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._requests: deque[RequestRecord] = deque(maxlen=capacity)
        self._actions: deque[ActionRecord] = deque(maxlen=capacity)
        self.total = Counts()
        #: Calls that somebody may not make.
        self.denials: Counter[Denial] = Counter()
        #: Requests that were refused before enough of them was known for a row.
        self.at_door: Counter[str] = Counter()
        #: Totals of every model there is; `add_model` and `remove_model` say which those are.
        self.by_model: dict[ModelId, Counts] = {}
        self._write_request: Callable[[RequestRow], None] | None = None
        self._write_action: Callable[[ActionRow], None] | None = None
        self._take: Callable[[Sequence[RequestRecord], Sequence[ActionRecord]], None] | None = None
        self._forget: Callable[[ModelId], None] | None = None
        self._uncounted_requests: list[RequestRecord] = []
        self._uncounted_actions: list[ActionRecord] = []

    @property
    def requests(self) -> list[RequestRow]:
        """The last requests, in order of departure."""
        return [RequestRow(*record) for record in self._requests]

    @property
    def actions(self) -> list[ActionRow]:
        """The last actions, in order of completion."""
        return [ActionRow(*record) for record in self._actions]

    def find_request(self, request_id: RequestId) -> RequestRow | None:
        """Find a request among the last that are over."""
        for record in islice(reversed(self._requests), NUM_SOUGHT):
            if record[0] == request_id:
                return RequestRow(*record)
        return None

    def find_action(self, action_id: ActionId) -> ActionRow | None:
        """Find an action among the last that are over."""
        for record in islice(reversed(self._actions), NUM_SOUGHT):
            if record[0] == action_id:
                return ActionRow(*record)
        return None

    def find_load(self, model_id: ModelId, worker_id: WorkerId, until_ns: int) -> ActionRow | None:
        """Find the last load of a model by a worker that was over at a time, among the last actions."""
        for record in islice(reversed(self._actions), NUM_SOUGHT):
            is_load = record[15] is not None and record[13] <= until_ns
            if is_load and record[2] == worker_id and record[3] == model_id:
                return ActionRow(*record)
        return None

    def requests_since(self, since_ns: int, num_max: int) -> list[RequestRecord]:
        """The newest records of requests that departed at or after a time, newest first."""
        return _newest(self._requests, 6, since_ns, num_max)

    def actions_since(self, since_ns: int, num_max: int) -> list[ActionRecord]:
        """The newest records of actions whose result came at or after a time, newest first."""
        return _newest(self._actions, 13, since_ns, num_max)

    def add_request(self, record: RequestRecord) -> None:
        """Take in a request that is over."""
        self._requests.append(record)
        outcome, cold = record[7], record[12]
        total, counts = self.total, self.by_model.get(record[1])
        if outcome == OK and not cold and counts is not None:
            # As `Counts.add` does, which counts nearly nothing else.
            total.answered += 1
            counts.answered += 1
        else:
            total.add(outcome, cold=cold)
            if counts is not None:
                counts.add(outcome, cold=cold)
        if self._write_request is not None:
            self._write_request(RequestRow(*record))
        if self._take is not None:
            self._uncounted_requests.append(record)
            if len(self._uncounted_requests) >= _COUNTED_TOGETHER:
                self.count()

    def refused_at_door(self, refusal: Refusal, number: int = 1) -> None:
        """Count requests that the front refused before it knew enough of them for a row."""
        self.total.unanswered[refusal.value] += number
        self.at_door[refusal.value] += number

    def denied(self, denial: Denial) -> None:
        """Count a call that somebody may not make."""
        self.denials[denial] += 1

    def add_action(self, record: ActionRecord) -> None:
        """Take in an action that is over."""
        self._actions.append(record)
        if self._write_action is not None:
            self._write_action(ActionRow(*record))
        if self._take is not None:
            self._uncounted_actions.append(record)
            if len(self._uncounted_actions) >= _COUNTED_TOGETHER:
                self.count()

    def count_by(
        self,
        take: Callable[[Sequence[RequestRecord], Sequence[ActionRecord]], None],
        forget: Callable[[ModelId], None],
    ) -> None:
        """From now on have every record counted by somebody, some at a time.

        Args:
            take: counts requests, and actions that came after those of them which they answered.
            forget: hears of a model that is removed when all its records so far are counted.
        """
        self._take, self._forget = take, forget

    def count(self) -> None:
        """Have counted what was not counted yet."""
        if self._take is not None:
            self._take(self._uncounted_requests, self._uncounted_actions)
            self._uncounted_requests.clear()
            self._uncounted_actions.clear()

    def add_model(self, model_id: ModelId) -> None:
        """Count the requests of a model apart from now on."""
        self.by_model[model_id] = Counts()

    def remove_model(self, model_id: ModelId) -> None:
        """Forget the counts of a model. Rows that it still leaves are in the totals only."""
        self.by_model.pop(model_id, None)
        if self._forget is not None:
            self.count()
            self._forget(model_id)

    def clear(self) -> None:
        """Forget all rows; the totals stay."""
        self._requests.clear()
        self._actions.clear()

    def write_to(
        self, request: Callable[[RequestRow], None], action: Callable[[ActionRow], None]
    ) -> None:
        """From now on hand every row to one of two as well."""
        self._write_request, self._write_action = request, action


def _newest(records: deque[Any], column: int, since_ns: int, num_max: int) -> list[Any]:
    """Take records from the end while the time in a column, by which they are ordered, is not before `since_ns`."""
    found: list[Any] = list(islice(reversed(records), num_max))
    return found[: bisect_right(found, -since_ns, key=lambda record: -record[column])]
