"""The settings of an application: a name that clients ask, and how its answer is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from clockwright.errors import ConfigError
from controller.selection.core.combination import Rule
from controller.selection.core.policy import check_range

# Most models of an application. Each context has a state, with a number or two per model.
MODELS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """The settings of one application. A changed application is another value."""

    name: str
    #: Public names of the candidate models. Ties go to the earlier one.
    models: tuple[str, ...]
    policy: str = "exp4-full"
    #: Keyword arguments of the policy.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Default latency objective; None: the controller's.
    slo_ns: int | None = None
    #: Label that is served without an answer, or with too little confidence. None: the request is refused
    #: instead.
    default_label: int | None = None
    #: Answers with less confidence than this are not served.
    confidence_threshold: float = 0.0
    combination: Rule = Rule.VOTE
    #: Name of the models' output that is the label: integers or texts, one per row.
    label_output: str = "label"
    #: Name of the models' output that is probabilities by class; for `average`.
    probability_output: str = "probabilities"
    #: Answers may come from the prediction cache.
    cache: bool = True

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError(f"application {self.name}: models: found none, expected one or more")
        if len(self.models) > MODELS_MAX:
            raise ConfigError(
                f"application {self.name}: models: found {len(self.models)}, expected {MODELS_MAX} at most"
            )
        if len(set(self.models)) < len(self.models):
            twice = next(model for model in self.models if self.models.count(model) > 1)
            raise ConfigError(f"application {self.name}: models: found {twice!r} twice")
        if self.name in self.models:
            raise ConfigError(f"application {self.name}: models: found itself, expected models")
        if self.slo_ns is not None and self.slo_ns <= 0:
            raise ConfigError(f"application {self.name}: slo_ns: found {self.slo_ns}, expected > 0")
        check_range("confidence_threshold", self.confidence_threshold, 0.0, 1.0)
        if self.combination is Rule.ONE and self.default_label is not None:
            raise ConfigError(
                f"application {self.name}: default_label: found one, but with combination one the answer"
                " is a model's outputs as they are, which has no default"
            )

    def dump(self) -> dict[str, Any]:
        """Turn the settings into a dict for JSON."""
        return {
            **asdict(self),
            "options": dict(self.options),
            "combination": self.combination.value,
        }

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Application:
        """Turn what `dump` made back into settings. Raises ConfigError if the data is malformed."""
        try:
            combination = Rule(data["combination"])
            return cls(**{**data, "models": tuple(data["models"]), "combination": combination})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"application: {error}") from None
