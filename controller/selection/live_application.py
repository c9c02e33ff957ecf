"""An application as it runs: settings, policy, global state, and the tensors of its models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.models.entry import Entry
from controller.selection.core.application import Application
from controller.selection.core.policy import Policy
from controller.selection.core.shape import MisfitError, Reading, Shape, reading_of, shape_of
from controller.selection.guarded import GuardedPolicy


@dataclass(slots=True)
class QueryCounts:
    """Totals of an application's queries and feedbacks since its last change."""

    queries: int = 0
    #: Queries that got the default, by reason.
    defaults: Counter[str] = field(default_factory=Counter)
    #: Queries that got neither an answer nor a default, by reason.
    refusals: Counter[str] = field(default_factory=Counter)
    #: How often a model was chosen and did not answer in time, by model.
    missing: Counter[str] = field(default_factory=Counter)
    #: Feedbacks by `FeedbackStatus`.
    feedbacks: Counter[str] = field(default_factory=Counter)


class LiveApplication:
    """One revision of one application."""

    def __init__(self, application: Application, policy: Policy[Any], revision: int) -> None:
        """Start with an untrained state.

        Raises:
            ConfigError: an option of the policy does not fit the application.
            PolicyError: the policy fails.
        """
        self.application = application
        self.policy = GuardedPolicy(application.policy, policy)
        #: Number of this revision, from 1; clients see it as the version.
        self.revision = revision
        #: The application was removed, or replaced by another revision. Later feedback is lost.
        self.retired = False
        #: The untrained state.
        self.fresh: Any = self.policy.init(application.models)
        #: The global state, which serves contexts without a state of their own.
        self.state: Any = self.fresh
        self.counts = QueryCounts()
        #: Models that do not fit the application, and why. They are never asked.
        self.misfits: dict[str, str] = {}
        #: Kind, inputs and outputs of each model that the shape was made from.
        self._described: tuple[tuple[object, ...] | None, ...] = ()
        self._shape: Shape | None = None
        self._readings: dict[str, Reading] = {}

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.application.name

    @property
    def version(self) -> str:
        """The revision as text, as the Open Inference Protocol has versions."""
        return str(self.revision)

    def look_at(self, models: Sequence[Entry | None]) -> Shape | None:
        """Find the shape, given the models as they are now; None while no worker has described any."""
        described = tuple(
            [(type(m), m.inputs, m.outputs) if m and m.outputs else None for m in models]
        )
        if described != self._described or self._shape is None:
            self._described = described
            self._learn_shapes(models)
        return self._shape

    def reading(self, model: str) -> Reading | None:
        """Find how a model's outputs are read; None: it does not fit, or is not known."""
        return self._readings.get(model)

    def max_rows(self, models: Sequence[Entry | None]) -> int:
        """Most rows of a query, given the models as they are now: each that fits can take as many."""
        self.look_at(models)
        fit = [m.largest_batch for m in models if m is not None and m.name in self._readings]
        return min(filter(None, fit), default=1)

    def _learn_shapes(self, models: Sequence[Entry | None]) -> None:
        application = self.application
        self._shape, self._readings, self.misfits = None, {}, {}
        for name, model in zip(application.models, models, strict=True):
            if model is None or not model.outputs:
                continue
            try:
                if self._shape is None:
                    self._shape = shape_of(application, model.inputs, model.outputs)
                reading = reading_of(application, self._shape, model.inputs, model.outputs)
            except MisfitError as error:
                self.misfits[name] = str(error)
                continue
            self._readings[name] = reading
