"""Figure 7: how low the SLO can go (left), and together with batch clients (right).

6 GPUs and copies of ResNet50, a Poisson client for each. As in the paper the SLO begins at 2.9 ms and grows by half stage by
stage while the clients go on; what arrives in the first moments of a stage is counted like the rest. Stages are 10 s, the
paper's were 30. Before the first stage there are some seconds at twice the largest SLO, in which the models are loaded.

* Left: N models, R requests per second in all.
* Right: 6 latency-sensitive models (LS) of 200 r/s each, together with batch clients (BC): M models with C closed-loop clients each
  and an SLO of a day, as in the paper's artifact: (a) none, (b) M = 12 with C = 16, which allows large batches, (c) M = 48 with C = 4.

The number to compare is the lowest multiple of 2.9 ms from which on at least 99 % of the requests are answered in time, at it
and at every larger one; and what BC get then. Bounds, by GPU time alone:

* open-loop requests: B1 (`experiments.bounds.density_bound`) on the arrivals of each stage, as though neither other stages nor
  BC needed the GPUs;
* BC: the GPU time of a stage less the least that as many LS answers as the policy gave need in any schedule, in the best
  batches that C requests of one model can form. Only answers whose EXEC lies inside the stage count on either side, so the
  two together hold for the stage. It depends on the policy: who answers fewer LS has more left.

Durations carry noise that no policy can foresee, so both hold for their mean, as in Figure 5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import OK
from experiments.bounds import Cost, density_bound
from experiments.bounds.density import shares
from experiments.clockwork_paper import cases
from experiments.clockwork_paper.stretch import problems
from experiments.simulator import Case
from experiments.study.compared import POLICIES, PREDICTIVE, Compared, run_rows
from experiments.study.pictures import (
    Curve,
    Panel,
    by_policy,
    of_paper,
    of_policy,
    ticks,
    unlabelled,
)
from experiments.study.study import ONLY_RECORD, Column, Paper, Row, Study, StudyRecord, over
from traces.arrivals import ClosedLoop, Poisson

NUM_GPUS = 6
#: "1x the execution latency of batch-1 ResNet50 inference", section 6.3.
BASE_SLO_NS = 2_900_000
GROWTH = 1.5
#: An SLO counts as met from this share of requests in time on.
SATISFIED = 0.99
#: The right half's latency-sensitive models, and the rate of each.
NUM_LS = 6
LS_RPS = 200
BC_SLO_NS = 24 * 3600 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Who asks: open-loop clients of some models, and batch clients of others."""

    #: As the names of its figures spell it.
    name: str
    num_models: int
    rate_rps: int
    num_bc: int = 0
    concurrency: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Compared):
    """How much is simulated, for both halves of the figure."""

    policies: tuple[str, ...] = (*PREDICTIVE, "clockwork10ms")
    #: Numbers of models in the left half.
    nums_models: tuple[int, ...] = (12, 48)
    rates_rps: tuple[int, ...] = (600, 1200, 2400)
    #: Cases of the right half: number of batch clients, and requests that each has out at a time.
    scenarios: tuple[tuple[int, int], ...] = ((0, 0), (12, 16), (48, 4))
    #: The last stage has 1.5 ** 11 times the first SLO: 251 ms.
    num_stages: int = 12
    stage_ns: int = 10 * NS_PER_S
    warmup_ns: int = 5 * NS_PER_S
    seed: int = 7

    @property
    def slos_ns(self) -> list[int]:
        """SLO of each stage, ascending."""
        return [round(BASE_SLO_NS * GROWTH**stage) for stage in range(self.num_stages)]

    @property
    def begins_ns(self) -> list[int]:
        """Begin of each stage, and the end of the last."""
        return [self.warmup_ns + stage * self.stage_ns for stage in range(self.num_stages + 1)]

    @property
    def left(self) -> list[Mix]:
        """The mixes of the left half."""
        return [
            Mix(name=f"n{num}_r{rate_rps}", num_models=num, rate_rps=rate_rps)
            for num in self.nums_models
            for rate_rps in self.rates_rps
        ]

    @property
    def right(self) -> list[Mix]:
        """The mixes of the right half."""
        return [
            Mix(
                name=f"m{num_bc}c{concurrency}" if num_bc else "m0",
                num_models=NUM_LS,
                rate_rps=NUM_LS * LS_RPS,
                num_bc=num_bc,
                concurrency=concurrency,
            )
            for num_bc, concurrency in self.scenarios
        ]

    @property
    def mixes(self) -> list[Mix]:
        """Those of both halves."""
        return self.left + self.right


