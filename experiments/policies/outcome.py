"""What becomes of the requests of a case, counted alike for every policy, scenario and family."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from clockwright.units import NS_PER_MS
from controller.telemetry import OK, RequestRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """Counts of the requests that arrived in the measured time."""

    asked: int
    #: Answered in time.
    answered: int
    #: Answered too late, so after admission; the requests are among the refused.
    late: int
    p50_ms: float

    @property
    def share(self) -> float:
        """Goodput as a part of what was asked."""
        return self.answered / self.asked if self.asked else 1.0


@dataclass(slots=True)
class RequestCounts:
    """Telemetry rows of requests as they come, by whom they are counted for."""

    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    #: By reason; a late answer is a refusal.
    refused: Counter[str] = field(default_factory=Counter)
    #: Answers of models that had to be loaded first.
    cold: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    #: Time from arrival to refusal, and the same as a share of the SLO.
    refusals_ns: list[int] = field(default_factory=list)
    refusal_shares: list[float] = field(default_factory=list)

    def add(self, row: RequestRow, name: str, *, answer_counts: bool = True) -> None:
        """Count a request.

        Args:
            row: the request.
            name: its model, or its tenant.
            answer_counts: an answer in time is one that counts.
        """
        self.asked[name] += 1
        taken_ns = row.departure_ns - row.arrival_ns
        if row.outcome != OK:
            self.refused[row.outcome] += 1
            self.refusals_ns.append(taken_ns)
            self.refusal_shares.append(taken_ns / row.slo_ns)
        elif answer_counts:
            self.answered[name] += 1
            self.cold += row.cold
            self.latencies_ns.append(taken_ns)

    def latency_ms(self, percentile: float) -> float:
        """Latency of the answers; 0: there is none."""
        return float(np.percentile(self.latencies_ns or [0], percentile)) / NS_PER_MS

    def refusal_ms(self, percentile: float) -> float:
        """Time to a refusal; 0: nothing was refused."""
        return float(np.percentile(self.refusals_ns or [0], percentile)) / NS_PER_MS

    def refusal_share(self, percentile: float) -> float:
        """The same as a share of the SLO."""
        return float(np.percentile(self.refusal_shares or [0.0], percentile))
