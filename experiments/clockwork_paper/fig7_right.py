"""Figure 7, right: latency-sensitive clients (LS) beside batch clients (BC). Part of `fig7`.

6 GPUs and 6 LS instances of ResNet50, each with a Poisson client of 200 r/s whose SLO grows stage by
stage as in the left half. M BC instances, with C closed-loop clients each, have an SLO of a day, as in
the paper's artifact: (a) none, (b) M = 12 with C = 16, which allows large batches, (c) M = 48 with C = 4.

The numbers to compare are the lowest multiple from which on 99 % of the LS requests are answered in time,
and what BC get then. Bounds, by GPU time alone:

* LS: B1 on the arrivals of each stage, as though there were no BC;
* BC: the GPU time of a stage less the least that as many LS answers as the policy gave need in any
  schedule, in the best batches that C requests of one model can form. Only answers whose EXEC lies inside
  the stage count on either side, so the two together hold for the stage. It depends on the policy: who
  answers fewer LS has more left.

Durations carry noise that no policy can foresee, so both hold for their mean, as in Figure 5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S
from controller.telemetry import OK, ActionRow, RequestRow
from experiments.bounds import Cost, density_bound
from experiments.bounds.density import shares
from experiments.clockwork_paper.fig7_left import (
    ARCHITECTURE,
    GROWTH,
    NUM_GPUS,
    Setting,
    lowest_multiple,
    show_multiples,
    stages_of,
)
from experiments.simulator import Case, Cluster, copies_of
from experiments.study.report import Comparison, colour_of
from experiments.study.study import POLICIES, run_rows
from modelzoo.profile import load_profile
from traces.arrivals import ClosedLoop, Workload

NUM_LS = 6
LS_RPS = 200
BC_SLO_NS = 24 * 3600 * NS_PER_S

#: Section 6.4: "when the SLOs for LS requests are too tight (SLO multiplier lower than 11.4), many LS
#: requests are rejected in advance". The paper says so of scenarios with BC.
PAPER_MULTIPLE = 11.4
_REASON = (
    "the paper says below which multiple many LS requests are rejected, not from which on 99 % are met; "
    "a shorter look-ahead lets BC work stand in the way for less time, a longer one for more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One policy in one scenario, by stage."""

    policy: str
    num_bc: int
    concurrency: int
    #: By stage: share of the LS requests that was answered in time, then the bound on that share.
    satisfaction: tuple[float, ...]
    bound: tuple[float, ...]
    bc_rps: tuple[float, ...]
    bc_bound_rps: tuple[float, ...]

    @property
    def case_key(self) -> str:
        """The case as the names of its figures spell it."""
        return f"m{self.num_bc}c{self.concurrency}" if self.num_bc else "m0"


def case_of(setting: Setting, policy: str, num_bc: int, concurrency: int) -> Case:
    """Describe one run: models of LS come first, then those of BC."""
    models = copies_of(load_profile("table1").row_for(ARCHITECTURE), NUM_LS + num_bc)
    # The LS requests of all scenarios are the same.
    seeds = np.random.SeedSequence([setting.seed, NUM_LS])
    end_ns = setting.begins_ns[-1]
    return Case(
        workload=Workload(
            models=tuple(model.model_id for model in models),
            sources=setting.sources(range(NUM_LS), NUM_LS * LS_RPS, seeds=seeds),
            closed_loops=tuple(
                ClosedLoop(model=model, concurrency=concurrency, slo_ns=BC_SLO_NS, end_ns=end_ns)
                for model in range(NUM_LS, NUM_LS + num_bc)
            ),
        ),
        cluster=Cluster(models=models, num_workers=NUM_GPUS, noise=setting.noise),
        duration_ns=end_ns,
        scheduler=POLICIES[policy],
        seed=setting.seed,
    )


def measure(setting: Setting, policy: str, num_bc: int, concurrency: int) -> Shared:
    """Simulate one policy in one scenario."""
    case = case_of(setting, policy, num_bc, concurrency)
    begins_ns = setting.begins_ns
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
                continue
            own = stage_of_slo.get(row.slo_ns)
            if own is None:
                continue  # the warm-up
            arrived[own] += 1
            if row.outcome == OK:
                answered[own] += 1
                inside[own] += within == own

    run_rows(case, take)
    stages = list(stages_of(case))
    seconds = setting.stage_ns / NS_PER_S
    return Shared(
        policy=policy,
        num_bc=num_bc,
        concurrency=concurrency,
        satisfaction=tuple(a / n for a, n in zip(answered, arrived, strict=True)),
        bound=tuple(density_bound(stage) / len(stage) for stage in stages),
        bc_rps=tuple(count / seconds for count in batch),
        bc_bound_rps=tuple(
            _room(np.sort(shares(stage))[:count], case, setting.stage_ns, concurrency) / seconds
            for stage, count in zip(stages, inside, strict=True)
        )
        if num_bc
        else (0.0,) * setting.num_stages,
    )


