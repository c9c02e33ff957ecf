"""Clients of a case file that ask when a trace says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S
from experiments.simulator.tables import Table, integer, number, one_of
from traces.arrivals import EvenReplay, Ints, Recorded, Slice, Source, TraceReplay, Workload
from traces.azure import read_azure_2019, read_azure_2021
from traces.minutes import MinuteTrace
from traces.synthetic import DAY_MINUTES, generate

_NS_PER_MINUTE = 60 * NS_PER_S

_MAPPED = {"assignment", "scale", "rate_rps", "tenants"}

#: Keys that each kind of clients needs, and keys that it may have.
TRACE_KINDS: dict[str, tuple[set[str], set[str]]] = {
    "azure2019": ({"path"}, {"begin_minute", "timers", *_MAPPED}),
    "azure2021": ({"path"}, _MAPPED),
    "synthetic": ({"num_functions"}, {"begin_minute", "timers", *_MAPPED}),
}


def trace_sources(
    kind: str,
    table: Table,
    where: str,
    *,
    folder: Path,
    models: Sequence[int],
    slo_ns: int,
    duration_ns: int,
    seed: int,
    tenants: dict[str, int],
    tenant: str,
) -> list[Source]:
    """Make the sources of one table of clients.

    Args:
        kind: one of `TRACE_KINDS`.
        table: its keys are legal.
        where: the table's place, for errors.
        folder: paths are relative to this one.
        models: positions of the models to which the trace's functions are mapped.
        slo_ns: the SLO of every request.
        duration_ns: no request comes at or after this time.
        seed: seed of all that is drawn.
        tenants: positions of the workload's tenants; new names are added.
        tenant: whose all requests are, unless the table names the trace's owners.

    Raises:
        ConfigError: a value is wrong, or the trace is shorter than the run.
        TraceFormatError: the trace is not what its reader expects.
    """
    if not slo_ns:
        raise ConfigError(f"{where}: slo_ms is 0, expected more than 0")
    scale = _scale(table, where)
    striped = (
        one_of(
            table.get("assignment", "contiguous"),
            ("contiguous", "striped"),
            f"{where}: assignment",
        )
        == "striped"
    )
    names = [str(index) for index in models]
    owners = ("app",) if kind == "azure2021" else ("owner", "app")
    owned = one_of(table["tenants"], owners, f"{where}: tenants") if "tenants" in table else ""
    if kind == "azure2021":
        workload = read_azure_2021(_path(table, where, folder)).workload(
            names, slo_ns=slo_ns, scale=scale or 1.0, striped=striped, seed=seed, apps=bool(owned)
        )
    else:
        timers: Literal["poisson", "even"] = "poisson"
        if one_of(table.get("timers", timers), ("poisson", "even"), f"{where}: timers") == "even":
            timers = "even"
        workload = _minutes(kind, table, where, folder, duration_ns, seed).workload(
            names,
            slo_ns=slo_ns,
            scale=scale or 1.0,
            assignment="striped" if striped else "contiguous",
            timers=timers,
            seed=seed,
            tenants=owned,
        )
    if workload.end_ns < duration_ns:
        raise ConfigError(
            f"{where}: the trace ends after {workload.end_ns / NS_PER_S:g} s, before the case does "
            f"after {duration_ns / NS_PER_S:g} s"
        )
    if scale is None:
        workload = _at_rate(workload, table, where, duration_ns)
    positions = np.asarray(models, np.int64)
    whose = np.array(
        [tenants.setdefault(name or tenant, len(tenants)) for name in workload.tenants], np.int64
    )
    return [
        Slice(source=_renamed(source, positions, whose), from_ns=0, to_ns=duration_ns)
        for source in workload.sources
    ]


def _minutes(
    kind: str, table: Table, where: str, folder: Path, duration_ns: int, seed: int
) -> MinuteTrace:
    """The trace from its first minute that is wanted on."""
    num_minutes = -(-duration_ns // _NS_PER_MINUTE)
    if kind == "synthetic":
        begin = integer(table, "begin_minute", where, 0)
        if begin >= DAY_MINUTES:
            raise ConfigError(f"{where}: begin_minute is {begin}, expected 0 to {DAY_MINUTES - 1}")
        functions = integer(table, "num_functions", where, 0)
        if not functions:
            raise ConfigError(f"{where}: num_functions is 0, expected 1 or more")
        return generate(functions, num_minutes=num_minutes, first_minute=begin, seed=seed)
    trace = read_azure_2019(_path(table, where, folder))
    first, last = trace.first_minute, trace.first_minute + trace.num_minutes
    begin = integer(table, "begin_minute", where, first)
    if not first <= begin < last:
        raise ConfigError(f"{where}: begin_minute is {begin}, the trace has {first} to {last - 1}")
    return trace.between(begin, last)


def _scale(table: Table, where: str) -> float | None:
    """Requests per invocation; None: as many as `rate_rps` asks for."""
    if "rate_rps" in table:
        if "scale" in table:
            raise ConfigError(f"{where}: expected `scale` or `rate_rps`, not both")
        return None
    scale = number(table, "scale", where) if "scale" in table else 1.0
    if not 0 < scale < 1e9:  # false for NaN too
        raise ConfigError(f"{where}: scale is {scale}, expected more than 0")
    return scale


def _at_rate(workload: Workload, table: Table, where: str, duration_ns: int) -> Workload:
    """Scale it so that it has a mean rate over the case."""
    rate_rps = number(table, "rate_rps", where)
    if not 0 < rate_rps < 1e9:
        raise ConfigError(f"{where}: rate_rps is {rate_rps}, expected more than 0")
    expected = workload.expected_requests(0, duration_ns)
    if not expected:
        raise ConfigError(f"{where}: nothing is invoked in this part of the trace")
    return workload.scaled(rate_rps * duration_ns / NS_PER_S / expected)


def _renamed(source: Source, models: Ints, tenants: Ints) -> Source:
    """Let a source ask the models that the table chose, for the tenants that it names."""
    assert isinstance(source, TraceReplay | EvenReplay | Recorded)
    who = source.tenants if len(source.tenants) else np.zeros(len(source.models), np.int64)
    return replace(source, models=models[source.models], tenants=tenants[np.asarray(who, np.int64)])


def _path(table: Table, where: str, folder: Path) -> Path:
    path = table["path"]
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{where}: path is {path!r}, expected that of a trace")
    return folder / path
