"""Clients of a case file that ask when a trace says so."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.telemetry.files import REQUEST_COLUMNS
from experiments.telemetry.tables import TelemetryTable
from traces.arrivals import EvenReplay, Ints, Recorded, Slice, Source, TraceReplay, Workload
from traces.arrivals_file import read_workload, recorded
from traces.azure import read_azure_2019, read_azure_2021
from traces.minutes import MinuteTrace
from traces.synthetic import DAY_MINUTES, generate

_NS_PER_MINUTE = 60 * NS_PER_S

#: A time in the unit that its name ends with.
Span: TypeAlias = Annotated[float, Meta(ge=0, lt=1e9)]
_Rate: TypeAlias = Annotated[float, Meta(gt=0, lt=1e9)]


class ClientTable(Struct, tag_field="kind", kw_only=True):
    """What a table of `[[clients]]` of any kind has."""

    slo_ms: Span
    #: The row whose copies they ask for; None: all models.
    row: str | None = None
    tenant: str = ""


class _Mapped(ClientTable, kw_only=True):
    """A trace whose functions are mapped to models."""

    assignment: Literal["contiguous", "striped"] = "contiguous"
    scale: _Rate | None = None
    rate_rps: _Rate | None = None


class Azure2021(_Mapped, tag="azure2021", kw_only=True):
    """Single invocations."""

    path: str
    tenants: Literal["app"] | None = None


class _Minutes(_Mapped, kw_only=True):
    """Invocations per minute."""

    begin_minute: int | None = None
    timers: Literal["poisson", "even"] = "poisson"
    tenants: Literal["owner", "app"] | None = None


class Azure2019(_Minutes, tag="azure2019", kw_only=True):
    """Microsoft's file of a day."""

    path: str


class Synthetic(_Minutes, tag="synthetic", kw_only=True):
    """A generated day."""

    num_functions: Annotated[int, Meta(ge=1)]


class RecordedRequests(ClientTable, tag="recorded", kw_only=True):
    """Single requests, whose models are named; or one of Microsoft's files."""

    path: str
    slo_ms: Span = 100.0
    hours: _Rate | None = None
    scale: _Rate = 1.0


def recorded_workload(
    clients: RecordedRequests,
    where: str,
    *,
    folder: Path,
    seed: int,
    names: Callable[[], Sequence[str]],
    pipelines: Container[str] = (),
) -> Workload:
    """What was recorded, from time 0 on, by the names that it has.

    Args:
        clients: the table.
        where: its place, for errors.
        folder: paths are relative to this one.
        seed: seed of all that is drawn.
        names: gives the models to which the functions of Azure's traces are mapped.
        pipelines: names whose requests a server's telemetry has as those of their models, too.

    Raises:
        ConfigError: a value is wrong, or nothing was recorded.
        TraceFormatError: the file is not what it should be.
    """
    if clients.row or clients.tenant:
        raise ConfigError(f"{where}: expected no `row` and no `tenant`, which the records name")
    path, slo_ns = folder / clients.path, round(clients.slo_ms * NS_PER_MS)
    found: Workload | None
    if path.is_dir():
        with ExitStack() as stack:
            table = TelemetryTable(path, "requests", REQUEST_COLUMNS, stack)
            # The simulator's requests have one row each: several rows come as several requests.
            requests = (
                (
                    table.number(row, "arrival_ns"),
                    # A model that is loaded again is the same one to its clients.
                    row["model_id"].partition("@")[0],
                    row["tenant"],
                    table.number(row, "slo_ns"),
                )
                for row in table
                if row["model_id"].partition("@")[0] not in pipelines
                for _ in range(table.number(row, "rows"))
            )
            found = recorded(requests, scale=clients.scale, seed=seed)
    else:
        found = read_workload(path, (), slo_ns=slo_ns, scale=clients.scale, seed=seed, ask=names)
    if found is None:
        raise ConfigError(f"{where}: found no request in the last run of {path}, expected some")
    last_ns = round((clients.hours or 0) * 60 * _NS_PER_MINUTE)
    if 0 < last_ns < found.end_ns:
        found = found.sliced(found.end_ns - last_ns, found.end_ns)
    return found


