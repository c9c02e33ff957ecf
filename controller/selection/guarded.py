"""A policy whose failures affect only its own application.

Any package may provide a policy. It runs in the event loop that serves all clients, so all its exceptions are caught
here, also `SystemExit`: a policy has no reason to end the controller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from clockwright.errors import ConfigError
from controller.selection.core.combination import Rule
from controller.selection.core.policy import Policy
from controller.selection.core.query import (
    Choice,
    Combined,
    Observation,
    Prediction,
    Query,
    Service,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

# A policy that fails on every query writes no more lines than this.
_LOG_INTERVAL_S = 60.0

# Remarks and errors are for people; longer text of a policy is cut off.
_CHARS_MAX = 500


class PolicyError(Exception):
    """A policy raised an exception or returned an invalid value; the message says which."""


class GuardedPolicy:
    """Passes every call to a policy, and turns every failure into `PolicyError`."""

    def __init__(self, name: str, policy: Policy[Any]) -> None:
        """Guard a policy. Raises PolicyError if it fails when it is asked for its attributes."""
        self._name = name
        self._policy = policy
        self._num_failures = 0
        self._last_failure = ""
        self._logged_s = -_LOG_INTERVAL_S
        self.version: int = self._run("version", lambda: int(policy.version))
        self.watches_service = self._run("watches_service", lambda: bool(policy.watches_service))
        self.per_context = self._run("per_context", lambda: bool(policy.per_context))
        self.chooses_one = self._run("chooses_one", lambda: bool(policy.chooses_one))

    @property
    def complaint(self) -> str:
        """Remark on failures so far; empty without any."""
        if not self._num_failures:
            return ""
        return f"the policy has failed {self._num_failures} times, last in {self._last_failure}"

    def init(self, models: Sequence[str]) -> Any:  # noqa: ANN401  the state is the policy's own affair
        """Make a state; an option that is wrong is a ConfigError."""
        return self._run("init", lambda: self._policy.init(models), ConfigError)

    def select(self, state: Any, query: Query) -> Choice:  # noqa: ANN401
        """Choose models among those that can be in time."""
        return self._run(
            "select", lambda: _checked_choice(self._policy.select(state, query), query)
        )

    def combine(
        self,
        state: Any,  # noqa: ANN401
        query: Query,
        choice: Choice,
        predictions: Mapping[str, Prediction],
        rule: Rule,
    ) -> Combined:
        """Make one answer."""
        return self._run(
            "combine",
            lambda: _checked_answer(
                self._policy.combine(state, query, choice, predictions, rule), predictions
            ),
        )

    def observe(self, state: Any, observation: Observation) -> Any:  # noqa: ANN401
        """Learn from a feedback."""
        return self._run("observe", lambda: self._policy.observe(state, observation))

    def served(self, state: Any, service: Service) -> Any:  # noqa: ANN401
        """Learn from how the members fared."""
        return self._run("served", lambda: self._policy.served(state, service))

    def resize(self, state: Any, models: Sequence[str]) -> Any:  # noqa: ANN401
        """Go on with other models."""
        return self._run("resize", lambda: self._policy.resize(state, models))

    def dump(self, state: Any) -> dict[str, Any]:  # noqa: ANN401
        """Turn a state into what JSON has; the store's thread calls this."""
        return self._run("dump", lambda: self._policy.dump(state))

    def load(self, data: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Turn what `dump` made back into a state; ValueError if it is none."""
        return self._run("load", lambda: self._policy.load(data), ValueError)

    def weights(self, state: Any) -> dict[str, float]:  # noqa: ANN401
        """Say how much each model counts."""
        return self._run(
            "weights",
            lambda: {str(m): float(w) for m, w in self._policy.weights(state).items()},
        )

    def remark(self, state: Any) -> str:  # noqa: ANN401
        """Say what else people should know of a state."""
        return self._run("remark", lambda: str(self._policy.remark(state))[:_CHARS_MAX])

    def failed(self, method: str, words: str) -> PolicyError:
        """Count a failure, log it unless the last line is recent, and make an error of it."""
        self._num_failures += 1
        self._last_failure = f"{method}: {words}"[:_CHARS_MAX]
        error = PolicyError(f"policy {self._name}: {self._last_failure}")
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            log.error("%s (%d failures since it was made)", error, self._num_failures)
        return error

    def _run(self, method: str, call: Callable[[], T], *expected: type[Exception]) -> T:
        try:
            return call()
        except expected:
            raise
        except BaseException as error:
            raise self.failed(method, words_of(error)) from None


def words_of(error: BaseException) -> str:
    """Describe an exception of another package, whose `str` may raise another one."""
    try:
        return repr(error)
    except BaseException:
        return type(error).__name__


def _checked_choice(choice: object, query: Query) -> Choice:
    if not isinstance(choice, Choice):
        raise TypeError(f"found {choice!r}, expected a Choice")
    if not isinstance(choice.members, tuple) or not isinstance(choice.shadows, tuple):
        raise TypeError(f"found {choice!r}, expected tuples in it")
    in_time, known = query.in_time, {candidate.model for candidate in query.candidates}
    for member in choice.members:
        if member not in in_time or choice.members.count(member) > 1:
            raise ValueError(f"found members {choice.members}, expected each once, of {in_time}")
    if not known.issuperset(choice.shadows):
        raise ValueError(f"found shadows {choice.shadows}, expected some of {sorted(known)}")
    return choice


def _checked_answer(combined: object, predictions: Mapping[str, Prediction]) -> Combined:
    if not isinstance(combined, Combined):
        raise TypeError(f"found {combined!r}, expected a Combined")
    label = combined.label if isinstance(combined.label, str) else int(combined.label)
    size = len(next(iter(predictions.values())).probabilities)
    if len(combined.probabilities) != size:
        raise ValueError(f"found {len(combined.probabilities)} probabilities, expected {size}")
    return Combined(
        label,
        float(combined.confidence),
        float(combined.agreement),
        float(combined.weight_mass),
        float(combined.propensity),
        tuple(map(float, combined.probabilities)),
    )
