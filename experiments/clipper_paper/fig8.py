"""Clipper's Figure 8: the best model fails for a quarter of the stream, and recovers.

Five models trained on forms 0 to 6; 20,000 queries drawn, with repetition, from the 895 digits of forms 7
to 13; from query 5,000 to 10,000 the model that is best on those digits gets its images inverted. Labels
come back after each query. The paper's claim: Exp3 and Exp4 have less error than any static choice of a
model. "Best static" is known only afterwards; the oracle knows each phase's best model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from controller.selection.policies import make_policy
from experiments.digits.images import load
from experiments.digits.models import INK_MAX, five_kinds, predict, train
from experiments.digits.stream import follow
from experiments.study.pictures import BLACK, Curve, Panel, lines
from experiments.study.study import Row, Study, StudyRecord

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

#: Arms for the default policy: changes that production makes to feedback, as options of `follow`.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "delay 100, 5 % lost": {"delay_max": 100, "lost": 0.05},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is asked."""

    seeds: tuple[int, ...] = tuple(range(20))
    num_queries: int = 20_000
    policies: tuple[str, ...] = tuple(POLICIES)
    arms: tuple[str, ...] = tuple(ARMS)

    @property
    def phases(self) -> dict[str, slice]:
        """Queries before, during and after the failure."""
        quarter = self.num_queries // 4
        return {
            "before": slice(0, quarter),
            "failed": slice(quarter, 2 * quarter),
            "after": slice(2 * quarter, None),
        }

    @property
    def parts(self) -> dict[str, slice]:
        """All queries, each phase's, and those by which a recovered model should be used again."""
        last_quarter = slice(3 * self.num_queries // 4, None)
        return {"cumulative": slice(None)} | self.phases | {"last_quarter": last_quarter}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOutcome:
    """How one policy, or one fixed choice, answered the stream of one seed."""

    name: str
    seed: int
    #: Share of wrong answers, by part of the stream.
    errors: Mapping[str, float]
    #: Share of the last quarter during which the recovered model had the most weight; None: the policy does not learn.
    returned: float | None


def measure(setting: Setting) -> Iterator[StreamOutcome]:
    """Train, draw streams, and send them past every policy."""
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(setting.seeds))) as pool:
        for answers in pool.map(partial(_answers, setting), setting.seeds):
            yield from answers


def _answers(setting: Setting, seed: int) -> list[StreamOutcome]:
    digits = load()
    asked = digits.of_forms(_LAST_TRAINING_FORM + 1, _LAST_FORM)
    models = five_kinds(seed)
    train(models, digits.of_forms(0, _LAST_TRAINING_FORM))
    names = list(models)
    clean = predict(models, asked.images)
    best = int((clean == asked.labels).mean(axis=1).argmax())
    drawn = np.random.default_rng(seed).integers(0, len(asked.labels), setting.num_queries)
    labels = asked.labels[drawn]
    votes = clean[:, drawn]
    failure = setting.phases["failed"]
    inverted = predict({names[best]: models[names[best]]}, INK_MAX - asked.images)[0]
    votes[best, failure] = inverted[drawn[failure]]
    static = votes != labels
    phases = setting.phases.values()
    oracle = [static[int(static[:, part].mean(axis=1).argmin()), part] for part in phases]
    wrong = dict(zip(names, static, strict=True))
    wrong["best static"] = static[int(static.mean(axis=1).argmin())]
    wrong["oracle"] = np.concatenate(oracle)
    returned: dict[str, float] = {}
    for name in (*setting.policies, *setting.arms):
        kind, options = POLICIES[DEFAULT if name in ARMS else name]
        policy = make_policy(kind, options)
        trail = follow(policy, names, votes, labels, seed=seed, **ARMS.get(name, {}))
        learner = f"{DEFAULT}, {name}" if name in ARMS else name
        wrong[learner] = trail.wrong
        last = trail.heaviest[setting.parts["last_quarter"]]
        returned[learner] = float((last == best).mean())
    return [
        StreamOutcome(
            name=name,
            seed=seed,
            errors={part: float(each[at].mean()) for part, at in setting.parts.items()},
            returned=returned.get(name),
        )
        for name, each in wrong.items()
    ]


