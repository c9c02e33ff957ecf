"""Clipper's Figure 10: a choice of models for each user.

The paper has dialects of speech; here are 14 forms of handwriting, each by one person. The first half of
each form trains, the second half is asked. Forms are grouped by the mean images of their training halves
(k-means), a stand-in for dialects that is fitted to the data and so better than any that people declare;
`wrong group` gives a third of the users another's, as declarations do. Compared: one model for all,
the own group's model, and the default policy over the groups' models with a state per user that begins
from all users', as the server has it, or from nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from controller.selection.core.query import Candidate, Query
from controller.selection.policies import make_policy
from experiments.digits.images import NUM_FORMS, Array, Digits, load
from experiments.digits.models import logistic
from experiments.digits.stream import ask
from experiments.study.pictures import Panel, lines
from experiments.study.study import Study, StudyRecord

#: Fixed choices, then the default policy. For the policy: its candidates next to the groups' models, and
#: where a user's state begins.
METHODS = (
    "one for all",
    "own group",
    "wrong group",
    "policy, from everybody's",
    "policy, from nothing",
    "policy, one for all too, from nothing",
)

# The paper's figure calls a user new until this many feedbacks.
_NEW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How much is asked."""

    seeds: tuple[int, ...] = tuple(range(10))
    num_groups: int = 5
    wrong_share: float = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedErrors:
    """Whether each answer of one seed was wrong."""

    seed: int
    #: By method, shape (form, feedbacks had before); NaN where a form has ended.
    wrong: Mapping[str, Array] = field(repr=False)


