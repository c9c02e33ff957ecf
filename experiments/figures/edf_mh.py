"""`edf_mh` beside `clockwork`: every scenario, three seeds, the share of the best possible beside each.

`clockwork` has the paper's look-ahead of 5 ms, `clockwork1ms` one of 1 ms, so that what late binding alone
gains is seen. Differences are in points of the requests asked (open loop) or of the bound (closed loops,
where a refusal makes the client ask more). Batch clients are counted apart.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from controller.core import SchedulerConfig
from experiments import bench_core
from experiments.figures.report import write_csv
from experiments.figures.scenarios import Outcome, Scenario, bound_of, measure, scenarios
from experiments.figures.study import POLICIES
from experiments.results_file import RESULTS, write_results

COMPARED = ("clockwork", "clockwork1ms", "edf_mh")
#: The longest runs, and the longest bounds, are done with one seed.
ONE_SEED = ("azure", "zoo_zoo1500")
#: What counts as met in Figure 7.
SATISFIED = 0.99
LOW_UTILISATION = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is simulated."""

    seeds: tuple[int, ...] = (1, 2, 3)
    #: Scenarios by group and name, all that begin so; empty: all.
    only: tuple[str, ...] = ()
    #: Also time the core, which takes minutes.
    bench: bool = True

    @property
    def scenarios(self) -> list[Scenario]:
        """Those to be run."""
        return [s for s in scenarios() if not self.only or key_of(s).startswith(self.only)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy under one scenario, by seed."""

    scenario: Scenario
    policy: str
    outcomes: tuple[Outcome, ...]

    @property
    def points(self) -> float:
        """Goodput in percent: of what was asked, in closed loops of the bound."""
        closed = self.scenario.bound == "rate"
        return 100 * mean(o.bound_share if closed else o.share for o in self.outcomes)

    @property
    def bound_share(self) -> float | None:
        """Of the bound, where there is one."""
        return mean(o.bound_share for o in self.outcomes) if self.scenario.bound else None


def key_of(scenario: Scenario) -> str:
    """As in the names of figures."""
    return f"{scenario.group}_{scenario.name}"


def run_all(
    setting: Setting, policies: dict[str, SchedulerConfig], processes: int | None = None
) -> list[Row]:
    """Measure every scenario under every policy."""
    runs = [
        (key_of(scenario), policy, seed)
        for scenario in setting.scenarios
        for seed in (setting.seeds[:1] if key_of(scenario).startswith(ONE_SEED) else setting.seeds)
        for policy in policies
    ]
    with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
        calls = {
            (key, policy, seed): pool.submit(_measure, key, policies[policy], seed)
            for key, policy, seed in runs
        }
        bounds = {
            (key, seed): pool.submit(_bound, key, seed)
            for key, seed in dict.fromkeys((key, seed) for key, _, seed in runs)
        }
        for (key, policy, seed), call in calls.items():
            outcome = call.result()
            print(
                f"{key} {policy} seed {seed}: {100 * outcome.share:.2f} % answered, "
                f"p50 {outcome.p50_ms:.1f} ms, batch clients {outcome.batch_rps:.0f} r/s",
                flush=True,
            )
        done: dict[tuple[str, str], list[Outcome]] = {}
        for (key, policy, seed), call in calls.items():
            outcome = replace(call.result(), bound=bounds[key, seed].result())
            done.setdefault((key, policy), []).append(outcome)
    return [
        Row(scenario=s, policy=policy, outcomes=tuple(done[key_of(s), policy]))
        for s in setting.scenarios
        for policy in policies
    ]


def _measure(key: str, scheduler: SchedulerConfig, seed: int) -> Outcome:
    return measure(_named(key), scheduler, seed)


def _bound(key: str, seed: int) -> int:
    return bound_of(_named(key), seed)


def _named(key: str) -> Scenario:
    # What draws a scenario's requests cannot be sent to another process; its name can.
    (scenario,) = (s for s in scenarios() if key_of(s) == key)
    return scenario


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Name every number."""
    figures: dict[str, float] = {}
    by_key = {(key_of(row.scenario), row.policy): row for row in rows}
    for row in rows:
        key = f"{row.policy}_{key_of(row.scenario)}"
        figures[f"{key}_goodput_pct"] = row.points
        if row.bound_share is not None:
            figures[f"{key}_bound_share"] = row.bound_share
        figures[f"{key}_p5_model_share"] = mean(o.p5_model_share for o in row.outcomes)
        figures[f"{key}_p50_ms"] = mean(o.p50_ms for o in row.outcomes)
    differences = {
        (key, base): row.points - by_key[key, base].points
        for (key, policy), row in by_key.items()
        for base in ("clockwork", "clockwork1ms")
        if policy == "edf_mh"
    }
    for base in ("clockwork", "clockwork1ms"):
        worst = min((d for (_, other), d in differences.items() if other == base), default=None)
        if worst is not None:
            figures[f"worst_vs_{base}_points"] = worst
    # Where lanes are idle and nothing is short, there is no goodput to trade latency for.
    ratios = [
        _p50(row.outcomes) / _p50(by_key[key, "clockwork"].outcomes)
        for (key, policy), row in by_key.items()
        if policy == "edf_mh"
        and mean(o.exec_busy for o in by_key[key, "clockwork"].outcomes) < LOW_UTILISATION
        and row.points > 100 * SATISFIED
    ]
    if ratios:
        figures["p50_ratio_max_at_low_utilisation"] = max(ratios)
    figures |= _headlines([row for row in rows if row.policy == "edf_mh"], by_key)
    return figures


def _headlines(rows: Sequence[Row], by_key: dict[tuple[str, str], Row]) -> dict[str, float]:
    figures: dict[str, float] = {}
    of = {key_of(row.scenario): row for row in rows}
    overload = [row for row in rows if row.scenario.group == "overload"]
    if overload:
        figures["overload_share_min"] = min(row.bound_share or 0.0 for row in overload)
        # Where `clockwork` leaves a model in twenty with least.
        worst = min(
            overload, key=lambda row: _p5(by_key[key_of(row.scenario), "clockwork"].outcomes)
        )
        figures["p5_model_share"] = _p5(worst.outcomes)
        key = key_of(worst.scenario), "clockwork"
        figures["clockwork_p5_model_share"] = _p5(by_key[key].outcomes)
        figures["worst_model_of_mean"] = min(
            outcome.worst_model_share / outcome.share
            for row in overload
            for outcome in row.outcomes
        )
    if row := of.get("fig5_slo10"):
        figures["fig5_slo10_rps"] = mean(o.goodput_rps for o in row.outcomes)
    left = [row for row in rows if row.scenario.name.startswith("n12_r2400_x")]
    met = [row for row in left if row.points >= 100 * SATISFIED]
    if met:
        figures["fig7_left_multiple"] = min(
            float(row.scenario.name.partition("_x")[2]) for row in met
        )
    if row := of.get("fig7_right_m12c16_x3.38"):
        figures["fig7_right_ls_pct"] = row.points
        figures["fig7_right_bc_rps"] = mean(o.batch_rps for o in row.outcomes)
    if row := of.get("zoo_zoo600_slo100"):
        figures["zoo_share"] = row.bound_share or 0.0
    if row := of.get("azure_scale1"):
        late = sum(o.late for o in row.outcomes)
        figures["azure_late_per_million"] = 1e6 * late / sum(o.arrived for o in row.outcomes)
    return figures


def _p5(outcomes: Sequence[Outcome]) -> float:
    return mean(outcome.p5_model_share for outcome in outcomes)


def _p50(outcomes: Sequence[Outcome]) -> float:
    return mean(outcome.p50_ms for outcome in outcomes)


def time_core(policy: str) -> dict[str, float]:
    """Cost per request on the largest case, by `bench_core`."""
    models, workers, rate, zipf, warm_s, measured_s = bench_core.CASES["4026x20"]()
    runs = [
        bench_core.run_case(
            models,
            workers,
            rate,
            zipf=zipf,
            warm_s=warm_s,
            measured_s=measured_s,
            seed=seed,
            policy=policy,
        )
        for seed in range(bench_core.REPEATS)
    ]
    prefix = "" if policy == "edf_mh" else f"{policy}_"
    return {
        f"{prefix}core_us_4026x20": median(run[0] for run in runs),
        f"{prefix}core_us_4026x20_min": min(run[0] for run in runs),
        f"{prefix}core_us_p999_4026x20": median(run[1] for run in runs),
    }


def produce(setting: Setting, directory: Path = RESULTS) -> list[Row]:
    """Measure everything and write `edf_mh.json` and `edf_mh.csv`."""
    rows = run_all(setting, {name: POLICIES[name] for name in COMPARED})
    figures = figures_of(rows)
    if setting.bench:
        for policy in ("clockwork", "edf_mh"):
            figures |= time_core(policy)
    write_table(rows, directory / "edf_mh.csv")
    for key in sorted(figures):
        if not key.startswith(tuple(f"{policy}_{s}" for policy in COMPARED for s in _GROUPS)):
            print(f"{key}: {figures[key]:.4g}")
    write_results(
        "edf_mh",
        figures,
        command="python -m experiments.figures.edf_mh" + ("" if setting.bench else " --no-bench"),
        seeds=setting.seeds,
        extra={"one_seed": list(ONE_SEED)},
        directory=directory,
    )
    return rows


_GROUPS = sorted({scenario.group for scenario in scenarios()})


def write_table(rows: Sequence[Row], target: Path) -> None:
    """A line per scenario, policy and seed."""
    write_csv(
        target,
        [
            "group",
            "scenario",
            "policy",
            "run",
            "arrived",
            "answered",
            "bound",
            "late",
            "cold",
            "p5_model_share",
            "worst_model_share",
            "p50_ms",
            "batch_rps",
            "exec_busy",
            "mean_batch_size",
        ],
        [
            (
                row.scenario.group,
                row.scenario.name,
                row.policy,
                number,
                outcome.arrived,
                outcome.answered,
                outcome.bound if row.scenario.bound else "",
                outcome.late,
                outcome.cold,
                outcome.p5_model_share,
                outcome.worst_model_share,
                outcome.p50_ms,
                outcome.batch_rps,
                outcome.exec_busy,
                outcome.mean_batch_size,
            )
            for row in rows
            for number, outcome in enumerate(row.outcomes)
        ],
    )


def main() -> None:
    """Produce the table."""
    parser = argparse.ArgumentParser(description="edf_mh beside clockwork.")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(Setting().seeds))
    parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX", help="scenarios")
    parser.add_argument("--no-bench", action="store_true", help="do not time the core")
    options = parser.parse_args()
    setting = replace(
        Setting(),
        seeds=tuple(options.seeds),
        only=tuple(options.only),
        bench=not options.no_bench,
    )
    produce(setting)


if __name__ == "__main__":
    main()
