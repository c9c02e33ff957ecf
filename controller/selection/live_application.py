"""An application as it runs: settings, policy, global state, and the tensors of its models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.models.catalogue import Catalogue
from controller.models.entry import Entry, Pipeline
from controller.selection.core.application import Application
from controller.selection.core.policy import Policy
from controller.selection.core.shape import MisfitError, Reading, Shape, reading_of, shape_of
from controller.selection.guarded import GuardedPolicy

# A message names so many of the models that cannot be asked: an application may have 64.
_NAMED_MAX = 4


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

        Raises ConfigError if an option of the policy does not fit the application; PolicyError if the policy fails.
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


def lacks(catalogue: Catalogue, running: LiveApplication) -> str:
    """Say which models of an application cannot be asked, why, and what helps; empty: all can be."""
    faults, is_away = list[str](), False
    for name in running.application.models:
        model = catalogue.member(name)
        if model is None:
            faults.append(f"there is no model {name}")
            is_away = True
        elif (refused := catalogue.refusal(model)) is not None:
            faults.append(refused.message)
            is_away |= isinstance(model, Pipeline) and None in catalogue.look_at(model)
        elif name in running.misfits:
            faults.append(f"model {name} does not fit: {running.misfits[name]}")
    more = len(faults) - _NAMED_MAX
    if more > 0:
        faults[_NAMED_MAX:] = [f"and {more} more"]
    if is_away:
        faults.append(
            "`clockwright models add` adds a model, `clockwright app add --replace` changes the application"
        )
    return "; ".join(faults)


def none_answers(catalogue: Catalogue, running: LiveApplication) -> str:
    """Say that an application has no model that fits it and can be asked, and why."""
    # A model that was served is not among the lacking, though no worker may have it now.
    away = [
        catalogue.reason(model)
        for name in running.application.models
        if name not in running.misfits
        and (model := catalogue.member(name)) is not None
        and catalogue.refusal(model) is None
    ]
    why = "; ".join(filter(None, [*dict.fromkeys(away), lacks(catalogue, running)]))
    why = why or "no worker has looked at one that fits it yet"
    return f"application {running.name}: none of its models can answer: {why}"
