"""How long a load or a batch will take: an upper percentile of the last ten measurements.

One `Estimates` per (GPU kind, clock, architecture, batch sizes): instances that share an architecture
share what is learned about it. Clockwork keeps them per model, so each of 4,000 instances learns alone.

A GPU that gets too hot, or draws too much power, lowers its clock, and everything takes longer until it
rises again. Workers look at their clock and say at which of a few levels it is; each level has estimates
of its own, so that the first batch after the clock has recovered is planned with what was known before.
Between two looks nobody knows when the clock changed. What was measured since the look before a
change is therefore forgotten again (`exec_samples`, `restore_exec`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from clockwright.units import NS_PER_MS

# Ten samples follow a clock change within one batch of work and still forget an outlier soon; the
# paper (section 5.3) and its source (infer5_scheduler.h:36) use the same ten and this percentile.
WINDOW_SIZE = 10
PERCENTILE = 0.99

# An estimate that refuses every request is never measured again, so one outlier could shut a model
# with a tight SLO out for good. One that alone stands in the way loses its largest sample, this often.
FORGET_INTERVAL_NS = 100 * NS_PER_MS


class DurationWindow:
    """The last measurements of one duration; starts with its seed as the only sample."""

    __slots__ = ("_forgot_ns", "_samples", "estimate_ns")

    def __init__(self, seed_ns: int) -> None:
        self._samples: deque[int] = deque([seed_ns], maxlen=WINDOW_SIZE)
        self._forgot_ns = 0
        #: Upper percentile of the samples, linear between ranks.
        self.estimate_ns = seed_ns

    def add(self, duration_ns: int) -> None:
        """Take a measurement in; the oldest leaves."""
        self._samples.append(duration_ns)
        self._update()

    @property
    def samples(self) -> list[int]:
        """The measurements, oldest first."""
        return list(self._samples)

    def restore(self, samples: list[int]) -> None:
        """Take back everything since these were the `samples`."""
        self._samples = deque(samples, maxlen=WINDOW_SIZE)
        self._update()

    @property
    def floor_ns(self) -> int:
        """Smallest recent sample: what is possible on a good day."""
        return min(self._samples)

    def forget_largest(self, now_ns: int) -> None:
        """Drop the largest sample, at most once per `FORGET_INTERVAL_NS`."""
        if len(self._samples) > 1 and now_ns - self._forgot_ns >= FORGET_INTERVAL_NS:
            self._forgot_ns = now_ns
            self._samples.remove(max(self._samples))
            self._update()

    def _update(self) -> None:
        ordered = sorted(self._samples)
        position = PERCENTILE * (len(ordered) - 1)
        below = int(position)
        self.estimate_ns = ordered[below]
        if position > below:
            self.estimate_ns += int((ordered[below + 1] - ordered[below]) * (position - below))


class Estimates:
    """Current estimates of one architecture on one kind of GPU."""

    __slots__ = (
        "_exec",
        "_load",
        "_per_row",
        "cover",
        "exec_ns",
        "fit",
        "load_ns",
        "ns_per_row",
        "sizes",
    )

    def __init__(self, *, load_ns: int, exec_ns: Mapping[int, int]) -> None:
        """Seed from a profile.

        Args:
            load_ns: duration of LoadWeights.
            exec_ns: duration of EXEC by compiled batch size; not empty.
        """
        #: Compiled batch sizes, ascending.
        self.sizes = tuple(sorted(exec_ns))
        self._exec = [DurationWindow(exec_ns[size]) for size in self.sizes]
        self._load = DurationWindow(load_ns)
        #: By index into `sizes`.
        self.exec_ns = [window.estimate_ns for window in self._exec]
        self.load_ns = load_ns
        largest = self.sizes[-1]
        #: fit[n]: index of the largest size <= n, -1 if none; cover[n]: of the smallest size >= n.
        self.fit = [-1] * (largest + 1)
        self.cover = [0] * (largest + 1)
        for n in range(largest + 1):
            self.fit[n] = sum(size <= n for size in self.sizes) - 1
            self.cover[n] = min(sum(size < n for size in self.sizes), len(self.sizes) - 1)
        self._per_row = [
            duration / size for duration, size in zip(self.exec_ns, self.sizes, strict=True)
        ]
        #: Least time per row at any size.
        self.ns_per_row = min(self._per_row)

    def at_clock(self, clock_mhz: int, other_mhz: int) -> Estimates:
        """What to expect at another clock before anything was measured there.

        Args:
            clock_mhz: that these are of; 0 if not known.
            other_mhz: that is asked about; 0 if not known.

        Returns:
            EXEC slower in proportion at a lower clock, and no faster at a higher one: how much of
            a kernel waits for memory nobody has measured, and a batch that ends early does no harm.
            LOAD does not depend on it.
        """
        slower = max(clock_mhz / other_mhz, 1.0) if other_mhz else 1.0
        exec_ns = {
            size: int(duration_ns * slower)
            for size, duration_ns in zip(self.sizes, self.exec_ns, strict=True)
        }
        return Estimates(load_ns=self.load_ns, exec_ns=exec_ns)

    def exec_samples(self, size: int) -> list[int]:
        """Measurements of a compiled size, for `restore_exec`."""
        return self._exec[self.fit[size]].samples

    def restore_exec(self, size: int, samples: list[int]) -> None:
        """Forget what was measured of a size since `exec_samples`."""
        index = self.fit[size]
        self._exec[index].restore(samples)
        self._refresh(index)

    def measured_exec(self, size: int, duration_ns: int) -> None:
        """Learn from an EXEC of a compiled size."""
        index = self.fit[size]
        self._exec[index].add(duration_ns)
        self._refresh(index)

    def measured_load(self, duration_ns: int) -> None:
        """Learn from a LoadWeights."""
        self._load.add(duration_ns)
        self.load_ns = self._load.estimate_ns

    def doubt_exec(self, rows: int, limit_ns: int, *, now_ns: int) -> None:
        """The estimate for `rows` alone exceeds `limit_ns`: forget an outlier if it is one."""
        index = self.cover[rows]
        window = self._exec[index]
        if window.floor_ns <= limit_ns:
            window.forget_largest(now_ns)
            self._refresh(index)

    def doubt_load(self, limit_ns: int, *, now_ns: int) -> None:
        """The load estimate alone exceeds `limit_ns`: forget an outlier if it is one."""
        if self._load.floor_ns <= limit_ns:
            self._load.forget_largest(now_ns)
            self.load_ns = self._load.estimate_ns

    def _refresh(self, index: int) -> None:
        estimate_ns = self._exec[index].estimate_ns
        if estimate_ns == self.exec_ns[index]:
            return
        self.exec_ns[index] = estimate_ns
        self._per_row[index] = estimate_ns / self.sizes[index]
        self.ns_per_row = min(self._per_row)
