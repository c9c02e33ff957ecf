"""Where the time of an answered request went: the response parameters that `explain` asks for."""

from __future__ import annotations

from clockwright.actions import StepTime
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
        predicted when the batch was sent) and `predicted_exec_us`; `slo_us`, `deadline_source`,
        `batch_size`, `worker`, `cold`.
    """
    measured_ns = answer.departure_ns - answer.arrival_ns
    input_ns, exec_ns, output_ns = map(_duration_ns, (answer.input, answer.exec, answer.output))
    # A clock offset that is a little off must not make the parts more than the whole.
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
        "predicted_us": (answer.expected_departure_ns - answer.arrival_ns) // NS_PER_US,
        "predicted_exec_us": answer.expected_duration_ns // NS_PER_US,
        "slo_us": answer.slo_ns // NS_PER_US,
        "deadline_source": slo_source,
        "batch_size": answer.batch_size,
        "worker": answer.worker_id,
        "cold": answer.cold,
    }


def _load_wait_ns(answer: Answer) -> int:
    """Time of the load that lies inside the request's wait; it may have begun before it came."""
    if answer.load is None:
        return 0
    until_ns = answer.input.begin_ns if answer.input else answer.result_ns
    begin_ns = max(answer.load.begin_ns, answer.arrival_ns)
    return max(min(answer.load.end_ns, until_ns) - begin_ns, 0)


def _network_ns(answer: Answer) -> int:
    """Both ways, but for what the way there shares with the load that the request waited for."""
    sent_ns = answer.sent_ns
    if answer.load is not None:
        sent_ns = max(sent_ns, min(answer.load.end_ns, answer.received_ns))
    last_end_ns = max(
        (step.end_ns for step in (answer.input, answer.exec, answer.output) if step),
        default=answer.result_ns,
    )
    return max(answer.received_ns - sent_ns, 0) + max(answer.result_ns - last_end_ns, 0)


def _duration_ns(step: StepTime | None) -> int:
    return max(step.end_ns - step.begin_ns, 0) if step else 0
