"""How much time to keep between the end of an EXEC and the deadline, for the answer's way back.

A policy's contribution is its `margin_ns`; the mechanism keeps that and what the front will charge
(`Requests.margin_of`), or a fraction of the SLO where the fraction is less.

| policy             | margin                                                          |
|--------------------|-----------------------------------------------------------------|
| `clockwork`        | constant: `SchedulerConfig.margin_ns`, the paper's 5 ms         |
| `edf_mh`           | `Margin`: measured, at most that constant                       |
| `clipper`, `infaas`| `NO_MARGIN_NS`: they do not check whether an answer is in time  |
"""

from __future__ import annotations

NO_MARGIN_NS = 0

# The peak of the delays fades by this part per action: a pause of the host is forgotten after a few
# thousand.
_FADE = 1 / 2048
# Beyond the largest delay seen, because the next may be larger.
_FACTOR = 1.25


class Margin:
    """Largest recent delay of a result beyond the predicted end of its EXEC, and some to spare."""

    __slots__ = ("_largest_ns", "_peak_ns", "ns")

    def __init__(self, largest_ns: int) -> None:
        self._largest_ns = largest_ns
        self._peak_ns = largest_ns / _FACTOR
        #: Never more than it begins with.
        self.ns = largest_ns

    def measured(self, delay_ns: int) -> None:
        """A result came so long after the predicted end."""
        self._peak_ns = max(delay_ns, self._peak_ns * (1 - _FADE))
        self.ns = min(int(self._peak_ns * _FACTOR), self._largest_ns)
