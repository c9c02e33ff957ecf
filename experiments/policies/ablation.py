"""What each piece of `edf_mh` is worth: all of it, and all but one, on the scenarios where pieces matter.

`PIECE_SCENARIO_worth_points` is goodput in points (as in `edf_mh.py`) with all pieces, less with all but this one;
above 0 the piece pays there. Fairness is no matter of goodput: it costs some, and is judged by the shares of the
models that are served worst. Bounds play no part in differences, and are in `edf_mh.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from controller.core import EdfMhConfig, SchedulerConfig
from experiments.policies.contest import Contender, Row, Setting, run_all, said
from experiments.policies.edf_mh import own_figures, table
from experiments.policies.scenarios import further_scenarios, named, scenarios
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
_UNFORESEEN = ("unseen_timers", "unseen_halftimers", "unseen_random")

#: By the name of the piece that is off: the change, and where it is compared besides, because it matters in few other
#: places.
OFF: dict[str, tuple[EdfMhConfig, tuple[str, ...]]] = {
    "adaptive_lookahead": (EdfMhConfig(adaptive_lookahead=False), ()),
    "adaptive_margin": (EdfMhConfig(adaptive_margin=False), ()),
    "prune_infers": (EdfMhConfig(prune_infers=False), ()),
    "prune_loads": (EdfMhConfig(prune_loads=False), ()),
    "pressure_gain": (EdfMhConfig(pressure_gain=0.0), ()),
    "isolation": (EdfMhConfig(isolation=0.0), ()),
    "limit_batch": (EdfMhConfig(limit_batch=False), ()),
    "deferral": (EdfMhConfig(deferral=False), ("few",)),
    "densest": (EdfMhConfig(densest=False), ("unseen_averse",)),
    "next_use": (EdfMhConfig(next_use=False), _UNFORESEEN),
    "prefetch": (EdfMhConfig(prefetch=False), _UNFORESEEN),
    "take_pages": (EdfMhConfig(take_pages=False), ("unseen_hot",)),
    "before_refusals": (EdfMhConfig(before_refusals=False), ("unseen_hot", "unseen_crowd")),
    "suits": (EdfMhConfig(suits=False), ("unseen_unlike", "unlike")),
}


def pieces() -> list[Contender]:
    """`edf_mh` with each piece off."""
    return [
        Contender(name=name, config=replace(ALL, edf_mh=change), only=(*SCENARIOS, *besides))
        for name, (change, besides) in OFF.items()
    ]


def measure_all(setting: Setting) -> Iterator[Row]:
    """Measure all of `edf_mh` and its pieces, under each scenario that is asked for and where any piece is compared."""
    where = tuple(word for piece in pieces() for word in piece.only)
    loads = [
        load
        for load in (*scenarios(), *further_scenarios())
        if load.key.startswith(setting.only) and load.key.startswith(where)
    ]
    return run_all(loads, [Contender(name="all", config=ALL), *pieces()], setting, named)


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Name every number: `PIECE_SCENARIO_METRIC`, and of the whole `all_SCENARIO_METRIC`."""
    whole = {row.load.key: row.points for row in rows if row.policy == "all"}
    figures: dict[str, float] = {}
    for row in rows:
        figures |= own_figures(row, "p5_model_share", "worst_model_share", "p50_ms")
        if row.policy != "all":
            worth = whole[row.load.key] - row.points
            figures[f"{row.policy}_{row.load.key}_worth_points"] = worth
    return figures


STUDY = Study(
    name="ablation",
    setting=Setting(bounds=False),
    ask=measure_all,
    key="{policy}_{group}_{scenario}",
    say=said,
    figures=lambda _, rows: figures_of(rows),
    tables={"": table},
)
