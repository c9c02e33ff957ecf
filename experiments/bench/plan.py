"""Sizes that `clockwright plan` finds, tried with other seeds than it used: `plan.json`.

`make bench NAME=bench-plan`. Each workload is a number of models of the paper's Table 1, evenly popular or by Zipf's
law, asked at random times, or in bursts, with SLOs of 25 to 500 ms, on a card as fast as the paper's, on a slower one, or on
the cheapest mixture of both. Weights of 40 models do not fit on either, and every fifth workload has links of 5 Gb/s. Then other seeds draw the arrivals and the noise, and play them to the planned size, and to
one worker fewer, of either kind where there are two:

* `plan_meets_share`: of the planned sizes, those that meet the target over all these runs together;
* `plan_tight_share`: those where one worker fewer misses it.

Nothing is timed, so that the same setting gives the same figures on every machine.

    python -m experiments bench-plan --workloads 2 --directory /tmp/plan
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import Annotated, Any

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S
from experiments.planning import Question, Size, plan
from experiments.planning.trials import Trial, Tries
from experiments.simulator import (
    Case,
    Cluster,
    Network,
    WorkerKind,
    copies_of,
    slower_kind,
)
from experiments.study.study import NO_COLUMN, ONLY_RECORD, ONLY_TABLE, Study
from modelzoo.profile import Noise, ProfileRow, load_profile
from traces.arrivals import Bursty, Poisson, Source, Workload

_ROWS = load_profile("table1").rows
_NETWORKS = ("googlenet", "resnet18_v1", "resnet50_v1b", "densenet121", "resnet152_v1b")
_SLOS_MS = (25, 50, 100, 250, 500)
_MODELS = (1, 3, 10, 40)
_TARGETS = (0.99, 0.999)
# Other seeds than any that a plan draws.
_OTHER_SEED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is asked."""

    workloads: int = 24
    #: Requests that one run counts, about.
    requests: int = 6000
    #: Runs with other seeds.
    others: int = 10
    seed: int = 1
    #: Find what limits, too: a third of the time.
    limits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A workload, its planned size, and how it does with other seeds."""

    workload: str
    target_pct: float
    #: What is asked, in words.
    asked: Annotated[str, ONLY_TABLE]
    workers: Annotated[str, ONLY_TABLE]
    num_workers: int
    #: What keeps fewer from meeting the target.
    limit: Annotated[str, ONLY_TABLE]
    #: Share of the requests inside their SLO: as planned, and with other seeds, with and without one worker.
    planned_pct: float
    others_pct: float
    fewer_pct: float
    meets: bool
    tight: bool
    runs: Annotated[int, ONLY_RECORD]
    #: Processor time of the plan, which is said only.
    cpu_s: Annotated[float, NO_COLUMN]


def workload_of(setting: Setting, number: int) -> tuple[Question, str]:
    """Draw a workload; gives what is asked, and the same in words."""
    draw = random.Random(f"plan {setting.seed} {number}")
    kinds = ("card", "slower", "both")[number % 3]
    bursts, zipf = number % 2 == 1, number % 4 >= 2
    count = _MODELS[number % len(_MODELS)]
    rows = [_ROWS[name] for name in draw.sample(_NETWORKS, min(count, 2))]
    models = tuple(model for row in rows for model in copies_of(row, max(1, count // len(rows))))
    # A run, and the way of its inputs to the device, take less than half of the SLO.
    factor = 1.0 if kinds == "card" else 2.2
    slos_ms = [
        draw.choice([slo for slo in _SLOS_MS if slo * NS_PER_MS > 3 * factor * row.exec_ns[1]])
        for row in rows
    ]
    # As many workers' worth, in batches that a third of the SLO lets be.
    work = draw.uniform(1.5, 4.0)
    shares_ns = [
        factor * _share_ns(row, slo_ms / factor) for row, slo_ms in zip(rows, slos_ms, strict=True)
    ]
    rate_rps = work * NS_PER_S * len(rows) / sum(shares_ns)
    # Where more waits than links or devices can ever make up for, it takes several SLOs to show.
    seconds = max(setting.requests / rate_rps, 10 * max(slos_ms) / 1000)
    warmup_s = min(1.0, max(0.25, seconds / 4))
    weights = np.arange(1, len(models) + 1) ** -1.0 if zipf else np.ones(len(models))
    slo_of = dict(zip((row.name for row in rows), slos_ms, strict=True))
    sources = [
        _source(
            bursts=bursts,
            rate_rps=rate_rps * float(weight / weights.sum()),
            models=(place,),
            slo_ns=slo_of[model.row.name] * NS_PER_MS,
            end_ns=round((seconds + warmup_s) * NS_PER_S),
            seed=setting.seed * 10_007 + number * 101 + place * 1_000_003,
        )
        for place, (model, weight) in enumerate(zip(models, weights, strict=True))
    ]
    slower = replace(slower_kind("slower", rows, 2.2), num_pages=150, price=0.4)
    card = WorkerKind(name="card", num_pages=300)
    chosen = {"card": (card,), "slower": (slower,)}.get(kinds, (card, slower))
    wires = number % 5 == 4
    case = Case(
        workload=Workload(models=tuple(model.model_id for model in models), sources=tuple(sources)),
        cluster=Cluster(
            models=models, num_workers=len(chosen), kinds=chosen, noise=Noise(0.01, 0.01)
        ),
        duration_ns=round((seconds + warmup_s) * NS_PER_S),
        network=Network(bytes_per_s=625_000_000 if wires else None),
        seed=setting.seed,
    )
    words = (
        f"{len(models)} {' and '.join(row.name for row in rows)}, {'Zipf' if zipf else 'even'}, "
        f"{'bursts' if bursts else 'Poisson'}, {rate_rps:.0f} r/s, SLO {' and '.join(map(str, slos_ms))} ms, {kinds}"
        f"{', 5 Gb/s' * wires}"
    )
    target = draw.choice(_TARGETS)
    return Question(case=case, target=target, warmup_ns=round(warmup_s * NS_PER_S)), words


def _share_ns(row: ProfileRow, slo_ms: float) -> float:
    sizes = [size for size, ns in row.exec_ns.items() if 3 * ns <= slo_ms * NS_PER_MS]
    return min(row.exec_ns[size] / size for size in sizes or [1])


def _source(*, bursts: bool, rate_rps: float, **asked: Any) -> Source:  # noqa: ANN401
    """Requests to one model, at random times or in bursts of its own."""
    if not bursts:
        return Poisson(rate_rps=rate_rps, **asked)
    length_ns = 200 * NS_PER_MS
    return Bursty(rate_rps=2 * rate_rps, burst_ns=length_ns, pause_ns=length_ns, **asked)


def ask(setting: Setting) -> Iterator[Planned]:
    """Plan each workload, and try the size with other seeds."""
    for number in range(setting.workloads):
        yield measure(setting, number)


def measure(setting: Setting, number: int) -> Planned:
    """Plan one workload, and try the size with other seeds."""
    question, words = workload_of(setting, number)
    begin_s = process_time()
    found = plan(question, why=setting.limits, slo_costs=False)
    cpu_s = process_time() - begin_s
    case = question.case
    others = replace(
        question, case=replace(case, workload=case.workload.reseeded(_OTHER_SEED), seed=_OTHER_SEED)
    )
    size = found.size
    meets = _tried(setting, others, size)
    fewer = [
        _tried(setting, others, (*size[:kind], size[kind] - 1, *size[kind + 1 :]))
        for kind in range(len(size))
        if size[kind] and sum(size) > 1
    ]
    # The nearest to the target of all with one fewer.
    nearest = max(fewer, key=lambda trial: trial.attainment, default=Trial(size, 1, 1))
    return Planned(
        workload=f"w{number:02}",
        target_pct=100 * question.target,
        asked=words,
        workers=question.words(size),
        num_workers=sum(size),
        limit=found.limits.name if found.limits else "",
        planned_pct=100 * found.planned.attainment,
        others_pct=100 * meets.attainment,
        fewer_pct=100 * nearest.attainment if fewer else 0.0,
        meets=meets.attainment >= question.target,
        tight=not fewer or nearest.attainment < question.target,
        runs=found.num_runs,
        cpu_s=cpu_s,
    )


def _tried(setting: Setting, question: Question, size: Size) -> Trial:
    """Run a size with every seed, unless it has missed the target beyond doubt."""
    trial = Trial(size, question.target, question.least_requests)
    Tries().extend(replace(question, most_runs=setting.others), trial)
    return trial


def figures(_setting: Setting, points: Sequence[Planned]) -> dict[str, float]:
    """Shares of all workloads."""
    return {
        "plan_workloads": len(points),
        "plan_meets_share": sum(point.meets for point in points) / len(points),
        "plan_tight_share": sum(point.tight for point in points) / len(points),
        "plan_runs_mean": sum(point.runs for point in points) / len(points),
    }


STUDY = Study(
    name="plan",
    command="bench-plan",
    setting=Setting(),
    ask=ask,
    key="{workload}",
    figures=figures,
    say=lambda _, point: (
        f"{point.workload}: {point.asked}: {point.workers} ({point.planned_pct:.3f} % planned), limit {point.limit}; other "
        f"seeds {point.others_pct:.3f} %, one fewer {point.fewer_pct:.3f} %; target {point.target_pct:g} %; "
        f"meets {point.meets}, tight {point.tight}; {point.runs} runs, {point.cpu_s:.0f} s"
    ),
)
