"""Every policy on workloads and faults that nobody tuned to: `unseen.csv` and `unseen.json`.

Each part's figure is that of its worst family, the mean of the seeds. A share is goodput beside what is
possible: beside the same load without the fault where there is a fault, else beside the bound.

Differences between policies are in points of the requests asked. In floods, beside large closed loops and where
popular models ask for more than all can have, isolation gives time to the small that would have answered more of
the large. There only the answers of the innocent, or of the small, are compared (`Family.compared`). What this
costs in all answers is seen beside it: `edf_mh` with isolation off is compared by all answers in every family.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from statistics import mean
from typing import Annotated, Any

from experiments.policies import unseen
from experiments.policies.unseen.family import Family
from experiments.policies.unseen.outcomes import (
    COMPARED,
    WITHOUT_ISOLATION,
    FamilyOutcome,
    bound_of,
    measure,
)
from experiments.study.study import NO_COLUMN, Study

#: Every module beside this one that has families.
MODULES = tuple(
    module
    for name in sorted(found.name for found in iter_modules(unseen.__path__))
    if name != "__main__"
    for module in (import_module(f"{unseen.__name__}.{name}"),)
    if hasattr(module, "FAMILIES")
)
FAMILIES: Mapping[str, Family] = {
    family.name: family for module in MODULES for family in module.FAMILIES
}

#: The policy that is judged.
JUDGED = "edf_mh"

# Parts whose figure is the worst family's share of what is possible.
_SHARES = {
    "spikes": "spikes_share",
    "links": "links_share",
    "thin_links": "thin_links_share",
    "profiles": "profiles_share",
    "flood": "flood_innocent_share",
    "timers": "timers_share",
    "averse": "averse_bound_share",
}


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy under one family: an outcome per seed."""

    family: Annotated[Family, NO_COLUMN]
    policy: str
    outcomes: tuple[FamilyOutcome, ...]
    #: The same seeds without the fault, of the judged policy; empty where there is none.
    without: tuple[FamilyOutcome, ...]
    #: By seed; -1: none is known.
    bounds: tuple[int, ...]
    #: Who asks without the fault, too: tenants, or else models.
    innocent: tuple[str, ...] = ()

    @property
    def part(self) -> str:
        """The family's."""
        return self.family.part

    @property
    def points(self) -> float:
        """Goodput of those whom the family compares, in percent of what they asked, the mean of the seeds."""
        if self.family.compared == "all":
            return self.points_of_all
        if self.family.compared == "innocent":
            return 100 * self.mean(lambda outcome: outcome.share_of(self.innocent))
        return 100 * self.mean(lambda outcome: outcome.share_of(outcome.small))

    @property
    def points_of_all(self) -> float:
        """Goodput in percent of what was asked, the mean of the seeds.

        In percent of the bound where clients wait for their answers: there a refusal makes them ask more.
        """
        if self.family.bound == "rate" and self.possible_share is not None:
            return 100 * self.possible_share
        return 100 * self.mean(lambda outcome: outcome.share)

    @property
    def possible_share(self) -> float | None:
        """Goodput beside what is possible; None where that is not known."""
        if self.without:
            return mean(
                _ratio(outcome.share_of(names), sound.share_of(names))
                for outcome, sound in zip(self.outcomes, self.without, strict=True)
                for names in (list(sound.asked_by),)
            )
        if min(self.bounds) < 0:
            return None
        return mean(
            _ratio(outcome.answered, bound)
            for outcome, bound in zip(self.outcomes, self.bounds, strict=True)
        )

    def mean(self, value: Callable[[FamilyOutcome], float]) -> float:
        """Mean of a value of the outcomes."""
        return mean(map(value, self.outcomes))


def _ratio(found: float, possible: float) -> float:
    return found / possible if possible else 1.0


# --- running ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is simulated."""

    #: Only these parts, and of them these families.
    parts: tuple[str, ...] = tuple(sorted({family.part for family in FAMILIES.values()}))
    families: tuple[str, ...] = tuple(FAMILIES)
    policies: tuple[str, ...] = COMPARED
    seeds: tuple[int, ...] = (1, 2, 3)
    #: Runs at a time.
    processes: int = os.cpu_count() or 1


def measure_all(setting: Setting) -> Iterator[PolicyRow]:
    """Measure every policy under every family."""
    families = [FAMILIES[name] for name in setting.families]
    families = [family for family in families if family.part in setting.parts]
    with ProcessPoolExecutor(setting.processes) as pool:
        bounds = {
            (family.name, seed): pool.submit(_bound, family.name, seed)
            for family in families
            for seed in setting.seeds
        }
        calls = {
            (family.name, policy, seed, fault): pool.submit(
                _measure, family.name, policy, seed, fault
            )
            for family in families
            for policy in setting.policies
            for seed in setting.seeds
            for fault in (True, False)
            if fault or _runs_without(family, policy)
        }
        for family in families:
            for policy in setting.policies:
                yield _row(family, policy, setting.seeds, calls, bounds)


