"""How long a load or a batch will take: an upper percentile of the last ten measurements.

One `Estimates` per (GPU kind, clock, architecture, batch sizes): instances that share an architecture
share what is learned about it. Clockwork keeps them per model, so each of 4,000 instances learns alone.

A GPU that gets too hot, or draws too much power, lowers its clock, and everything takes longer until it
rises again. Workers look at their clock and say at which of a few levels it is; each level has estimates
of its own, so that the first batch after the clock has recovered is planned with what was known before.
Between two looks nobody knows when the clock changed. What a worker measured since the look before a
change is therefore forgotten again, and only that: others whose clocks have not changed share the
estimates (`settle_exec`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from clockwright.units import DURATION_NS_MAX, NS_PER_MS, ArchitectureId, GpuKind

# Ten samples follow a clock change within one batch of work and still forget an outlier soon; the
# paper (section 5.3) and its source (infer5_scheduler.h:36) use the same ten and this percentile.
WINDOW_SIZE = 10
PERCENTILE = 0.99

# An estimate that refuses every request is never measured again, so one outlier could shut a model
# with a tight SLO out for good. One that alone stands in the way loses its largest sample, this often.
FORGET_INTERVAL_NS = 100 * NS_PER_MS

# With fewer rows, nothing is forgotten: a worker that comes back finds what was learned.
_MIN_ROWS = 256

# What takes so many times what was predicted, and this much more, is slow: the GPU is not like others of its kind.
SLOW_FACTOR: Final = 3
SLOW_NS: Final = NS_PER_MS

# Clocks of one GPU kind whose estimates are kept. Levels are 5 % apart, so a real GPU has fewer than 32.
MAX_CLOCKS = 64


class DurationWindow:
    """The last measurements of one duration; starts with its seed as the only sample."""

    __slots__ = ("_forgot_ns", "_samples", "_unconfirmed", "estimate_ns")

    def __init__(self, seed_ns: int) -> None:
        self._samples: deque[int] = deque([seed_ns], maxlen=WINDOW_SIZE)
        #: (worker, measurement), later than all `_samples`.
        self._unconfirmed: deque[tuple[int, int]] = deque(maxlen=WINDOW_SIZE)
        self._forgot_ns = 0
        #: Upper percentile of the samples, linear between ranks.
        self.estimate_ns = seed_ns

    def add(self, duration_ns: int) -> None:
        """Take a measurement in; the oldest leaves."""
        self._samples.append(duration_ns)
        self._update()

    def begin_again(self, seed_ns: int) -> None:
        """Forget all, but for a new seed."""
        self._samples.clear()
        self._unconfirmed.clear()
        self.add(seed_ns)

    def add_unconfirmed(self, worker: int, duration_ns: int) -> None:
        """Take a measurement in that may have to be forgotten."""
        self._unconfirmed.append((worker, duration_ns))
        self._update()

    def settle(self, worker: int, *, confirmed: bool) -> None:
        """Keep a worker's unconfirmed measurements, or forget them."""
        own = [duration_ns for each, duration_ns in self._unconfirmed if each == worker]
        others = [sample for sample in self._unconfirmed if sample[0] != worker]
        if confirmed:
            self._samples.extend(own)
        self._unconfirmed = deque(others, maxlen=WINDOW_SIZE)
        self._update()

    @property
    def floor_ns(self) -> int:
        """Smallest recent sample: what is possible on a good day."""
        return min(self._latest())

    def forget_largest(self, now_ns: int) -> None:
        """Drop the largest sample, at most once per `FORGET_INTERVAL_NS`."""
        latest = self._latest()
        if len(latest) > 1 and now_ns - self._forgot_ns >= FORGET_INTERVAL_NS:
            self._forgot_ns = now_ns
            largest = max(latest)
            for sample in self._unconfirmed:
                if sample[1] == largest:
                    self._unconfirmed.remove(sample)
                    break
            else:
                self._samples.remove(largest)
                if not self._samples:  # something has to be left when the others are taken back
                    self._samples.append(self._unconfirmed.popleft()[1])
            self._update()

    def _latest(self) -> Collection[int]:
        if not self._unconfirmed:
            return self._samples
        return [*self._samples, *(sample[1] for sample in self._unconfirmed)][-WINDOW_SIZE:]

    def _update(self) -> None:
        ordered = sorted(self._latest())
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
            exec_ns: duration of EXEC by compiled batch size; not empty. Lists as long as the largest size
                are made of it, so it is one that was offered and not what a worker likes.
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
        self.fit = [bisect_right(self.sizes, n) - 1 for n in range(largest + 1)]
        self.cover = [bisect_left(self.sizes, n) for n in range(largest + 1)]
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
            size: min(int(duration_ns * slower), DURATION_NS_MAX)
            for size, duration_ns in zip(self.sizes, self.exec_ns, strict=True)
        }
        return Estimates(load_ns=self.load_ns, exec_ns=exec_ns)

    def bound(self, profile: Estimates) -> None:
        """Another GPU of the kind was profiled: what far exceeds that came from a GPU that is slow."""
        for index, window in enumerate(self._exec):
            if self.exec_ns[index] > SLOW_FACTOR * profile.exec_ns[index] + SLOW_NS:
                window.begin_again(profile.exec_ns[index])
                self._refresh(index)
        if self.load_ns > SLOW_FACTOR * profile.load_ns + SLOW_NS:
            self._load.begin_again(profile.load_ns)
            self.load_ns = profile.load_ns

    def measured_exec(self, size: int, duration_ns: int) -> None:
        """Learn from an EXEC of a compiled size."""
        index = self.fit[size]
        self._exec[index].add(duration_ns)
        self._refresh(index)

    def measured_exec_unconfirmed(self, worker: int, size: int, duration_ns: int) -> None:
        """Learn from an EXEC, until `settle_exec` says whether the worker's clock was what we thought."""
        index = self.fit[size]
        self._exec[index].add_unconfirmed(worker, duration_ns)
        self._refresh(index)

    def settle_exec(self, worker: int, size: int, *, confirmed: bool) -> None:
        """Keep, or forget, what a worker has measured of a size since this was asked last."""
        index = self.fit[size]
        self._exec[index].settle(worker, confirmed=confirmed)
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


