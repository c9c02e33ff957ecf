"""The policy interface: the paper's four calls, and those that a service needs in addition.

`init`, `select`, `combine` and `observe` are Clipper's Listing 2. State is apart from the policy, so
that one policy serves any number of users, and it is a value: `observe` returns the next one. A policy
does no I/O, reads no clock, and draws only from the query's generator; given the same states and
queries it does the same.

A user's policy is a subclass of `Policy`, named by an entry point of the group `clockwright.policies`.
`PerModelPolicy` spares one whose state is a dataclass with an entry per model four of the calls.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from typing_extensions import override

from clockwright.errors import ConfigError
from controller.selection.core.combination import Rule, single
from controller.selection.core.query import (
    Choice,
    Combined,
    Observation,
    Prediction,
    Query,
    Service,
)

S = TypeVar("S")

# No count or sum in a state comes near this.
NUMBER_MAX = 1e300


class Policy(abc.ABC, Generic[S]):
    """Chooses models per query, combines their answers, and learns from feedback."""

    #: Written with every state. A state of another version is not loaded: its owner starts again.
    version: ClassVar[int] = 1

    #: The policy wants `served` to be called.
    watches_service: ClassVar[bool] = False

    #: Each user has a separate state. Otherwise all users share the application's global state.
    per_context: ClassVar[bool] = True

    #: A choice never has more than one member.
    chooses_one: bool = False

    # --- the paper's four -----------------------------------------------------------------------

    @abc.abstractmethod
    def init(self, models: Sequence[str]) -> S:
        """Make the state of a new user.

        Raises:
            ConfigError: an option of the policy names a model that is not among these.
        """

    @abc.abstractmethod
    def select(self, state: S, query: Query) -> Choice:
        """Choose among the candidates that can be in time; the choice is empty if none can."""

    def combine(
        self,
        state: S,
        query: Query,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        rule: Rule,
    ) -> Combined:
        """Combine the predictions, at least one, all from members, into one answer.

        The default suits policies that choose one model.
        """
        return single(rule, predictions[next(m for m in choice.members if m in predictions)])

    @abc.abstractmethod
    def observe(self, state: S, observation: Observation) -> S:
        """Learn from one feedback."""

    # --- what a service needs in addition --------------------------------------------------------

    def served(self, state: S, service: Service) -> S:
        """Learn from how the members fared. It is called only if `watches_service` is set."""
        return state

    @abc.abstractmethod
    def resize(self, state: S, models: Sequence[str]) -> S:
        """Continue with other models: new ones start as an average one, removed ones are forgotten."""

    @abc.abstractmethod
    def dump(self, state: S) -> dict[str, Any]:
        """Turn a state into numbers, texts, lists and dicts, as JSON has them."""

    @abc.abstractmethod
    def load(self, data: Mapping[str, Any]) -> S:
        """Turn what `dump` made back into a state. Raises ValueError if the data is not a state of this policy."""

    @abc.abstractmethod
    def weights(self, state: S) -> dict[str, float]:
        """Current weight of each model, between 0 and 1, for display."""

    def remark(self, state: S) -> str:
        """Remark on a state, for display."""
        return ""


class PerModelState(Protocol):
    """A dataclass with an entry per model, of numbers, texts and sequences of them."""

    @classmethod
    def fresh(cls, models: Sequence[str]) -> Self:
        """The untrained state."""
        ...

    def resized(self, models: Sequence[str]) -> Self:
        """The state for other models; see `Policy.resize`."""
        ...


M = TypeVar("M", bound=PerModelState)


class PerModelPolicy(Policy[M]):
    """A policy whose states are one dataclass: it makes, resizes, stores and loads them by its fields."""

    state_type: type[M]

    @override
    def init(self, models: Sequence[str]) -> M:
        return self.state_type.fresh(models)

    @override
    def resize(self, state: M, models: Sequence[str]) -> M:
        return state.resized(models)

    @override
    def dump(self, state: M) -> dict[str, Any]:
        return dump_fields(state)

    @override
    def load(self, data: Mapping[str, Any]) -> M:
        return load_fields(self.state_type.fresh(("",)), data)


def dump_fields(state: Any) -> dict[str, Any]:  # noqa: ANN401  any dataclass
    """`Policy.dump` for a state that is a dataclass of numbers, texts and sequences of them."""
    return {field.name: _plain(getattr(state, field.name)) for field in fields(state) if field.init}


def load_fields(example: S, data: Mapping[str, Any]) -> S:
    """`Policy.load` for the same: lists become tuples, and every number must be finite.

    Args:
        example: some state of the policy. The values have to be of the same kinds as in this one.
        data: what `dump_fields` made. A field that has a default may be missing.

    Raises:
        ValueError: other fields, a value of another kind, or a number that is not finite.
    """
    known = [field for field in fields(example) if field.init]  # type: ignore[arg-type]
    names = {field.name for field in known}
    needed = {field.name for field in known if field.default is MISSING}
    if not isinstance(data, Mapping) or not needed <= set(data) <= names:
        found = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"state: found fields {found}, expected {sorted(names)}")
    loaded = {name: _loaded(name, getattr(example, name), value) for name, value in data.items()}
    return type(example)(**loaded)


def _plain(value: Any) -> Any:  # noqa: ANN401
    return dump_fields(value) if is_dataclass(value) else value


def _loaded(name: str, example: Any, value: Any) -> Any:  # noqa: ANN401
    if is_dataclass(example):
        return load_fields(example, value)
    if isinstance(example, tuple):
        if not isinstance(value, list | tuple):
            raise ValueError(f"state: found {value!r} in {name}, expected a list")
        # An example without entries says nothing of their kind.
        return tuple([_loaded(name, example[0], entry) if example else entry for entry in value])
    if isinstance(example, str):
        if not isinstance(value, str):
            raise ValueError(f"state: found {value!r} in {name}, expected a text")
    # The comparison is false for NaN too.
    elif not (isinstance(value, int | float) and abs(value) < NUMBER_MAX):
        raise ValueError(f"state: found {value!r} in {name}, expected a finite number")
    elif isinstance(example, int) and not isinstance(value, int):
        raise ValueError(f"state: found {value!r} in {name}, expected a whole number")
    return value


def check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> float:
    """Check an option of a policy.

    Raises:
        ConfigError: it is not a number from `low` (with `open_low`: above it) to `high`.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool)
    # The comparison is false for NaN.
    if not (good and low <= value <= high) or (open_low and value == low):
        above = "more than" if open_low else "at least"
        raise ConfigError(
            f"option {name}: found {value!r}, expected {above} {low:g} and at most {high:g}"
        )
    return float(value)