class SloStage(NamedTuple):
    """What was served at one SLO."""

    slo_multiple: float
    slo_ms: float
    #: Share of the open-loop requests that was answered in time, and the bound on it.
    satisfaction: float
    bound: float
    #: Answers to batch clients, and the bound on them; 0 without batch clients.
    bc_rps: float
    bc_bound_rps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """One policy under one mix, stage by stage."""

    policy: str
    case: str
    mix: Mix
    slo_multiple: Annotated[float | None, ONLY_RECORD]
    bound_multiple: Annotated[float | None, Column(figure="bound_{bound}_slo_multiple")]
    #: The bound's name: that of open-loop requests is the same together with all batch clients.
    bound: str
    stages: tuple[SloStage, ...]


def case_of(setting: Setting, policy: str, mix: Mix) -> Case:
    """Describe one run: the warm-up, then every stage. Models of open-loop clients come first."""
    models = cases.resnets(mix.num_models + mix.num_bc)
    slos_ns, begins_ns = setting.slos_ns, setting.begins_ns
    # The warm-up has an SLO that no stage shares.
    stages = [(0, setting.warmup_ns, 2 * slos_ns[-1])]
    stages += zip(begins_ns, begins_ns[1:], slos_ns, strict=False)
    # The open-loop requests together with all batch clients are the same.
    entropy = [setting.seed, mix.num_models]
    entropy += [mix.rate_rps] if mix in setting.left else []
    seeds = np.random.SeedSequence(entropy).generate_state(len(stages)).tolist()
    sources = (
        Poisson(
            models=range(mix.num_models), rate_rps=mix.rate_rps, slo_ns=slo_ns,
            begin_ns=begin_ns, end_ns=end_ns, seed=seed,
        )
        for (begin_ns, end_ns, slo_ns), seed in zip(stages, seeds, strict=True)
    )  # fmt: skip
    loops = (
        ClosedLoop(model=model, concurrency=mix.concurrency, slo_ns=BC_SLO_NS, end_ns=begins_ns[-1])
        for model in range(mix.num_models, len(models))
    )
    case = cases.case_of(
        models,
        sources,
        loops=loops,
        seed=setting.seed,
        end_ns=begins_ns[-1],
        num_gpus=NUM_GPUS,
        noise=setting.noise,
    )
    return replace(case, scheduler=POLICIES[policy])


def measure(setting: Setting, mix: Mix, policy: str) -> Stages:
    """Simulate one policy under one mix."""
    case = case_of(setting, policy, mix)
    begins_ns = setting.begins_ns
    # Requests name their stage by its SLO; the warm-up's SLO is no stage's.
    stage_of_slo = {slo_ns: stage for stage, slo_ns in enumerate(setting.slos_ns)}
    arrived, answered, inside, batch = ([0] * setting.num_stages for _ in range(4))

    def take(requests: Sequence[RequestRow], actions: Sequence[ActionRow]) -> None:
        # The stage of every EXEC that lies inside one stage.
        stage_of_action = {}
        for action in actions:
            if action.exec is not None:
                stage = bisect_right(begins_ns, action.exec.begin_ns) - 1
                if 0 <= stage < setting.num_stages and action.exec.end_ns <= begins_ns[stage + 1]:
                    stage_of_action[action.action_id] = stage
        for row in requests:
            within = stage_of_action.get(row.action_id) if row.action_id is not None else None
            if row.slo_ns == BC_SLO_NS:
                if within is not None and row.outcome == OK:
                    batch[within] += 1
            elif (own := stage_of_slo.get(row.slo_ns)) is not None:
                arrived[own] += 1
                if row.outcome == OK:
                    answered[own] += 1
                    inside[own] += within == own

    run_rows(case, take)
    seconds = setting.stage_ns / NS_PER_S
    stages = []
    for at, requests in enumerate(problems(case, pairwise(begins_ns))):
        used_ns = np.sort(shares(requests))[: inside[at]]
        stages.append(
            SloStage(
                slo_multiple=GROWTH**at,
                slo_ms=setting.slos_ns[at] / NS_PER_MS,
                satisfaction=answered[at] / arrived[at],
                bound=density_bound(requests) / len(requests),
                bc_rps=batch[at] / seconds,
                bc_bound_rps=_room(used_ns, case, setting.stage_ns, mix.concurrency) / seconds
                if mix.num_bc
                else 0.0,
            )
        )
    return Stages(
        policy=policy,
        case=mix.name,
        mix=mix,
        slo_multiple=lowest_multiple([stage.satisfaction for stage in stages]),
        bound_multiple=lowest_multiple([stage.bound for stage in stages]),
        bound=mix.name if mix in setting.left else "ls",
        stages=tuple(stages),
    )


