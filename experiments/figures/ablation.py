"""What each piece of `edf_mh` is worth: all of it, and all but one, on the scenarios where pieces matter.

Goodput in points (as in `edf_mh.py`), of all pieces less of all but one: above 0 the piece pays there.
Fairness is no matter of goodput: it costs some, and is judged by the shares of the models that are served
worst. Bounds play no part in differences, and are in `edf_mh.json`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from controller.core import EdfMhConfig, SchedulerConfig
from experiments.figures.edf_mh import Row, Setting, run_all, write_table
from experiments.results_file import RESULTS, write_results

SCENARIOS = (
    "fig5_slo10",
    "fig7_left_n12_r2400_x3.38",
    "fig7_right_m12c16_x3.38",
    "overload_n48_r5514",
    "overload_zoo48",
    "zoo_zoo600_slo100",
    "zoo_zoo1500",
)

#: What is changed, by the name of the piece that is off.
OFF = {
    "adaptive_lookahead": EdfMhConfig(adaptive_lookahead=False),
    "adaptive_margin": EdfMhConfig(adaptive_margin=False),
    "prune_infers": EdfMhConfig(prune_infers=False),
    "prune_loads": EdfMhConfig(prune_loads=False),
    "pressure_gain": EdfMhConfig(pressure_gain=0.0),
    "fairness": EdfMhConfig(fairness=0.0, served_floor=0.0),
    "served_floor": EdfMhConfig(served_floor=0.0),
    "limit_batch": EdfMhConfig(limit_batch=False),
}


def policies() -> dict[str, SchedulerConfig]:
    """All of `edf_mh`, and it without each piece."""
    whole = SchedulerConfig(policy="edf_mh")
    return {"all": whole} | {name: replace(whole, edf_mh=off) for name, off in OFF.items()}


def figures_of(rows: list[Row]) -> dict[str, float]:
    """Name every number: `PIECE_SCENARIO_METRIC`, and of everything on `all_SCENARIO_METRIC`."""
    by_key = {(row.policy, row.scenario.key): row for row in rows}
    figures: dict[str, float] = {}
    for (policy, key), row in by_key.items():
        figures[f"{policy}_{key}_goodput_pct"] = row.points
        for share in ("p5_model_share", "worst_model_share"):
            figures[f"{policy}_{key}_{share}"] = row.mean(share)
        if row.scenario.group == "fig7_right":
            figures[f"{policy}_{key}_bc_rps"] = row.mean("batch_rps")
        if policy != "all":
            figures[f"{policy}_{key}_worth_points"] = by_key["all", key].points - row.points
    return figures


def produce(setting: Setting, directory: Path = RESULTS) -> list[Row]:
    """Measure everything and write `ablation.json` and `ablation.csv`."""
    rows = run_all(setting, policies())
    figures = figures_of(rows)
    write_table(rows, directory / "ablation.csv")
    for key, value in figures.items():
        if key.endswith("_points"):
            print(f"{key}: {value:+.2f}")
    write_results(
        "ablation",
        figures,
        command="python -m experiments.figures.ablation",
        seeds=setting.seeds,
        directory=directory,
    )
    return rows


if __name__ == "__main__":
    produce(Setting(only=SCENARIOS, bounds=False))
