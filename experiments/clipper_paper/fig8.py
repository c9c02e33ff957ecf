"""Clipper's Figure 8: the best model fails for a quarter of the stream, and recovers.

Five models trained on forms 0 to 6; 20,000 queries drawn, with repetition, from the 895 digits of forms 7
to 13; from query 5,000 to 10,000 the model that is best on those digits gets its images inverted. Labels
come back after each query. The paper's claim: Exp3 and Exp4 have less error than any static choice of a
model. "Best static" is known only afterwards; the oracle knows each phase's best model.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from controller.selection.core.policy import Policy
from controller.selection.policies import make_policy
from experiments.digits.images import Array, load
from experiments.digits.models import FAULTS, five_kinds, predict, train
from experiments.digits.stream import Delays, Trail, follow
from experiments.results_file import RESULTS, write_results
from experiments.study.report import picture, write_csv

_LAST_TRAINING_FORM = 6
_LAST_FORM = 13

#: Policy of an application that names none; the figure's claim is about this policy.
DEFAULT = "exp4-full"

POLICIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "exp3": ("exp3", {"eta": 0.1}),
    "exp3-ix": ("exp3-ix", {}),
    "exp3-s": ("exp3-s", {}),
    "exp4": ("exp4", {}),
    "exp4-full": ("exp4-full", {}),
    "exp4-full, as the paper": ("exp4-full", {"share": 0.0, "crowd": False}),
    "thompson": ("thompson", {}),
    "epsilon-greedy": ("epsilon-greedy", {}),
    "majority": ("static", {"ensemble": True}),
}

# Arms for the default policy: changes that production makes to feedback.
ARMS: Mapping[str, dict[str, Any]] = {
    "delay 100, 5 % lost": {"delays": Delays(100, 0.05)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    seeds: tuple[int, ...] = tuple(range(20))
    num_queries: int = 20_000
    fault: str = "inverted"
    policies: tuple[str, ...] = tuple(POLICIES)
    arms: tuple[str, ...] = tuple(ARMS)

    @property
    def phases(self) -> tuple[slice, slice, slice]:
        """Queries before, during and after the failure."""
        quarter = self.num_queries // 4
        return slice(0, quarter), slice(quarter, 2 * quarter), slice(2 * quarter, None)

    @property
    def last_quarter(self) -> slice:
        """Queries by which a recovered model should be used again."""
        return slice(3 * self.num_queries // 4, None)


@dataclass(slots=True)
class ErrorRates:
    """Error rates by name, a row per seed."""

    #: Error rates of each run: cumulative; before, during and after the failure; in the last quarter.
    errors: dict[str, list[list[float]]] = field(default_factory=dict)
    #: Share of the last quarter during which the recovered model had the most weight.
    returned: dict[str, list[float]] = field(default_factory=dict)
    #: Cumulative error over the stream for the first seed.
    curves: dict[str, Array] = field(default_factory=dict)

    def add(self, name: str, wrong: Array, setting: Setting) -> None:
        """Enter one run."""
        slices = (slice(None), *setting.phases, setting.last_quarter)
        self.errors.setdefault(name, []).append([float(wrong[part].mean()) for part in slices])
        if name not in self.curves:
            self.curves[name] = np.cumsum(wrong) / np.arange(1, len(wrong) + 1)

    def extend(self, other: ErrorRates) -> None:
        """Enter the runs of further seeds."""
        for ours, theirs in ((self.errors, other.errors), (self.returned, other.returned)):
            for name, rows in theirs.items():
                ours.setdefault(name, []).extend(rows)  # type: ignore[arg-type]
        self.curves = self.curves or other.curves

    def mean(self, name: str, column: int = 0) -> float:
        """Mean of one column over the seeds."""
        return float(np.mean([row[column] for row in self.errors[name]]))


def run(setting: Setting, *, say: Callable[[str], None] = lambda _: None) -> ErrorRates:
    """Train, draw streams, and send them past every policy."""
    results = ErrorRates()
    if len(setting.seeds) == 1:
        return _run_seed(setting, setting.seeds[0])
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = pool.map(partial(_run_seed, setting), setting.seeds)
        for seed, found in zip(setting.seeds, runs, strict=True):
            results.extend(found)
            say(f"seed {seed}: {DEFAULT} {results.errors[DEFAULT][-1][0]:.4f}")
    return results


def _run_seed(setting: Setting, seed: int) -> ErrorRates:
    results = ErrorRates()
    digits = load()
    asked = digits.of_forms(_LAST_TRAINING_FORM + 1, _LAST_FORM)
    models = five_kinds(seed)
    train(models, digits.of_forms(0, _LAST_TRAINING_FORM))
    names = list(models)
    clean = predict(models, asked.images)
    best = int((clean == asked.labels).mean(axis=1).argmax())
    faulty = clean.copy()
    faulty[best] = predict({names[best]: models[names[best]]}, FAULTS[setting.fault](asked.images))[
        0
    ]
    drawn = np.random.default_rng(seed).integers(0, len(asked.labels), setting.num_queries)
    labels = asked.labels[drawn]
    votes = clean[:, drawn]
    failure = setting.phases[1]
    votes[:, failure] = faulty[:, drawn[failure]]

    static = votes != labels
    for name, wrong in zip(names, static, strict=True):
        results.add(name, wrong, setting)
    results.add("best static", static[int(static.mean(axis=1).argmin())], setting)
    oracle = np.concatenate(
        [static[int(static[:, part].mean(axis=1).argmin()), part] for part in setting.phases]
    )
    results.add("oracle", oracle, setting)

    def enter(name: str, trail: Trail) -> None:
        results.add(name, trail.wrong, setting)
        back = float((trail.heaviest[setting.last_quarter] == best).mean())
        results.returned.setdefault(name, []).append(back)

    for name in setting.policies:
        enter(name, follow(_policy(name), names, votes, labels, seed=seed))
    for arm in setting.arms:
        trail = follow(_policy(DEFAULT), names, votes, labels, seed=seed, **ARMS[arm])
        enter(f"{DEFAULT}, {arm}", trail)
    return results


def _policy(name: str) -> Policy[Any]:
    kind, options = POLICIES[name]
    return make_policy(kind, options)


def figures_of(results: ErrorRates, setting: Setting) -> dict[str, float]:
    """The numbers that are quoted."""
    learners = [name for name in setting.policies if name != "majority"]
    figures = {
        "cumulative_error": results.mean(DEFAULT),
        "returns_to_best": float(all(share > 0.5 for share in results.returned[DEFAULT])),
        "best_static_error": results.mean("best static"),
        "oracle_error": results.mean("oracle"),
        "seeds_below_best_static": float(
            sum(
                ours[0] < static[0]
                for ours, static in zip(
                    results.errors[DEFAULT], results.errors["best static"], strict=True
                )
            )
        ),
        "learners_below_best_static": float(
            sum(results.mean(name) < results.mean("best static") for name in learners)
        ),
    }
    for name in results.errors:
        key = name.replace(", ", "_").replace(" % ", "pct_").replace(" ", "_").replace("=", "")
        figures[f"{key.replace('-', '_').lower()}_error"] = results.mean(name)
    return figures


COLUMNS = ("cumulative", "before", "failed", "after", "last quarter")


def produce(
    setting: Setting | None = None,
    directory: Path = RESULTS,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> ErrorRates:
    """Run, and leave `clipper_fig8.json`, a table and a picture."""
    setting = setting or Setting()
    results = run(setting, say=say)
    write_csv(
        directory / "clipper_fig8.csv",
        ("policy", *(f"{name} error" for name in COLUMNS), "cumulative sd", "returned, least seed"),
        [
            (
                name,
                *(results.mean(name, column) for column in range(len(COLUMNS))),
                float(np.std([row[0] for row in rows])),
                min(results.returned[name]) if name in results.returned else "",
            )
            for name, rows in results.errors.items()
        ],
    )
    _draw(results, setting, directory / "clipper_fig8.png")
    write_results(
        "clipper_fig8",
        figures_of(results, setting),
        command="python -m experiments clipper_fig8",
        seeds=setting.seeds,
        extra={
            "data": "scikit-learn digits, 8 x 8, split by form; not the paper's CIFAR-10",
            "queries": setting.num_queries,
            "fault": setting.fault,
            "options": {name: {"policy": p, **o} for name, (p, o) in POLICIES.items()},
            "paper": "Exp3 and Exp4 below every static choice; no numbers in its text",
        },
        directory=directory,
    )
    return results


def _draw(results: ErrorRates, setting: Setting, target: Path) -> None:
    shown = ("exp3", "exp4", "exp4-full", "exp4-full, as the paper", "thompson", "oracle")
    with picture(target, 1, 1, size=(8, 4.5)) as grid:
        axes: Any = grid[0, 0]
        for name, curve in results.curves.items():
            if name in shown:
                axes.plot(curve, label=name, lw=1.5, color="black" if name == "oracle" else None)
            elif name not in results.returned and name != "best static":
                axes.plot(curve, ":", label=name, lw=1.0)
        failure = setting.phases[1]
        axes.axvspan(
            failure.start, failure.stop, color="grey", alpha=0.15, label="best model fails"
        )
        axes.set_xlabel("queries (first seed)")
        axes.set_ylabel("cumulative error")
        axes.set_ylim(0, 0.4)
        axes.legend(fontsize="x-small", ncols=2)


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    results = produce(say=print)
    width = max(map(len, results.errors))
    print(" " * width, *(f"{name:>12}" for name in COLUMNS))
    for name in sorted(results.errors, key=results.mean):
        cells = [f"{results.mean(name, column):12.4f}" for column in range(len(COLUMNS))]
        print(f"{name:{width}}", *cells)


if __name__ == "__main__":
    main()
