"""Classes of requests: what a request's `priority` and `attempt` make its answer worth.

A model may have levels of priority, as Triton's have: 1 is the highest. A level is worth four times the next, and the model's
default level is worth 1, like a request to any other model. A retry that says so is worth less than a first attempt, and more
than the next level. The scheduler answers what is worth most when not all can be answered.

So that no class starves, one in 20 requests to such a model that are worth less than one of the default level, drawn at random,
counts as one of that level (`RISING`). Who may ask for a level above the default is a matter of quotas, as with weights; and among tenants each keeps its fair share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from clockwright.errors import BadRequestError
from clockwright.units import WEIGHT_MAX, WEIGHT_MIN
from clockwright.v1 import inference_pb2 as pb

#: What a level is worth, where the next is worth 1; less where levels are so many that the worth of one would be out of
#: bounds. With 2 the classes are less apart, and half as many answers are lost for it; with 16 they are no further apart
#: (`python -m experiments classes`).
RATIO: Final = 4.0
#: The part of the requests worth less than the default level that count as one of it.
RISING: Final = 0.05
# All later attempts are alike.
_ATTEMPTS: Final = 2


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of priority that a model has."""

    #: 1 to this.
    number: int
    #: What a request has that names none, or one that there is not.
    default: int

    def worth_of(self, level: int) -> float:
        """What a level is worth, where the default is worth 1."""
        if not 1 <= level <= self.number:
            return 1.0
        span = max(self.default - 1, self.number - self.default, 1)
        return float(min(RATIO, WEIGHT_MAX ** (1 / span)) ** (self.default - level))


def worth_of(message: pb.ModelInferRequest, levels: Levels | None, weight: float) -> float:
    """Find what an answer is worth; `weight` is what its client says, its class aside.

    `levels` is None: its model has none. Raises BadRequestError if a parameter is no whole number, or negative.
    """
    parameters = message.parameters
    if levels is not None and "priority" in parameters:
        weight *= levels.worth_of(_whole(parameters["priority"], "priority"))
    if "attempt" in parameters:
        weight /= 1 + min(_whole(parameters["attempt"], "attempt"), _ATTEMPTS)
    return min(max(weight, WEIGHT_MIN), WEIGHT_MAX)


def _whole(parameter: pb.InferParameter, name: str) -> int:
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in ("int64_param", "uint64_param"):
        raise BadRequestError(
            f"parameter {name}: found {kind or 'no value'}, expected int64_param or uint64_param"
        )
    value: int = getattr(parameter, kind)
    if value < 0:
        raise BadRequestError(f"parameter {name}: found {value}, expected 0 or more")
    return value
