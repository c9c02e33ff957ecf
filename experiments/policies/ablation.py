"""What each piece of `edf_mh` is worth: all of it, and all but one, on the scenarios where pieces matter.

Goodput in points (as in `edf_mh.py`):

* `PIECE_SCENARIO_worth_points`: with all pieces, less with all but this one, or with the obvious other rule
  in its place; above 0 the piece pays there. Fairness is no matter of goodput: it costs some, and is judged
  by the shares of the models that are served worst.
* `PIECE_SCENARIO_gain_points`: with a piece that was left out, less without it; above 0 it would pay there.

Bounds play no part in differences, and are in `edf_mh.json`. Not for `make native` (see `tried.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from controller.core import EdfMhConfig, Scheduler, SchedulerConfig
from experiments.policies import tried
from experiments.policies.edf_mh import Contender, Row, Setting, run_all, table
from experiments.policies.scenarios import Scenario, further_scenarios, scenarios
from experiments.simulator import Case
from experiments.study.study import Study

ALL = SchedulerConfig(policy="edf_mh")

#: Where pieces with a switch are compared.
SCENARIOS = (
    "fig5_slo10",
    "fig7_left_n12_r2400_x3.38",
    "fig7_right_m12c16_x3.38",
    "overload_n48_r5514",
    "overload_zoo48",
    "zoo_zoo600_slo100",
    "zoo_zoo1500",
)
_LOADS = ("overload_n48_r5514", "zoo_zoo600_slo100", "zoo_zoo1500", "azure_x1_quiet")

#: Changes, by the name of the piece that is off.
OFF = {
    "adaptive_lookahead": EdfMhConfig(adaptive_lookahead=False),
    "adaptive_margin": EdfMhConfig(adaptive_margin=False),
    "prune_infers": EdfMhConfig(prune_infers=False),
    "prune_loads": EdfMhConfig(prune_loads=False),
    "pressure_gain": EdfMhConfig(pressure_gain=0.0),
    "isolation": EdfMhConfig(isolation=0.0),
    "limit_batch": EdfMhConfig(limit_batch=False),
    "deferral": EdfMhConfig(deferral=False),
    "densest": EdfMhConfig(densest=False),
    "next_use": EdfMhConfig(next_use=False),
    "prefetch": EdfMhConfig(prefetch=False),
    "take_pages": EdfMhConfig(take_pages=False),
    "before_refusals": EdfMhConfig(before_refusals=False),
    "suits": EdfMhConfig(suits=False),
}

#: Where a piece with a switch is compared besides: it matters in few other places.
BESIDES = {
    "deferral": ("few",),
    "densest": ("unseen_averse",),
    "next_use": ("unseen_timers", "unseen_halftimers", "unseen_random"),
    "prefetch": ("unseen_timers", "unseen_halftimers", "unseen_random"),
    "take_pages": ("unseen_hot",),
    "before_refusals": ("unseen_hot", "unseen_crowd"),
    "suits": ("unseen_unlike", "unlike"),
}

#: How its scheduler is made, and the scenarios that it runs, whose keys begin so.
_Trial = tuple[Callable[[Case], Scheduler], tuple[str, ...]]

#: Kept, and without a switch: what stands in its place, and where.
REPLACED: dict[str, _Trial] = {
    "contiguous_run": (
        partial(tried.with_policy, tried.largest_fill),
        ("fig5_slo10", "fig7_left_n12_r2400_x3.38", "overload", "few", "unlike"),
    ),
    "further_copy": (
        partial(tried.with_policy, tried.OneCopy, eager_copies=False),
        (*_LOADS, "few_n4_gpus8"),
    ),
    "copy_when_refused": (
        partial(tried.with_policy, tried.CopiesAtOnce),
        (*_LOADS, "few_n4_gpus8"),
    ),
    "wanted_not_evicted": (partial(tried.with_policy, tried.PlainLru), _LOADS),
}


def _most_refused_at_once(case: Case) -> Scheduler:
    return Scheduler(replace(ALL, edf_mh=EdfMhConfig(at_once=0.62)))


#: Left out, or off: how it was tried, and where.
LEFT_OUT: dict[str, _Trial] = {
    "at_once": (_most_refused_at_once, ("overload", "zoo_zoo600_slo100")),
    "batch_beside_idle": (
        partial(tried.with_policy, tried.batch_beside_idle),
        ("fig7_right_m12c16_x3.38",),
    ),
}


def contenders() -> list[Contender]:
    """All of `edf_mh`, and it with each piece off, replaced, or added."""
    return [
        Contender(name="all", config=ALL),
        *(
            Contender(
                name=name,
                config=replace(ALL, edf_mh=off),
                only=(*SCENARIOS, *BESIDES.get(name, ())),
            )
            for name, off in OFF.items()
        ),
        *(
            Contender(name=name, config=ALL, scheduler=scheduler, only=only)
            for name, (scheduler, only) in (REPLACED | LEFT_OUT).items()
        ),
    ]


def compared(setting: Setting) -> list[Scenario]:
    """The scenarios under which any piece is compared, of those that are asked for."""
    pieces = [contender for contender in contenders() if contender.only]
    return [
        scenario
        for scenario in (*scenarios(), *further_scenarios())
        if setting.asks_for(scenario) and any(piece.runs(scenario) for piece in pieces)
    ]


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Name every number: `PIECE_SCENARIO_METRIC`, and of the whole `all_SCENARIO_METRIC`."""
    by_key = {(row.policy, row.scenario.key): row for row in rows}
    figures: dict[str, float] = {}
    for (policy, key), row in by_key.items():
        figures[f"{policy}_{key}_goodput_pct"] = row.points
        for metric in ("p5_model_share", "worst_model_share", "p50_ms"):
            figures[f"{policy}_{key}_{metric}"] = row.mean(metric)
        if row.scenario.group == "fig7_right":
            figures[f"{policy}_{key}_bc_rps"] = row.mean("batch_rps")
        if row.scenario.group == "azure":
            figures[f"{policy}_{key}_cold_per_million"] = row.per_million("cold")
        gain = row.points - by_key["all", key].points
        if policy in LEFT_OUT:
            figures[f"{policy}_{key}_gain_points"] = gain
        elif policy != "all":
            figures[f"{policy}_{key}_worth_points"] = -gain
    return figures


STUDY = Study(
    name="ablation",
    setting=Setting(bounds=False),
    ask=lambda setting: run_all(compared(setting), contenders(), setting),
    key="{policy}_{group}_{scenario}",
    figures=lambda _, rows: figures_of(rows),
    tables={"": table},
)
