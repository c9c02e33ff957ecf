"""Says where the time of an answered request went: the response parameters that `explain` asks for."""

from __future__ import annotations

from clockwright.actions import Infer, StepTime
from clockwright.units import NS_PER_US
from controller.runtime import Answer


def explain(answer: Answer, *, slo_source: str) -> dict[str, bool | int | str]:
    """Split the latency of an answer into parts that add up to it.

    Args:
        answer: a success.
        slo_source: where the SLO came from, as `request_slo_ns` names it.

    Returns:
        `measured_us` (the latency at the front end) and its parts: `load_us` (waiting for weights, cold
        starts only), `input_us`, `exec_us`, `output_us` (the steps on the worker), `network_us` (between
        controller and worker, both ways) and `queue_us` (all other waiting); `predicted_us` (the latency
        predicted when the batch was sent) and `predicted_exec_us`; `slo_us`, `slo_source`,
        `batch_size`, `worker`, `cold`.
    """
    request, command, result = answer.request, answer.command, answer.finished.result
    infer = answer.finished.sent.command.action
    assert isinstance(infer, Infer)
    measured_ns = answer.departure_ns - request.arrival_ns
    input_ns, exec_ns, output_ns = map(_duration_ns, (result.input, result.exec, result.output))
    # The clock offset may be a little wrong. It must not make the parts add up to more than the whole.
    left_ns = max(measured_ns - input_ns - exec_ns - output_ns, 0)
    load_ns = min(_load_wait_ns(answer), left_ns)
    left_ns -= load_ns
    network_ns = min(_network_ns(answer), left_ns)
    queue_ns = left_ns - network_ns
    return {
        "queue_us": queue_ns // NS_PER_US,
        "load_us": load_ns // NS_PER_US,
        "input_us": input_ns // NS_PER_US,
        "exec_us": exec_ns // NS_PER_US,
        "output_us": output_ns // NS_PER_US,
        "network_us": network_ns // NS_PER_US,
        "measured_us": measured_ns // NS_PER_US,
        "predicted_us": (command.expected_departure_ns - request.arrival_ns) // NS_PER_US,
        "predicted_exec_us": infer.expected_duration_ns // NS_PER_US,
        "slo_us": request.slo_ns // NS_PER_US,
        "slo_source": slo_source,
        "batch_size": command.batch_size,
        "worker": command.worker_id,
        "cold": command.cold,
    }


def _load_of(answer: Answer) -> StepTime | None:
    """The load that a cold request waited for."""
    return answer.finished.load if answer.command.cold else None


def _load_wait_ns(answer: Answer) -> int:
    """Time of the load that lies inside the request's wait. The load may be older than the request."""
    load = _load_of(answer)
    if load is None:
        return 0
    begun = answer.finished.result.input
    until_ns = begun.begin_ns if begun else answer.finished.result_ns
    begin_ns = max(load.begin_ns, answer.request.arrival_ns)
    return max(min(load.end_ns, until_ns) - begin_ns, 0)


def _network_ns(answer: Answer) -> int:
    """Time on the way there and back, without the part of the way there that passed during the load."""
    finished, result, load = answer.finished, answer.finished.result, _load_of(answer)
    sent_ns = finished.sent.sent_ns
    if load is not None:
        sent_ns = max(sent_ns, min(load.end_ns, result.received_ns))
    last_end_ns = max(
        (step.end_ns for step in (result.input, result.exec, result.output) if step),
        default=finished.result_ns,
    )
    return max(result.received_ns - sent_ns, 0) + max(finished.result_ns - last_end_ns, 0)


def _duration_ns(step: StepTime | None) -> int:
    return max(step.end_ns - step.begin_ns, 0) if step else 0
