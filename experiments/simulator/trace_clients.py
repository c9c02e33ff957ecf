"""Clients of a case file that ask when a trace says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S
from experiments.simulator.tables import one_of
from traces.arrivals import EvenReplay, Ints, Recorded, Slice, Source, TraceReplay
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
    values: Mapping[str, Any],
    where: str,
    *,
    folder: Path,
    models: Sequence[int],
    duration_ns: int,
    seed: int,
    tenants: dict[str, int],
    tenant: str,
) -> list[Source]:
    """Make the sources of one table of clients.

    Args:
        kind: one of `TRACE_KINDS`.
        values: what the table says, of legal types.
        where: the table's place, for errors.
        folder: paths are relative to this one.
        models: positions of the models to which the trace's functions are mapped.
        duration_ns: no request comes at or after this time.
        seed: seed of all that is drawn.
        tenants: positions of the workload's tenants; new names are added.
        tenant: whose all requests are, unless the table names the trace's owners.

    Raises:
        ConfigError: a value is wrong, or the trace is shorter than the run.
        TraceFormatError: the trace is not what its reader expects.
    """
    if not values["slo_ns"]:
        raise ConfigError(f"{where}: slo_ms is 0, expected more than 0")
    if {"scale", "rate_rps"} <= values.keys():
        raise ConfigError(f"{where}: expected `scale` or `rate_rps`, not both")
    for name in ("scale", "rate_rps"):
        if name in values and not 0 < values[name] < 1e9:  # true for NaN too
            raise ConfigError(f"{where}: {name} is {values[name]}, expected more than 0")
    names = [str(index) for index in models]
    owners = ("app",) if kind == "azure2021" else ("owner", "app")
    owned = one_of(values["tenants"], owners, f"{where}.tenants") if "tenants" in values else ""
    assignment = values.get("assignment", "contiguous")
    common = {"slo_ns": values["slo_ns"], "scale": values.get("scale", 1.0), "seed": seed}
    if kind == "azure2021":
        workload = read_azure_2021(folder / values["path"]).workload(
            names, striped=assignment == "striped", apps=bool(owned), **common
        )
    else:
        workload = _minutes(values, where, folder, duration_ns, seed).workload(
            names,
            assignment=assignment,
            timers=values.get("timers", "poisson"),
            tenants=owned,
            **common,
        )
    if workload.end_ns < duration_ns:
        raise ConfigError(
            f"{where}: the trace ends after {workload.end_ns / NS_PER_S:g} s, before the case does "
            f"after {duration_ns / NS_PER_S:g} s"
        )
    if "rate_rps" in values:
        expected = workload.expected_requests(0, duration_ns)
        if not expected:
            raise ConfigError(f"{where}: nothing is invoked in this part of the trace")
        workload = workload.scaled(values["rate_rps"] * duration_ns / NS_PER_S / expected)
    positions = np.asarray(models, np.int64)
    whose = np.array(
        [tenants.setdefault(name or tenant, len(tenants)) for name in workload.tenants], np.int64
    )
    return [
        Slice(source=_renamed(source, positions, whose), from_ns=0, to_ns=duration_ns)
        for source in workload.sources
    ]


def _minutes(
    values: Mapping[str, Any], where: str, folder: Path, duration_ns: int, seed: int
) -> MinuteTrace:
    """The trace from its first minute that is wanted on."""
    if "path" in values:
        trace = read_azure_2019(folder / values["path"])
        first, last = trace.first_minute, trace.first_minute + trace.num_minutes
    else:
        first, last = 0, DAY_MINUTES
    begin = values.get("begin_minute", first)
    if not first <= begin < last:
        raise ConfigError(f"{where}: begin_minute is {begin}, expected {first} to {last - 1}")
    if "path" in values:
        return trace.between(begin, last)
    functions = values["num_functions"]
    if functions < 1:
        raise ConfigError(f"{where}: num_functions is {functions}, expected 1 or more")
    num_minutes = -(-duration_ns // _NS_PER_MINUTE)
    return generate(functions, num_minutes=num_minutes, first_minute=begin, seed=seed)


def _renamed(source: Source, models: Ints, tenants: Ints) -> Source:
    """Let a source ask the models that the table chose, for the tenants that it names."""
    assert isinstance(source, TraceReplay | EvenReplay | Recorded)
    who = source.tenants if len(source.tenants) else np.zeros(len(source.models), np.int64)
    return replace(source, models=models[source.models], tenants=tenants[np.asarray(who, np.int64)])