def _row(
    family: Family,
    policy: str,
    seeds: Sequence[int],
    calls: Mapping[tuple[str, str, int, bool], Future[FamilyOutcome]],
    bounds: Mapping[tuple[str, int], Future[int]],
) -> PolicyRow:
    def outcomes(fault: bool) -> tuple[FamilyOutcome, ...]:
        return tuple(calls[family.name, policy, seed, fault].result() for seed in seeds)

    return PolicyRow(
        family,
        policy,
        outcomes(True),
        outcomes(False) if _runs_without(family, policy) else (),
        tuple(bounds[family.name, seed].result() for seed in seeds),
        _innocent(family),
    )


def _runs_without(family: Family, policy: str) -> bool:
    return family.without is not None and policy == JUDGED


def _innocent(family: Family) -> tuple[str, ...]:
    """Tenants, or models where requests carry none, that ask without the fault."""
    if family.without is None:
        return ()
    workload = family.without(1).workload
    names = {workload.tenants[r.tenant] or workload.models[r.model] for r in workload}
    return tuple(sorted(names))


def _measure(name: str, policy: str, seed: int, fault: bool) -> FamilyOutcome:
    return measure(FAMILIES[name], policy, seed, fault=fault)


def _bound(name: str, seed: int) -> int:
    return bound_of(FAMILIES[name], seed)


# --- figures ----------------------------------------------------------------------------------------


def differences(
    rows: Iterable[PolicyRow],
    judged: str = JUDGED,
    points: Callable[[PolicyRow], float] | None = None,
) -> dict[str, tuple[float, str]]:
    """By family: points between the judged policy and the best of the others, and who that is.

    Args:
        rows: of all policies.
        judged: `edf_mh`, with isolation or without; neither is one of the others.
        points: of a row; None: of those whom its family compares.
    """
    points = points or (lambda row: row.points)
    by_family: dict[str, dict[str, PolicyRow]] = {}
    for row in rows:
        by_family.setdefault(row.family.name, {})[row.policy] = row
    found = {}
    for name, policies in by_family.items():
        others = [row for name, row in policies.items() if name not in (JUDGED, WITHOUT_ISOLATION)]
        if judged in policies and others:
            best = max(others, key=points)
            found[name] = (points(policies[judged]) - points(best), best.policy)
    return found


def figures_of(rows: Sequence[PolicyRow]) -> dict[str, float]:
    """What is held against the aims, of the parts that were run."""
    judged = [row for row in rows if row.policy == JUDGED]

    def of(part: str) -> list[PolicyRow]:
        return [row for row in judged if row.family.part == part]

    figures: dict[str, float] = {}
    for part, key in _SHARES.items():
        shares = [share for row in of(part) if (share := row.possible_share) is not None]
        if shares:
            figures[key] = min(shares)
    if points := differences(rows):
        figures["worst_vs_best_policy_points"] = min(pair[0] for pair in points.values())
        figures["mean_vs_best_policy_points"] = mean(pair[0] for pair in points.values())
    if points := differences(rows, WITHOUT_ISOLATION, lambda row: row.points_of_all):
        key = "worst_vs_best_policy_points_isolation_0"
        figures[key] = min(pair[0] for pair in points.values())
    for row in of("refusals"):
        if row.family.name.startswith("burst"):
            for outcome, bound in zip(row.outcomes, row.bounds, strict=True):
                could = min(outcome.asked, bound) if bound >= 0 else outcome.asked
                _worst(figures, "burst_wrong_refusals", max(0, could - outcome.answered))
            continue
        models = row.outcomes[0].num_models
        for name in ("p50", "p99"):
            share = row.mean(lambda outcome: getattr(outcome, f"refusal_{name}_share"))  # noqa: B023
            _worst(figures, f"refusal_{name}_share_{models}", share)
    for row in of("unlike"):
        _worst(figures, "unlike_violated_pct", 100 - row.points)
    return figures


def _worst(figures: dict[str, float], key: str, value: float) -> None:
    figures[key] = max(figures.get(key, value), value)


# --- files ------------------------------------------------------------------------------------------

#: Counts of an outcome that are columns of the table.
COLUMNS = (
    "asked",
    "answered",
    "share",
    "late",
    "refusal_p50_share",
    "refusal_p99_share",
    "p50_ms",
    "p99_ms",
)


def table(setting: Setting, rows: Iterable[PolicyRow]) -> Iterator[Mapping[str, float | int | str]]:
    """A line per family, policy and seed; a second one where a family was run without its fault, too."""
    for row in rows:
        for fault, outcomes in ((True, row.outcomes), (False, row.without)):
            for seed, bound, outcome in zip(setting.seeds, row.bounds, outcomes, strict=False):
                yield {
                    "part": row.family.part,
                    "family": row.family.name,
                    "fault": "yes" if fault else "no",
                    "policy": row.policy,
                    "seed": seed,
                    **{name: getattr(outcome, name) for name in COLUMNS},
                    "bound": bound if fault and bound >= 0 else "",
                    "refused": " ".join(f"{why}:{count}" for why, count in outcome.refused.items()),
                }


def extra(_setting: Setting, rows: Sequence[PolicyRow]) -> dict[str, Any]:
    """How many families there are, and in which another policy answers more."""
    points = sorted(differences(rows).items(), key=lambda item: item[1])
    return {
        "families": len({row.family.name for row in rows}),
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
    figures=lambda _, rows: figures_of(rows),
    tables={"": table},
    extra=extra,
)