def _halves(digits: Digits) -> Array:
    """Whether each digit stands in its form's first half."""
    first = np.zeros(len(digits.labels), bool)
    for form in range(NUM_FORMS):
        places = np.flatnonzero(digits.forms == form)
        first[places[: len(places) // 2]] = True
    return first


def _groups(digits: Digits, first: Array, num_groups: int, seed: int) -> Array:
    """A group for each form."""
    from sklearn.cluster import KMeans

    hands = []
    for form in range(NUM_FORMS):
        mine = first & (digits.forms == form)
        means = [digits.images[mine & (digits.labels == digit)].mean(axis=0) for digit in range(10)]
        hands.append(np.concatenate(means))
    return np.asarray(KMeans(num_groups, n_init=10, random_state=seed).fit_predict(np.stack(hands)))


def measure(setting: Setting) -> Iterator[SeedErrors]:
    """Group, train, and ask every user's second half."""
    digits = load()
    for seed in setting.seeds:
        yield SeedErrors(seed=seed, wrong=_wrong(digits, setting, seed))


def _wrong(digits: Digits, setting: Setting, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    first = _halves(digits)
    groups = _groups(digits, first, setting.num_groups, seed)

    def answers(mine: Array) -> Array:
        """What a model says of every digit that has learned from some of them."""
        model = logistic().fit(digits.images[mine], digits.labels[mine])
        return np.asarray(model.predict(digits.images), np.int64)

    for_all = answers(first)
    of_group = [answers(first & (groups[digits.forms] == g)) for g in range(setting.num_groups)]
    said = np.stack([*of_group, for_all])
    declared = groups.copy()
    liars = random.permutation(NUM_FORMS)[: round(setting.wrong_share * NUM_FORMS)]
    declared[liars] += random.integers(1, setting.num_groups, len(liars))
    declared %= setting.num_groups

    # Users come in any order, each with his digits in the order he wrote them in, shuffled.
    queues = [
        random.permutation(np.flatnonzero(~first & (digits.forms == form)))
        for form in range(NUM_FORMS)
    ]
    turns = random.permutation([form for form, queue in enumerate(queues) for _ in queue]).tolist()
    wrong = {method: np.full((NUM_FORMS, max(map(len, queues))), np.nan) for method in METHODS}
    for form, items in enumerate(queues):
        fixed = (for_all, said[groups[form]], said[declared[form]])
        for method, answered in zip(METHODS, fixed, strict=False):
            wrong[method][form, : len(items)] = answered[items] != digits.labels[items]

    policy = make_policy("exp4-full", {})
    with_all = [*(f"group {group}" for group in range(setting.num_groups)), METHODS[0]]
    names = with_all[:-1]
    queries = {
        len(chosen): Query(tuple(Candidate(name) for name in chosen), "", Random(seed))
        for chosen in (names, with_all)
    }
    globally = policy.init(names)
    states: dict[tuple[str, int], Any] = {}
    had = [0] * NUM_FORMS
    for form in turns:
        number = had[form]
        had[form] += 1
        item = queues[form][number]
        truth = int(digits.labels[item])
        column = dict(zip(with_all, said[:, item].tolist(), strict=True))
        for method, candidates, beginning in (
            (METHODS[3], names, globally),
            (METHODS[4], names, policy.init(names)),
            (METHODS[5], with_all, policy.init(with_all)),
        ):
            state = states.get((method, form), beginning)
            combined, observation = ask(policy, state, queries[len(candidates)], column, truth)
            wrong[method][form, number] = combined.label != truth
            states[method, form] = policy.observe(state, observation)
            if method == METHODS[3]:
                globally = policy.observe(globally, observation)
    return wrong


def _mean(points: Sequence[SeedErrors], method: str) -> Array:
    """Mean over seeds, shape (form, feedbacks); NaN where a form has ended."""
    return np.asarray(np.mean([point.wrong[method] for point in points], axis=0))


def error(
    points: Sequence[SeedErrors], method: str, first: int = 0, last: int | None = None
) -> float:
    """Mean over seeds, forms and feedbacks."""
    return float(np.nanmean(_mean(points, method)[:, first:last]))


def difference(points: Sequence[SeedErrors], method: str, against: str) -> tuple[float, float]:
    """Difference of two methods, and half of its 95 % interval, by drawing forms again."""
    by_form = np.nanmean(_mean(points, method) - _mean(points, against), axis=1)
    random = np.random.default_rng(0)
    means = random.choice(by_form, (2000, len(by_form))).mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(by_form.mean()), float(high - low) / 2


def figures_of(_setting: Setting, points: Sequence[SeedErrors]) -> dict[str, float]:
    """The numbers that are quoted."""
    figures: dict[str, float] = {}
    pairs = [("policy_against_own_group", METHODS[3], "own group")]
    for method in METHODS:
        key = method.replace(", ", "_").replace(" ", "_").replace("'", "")
        figures[f"{key}_error"] = error(points, method)
        figures[f"{key}_error_first_{_NEW}"] = error(points, method, 0, _NEW)
        figures[f"{key}_error_after_{_NEW}"] = error(points, method, _NEW)
        if method != METHODS[0]:
            pairs.append((f"{key}_against_one_for_all", method, METHODS[0]))
    for key, method, against in pairs:
        figures[key], figures[f"{key}_ci95"] = difference(points, method, against)
    return figures


def stretches(_setting: Setting, points: Sequence[SeedErrors]) -> list[dict[str, Any]]:
    """Each method while its users give some feedbacks."""
    length = points[0].wrong[METHODS[0]].shape[1]
    ends = {begin: min(begin + _NEW, length) for begin in range(0, length - 4, _NEW)}
    return [
        {"method": method, "from": begin, "to": end, "error": error(points, method, begin, end)}
        for method in METHODS
        for begin, end in ends.items()
    ]


def panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Error over the feedbacks that a user has given."""
    panel = Panel(
        title="Errors of each way to choose a model, by how much is known of the user",
        x="number of feedbacks that the user has given",
        y="wrong answers, %",
        curves=lines(
            recorded.rows,
            lambda row: (row["from"] + row["to"]) / 2,
            lambda row: 100 * row["error"],
            by=lambda row: row["method"].replace(", ", ",\n"),
        ),
    )
    return [[panel]]


STUDY = Study(
    name="clipper_fig10",
    setting=Setting(),
    ask=measure,
    key="{seed}",
    figures=figures_of,
    tables={"": stretches},
    title="A policy of his own learns within a few dozen feedbacks which models suit a user.",
    panels=panels,
    extra=lambda setting, _: {
        "data": "scikit-learn digits, 8 x 8, 14 forms; not the paper's TIMIT",
        "groups": setting.num_groups,
        "paper": "dialect models err less than one for all; the policy per user soon less than the own dialect's",
    },
)
