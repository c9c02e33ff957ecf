"""Models as simulated workers know them. `make native` leaves this module as it is, like what it derives from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clockwright.units import NS_PER_S
from experiments.simulator.case import Cluster, WorkerKind, pages_of
from worker.core.io_pool import aligned
from worker.core.model import LoadedModel


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedModel(LoadedModel):
    """A model and the times it takes, in ns."""

    load_ns: int
    exec_ns: dict[int, int]
    #: Measured ones, of which an EXEC takes one at random; of batch sizes without any, `exec_ns` holds.
    exec_samples_ns: Mapping[int, tuple[int, ...]]
    #: Copy times, by number of rows.
    input_ns: tuple[int, ...]
    output_ns: tuple[int, ...]
    #: Bytes of one row.
    input_bytes: int
    output_bytes: int


def simulated(cluster: Cluster, kind: WorkerKind) -> list[SimulatedModel]:
    """Models as the core of every worker of a kind knows them. Shared between workers, never changed."""
    costs = [(model.model_id, kind.row_of(model.row)) for model in cluster.models]
    held = [(model_id, row) for model_id, row in costs if row is not None]
    copy_ns = {
        name: (
            _copy_times_ns(cluster, row.input_bytes, max(row.exec_ns)),
            _copy_times_ns(cluster, row.output_bytes, max(row.exec_ns)),
        )
        for name, row in {row.name: row for _, row in held}.items()
    }
    return [
        SimulatedModel(
            model_id=model_id,
            num_pages=pages_of(row),
            io_bytes={
                size: aligned(row.input_bytes * size) + aligned(row.output_bytes * size)
                for size in row.exec_ns
            },
            load_ns=row.load_ns,
            exec_ns=row.exec_ns,
            exec_samples_ns=cluster.exec_samples_ns.get(row.name, {}),
            input_ns=copy_ns[row.name][0],
            output_ns=copy_ns[row.name][1],
            input_bytes=row.input_bytes,
            output_bytes=row.output_bytes,
        )
        for model_id, row in held
    ]


def _copy_times_ns(cluster: Cluster, row_bytes: int, largest_batch: int) -> tuple[int, ...]:
    """How long it takes to copy 0, 1, ... rows."""
    return tuple(
        cluster.copy_overhead_ns + rows * row_bytes * NS_PER_S // cluster.copy_bytes_per_s
        for rows in range(largest_batch + 1)
    )
