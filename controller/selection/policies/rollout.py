"""Policies by which operators bring models in: static, A/B, canary, shadow.

A hash of the context decides the share, so each user keeps seeing the same model. For a query without a
context the share is drawn again each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from clockwright.errors import ConfigError
from controller.selection.core.buckets import bucket, share_at
from controller.selection.core.combination import Rule, combine
from controller.selection.core.policy import (
    PerModelPolicy,
    Policy,
    check_range,
    dump_fields,
    load_fields,
)
from controller.selection.core.query import (
    Choice,
    Combined,
    Observation,
    Prediction,
    Query,
    Service,
)

# The guards look after every feedback, so their bound has to hold at all times at once. A fixed 1.96
# standard errors rolled back 11 of 20 canaries that were as good as the stable model. `_bound` is the
# confidence sequence of Robbins' normal mixture, which is tightest after about `_TIGHTEST_AT` feedbacks.
_ERROR_CHANCE = 0.05
_TIGHTEST_AT = 30


def _bound(number: int) -> float:
    """Standard errors that an estimate exceeds at `number` samples; at any time, in 5 % of cases."""
    grown = number + _TIGHTEST_AT
    return math.sqrt(grown / number * math.log(grown / _TIGHTEST_AT / _ERROR_CHANCE**2))


@dataclass(frozen=True, slots=True)
class LossCounts:
    """Feedback per model: how many, the sum of losses, and the sum of their squares."""

    models: tuple[str, ...]
    numbers: tuple[int, ...]
    losses: tuple[float, ...]
    squares: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {len(c) for c in (self.models, self.numbers, self.losses, self.squares)}
        if len(lengths) > 1:
            raise ValueError(f"state: found columns of {sorted(lengths)} entries, expected equal")

    @classmethod
    def fresh(cls, models: Sequence[str]) -> LossCounts:
        """Make the counts of models that have had no feedback."""
        zeros = (0.0,) * len(models)
        return cls(tuple(models), (0,) * len(models), zeros, zeros)

    def count(self, losses: Mapping[str, float]) -> LossCounts:
        """Count the known losses of one query."""
        numbers, sums, squares = list(self.numbers), list(self.losses), list(self.squares)
        for index, model in enumerate(self.models):
            if model in losses:
                loss = losses[model]
                numbers[index] += 1
                sums[index] += loss
                squares[index] += loss * loss
        return LossCounts(self.models, tuple(numbers), tuple(sums), tuple(squares))

    def resized(self, models: Sequence[str]) -> LossCounts:
        """Make the counts of other models: known ones keep theirs."""
        rows = {
            model: row
            for model, *row in zip(
                self.models, self.numbers, self.losses, self.squares, strict=True
            )
        }
        numbers, losses, squares = zip(*(rows.get(m, [0, 0.0, 0.0]) for m in models), strict=True)
        return LossCounts(tuple(models), numbers, losses, squares)

    def number(self, model: str) -> int:
        """Number of feedbacks on a model."""
        return self.numbers[self.models.index(model)] if model in self.models else 0

    def mean(self, model: str) -> float:
        """Mean loss of a model; 0 without any feedback."""
        index = self.models.index(model)
        return self.losses[index] / self.numbers[index] if self.numbers[index] else 0.0

    def variance_of_mean(self, model: str) -> float:
        """Variance of the mean loss, as if there had been one hit and one miss before.

        Without them, five answers without an error would be certainty.
        """
        index = self.models.index(model)
        number = self.numbers[index] + 2
        mean = (self.losses[index] + 1) / number
        return max((self.squares[index] + 1) / number - mean * mean, 0.0) / number


class _Counted(PerModelPolicy[LossCounts]):
    """Chooses without looking at feedback, and counts it for people to look at."""

    per_context: ClassVar[bool] = False
    state_type = LossCounts

    @override
    def init(self, models: Sequence[str]) -> LossCounts:
        _check_known(self._named(), models)
        return super().init(models)

    def _named(self) -> Sequence[tuple[str, str]]:
        """Pairs of an option that names a model, and the model."""
        return ()

    @override
    def observe(self, state: LossCounts, observation: Observation) -> LossCounts:
        return state.count(observation.losses)

    @override
    def remark(self, state: LossCounts) -> str:
        return _means(state)


class Static(_Counted):
    """Always uses the same model, or with `ensemble` all models with equal votes."""

    def __init__(self, *, model: str = "", ensemble: bool = False) -> None:
        """Fix the choice.

        Args:
            model: the model to use; empty: the application's first model that can be in time.
            ensemble: use all models that can be in time instead.
        """
        if model and ensemble:
            raise ConfigError("options model and ensemble: found both, expected one of them")
        self.model = model
        self.ensemble = ensemble
        self.chooses_one = not ensemble

    @override
    def _named(self) -> Sequence[tuple[str, str]]:
        return (("model", self.model),) if self.model else ()

    @override
    def select(self, state: LossCounts, query: Query) -> Choice:
        models = query.in_time
        if self.model:
            models = [model for model in models if model == self.model]
        elif not self.ensemble:
            models = models[:1]
        return Choice(tuple(models), (1.0,) * len(models))

    @override
    def combine(
        self,
        state: LossCounts,
        query: Query,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        rule: Rule,
    ) -> Combined:
        if not self.ensemble:
            return super().combine(state, query, choice, predictions, rule)
        return combine(rule, dict.fromkeys(choice.members, 1.0), predictions, choice.members)

    @override
    def weights(self, state: LossCounts) -> dict[str, float]:
        if self.ensemble:
            return dict.fromkeys(state.models, 1 / len(state.models))
        chosen = self.model or state.models[0]
        return {model: float(model == chosen) for model in state.models}


class ABTest(_Counted):
    """Splits users among models: each user sees one model, the same every time."""

    chooses_one: bool = True

    def __init__(self, *, shares: Mapping[str, float] | None = None, salt: str = "") -> None:
        """Set the split.

        Args:
            shares: relative number of users of each model; by default equal.
            salt: text added to the hash; another salt assigns the users differently.
        """
        self.shares = {
            model: check_range(f"shares.{model}", share, 0.0, 1e9)
            for model, share in (shares or {}).items()
        }
        if self.shares and sum(self.shares.values()) <= 0:
            raise ConfigError("option shares: found none above 0, expected at least one")
        self.salt = salt

    @override
    def _named(self) -> Sequence[tuple[str, str]]:
        return [(f"shares.{model}", model) for model in self.shares]

    @override
    def select(self, state: LossCounts, query: Query) -> Choice:
        # If a user's model cannot be in time, no model is asked: he must never see another one.
        models = [candidate.model for candidate in query.candidates]
        shares = self._shares(models)
        position = bucket(self.salt, query.context) if query.context else query.rng.random()
        model = share_at(position, shares)
        return Choice((model,), (shares[model],)) if model in query.in_time else Choice(())

    def _shares(self, models: Sequence[str]) -> dict[str, float]:
        shares = {m: self.shares.get(m, 0.0) if self.shares else 1.0 for m in models}
        total = sum(shares.values())
        if total <= 0:
            return dict.fromkeys(models, 1 / len(models))
        return {model: share / total for model, share in shares.items() if share > 0}

    @override
    def weights(self, state: LossCounts) -> dict[str, float]:
        return {model: 0.0 for model in state.models} | self._shares(state.models)

    @override
    def remark(self, state: LossCounts) -> str:
        # Mean losses, and whether those of the first two differ by more than chance would explain.
        text = _means(state)
        pair = [model for model in state.models if state.number(model)][:2]
        if len(pair) < 2:
            return text
        gap = state.mean(pair[0]) - state.mean(pair[1])
        noise = math.sqrt(sum(state.variance_of_mean(model) for model in pair))
        radius = _bound(min(map(state.number, pair))) * noise
        return f"{text}; difference {gap:+.4f} +- {radius:.4f}"


class Shadow(_Counted):
    """Answers from one model, and runs others on a share of the queries, for comparison.

    Shadows are asked with a later deadline. No query waits for a shadow or is answered from one.
    """

    chooses_one: bool = True

    def __init__(self, *, primary: str = "", share: float = 0.1) -> None:
        """Set who answers.

        Args:
            primary: the model that answers; empty: the application's first.
            share: part of the queries on which each other model runs too.
        """
        self.primary = primary
        self.share = check_range("share", share, 0.0, 1.0)

    @override
    def _named(self) -> Sequence[tuple[str, str]]:
        return (("primary", self.primary),) if self.primary else ()

    @override
    def select(self, state: LossCounts, query: Query) -> Choice:
        primary = self.primary or query.candidates[0].model
        shadows = tuple(
            candidate.model
            for candidate in query.candidates
            if candidate.model != primary and query.rng.random() < self.share
        )
        members = (primary,) if primary in query.in_time else ()
        return Choice(members, (1.0,) * len(members), shadows)

    @override
    def weights(self, state: LossCounts) -> dict[str, float]:
        primary = self.primary or state.models[0]
        return {model: float(model == primary) for model in state.models}


@dataclass(frozen=True, slots=True)
class CanaryState:
    """How far a canary has got."""

    #: Index into the steps; -1 once the canary was rolled back.
    step: int
    #: Feedback on the two models since this step began.
    counts: LossCounts
    #: Queries that the canary was sent in this step.
    sent: int = 0
    #: How many of those it did not answer in time.
    missed: int = 0
    #: Why the canary was rolled back; empty before.
    reason: str = ""
    #: Queries in this step whose turn for the canary it was, and for which it could not be in time.
    passed_over: int = 0


class Canary(Policy[CanaryState]):
    """Gives a new model a growing share of users while it is not worse than the old one, otherwise none.

    Two guards watch the canary: its mean loss compared with the stable model's over the same time, and the share
    of its queries without an answer in time. A rollback is final; to try again, create the application again.

    A canary that the scheduler predicts to be late is not asked, and so neither guard sees it. The stable
    model answers then, no step is made, and the remark counts these queries.
    """

    chooses_one: bool = True
    per_context: ClassVar[bool] = False
    watches_service: ClassVar[bool] = True

    def __init__(
        self,
        *,
        stable: str,
        canary: str,
        steps: Sequence[float] = (0.01, 0.05, 0.25, 0.5, 1.0),
        min_feedbacks: int = 100,
        loss_gap: float = 0.0,
        missed_share: float = 0.05,
        salt: str = "",
    ) -> None:
        """Set who, how fast, and when to stop.

        Args:
            stable: the model that serves now.
            canary: the model that may replace it.
            steps: shares of users who get the canary, ascending.
            min_feedbacks: feedbacks on the canary before the next step.
            loss_gap: roll back when the canary's mean loss is this much above the stable model's,
                with 95 % confidence at any number of looks.
            missed_share: roll back when a larger share than this of the canary's queries had no answer in
                time, with the same confidence.
            salt: text added to the hash; with another salt other users get the canary first.
        """
        if stable == canary:
            raise ConfigError(f"options stable and canary: found {stable!r} for both")
        values = [check_range("steps", step, 0.0, 1.0, open_low=True) for step in steps]
        if not values or values != sorted(values):
            raise ConfigError(f"option steps: found {list(steps)}, expected ascending shares")
        self.stable = stable
        self.canary = canary
        self.steps = tuple(values)
        self.min_feedbacks = int(check_range("min_feedbacks", min_feedbacks, 1, 1e9))
        self.loss_gap = check_range("loss_gap", loss_gap, 0.0, 1.0)
        self.missed_share = check_range("missed_share", missed_share, 0.0, 1.0)
        self.salt = salt

    @override
    def init(self, models: Sequence[str]) -> CanaryState:
        _check_known((("stable", self.stable), ("canary", self.canary)), models)
        return CanaryState(0, LossCounts.fresh((self.stable, self.canary)))

    def share(self, state: CanaryState) -> float:
        """Share of users who get the canary."""
        return self.steps[state.step] if state.step >= 0 else 0.0

    @override
    def select(self, state: CanaryState, query: Query) -> Choice:
        # A user's position is fixed, so one who has the canary keeps it while the share grows.
        share = self.share(state)
        position = bucket(self.salt, query.context) if query.context else query.rng.random()
        chosen, chance = (self.canary, share) if position < share else (self.stable, 1 - share)
        in_time = query.in_time
        if chosen in in_time:
            return Choice((chosen,), (chance,))
        # The stable model stands in for a canary that is late. The canary never stands in for it.
        late = chosen if chosen == self.canary else ""
        if self.stable in in_time:
            return Choice((self.stable,), (chance,), passed_over=late)
        return Choice((), passed_over=late)

    @override
    def observe(self, state: CanaryState, observation: Observation) -> CanaryState:
        if state.step < 0:
            return state
        counts = state.counts.count(observation.losses)
        state = replace(state, counts=counts)
        number = counts.number(self.canary)
        gap = counts.mean(self.canary) - counts.mean(self.stable)
        fewer = min(number, counts.number(self.stable))
        if fewer:
            noise = math.sqrt(
                counts.variance_of_mean(self.canary) + counts.variance_of_mean(self.stable)
            )
            if gap - _bound(fewer) * noise > self.loss_gap:
                reason = f"its mean loss is {gap:.4f} above that of {self.stable}"
                return replace(state, step=-1, reason=reason)
        if number >= self.min_feedbacks and state.step + 1 < len(self.steps):
            return CanaryState(state.step + 1, LossCounts.fresh(counts.models))
        return state

    @override
    def served(self, state: CanaryState, service: Service) -> CanaryState:
        members = service.choice.members
        if state.step >= 0 and service.choice.passed_over == self.canary:
            return replace(state, passed_over=state.passed_over + 1)
        if state.step < 0 or not members or members[0] != self.canary:
            return state
        sent, missed = state.sent + 1, state.missed + (self.canary in service.missing)
        state = replace(state, sent=sent, missed=missed)
        mean = (missed + 1) / (sent + 2)
        noise = math.sqrt(mean * (1 - mean) / (sent + 2))
        if missed / sent - _bound(sent) * noise > self.missed_share:
            reason = f"{missed} of {sent} answers were not in time"
            return replace(state, step=-1, reason=reason)
        return state

    @override
    def resize(self, state: CanaryState, models: Sequence[str]) -> CanaryState:
        # Another pair of models starts again.
        fresh = self.init(models)
        return state if state.counts.models == fresh.counts.models else fresh

    @override
    def dump(self, state: CanaryState) -> dict[str, Any]:
        return dump_fields(state)

    @override
    def load(self, data: Mapping[str, Any]) -> CanaryState:
        state = load_fields(CanaryState(0, LossCounts.fresh((self.stable, self.canary))), data)
        if not -1 <= state.step < len(self.steps):
            raise ValueError(
                f"state: found step {state.step}, expected -1 to {len(self.steps) - 1}"
            )
        return state

    @override
    def weights(self, state: CanaryState) -> dict[str, float]:
        share = self.share(state)
        return {self.stable: 1 - share, self.canary: share}

    @override
    def remark(self, state: CanaryState) -> str:
        if state.step < 0:
            return f"rolled back: {state.reason}"
        text = f"step {state.step + 1} of {len(self.steps)}; {_means(state.counts)}"
        if state.passed_over:
            text += (
                f"; {self.canary} could not be in time for {state.passed_over} of the"
                f" {state.passed_over + state.sent} queries that were its own, which went to {self.stable}"
            )
        return text


def _check_known(named: Sequence[tuple[str, str]], models: Sequence[str]) -> None:
    for option, model in named:
        if model not in models:
            raise ConfigError(
                f"option {option}: found {model!r}, expected one of {', '.join(models)}"
            )


def _means(counts: LossCounts) -> str:
    parts = [
        f"{model} {counts.mean(model):.4f} of {counts.number(model)}"
        for model in counts.models
        if counts.number(model)
    ]
    return "mean loss: " + (", ".join(parts) or "none known")
