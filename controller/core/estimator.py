"""How long a load or a batch will take: an upper percentile of the last ten measurements.

One `Estimates` per (GPU kind, clock, architecture, batch sizes): instances that share an architecture
share what is learned about it. Clockwork keeps them per model, so each of 4,000 instances learns alone.

A GPU that gets too hot, or draws too much power, lowers its clock, and everything takes longer until it
rises again. Workers look at their clock and say at which of a few levels it is; each level has estimates
of its own, so that the first batch after the clock has recovered is planned with what was known before.
Between two looks it is unknown when the clock changed. What a worker measured since the look before a
change is therefore forgotten again, and only that: others whose clocks have not changed share the
estimates (`settle_exec`).

An estimate that is too long keeps its batch from running, so nothing measures it again. Therefore:

* A few measurements that far exceed the others are left out. They are pauses, which predict nothing.
* Sizes that run correct those that do not (`Estimates._compare`). A batch takes no longer than a larger one, and not
  much longer than smaller ones with as many rows together. A profile without measurements is scaled by the error of
  its measured neighbours.
* An estimate that alone excludes a request is tried now and then (`DurationWindow.doubt`), by one batch at a time
  (`Estimates.try_once`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from clockwright.units import DURATION_NS_MAX, NS_PER_MS, NS_PER_S, ArchitectureId, GpuKind
from controller.core.events import LearnedTimes

# Ten samples follow a clock change within one batch of work and still forget an outlier soon; the
# paper (section 5.3) and its source (infer5_scheduler.h:36) use the same ten and this percentile.
WINDOW_SIZE = 10
PERCENTILE = 0.99

# Measurements above so many times the median are left out, unless they are more than a third of all, or the last two
# are among them. Smaller: usual noise
# is left out, and what it delays is late. Larger: short pauses make batches look too long for their deadlines.
_OUTLIER = 2

# An estimate that refuses every request is never measured again, so one outlier could shut a model
# with a tight SLO out for good. One that alone stands in the way loses its largest sample, this often.
FORGET_INTERVAL_NS = 100 * NS_PER_MS

# Where every sample stands in the way, and for so long nothing was measured, requests try whether they still hold.
# Each trial makes the next pause so many times as long, up to this: if they hold, the requests of a trial are late.
_PAUSE_FACTOR = 4
# A profile without measurements is tried sooner for the first time: there is less to lose than by refusing all.
_FIRST_PAUSE_NS = 20 * NS_PER_MS
_LONGEST_PAUSE_NS = 30 * NS_PER_S

# Nothing is tried that would have to take less than this part of what is known.
_MOST_WRONG = 16

# With fewer rows, nothing is forgotten: a worker that comes back finds what was learned.
_MIN_ROWS = 256

# An action that takes so many times its predicted time, and this much more, is slow: its GPU is not like others.
SLOW_FACTOR: Final = 3
SLOW_NS: Final = NS_PER_MS

# Sizes are compared after so many batches. Fewer: a size that is seldom filled loses samples that are merely
# noisy. More: a size that a pause took away stays away longer.
_COMPARED_AFTER = 20

# A size that does not run loses the samples that are so many times what those that run say. Smaller: samples that
# are merely noisy leave.
_DOUBTFUL = 1.5

# Where all that is known of it is so many times that, it is tried. Smaller: networks for which large batches are
# slow are tried.
_INCREDIBLE = 2.0

# A size is tried after so many comparisons at first and at most; these pauses grow as those above.
_FEW_COMPARISONS = 2
_MOST_COMPARISONS = 1024

# A size counts as dense as another that has at most so much less time per row: noise must not make the
# choice flicker, and the larger batch leaves fewer actions to send.
_AS_DENSE = 1.03

# Clocks of one GPU kind whose estimates are kept. Levels are 5 % apart, so a real GPU has fewer than 32.
MAX_CLOCKS = 64


class DurationWindow:
    """The last measurements of one duration; starts with its seed as the only sample."""

    __slots__ = (
        "_doubted_ns",
        "_doubted_runs",
        "_largest_ns",
        "_pause_ns",
        "_samples",
        "_supposed",
        "_tried",
        "_unconfirmed",
        "estimate_ns",
        "num_runs",
        "seed_ns",
        "typical_ns",
    )

    def __init__(self, seed_ns: int) -> None:
        self._samples: deque[int] = deque([seed_ns], maxlen=WINDOW_SIZE)
        #: (worker, measurement), later than all `_samples`.
        self._unconfirmed: deque[tuple[int, int]] = deque(maxlen=WINDOW_SIZE)
        self._doubted_ns = -FORGET_INTERVAL_NS
        self._doubted_runs = -1
        self._pause_ns = _FIRST_PAUSE_NS
        #: Largest sample that is not left out.
        self._largest_ns = seed_ns
        #: Whether the estimate is to be tried, and does not follow from the samples.
        self._supposed = False
        #: Whether what is under way tries something that no sample says is possible.
        self._tried = False
        #: The profile's durations.
        self.seed_ns = seed_ns
        #: Measurements taken in.
        self.num_runs = 0
        #: Upper percentile of the samples, linear between ranks.
        self.estimate_ns = seed_ns
        #: Median: it varies less than the estimate.
        self.typical_ns = seed_ns

    @property
    def measured(self) -> bool:
        """Whether the estimate comes from measurements, so that what far exceeds it is slow."""
        return self.num_runs > 0 and not self._supposed

    def add(self, duration_ns: int) -> None:
        """Take a measurement in; the oldest leaves."""
        if (self._supposed or self._tried) and self._begins_anew(duration_ns):
            self._samples.clear()
            self._unconfirmed.clear()
            self._pause_ns = FORGET_INTERVAL_NS
        self._samples.append(duration_ns)
        self.num_runs += 1
        self._tried = False
        self._update()

    def begin_again(self, seed_ns: int) -> None:
        """Forget all, but for a new seed."""
        self._samples.clear()
        self._samples.append(seed_ns)
        self._unconfirmed.clear()
        self.num_runs, self.seed_ns = 0, seed_ns
        self._update()

    def recall(self, samples: Sequence[int]) -> None:
        """Take what an earlier controller had measured for the profile."""
        self._samples = deque(samples, maxlen=WINDOW_SIZE)
        self._update()
        self.seed_ns = self.estimate_ns

    def add_unconfirmed(self, worker: int, duration_ns: int) -> None:
        """Take a measurement in that may have to be forgotten."""
        if (self._supposed or self._tried) and self._begins_anew(duration_ns):
            self.add(duration_ns)  # whatever the clock, the rest is not true
            return
        self._unconfirmed.append((worker, duration_ns))
        self.num_runs += 1
        self._tried = False
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
        return min(self.latest())

    @property
    def supposed(self) -> bool:
        """Whether the estimate is to be tried, and does not follow from the samples."""
        return self._supposed

    def suppose(self, duration_ns: int) -> None:
        """Expect this, or the least time there is, until the next measurement."""
        self._supposed = True
        self.estimate_ns = self.typical_ns = max(duration_ns, 1)

    def try_once(self) -> None:
        """What is to be tried is sent: expect what is known again, of it too, until it is measured."""
        self._tried = self._supposed  # else it was measured meanwhile
        self._update()

    def doubt(self, limit_ns: int, now_ns: int, *, tries: bool) -> bool:
        """The estimate by itself stands in the way of a request, which would need it to be `limit_ns`.

        Returns whether that is to be tried now. With `tries` something may be tried that no sample says is possible.
        """
        pause_ns = now_ns - self._doubted_ns
        if self.floor_ns <= limit_ns:
            if pause_ns >= FORGET_INTERVAL_NS:
                self._doubted_ns = now_ns
                self._pause_ns = FORGET_INTERVAL_NS
                self.forget_above(self._largest_ns - 1)
        elif tries and limit_ns * _MOST_WRONG > self.floor_ns:
            if self.num_runs != self._doubted_runs:  # measured since the last doubt
                self._doubted_runs = self.num_runs
                self._doubted_ns = now_ns
            elif pause_ns >= self._pause_ns:
                self._doubted_ns = now_ns
                self._pause_ns = min(_PAUSE_FACTOR * self._pause_ns, _LONGEST_PAUSE_NS)
                self.suppose(limit_ns // 2)  # half: lanes are busy for other models now and then
                return True
        return False

    def forget_above(self, limit_ns: int) -> None:
        """Drop the samples above a limit; the smallest of all stays."""
        limit_ns = max(limit_ns, self.floor_ns)
        samples = [duration_ns for duration_ns in self._samples if duration_ns <= limit_ns]
        others = [sample for sample in self._unconfirmed if sample[1] <= limit_ns]
        if not samples:  # something has to be left when the others are taken back
            samples.append(others.pop(0)[1])
        self._samples = deque(samples, maxlen=WINDOW_SIZE)
        self._unconfirmed = deque(others, maxlen=WINDOW_SIZE)
        self._update()

    def _begins_anew(self, duration_ns: int) -> bool:
        """Whether the measurement of a trial shows that nothing holds: a profile, or what is long ago."""
        return not self.num_runs or duration_ns < self.floor_ns

    def latest(self) -> list[int]:
        """The samples that count, the oldest first."""
        if not self._unconfirmed:
            return list(self._samples)
        return [*self._samples, *(sample[1] for sample in self._unconfirmed)][-WINDOW_SIZE:]

    def _update(self) -> None:
        latest = self.latest() if self._unconfirmed else list(self._samples)
        ordered = sorted(latest)
        last = len(ordered) - 1
        self.typical_ns = ordered[last // 2]
        if ordered[last] > _OUTLIER * self.typical_ns:
            last = self._last_believed(ordered, min(latest[-2:]))
        self._supposed = False
        self._largest_ns = self.estimate_ns = ordered[last]
        if last:
            below_ns = ordered[last - 1]
            share = PERCENTILE * last - (last - 1)
            self.estimate_ns = below_ns + int((self._largest_ns - below_ns) * share)

    def _last_believed(self, ordered: list[int], latest_ns: int) -> int:
        """Where the samples end that are not left out; `latest_ns` is the smaller one of the last two."""
        last = len(ordered) - 1
        most_ns = _OUTLIER * self.typical_ns
        if latest_ns > most_ns:
            return last  # two in a row: it is slow from now on
        least = last - len(ordered) // 3
        while last > least and ordered[last] > most_ns:
            last -= 1
        return last


class Estimates:
    """Current estimates of one architecture on one kind of GPU."""

    __slots__ = (
        "_batches_left",
        "_best",
        "_compare_after",
        "_exec",
        "_finds_densest",
        "_idle",
        "_load",
        "_patience",
        "_per_row",
        "_runs",
        "cover",
        "densest",
        "exec_ns",
        "fit",
        "load_ns",
        "ns_per_row",
        "recalled",
        "sizes",
        "trial",
    )

    def __init__(
        self,
        *,
        load_ns: int,
        exec_ns: Mapping[int, int],
        finds_densest: bool = True,
    ) -> None:
        """Seed from a profile.

        Args:
            load_ns: duration of LoadWeights.
            exec_ns: duration of EXEC by compiled batch size; not empty. Lists as long as the largest size
                are made of it, so it is one that was offered and not what a worker likes.
            finds_densest: else `densest` is `fit`: the larger a batch, the denser it is taken to be.
        """
        #: What an earlier controller had learned is in the place of the profile.
        self.recalled = False
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
        #: Index of a size of which one batch is to be tried with too little time; -1: none is.
        self.trial = -1
        #: Least time per row at any size.
        self.ns_per_row = min(self._per_row)
        #: densest[n]: index of the size <= n with the least time per row, -1 if none.
        self.densest = self.fit
        self._best = list(range(len(self.sizes)))
        self._finds_densest = finds_densest
        self._find_densest()
        # The first comparisons come sooner: until then a wrong profile is all there is.
        self._compare_after = self._batches_left = 1
        #: By index into `sizes`: `num_runs` at the last comparison; for how many comparisons it has been
        #: doubted, and for how many it is to be before it is tried.
        self._runs = [0] * len(self.sizes)
        self._idle = [0] * len(self.sizes)
        self._patience = [_FEW_COMPARISONS] * len(self.sizes)

    def at_clock(self, clock_mhz: int, other_mhz: int) -> Estimates:
        """Estimates for another clock before anything was measured there.

        Args:
            clock_mhz: that these are of; 0 if not known.
            other_mhz: that is asked about; 0 if not known.

        Returns:
            EXEC slower in proportion at a lower clock, and no faster at a higher one: how much of
            a kernel waits for memory was not measured, and a batch that ends early is no problem.
            LOAD does not depend on it.
        """
        slower = max(clock_mhz / other_mhz, 1.0) if other_mhz else 1.0
        exec_ns = {
            size: min(int(duration_ns * slower), DURATION_NS_MAX)
            for size, duration_ns in zip(self.sizes, self.exec_ns, strict=True)
        }
        return Estimates(load_ns=self.load_ns, exec_ns=exec_ns, finds_densest=self._finds_densest)

    def bound(self, profile: Estimates) -> None:
        """Another GPU of the kind was profiled: what far exceeds that came from a GPU that is slow."""
        for index, window in enumerate(self._exec):
            if self.exec_ns[index] > SLOW_FACTOR * profile.exec_ns[index] + SLOW_NS:
                window.begin_again(profile.exec_ns[index])
                self._refresh(index)
                self._compare_after = self._batches_left = 1
        if self.load_ns > SLOW_FACTOR * profile.load_ns + SLOW_NS:
            self._load.begin_again(profile.load_ns)
            self.load_ns = profile.load_ns

    def recall(self, times: LearnedTimes) -> None:
        """Take what an earlier controller had learned for the profile; sizes are the same."""
        self.recalled = True
        for index, size in enumerate(self.sizes):
            self._exec[index].recall(times.exec_ns[size])
            self._refresh(index)
        self._load.recall(times.load_ns)
        self.load_ns = self._load.estimate_ns
        self._find_densest()

    def learned(self) -> tuple[list[int], dict[int, list[int]]] | None:
        """The last durations of LoadWeights, and of EXEC by batch size. Returns None if all are the profile's."""
        windows = self._exec
        if not (self.recalled or self._load.num_runs or any([each.num_runs for each in windows])):
            return None
        exec_ns = {}
        for index, window in enumerate(windows):
            # What is supposed of a size that never ran follows from its neighbours, unless it is on trial.
            follows = window.supposed and not window.num_runs and index != self.trial
            exec_ns[self.sizes[index]] = [window.estimate_ns] if follows else window.latest()
        return self._load.latest(), exec_ns

    def is_slow(self, size: int, duration_ns: int) -> bool:
        """Whether an EXEC of a size, or a load (0), says that the GPU is slow, rather than that the estimate was wrong."""
        window = self._exec[self.fit[size]] if size else self._load
        return window.measured and duration_ns > SLOW_FACTOR * window.estimate_ns + SLOW_NS

    def has_run(self, rows: int) -> bool:
        """Whether an EXEC for `rows` alone was ever measured."""
        return self._exec[self.cover[rows]].num_runs > 0

    def measured_exec(self, size: int, duration_ns: int) -> None:
        """Learn from an EXEC of a compiled size."""
        index = self.fit[size]
        self._exec[index].add(duration_ns)
        self._batch_ended(index)

    def measured_exec_unconfirmed(self, worker: int, size: int, duration_ns: int) -> None:
        """Learn from an EXEC, until `settle_exec` says whether the worker's clock was what we thought."""
        index = self.fit[size]
        self._exec[index].add_unconfirmed(worker, duration_ns)
        self._batch_ended(index)

    def settle_exec(self, worker: int, size: int, *, confirmed: bool) -> None:
        """Keep, or forget, what a worker has measured of a size since this was asked last."""
        index = self.fit[size]
        self._exec[index].settle(worker, confirmed=confirmed)
        self._refresh(index)

    def measured_load(self, duration_ns: int) -> None:
        """Learn from a LoadWeights."""
        self._load.add(duration_ns)
        self.load_ns = self._load.estimate_ns

    def doubt_exec(self, rows: int, limit_ns: int, *, now_ns: int) -> bool:
        """The estimate for `rows` alone exceeds `limit_ns`: forget an outlier, or try whether it is true.

        Returns whether it is to be tried now.
        """
        index = self.cover[rows]
        tries = self._exec[index].doubt(limit_ns, now_ns, tries=True)
        if tries:
            if self.trial not in (-1, index):
                self.try_once()
            self.trial = index
        self._refresh(index)
        return tries

    def try_once(self) -> None:
        """The batch that tries is sent. Its lane is held for the known time, so it delays no other batch."""
        index, self.trial = self.trial, -1
        self._exec[index].try_once()
        self._refresh(index)

    def doubt_load(self, limit_ns: int, *, now_ns: int, tries: bool) -> None:
        """The load estimate alone exceeds `limit_ns`: forget an outlier, or try whether it is true."""
        self._load.doubt(limit_ns, now_ns, tries=tries)
        self.load_ns = self._load.estimate_ns

    def try_load_once(self) -> None:
        """A load is sent: if it is to try something, its lane is held for as long as is known all the same."""
        if self._load.supposed:
            self._load.try_once()
            self.load_ns = self._load.estimate_ns

    def _batch_ended(self, index: int) -> None:
        if self._exec[index].estimate_ns != self.exec_ns[index]:
            self._refresh(index)
        self._batches_left -= 1
        if not self._batches_left:
            self._compare_after = self._batches_left = min(2 * self._compare_after, _COMPARED_AFTER)
            self._compare()
            self._find_densest()

    def _compare(self) -> None:
        """Hold the sizes that did not run since the last comparison against those that did."""
        windows, sizes, exec_ns, per_row = self._exec, self.sizes, self.exec_ns, self._per_row
        ran = [window.num_runs > runs for window, runs in zip(windows, self._runs, strict=True)]
        self._runs = [window.num_runs for window in windows]
        if all(ran):
            return
        # By index: the next larger size that ran, -1 if none.
        larger: list[int] = []
        nearest = -1
        for index in range(len(sizes) - 1, -1, -1):
            nearest = index if ran[index] else nearest
            larger.append(nearest)
        larger.reverse()
        smaller = -1
        for index, next_larger in enumerate(larger):
            if ran[index]:
                smaller = index
                continue
            # The next smaller one may not have run; then it was compared itself just now.
            longest_ns = int(per_row[index - 1] * sizes[index]) if smaller >= 0 else DURATION_NS_MAX
            if next_larger >= 0:
                longest_ns = min(longest_ns, exec_ns[next_larger])
            if not windows[index].num_runs or exec_ns[index] > _DOUBTFUL * longest_ns:
                nearest = smaller if smaller >= 0 else next_larger
                wrong = exec_ns[nearest] / max(windows[nearest].seed_ns, 1) if nearest >= 0 else 1.0
                self._doubt_idle(index, longest_ns, wrong)
                self._refresh(index)

    def _doubt_idle(self, index: int, longest_ns: int, wrong: float) -> None:
        """Doubt a size that did not run, where it was never measured or is said to take much longer.

        Args:
            index: of the size.
            longest_ns: what those that ran say that it takes at most.
            wrong: how many times as long as their profiles they take.
        """
        window = self._exec[index]
        if not window.num_runs:
            expected_ns = min(int(window.seed_ns * wrong), DURATION_NS_MAX)
            if expected_ns > _INCREDIBLE * longest_ns:
                expected_ns = longest_ns
            if expected_ns != window.estimate_ns:
                window.suppose(expected_ns)
        elif window.floor_ns <= _DOUBTFUL * longest_ns:
            window.forget_above(int(_DOUBTFUL * longest_ns))
        elif window.floor_ns > _INCREDIBLE * longest_ns:
            self._idle[index] += 1
            if self._idle[index] >= self._patience[index]:
                self._idle[index] = 0
                patience = _PAUSE_FACTOR * self._patience[index]
                self._patience[index] = min(patience, _MOST_COMPARISONS)
                window.suppose(longest_ns)

    def _find_densest(self) -> None:
        """Find the size with the least time per row among each and those below it."""
        if not self._finds_densest:
            return
        best: list[int] = []
        per_row: list[float] = []
        least = float("inf")
        for index, window in enumerate(self._exec):
            each = window.typical_ns / self.sizes[index]
            if index and not window.num_runs and not self.recalled:
                # Unknown yet: if it is in time at the length of its profile, it costs little to try.
                each = min(each, per_row[-1])
            per_row.append(each)
            least = min(least, each)
            enough = _AS_DENSE * least
            best.append(
                index
                if each <= enough
                else next(i for i in range(index, -1, -1) if per_row[i] <= enough)
            )
        if best != self._best:
            self._best = best
            self.densest = [best[index] if index >= 0 else -1 for index in self.fit]

    def _refresh(self, index: int) -> None:
        estimate_ns = self._exec[index].estimate_ns
        if estimate_ns == self.exec_ns[index]:
            return
        self.exec_ns[index] = estimate_ns
        self._per_row[index] = estimate_ns / self.sizes[index]
        self.ns_per_row = min(self._per_row)


