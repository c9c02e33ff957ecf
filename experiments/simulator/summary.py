"""Counts of a run in buckets of time: memory does not grow with the number of requests.

Requests count where they departed, batches and loads where their result was known, busy time where it was spent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# A latency is kept to 8 significant bits: the middle of its class is wrong by 0.4 % at most.
_KEPT_BITS = 8

_ON_THE_CORE = ("front", "controller")


def latency_class(latency_ns: int) -> int:
    """The class that a latency is counted in."""
    shift = latency_ns.bit_length() - _KEPT_BITS
    if shift <= 0:
        return latency_ns
    return (latency_ns >> shift) + (shift << (_KEPT_BITS - 1))


def _middle_ns(index: int) -> float:
    shift, rest = index >> (_KEPT_BITS - 1), index & ((1 << (_KEPT_BITS - 1)) - 1)
    if shift <= 1:
        return float(index)
    # Classes of shift s lie above those of s - 1; the leading bit is part of the index.
    shift -= 1
    return ((rest + (1 << (_KEPT_BITS - 1))) << shift) + (1 << shift) / 2


@dataclass(slots=True)
class Bucket:
    """Counts of a stretch of time."""

    #: Requests by arrival; every other count of requests is by departure.
    arrived: int = 0
    #: Requests answered inside their SLO: goodput.
    answered: int = 0
    #: Refused requests by reason. Answers past their deadline are `LATE`.
    refused: Counter[str] = field(default_factory=Counter)
    #: Refused requests by `latency_class` of the time from arrival to refusal.
    refusal_times: Counter[int] = field(default_factory=Counter)
    refusal_ns_max: int = 0
    #: Answered requests whose model was not resident at arrival.
    cold_answered: int = 0
    #: Models that the cold requests asked.
    cold_models: set[str] = field(default_factory=set)
    #: Successful Infers by compiled batch size.
    batches: Counter[int] = field(default_factory=Counter)
    loads: int = 0
    #: Actions that workers refused or failed, by error.
    action_errors: Counter[str] = field(default_factory=Counter)
    #: Busy time of all EXEC lanes and of all LOAD lanes.
    exec_ns: int = 0
    load_ns: int = 0
    #: Time of the controller's core, where a case charges for it: what the front end took, and what
    #: scheduler, ledger and links took.
    front_ns: int = 0
    controller_ns: int = 0
    #: Answered requests by `latency_class`.
    latencies: Counter[int] = field(default_factory=Counter)
    latency_ns_max: int = 0

    @property
    def num_refused(self) -> int:
        """Requests refused for any reason."""
        return sum(self.refused.values())

    @property
    def mean_batch_size(self) -> float:
        """Mean compiled batch size of successful Infers; 0 without any."""
        batches = sum(self.batches.values())
        return sum(size * n for size, n in self.batches.items()) / batches if batches else 0.0

    def latency_ns(self, percentile: float) -> float:
        """Latency of answered requests, within 0.4 %; 0 without any.

        Args:
            percentile: 0 to 100; at 100 it is exact.
        """
        return _percentile_ns(self.latencies, self.latency_ns_max, percentile)

    def refusal_ns(self, percentile: float) -> float:
        """Time from arrival to refusal, within 0.4 %; 0 without any; arguments as for `latency_ns`."""
        return _percentile_ns(self.refusal_times, self.refusal_ns_max, percentile)

    def refuse(self, reason: str, after_ns: int) -> None:
        """Count a refusal, this long after the request's arrival."""
        self.refused[reason] += 1
        self.refusal_times[latency_class(after_ns)] += 1
        if after_ns > self.refusal_ns_max:
            self.refusal_ns_max = after_ns

    def merge(self, other: Bucket) -> None:
        """Add the counts of another stretch."""
        self.arrived += other.arrived
        self.answered += other.answered
        self.refused.update(other.refused)
        self.cold_answered += other.cold_answered
        self.cold_models.update(other.cold_models)
        self.batches.update(other.batches)
        self.loads += other.loads
        self.action_errors.update(other.action_errors)
        self.exec_ns += other.exec_ns
        self.load_ns += other.load_ns
        self.front_ns += other.front_ns
        self.controller_ns += other.controller_ns
        self.refusal_times.update(other.refusal_times)
        self.refusal_ns_max = max(self.refusal_ns_max, other.refusal_ns_max)
        self.latencies.update(other.latencies)
        self.latency_ns_max = max(self.latency_ns_max, other.latency_ns_max)


