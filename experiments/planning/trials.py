"""Whether a size meets the target: one seed after the other, until it is clear."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import Scheduler
from controller.core.events import RefuseRequest, RequestArrived
from experiments.planning.question import LEAST_RUNS, Question, Size
from experiments.simulator import Case, Progress, bottleneck, run

# Student's t at 97.5 %, by degrees of freedom from 1; the last serves for more, and is on the safe side.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

# A run has missed the target beyond doubt if it has missed so many times as many requests as all of it may, and this many more.
_CLEAR_FACTOR, _CLEAR_REQUESTS = 4.0, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One run of a size, its warm-up left out."""

    #: Requests and how many were not answered inside their SLO, by SLO in ns.
    asked: dict[int, int]
    missed: dict[int, int]
    #: It was ended early, as its outcome was clear; what follows is unset then.
    cut: bool = False
    latency_p99_ms: float = 0.0
    goodput_rps: float = 0.0
    loads_per_s: float = 0.0
    mean_batch_size: float = 0.0
    utilisations: dict[str, float] = field(default_factory=dict)

    @property
    def num_asked(self) -> int:
        """All requests."""
        return sum(self.asked.values())

    @property
    def num_missed(self) -> int:
        """Those that were not answered inside their SLO."""
        return sum(self.missed.values())


