"""A stream of queries past a policy: the production policies on recorded votes, without a server.

Every vote is known beforehand, so a run of 20,000 queries takes a second, and all policies see the same
stream.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from controller.selection.core.combination import Rule
from controller.selection.core.policy import Policy
from controller.selection.core.query import Candidate, Combined, Observation, Prediction, Query
from experiments.digits.images import Array

# A look costs a tenth of a query.
WEIGHTS_EVERY = 10


@dataclass(frozen=True, slots=True)
class Delays:
    """How feedback comes: after up to `queries_max` queries, evenly, a share of it never."""

    queries_max: int = 0
    lost: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Trail:
    """A policy's answers to a stream, and its weights meanwhile."""

    #: Whether each answer was wrong, bool, shape (query,).
    wrong: Array
    #: Index of the model with the most weight, looked at every `WEIGHTS_EVERY` queries.
    heaviest: Array


def ask(
    policy: Policy[Any],
    state: Any,  # noqa: ANN401
    query: Query,
    said: Mapping[str, int],
    truth: int,
    *,
    reward_only: bool = False,
) -> tuple[Combined, Observation]:
    """Send one query past a policy; it learns nothing before it is told.

    Args:
        policy: under test.
        state: the policy's state.
        query: a query whose candidates are the models.
        said: the label of every model, chosen or not.
        truth: the true label.
        reward_only: feedback says whether the answer was right, not what would have been.

    Returns:
        The answer, and what feedback says of it.
    """
    choice = policy.select(state, query)
    votes = {member: said[member] for member in choice.members}
    predictions = {member: Prediction(label) for member, label in votes.items()}
    combined = policy.combine(state, query, choice, predictions, Rule.VOTE)
    loss = float(combined.label != truth)
    losses = (
        {member: loss for member, label in votes.items() if label == combined.label}
        if reward_only
        else {member: float(label != truth) for member, label in votes.items()}
    )
    observation = Observation(
        choice=choice,
        votes=votes,
        losses=losses,
        served=combined.label,
        served_loss=loss,
        served_propensity=combined.propensity,
    )
    return combined, observation


def follow(
    policy: Policy[Any],
    models: Sequence[str],
    votes: Array,
    labels: Array,
    *,
    seed: int,
    delays: Delays | None = None,
    reward_only: bool = False,
) -> Trail:
    """Send a stream past a policy.

    Args:
        policy: under test.
        models: names.
        votes: label that each model gives, shape (model, query).
        labels: true ones, shape (query,).
        seed: seed of the policy's draws and of the delays.
        delays: delays of feedback; None: feedback is there before the next query.
        reward_only: feedback says whether the answer was right, not what would have been.

    Returns:
        The outcome of every query.
    """
    rng = Random(seed)
    state = policy.init(models)
    candidates = tuple(Candidate(model) for model in models)
    positions = {model: index for index, model in enumerate(models)}
    columns = votes.T.tolist()
    truths = labels.tolist()
    wrong = np.zeros(len(truths), bool)
    heaviest = np.zeros(len(truths), np.int64)
    query = Query(candidates, "", rng)
    leader = 0
    # (when, serial, observation)
    waiting: list[tuple[int, int, Observation]] = []
    for number, (column, truth) in enumerate(zip(columns, truths, strict=True)):
        while waiting and waiting[0][0] <= number:
            state = policy.observe(state, heapq.heappop(waiting)[2])
        if number % WEIGHTS_EVERY == 0:
            weights = policy.weights(state)
            leader = positions[max(weights, key=weights.__getitem__)]
        heaviest[number] = leader
        said = dict(zip(models, column, strict=True))
        combined, observation = ask(policy, state, query, said, truth, reward_only=reward_only)
        wrong[number] = combined.label != truth
        if delays is None:
            state = policy.observe(state, observation)
        elif rng.random() >= delays.lost:
            due = number + 1 + rng.randint(0, delays.queries_max)
            heapq.heappush(waiting, (due, number, observation))
    return Trail(wrong, heaviest)