def _room(used_ns: NDArray[np.float64], case: Case, stage_ns: int, concurrency: int) -> float:
    """Requests that fit into a stage together with others that use so much, in the best of possible batches."""
    exec_ns = Cost(case.cluster.models[0].row.exec_ns).exec_of(padding=True)[:concurrency]
    least_ns = min(ns / size for size, ns in enumerate(exec_ns, start=1))
    return (case.cluster.num_workers * stage_ns - float(used_ns.sum())) / least_ns


def lowest_multiple(satisfaction: Sequence[float]) -> float | None:
    """Find the lowest multiple of the base SLO from which on all are met; None: not even the last is."""
    met = len(list(takewhile(lambda share: share >= SATISFIED, reversed(satisfaction))))
    return GROWTH ** (len(satisfaction) - met) if met else None


def figures_of(setting: Setting, points: Sequence[Stages]) -> dict[str, float]:
    """What the right half's stages gave, which are named by their SLO in ms."""
    figures: dict[str, float] = {}
    for point in (point for point in points if point.mix in setting.right):
        for stage in point.stages:
            slo = f"slo{round(stage.slo_ms)}"
            at = f"{point.policy}_{point.case}_{slo}"
            figures[f"bound_ls_{slo}_ls_pct"] = 100 * stage.bound
            figures[f"{at}_ls_pct"] = 100 * stage.satisfaction
            if stage.bound:
                figures[f"{at}_ls_bound_share_pct"] = 100 * (stage.satisfaction / stage.bound)
            if point.mix.num_bc:
                figures[f"{at}_bc_rps"] = stage.bc_rps
                bc_share = stage.bc_rps / stage.bc_bound_rps
                figures[f"{at}_bc_bound_share_pct"] = 100 * bc_share
    return figures


def rows(points: Sequence[Stages], mixes: Sequence[Mix], *axes: str) -> Iterator[Row]:
    """A row for each stage under some mixes, which these fields tell apart."""
    for point in (point for point in points if point.mix in mixes):
        of = {axis: getattr(point.mix, axis) for axis in axes}
        for stage in point.stages:
            yield {"policy": point.policy, **of, **stage._asdict()}


def left_rows(setting: Setting, points: Sequence[Stages]) -> Iterator[Row]:
    """Rows of `fig7_left.csv`."""
    for row in rows(points, setting.left, "num_models", "rate_rps"):
        yield {name: cell for name, cell in row.items() if not name.startswith("bc_")}


def right_rows(setting: Setting, points: Sequence[Stages]) -> Iterator[Row]:
    """Rows of `fig7_right.csv`."""
    renamed = {"satisfaction": "ls_satisfaction", "bound": "ls_bound"}
    for row in rows(points, setting.right, "num_bc", "concurrency"):
        yield {renamed.get(name, name): cell for name, cell in row.items()}


