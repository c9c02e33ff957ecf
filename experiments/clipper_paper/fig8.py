"""Clipper's Figure 8: the best model fails for a quarter of the stream, and recovers.

Five models trained on forms 0 to 6; 20,000 queries drawn, with repetition, from the 895 digits of forms 7
to 13; from query 5,000 to 10,000 the model that is best on those digits gets its images inverted. Labels
come back after each query. The paper's claim: Exp3 and Exp4 have less error than any static choice of a
model. "Best static" is known only afterwards; the oracle knows each phase's best model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np

from controller.selection.core.policy import Policy
from controller.selection.policies import make_policy
from experiments.digits.images import Array, load
from experiments.digits.models import FAULTS, five_kinds, predict, train
from experiments.digits.stream import Delays, Trail, follow
from experiments.study.pictures import BLACK, COLOURS, LINES, MARKERS, Curve, Panel
from experiments.study.study import ONLY_TABLE, Row, Study, StudyRecord

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
    """How much is asked."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOutcome:
    """How one policy, or one fixed choice, answered the stream of one seed."""

    name: str
    seed: int
    cumulative: Annotated[float, ONLY_TABLE]
    before: Annotated[float, ONLY_TABLE]
    failed: Annotated[float, ONLY_TABLE]
    after: Annotated[float, ONLY_TABLE]
    last_quarter: Annotated[float, ONLY_TABLE]
    #: Share of the last quarter during which the recovered model had the most weight; None: nobody learns.
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
    faulty = clean.copy()
    inverted = FAULTS[setting.fault](asked.images)
    faulty[best] = predict({names[best]: models[names[best]]}, inverted)[0]
    drawn = np.random.default_rng(seed).integers(0, len(asked.labels), setting.num_queries)
    labels = asked.labels[drawn]
    votes = clean[:, drawn]
    failure = setting.phases[1]
    votes[:, failure] = faulty[:, drawn[failure]]
    static = votes != labels
    oracle = np.concatenate(
        [static[int(static[:, part].mean(axis=1).argmin()), part] for part in setting.phases]
    )
    choices = {
        **dict(zip(names, static, strict=True)),
        "best static": static[int(static.mean(axis=1).argmin())],
        "oracle": oracle,
    }
    learners: dict[str, tuple[str, dict[str, Any]]] = {
        name: (name, {}) for name in setting.policies
    } | {f"{DEFAULT}, {arm}": (DEFAULT, ARMS[arm]) for arm in setting.arms}

    def answered(name: str, wrong: Array, trail: Trail | None = None) -> StreamOutcome:
        error = {
            phase: float(wrong[part].mean())
            for phase, part in zip(("before", "failed", "after"), setting.phases, strict=True)
        }
        last = setting.last_quarter
        return StreamOutcome(
            name=name,
            seed=seed,
            cumulative=float(wrong.mean()),
            **error,
            last_quarter=float(wrong[last].mean()),
            returned=None if trail is None else float((trail.heaviest[last] == best).mean()),
        )

    found = [answered(name, wrong) for name, wrong in choices.items()]
    for name, (policy, changes) in learners.items():
        trail = follow(_policy(policy), names, votes, labels, seed=seed, **changes)
        found.append(answered(name, trail.wrong, trail))
    return found


def _policy(name: str) -> Policy[Any]:
    kind, options = POLICIES[name]
    return make_policy(kind, options)


def _by_name(points: Sequence[StreamOutcome]) -> dict[str, list[StreamOutcome]]:
    found: dict[str, list[StreamOutcome]] = {}
    for point in points:
        found.setdefault(point.name, []).append(point)
    return found


def table(_setting: Setting, points: Sequence[StreamOutcome]) -> Iterator[Row]:
    """A row for each policy and each fixed choice: the means of all seeds."""
    for name, mine in _by_name(points).items():
        yield {
            "policy": name,
            **{
                f"{phase.replace('_', ' ')} error": float(
                    np.mean([getattr(p, phase) for p in mine])
                )
                for phase in ("cumulative", "before", "failed", "after", "last_quarter")
            },
            "cumulative sd": float(np.std([p.cumulative for p in mine])),
            "returned, least seed": min(
                (p.returned for p in mine if p.returned is not None), default=""
            ),
        }


def figures_of(setting: Setting, points: Sequence[StreamOutcome]) -> dict[str, float]:
    """The numbers that are quoted."""
    by_name = _by_name(points)
    errors = {n: float(np.mean([p.cumulative for p in mine])) for n, mine in by_name.items()}
    ours, static = by_name[DEFAULT], by_name["best static"]
    figures = {
        "cumulative_error": errors[DEFAULT],
        "returns_to_best": float(all(p.returned is not None and p.returned > 0.5 for p in ours)),
        "best_static_error": errors["best static"],
        "oracle_error": errors["oracle"],
        "seeds_below_best_static": float(
            sum(p.cumulative < s.cumulative for p, s in zip(ours, static, strict=True))
        ),
        "learners_below_best_static": float(
            sum(
                errors[name] < errors["best static"]
                for name in setting.policies
                if name != "majority"
            )
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
        # Nobody's weights return where nobody learns.
        if row["returned, least seed"] == "" and row["policy"] not in ("best static", "oracle")
    ]
    of = {row["policy"]: row for row in recorded.rows}

    def curves(names: Iterable[str]) -> list[Curve]:
        looks = zip(COLOURS, LINES, MARKERS, strict=True)
        return [
            Curve(
                x=range(len(phases)),
                y=[100 * of[name][f"{phase} error"] for phase in phases],
                label=name.replace(", ", ",\n"),
                colour=BLACK if name == "oracle" else colour,
                line=":" if name == "oracle" else line,
                marker="" if name == "oracle" else marker,
            )
            for name, (colour, line, marker) in zip(
                [n for n in names if n in of], looks, strict=False
            )
        ]

    panel = Panel(
        title="Policies that learn leave it, and err little more meanwhile",
        x="phase of the stream",
        y="wrong answers, %",
        curves=curves((*learners, "oracle")),
        x_ticks={float(at): name for at, name in enumerate(phases.values())},
    )
    single = replace(
        panel, title="Who keeps to one model errs as it does", curves=curves((*others, "oracle"))
    )
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
    extra=lambda setting, _: {
        "data": "scikit-learn digits, 8 x 8, split by form; not the paper's CIFAR-10",
        "queries": setting.num_queries,
        "fault": setting.fault,
        "options": {name: {"policy": p, **o} for name, (p, o) in POLICIES.items()},
        "paper": "Exp3 and Exp4 below every static choice; no numbers in its text",
    },
)
