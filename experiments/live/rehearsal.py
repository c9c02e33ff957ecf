"""Plays a case on a server that is started for it, and simulates it with what was measured of that server before.

Runs of their own measure what the simulator is told (`rehearsals`): the time there and back, and where a real device
runs the models, the duration of each network's LOAD and EXEC. They are never the runs that are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from clockwright.units import NS_PER_MS
from experiments.live.calibration import Calibration, calibrate, calibration_workloads, measured_row
from experiments.live.live_run import LiveRun, Served
from experiments.simulator import Case, CpuCosts
from experiments.study.sides import RunRows, Side
from modelzoo.profile import Noise, ProfileRow
from traces.arrivals import Workload


def rehearsals(served: Served, seconds: float, mix: Workload | None = None) -> list[Workload]:
    """Workloads that have to be played so that a case can be simulated.

    Args:
        served: the case.
        seconds: length of each of the first two.
        mix: the case's mix with other arrivals, for a real device: a network that runs again and again finds
            its weights in caches; among others it does not.
    """
    workloads = calibration_workloads(served.case.cluster.models[0].model_id, seconds)
    return workloads if mix is None else [*workloads, mix]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCase:
    """A case as the simulator is told it, from measurements."""

    case: Case
    calibration: Calibration

    @property
    def about(self) -> dict[str, Any]:
        """The measurements in words and numbers, for people."""
        return {
            "calibration": self.calibration.describe(),
            "exec_ms": {
                name: {
                    size: {f"p{at}": np.percentile(of_size, at) / NS_PER_MS for at in (5, 50, 95)}
                    for size, of_size in samples_ns.items()
                }
                for name, samples_ns in self.case.cluster.exec_samples_ns.items()
            },
            "rows": {model.row.name: asdict(model.row) for model in self.case.cluster.models},
        }


def measured(
    served: Served,
    runs: Sequence[LiveRun],
    reported: Mapping[str, ProfileRow],
    costs: CpuCosts | None = None,
) -> MeasuredCase:
    """Take the simulator's parameters from what was played before anything that counts.

    Args:
        served: what is to be simulated.
        runs: those of its `rehearsals`.
        reported: by model, the costs that the worker reported.
        costs: what the controller takes, which is then no delay of links any more.

    Raises:
        ValueError: too little was answered to tell.
    """
    alone, crowd, *mix = (run.rows for run in runs)
    costs = costs or CpuCosts()
    calibration = calibrate(alone, crowd, *mix)
    network = calibration.network
    down_ns = costs.front_ns + costs.request_ns + costs.action_ns
    cluster = replace(
        served.case.cluster,
        # Calibrated durations contain the copies, so a copy takes no time of its own.
        copy_bytes_per_s=1 << 60,
        start_delay_ns=calibration.start_delay_ns,
    )
    if served.device:
        ids: dict[str, set[str]] = {}
        for model in cluster.models:
            ids.setdefault(model.row.name, set()).add(model.model_id)
        told = {name: _told(name, its, [*mix, crowd, alone], reported) for name, its in ids.items()}
        cluster = replace(
            cluster,
            models=tuple(replace(model, row=told[model.row.name][0]) for model in cluster.models),
            exec_samples_ns={name: samples_ns for name, (_, samples_ns) in told.items()},
            # Whatever else the device does takes what it took in the middle.
            noise=Noise(),
        )
    case = replace(
        served.case,
        cluster=cluster,
        costs=costs,
        network=replace(
            network,
            down_samples_ns=tuple(max(0, ns - down_ns) for ns in network.down_samples_ns),
            up_samples_ns=tuple(max(0, ns - costs.result_ns) for ns in network.up_samples_ns),
        ),
    )
    return MeasuredCase(case=case, calibration=calibration)


def _told(
    name: str, ids: Collection[str], runs: Sequence[RunRows], reported: Mapping[str, ProfileRow]
) -> tuple[ProfileRow, dict[int, tuple[int, ...]]]:
    """What a network costs, from the first of the runs that asked it often enough; else as the worker reported."""
    row = replace(reported[min(ids)], name=name)
    for run in runs:
        told, samples_ns = measured_row(row, run.of(ids).actions)
        if samples_ns:
            return told, samples_ns
    return row, {}


def sides(
    live: LiveRun,
    simulated: RunRows | None,
    begin_ns: int,
    end_ns: int,
    model_ids: Collection[str] | None = None,
) -> dict[str, Any]:
    """Sum up a stretch of both, for a point with both sides.

    Args:
        live: the run that was played.
        simulated: the same workload on virtual time; None: it was not.
        begin_ns: of the stretch, since the workload's time 0.
        end_ns: its end.
        model_ids: whose requests and actions count; None: all.
    """

    def side(rows: RunRows) -> Side:
        return (rows if model_ids is None else rows.of(model_ids)).side(begin_ns, end_ns)

    return {
        "live": side(live.rows),
        "simulated": None if simulated is None else side(simulated),
        "client_late_p99_ms": live.report.lateness_ns_p99 / NS_PER_MS,
        "num_without_row": live.num_without_row,
    }
