"""Splits the latency of an answered request into parts that add up to it."""

from __future__ import annotations

from dataclasses import dataclass

from clockwright.wire.actions import StepTime


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


def where_it_went(way: Journey) -> tuple[int, int, int, int, int, int]:
    """Split a latency into parts that add up to it, in ns.

    Returns all waiting that is none of the others; waiting for weights (cold starts only); the steps input, exec and
    output on the worker; and the ways between controller and worker, there and back.
    """
    input_ns, exec_ns, output_ns = map(_duration_ns, (way.input, way.exec, way.output))
    # The clock offset may be a little wrong. It must not make the parts add up to more than the whole.
    left_ns = max(way.departure_ns - way.arrival_ns - input_ns - exec_ns - output_ns, 0)
    load_ns = min(_load_wait_ns(way), left_ns)
    left_ns -= load_ns
    network_ns = min(_network_ns(way), left_ns)
    return left_ns - network_ns, load_ns, input_ns, exec_ns, output_ns, network_ns


def _load_wait_ns(way: Journey) -> int:
    """Time of the load that lies inside the request's wait. The load may be older than the request."""
    load = way.load
    if load is None:
        return 0
    until_ns = way.input.begin_ns if way.input else way.result_ns
    begin_ns = max(load.begin_ns, way.arrival_ns)
    return max(min(load.end_ns, until_ns) - begin_ns, 0)


def _network_ns(way: Journey) -> int:
    """Time in the network in both directions, without the part that passed during the load."""
    sent_ns = way.sent_ns
    if way.load is not None:
        sent_ns = max(sent_ns, min(way.load.end_ns, way.received_ns))
    last_end_ns = max(
        (step.end_ns for step in (way.input, way.exec, way.output) if step), default=way.result_ns
    )
    return max(way.received_ns - sent_ns, 0) + max(way.result_ns - last_end_ns, 0)


def _duration_ns(step: StepTime | None) -> int:
    return max(step.end_ns - step.begin_ns, 0) if step else 0
