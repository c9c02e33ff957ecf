"""Says a refusal in one sentence that a person understands."""

from __future__ import annotations

from collections.abc import Mapping

from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, format_ns
from controller.models.catalogue import name_of
from controller.port import Refused

# A process that is full, or has no memory or time for more, judges again many times in a second.
_FULL_NS = NS_PER_S
_RETRY_NS_MIN = NS_PER_MS

_COSTS = ("load_ns", "exec_ns", "queue_ns", "margin_ns")


class NoAnswerError(RefusedError):
    """A request was refused, or its answer came too late, for a reason that its figures say."""

    def __init__(
        self, refusal: Refusal, model_id: ModelId, figures: dict[str, int], *, detail: str = ""
    ) -> None:
        """Refuse a request. Figures are the times that led to it, in ns; `detail` is what they do not say."""
        super().__init__(refusal, f"model {model_id}", figures=figures)
        self.model_id = model_id
        self.detail = detail
        #: The end of a gRPC call with it, which many may share; empty: not made yet.
        self.block = b""


def error_of(told: Refused, name: str) -> RefusedError:
    """Make the error of a request to something of a name that is refused."""
    if told.message:
        return RefusedError(told.refusal, told.message, figures=told.figures)
    return NoAnswerError(told.refusal, ModelId(name), told.figures, detail=told.detail)


def refusal_text(error: NoAnswerError) -> str:
    """Say why, with the times that led to it."""
    sentence = _sentence(error)
    return f"{sentence} ({error.detail})" if error.detail else sentence


def retry_ns(error: RefusedError) -> int | None:
    """Find after how long the same request may be answered, in ns. Returns None if never, or if it is unknown.

    A client that comes back earlier is refused again, and one that is told nothing goes elsewhere or gives up.
    """
    figures = error.figures
    match error.refusal:
        case Refusal.QUOTA | Refusal.LOADING:
            return figures.get("retry_ns")
        case Refusal.OVERLOADED if "queue_ns" in figures:
            # What stands before it has to shrink by what there is too much of; or it lost a race, and others end.
            too_much_ns = sum(figures[name] for name in _COSTS) - figures["slo_ns"]
            return max(too_much_ns if too_much_ns > 0 else figures["exec_ns"], _RETRY_NS_MIN)
        case Refusal.OVERLOADED:
            return _FULL_NS
        case Refusal.COLD:
            # Its refusal is why the model is loaded as soon as there is time for it.
            return max(figures.get("load_ns", 0) + figures.get("queue_ns", 0), _RETRY_NS_MIN)
    return None


def _sentence(error: NoAnswerError) -> str:
    model, figures = name_of(error.model_id), error.figures
    slo = format_ns(figures["slo_ns"])
    match error.refusal:
        case Refusal.INFEASIBLE if not figures["exec_ns"]:
            return f"model {model} cannot serve the request"
        case Refusal.INFEASIBLE:
            return f"model {model} cannot be that fast: {_cost(figures)}"
        case Refusal.COLD:
            return f"model {model} is cold: {_cost(figures)}"
        case Refusal.OVERLOADED:
            return f"model {model} is overloaded: {_cost(figures)}"
        case Refusal.QUOTA:
            return f"model {model}: the tenant has used up its quota"
        case Refusal.LATE if "latency_ns" in figures:
            return (
                f"model {model}: the answer took {format_ns(figures['latency_ns'])} > SLO {slo}; "
                f"predicted were {format_ns(figures['expected_latency_ns'])}"
            )
        case Refusal.LATE:
            return f"model {model}: predicted to be in time, but could not be within SLO {slo}"
        case Refusal.WORKER_LOST:
            return (
                f"model {model}: a worker that had the request vanished, "
                f"and no other answered it within SLO {slo}"
            )
        case Refusal.NO_WORKER | Refusal.LOADING | Refusal.UNFIT:
            return f"model {model}: no worker can serve it now"
        case Refusal.DRAINING:
            return "the server is shutting down and admits no requests"
        case Refusal.MODEL_REMOVED:
            return f"model {model} was removed while the request waited"
        case Refusal.FAILED:
            return f"model {model}: the engine failed on this request's batch"
        case Refusal.LOW_CONFIDENCE:
            return f"application {model}: its models were not sure enough"


def _cost(figures: Mapping[str, int]) -> str:
    parts = [
        (name, figures[f"{key}_ns"])
        for name, key in (
            ("load", "load"),
            ("run", "exec"),
            ("queue", "queue"),
            ("margin", "margin"),
        )
        if figures[f"{key}_ns"]
    ]
    total_ns = sum(duration_ns for _, duration_ns in parts)
    slo = format_ns(figures["slo_ns"])
    if total_ns == figures["margin_ns"]:
        return f"no time is left of SLO {slo}"
    terms = " + ".join(f"{name} {format_ns(duration_ns)}" for name, duration_ns in parts)
    if len(parts) > 1:
        terms += f" = {format_ns(total_ns)}"
    if total_ns > figures["slo_ns"]:
        return f"{terms} > SLO {slo}"
    return f"{terms} does not fit what is left of SLO {slo}"