def trace_sources(
    clients: Azure2019 | Azure2021 | Synthetic,
    where: str,
    *,
    folder: Path,
    models: Sequence[int],
    duration_ns: int,
    seed: int,
    tenants: dict[str, int],
) -> list[Source]:
    """Make the sources of one table of clients.

    Args:
        clients: the table.
        where: its place, for errors.
        folder: paths are relative to this one.
        models: positions of the models to which the trace's functions are mapped.
        duration_ns: no request comes at or after this time.
        seed: seed of all that is drawn.
        tenants: positions of the workload's tenants; new names are added.

    Raises:
        ConfigError: a value is wrong, or the trace is shorter than the run.
        TraceFormatError: the trace is not what its reader expects.
    """
    if not clients.slo_ms:
        raise ConfigError(f"{where}: slo_ms is 0, expected more than 0")
    if clients.scale and clients.rate_rps:
        raise ConfigError(f"{where}: expected `scale` or `rate_rps`, not both")
    names = [str(index) for index in models]
    slo_ns = round(clients.slo_ms * NS_PER_MS)
    common: dict[str, Any] = {"slo_ns": slo_ns, "scale": clients.scale or 1.0, "seed": seed}
    if isinstance(clients, Azure2021):
        striped, apps = clients.assignment == "striped", bool(clients.tenants)
        trace = read_azure_2021(folder / clients.path)
        workload = trace.workload(names, striped=striped, apps=apps, **common)
    else:
        workload = _minutes(clients, where, folder, duration_ns, seed).workload(
            names,
            assignment=clients.assignment,
            timers=clients.timers,
            tenants=clients.tenants or "",
            **common,
        )
    if workload.end_ns < duration_ns:
        raise ConfigError(
            f"{where}: the trace ends after {workload.end_ns / NS_PER_S:g} s, before the case does "
            f"after {duration_ns / NS_PER_S:g} s"
        )
    if clients.rate_rps:
        expected = workload.expected_requests(0, duration_ns)
        if not expected:
            raise ConfigError(f"{where}: nothing is invoked in this part of the trace")
        workload = workload.scaled(clients.rate_rps * duration_ns / NS_PER_S / expected)
    positions = np.asarray(models, np.int64)
    whose = np.array(
        [tenants.setdefault(name or clients.tenant, len(tenants)) for name in workload.tenants],
        np.int64,
    )
    return [
        Slice(source=_renamed(source, positions, whose), from_ns=0, to_ns=duration_ns)
        for source in workload.sources
    ]


def _minutes(
    clients: Azure2019 | Synthetic, where: str, folder: Path, duration_ns: int, seed: int
) -> MinuteTrace:
    """The trace from its first minute that is wanted on."""
    trace, first, last = None, 0, DAY_MINUTES
    if isinstance(clients, Azure2019):
        trace = read_azure_2019(folder / clients.path)
        first, last = trace.first_minute, trace.first_minute + trace.num_minutes
    begin = first if clients.begin_minute is None else clients.begin_minute
    if not first <= begin < last:
        raise ConfigError(f"{where}: begin_minute is {begin}, expected {first} to {last - 1}")
    if trace is not None:
        return trace.between(begin, last)
    assert isinstance(clients, Synthetic)
    num_minutes = -(-duration_ns // _NS_PER_MINUTE)
    return generate(clients.num_functions, num_minutes=num_minutes, first_minute=begin, seed=seed)


def _renamed(source: Source, models: Ints, tenants: Ints) -> Source:
    """Let a source ask the models that the table chose, for the tenants that it names."""
    assert isinstance(source, TraceReplay | EvenReplay | Recorded)
    who = source.tenants if len(source.tenants) else np.zeros(len(source.models), np.int64)
    return replace(source, models=models[source.models], tenants=tenants[np.asarray(who, np.int64)])