def panels(setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Which SLO is met, the hardest case in full, and what batch clients change in it."""
    left = [
        Panel(
            title=f"{num} models: the tightest SLO that {SATISFIED:.0%} of requests meet",
            x="offered rate, r/s",
            y="SLO, times 2.9 ms",
            curves=_tightest(setting, recorded.figures, num),
            x_ticks=ticks(setting.rates_rps),
            log_y=True,
            y_ticks=ticks((1, 3, 10, 30)),
        )
        for num in setting.nums_models
    ]
    hardest = max(setting.left, key=lambda mix: (mix.rate_rps, mix.num_models))
    rows = [
        row
        for row in recorded.tables["_left"]
        if (row["num_models"], row["rate_rps"]) == (hardest.num_models, hardest.rate_rps)
    ]
    title = f"{hardest.num_models} models, {hardest.rate_rps} r/s: in time"
    left.append(_in_time(title, rows, "satisfaction", "bound"))
    right = []
    for mix in setting.right:
        if mix.num_bc:
            rows = [row for row in recorded.tables["_right"] if row["num_bc"] == mix.num_bc]
            title = f"{NUM_LS} models together with {mix.num_bc} batch clients: in time"
            panel = _in_time(title, rows, "ls_satisfaction", "ls_bound")
            marks = {_MANY_REJECTED: "the paper: many rejected below"}
            right.append(replace(panel, marks=marks))
            batch = replace(
                panel,
                title=f"What those {mix.num_bc} batch clients get meanwhile",
                y="batch answers, r/s (thin: bound)",
                # Each policy leaves them as much as it does not use.
                curves=[
                    curve
                    for ours, bound in zip(
                        by_policy(rows, "slo_multiple", "bc_rps", marker="o"),
                        by_policy(rows, "slo_multiple", "bc_bound_rps", width=0.9),
                        strict=True,
                    )
                    for curve in (ours, *unlabelled([bound]))
                ],
            )
    return [left, [*right, batch]] if right else [left]


def _tightest(setting: Setting, figures: Mapping[str, float], num_models: int) -> list[Curve]:
    def points(who: str) -> tuple[list[float], list[float]]:
        keys = {rate: f"{who}_n{num_models}_r{rate}_slo_multiple" for rate in setting.rates_rps}
        met = {rate: figures[key] for rate, key in keys.items() if key in figures}
        return list(met), list(met.values())

    ours = {policy: points(policy) for policy in setting.policies}
    x, y = points("bound")
    return [
        *(of_policy(policy, Curve(x=x, y=y, marker="o")) for policy, (x, y) in ours.items()),
        of_paper(*points("paper")),
        Curve(x=x, y=y, label="bound", line=":"),
    ]


def _in_time(title: str, rows: Sequence[Row], name: str, bound_name: str) -> Panel:
    """The share of each policy at each SLO, and the bound on it, which is the same for all."""
    ours = by_policy(rows, "slo_multiple", lambda row: 100 * row[name], marker="o")
    bound = by_policy(rows, "slo_multiple", lambda row: 100 * row[bound_name])[-1]
    return Panel(
        title=title,
        x="SLO, times 2.9 ms",
        y="answered in time, %",
        curves=[*ours, Curve(x=bound.x, y=bound.y, label="bound", line=":")],
        log_x=True,
        x_ticks=ticks((1, 3, 10, 30, 90)),
    )


#: Lowest multiples in section 6.3, by R and "irrespective of the number of models".
_MULTIPLES = {600: 3.4, 1200: 7.6, 2400: 25.6}
#: Section 6.4: "when the SLOs for LS requests are too tight (SLO multiplier lower than 11.4), many LS
#: requests are rejected in advance". The paper says so of scenarios with BC.
_MANY_REJECTED = 11.4

_MANAGED = (
    "the paper says which SLO was managed comfortably, not which was the lowest, and names no share at "
    "which one is met; the source its authors released looks 10 ms ahead and keeps 5 ms of any SLO "
    "(compare clockwork10ms); delays of network and hosts beyond 0.1 ms each way are not modelled"
)
_REJECTED = (
    "the paper says below which multiple many LS requests are rejected, not from which on 99 % are met; "
    "a shorter look-ahead lets BC work stand in the way for less time, a longer one for more"
)

STUDY = Study(
    name="fig7",
    setting=Setting(),
    ask=over(measure, mix="mixes", policy="policies"),
    key="{policy}_{case}",
    figures=figures_of,
    tables={"_left": left_rows, "_right": right_rows},
    paper=(
        *(
            Paper(f"{mix.name}_slo_multiple", _MULTIPLES[mix.rate_rps], _MANAGED)
            for mix in Setting().left
        ),
        *(
            Paper(f"{mix.name}_slo_multiple", _MANY_REJECTED, _REJECTED)
            for mix in Setting().right
            if mix.num_bc
        ),
    ),
    title="Clockwright meets SLOs of a few EXECs, also together with batch clients, which get what is left (simulated).",
    panels=panels,
)
