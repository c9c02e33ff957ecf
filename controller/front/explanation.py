"""Says where the time of an answered request went: the response parameters that `explain` asks for."""

from __future__ import annotations

from dataclasses import dataclass

from clockwright.actions import Infer, StepTime
from clockwright.units import NS_PER_US
from controller.runtime import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The latency of an answered request in parts that add up to it, in ns."""

    #: All waiting that is none of the others.
    queue_ns: int
    #: Waiting for weights, cold starts only.
    load_ns: int
    #: The steps on the worker.
    input_ns: int
    exec_ns: int
    output_ns: int
    #: Between controller and worker, both ways.
    network_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """When an answered request was where, on the controller's clock."""

    arrival_ns: int
    #: When its batch was sent, the worker had it, and the controller had the result.
    sent_ns: int
    received_ns: int
    result_ns: int
    departure_ns: int
    #: The load that a cold request waited for.
    load: StepTime | None
    input: StepTime | None
    exec: StepTime | None
    output: StepTime | None


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
        `batch_size`, `worker`, `cold`; `request_id`, by which `clockwright explain` knows it.
    """
    request, command, finished = answer.request, answer.command, answer.finished
    result, infer = finished.result, finished.sent.command.action
    assert isinstance(infer, Infer)
    spent = where_it_went(
        Journey(
            arrival_ns=request.arrival_ns,
            sent_ns=finished.sent.sent_ns,
            received_ns=result.received_ns,
            result_ns=finished.result_ns,
            departure_ns=answer.departure_ns,
            load=finished.load if command.cold else None,
            input=result.input,
            exec=result.exec,
            output=result.output,
        )
    )
    return {
        "queue_us": spent.queue_ns // NS_PER_US,
        "load_us": spent.load_ns // NS_PER_US,
        "input_us": spent.input_ns // NS_PER_US,
        "exec_us": spent.exec_ns // NS_PER_US,
        "output_us": spent.output_ns // NS_PER_US,
        "network_us": spent.network_ns // NS_PER_US,
        "measured_us": (answer.departure_ns - request.arrival_ns) // NS_PER_US,
        "predicted_us": (command.expected_departure_ns - request.arrival_ns) // NS_PER_US,
        "predicted_exec_us": infer.expected_duration_ns // NS_PER_US,
        "slo_us": request.slo_ns // NS_PER_US,
        "slo_source": slo_source,
        "batch_size": command.batch_size,
        "worker": command.worker_id,
        "cold": command.cold,
        "request_id": request.request_id,
    }


def where_it_went(way: Journey) -> Spent:
    """Split a latency into parts that add up to it."""
    input_ns, exec_ns, output_ns = map(_duration_ns, (way.input, way.exec, way.output))
    # The clock offset may be a little wrong. It must not make the parts add up to more than the whole.
    left_ns = max(way.departure_ns - way.arrival_ns - input_ns - exec_ns - output_ns, 0)
    load_ns = min(_load_wait_ns(way), left_ns)
    left_ns -= load_ns
    network_ns = min(_network_ns(way), left_ns)
    return Spent(
        queue_ns=left_ns - network_ns,
        load_ns=load_ns,
        input_ns=input_ns,
        exec_ns=exec_ns,
        output_ns=output_ns,
        network_ns=network_ns,
    )


def _load_wait_ns(way: Journey) -> int:
    """Time of the load that lies inside the request's wait. The load may be older than the request."""
    load = way.load
    if load is None:
        return 0
    until_ns = way.input.begin_ns if way.input else way.result_ns
    begin_ns = max(load.begin_ns, way.arrival_ns)
    return max(min(load.end_ns, until_ns) - begin_ns, 0)


def _network_ns(way: Journey) -> int:
    """Time on the way there and back, without the part of the way there that passed during the load."""
    sent_ns = way.sent_ns
    if way.load is not None:
        sent_ns = max(sent_ns, min(way.load.end_ns, way.received_ns))
    last_end_ns = max(
        (step.end_ns for step in (way.input, way.exec, way.output) if step), default=way.result_ns
    )
    return max(way.received_ns - sent_ns, 0) + max(way.result_ns - last_end_ns, 0)


def _duration_ns(step: StepTime | None) -> int:
    return max(step.end_ns - step.begin_ns, 0) if step else 0
