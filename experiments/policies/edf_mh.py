"""`edf_mh` beside `clockwork`: every scenario, three seeds, the share of the best possible beside each.

`clockwork` has the paper's look-ahead of 5 ms, `clockwork1ms` one of 1 ms, so that what late binding alone
gains is seen. Differences are in points of the requests asked (open loop) or of the bound (closed loops,
where a refusal makes the client ask more). Batch clients are counted apart.

Compiled (`make native`) it takes a third of the time. What the core costs per request is measured apart, on a
machine with nothing else to do: `edf_mh_cost`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Annotated, Any

from controller.core import EdfMhConfig, Scheduler, SchedulerConfig
from experiments.clockwork_paper.fig7 import SATISFIED, lowest_multiple
from experiments.policies.scenario_runs import ScenarioOutcome, bound_of, measure
from experiments.policies.scenarios import Scenario, named, scenarios
from experiments.simulator import Case, production_scheduler
from experiments.study.compared import POLICIES
from experiments.study.study import NO_COLUMN, Study

COMPARED = ("clockwork", "clockwork1ms", "edf_mh")
LOW_UTILISATION = 0.7
#: Properties of an outcome that are columns of the table.
COLUMNS = (
    "answered",
    "bound",
    "late",
    "cold",
    "p5_model_share",
    "worst_model_share",
    "p50_ms",
    "refusal_p50_ms",
    "refusal_p99_ms",
    "batch_rps",
    "exec_busy",
    "load_busy",
    "mean_batch_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is simulated."""

    seeds: tuple[int, ...] = (1, 2, 3)
    #: Only scenarios whose key begins with one of these words.
    only: tuple[str, ...] = ("",)
    #: Runs at a time.
    processes: int = os.cpu_count() or 1
    #: Compute all bounds; those with memory take minutes. False: only bounds that cost nothing.
    bounds: bool = True

    @property
    def scenarios(self) -> list[Scenario]:
        """Scenarios to be run."""
        return [scenario for scenario in scenarios() if self.asks_for(scenario)]

    def asks_for(self, scenario: Scenario) -> bool:
        """Whether a scenario is to be run."""
        return scenario.key.startswith(self.only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy that is compared."""

    name: str
    config: SchedulerConfig
    #: Makes the scheduler. A function of a module, so that it can be sent to another process by name.
    scheduler: Callable[[Case], Scheduler] = production_scheduler
    #: Run only under scenarios whose key begins with one of these words; empty: all.
    only: tuple[str, ...] = ()

    def runs(self, scenario: Scenario) -> bool:
        """Whether the policy is compared under the scenario."""
        return not self.only or scenario.key.startswith(self.only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy under one scenario, by seed."""

    scenario: Annotated[Scenario, NO_COLUMN]
    policy: str
    outcomes: tuple[ScenarioOutcome, ...]

    @property
    def group(self) -> str:
        """The scenario's."""
        return self.scenario.group

    @property
    def points(self) -> float:
        """Goodput in percent of what was asked, or of the bound in closed loops."""
        return 100 * self.mean("bound_share" if self.scenario.bound == "rate" else "share")

    def mean(self, name: str) -> float:
        """Mean of one property of the outcomes over the seeds."""
        return float(mean(getattr(outcome, name) for outcome in self.outcomes))

    def per_million(self, name: str) -> float:
        """How many of a million requests a count stands for, all seeds together."""
        return 1e6 * self.mean(name) / self.mean("asked")


def run_all(
    scenarios: Sequence[Scenario], contenders: Sequence[Contender], setting: Setting
) -> list[Row]:
    """Measure every contender under all of its scenarios."""
    runs = [(scenario, seed) for scenario in scenarios for seed in setting.seeds]
    pairs = [(s, contender) for s in scenarios for contender in contenders if contender.runs(s)]
    with ProcessPoolExecutor(setting.processes) as pool:
        calls = {
            (scenario.key, contender.name, seed): pool.submit(
                _measure, scenario.key, asdict(contender.config), contender.scheduler, seed
            )
            for scenario, contender in pairs
            for seed in setting.seeds
        }
        bounds = {
            (scenario.key, seed): pool.submit(_bound, scenario.key, seed)
            for scenario, seed in runs
            if setting.bounds or scenario.bound == "rate"
        }
        for (key, policy, seed), call in calls.items():
            outcome = call.result()
            print(
                f"{key} {policy} seed {seed}: {100 * outcome.share:.2f} % answered, "
                f"p50 {outcome.p50_ms:.1f} ms, batch clients {outcome.batch_rps:.0f} r/s",
                flush=True,
            )
        bound = {run: call.result() for run, call in bounds.items()}
        return [
            Row(
                scenario=scenario,
                policy=contender.name,
                outcomes=tuple(
                    replace(
                        calls[scenario.key, contender.name, seed].result(),
                        bound=bound.get((scenario.key, seed), -1),
                    )
                    for seed in setting.seeds
                ),
            )
            for scenario, contender in pairs
        ]


def _measure(
    key: str, config: dict[str, Any], scheduler: Callable[[Case], Scheduler], seed: int
) -> ScenarioOutcome:
    # A frozen dataclass that was compiled cannot be sent to another process; its fields can.
    edf_mh = EdfMhConfig(**config["edf_mh"])
    return measure(
        named(key),
        SchedulerConfig(**(config | {"edf_mh": edf_mh})),
        seed,
        make_scheduler=scheduler,
    )


def _bound(key: str, seed: int) -> int:
    # The function that draws a scenario's requests cannot be sent to another process; its name can.
    return bound_of(named(key), seed)


# --- figures --------------------------------------------------------------------------------------

Table = dict[str, dict[str, Row]]


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    for row in rows:
        key = f"{row.policy}_{row.scenario.key}"
        figures[f"{key}_goodput_pct"] = row.points
        if row.scenario.bound:
            figures[f"{key}_bound_share"] = row.mean("bound_share")
        figures[f"{key}_p5_model_share"] = row.mean("p5_model_share")
        for metric in ("p50_ms", "refusal_p50_ms", "refusal_p99_ms"):
            figures[f"{key}_{metric}"] = row.mean(metric)
        if row.scenario.group == "fig7_right":
            figures[f"{key}_bc_rps"] = row.mean("batch_rps")
        if row.scenario.group in ("azure", "scale"):
            figures[f"{key}_late_per_million"] = row.per_million("late")
            figures[f"{key}_cold_per_million"] = row.per_million("cold")
    table = tabulate(rows)
    for base in ("clockwork", "clockwork1ms"):
        figures[f"worst_vs_{base}_points"] = worst_against(table, base)[0]
    figures |= _latency(table) | _overload(table) | _figure_7(table)
    for key, metric, name in (
        ("fig5_slo10", "goodput_rps", "fig5_slo10_rps"),
        ("fig5_slo10", "bound_rps", "fig5_slo10_bound_rps"),
        ("zoo_zoo600_slo100", "bound_share", "zoo_share"),
    ):
        if key in table:
            figures[name] = table[key]["edf_mh"].mean(metric)
    for noise, name in (("noisy", "azure"), ("exact", "azure_exact")):
        if azure := table.get(f"azure_x1_{noise}"):
            row = azure["edf_mh"]
            figures[f"{name}_late_per_million"] = row.per_million("late")
            figures[f"{name}_requests"] = sum(outcome.asked for outcome in row.outcomes)
    return figures


def tabulate(rows: Sequence[Row]) -> Table:
    """By scenario, then by policy."""
    table: Table = {}
    for row in rows:
        table.setdefault(row.scenario.key, {})[row.policy] = row
    return table


def worst_against(table: Table, base: str) -> tuple[float, str]:
    """The most negative difference of `edf_mh` to another policy, in points, and its scenario."""
    return min((row["edf_mh"].points - row[base].points, key) for key, row in table.items())


def slowest_against(table: Table) -> list[tuple[float, str, bool]]:
    """Median latency as a multiple of `clockwork`'s where GPUs and PCIe are idle for much of the time.

    Returns:
        By scenario, largest first: the multiple, the scenario, and whether both policies answer all
        but one in a hundred. Where they do not, each has its own set of answers.
    """
    found = []
    for key, row in table.items():
        clockwork, ours = row["clockwork"], row["edf_mh"]
        if clockwork.mean("utilisation") < LOW_UTILISATION and clockwork.mean("p50_ms"):
            ratio = ours.mean("p50_ms") / clockwork.mean("p50_ms")
            alike = min(ours.mean("share"), clockwork.mean("share")) >= SATISFIED
            found.append((ratio, key, alike))
    return sorted(found, reverse=True)


def _latency(table: Table) -> dict[str, float]:
    found = slowest_against(table)
    alike = [ratio for ratio, _, alike in found if alike]
    figures = {}
    if found:
        figures["p50_ratio_max_at_low_utilisation"] = found[0][0]
        figures["p50_ratio_mean_at_low_utilisation"] = mean(ratio for ratio, _, _ in found)
    if alike:
        figures["p50_ratio_max_at_low_utilisation_all_answered"] = alike[0]
    return figures


def _overload(table: Table) -> dict[str, float]:
    overload = [row for row in table.values() if row["edf_mh"].scenario.group == "overload"]
    if not overload:
        return {}
    # The overload under which `clockwork` gives the 5th-percentile model least.
    worst = min(overload, key=lambda row: row["clockwork"].mean("p5_model_share"))
    p5_share = worst["edf_mh"].mean("p5_model_share")
    p5_bound = worst["edf_mh"].mean("bound") / worst["edf_mh"].mean("asked")
    return {
        "overload_share_min": min(row["edf_mh"].mean("bound_share") for row in overload),
        "p5_model_share": p5_share,
        "p5_model_share_bound": p5_bound,
        "p5_model_share_of_bound": p5_share / p5_bound,
        "clockwork_p5_model_share": worst["clockwork"].mean("p5_model_share"),
        "worst_model_of_mean": min(
            outcome.worst_model_share / outcome.share
            for row in overload
            for outcome in row["edf_mh"].outcomes
        ),
    }


def _figure_7(table: Table) -> dict[str, float]:
    figures = {}
    for policy, prefix in (("clockwork", "clockwork_"), ("edf_mh", "")):
        shares = [
            row[policy].points / 100
            for key, row in table.items()
            if key.startswith("fig7_left_n12_r2400_")
        ]
        multiple = lowest_multiple(shares)
        if multiple is not None:
            figures[f"{prefix}fig7_left_multiple"] = multiple
    if row := table.get("fig7_right_m12c16_x3.38"):
        figures["fig7_right_ls_pct"] = row["edf_mh"].points
        figures["fig7_right_bc_rps"] = row["edf_mh"].mean("batch_rps")
    # Batch clients' throughput where both policies keep the other requests in time.
    ratios = [
        row["edf_mh"].mean("batch_rps") / row["clockwork"].mean("batch_rps")
        for key, row in table.items()
        if key.startswith("fig7_right_")
        and row["clockwork"].mean("batch_rps")
        and min(row[policy].points for policy in ("clockwork", "edf_mh")) >= 100 * SATISFIED
    ]
    if ratios:
        figures["fig7_right_bc_ratio_min"] = min(ratios)
    return figures


# --- files ----------------------------------------------------------------------------------------


def table(_setting: Setting, rows: Sequence[Row]) -> Iterator[Mapping[str, float | int | str]]:
    """A line per scenario, policy and seed; nothing where no bound is known."""
    for row in rows:
        for number, outcome in enumerate(row.outcomes):
            counts = {name: getattr(outcome, name) for name in COLUMNS}
            yield {
                "group": row.scenario.group,
                "scenario": row.scenario.name,
                "policy": row.policy,
                "run": number,
                "arrived": outcome.asked,
                **{name: "" if count == -1 else count for name, count in counts.items()},
            }


def measure_all(setting: Setting) -> list[Row]:
    """Measure the policies that are compared, under the scenarios that are asked for."""
    contenders = [Contender(name=name, config=POLICIES[name]) for name in COMPARED]
    return run_all(setting.scenarios, contenders, setting)


def extra(_setting: Setting, rows: Sequence[Row]) -> dict[str, Any]:
    """Where `edf_mh` is worst, and slowest."""
    compared = tabulate(rows)
    return {
        "worst_scenario": {
            base: worst_against(compared, base)[1] for base in ("clockwork", "clockwork1ms")
        },
        "slowest_scenarios": [key for _, key, _ in slowest_against(compared)[:3]],
    }


STUDY = Study(
    name="edf_mh",
    setting=Setting(),
    ask=measure_all,
    key="{policy}_{group}_{scenario}",
    figures=lambda _, rows: figures_of(rows),
    tables={"": table},
    extra=extra,
)
