"""Every policy on workloads and faults that the policies were not tuned to: `unseen.csv` and `unseen.json`.

Each part's figure is that of its worst family, the mean of the seeds. A share is goodput as a part of what is
possible: of that of the same load without the fault where there is a fault, else of the bound.

Differences between policies are in points of the requests asked. In floods, with large closed loops and where
popular models ask for more than all can have, isolation gives time to the small that would have answered more of
the large. There only the answers of the innocent, or of the small, are compared (`Load.compared`). What this
costs in all answers is seen next to it: `edf_mh` with isolation off is compared by all answers in every family, and
`isolation_curve` of the record has five settings in the families of `PRICED`.

Next to clients that are many for a model, those that are two for theirs cost twice the time for an answer, in batches of
two. In `small_clients` 85 % for them leave 70 % of all answers at most, and two points less than the 95 % without
isolation leave 19 % for them: no policy comes near both aims there, and the family shows what a flood costs, not what
isolation costs without one (tests/experiments/test_isolation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from controller.core import EdfMhConfig, SchedulerConfig
from experiments.policies import contest, tried
from experiments.policies.contest import Contender, Row, run_all, said
from experiments.policies.load import Load
from experiments.policies.unseen import FAMILIES
from experiments.study.compared import POLICIES
from experiments.study.study import Study

#: The policy that is judged, and the same with isolation off: all time goes to what answers most.
JUDGED, WITHOUT_ISOLATION = "edf_mh", "edf_mh_isolation_0"
#: Where there is no flood, isolation should cost little; the last is a flood, next to which it is worth its price. By key.
PRICED = ("arrivals_popular", "small_small_clients", "small_think")
_CURVE = (*PRICED, "flood_flood_model")


def _isolated(isolation: float) -> SchedulerConfig:
    return SchedulerConfig(policy="edf_mh", edf_mh=EdfMhConfig(isolation=isolation))


#: Settings between off and the default, by the name of the policy.
BETWEEN = {f"{JUDGED}_isolation_{setting:g}": setting for setting in (0.25, 0.5, 0.75)}

#: Policies compared, by name; `edf` is the plain one, which no server has.
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(name="clockwork", config=POLICIES["clockwork"]),
        Contender(name="clockwork1ms", config=POLICIES["clockwork1ms"]),
        Contender(name="edf", config=POLICIES["edf_mh"], scheduler=tried.plain_edf),
        Contender(name=JUDGED, config=POLICIES["edf_mh"], judged=True),
        Contender(name=WITHOUT_ISOLATION, config=_isolated(0.0)),
        *(
            Contender(name=name, config=_isolated(setting), only=_CURVE)
            for name, setting in BETWEEN.items()
        ),
        Contender(name="clipper", config=POLICIES["clipper"]),
        Contender(name="infaas", config=POLICIES["infaas"]),
    )
}

# Parts whose figure is the worst family's share of what is possible.
_SHARES = {
    "spikes": "spikes_share",
    "links": "links_share",
    "thin_links": "thin_links_share",
    "profiles": "profiles_share",
    "stalls": "stalls_share",
    "lost": "lost_share",
    "flood": "flood_innocent_share",
    "timers": "timers_share",
    "averse": "averse_bound_share",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(contest.Setting):
    """How much is simulated; the key of a family is PART_NAME."""

    policies: tuple[str, ...] = tuple(CONTENDERS)


def named(key: str) -> Load:
    """The family with this key."""
    (family,) = (family for family in FAMILIES.values() if family.key == key)
    return family


def measure_all(setting: Setting) -> Iterator[Row]:
    """Measure every policy under every family."""
    families = [family for family in FAMILIES.values() if family.key.startswith(setting.only)]
    contenders = [CONTENDERS[name] for name in setting.policies]
    return run_all(families, contenders, setting, named, padding=True)


# --- figures ----------------------------------------------------------------------------------------


def differences(
    rows: Iterable[Row],
    judged: str = JUDGED,
    points: Callable[[Row], float] = lambda row: row.points,
) -> dict[str, tuple[float, str]]:
    """By family: points between the judged policy and the best of the others, and who that is.

    Args:
        rows: of all policies.
        judged: `edf_mh`, with isolation or without; neither is one of the others.
        points: of a row.
    """
    by_family: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_family.setdefault(row.load.name, {})[row.policy] = row
    found = {}
    for name, policies in by_family.items():
        others = [row for name, row in policies.items() if not name.startswith(JUDGED)]
        if judged in policies and others:
            best = max(others, key=points)
            found[name] = (points(policies[judged]) - points(best), best.policy)
    return found


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """What is held against the aims, of the parts that were run."""
    judged = [row for row in rows if row.policy == JUDGED]
    figures: dict[str, float] = {}

    def worst(key: str, value: float) -> None:
        figures[key] = max(figures.get(key, value), value)

    for part, key in _SHARES.items():
        of_part = [row.possible_share for row in judged if row.group == part]
        if shares := [share for share in of_part if share is not None]:
            figures[key] = min(shares)
    if points := differences(rows):
        figures["worst_vs_best_policy_points"] = min(pair[0] for pair in points.values())
        figures["mean_vs_best_policy_points"] = mean(pair[0] for pair in points.values())
    if points := differences(rows, WITHOUT_ISOLATION, lambda row: row.points_of_all):
        key = "worst_vs_best_policy_points_isolation_0"
        figures[key] = min(pair[0] for pair in points.values())
    off = {row.load.key: row for row in rows if row.policy == WITHOUT_ISOLATION}
    for row in judged:
        if row.load.key in PRICED and row.load.key in off:
            cost = off[row.load.key].points_of_all - row.points_of_all
            figures[f"isolation_cost_points_{row.load.name}"] = cost
            worst("isolation_cost_points", cost)
        if row.load.name.startswith("burst"):
            for outcome in row.outcomes:
                could = min(outcome.asked, outcome.bound) if outcome.bound >= 0 else outcome.asked
                worst("burst_wrong_refusals", max(0, could - outcome.answered))
        elif row.group == "refusals":
            models = len(row.load.case(1).workload.models)
            for name in ("refusal_p50_share", "refusal_p99_share"):
                worst(f"{name}_{models}", row.mean(name))
        elif row.group == "unlike":
            worst("unlike_violated_pct", 100 - row.points)
    return figures


# --- files ------------------------------------------------------------------------------------------

#: Counts of an outcome that are columns of the table.
COLUMNS = (
    "asked",
    "answered",
    "share",
    "worth_share",
    "late",
    "refusal_p50_share",
    "refusal_p99_share",
    "p50_ms",
    "p99_ms",
)


def table(setting: Setting, rows: Iterable[Row]) -> Iterator[Mapping[str, float | int | str]]:
    """A line per family, policy and seed; a second one where a family was run without its fault, too."""
    for row in rows:
        for fault, outcomes in (("yes", row.outcomes), ("no", row.without)):
            for seed, outcome in zip(setting.seeds, outcomes, strict=False):
                yield {
                    "part": row.group,
                    "family": row.load.name,
                    "fault": fault,
                    "policy": row.policy,
                    "seed": seed,
                    **{name: getattr(outcome, name) for name in COLUMNS},
                    "bound": outcome.bound if outcome.bound >= 0 else "",
                    "refused": " ".join(f"{why}:{count}" for why, count in outcome.refused.items()),
                }


def extra(_setting: Setting, rows: Sequence[Row]) -> dict[str, Any]:
    """How many families there are, and in which another policy answers more."""
    points = sorted(differences(rows).items(), key=lambda item: item[1])
    return {
        "families": len({row.load.name for row in rows}),
        # By family and setting: points of all answers, and of those whom the family compares.
        "isolation_curve": {
            name: {
                f"{setting:g}": [round(row.points_of_all, 2), round(row.points, 2)]
                for policy, setting in ((WITHOUT_ISOLATION, 0.0), *BETWEEN.items(), (JUDGED, 1.0))
                for row in rows
                if row.load.key == name and row.policy == policy
            }
            for name in _CURVE
        },
        "behind": {
            name: {"points": round(difference, 3), "policy": best}
            for name, (difference, best) in points
            if difference < 0
        },
    }


STUDY = Study(
    name="unseen",
    setting=Setting(),
    ask=measure_all,
    key="{part}_{family}_{policy}",
    say=said,
    figures=lambda _, rows: figures_of(rows),
    tables={"": table},
    extra=extra,
)
