"""What certainty costs: goodput where requests are to be refused or promised within a time (`decide_within_ms`).

Copies of ResNet50 share one simulated GPU, whose capacity the loads are multiples of. A share of the requests, at random,
is to be decided within a time that is a part of the SLO. The price is the goodput that the same arrivals have when none
asks, less theirs. It is paid by all: a lane whose time is promised is not free for the densest batch that comes together
later.

In addition to the price it says whether the decisions were worth it: how long they took, and how many promises were broken. No
fault is played, so none may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import numpy as np

from controller.telemetry.tables import OK, Telemetry
from experiments.policies.one_gpu import OneGpu
from experiments.simulator import run
from experiments.study.compared import POLICIES
from experiments.study.pictures import Panel, lines
from experiments.study.study import SHARE, Study, StudyRecord, over

TITLE = "To be told early whether an answer will come costs answers where many models share a GPU (simulated)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(OneGpu):
    """How much is simulated."""

    policies: tuple[str, ...] = ("edf_mh", "clockwork")
    nums_models: tuple[int, ...] = (4, 15, 40)
    #: Offered loads, as multiples of what the GPU could answer in the best batches.
    loads: tuple[float, ...] = (0.9, 1.2, 1.5)
    #: The share of the requests whose clients ask for certainty.
    shares: tuple[float, ...] = (0.1, 1.0)
    #: Within this part of the SLO they are to be decided.
    parts: tuple[float, ...] = (0.05, 0.2, 0.5)
    seeds: tuple[int, ...] = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertaintyRun:
    """One run."""

    num_arrived: int
    num_answered: int
    #: For each request that asks: from its arrival to the decision, in ns.
    decided_ns: tuple[int, ...]
    num_kept: int
    num_broken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """One share of requests that ask, under one load; all seeds together."""

    policy: str
    num_models: int
    load: float
    share: float
    part: float
    goodput: Annotated[float, SHARE]
    #: Points of goodput lost against the same arrivals without anyone asking.
    price_points: float
    #: The part of the requests that ask which is answered, and of the others.
    asking: Annotated[float, SHARE]
    others: Annotated[float, SHARE]
    #: From arrival to the decision, as a part of the time that was asked for.
    decided_p99: float
    #: Promises that were kept, as a part of all; and how many were not.
    kept: float
    num_broken: int


@cache
def play(
    setting: Setting,
    policy: str,
    num_models: int,
    load: float,
    share: float,
    part: float,
    seed: int,
) -> CertaintyRun:
    """Simulate one seed."""
    case = setting.case(
        num_models,
        load,
        seed,
        scheduler=POLICIES[policy],
        decide_within_ns=round(part * setting.slo_ns) if share else 0,
        decide_share=share,
    )
    telemetry = Telemetry(1 << 30)
    run(case, telemetry=telemetry)
    rows = [each for each in telemetry.requests if each.arrival_ns >= setting.warmup_ns]
    asking = [each for each in rows if each.decided_ns]
    return CertaintyRun(
        num_arrived=len(rows),
        num_answered=sum(each.outcome == OK for each in rows),
        decided_ns=tuple(each.decided_ns - each.arrival_ns for each in asking),
        num_kept=sum(each.outcome == OK for each in asking),
        num_broken=sum(
            each.outcome != OK and each.decided_ns < each.departure_ns for each in asking
        ),
    )


def measure(
    setting: Setting, policy: str, num_models: int, load: float, share: float, part: float
) -> Certainty:
    """Simulate one share of requests that ask, with all seeds."""

    def played(share: float, part: float) -> list[CertaintyRun]:
        return [
            play(setting, policy, num_models, load, share, part, seed) for seed in setting.seeds
        ]

    runs = played(share, part)
    decided_ns = [each for one in runs for each in one.decided_ns]
    kept, broken = sum(one.num_kept for one in runs), sum(one.num_broken for one in runs)
    num_others = sum(one.num_arrived for one in runs) - len(decided_ns)
    others = sum(one.num_answered for one in runs) - kept
    return Certainty(
        policy=policy,
        num_models=num_models,
        load=load,
        share=share,
        part=part,
        goodput=_goodput(runs),
        price_points=100 * (_goodput(played(0.0, 0.0)) - _goodput(runs)),
        asking=kept / len(decided_ns),
        others=others / num_others if num_others else 0.0,
        decided_p99=float(np.percentile(decided_ns, 99)) / (part * setting.slo_ns),
        kept=kept / (kept + broken) if kept else 1.0,
        num_broken=broken,
    )


def _goodput(runs: Sequence[CertaintyRun]) -> float:
    return sum(one.num_answered for one in runs) / sum(one.num_arrived for one in runs)


def figures(_setting: Setting, points: Sequence[Certainty]) -> Mapping[str, float]:
    """Sum the points up: the worst of each kind."""
    found: dict[str, float] = {
        "kept_min": min(point.kept for point in points),
        "num_broken": sum(point.num_broken for point in points),
        "decided_p99_max": max(point.decided_p99 for point in points),
    }
    for policy, num_models, share in dict.fromkeys(
        (point.policy, point.num_models, point.share) for point in points
    ):
        found[f"{policy}_m{num_models}_s{share:g}_price_points_max"] = max(
            point.price_points
            for point in points
            if (point.policy, point.num_models, point.share) == (policy, num_models, share)
        )
    return found


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """The price over the load, a line for each number of models; all ask."""
    rows = [row for row in recorded.rows if row["policy"] == "edf_mh" and row["share"] == 1.0]
    return [
        [
            Panel(
                title=f"All requests are to be decided within {100 * part:g} % of the SLO",
                x="requests offered, % of what is possible",
                y="goodput lost, % of the requests",
                curves=lines(
                    [row for row in rows if row["part"] == part],
                    lambda row: 100 * row["load"],
                    "price_points",
                    by=lambda row: f"{row['num_models']} models",
                ),
            )
            for part in dict.fromkeys(row["part"] for row in rows)
        ]
    ]


STUDY = Study(
    name="decide",
    setting=Setting(),
    ask=over(
        measure,
        policy="policies",
        num_models="nums_models",
        load="loads",
        share="shares",
        part="parts",
    ),
    key="{policy}_m{num_models}_x{load:g}_s{share:g}_d{part:g}",
    figures=figures,
    title=TITLE,
    panels=panels,
)
