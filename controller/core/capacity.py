"""How many workers of a kind the load needs by the time that one that is asked for now would be ready.

What runs says little about how much could run: a scheduler that has time to spare fills it with smaller batches. So the
load is counted as *work*: the EXEC time that its requests take in the batches that gather in half of their SLO. Of 19
workloads of `plan.json` that EXEC time limits, the planned workers do 0.47 to 1.10 of a second's work per second, 0.83
on average; those in bursts least. So a worker is taken to do `CapacityConfig.fullness`, and what it does of this load is
learned: that rises slowly as long as workers are in use, and falls with each request that is refused for want of EXEC time,
so that `refused_share` holds over hours.

| the number rises with                     | because                                                         |
|-------------------------------------------|-----------------------------------------------------------------|
| work that was done, and that was refused  | refused requests are work too, each as much as one that ran     |
| what comes at this time of each hour      | so do many jobs; what is asked for now comes a start-up later   |
| its trend, over the start-up time         | likewise                                                        |
| LOAD time, if no worker is young          | one that has just joined loads all that it is to hold           |
| requests refused for links, loads, pages  | by as many workers as would serve them, if each serves as now   |
| requests refused for EXEC time            | one more than there are, even where the work says fewer         |

The load is that of the last minute; where requests are refused, also that of the last ten seconds. So the number rises at
once. It falls to what was needed at most for `patience` start-up times, so that a load that comes back finds its workers.
A worker that was asked for and is not there changes nothing, so it never keeps another from leaving. A request whose SLO
no worker could meet, even an idle one, is refused as `INFEASIBLE`, and changes nothing either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from clockwright.units import NS_PER_S, GpuKind

#: From when a worker is asked for until it is ready, before that was measured.
START_NS: Final = 60 * NS_PER_S
#: No start counts as longer: an orchestrator that has no room is not slow.
START_NS_MAX: Final = 1800 * NS_PER_S
#: The latest starts that were measured, and the part of them that was no slower than what is planned with.
STARTS_MAX: Final = 20
_PERCENTILE: Final = 0.9
# Points of the trend.
_POINTS: Final = 24
#: Parts of the season's period, and how far its factors may be from 1.
SLOTS: Final = 60
MOST_FACTOR: Final = 5.0
# So many times as many as there are, at most, are asked for at once; for want of all but EXEC time, twice as many.
_MOST_MORE: Final = 4
# So many refused requests show nothing.
_BY_CHANCE: Final = 1
_HOUR_NS: Final = 3600 * NS_PER_S
# What was short of pages is remembered for no longer.
_DAY_NS: Final = 86_400 * NS_PER_S
# Fields of a sample that add up.
_SUMMED: Final = (
    *("work_ns", "load_ns", "num_run", "num_for_exec", "num_for_links", "num_for_loads"),
    *("num_for_pages", "num_without_worker"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindStatistics:
    """How one kind of worker did in the last seconds."""

    gpu_kind: GpuKind
    num_workers: int
    #: How long the rates look back.
    over_ns: int
    #: Share of the time that EXECs took, and LOADs.
    exec_busy: float
    load_busy: float
    #: Requests that were run, and weights that were loaded and evicted, per second.
    run_rps: float
    loads_per_s: float
    evictions_per_s: float
    #: Requests dropped per second, for want of each.
    dropped_for_exec_rps: float
    dropped_for_links_rps: float
    dropped_for_loads_rps: float
    dropped_for_pages_rps: float
    #: Requests that one more worker of the kind would answer, per second.
    one_more_rps: float
    #: Workers that the load needs, and what that number comes from: exec, loads, links, pages; empty: no load.
    wanted: int = 0
    limit: str = ""
    #: Those of `num_workers` that serve no model yet, and are not about to leave.
    num_joining: int = 0
    #: From when a worker is asked for until it is ready, as a rule.
    start_ns: int = START_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """Constants of the number."""

    #: Part of a second's work that a worker does per second, before the load has shown what it can.
    fullness: float = 0.85
    #: Bounds of what is learned of it.
    least_fullness: float = 0.3
    most_fullness: float = 1.4
    #: Part of the LOAD lane's time that may be in use.
    load_busy: float = 0.8
    #: Part of the requests that may be refused before the number rises for it.
    refused_share: float = 0.001
    #: Start-up times for which fewer workers have to be enough before the number falls, and the least such time.
    patience: float = 2.0
    least_patience_ns: int = 60 * NS_PER_S
    #: Standard errors that are taken off a trend: noise is none.
    doubt: float = 1.0
    #: How long the load looks back: as a rule, and where requests are refused.
    usual_ns: int = 60 * NS_PER_S
    level_ns: int = 10 * NS_PER_S
    #: A load comes again at the same time of each period; of what is new, this part is learned.
    period_ns: int = 3600 * NS_PER_S
    season_gain: float = 0.4
    #: Fullness rises by this part in an hour, and falls by as much for half of the requests that may be refused in an
    #: hour; it falls to a third in the second of these times at least, so that one outage does not bring many workers.
    learn_gain: float = 0.1
    fall_ns: int = 300 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSample:
    """What happened to a kind of worker since the last sample."""

    over_ns: int
    #: Workers that serve.
    num_workers: int
    #: Workers that are there and serve no model yet.
    num_joining: int = 0
    #: Those that serve and have become ready only now.
    num_young: int = 0
    #: EXEC time of what ran, in the batches that half of its SLO lets gather.
    work_ns: float = 0.0
    #: LOAD time.
    load_ns: float = 0.0
    #: Requests that ran, and that were refused for want of each.
    num_run: int = 0
    num_for_exec: int = 0
    num_for_links: int = 0
    num_for_loads: int = 0
    num_for_pages: int = 0
    #: Requests that were refused because no worker of any kind offers their model.
    num_without_worker: int = 0

    @property
    def num_refused(self) -> int:
        """Requests that were refused for want of anything that workers of the kind have."""
        return self.num_for_exec + self.num_for_links + self.num_for_loads + self.num_for_pages


class StartTimes:
    """How long it takes from when a worker is asked for until it is ready."""

    def __init__(self) -> None:
        #: When each worker was asked for that is not there yet, the oldest first.
        self._asked_ns: deque[int] = deque()
        #: The latest starts.
        self.starts_ns: deque[int] = deque(maxlen=STARTS_MAX)

    @property
    def start_ns(self) -> int:
        """The 90th percentile; an assumption as long as nothing was measured."""
        if not self.starts_ns:
            return START_NS
        starts_ns = sorted(self.starts_ns)
        return starts_ns[math.ceil(_PERCENTILE * len(starts_ns)) - 1]

    def recall(self, starts_ns: Sequence[int]) -> None:
        """Begin with what was measured before."""
        self.starts_ns = deque(starts_ns, maxlen=STARTS_MAX)

    def missing(self, num_workers: int, now_ns: int) -> None:
        """So many workers are needed that are not ready."""
        while len(self._asked_ns) > max(num_workers, 0):
            self._asked_ns.pop()
        while len(self._asked_ns) < num_workers:
            self._asked_ns.append(now_ns)

    def ready(self, now_ns: int, *, is_back: bool) -> None:
        """A worker is ready: the one that was asked for first, if it is not one that was lost and is back."""
        if self._asked_ns:
            asked_ns = self._asked_ns.popleft()
            if not is_back:
                self.starts_ns.append(min(now_ns - asked_ns, START_NS_MAX))


class Season:
    """How much more or less comes at a time of each period than as a rule: a factor for each of 60 slots."""

    def __init__(self, period_ns: int, gain: float) -> None:
        """Know nothing: all factors are 1. `gain` is the part of what is new in a slot that is learned."""
        self._slot_ns, self._gain = period_ns // SLOTS, gain
        #: The factors of slots, the first from time 0 on.
        self.factors = [1.0] * SLOTS
        #: Work per time of the last slots; and number, time and work of this one.
        self._slots: deque[float] = deque(maxlen=SLOTS)
        self._slot, self._over_ns, self._work_ns = -1, 0, 0.0

    def factor(self, now_ns: int) -> float:
        """The factor of a time."""
        return self.factors[now_ns // self._slot_ns % SLOTS]

    def most(self, now_ns: int, until_ns: int) -> float:
        """The largest factor from now until then."""
        first, last = now_ns // self._slot_ns, until_ns // self._slot_ns
        return max([self.factors[slot % SLOTS] for slot in range(first, last + 1)][:SLOTS])

    def take(self, work: float, over_ns: int, now_ns: int) -> None:
        """Take in how much work per time there was until now."""
        slot = now_ns // self._slot_ns
        if slot != self._slot:
            # One that was begun in its middle, or was not looked at, shows little.
            if 2 * self._over_ns > self._slot_ns:
                self._learn(self._slot % SLOTS, self._work_ns / self._over_ns)
            self._slot, self._over_ns, self._work_ns = slot, 0, 0.0
        self._over_ns += over_ns
        self._work_ns += work * over_ns

    def _learn(self, slot: int, work: float) -> None:
        self._slots.append(work)
        mean = sum(self._slots) / len(self._slots)
        if mean and len(self._slots) > SLOTS // 2:
            found = min(max(work / mean, 1 / MOST_FACTOR), MOST_FACTOR)
            self.factors[slot] += self._gain * (found - self.factors[slot])


class WorkersNeeded:
    """The number for one kind of worker."""

    def __init__(self, config: CapacityConfig = CapacityConfig()) -> None:
        self._config = config
        #: Workers wanted, and what the number comes from: exec, loads, links, pages; empty: no load.
        self.wanted = 0
        self.limit = ""
        #: Part of a second's work that a worker does per second with this load.
        self.fullness = config.fullness
        self._begin_ns: int | None = None
        #: What an earlier controller wanted, as long as its workers may come; then 0.
        self.recalled = 0
        #: Requests that were refused, and all, by as many workers as there are; what is older counts less.
        self._refused, self._asked, self._num_workers = 0.0, 0.0, 0
        #: Requests of the last hour, about.
        self._hour = 0.0
        #: Samples of the last seconds; and of the last minute, their work divided by the season's factor.
        self._recent: deque[tuple[int, KindSample]] = deque()
        self._usual: deque[tuple[int, KindSample]] = deque()
        self.season = Season(config.period_ns, config.season_gain)
        #: Ends of the trend's points, and the work per time in each; and what the next has by now.
        self._trend: deque[tuple[int, float]] = deque(maxlen=_POINTS)
        self._point_ns, self._point_work_ns = 0, 0.0
        self._slope = 0.0
        #: What the load needed at most of late, without those that are there for other reasons.
        self.needed = 0
        #: What was needed, and what for: times ascend, numbers fall.
        self._history: deque[tuple[int, int, str]] = deque()
        #: Fewer workers were short of pages, loads or links: how many were, with how much work, and until when that
        #: counts; it counts longer each time.
        self._short_of, self._short_work, self._short_until_ns, self._short_ns = 0, 0.0, 0, 0
        #: Since when that counts.
        self._short_since_ns = 0

    def recall(self, wanted: int, fullness: float, season: Sequence[float] = ()) -> None:
        """Begin with what an earlier controller wanted, as its workers come one by one, and with what they did."""
        config = self._config
        self.wanted = self.recalled = wanted
        if fullness:
            self.fullness = min(max(fullness, config.least_fullness), config.most_fullness)
        if len(season) == SLOTS:
            self.season.factors = list(season)

    def take(self, sample: KindSample, *, now_ns: int, start_ns: int) -> None:
        """Take in what has happened until now since the last sample.

        A worker is ready `start_ns` after it is asked for.
        """
        config, season = self._config, self.season
        if self._begin_ns is None:
            self._begin_ns = now_ns - sample.over_ns
        patience_ns = max(int(config.patience * start_ns), config.least_patience_ns)
        season.take(self._offered(sample), sample.over_ns, now_ns)
        plain = replace(sample, work_ns=sample.work_ns / season.factor(now_ns))
        level = _sum(self._recent, sample, now_ns, config.level_ns)
        usual = _sum(self._usual, plain, now_ns, config.usual_ns)
        self._point(plain, now_ns, start_ns)
        is_short = self._is_short(sample, level, patience_ns)
        self._learn(level, sample)
        # The load is that of half a minute ago, as a rule; one that is asked for when it is there is needed as long again.
        rise = self._slope * (start_ns + config.usual_ns // 2) / NS_PER_S
        work = (self._offered(usual) + rise) * season.most(now_ns, now_ns + 2 * start_ns)
        if is_short:
            work = max(work, self._offered(level))
        needed = math.ceil(work / self.fullness - 1e-9)
        # Refused clients ask again, so what is refused may be far more than there would be.
        needed = min(needed, max(_MOST_MORE * sample.num_workers, 1))
        limit = "exec" if needed else ""
        if needed >= self._short_of and now_ns <= self._short_since_ns + config.level_ns:
            # Its load was still rising, and now says as much by itself.
            self._short_until_ns = self._short_ns = 0
        if not level.num_young:
            loading = math.ceil(level.load_ns / level.over_ns / config.load_busy - 1e-9)
            if loading > needed:
                needed, limit = loading, "loads"
            more, lacked = _lacking(level) if is_short else (0, "")
            if more > needed:
                needed, limit = more, lacked
                self._was_short(more, work, patience_ns, now_ns)
        if (
            now_ns < self._short_until_ns
            and needed < self._short_of
            and 2 * work > self._short_work
        ):
            needed = self._short_of
        if not needed and level.num_without_worker:
            needed = 1
        self._hold(needed, limit, now_ns - patience_ns, now_ns)
        num_there = sample.num_workers + sample.num_joining
        least = min(num_there, 1)
        if now_ns - self._begin_ns < patience_ns:
            # What was needed before it began is not known. What is there may have been.
            least = max(num_there, self.recalled)
        else:
            self.recalled = 0
        self.wanted = max(self.needed, least)

    def _was_short(self, more: int, work: float, patience_ns: int, now_ns: int) -> None:
        """Remember that fewer workers were not enough, for longer if that comes again."""
        if now_ns > self._short_until_ns:
            self._short_since_ns = now_ns
            is_again = now_ns < self._short_until_ns + 2 * self._short_ns
            self._short_ns = min(2 * self._short_ns, _DAY_NS) if is_again else 4 * patience_ns
            self._short_of = 0
        if more > self._short_of:
            self._short_of, self._short_work = more, work
        self._short_until_ns = now_ns + self._short_ns

    def _hold(self, needed: int, limit: str, since_ns: int, now_ns: int) -> None:
        """Find the most that was needed since a time."""
        history = self._history
        while history and history[-1][1] <= needed:
            history.pop()
        history.append((now_ns, needed, limit))
        while history[0][0] < since_ns:
            history.popleft()
        _, self.needed, self.limit = history[0]

    def _offered(self, level: KindSample) -> float:
        """Work per time that was asked for."""
        work = level.work_ns / level.over_ns
        if level.num_run:
            return work * (1 + level.num_for_exec / level.num_run)
        # Nothing could run, so nothing says how long it takes: one more than there are.
        return self.fullness * (level.num_workers + 1) if level.num_for_exec else 0.0

    def _is_short(self, sample: KindSample, level: KindSample, patience_ns: int) -> bool:
        """Whether too many are refused, now and over a longer time: one alone of a few requests shows little."""
        kept, share = math.exp(-sample.over_ns / patience_ns), self._config.refused_share
        if sample.num_workers > self._num_workers:
            # What fewer refused says nothing of those that are there now.
            self._refused = self._asked = 0.0
        self._num_workers = sample.num_workers
        self._refused = kept * self._refused + sample.num_refused
        self._asked = kept * self._asked + sample.num_refused + sample.num_run
        is_now = level.num_refused > share * (level.num_refused + level.num_run)
        return is_now and self._refused > share * self._asked + _BY_CHANCE

    def _learn(self, level: KindSample, sample: KindSample) -> None:
        """Learn how full workers may be: ever fuller, and less full by what is refused, so that little is on the whole."""
        config, over_ns = self._config, sample.over_ns
        kept = math.exp(-over_ns / _HOUR_NS)
        self._hour = kept * self._hour + sample.num_run + sample.num_refused
        # Refusals by much fewer workers than are wanted say nothing of those. Workers with little to do show nothing.
        if not level.num_workers or 2 * level.num_workers < self.needed:
            return
        done = level.work_ns / level.over_ns / level.num_workers
        rise = config.learn_gain * over_ns / _HOUR_NS if 2 * done > self.fullness else 0.0
        allowed = max(config.refused_share / 2 * self._hour, 1.0)
        fall = min(config.learn_gain * sample.num_for_exec / allowed, over_ns / config.fall_ns)
        fullness = self.fullness * math.exp(rise - fall)
        self.fullness = min(max(fullness, config.least_fullness), config.most_fullness)

    def _point(self, sample: KindSample, now_ns: int, start_ns: int) -> None:
        """Add to the trend, which looks back for about three start-up times."""
        self._point_ns += sample.over_ns
        self._point_work_ns += self._offered(sample) * sample.over_ns
        if self._point_ns >= 3 * max(start_ns, self._config.usual_ns) / _POINTS:
            self._trend.append((now_ns, self._point_work_ns / self._point_ns))
            self._point_ns, self._point_work_ns = 0, 0.0
            self._slope = self._find_slope()

    def _find_slope(self) -> float:
        """By how much the work rises per second at least: from each quarter of the trend to the next. A step is no rise."""
        points = self._trend
        if len(points) < _POINTS:
            return 0.0
        works = [work for _, work in points]
        each = _POINTS // 4
        means = [sum(works[place : place + each]) / each for place in range(0, _POINTS, each)]
        least = min([after - before for before, after in pairwise(means)])
        # Differences between neighbours have twice the variance of the noise, whatever the trend.
        noise = sum([(after - before) ** 2 for before, after in pairwise(works)]) / 2 / _POINTS
        least -= self._config.doubt * math.sqrt(2 * noise / each)
        return max(0.0, least) * NS_PER_S * 4 / (points[-1][0] - points[0][0])


def _lacking(level: KindSample) -> tuple[int, str]:
    """How many workers there would have to be for what was refused, and what for; 0: nothing was."""
    present, lacks = (
        level.num_workers,
        {
            "links": level.num_for_links,
            "loads": level.num_for_loads,
            "pages": level.num_for_pages,
        },
    )
    refused = sum(lacks.values())
    if refused:
        # As many more as would serve them if each serves what one serves now.
        more = math.ceil(present * refused / level.num_run) if level.num_run else 1
        return present + min(max(more, 1), max(present, 1)), max(
            lacks, key=lambda name: lacks[name]
        )
    return (present + 1, "exec") if level.num_for_exec else (0, "")


def _sum(
    recent: deque[tuple[int, KindSample]], sample: KindSample, now_ns: int, length_ns: int
) -> KindSample:
    """Add a sample to others, and make one of those of some last time; where workers came or went, some are young."""
    recent.append((now_ns, sample))
    while recent[0][0] <= now_ns - length_ns:
        recent.popleft()
    samples = [each for _, each in recent]
    num_workers = samples[-1].num_workers
    return KindSample(
        over_ns=max(1, sum([each.over_ns for each in samples])),
        num_workers=num_workers,
        num_young=max(
            [max(each.num_young, abs(each.num_workers - num_workers)) for each in samples]
        ),
        **{name: sum([getattr(each, name) for each in samples]) for name in _SUMMED},
    )
