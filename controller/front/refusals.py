"""A refusal in one sentence that a person understands."""

from __future__ import annotations

from clockwright.errors import Refusal
from clockwright.units import format_ns
from controller.core.events import RefuseRequest
from controller.generations import name_of


def refusal_text(refused: RefuseRequest) -> str:
    """Say why, with the predicted times that led to it."""
    sentence = _sentence(refused)
    return f"{sentence} ({refused.detail})" if refused.detail else sentence


def refusal_figures(refused: RefuseRequest) -> dict[str, int]:
    """Give the predicted times that led to it by name, for programs."""
    return {
        "slo_ns": refused.slo_ns,
        "load_ns": refused.load_ns,
        "exec_ns": refused.exec_ns,
        "queue_ns": refused.queue_ns,
        "margin_ns": refused.margin_ns,
    }


def late_text(model_id: str, *, slo_ns: int, latency_ns: int, expected_latency_ns: int) -> str:
    """Say that an answer was ready only after its deadline."""
    return (
        f"model {name_of(model_id)}: the answer took {format_ns(latency_ns)} > SLO {format_ns(slo_ns)}; "
        f"predicted were {format_ns(expected_latency_ns)}"
    )


def _sentence(refused: RefuseRequest) -> str:
    model, slo = name_of(refused.model_id), format_ns(refused.slo_ns)
    match refused.refusal:
        case Refusal.INFEASIBLE if not refused.exec_ns:
            return f"model {model} cannot serve the request"
        case Refusal.INFEASIBLE:
            return f"model {model} cannot be that fast: {_cost(refused)}"
        case Refusal.COLD:
            return f"model {model} is cold: {_cost(refused)}"
        case Refusal.OVERLOADED:
            return f"model {model} is overloaded: {_cost(refused)}"
        case Refusal.LATE:
            return f"model {model}: predicted to be in time, but could not be within SLO {slo}"
        case Refusal.WORKER_LOST:
            return (
                f"model {model}: the worker that had the request vanished, "
                f"and no other could answer within SLO {slo}"
            )
        case Refusal.NO_WORKER:
            return f"model {model}: no worker can serve it now"
        case Refusal.DRAINING:
            return "the server is shutting down and admits no requests"
        case Refusal.MODEL_REMOVED:
            return f"model {model} was removed while the request waited"
        case Refusal.FAILED:
            return f"model {model}: the engine failed on this request's batch"
        case Refusal.LOW_CONFIDENCE:
            return f"application {model}: its models were not sure enough"


def _cost(refused: RefuseRequest) -> str:
    parts = [
        (name, duration_ns)
        for name, duration_ns in (
            ("load", refused.load_ns),
            ("run", refused.exec_ns),
            ("queue", refused.queue_ns),
            ("margin", refused.margin_ns),
        )
        if duration_ns
    ]
    total_ns = sum(duration_ns for _, duration_ns in parts)
    slo = format_ns(refused.slo_ns)
    if total_ns == refused.margin_ns:
        return f"no time is left of SLO {slo}"
    terms = " + ".join(f"{name} {format_ns(duration_ns)}" for name, duration_ns in parts)
    if len(parts) > 1:
        terms += f" = {format_ns(total_ns)}"
    if total_ns > refused.slo_ns:
        return f"{terms} > SLO {slo}"
    return f"{terms} does not fit what is left of SLO {slo}"
