"""Arrivals from a file: one row per request, or one of Microsoft's published traces.

A file of arrivals has a header and at least two columns. The first line says which kind a file is:

- `time_s`, `due_ns` or `arrival_ns`: when the request is due. The earliest becomes time 0.
- `model_id`: the model's name.
- `slo_ms` or `slo_ns`: its SLO; without them all requests have the same.
- `tenant`: its tenant.

Other columns are passed over, so what `clockwright load --requests` writes can be played again, and so can the
`requests.csv` of a server or of a simulation.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S, SLO_NS_MAX, TIME_NS_MAX
from traces.arrivals import Recorded, Workload
from traces.azure import read_azure_2019, read_azure_2021
from traces.trace_lines import format_error, lines_of

_TIMES = {"time_s": NS_PER_S, "due_ns": 1, "arrival_ns": 1}
_SLOS = {"slo_ms": NS_PER_MS, "slo_ns": 1}


def read_workload(
    path: Path,
    models: Sequence[str],
    *,
    slo_ns: int,
    scale: float = 1.0,
    seed: int = 0,
    ask: Callable[[], Sequence[str]] = tuple,
) -> Workload:
    """Read a trace of any known format.

    Args:
        path: the file.
        models: receive the requests for invocations of Azure's functions; empty: those that `ask` returns.
        slo_ns: SLO of requests that have none of their own.
        scale: requests per arrival.
        seed: seed of all that is random.
        ask: returns the names of all models.

    Raises:
        TraceFormatError: the file is not of its form; says where and what was expected.
        ConfigError: it cannot be opened, or there are models where the file names them.
    """
    header = [name.strip() for name in next(lines_of(path), "").split(",")]
    if "model_id" in header:
        if models:
            raise ConfigError(f"trace {path} names its models, expected no others")
        return read_arrivals(path, slo_ns=slo_ns, scale=scale, seed=seed)
    names = models or ask()
    if "HashFunction" in header:
        return read_azure_2019(path).workload(names, slo_ns=slo_ns, scale=scale, seed=seed)
    if "end_timestamp" in header:
        return read_azure_2021(path).workload(names, slo_ns=slo_ns, scale=scale, seed=seed)
    raise format_error(
        path, 1, "expected a column model_id, or the columns of Azure's traces of 2019 or 2021"
    )


def read_arrivals(path: Path, *, slo_ns: int, scale: float = 1.0, seed: int = 0) -> Workload:
    """Read a file with a row per request; as `read_workload`."""
    rows = _rows_of(path)
    header = [name.strip() for name in next(rows, [])]
    time_column, slo_column = _one_of(path, header, _TIMES), _one_of(path, header, _SLOS)
    if time_column is None or "model_id" not in header:
        raise format_error(
            path, 1, f"expected the columns {' or '.join(_TIMES)}, and model_id; found {header}"
        )

    def requests() -> Iterator[tuple[int, str, str, int]]:
        for number, cells in enumerate(rows, 2):
            if len(cells) != len(header):
                raise format_error(
                    path, number, f"found {len(cells)} cells, expected {len(header)}"
                )
            cell = dict(zip(header, cells, strict=True))
            own_ns = slo_ns
            if slo_column is not None and cell[slo_column]:
                own_ns = _whole(path, number, cell, slo_column, _SLOS)
                if not 0 < own_ns <= SLO_NS_MAX:
                    most = SLO_NS_MAX // _SLOS[slo_column]
                    raise format_error(
                        path,
                        number,
                        f"{slo_column} is {cell[slo_column]}, expected more than 0 and at most {most}",
                    )
            if not cell["model_id"]:
                raise format_error(path, number, "model_id is empty, expected a model's name")
            due_ns = _whole(path, number, cell, time_column, _TIMES)
            yield due_ns, cell["model_id"], cell.get("tenant", ""), own_ns

    workload = recorded(requests(), scale=scale, seed=seed)
    if workload is None:
        raise format_error(path, 2, "the file has a header and no requests")
    return workload


def recorded(
    requests: Iterable[tuple[int, str, str, int]], *, scale: float = 1.0, seed: int = 0
) -> Workload | None:
    """Make a workload of single requests; None if no request is given.

    Args:
        requests: when each was due in ns, the names of its model and its tenant, and its SLO in ns.
        scale: requests per request.
        seed: seed of all that is random.
    """
    models: dict[str, int] = {}
    tenants: dict[str, int] = {"": 0}
    # There may be millions.
    columns = tuple(array("q") for _ in range(4))
    for due_ns, model_id, whose, own_ns in requests:
        place = models.setdefault(model_id, len(models))
        cells = (due_ns, place, tenants.setdefault(whose, len(tenants)), own_ns)
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    if not columns[0]:
        return None
    times_ns, model, tenant, slos_ns = (np.array(column, np.int64) for column in columns)
    times_ns -= times_ns.min()
    sources = [
        Recorded(
            times_ns=times_ns[mine],
            models=model[mine],
            tenants=tenant[mine],
            slo_ns=slo,
            end_ns=int(times_ns.max()) + 1,
            seed=seed + number,
            scale=scale,
        )
        for number, slo in enumerate(np.unique(slos_ns).tolist())
        for mine in [slos_ns == slo]
    ]
    return Workload(models=tuple(models), sources=tuple(sources), tenants=tuple(tenants))


def _rows_of(path: Path) -> Iterator[list[str]]:
    rows = csv.reader(lines_of(path), skipinitialspace=True, strict=True)
    try:
        yield from rows
    except csv.Error as error:
        raise format_error(path, rows.line_num, str(error)) from None


def _one_of(path: Path, header: Sequence[str], known: dict[str, int]) -> str | None:
    found = [name for name in known if name in header]
    if len(found) > 1:
        raise format_error(
            path, 1, f"found the columns {' and '.join(found)}, expected one of them"
        )
    return found[0] if found else None


def _whole(
    path: Path, number: int, cell: dict[str, str], column: str, units: dict[str, int]
) -> int:
    text = cell[column]
    try:
        # A float lacks the digits for a clock's nanoseconds.
        found = int(text) if units[column] == 1 else round(float(text) * units[column])
    except (ValueError, OverflowError):
        raise format_error(path, number, f"{column} is {text!r}, expected a number") from None
    if abs(found) > TIME_NS_MAX:
        most = TIME_NS_MAX // units[column]
        raise format_error(path, number, f"{column} is {text!r}, expected a number, {most} at most")
    return found
