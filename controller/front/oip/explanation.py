"""Says where the time of an answered request went: the response parameters that `explain` asks for."""

from __future__ import annotations

from clockwright.units import NS_PER_US
from controller.port import Course, Parameters


def explain(course: Course, *, slo_ns: int, slo_source: str) -> Parameters:
    """Say where the time of an answer went.

    Args:
        course: the answer's.
        slo_ns: its SLO.
        slo_source: where the SLO came from, as `request_slo_ns` names it.

    Returns:
        `measured_us` (the latency at the front end) and its parts: `load_us` (waiting for weights, cold
        starts only), `input_us`, `exec_us`, `output_us` (the steps on the worker), `network_us` (between
        controller and worker, both ways) and `queue_us` (all other waiting); `predicted_us` (the latency
        predicted when the batch was sent) and `predicted_exec_us`; `slo_us`, `slo_source`,
        `batch_size`, `worker`, `cold`; `request_id`, by which `clockwright explain` knows it; where the client
        asked for certainty, `decided_us`: when the request was promised, or sent, since its arrival.
    """
    explained: Parameters = {
        "queue_us": course.queue_ns // NS_PER_US,
        "load_us": course.load_ns // NS_PER_US,
        "input_us": course.input_ns // NS_PER_US,
        "exec_us": course.exec_ns // NS_PER_US,
        "output_us": course.output_ns // NS_PER_US,
        "network_us": course.network_ns // NS_PER_US,
        "measured_us": course.latency_ns // NS_PER_US,
        "predicted_us": course.predicted_ns // NS_PER_US,
        "predicted_exec_us": course.predicted_exec_ns // NS_PER_US,
        "slo_us": slo_ns // NS_PER_US,
        "slo_source": slo_source,
        "batch_size": course.batch_size,
        "worker": course.worker,
        "cold": course.cold,
        "request_id": course.request_id,
    }
    if course.decided_ns:
        explained["decided_us"] = course.decided_ns // NS_PER_US
    return explained