def _room(used_ns: Any, case: Case, stage_ns: int, concurrency: int) -> float:  # noqa: ANN401
    """Requests that fit into a stage beside others that use so much, in the best of possible batches."""
    exec_ns = Cost(case.cluster.models[0].row.exec_ns).exec_of(padding=True)[:concurrency]
    least_ns = min(ns / size for size, ns in enumerate(exec_ns, start=1))
    return (case.cluster.num_workers * stage_ns - float(used_ns.sum())) / least_ns


def measure_all(setting: Setting) -> list[Shared]:
    """Measure everything, with a line for each."""
    results = []
    for num_bc, concurrency in setting.scenarios:
        for policy in setting.policies:
            result = measure(setting, policy, num_bc, concurrency)
            results.append(result)
            stages = zip(result.satisfaction, result.bc_rps, strict=True)
            text = " ".join(f"{100 * share:.1f}%/{rps:.0f}" for share, rps in stages)
            print(f"{policy} {result.case_key}: {text}", flush=True)
    return results


def figures_of(setting: Setting, results: Sequence[Shared]) -> dict[str, float]:
    """Name every number; a multiple that does not exist has none. Stages are named by their SLO in ms."""
    figures: dict[str, float] = {}
    for result in results:
        key = f"{result.policy}_{result.case_key}"
        for name, satisfied in ((key, result.satisfaction), ("bound_ls", result.bound)):
            multiple = lowest_multiple(satisfied)
            if multiple is not None:
                figures[f"{name}_slo_multiple"] = multiple
        if result.num_bc:
            figures[f"paper_{result.case_key}_slo_multiple"] = PAPER_MULTIPLE
        for stage, slo_ns in enumerate(setting.slos_ns):
            at = f"{key}_slo{round(slo_ns / NS_PER_MS)}"
            figures[f"{at}_ls_pct"] = 100 * result.satisfaction[stage]
            if result.bound[stage]:
                share = result.satisfaction[stage] / result.bound[stage]
                figures[f"{at}_ls_bound_share_pct"] = 100 * share
            if result.num_bc:
                share = result.bc_rps[stage] / result.bc_bound_rps[stage]
                figures[f"{at}_bc_rps"] = result.bc_rps[stage]
                figures[f"{at}_bc_bound_share_pct"] = 100 * share
            figures[f"bound_ls_slo{round(slo_ns / NS_PER_MS)}_ls_pct"] = 100 * result.bound[stage]
    return figures


def comparisons(results: Sequence[Shared]) -> list[Comparison]:
    """The multiples, beside the paper's."""
    return [
        Comparison(
            key=f"{result.policy}_{result.case_key}_slo_multiple",
            paper_key=f"paper_{result.case_key}_slo_multiple",
            reason=_REASON,
        )
        for result in results
        if result.num_bc
    ]


COLUMNS = (
    "policy",
    "num_bc",
    "concurrency",
    "slo_multiple",
    "slo_ms",
    "ls_satisfaction",
    "ls_bound",
    "bc_rps",
    "bc_bound_rps",
)


def table_of(setting: Setting, results: Sequence[Shared]) -> list[tuple[object, ...]]:
    """Rows of `COLUMNS`."""
    return [
        (r.policy, r.num_bc, r.concurrency, GROWTH**stage, slo_ns / NS_PER_MS, *numbers)
        for r in results
        for stage, (slo_ns, *numbers) in enumerate(
            zip(setting.slos_ns, r.satisfaction, r.bound, r.bc_rps, r.bc_bound_rps, strict=True)
        )
    ]


def draw(panels: Iterable[Any], results: Sequence[Shared]) -> None:
    """A panel for each scenario: LS satisfaction to the left, BC throughput (dashed) to the right."""
    scenarios = list(dict.fromkeys(result.case_key for result in results))
    highest = max(max(result.bc_bound_rps) for result in results)
    panels = list(panels)
    for panel, scenario in zip(panels, scenarios, strict=True):
        twin = panel.twinx()
        mine = [result for result in results if result.case_key == scenario]
        multiples = [GROWTH**stage for stage in range(len(mine[0].satisfaction))]
        panel.plot(multiples, mine[0].bound, "-", color="black", lw=0.8, label="LS bound")
        for result in mine:
            colour = colour_of(result.policy)
            panel.plot(
                multiples, result.satisfaction, "-", color=colour, marker=".", label=result.policy
            )
            if result.num_bc:
                twin.plot(multiples, result.bc_rps, "--", color=colour, marker=".")
                twin.plot(multiples, result.bc_bound_rps, ":", color=colour, lw=0.8)
        if mine[0].num_bc:
            panel.axvline(PAPER_MULTIPLE, color="grey", ls=":", label="met in the paper")
        show_multiples(panel, len(multiples))
        twin.set_ylim(0, 1.03 * max(highest, 1.0))
        text = f"M = {mine[0].num_bc}, C = {mine[0].concurrency}" if mine[0].num_bc else "M = 0"
        panel.set_title(f"6 LS of 200 r/s, BC {text}", fontsize="medium")
    twin.set_ylabel("BC, r/s (dashed; bound dotted)")
    panels[0].set_ylabel("LS requests answered in time")
    panels[-1].legend(fontsize="x-small", loc="center right")
