"""What happened: two append-only tables, a row per request and a row per action.

Every figure, live or simulated, is computed from these rows. All times are nanoseconds on the
controller's monotonic clock unless a column says otherwise; its zero is arbitrary, so only
differences mean anything outside the process.

The tables keep the last rows in memory; `controller.telemetry.writer` has them written to a folder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add, attrgetter
from typing import Final, TypeVar

from clockwright.errors import Denial, Refusal
from clockwright.units import ActionId, ModelId, RequestId, WorkerId
from controller.telemetry.long_runs import LongRuns, long_runs
from controller.telemetry.rows import ActionRow, RequestRow

R = TypeVar("R")

#: Rows kept per table. About 100 MB when both are full.
CAPACITY = 200_000

#: A search for one row covers this many of the latest.
NUM_SOUGHT = 20_000

# Records that are counted in one go, a third of a millisecond's work.
_COUNTED_TOGETHER: Final = 256

OK = "OK"
CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounter:
    """Something that is counted in requests answered in time, by model. Metrics, commands and the dashboard show it."""

    #: In messages and in code; people read it with spaces.
    name: str
    metric: str
    unit: str
    help: str
    #: What one request adds.
    of: Callable[[RequestRow], int]


#: Sums over requests that were answered in time: another is one more entry here (what counts other requests is like
#: `bad_requests`). Its column of `RequestRow` is set in the ledger, if it is new. The pages
#: docs/metrics.md and docs/tutorial.md show it, and tests compare them.
COUNTERS: Final = (
    RequestCounter(
        name="cold_starts",
        metric="clockwright_cold_starts_total",
        unit="requests",
        help="Requests answered in time although no worker had the weights resident on arrival",
        of=attrgetter("cold"),
    ),
)


_SUMMED: Final = tuple((index, counter.of) for index, counter in enumerate(COUNTERS))


@dataclass(slots=True)
class Counts:
    """Outcomes of requests since start: those to one model, or all."""

    #: Requests that were answered in time.
    answered: int = 0
    #: Sums over them, in the order of `COUNTERS`.
    counters: list[int] = field(default_factory=lambda: [0] * len(COUNTERS))
    #: All others, by "CANCELLED" or the name of a `Refusal`.
    unanswered: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        """All of them."""
        return self.answered + self.unanswered.total()

    @property
    def cancelled(self) -> int:
        """Requests that their clients withdrew."""
        return self.unanswered[CANCELLED]

    @property
    def refusals(self) -> Counter[str]:
        """Those that were refused, by the name of a `Refusal`."""
        refusals = Counter(self.unanswered)
        del refusals[CANCELLED]
        return refusals

    def add(self, row: RequestRow) -> None:
        """Count a request that is over."""
        if row.outcome == OK:
            self.answered += 1
            for index, of in _SUMMED:
                self.counters[index] += of(row)
        else:
            self.unanswered[row.outcome] += 1

    def merge(self, other: Counts) -> None:
        """Add other counts to these."""
        self.answered += other.answered
        self.unanswered.update(other.unanswered)
        self.counters = list(map(add, self.counters, other.counters))

    def by_name(self) -> dict[str, int]:
        """The counters by name."""
        return {counter.name: value for counter, value in zip(COUNTERS, self.counters, strict=True)}


class Telemetry:
    """The last rows of both tables, and totals."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._requests: deque[RequestRow] = deque(maxlen=capacity)
        self._actions: deque[ActionRow] = deque(maxlen=capacity)
        self.total = Counts()
        #: Calls that their clients had no right to make.
        self.denials: Counter[Denial] = Counter()
        #: Requests that were malformed, or did not fit what they name.
        self.bad_requests = 0
        #: Requests that were refused before enough of them was known for a row.
        self.at_door: Counter[str] = Counter()
        #: Totals of every model there is; `add_model` and `remove_model` say which those are.
        self.by_model: dict[ModelId, Counts] = {}
        self._write_request: Callable[[RequestRow], None] | None = None
        self._write_action: Callable[[ActionRow], None] | None = None
        self._take: Callable[[Sequence[RequestRow], Sequence[ActionRow]], None] | None = None
        self._forget: Callable[[ModelId], None] | None = None
        self._uncounted_requests: list[RequestRow] = []
        self._uncounted_actions: list[ActionRow] = []

    @property
    def requests(self) -> list[RequestRow]:
        """The last requests, in order of departure."""
        return list(self._requests)

    @property
    def actions(self) -> list[ActionRow]:
        """The last actions, in order of completion."""
        return list(self._actions)

    def find_request(self, request_id: RequestId) -> RequestRow | None:
        """Find a request among the last that are over."""
        for row in islice(reversed(self._requests), NUM_SOUGHT):
            if row.request_id == request_id:
                return row
        return None

    def find_action(self, action_id: ActionId) -> ActionRow | None:
        """Find an action among the last that are over."""
        for row in islice(reversed(self._actions), NUM_SOUGHT):
            if row.action_id == action_id:
                return row
        return None

    def find_load(self, model_id: ModelId, worker_id: WorkerId, until_ns: int) -> ActionRow | None:
        """Find the last load of a model by a worker that was over at a time, among the last actions."""
        for row in islice(reversed(self._actions), NUM_SOUGHT):
            is_load = row.load is not None and row.result_ns <= until_ns
            if is_load and row.worker_id == worker_id and row.model_id == model_id:
                return row
        return None

    def requests_since(self, since_ns: int, num_max: int) -> list[RequestRow]:
        """The newest rows of requests that departed at or after a time, newest first."""
        return _newest(self._requests, attrgetter("departure_ns"), since_ns, num_max)

    def actions_since(self, since_ns: int, num_max: int) -> list[ActionRow]:
        """The newest rows of actions whose result came at or after a time, newest first."""
        return _newest(self._actions, attrgetter("result_ns"), since_ns, num_max)

    def long_runs_since(self, since_ns: int, num_max: int) -> LongRuns | None:
        """Find a model whose runs keep requests to others waiting for too long; at most so many rows are looked at."""
        requests = self.requests_since(since_ns, num_max)
        return long_runs(requests, self.actions_since(since_ns, num_max))

    def add_request(self, row: RequestRow) -> None:
        """Take in a request that is over."""
        self._requests.append(row)
        total, counts = self.total, self.by_model.get(row.model_id)
        if row.outcome == OK and counts is not None:
            # As `Counts.add` does, for both at once.
            total.answered += 1
            counts.answered += 1
            for index, of in _SUMMED:
                if value := of(row):
                    total.counters[index] += value
                    counts.counters[index] += value
        else:
            total.add(row)
            if counts is not None:
                counts.add(row)
        if self._write_request is not None:
            self._write_request(row)
        if self._take is not None:
            self._uncounted_requests.append(row)
            if len(self._uncounted_requests) >= _COUNTED_TOGETHER:
                self.count()

    def refused_at_door(self, refusal: Refusal, number: int = 1) -> None:
        """Count requests that the front refused before it knew enough of them for a row."""
        self.total.unanswered[refusal.value] += number
        self.at_door[refusal.value] += number

    def denied(self, denial: Denial, number: int = 1) -> None:
        """Count calls that their clients have no right to make."""
        self.denials[denial] += number

    def add_action(self, row: ActionRow) -> None:
        """Take in an action that is over."""
        self._actions.append(row)
        if self._write_action is not None:
            self._write_action(row)
        if self._take is not None:
            self._uncounted_actions.append(row)
            if len(self._uncounted_actions) >= _COUNTED_TOGETHER:
                self.count()

    def count_by(
        self,
        take: Callable[[Sequence[RequestRow], Sequence[ActionRow]], None],
        forget: Callable[[ModelId], None],
    ) -> None:
        """From now on pass every row to a counter, in batches.

        Requests, and actions that came after those they answered. `forget` hears of a model that is removed when all
        its rows so far are counted.
        """
        self._take, self._forget = take, forget

    def count(self) -> None:
        """Pass the rows that are not counted yet to the counter."""
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
        """From now on pass every row also to a writer of its table."""
        self._write_request, self._write_action = request, action


def _newest(rows: deque[R], time_ns: Callable[[R], int], since_ns: int, num_max: int) -> list[R]:
    """Take rows from the end while their time, by which they are ordered, is not before `since_ns`."""
    found = list(islice(reversed(rows), num_max))
    return found[: bisect_right(found, -since_ns, key=lambda row: -time_ns(row))]
