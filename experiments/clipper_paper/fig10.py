"""Clipper's Figure 10: a choice of models for each user.

The paper has dialects of speech; here are 14 forms of handwriting, each by one person. The first half of
each form trains, the second half is asked. Forms are grouped by the mean images of their training halves
(k-means), a stand-in for dialects that is fitted to the data and so better than any that people declare;
`wrong group` gives a third of the users another's, as declarations do. Compared: one model for all,
the own group's model, and the default policy over the groups' models with a state per user that begins
from everybody's, as the server has it, or from nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from controller.selection.core.query import Candidate, Query
from controller.selection.policies import make_policy
from experiments.digits.images import NUM_FORMS, Array, Digits, load
from experiments.digits.stream import ask
from experiments.results_file import RESULTS, write_results
from experiments.study.report import picture, write_csv

#: Fixed choices, then the default policy. For the policy: its candidates beside the groups' models, and
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
    """Numbers of the experiment, which tests make smaller."""

    seeds: tuple[int, ...] = tuple(range(10))
    num_groups: int = 5
    wrong_share: float = 1 / 3


@dataclass(slots=True)
class MethodErrors:
    """Wrong or not, by method: a row of (form, feedbacks had before) per seed."""

    wrong: dict[str, list[Array]] = field(default_factory=dict)

    def matrix(self, method: str) -> Array:
        """Mean over seeds, shape (form, feedbacks); NaN where a form has ended."""
        return np.asarray(np.mean(self.wrong[method], axis=0))

    def error(self, method: str, first: int = 0, last: int | None = None) -> float:
        """Mean over forms and positions."""
        return float(np.nanmean(self.matrix(method)[:, first:last]))

    def half_interval(self, method: str, against: str, *, seed: int = 0) -> tuple[float, float]:
        """Difference of two methods, and half of its 95 % interval, by drawing forms anew."""
        by_form = np.nanmean(self.matrix(method) - self.matrix(against), axis=1)
        random = np.random.default_rng(seed)
        means = random.choice(by_form, (2000, len(by_form))).mean(axis=1)
        low, high = np.percentile(means, (2.5, 97.5))
        return float(by_form.mean()), float(high - low) / 2


def _classifier() -> Any:  # noqa: ANN401
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=5000, C=0.01, tol=0.01)


def run(setting: Setting, *, say: Callable[[str], None] = lambda _: None) -> MethodErrors:
    """Group, train, and ask every user's second half."""
    digits = load()
    results = MethodErrors()
    for seed in setting.seeds:
        _run_seed(digits, setting, seed, results)
        say(f"seed {seed}")
    return results


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