@dataclass(slots=True)
class Trial:
    """The runs of a size."""

    size: Size
    target: float
    #: So many requests can show that the target is met.
    least_requests: int
    scores: list[Score] = field(default_factory=list)
    #: Several runs could not tell; it counts as missed.
    unclear: bool = False

    @property
    def num_asked(self) -> int:
        """Requests of all runs."""
        return sum(score.num_asked for score in self.scores)

    @property
    def attainment(self) -> float:
        """Share of the requests of all runs that were answered inside their SLO."""
        return 1 - sum(score.num_missed for score in self.scores) / max(1, self.num_asked)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the share over seeds; all that is possible with one run."""
        number = len(self.scores)
        if number < 2:
            return 0.0, 1.0
        mean = self.attainment
        # Runs are weighted by their requests: a ratio of two sums.
        rests = [score.num_asked * (1 - mean) - score.num_missed for score in self.scores]
        variance = sum(rest**2 for rest in rests) / (number - 1)
        wide = _STUDENT[min(number - 1, len(_STUDENT)) - 1] * math.sqrt(variance * number)
        wide /= max(1, self.num_asked)
        return max(0.0, mean - wide), min(1.0, mean + wide)

    @property
    def meets(self) -> bool | None:
        """Whether the target is met; None: that is not clear yet."""
        if any(score.cut for score in self.scores):
            return False
        low, high = self.interval
        if high < self.target:
            return False
        is_shown = len(self.scores) >= LEAST_RUNS and self.num_asked >= self.least_requests
        return True if low >= self.target and is_shown else None

    def attainment_of(self, slo_ns: int) -> float:
        """The share of requests with one SLO."""
        asked = sum(score.asked.get(slo_ns, 0) for score in self.scores)
        return 1 - sum(score.missed.get(slo_ns, 0) for score in self.scores) / max(1, asked)

    def mean(self, value: Callable[[Score], float]) -> float:
        """Mean of what whole runs have; 0 without any."""
        whole = [value(score) for score in self.scores if not score.cut]
        return sum(whole) / len(whole) if whole else 0.0

    def utilisations(self) -> dict[str, float]:
        """How busy each part was, mean of all whole runs."""
        names = next((score.utilisations for score in self.scores if not score.cut), {})
        return {name: self.mean(lambda score: score.utilisations[name]) for name in names}  # noqa: B023

    @property
    def bottleneck(self) -> str:
        """The part that was busiest; empty: no whole run says so."""
        busy = self.utilisations()
        return bottleneck(busy)[0] if busy else ""


@dataclass(slots=True)
class Tries:
    """Runs cases, counts runs, and says what it does."""

    tell: Callable[[str], None] = lambda _: None
    num_runs: int = 0
    _begin_s: float = field(default_factory=perf_counter)

    def trial(self, question: Question, size: Size) -> Trial:
        """Run until it is clear whether a size meets the target, or the question's `most_runs` are over."""
        trial = Trial(size, question.target, question.least_requests)
        while trial.meets is None and len(trial.scores) < question.most_runs:
            trial.scores.append(self.score(question, size, len(trial.scores), cut=True))
        trial.unclear = trial.meets is None
        return trial

    def extend(self, question: Question, trial: Trial) -> None:
        """Run with all the question's seeds, unless one misses the target beyond doubt."""
        while len(trial.scores) < question.most_runs and not any(s.cut for s in trial.scores):
            trial.scores.append(self.score(question, trial.size, len(trial.scores), cut=True))

    def complete(self, question: Question, trial: Trial, runs: int) -> None:
        """Run whole what was ended early, and until there are so many runs."""
        trial.scores[:] = [
            self.score(question, trial.size, number) if score.cut else score
            for number, score in enumerate(trial.scores)
        ]
        while len(trial.scores) < runs:
            trial.scores.append(self.score(question, trial.size, len(trial.scores)))

    def score(
        self,
        question: Question,
        size: Size,
        number: int,
        *,
        cut: bool = False,
        case: Case | None = None,
    ) -> Score:
        """Simulate once.

        Args:
            question: the question.
            size: workers of each kind.
            number: of the seed.
            cut: end it once it has missed the target beyond doubt.
            case: instead of the question's.
        """
        case = case or question.case_of(size, number)
        self.num_runs += 1
        counts = _Counts(question.warmup_ns)
        most = math.inf
        if cut and not case.workload.closed_loops:
            most = (1 - question.target) * question.expected_requests
            most = _CLEAR_FACTOR * most + _CLEAR_REQUESTS

        def on_progress(progress: Progress) -> None:
            self.tell(
                f"{question.words(size)}: run {number + 1}, {progress.simulated_ns / NS_PER_S:.1f} s of "
                f"{case.duration_ns / NS_PER_S:g} s; {self.num_runs} runs in {perf_counter() - self._begin_s:.0f} s"
            )
            if counts.num_missed > most:
                raise _ClearError

        try:
            done = run(
                case,
                bucket_ns=NS_PER_S // 20,
                on_progress=on_progress,
                progress_ns=NS_PER_S // 4,
                watch=counts,
            )
        except _ClearError:
            return Score(asked=counts.asked, missed=counts.missed, cut=True)
        if done.num_unanswered:
            # Their SLOs are not known, which does not matter: all workers are gone.
            slo_ns = next(iter(counts.asked), 0)
            for table in (counts.asked, counts.missed):
                table[slo_ns] = table.get(slo_ns, 0) + done.num_unanswered
        begin_ns, end_ns = question.warmup_ns, case.duration_ns
        total = done.summary.total(begin_ns, end_ns)
        seconds = (end_ns - begin_ns) / NS_PER_S
        return Score(
            asked=counts.asked,
            missed=counts.missed,
            latency_p99_ms=total.latency_ns(99) / NS_PER_MS,
            goodput_rps=total.answered / seconds,
            loads_per_s=total.loads / seconds,
            mean_batch_size=total.mean_batch_size,
            utilisations=done.utilisations(),
        )


class _ClearError(Exception):
    """The outcome of a run is clear before its end."""


class _Counts:
    """Counts requests by their SLO, once they are over."""

    def __init__(self, begin_ns: int) -> None:
        self._begin_ns = begin_ns
        self.asked: dict[int, int] = {}
        self.missed: dict[int, int] = {}
        self.num_missed = 0

    def arrived(self, request: RequestArrived, /) -> None:
        """A request is about to be opened."""

    def refused(self, request: RequestArrived, command: RefuseRequest, by: Scheduler, /) -> None:
        """The scheduler refuses a request."""

    def over(self, request: RequestArrived, refusal: Refusal | None, /) -> None:
        """A request is answered in time, or not."""
        if request.arrival_ns < self._begin_ns:
            return
        slo_ns = request.slo_ns
        self.asked[slo_ns] = self.asked.get(slo_ns, 0) + 1
        if refusal is not None:
            self.missed[slo_ns] = self.missed.get(slo_ns, 0) + 1
            self.num_missed += 1
