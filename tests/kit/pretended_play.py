"""Simulated runs in the clothes of live ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, PAGE_BYTES
from experiments.live.live_run import LiveRun, Played, Served
from experiments.simulator import Case, Network
from experiments.study.sides import RunRows, Side, simulated
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Workload
from traces.client_record import ClientRecord

MS, US = NS_PER_MS, NS_PER_US

ROW = ProfileRow(
    name="net",
    weights_bytes=PAGE_BYTES,
    load_ns=2 * MS,
    exec_ns={1: 5 * MS, 2: 6 * MS, 4: 8 * MS},
)
# The workload's time 0 on the clock of the telemetry.
BEGIN_NS = 77 * NS_PER_S


def pretend_live(given: Case) -> LiveRun:
    """A simulated run in the clothes of a live one."""
    rows = simulated(given)
    for request in rows.requests:
        request.arrival_ns += BEGIN_NS
        request.departure_ns += BEGIN_NS
    for action in rows.actions:
        for name in ("sent_ns", "received_ns", "result_ns"):
            setattr(action, name, getattr(action, name) + BEGIN_NS)
        for step in (action.load, action.input, action.exec, action.output):
            if step is not None:
                step.begin_ns += BEGIN_NS
                step.end_ns += BEGIN_NS
    sent_ns = np.zeros(len(rows.requests), np.int64)
    report = ClientRecord(
        models=("net",), outcomes=("OK",), model=sent_ns, outcome=sent_ns, is_open=sent_ns == 0,
        slo_ns=sent_ns, due_ns=sent_ns, sent_ns=sent_ns, departure_ns=sent_ns,
        begin_ns=BEGIN_NS,
    )  # fmt: skip
    return LiveRun(report=report, rows=RunRows(rows.requests, rows.actions, BEGIN_NS))


def pretend_play(workloads: Sequence[Workload], served: Served) -> Played:
    """Simulate what was to be played, with delays of its own; a real device takes `ROW` for every model."""
    cluster = served.case.cluster
    if served.device:
        models = tuple(
            replace(model, row=replace(ROW, name=model.row.name)) for model in cluster.models
        )
        cluster = replace(cluster, models=models)
    case = replace(
        served.case,
        cluster=replace(cluster, start_delay_ns=30 * US, noise=Noise(exec_sigma=0.01)),
        network=Network(delay_ns=400 * US, jitter_ns=50 * US),
    )
    runs = [
        pretend_live(replace(case, workload=workload, duration_ns=workload.end_ns))
        for workload in workloads
    ]
    rows = {
        str(model.model_id): replace(model.row, name=model.model_id) for model in cluster.models
    }
    return Played(runs=runs, rows=rows, policy=case.scheduler.policy)


def pretended_side(goodput_rps: float) -> Side:
    """A side on which so many of 100 requests per second were answered in time, the others late."""
    return Side(
        offered=1000,
        offered_rps=100.0,
        goodput_rps=goodput_rps,
        goodput_pct=goodput_rps,
        late_per_million=10 * (100 - goodput_rps),
        refused_per_million=0.0,
        p50_ms=1000 / goodput_rps,
        p99_ms=90.0,
        p9999_ms=98.0,
        max_ms=99.0,
    )