def _percentile_ns(classes: Counter[int], most_ns: int, percentile: float) -> float:
    """The time at a percentile of those counted, by `latency_class`; `most_ns` is the longest."""
    if percentile >= 100:
        return float(most_ns)
    rank = percentile / 100 * classes.total()
    seen = 0
    for index in sorted(classes):
        seen += classes[index]
        if seen >= rank and seen:
            return min(_middle_ns(index), float(most_ns))
    return 0.0


@dataclass(slots=True)
class Summary:
    """Buckets from time 0 on."""

    bucket_ns: int
    num_workers: int
    buckets: list[Bucket] = field(default_factory=list)

    def at(self, time_ns: int) -> Bucket:
        """The bucket of a time, made when it is new."""
        index = time_ns // self.bucket_ns
        while index >= len(self.buckets):
            self.buckets.append(Bucket())
        return self.buckets[index]

    def total(self, begin_ns: int = 0, end_ns: int | None = None) -> Bucket:
        """All counts between two times, which are rounded down to whole buckets.

        Args:
            begin_ns: leave out everything before this time, a warm-up for example.
            end_ns: leave out everything from this time on; None: nothing.
        """
        total = Bucket()
        last = None if end_ns is None else end_ns // self.bucket_ns
        for bucket in self.buckets[begin_ns // self.bucket_ns : last]:
            total.merge(bucket)
        return total

    def utilisation(self, busy_ns: int, begin_ns: int, end_ns: int) -> float:
        """Busy time of all workers' lanes between two times, as a share of the time there was."""
        return busy_ns / ((end_ns - begin_ns) * self.num_workers)

    def utilisations(self, begin_ns: int, end_ns: int) -> dict[str, float]:
        """How busy each part was between two times, as a share of the time it had.

        Returns:
            By part. `front` and `controller` share one core, so 1 is for both together; `EXEC` and `PCIe`
            (loads) are those of all GPUs.
        """
        total, span_ns = self.total(begin_ns, end_ns), end_ns - begin_ns
        return {
            "front": total.front_ns / span_ns,
            "controller": total.controller_ns / span_ns,
            "EXEC": self.utilisation(total.exec_ns, begin_ns, end_ns),
            "PCIe": self.utilisation(total.load_ns, begin_ns, end_ns),
        }

    # --- filling it ---------------------------------------------------------------------------

    def add_busy(self, begin_ns: int, duration_ns: int, *, load: bool) -> None:
        """A lane was busy."""
        end_ns = begin_ns + duration_ns
        while begin_ns < end_ns:
            border_ns = (begin_ns // self.bucket_ns + 1) * self.bucket_ns
            part_ns = min(end_ns, border_ns) - begin_ns
            bucket = self.at(begin_ns)
            if load:
                bucket.load_ns += part_ns
            else:
                bucket.exec_ns += part_ns
            begin_ns = border_ns


def bottleneck(utilisations: Mapping[str, float]) -> tuple[str, float]:
    """The part that is busiest, and how busy.

    Args:
        utilisations: as `Summary.utilisations` gives them, and of other parts.

    Returns:
        The part's name. Where it is the core that `front` and `controller` share, the name is that of
        the one that takes more of it, and the share is that of both.
    """
    core = utilisations["front"] + utilisations["controller"]
    others = {part: busy for part, busy in utilisations.items() if part not in _ON_THE_CORE}
    part = max(others, key=lambda name: others[name])
    if core > others[part]:
        return max(_ON_THE_CORE, key=lambda name: utilisations[name]), core
    return part, others[part]