def _run_seed(digits: Digits, setting: Setting, seed: int, results: MethodErrors) -> None:
    random = np.random.default_rng(seed)
    first = _halves(digits)
    groups = _groups(digits, first, setting.num_groups, seed)
    of_group = groups[digits.forms]
    everybody = _classifier().fit(digits.images[first], digits.labels[first])
    names = [f"group {group}" for group in range(setting.num_groups)]
    votes = []
    for group in range(setting.num_groups):
        mine = first & (of_group == group)
        model = _classifier().fit(digits.images[mine], digits.labels[mine])
        votes.append(model.predict(digits.images).astype(np.int64))
    said = np.stack(votes)
    for_all = everybody.predict(digits.images)
    declared = groups.copy()
    liars = random.permutation(NUM_FORMS)[: round(setting.wrong_share * NUM_FORMS)]
    declared[liars] = (declared[liars] + random.integers(1, setting.num_groups, len(liars))) % (
        setting.num_groups
    )

    # Users come in any order, each with his digits in the order he wrote them in, shuffled.
    queues = {
        form: random.permutation(np.flatnonzero(~first & (digits.forms == form))).tolist()
        for form in range(NUM_FORMS)
    }
    length = max(map(len, queues.values()))
    turns = random.permutation([form for form, queue in queues.items() for _ in queue]).tolist()
    wrong = {method: np.full((NUM_FORMS, length), np.nan) for method in METHODS}
    policy = make_policy("exp4-full", {})
    with_all = [*names, METHODS[0]]
    queries = {
        len(chosen): Query(tuple(Candidate(name) for name in chosen), "", Random(seed))
        for chosen in (names, with_all)
    }
    globally = policy.init(names)
    states: dict[tuple[str, int], Any] = {}
    had = dict.fromkeys(range(NUM_FORMS), 0)
    for form in turns:
        item, number = queues[form][had[form]], had[form]
        had[form] += 1
        truth = int(digits.labels[item])
        column = dict(zip(names, said[:, item].tolist(), strict=True))
        wrong["one for all"][form, number] = for_all[item] != truth
        wrong["own group"][form, number] = said[groups[form], item] != truth
        wrong["wrong group"][form, number] = said[declared[form], item] != truth
        column[METHODS[0]] = int(for_all[item])
        for method, candidates, beginning in (
            (METHODS[3], names, globally),
            (METHODS[4], names, policy.init(names)),
            (METHODS[5], with_all, policy.init(with_all)),
        ):
            state = states.get((method, form), beginning)
            query = queries[len(candidates)]
            combined, observation = ask(policy, state, query, column, truth)
            wrong[method][form, number] = combined.label != truth
            states[method, form] = policy.observe(state, observation)
            if method == METHODS[3]:
                globally = policy.observe(globally, observation)
    for method, matrix in wrong.items():
        results.wrong.setdefault(method, []).append(matrix)


def figures_of(results: MethodErrors) -> dict[str, float]:
    """The numbers that are quoted."""
    figures: dict[str, float] = {}
    for method in METHODS:
        key = method.replace(", ", "_").replace(" ", "_").replace("'", "")
        figures[f"{key}_error"] = results.error(method)
        figures[f"{key}_error_first_{_NEW}"] = results.error(method, 0, _NEW)
        figures[f"{key}_error_after_{_NEW}"] = results.error(method, _NEW)
        if method != METHODS[0]:
            gap, half = results.half_interval(method, METHODS[0])
            figures[f"{key}_against_one_for_all"] = gap
            figures[f"{key}_against_one_for_all_ci95"] = half
    gap, half = results.half_interval(METHODS[3], "own group")
    figures["policy_against_own_group"] = gap
    figures["policy_against_own_group_ci95"] = half
    return figures


def produce(
    setting: Setting | None = None,
    directory: Path = RESULTS,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> MethodErrors:
    """Run, and leave `clipper_fig10.json`, a table and a picture."""
    setting = setting or Setting()
    results = run(setting, say=say)
    length = results.matrix(METHODS[0]).shape[1]
    bins = [(start, min(start + 8, length)) for start in range(0, length - 4, 8)]
    rows = [
        (method, start, stop, results.error(method, start, stop))
        for method in METHODS
        for start, stop in bins
    ]
    write_csv(directory / "clipper_fig10.csv", ("method", "from", "to", "error"), rows)
    with picture(directory / "clipper_fig10.png", 1, 1, size=(7, 4)) as grid:
        axes: Any = grid[0, 0]
        for method in METHODS:
            points = [(start, error) for name, start, _, error in rows if name == method]
            axes.plot(*zip(*points, strict=True), marker="o", label=method)
        axes.set_xlabel("feedbacks that the user has given")
        axes.set_ylabel("error")
        axes.set_ylim(0)
        axes.legend(fontsize="x-small")
    write_results(
        "clipper_fig10",
        figures_of(results),
        command="python -m experiments clipper_fig10",
        seeds=setting.seeds,
        extra={
            "data": "scikit-learn digits, 8 x 8, 14 forms; not the paper's TIMIT",
            "groups": setting.num_groups,
            "paper": "dialect models err less than one for all; the policy per user soon less than the own dialect's",
        },
        directory=directory,
    )
    return results


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for key, figure in figures_of(produce(say=print)).items():
        print(f"{key}: {figure:.4g}")


if __name__ == "__main__":
    main()
