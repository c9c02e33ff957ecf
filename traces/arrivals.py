"""When requests arrive: open-loop sources, closed-loop clients, and the workload that they make up.

A `Workload` is a value: it can be pickled, and the same value always gives the same requests. The
simulator and the live client (`traces.replay`) are driven by the same one. Its open-loop requests come
as an iterator in order of time. It is made window by window with numpy, so memory stays flat over hundreds
of millions of requests. Its closed-loop clients are only described: when they ask depends on when they are
answered.

Each source draws from a generator of its own. Merging, slicing and adding sources therefore leave the
arrivals of the others as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from clockwright.units import NS_PER_S

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Models: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

# Requests of this long are made and sorted together. At the paper's 5,000 requests per second these are
# 50,000: enough for numpy to pay, and few enough to start at once.
WINDOW_NS = 10 * NS_PER_S
NS_PER_MINUTE = 60 * NS_PER_S


class WorkloadRequest(NamedTuple):
    """One open-loop request. A NamedTuple of plain ints costs the least to make of all records."""

    #: When it is due, since the start of the workload.
    time_ns: int
    #: Position in the workload's `models`.
    model: int
    slo_ns: int
    #: Position in the workload's `tenants`; the first is "no tenant".
    tenant: int = 0


class Arrivals(NamedTuple):
    """Consecutive requests, in order of time; four arrays of one length."""

    time_ns: Ints
    model: Ints
    slo_ns: Ints
    tenant: Ints


class Chunk(NamedTuple):
    """Some arrivals of one source, in any order."""

    #: With this chunk, every arrival before this time has been given.
    covered_ns: int
    time_ns: Ints
    model: Ints
    tenant: Ints


class Source(Protocol):
    """One open-loop stream of requests; a frozen value."""

    @property
    def models(self) -> Models:
        """Positions in the workload's `models`."""

    @property
    def tenants(self) -> Models:
        """Positions in the workload's `tenants`; the first is "no tenant"."""

    @property
    def slo_ns(self) -> int:
        """SLO of every request."""

    @property
    def begin_ns(self) -> int:
        """No arrival before this."""

    @property
    def end_ns(self) -> int:
        """No arrival at or after this."""

    @property
    def scale(self) -> float:
        """Rates are multiplied by it."""

    @property
    def seed(self) -> int:
        """Seed of everything that is random in the source."""

    def chunks(self) -> Iterator[Chunk]:
        """Return all arrivals from `begin_ns` to `end_ns`; each call starts again."""

    def expected(self, begin_ns: int, end_ns: int) -> float:
        """Mean number of arrivals between two times."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rated:
    """What sources of one rate have in common."""

    models: Models
    #: Requests per second, of all models together.
    rate_rps: float
    slo_ns: int
    begin_ns: int = 0
    end_ns: int
    seed: int
    scale: float = 1.0
    #: Each arrival is from one of them, as it is to one of the models.
    tenants: Models = (0,)

    def __post_init__(self) -> None:
        _check_scale(self.scale)
        if not (math.isfinite(self.rate_rps) and self.rate_rps >= 0):
            raise ValueError(f"rate_rps is {self.rate_rps}, expected a number of at least 0")
        if self.slo_ns <= 0:
            raise ValueError(f"slo_ns is {self.slo_ns}, expected above 0")
        for name in ("models", "tenants"):
            if len(getattr(self, name)) == 0:
                raise ValueError(f"{name} is empty, expected at least one")

    def expected(self, begin_ns: int, end_ns: int) -> float:
        """Mean number of arrivals between two times."""
        return self.rate_rps * self.scale * self._overlap_ns(begin_ns, end_ns) / NS_PER_S

    def _overlap_ns(self, begin_ns: int, end_ns: int) -> int:
        return max(0, min(self.end_ns, end_ns) - max(self.begin_ns, begin_ns))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Poisson(_Rated):
    """A Poisson process; each arrival goes to one of the models, all equally likely."""

    def chunks(self) -> Iterator[Chunk]:
        """Draw the number of arrivals of each window, then where in it they lie: the same process."""
        generator = np.random.default_rng(self.seed)
        models = np.asarray(self.models, np.int64)
        tenants = np.asarray(self.tenants, np.int64)
        for begin_ns, end_ns in _windows(self.begin_ns, self.end_ns):
            num = generator.poisson(self.rate_rps * self.scale * (end_ns - begin_ns) / NS_PER_S)
            times = begin_ns + _floor(generator.random(num) * (end_ns - begin_ns))
            chosen = _pick(generator, models, num)
            yield Chunk(end_ns, times, chosen, _pick(generator, tenants, num))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FixedRate(_Rated):
    """One request per period, to the models, and from the tenants, in turn; each late by a uniform jitter.

    The first comes after one period, as from Clockwork's client. What is expected is so to within one and the jitter.
    """

    #: Each request is up to this much late, independently; it may overtake the one before.
    jitter_ns: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _Rated.__post_init__(self)
        if self.jitter_ns < 0:
            raise ValueError(f"jitter_ns is {self.jitter_ns}, expected at least 0")

    def chunks(self) -> Iterator[Chunk]:
        """Count periods from `begin_ns`, so that no rounding adds up."""
        if not self.rate_rps * self.scale:
            return
        generator = np.random.default_rng(self.seed)
        models = np.asarray(self.models, np.int64)
        tenants = np.asarray(self.tenants, np.int64)
        period_ns = NS_PER_S / (self.rate_rps * self.scale)
        num = max(1, math.ceil(min(WINDOW_NS, self.end_ns - self.begin_ns) / period_ns))
        first = 1
        while (begin_ns := self.begin_ns + int(first * period_ns)) < self.end_ns:
            number = np.arange(first, first + num)
            times = self.begin_ns + _floor(number * period_ns)
            times += _floor(generator.random(num) * self.jitter_ns)
            inside = times < self.end_ns
            first += num
            covered_ns = max(begin_ns, self.begin_ns + int(first * period_ns))
            turn = number[inside] - 1
            chosen = models[turn % len(models)]
            yield Chunk(covered_ns, times[inside], chosen, tenants[turn % len(tenants)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bursty(_Rated):
    """Bursts and pauses of exponential length; in a burst, a Poisson process of the rate.

    Whether it begins in a burst is drawn, so that it is stationary (Clockwork's client always begins
    in one). `scale` changes the rate inside bursts, not their lengths.
    """

    #: Mean lengths of bursts and of pauses.
    burst_ns: int
    pause_ns: int

    def __post_init__(self) -> None:
        _Rated.__post_init__(self)
        if self.burst_ns <= 0 or self.pause_ns < 0:
            raise ValueError(
                f"burst_ns is {self.burst_ns} and pause_ns {self.pause_ns}, expected above 0 and at least 0"
            )

    def chunks(self) -> Iterator[Chunk]:
        """Draw some bursts with the pauses after them at a time."""
        generator = np.random.default_rng(self.seed)
        models = np.asarray(self.models, np.int64)
        tenants = np.asarray(self.tenants, np.int64)
        cycle_ns = self.burst_ns + self.pause_ns
        num = max(1, math.ceil(min(WINDOW_NS, self.end_ns - self.begin_ns) / cycle_ns))
        begin_ns = float(self.begin_ns)
        if generator.random() * cycle_ns < self.pause_ns:
            begin_ns += generator.standard_exponential() * self.pause_ns
        while begin_ns < self.end_ns:
            bursts = generator.standard_exponential(num) * self.burst_ns
            pauses = generator.standard_exponential(num) * self.pause_ns
            ends = begin_ns + np.cumsum(bursts + pauses)
            counts = generator.poisson(bursts * (self.rate_rps * self.scale / NS_PER_S))
            offsets = generator.random(int(counts.sum())) * np.repeat(bursts, counts)
            times = _floor(np.repeat(ends - pauses - bursts, counts) + offsets)
            inside = times < self.end_ns
            begin_ns = float(ends[-1])
            chosen = _pick(generator, models, len(times))
            who = _pick(generator, tenants, len(times))
            yield Chunk(int(begin_ns), times[inside], chosen[inside], who[inside])

    def expected(self, begin_ns: int, end_ns: int) -> float:
        """Mean number of arrivals between two times."""
        share = self.burst_ns / (self.burst_ns + self.pause_ns)
        return self.rate_rps * self.scale * share * self._overlap_ns(begin_ns, end_ns) / NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PerMinute:
    """What sources of counts per minute have in common."""

    #: Invocations; shape (function, minute).
    counts: npt.NDArray[np.int32]
    #: Model of each function, by its position in the workload's `models`.
    models: npt.NDArray[np.integer]
    slo_ns: int
    begin_ns: int = 0
    seed: int
    scale: float = 1.0
    #: Tenant of each function, by its position in the workload's `tenants`; empty: no tenant for all.
    tenants: Models = ()

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or len(self.counts) != len(self.models):
            raise ValueError(
                f"counts have shape {self.counts.shape}, expected one row for each of {len(self.models)} functions"
            )
        _check_scale(self.scale)
        _check_tenants(self.tenants, len(self.models))

    @property
    def end_ns(self) -> int:
        """When the last minute is over."""
        return self.begin_ns + int(self.counts.shape[1]) * NS_PER_MINUTE

    def expected(self, begin_ns: int, end_ns: int) -> float:
        """Mean number of arrivals between two times, those of a minute taken as spread over it."""
        per_minute = self.counts.sum(axis=0, dtype=np.int64)
        begins = self.begin_ns + np.arange(len(per_minute)) * NS_PER_MINUTE
        overlap = np.minimum(begins + NS_PER_MINUTE, end_ns) - np.maximum(begins, begin_ns)
        return self.scale * float(per_minute @ np.maximum(overlap, 0) / NS_PER_MINUTE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceReplay(_PerMinute):
    """Per-minute counts as rates: each function is a Poisson process, its rate that of the minute.

    Exact over the borders of minutes: what is left of an exponential gap goes on at the rate of the
    next minute, and minutes of rate zero do not shorten it. So did Clockwork's client (PoissonTraceReplay
    in workload.h), function by function, each seeded by its index; here one generator draws for all
    functions together, which makes 140 million requests a matter of seconds.
    """

    def chunks(self) -> Iterator[Chunk]:
        """Advance all functions a window at a time."""
        generator = np.random.default_rng(self.seed)
        models = np.asarray(self.models, np.int64)
        tenants = _each(self.tenants, len(models))
        residual = generator.standard_exponential(len(models))
        for begin_ns, end_ns in _windows(self.begin_ns, self.end_ns):
            minute = (begin_ns - self.begin_ns) // NS_PER_MINUTE
            share = (end_ns - begin_ns) / NS_PER_MINUTE
            expected = self.counts[:, minute].astype(np.float64) * (self.scale * share)
            functions, positions = _advance(generator, residual, expected)
            times = begin_ns + _floor(positions * (end_ns - begin_ns))
            yield Chunk(end_ns, times, models[functions], tenants[functions])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvenReplay(_PerMinute):
    """Per-minute counts as firings evenly spaced over their minute, the first at second 0.

    What timers do, which a Poisson process hides: thousands of them fire in the same instant. Scaled
    by s, a function makes the share s of its firings so far, rounded down.
    """

    seed: int = 0

    def chunks(self) -> Iterator[Chunk]:
        """Give a minute at a time."""
        models = np.asarray(self.models, np.int64)
        tenants = _each(self.tenants, len(models))
        # Where in its unit each function begins: otherwise all would round down together.
        phase = np.random.default_rng(self.seed).random(len(models)) if self.scale % 1 else 0.0
        made = np.zeros(len(models), np.int64)
        before = np.zeros(len(models), np.int64)
        for minute in range(self.counts.shape[1]):
            before += self.counts[:, minute]
            until = _floor(before * self.scale + phase)
            num = until - made
            made = until
            position = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
            begin_ns = self.begin_ns + minute * NS_PER_MINUTE
            times = begin_ns + position * NS_PER_MINUTE // np.repeat(num, num)
            yield Chunk(
                begin_ns + NS_PER_MINUTE, times, np.repeat(models, num), np.repeat(tenants, num)
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """Arrivals at recorded times.

    Scaled by s, each is kept, left out or repeated so that s of it are left on average; repetitions
    lie anywhere in the minute after it, because together they would be one burst.
    """

    #: Times of the arrivals, in any order.
    times_ns: Ints
    #: Model of each arrival, by its position in the workload's `models`.
    models: npt.NDArray[np.integer]
    slo_ns: int
    end_ns: int
    begin_ns: int = 0
    seed: int = 0
    scale: float = 1.0
    #: Tenant of each arrival, by its position in the workload's `tenants`; empty: no tenant for all.
    tenants: Models = ()

    def __post_init__(self) -> None:
        _check_scale(self.scale)
        if len(self.times_ns) != len(self.models):
            raise ValueError(f"{len(self.times_ns)} times but {len(self.models)} models")
        _check_tenants(self.tenants, len(self.models))

    def chunks(self) -> Iterator[Chunk]:
        """Give everything at once; it was in memory before."""
        generator = np.random.default_rng(self.seed)
        whole = math.floor(self.scale)
        copies = whole + (generator.random(len(self.times_ns)) < self.scale - whole)
        first = np.repeat(np.cumsum(copies) - copies, copies) == np.arange(copies.sum())
        times = np.repeat(np.asarray(self.times_ns, np.int64), copies)
        times += np.where(first, 0, _floor(generator.random(len(times)) * NS_PER_MINUTE))
        models = np.repeat(np.asarray(self.models, np.int64), copies)
        inside = (times >= self.begin_ns) & (times < self.end_ns)
        tenants = np.repeat(_each(self.tenants, len(self.times_ns)), copies)
        yield Chunk(self.end_ns, times[inside], models[inside], tenants[inside])

    def expected(self, begin_ns: int, end_ns: int) -> float:
        """Mean number of arrivals between two times; repetitions counted where their first is."""
        begin_ns, end_ns = max(begin_ns, self.begin_ns), min(end_ns, self.end_ns)
        inside = (self.times_ns >= begin_ns) & (self.times_ns < end_ns)
        return self.scale * float(np.count_nonzero(inside))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """The arrivals of another source from one time to another; the first becomes time 0."""

    source: Source
    from_ns: int
    to_ns: int

    @property
    def models(self) -> Models:
        """Models of the whole source."""
        return self.source.models

    @property
    def tenants(self) -> Models:
        """Tenants of the whole source."""
        return self.source.tenants

    @property
    def slo_ns(self) -> int:
        """SLO of the source."""
        return self.source.slo_ns

    @property
    def scale(self) -> float:
        """Scale of the source."""
        return self.source.scale

    @property
    def seed(self) -> int:
        """Seed of the source."""
        return self.source.seed

    @property
    def begin_ns(self) -> int:
        """No arrival before this."""
        return max(0, self.source.begin_ns - self.from_ns)

    @property
    def end_ns(self) -> int:
        """No arrival at or after this."""
        return max(0, min(self.source.end_ns, self.to_ns) - self.from_ns)

    def chunks(self) -> Iterator[Chunk]:
        """Draw what comes before the slice too, so that its arrivals are those of the whole source."""
        for chunk in self.source.chunks():
            if chunk.covered_ns > self.from_ns:
                inside = (chunk.time_ns >= self.from_ns) & (chunk.time_ns < self.to_ns)
                times = chunk.time_ns[inside] - self.from_ns
                model, tenant = chunk.model[inside], chunk.tenant[inside]
                yield Chunk(chunk.covered_ns - self.from_ns, times, model, tenant)
            if chunk.covered_ns >= self.to_ns:
                return

    def expected(self, begin_ns: int, end_ns: int) -> float:
        """Mean number of arrivals between two times."""
        return self.source.expected(
            max(begin_ns, 0) + self.from_ns, min(end_ns + self.from_ns, self.to_ns)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedLoop:
    """Clients that send the next request as soon as they are answered, each with one open request.

    The simulator or the live client sends the first request of each client at its `starts_ns`, and the next
    when a response arrives, until `end_ns`. It decides how long a refused client waits.
    """

    #: Position in the workload's `models`.
    model: int
    #: Number of clients.
    concurrency: int
    slo_ns: int
    begin_ns: int = 0
    #: No request is sent at or after this.
    end_ns: int
    #: Clients start uniformly over this long.
    start_jitter_ns: int = 0
    seed: int = 0
    #: Their tenant, by position in the workload's `tenants`.
    tenant: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}, expected at least 1")
        if self.start_jitter_ns < 0 or self.slo_ns <= 0:
            raise ValueError(
                f"start_jitter_ns is {self.start_jitter_ns} and slo_ns {self.slo_ns}, "
                "expected at least 0 and above 0"
            )

    def starts_ns(self) -> list[int]:
        """When each client sends its first request, in order of time."""
        generator = np.random.default_rng(self.seed)
        jitter = _floor(generator.random(self.concurrency) * self.start_jitter_ns)
        starts: list[int] = (self.begin_ns + np.sort(jitter)).tolist()
        return starts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Requests of all clients together. A value: picklable, and the same value gives the same requests."""

    #: Names of the models, as clients and servers know them.
    models: tuple[str, ...]
    sources: tuple[Source, ...] = ()
    closed_loops: tuple[ClosedLoop, ...] = ()
    #: Names of the tenants; the first is empty, for requests without a tenant.
    tenants: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        if self.tenants[:1] != ("",):
            raise ValueError(f"tenants begin with {self.tenants[:1]}, expected an empty name")
        for source in self.sources:
            _check_positions(source.models, len(self.models), "model")
            _check_positions(source.tenants, len(self.tenants), "tenant")
        for loop in self.closed_loops:
            _check_positions((loop.model,), len(self.models), "model")
            _check_positions((loop.tenant,), len(self.tenants), "tenant")

    @property
    def end_ns(self) -> int:
        """No request is sent at or after this."""
        open_ns = max((source.end_ns for source in self.sources), default=0)
        return max([open_ns, *(loop.end_ns for loop in self.closed_loops)])

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Return the open-loop requests in order of time; each call starts again."""
        make = WorkloadRequest._make
        for arrivals in self.arrivals():
            yield from map(make, zip(*(column.tolist() for column in arrivals), strict=True))

    def arrivals(self) -> Iterator[Arrivals]:
        """Give the same requests as arrays, about `WINDOW_NS` of them at a time, none empty."""
        waiting = sorted(self.sources, key=lambda source: source.begin_ns, reverse=True)
        active: list[_Active] = []
        pending = [Arrivals(*(np.empty(0, np.int64) for _ in Arrivals._fields))]
        until_ns = 0
        while active or waiting or len(pending[0].time_ns):
            if not active and not len(pending[0].time_ns):
                until_ns = max(until_ns, waiting[-1].begin_ns)
            # Nothing comes before the first of these; a file may have gaps of years.
            next_ns = [source.begin_ns for source in waiting[-1:]]
            next_ns += [source.covered_ns for source in active]
            next_ns += pending[0].time_ns[:1].tolist()
            until_ns += max(0, (min(next_ns) - until_ns) // WINDOW_NS * WINDOW_NS)
            until_ns += WINDOW_NS
            while waiting and waiting[-1].begin_ns < until_ns:
                active.append(_Active(waiting.pop()))
            for source in active:
                pending.extend(source.take(until_ns))
            active = [source for source in active if not source.exhausted]
            if len(pending) == 1 and not len(pending[0].time_ns):
                continue
            now, later = _split(pending, until_ns)
            pending = [later]
            if len(now.time_ns):
                yield now

    def expected_requests(self, begin_ns: int = 0, end_ns: int | None = None) -> float:
        """Mean number of open-loop requests between two times; None: all that follow."""
        end_ns = self.end_ns if end_ns is None else end_ns
        return sum(source.expected(begin_ns, max(begin_ns, end_ns)) for source in self.sources)

    def scaled(self, factor: float) -> Workload:
        """Multiply all open-loop rates; closed loops stay as they are."""
        return replace(
            self,
            sources=tuple(
                _change(source, lambda s: replace(s, scale=s.scale * factor))  # type: ignore[type-var]
                for source in self.sources
            ),
        )

    def sliced(self, begin_ns: int, end_ns: int) -> Workload:
        """Keep what happens between two times; `begin_ns` becomes time 0.

        Open-loop requests are those of the whole workload. Closed-loop clients that began before
        begin at once.
        """
        if not 0 <= begin_ns <= end_ns:
            raise ValueError(f"from {begin_ns} to {end_ns} ns: expected 0 <= begin <= end")
        return replace(
            self,
            sources=tuple(
                Slice(source=source, from_ns=begin_ns, to_ns=end_ns)
                for source in self.sources
                if source.begin_ns < end_ns and source.end_ns > begin_ns
            ),
            closed_loops=tuple(
                replace(
                    loop,
                    begin_ns=max(0, loop.begin_ns - begin_ns),
                    end_ns=min(loop.end_ns, end_ns) - begin_ns,
                )
                for loop in self.closed_loops
                if loop.begin_ns < end_ns and loop.end_ns > begin_ns
            ),
        )

    def with_slos(self, changed: Mapping[int, int]) -> Workload:
        """Give requests of some SLOs others; in ns, by what they had."""
        return replace(
            self,
            sources=tuple(
                _change(source, lambda s: replace(s, slo_ns=changed.get(s.slo_ns, s.slo_ns)))  # type: ignore[type-var]
                for source in self.sources
            ),
            closed_loops=tuple(
                replace(loop, slo_ns=changed.get(loop.slo_ns, loop.slo_ns))
                for loop in self.closed_loops
            ),
        )

    def reseeded(self, seed: int) -> Workload:
        """Return another repeatable sample of the same workload."""

        def derived(old: int) -> int:
            return int(np.random.SeedSequence([seed, old]).generate_state(1, np.uint64)[0])

        return replace(
            self,
            sources=tuple(
                _change(source, lambda s: replace(s, seed=derived(s.seed)))  # type: ignore[type-var]
                for source in self.sources
            ),
            closed_loops=tuple(
                replace(loop, seed=derived(loop.seed)) for loop in self.closed_loops
            ),
        )


def merge(*workloads: Workload) -> Workload:
    """Merge several workloads that run at the same time; models of the same name are the same, and so are tenants."""
    names = tuple(dict.fromkeys(name for workload in workloads for name in workload.models))
    tenants = tuple(dict.fromkeys(name for workload in workloads for name in workload.tenants))
    sources: list[Source] = []
    closed_loops: list[ClosedLoop] = []
    for workload in workloads:
        model_table = _positions(workload.models, names)
        tenant_table = _positions(workload.tenants, tenants)
        sources += [_rename(source, model_table, tenant_table) for source in workload.sources]
        closed_loops += [
            replace(loop, model=int(model_table[loop.model]), tenant=int(tenant_table[loop.tenant]))
            for loop in workload.closed_loops
        ]
    return Workload(
        models=names, sources=tuple(sources), closed_loops=tuple(closed_loops), tenants=tenants
    )


def _positions(names: tuple[str, ...], among: tuple[str, ...]) -> Ints:
    position = {name: index for index, name in enumerate(among)}
    return np.array([position[name] for name in names], np.int64)


class _Active:
    """A source that has begun."""

    def __init__(self, source: Source) -> None:
        self._chunks = source.chunks()
        self._slo_ns = source.slo_ns
        #: All that comes before this has been drawn.
        self.covered_ns = source.begin_ns
        self.exhausted = False

    def take(self, until_ns: int) -> Iterator[Arrivals]:
        """Draw at least all that comes before `until_ns`."""
        while self.covered_ns < until_ns:
            chunk = next(self._chunks, None)
            if chunk is None:
                self.exhausted = True
                return
            self.covered_ns = chunk.covered_ns
            if len(chunk.time_ns):
                slos = np.full(len(chunk.time_ns), self._slo_ns, np.int64)
                yield Arrivals(chunk.time_ns, chunk.model, slos, chunk.tenant)


def _split(pending: list[Arrivals], until_ns: int) -> tuple[Arrivals, Arrivals]:
    columns = [np.concatenate(column) for column in zip(*pending, strict=True)]
    # The sort is stable: requests of one instant keep the order of their sources.
    order = np.argsort(columns[0], kind="stable")
    columns = [column[order] for column in columns]
    cut = int(np.searchsorted(columns[0], until_ns))
    return Arrivals(*(c[:cut] for c in columns)), Arrivals(*(c[cut:] for c in columns))


def _advance(
    generator: np.random.Generator, residual: Floats, expected: Floats
) -> tuple[npt.NDArray[np.intp], Floats]:
    """Advance unit-rate Poisson processes, each by its own length.

    Args:
        generator: draws gaps.
        residual: distance to the next arrival of each process; updated to the distance that is left.
        expected: how far each goes: its expected number of arrivals.

    Returns:
        The arrivals: which process, and at which fraction of its distance, 0 to 1.
    """
    who = np.flatnonzero(residual < expected)
    limit = expected[who]
    position = residual[who]
    residual -= expected
    functions, positions = [who], [position / limit]
    while len(who):
        # Draw about as many gaps as the rest of each distance needs. A process that needs more takes another round.
        num = np.ceil(limit - position).astype(np.int64) + 1
        ends = np.cumsum(num)
        begins = ends - num
        gaps = generator.standard_exponential(int(ends[-1]))
        walked = np.cumsum(gaps)
        points = walked - np.repeat(walked[begins] - gaps[begins] - position, num)
        inside = points < np.repeat(limit, num)
        functions.append(np.repeat(who, num)[inside])
        positions.append(points[inside] / np.repeat(limit, num)[inside])
        num_inside = np.add.reduceat(inside, begins, dtype=np.int64)
        done = num_inside < num
        residual[who[done]] = points[(begins + num_inside)[done]] - limit[done]
        position = points[ends - 1][~done]
        who, limit = who[~done], limit[~done]
    return np.concatenate(functions), np.concatenate(positions)


def _windows(begin_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
    for window_ns in range(begin_ns, end_ns, WINDOW_NS):
        yield window_ns, min(window_ns + WINDOW_NS, end_ns)


def _floor(values: npt.NDArray[np.floating]) -> Ints:
    return values.astype(np.int64)


def _pick(generator: np.random.Generator, models: Ints, num: int) -> Ints:
    if len(models) == 1:
        return np.full(num, models[0], np.int64)
    return models[generator.integers(0, len(models), num)]


def _change(source: Source, change: Callable[[Source], Source]) -> Source:
    """Change a source, or the source inside its slices."""
    if isinstance(source, Slice):
        return replace(source, source=_change(source.source, change))
    return change(source)


def _rename(source: Source, models: Ints, tenants: Ints) -> Source:
    return _change(
        source,
        lambda s: replace(  # type: ignore[type-var]
            s,
            models=models[np.asarray(s.models, np.int64)],
            tenants=tenants[np.asarray(s.tenants, np.int64)],
        ),
    )


def _check_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale is {scale}, expected a number of at least 0")


def _each(tenants: Models, num: int) -> Ints:
    """The tenant of each of `num` items; no tenant if none are given."""
    return np.asarray(tenants if len(tenants) else np.zeros(num), np.int64)


def _check_tenants(tenants: Models, num: int) -> None:
    if len(tenants) not in (0, num):
        raise ValueError(f"{len(tenants)} tenants, expected {num} or none")


def _check_positions(positions: Models, num: int, what: str) -> None:
    if len(positions) == 0:
        return
    if isinstance(positions, range):
        low, high = sorted((positions[0], positions[-1]))
    else:
        low, high = int(np.min(positions)), int(np.max(positions))
    if low < 0 or high >= num:
        raise ValueError(f"{what} {low if low < 0 else high}: expected 0 to {num - 1}")
