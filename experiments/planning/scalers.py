"""Who decides how many workers there are: the product's forecast, two that others use, and one that knows the future."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from clockwright.units import NS_PER_S
from experiments.simulator.fleet import Seen


@dataclass(slots=True)
class NumberWanted:
    """What the controller itself says is wanted, as `clockwright workers wanted` prints it."""

    def wanted(self, seen: Seen, /) -> int:
        """The number of the only kind."""
        kinds = seen.scheduler.cluster_load(seen.now_ns).kinds
        return kinds[0].wanted if kinds else 1


@dataclass(slots=True, kw_only=True)
class QueueLength:
    """So many open requests for each worker, as a HorizontalPodAutoscaler or KEDA is asked to keep."""

    #: Open requests per worker, waiting or running.
    target: float
    every_ns: int = 15 * NS_PER_S
    #: The most that was recommended in this time is what is wanted.
    down_ns: int = 300 * NS_PER_S
    #: No change while the ratio is so near to 1.
    tolerance: float = 0.1
    _said: deque[tuple[int, int]] = field(default_factory=deque)
    _wanted: int = 1
    _next_ns: int = 0

    def wanted(self, seen: Seen, /) -> int:
        """Hold the queue against the target every 15 s; at most twice as many, or four more, at a time."""
        if seen.now_ns < self._next_ns:
            return self._wanted
        self._next_ns = seen.now_ns + self.every_ns
        present = seen.num_ready + seen.num_joining
        ratio = seen.num_open / (self.target * max(1, seen.num_ready))
        found = math.ceil(seen.num_open / self.target)
        if abs(ratio - 1) <= self.tolerance:
            found = present
        found = min(found, max(2 * present, present + 4))
        # What is there at the start was recommended, too.
        self._said.append((seen.now_ns, found if self._said else max(found, present)))
        while self._said[0][0] <= seen.now_ns - self.down_ns:
            self._said.popleft()
        most = max(number for _, number in self._said)
        self._wanted = found if found >= present else min(present, most)
        return self._wanted


@dataclass(slots=True, kw_only=True)
class FittedLatency:
    """Latency over load per worker, fitted once and corrected by what is observed, as SLA planners do.

    The fit is that of a queue: base / (1 - load / most). Load is what arrives, extended by its trend to when a worker
    that is asked for now will serve.
    """

    base_ns: float
    #: Requests per second at which a worker's queue would never end.
    most_rps: float
    #: The percentile that is fitted, and what it may be.
    percentile: float
    target_ns: float
    every_ns: int = 60 * NS_PER_S
    ahead_ns: int = 60 * NS_PER_S
    #: Intervals that the trend is of.
    trend: int = 5
    _loads: deque[float] = field(default_factory=deque)
    _correction: float = 1.0
    _wanted: int = 1
    _next_ns: int = 0

    def wanted(self, seen: Seen, /) -> int:
        """Look every minute."""
        if seen.now_ns < self._next_ns:
            return self._wanted
        begin_ns = self._next_ns - self.every_ns if self._next_ns else None
        self._next_ns = seen.now_ns + self.every_ns
        if begin_ns is None:
            self._wanted = seen.num_ready
            return self._wanted
        past = seen.summary.total(begin_ns, seen.now_ns)
        load_rps = past.arrived * NS_PER_S / self.every_ns
        self._loads.append(load_rps)
        if len(self._loads) > self.trend:
            self._loads.popleft()
        expected_ns = self._fitted_ns(load_rps / max(1, seen.num_ready))
        if past.answered:
            observed = past.latency_ns(self.percentile) / expected_ns
            self._correction += 0.5 * (min(max(observed, 0.2), 5.0) - self._correction)
        # Solve correction * base / (1 - load / most) = target.
        share = 1 - self._correction * self.base_ns / self.target_ns
        per_worker_rps = self.most_rps * min(max(share, 0.05), 0.95)
        self._wanted = math.ceil(max(self._coming_rps(), 0.0) / per_worker_rps)
        return self._wanted

    def _fitted_ns(self, per_worker_rps: float) -> float:
        return self.base_ns / max(0.02, 1 - per_worker_rps / self.most_rps)

    def _coming_rps(self) -> float:
        """The load when a worker that is asked for now will be there, by the line through the last ones."""
        count = len(self._loads)
        mean = sum(self._loads) / count
        middle = (count - 1) / 2
        wide = sum((place - middle) ** 2 for place in range(count))
        slope = (
            sum((place - middle) * load for place, load in enumerate(self._loads)) / wide
            if wide
            else 0.0
        )
        # The last load is half an interval old on average.
        return mean + slope * (middle + 0.5 + self.ahead_ns / self.every_ns)


@dataclass(slots=True)
class KnownLoad:
    """Knows how many each minute needs, and asks for them so far ahead that they are there when it begins."""

    needs: Sequence[int]
    ahead_ns: int
    step_ns: int = 60 * NS_PER_S

    def wanted(self, seen: Seen, /) -> int:
        """The most that any minute needs from now until a worker that is asked for now would serve."""
        last = len(self.needs) - 1
        first = min(seen.now_ns // self.step_ns, last)
        # One that ends exactly then does not begin before.
        end = min((seen.now_ns + self.ahead_ns) // self.step_ns, last)
        return max(self.needs[first : end + 1])