def _by_name(points: Sequence[StreamOutcome]) -> dict[str, list[StreamOutcome]]:
    found: dict[str, list[StreamOutcome]] = {}
    for point in points:
        found.setdefault(point.name, []).append(point)
    return found


def table(setting: Setting, points: Sequence[StreamOutcome]) -> Iterator[Row]:
    """A row for each policy and each fixed choice: the means of all seeds."""
    for name, mine in _by_name(points).items():
        row: dict[str, float | int | str] = {"policy": name}
        for part in setting.parts:
            mean = float(np.mean([p.errors[part] for p in mine]))
            row[f"{part.replace('_', ' ')} error"] = mean
        row["cumulative sd"] = float(np.std([p.errors["cumulative"] for p in mine]))
        returned = [p.returned for p in mine if p.returned is not None]
        yield row | {"returned, least seed": min(returned, default="")}


def figures_of(setting: Setting, points: Sequence[StreamOutcome]) -> dict[str, float]:
    """The numbers that are quoted."""
    by_name = _by_name(points)
    of = {name: [p.errors["cumulative"] for p in mine] for name, mine in by_name.items()}
    errors = {name: float(np.mean(mine)) for name, mine in of.items()}
    below = np.array(of[DEFAULT]) < of["best static"]
    figures = {
        "cumulative_error": errors[DEFAULT],
        "returns_to_best": float(all((p.returned or 0) > 0.5 for p in by_name[DEFAULT])),
        "best_static_error": errors["best static"],
        "oracle_error": errors["oracle"],
        "seeds_below_best_static": float(below.sum()),
        "learners_below_best_static": float(
            sum(errors[n] < errors["best static"] for n in setting.policies if n != "majority")
        ),
    }
    for name, error in errors.items():
        key = name.replace(", ", "_").replace(" % ", "pct_").replace(" ", "_").replace("=", "")
        figures[f"{key.replace('-', '_').lower()}_error"] = error
    return figures


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Errors before, during and after the failure of the best model: learners at the left, single models at the right."""
    phases = {"before": "before", "failed": "while it\nfails", "after": "after"}
    learners = ("exp3", "exp4", "exp4-full", "exp4-full, as the paper", "thompson")
    others = [
        row["policy"]
        for row in recorded.rows
        # Without learning, no weights return.
        if row["returned, least seed"] == "" and row["policy"] not in ("best static", "oracle")
    ]
    of = {row["policy"]: row for row in recorded.rows}

    def curves(names: Sequence[str]) -> list[Curve]:
        points = [
            {"who": name.replace(", ", ",\n"), "at": at, "error": of[name][f"{phase} error"]}
            for name in (*names, "oracle")
            if name in of
            for at, phase in enumerate(phases)
        ]
        *found, oracle = lines(points, "at", lambda point: 100 * point["error"], by="who")
        return [*found, replace(oracle, colour=BLACK, line=":", marker="")]

    panel = Panel(
        title="Policies that learn leave it, and err little more meanwhile",
        x="phase of the stream",
        y="wrong answers, %",
        curves=curves(learners),
        x_ticks={float(at): name for at, name in enumerate(phases.values())},
    )
    single = replace(panel, title="Who keeps to one model errs as it does", curves=curves(others))
    return [[panel, single]]


STUDY = Study(
    name="clipper_fig8",
    setting=Setting(),
    ask=measure,
    key="{name}_{seed}",
    figures=figures_of,
    tables={"": table},
    title="When the best model fails, policies that learn leave it, and return to it when it is well.",
    panels=panels,
    extra=lambda *_: {
        "data": "scikit-learn digits, 8 x 8, split by form; not the paper's CIFAR-10",
        "options": {name: {"policy": p, **o} for name, (p, o) in POLICIES.items()},
        "paper": "Exp3 and Exp4 below every static choice; no numbers in its text",
    },
)