_Key = tuple[GpuKind, int, ArchitectureId, tuple[int, ...]]


class EstimateTable:
    """Every `Estimates`, by GPU kind, clock, architecture and batch sizes."""

    __slots__ = ("_crowded_at", "_rows")

    def __init__(self) -> None:
        self._crowded_at = _MIN_ROWS
        self._rows: dict[_Key, Estimates] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def profiled(
        self,
        gpu_kind: GpuKind,
        clock_mhz: int,
        architecture_id: ArchitectureId,
        *,
        load_ns: int,
        exec_ns: Mapping[int, int],
        profile_mhz: int,
    ) -> Estimates:
        """What is known of an architecture that a worker has profiled; the profile, if nothing is.

        Args:
            gpu_kind: kind of the worker's GPU.
            clock_mhz: clock of that GPU now; 0 if not known.
            architecture_id: what was profiled.
            load_ns: profiled duration of LoadWeights.
            exec_ns: profiled duration of EXEC by compiled batch size; not empty.
            profile_mhz: clock during the profile; 0 if not known.
        """
        key = (gpu_kind, clock_mhz, architecture_id, tuple(sorted(exec_ns)))
        estimates = self._rows.get(key)
        seed = Estimates(load_ns=load_ns, exec_ns=exec_ns).at_clock(profile_mhz, clock_mhz)
        if estimates is None:
            estimates = self._rows[key] = seed
        else:
            estimates.bound(seed)
        return estimates

    def at_clock(
        self,
        gpu_kind: GpuKind,
        clock_mhz: int,
        architecture_id: ArchitectureId,
        *,
        known: Estimates,
        known_mhz: int,
    ) -> Estimates:
        """What is known of an architecture at another clock; derived from `known`, if nothing is."""
        key = (gpu_kind, clock_mhz, architecture_id, known.sizes)
        estimates = self._rows.get(key)
        if estimates is None:
            estimates = self._rows[key] = known.at_clock(known_mhz, clock_mhz)
        return estimates

    @property
    def crowded(self) -> bool:
        """Whether it is time to `keep_used`."""
        return len(self._rows) > self._crowded_at

    def keep_used(self, used: Collection[Estimates]) -> None:
        """Forget what no worker has ready: workers name architectures and GPU kinds as they like."""
        self._rows = {key: row for key, row in self._rows.items() if row in used}
        self._crowded_at = max(_MIN_ROWS, 2 * len(self._rows))

    def forget_clocks(self, gpu_kind: GpuKind, present_mhz: Iterable[int]) -> None:
        """Keep memory bounded whatever clocks workers say.

        Once a GPU kind has too many clocks, only the rows at those where some GPU is now stay.
        """
        if len({clock for kind, clock, *_ in self._rows if kind == gpu_kind}) < MAX_CLOCKS:
            return
        present = set(present_mhz)
        self._rows = {
            key: estimates
            for key, estimates in self._rows.items()
            if key[0] != gpu_kind or key[1] in present
        }