_Key = tuple[GpuKind, int, ArchitectureId, tuple[int, ...]]


def _key_of(times: LearnedTimes) -> _Key:
    return times.gpu_kind, times.clock_mhz, times.architecture_id, tuple(times.exec_ns)


class EstimateTable:
    """Every `Estimates`, by GPU kind, clock, architecture and batch sizes."""

    __slots__ = ("_crowded_at", "_finds_densest", "_recalled", "_rows")

    def __init__(self, *, finds_densest: bool = True) -> None:
        self._finds_densest = finds_densest
        self._crowded_at = _MIN_ROWS
        self._rows: dict[_Key, Estimates] = {}
        #: What an earlier controller had learned, until a worker brings the model.
        self._recalled: dict[_Key, LearnedTimes] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def recall(self, recalled: Iterable[LearnedTimes]) -> None:
        """Seed rows with these in place of profiles, when workers bring the models; forget what was recalled earlier."""
        self._recalled = {_key_of(each): each for each in recalled}

    def learned(self) -> Iterator[LearnedTimes | None]:
        """Say what was learned, and what was recalled and not used yet.

        One row at a time, so that the caller can pause between thousands of them. None: nothing was learned of a row.
        """
        unused = list(self._recalled.values())
        for (gpu_kind, clock_mhz, architecture_id, _), row in list(self._rows.items()):
            times = row.learned()
            if times is None:
                yield None
                continue
            load_ns, exec_ns = times
            yield LearnedTimes(
                gpu_kind=gpu_kind,
                clock_mhz=clock_mhz,
                architecture_id=architecture_id,
                load_ns=load_ns,
                exec_ns=exec_ns,
            )
        yield from unused

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
        """The estimates of an architecture that a worker has profiled; those of the profile at first.

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
        profile = Estimates(load_ns=load_ns, exec_ns=exec_ns, finds_densest=self._finds_densest)
        seed = profile.at_clock(profile_mhz, clock_mhz)
        if estimates is None:
            return self._begin(key, seed)
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
        """The estimates of an architecture at another clock; derived from `known` at first."""
        key = (gpu_kind, clock_mhz, architecture_id, known.sizes)
        estimates = self._rows.get(key)
        if estimates is None:
            return self._begin(key, known.at_clock(known_mhz, clock_mhz))
        return estimates

    def _begin(self, key: _Key, seed: Estimates) -> Estimates:
        """Add a row: what an earlier controller had learned, or the seed."""
        times = self._recalled.pop(key, None)
        if times is None:
            self._rows[key] = seed
            return seed
        row = self._rows[key] = seed.at_clock(0, 0)  # a copy
        row.recall(times)
        row.bound(seed)
        return row

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
