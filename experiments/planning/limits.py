"""What limits: which need, if it were gone, would let fewer workers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.planning.question import Question, Size
from experiments.planning.trials import Score, Trial, Tries
from experiments.simulator import Case, CpuCosts
from modelzoo.profile import ProfileRow

#: What limits if nothing else does: the time that runs take, and that requests come when they come.
EXEC = "EXEC"

# A need limits if so much of what is missed is gone without it.
_SHARE = 0.5

# Where little is missed, more seeds are played, until so many requests have missed their SLO.
_ENOUGH_MISSED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What limits a size that misses the target."""

    #: `EXEC`, or one of `relieved`.
    name: str
    #: Share of the requests that are answered inside their SLO without a need, by its name.
    relieved: Mapping[str, float]


def limits_of(question: Question, tries: Tries, missed: Trial) -> Constraint:
    """Simulate a size that misses the target without one need after the other, with some of the same seeds."""
    runs, num_missed = 0, 0
    while runs < len(missed.scores) and num_missed < _ENOUGH_MISSED:
        num_missed += missed.scores[runs].num_missed
        runs += 1
    left = {
        name: _missed_share(
            [
                tries.score(
                    question, missed.size, run, case=relief(question.case_of(missed.size, run))
                )
                for run in range(runs)
            ]
        )
        for name, relief in _reliefs(question, missed.size).items()
    }
    best = min(left, key=lambda name: left[name])
    if left[best] > (1 - _SHARE) * _missed_share(missed.scores[:runs]):
        best = EXEC
    return Constraint(name=best, relieved={name: 1 - share for name, share in left.items()})


def _missed_share(scores: Sequence[Score]) -> float:
    asked = sum(score.num_asked for score in scores)
    return sum(score.num_missed for score in scores) / max(1, asked)


def _reliefs(question: Question, size: Size) -> dict[str, Callable[[Case], Case]]:
    """Needs that the case has, and the case without each."""
    case = question.case_of(size)
    cluster, network = case.cluster, case.network
    pages = sum(model.num_pages for model in cluster.models)
    found: dict[str, Callable[[Case], Case]] = {"loads": _without_loads}
    if pages > min(map(cluster.pages_of_worker, range(cluster.num_workers))):
        found["pages"] = lambda case: _with_pages(case, pages)
    if network.bytes_per_s or network.up_bytes_per_s:
        found["links"] = lambda case: replace(
            case, network=replace(case.network, bytes_per_s=None, up_bytes_per_s=None)
        )
    if case.costs.charged:
        found["controller"] = lambda case: replace(case, costs=CpuCosts())
    return found


def _with_pages(case: Case, num_pages: int) -> Case:
    kinds = tuple(replace(kind, num_pages=num_pages) for kind in case.cluster.kinds)
    return replace(case, cluster=replace(case.cluster, num_pages=num_pages, kinds=kinds))


def _without_loads(case: Case) -> Case:
    def quick(row: ProfileRow) -> ProfileRow:
        return replace(row, load_ns=1)

    cluster = case.cluster
    kinds = tuple(
        replace(kind, rows={name: row and quick(row) for name, row in kind.rows.items()})
        for kind in cluster.kinds
    )
    models = tuple(replace(model, row=quick(model.row)) for model in cluster.models)
    return replace(case, cluster=replace(cluster, models=models, kinds=kinds))
