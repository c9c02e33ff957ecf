"""Answers a question: the size, what limits, what one worker and what each SLO changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S
from experiments.planning.limits import Constraint, limits_of
from experiments.planning.question import Question, Size
from experiments.planning.search import Search
from experiments.planning.trials import Trial, Tries

#: SLOs whose cost is found, those with the most requests.
_SLOS_COSTED = 4

# Runs of the sizes that are shown.
_RUNS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SloCost:
    """What an SLO costs."""

    slo_ns: int
    #: Share of the open-loop requests that have it, and how many of those met it.
    share: float
    attainment: float
    #: Size with half and with double the SLO; None: no number of workers does, or that was not asked.
    half: Size | None = None
    double: Size | None = None
    #: It is one of those whose cost was found.
    costed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """How many workers of which kind, and why."""

    question: Question
    size: Size
    #: By kind, the size of it alone; None: no number of such workers does.
    alone: dict[str, Size | None]
    planned: Trial
    #: With one worker less and one more, by kind; those with none to lose are left out.
    fewer: dict[str, Trial]
    more: dict[str, Trial]
    #: What keeps fewer workers from meeting the target; None: one is planned.
    limits: Constraint | None
    slos: tuple[SloCost, ...]
    #: All that was simulated for the size, by ascending number of workers, and how often in all.
    trials: tuple[Trial, ...]
    num_runs: int
    wall_s: float


def plan(
    question: Question,
    *,
    why: bool = True,
    slo_costs: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> WorkerPlan:
    """Find the cheapest size that meets the target.

    Args:
        question: what is asked.
        why: find what limits and what one worker more or less changes, too.
        slo_costs: find what each SLO costs, too.
        tell: is told what is being done.

    Raises:
        ConfigError: no size meets the target; says what helps.
    """
    begin_s = perf_counter()
    tries = Tries(tell)
    search = Search(question=question, tries=tries)
    search.check_reachable()
    planned = search.confirmed()
    if planned is None:
        raise _hopeless(search)
    size = planned.size
    fewer, more = _beside(search, size) if why else ({}, {})
    limits = None
    if fewer:
        # Where several kinds are there, of the one with the most workers.
        kind = max(fewer, key=lambda name: question.named(size)[name])
        limits = limits_of(question, tries, fewer[kind])
    return WorkerPlan(
        question=question,
        size=size,
        alone={kind.name: _alone(search, number) for number, kind in enumerate(question.kinds)},
        planned=planned,
        fewer=fewer,
        more=more,
        limits=limits,
        slos=tuple(_slos(search, planned, slo_costs=slo_costs)),
        trials=tuple(sorted(search.trials.values(), key=lambda trial: sum(trial.size))),
        num_runs=tries.num_runs,
        wall_s=perf_counter() - begin_s,
    )


def _alone(search: Search, kind: int) -> Size | None:
    """What the search has found of a kind alone."""
    least = search.question.least
    rest = least[:kind] + least[kind + 1 :]
    found = [size for size in search.meeting if size[:kind] + size[kind + 1 :] == rest]
    return min(found, key=sum, default=None)


def _beside(search: Search, size: Size) -> tuple[dict[str, Trial], dict[str, Trial]]:
    question, tries = search.question, search.tries
    sides: tuple[dict[str, Trial], dict[str, Trial]] = ({}, {})
    for number, kind in enumerate(question.kinds):
        for change, found in zip((-1, 1), sides, strict=True):
            beside = (*size[:number], size[number] + change, *size[number + 1 :])
            if beside[number] < 0 or not sum(beside) or (not size[number] and change > 0):
                continue
            trial = search.trials.get(beside) or Trial(
                beside, question.target, question.least_requests
            )
            tries.complete(question, trial, _RUNS_SHOWN)
            found[kind.name] = trial
    return sides


def _slos(search: Search, planned: Trial, *, slo_costs: bool) -> list[SloCost]:
    question = search.question
    asked = question.slos_ns()
    costed = sorted(asked, key=lambda slo_ns: -asked[slo_ns])[:_SLOS_COSTED] if slo_costs else []
    total = sum(asked.values()) or 1.0
    found = []
    for slo_ns, number in asked.items():
        cost = SloCost(
            slo_ns=slo_ns,
            share=number / total,
            attainment=planned.attainment_of(slo_ns),
        )
        if slo_ns in costed:
            half, double = (_with_slo(search, slo_ns, factor) for factor in (0.5, 2.0))
            cost = replace(cost, half=half, double=double, costed=True)
        found.append(cost)
    return found


def _with_slo(search: Search, slo_ns: int, factor: float) -> Size | None:
    """The cheapest size if an SLO were another."""
    question = search.question
    workload = question.case.workload.with_slos({slo_ns: round(slo_ns * factor)})
    changed = Search(
        question=replace(question, case=replace(question.case, workload=workload)),
        tries=search.tries,
    )
    # Longer SLOs miss no more than shorter ones.
    if factor > 1:
        changed.meeting |= search.meeting
    else:
        changed.missing |= search.missing
    try:
        changed.check_reachable()
    except ConfigError:
        return None
    return changed.cheapest()


def _hopeless(search: Search) -> ConfigError:
    question = search.question
    if not search.trials:
        return ConfigError(
            f"no schedule could meet {100 * question.target:g} % with {question.most_workers} workers of each kind: "
            "more workers may (--most-workers)"
        )
    best = max(search.trials.values(), key=lambda trial: (trial.attainment, sum(trial.size)))
    limits = limits_of(question, search.tries, best)
    words = question.words(best.size)
    if best.unclear:
        return ConfigError(
            f"{len(best.scores)} runs of {question.case.duration_ns / NS_PER_S:g} s could not tell whether {words} meets "
            f"{100 * question.target:g} %: found {100 * best.attainment:.4g} %; more runs, or a longer case or --stretch-s, help"
        )
    helps = {
        "pages": "more pages per worker (`num_pages`)",
        "loads": "more pages per worker (`num_pages`), or longer SLOs: weights are loaded too often for the time",
        "links": "faster links, or fronts that send tensors to workers directly",
        "controller": "a second controller for a part of the models, or fewer requests: its core is the limit",
    }.get(limits.name, "a longer SLO, a faster kind, or more workers (--most-workers)")
    return ConfigError(
        f"no size up to {question.most_workers} workers of a kind meets {100 * question.target:g} %: {words} answer "
        f"{100 * best.attainment:.4g} % inside their SLO; what helps: {helps}"
    )
