"""A client's record of every request that it sent, in columns, and its summary.

Latency counts from when a request was due, not from when it left. A client that stalls would otherwise leave
out the requests that it should have sent meanwhile, and measure an idle server (Gil Tene's
"coordinated omission").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S

OK = "OK"

Times = npt.NDArray[np.int64]

#: asyncio's timers have a resolution of 1 ms. A client that is later than a few of them does not keep up.
LATENESS_NS_MAX = 5 * NS_PER_MS

#: Percentiles of latency that a summary has.
PERCENTS = (50.0, 90.0, 99.0, 99.9, 99.99, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClientRecord:
    """Requests in order of sending; arrays of one length, times in ns since the run began."""

    #: Names of the models, and of the outcomes: "OK", the reason of a refusal, or the name of a gRPC status.
    models: tuple[str, ...]
    outcomes: tuple[str, ...]
    #: Positions in `models` and `outcomes`.
    model: npt.NDArray[np.int64]
    outcome: npt.NDArray[np.int64]
    #: Sent by an open loop, not by a client that waits for each answer.
    is_open: npt.NDArray[np.bool_]
    slo_ns: Times
    #: When the request should have left; in a closed loop, when the response before it was there, or the
    #: pause after a refusal over.
    due_ns: Times
    sent_ns: Times
    #: When the response had arrived.
    departure_ns: Times
    #: The run's time 0 on this machine's monotonic clock.
    begin_ns: int
    #: What the server said with the first failure of each status.
    words: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.due_ns)

    def where(self, chosen: npt.NDArray[np.bool_]) -> ClientRecord:
        """Keep those of the requests that are chosen."""
        columns = ("model", "outcome", "is_open", "slo_ns", "due_ns", "sent_ns", "departure_ns")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    @property
    def latency_ns(self) -> Times:
        """Time from when each request was due until its response was in hand."""
        return self.departure_ns - self.due_ns

    @property
    def num_requests(self) -> int:
        """Number of all requests that were sent."""
        return len(self)

    @property
    def lateness_ns(self) -> Times:
        """How long after it was due each open-loop request left."""
        return (self.sent_ns - self.due_ns)[self.is_open]

    @property
    def lateness_ns_p99(self) -> int:
        """99th percentile of that; 0 without open-loop requests."""
        return percentile(self.lateness_ns, 99)

    @property
    def left_late(self) -> npt.NDArray[np.bool_]:
        """Which open-loop requests left more than `LATENESS_NS_MAX` after they were due."""
        return self.is_open & (self.sent_ns - self.due_ns > LATENESS_NS_MAX)

    @property
    def kept_up(self) -> bool:
        """Whether at most one open-loop request in a thousand left late, so that the server was measured."""
        return int(self.left_late.sum()) * 1000 <= int(self.is_open.sum())

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Which requests were answered, in time or not."""
        return self._are([name == OK for name in self.outcomes])

    @property
    def refused(self) -> npt.NDArray[np.bool_]:
        """Which requests were refused with a reason."""
        return self._are([name in Refusal.__members__ for name in self.outcomes])

    @property
    def in_time(self) -> npt.NDArray[np.bool_]:
        """Which requests were answered inside their SLO."""
        return self.answered & (self.latency_ns <= self.slo_ns)

    @property
    def num_by_outcome(self) -> dict[str, int]:
        """Number of requests by outcome, sorted by name."""
        counts = Counter(self.outcome.tolist())
        return dict(sorted((self.outcomes[position], num) for position, num in counts.items()))

    def _are(self, wanted: Sequence[bool]) -> npt.NDArray[np.bool_]:
        # Without requests there may be no outcome to look up.
        return np.array([*wanted, False], bool)[self.outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Outcomes of some requests. Latencies are of answered ones, from when they were due; 0 without any."""

    num_requests: int
    #: Answered inside the SLO; answered, but later; refused with a reason; and all others: failed.
    num_in_time: int
    num_late: int
    num_refused: int
    num_failed: int
    #: Share of the requests that were answered inside their SLO; 1 without any.
    good_request_fraction: float
    #: Requests per second: that were due, and that were answered inside their SLO.
    offered_rps: float
    goodput_rps: float
    #: By percent: "50", "90", "99", "99.9", "99.99" and "100", which is the largest.
    latency_ms: dict[str, float]
    #: Time until a refusal arrived; by percent.
    refusal_ms: dict[str, float]
    #: Numbers of refusals by reason, and of failures by gRPC status.
    refusals: dict[str, int]
    failures: dict[str, int]


def summarise(record: ClientRecord, seconds: float) -> LoadSummary:
    """Sum up requests that were due within so many seconds."""
    answered, refused, in_time = record.answered, record.refused, record.in_time
    num_in_time = int(in_time.sum())
    by_outcome = record.num_by_outcome
    return LoadSummary(
        num_requests=len(record),
        num_in_time=num_in_time,
        num_late=int(answered.sum()) - num_in_time,
        num_refused=int(refused.sum()),
        num_failed=len(record) - int((answered | refused).sum()),
        good_request_fraction=num_in_time / len(record) if len(record) else 1.0,
        offered_rps=len(record) / seconds,
        goodput_rps=num_in_time / seconds,
        latency_ms=_percentiles_ms(record.latency_ns[answered]),
        refusal_ms=_percentiles_ms(record.latency_ns[refused]),
        refusals={name: num for name, num in by_outcome.items() if name in Refusal.__members__},
        failures={
            name: num
            for name, num in by_outcome.items()
            if name != OK and name not in Refusal.__members__
        },
    )


def percentile(values: np.ndarray[Any, np.dtype[np.int64]], percent: float) -> int:
    """Return the least value at or above which at least that percentage of all lie below; 0 without values."""
    if not len(values):
        return 0
    rank = max(0, math.ceil(percent / 100 * len(values)) - 1)
    return int(np.partition(values, rank)[rank])


def in_slices(record: ClientRecord, slice_ns: int = NS_PER_S) -> list[tuple[float, LoadSummary]]:
    """Sum up the requests of each slice of time by when they were due; with the second it begins at."""
    if not len(record):
        return []
    number = record.due_ns // slice_ns
    return [
        (
            slot * slice_ns / NS_PER_S,
            summarise(record.where(number == slot), slice_ns / NS_PER_S),
        )
        for slot in range(int(number.min()), int(number.max()) + 1)
    ]


def _percentiles_ms(latencies_ns: Times) -> dict[str, float]:
    return {f"{percent:g}": percentile(latencies_ns, percent) / NS_PER_MS for percent in PERCENTS}
