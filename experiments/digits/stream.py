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


@dataclass(frozen=True, slots=True, eq=False)
class Trail:
    """A policy's answers to a stream, and its weights meanwhile; all of shape (query,)."""

    #: Whether each answer was wrong, bool.
    wrong: Array
    #: Share of the models that said what was answered, float64.
    agreement: Array
    #: Index of the model with the most weight, looked at every `WEIGHTS_EVERY` queries.
    heaviest: Array


def ask(
    policy: Policy[Any],
    state: Any,  # noqa: ANN401
    query: Query,
    said: Mapping[str, int],
    truth: int,
) -> tuple[Combined, Observation]:
    """Send one query past a policy, which learns nothing before it is told.

    Args:
        policy: under test.
        state: the policy's.
        query: its candidates are the models.
        said: the label of every model, chosen or not.
        truth: the true label.

    Returns:
        The answer, and what feedback says of it.
    """
    choice = policy.select(state, query)
    votes = {member: said[member] for member in choice.members}
    predictions = {member: Prediction(label) for member, label in votes.items()}
    combined = policy.combine(state, query, choice, predictions, Rule.VOTE)
    observation = Observation(
        choice=choice,
        votes=votes,
        losses={member: float(label != truth) for member, label in votes.items()},
        served=combined.label,
        served_loss=float(combined.label != truth),
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
    delay_max: int = 0,
    lost: float = 0.0,
) -> Trail:
    """Send a stream past a policy.

    Args:
        policy: under test.
        models: names.
        votes: label that each model gives, shape (model, query).
        labels: true ones, shape (query,).
        seed: seed of the policy's draws and of the delays.
        delay_max: feedback comes after up to so many more queries, evenly.
        lost: share of the feedback that never comes.

    Returns:
        The outcome of every query.
    """
    rng = Random(seed)
    state = policy.init(models)
    query = Query(tuple(Candidate(model) for model in models), "", rng)
    trail = Trail(*(np.zeros(len(labels), kind) for kind in (bool, np.float64, np.int64)))
    leader = 0
    # (when, serial, observation)
    waiting: list[tuple[int, int, Observation]] = []
    for number, (column, truth) in enumerate(zip(votes.T.tolist(), labels.tolist(), strict=True)):
        while waiting and waiting[0][0] <= number:
            state = policy.observe(state, heapq.heappop(waiting)[2])
        if number % WEIGHTS_EVERY == 0:
            weights = policy.weights(state)
            leader = models.index(max(weights, key=weights.__getitem__))
        trail.heaviest[number] = leader
        said = dict(zip(models, column, strict=True))
        combined, observation = ask(policy, state, query, said, truth)
        trail.wrong[number] = combined.label != truth
        trail.agreement[number] = combined.agreement
        if not delay_max and not lost:
            state = policy.observe(state, observation)
        elif rng.random() >= lost:
            due = number + 1 + rng.randint(0, delay_max)
            heapq.heappush(waiting, (due, number, observation))
    return trail
