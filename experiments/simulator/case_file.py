"""Reads a case from TOML.

The tables `cluster`, `network`, `costs`, `faults` and `scheduler` take the fields of `Cluster`, `Network`,
`CpuCosts`, `Faults` and `controller.core.SchedulerConfig` by their own names, and leave the rest as it is
there::

    seconds = 20
    seed = 1                        # 0 if left out
    profile = "table1"              # or the path of a profile; this if left out
    costs = "measured"              # or a table: CPU time of the controller; none if left out

    [cluster]
    num_workers = 2                 # left out where there are kinds
    noise = { exec_sigma = 0.01 }

    [[cluster.kinds]]               # unlike workers; all are alike if left out
    name = "card"
    workers = 2                     # so many of them; 1 if left out

    [[cluster.kinds]]
    name = "slower card"
    exec_factor = 2.5               # EXECs take so many times as long; 1 if left out

    [[cluster.kinds]]
    name = "processor"
    workers = 4
    profile = "processor.json"      # what each row costs here; rows that it lacks cannot run here
    num_pages = 4000                # the cluster's if left out

    [[models]]                      # one row of the profile, or its `first` rows, each some times
    row = "resnet50_v1b"
    copies = 15

    [[clients]]                     # `closed`, `poisson`, `fixed`, `bursty`, or a trace
    kind = "closed"                 # 16 clients of each model
    concurrency = 16
    slo_ms = 100
    row = "resnet50_v1b"            # of its copies only; of all models if left out

    [[clients]]
    kind = "poisson"                # all its models together
    tenant = "ann"                  # whose requests they are; nobody's if left out
    rate_rps = 900
    slo_ms = 25
    begin_s = 5
    end_s = 10

    [[clients]]
    kind = "azure2019"              # `azure2021` and `synthetic` likewise: see below
    path = "invocations_per_function_md.anon.d01.csv"   # relative to the case file
    slo_ms = 100
    rate_rps = 2000                 # on average of the case; or `scale`, requests per invocation

    [[faults.lost_workers]]
    worker = 0
    at_ns = 7_000_000_000

    [[faults.wrong_profiles]]       # what workers announce: 6 times what these sizes really take
    exec_factor = 6
    sizes = [8, 16]

`fixed` may have `jitter_ms`, `closed` `start_jitter_ms`, and `bursty` needs `burst_s` and `pause_s`.

Traces: `azure2019` (minutes) and `azure2021` (single invocations) are Microsoft's files, `synthetic` draws
`num_functions` functions like those of 2019. Their functions are mapped to the models by popularity,
neighbours together, or dealt out in turn with `assignment = "striped"`. Those of minutes may begin at
`begin_minute` of the day and have `timers = "even"`, which fire on time instead of at random. With
`tenants = "owner"` (`"app"` in `azure2021`, which knows no owners) each function's requests carry its owner's
name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import SchedulerConfig
from controller.schedulers import kind_of
from experiments.simulator.case import (
    Case,
    Cluster,
    CpuCosts,
    Faults,
    HostedModel,
    Network,
    WorkerKind,
    copies_of,
    slower_kind,
)
from experiments.simulator.costs import measured
from experiments.simulator.tables import Table, build, check_keys, one_of, span_ns, value_of
from experiments.simulator.trace_clients import TRACE_KINDS, trace_sources
from modelzoo.profile import ProfileRow, load_profile
from traces.arrivals import Bursty, ClosedLoop, FixedRate, Poisson, Source, Workload

_SPAN = {"begin_s", "end_s"}
_KINDS: Mapping[str, tuple[set[str], set[str]]] = {
    # By kind: keys that it needs, and keys that it may have, without the keys of all kinds.
    "closed": ({"concurrency"}, {"start_jitter_ms", *_SPAN}),
    "poisson": ({"rate_rps"}, _SPAN),
    "fixed": ({"rate_rps"}, {"jitter_ms", *_SPAN}),
    "bursty": ({"rate_rps", "burst_s", "pause_s"}, _SPAN),
    **TRACE_KINDS,
}
_SOURCES = {"poisson": Poisson, "fixed": FixedRate, "bursty": Bursty}
#: What the keys of clients are that are no times.
_VALUES: Mapping[str, Any] = {
    **dict.fromkeys(("kind", "row", "tenant", "tenants", "path"), str),
    **dict.fromkeys(("concurrency", "num_functions", "begin_minute"), int),
    **dict.fromkeys(("rate_rps", "scale"), float),
    "assignment": Literal["contiguous", "striped"],
    "timers": Literal["poisson", "even"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Models:
    """A table of `[[models]]`."""

    row: str | None = None
    first: int | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A table of `[[cluster.kinds]]`."""

    name: str
    workers: int = 1
    exec_factor: float = 1.0
    profile: str | None = None
    num_pages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """All of a case file."""

    seconds: float
    models: tuple[_Models, ...]
    clients: tuple[Mapping[str, object], ...]
    seed: int = 0
    profile: str = "table1"
    refusal_pause_ns: int | None = None
    costs: object = field(default_factory=dict)
    cluster: Mapping[str, object] = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    faults: Faults = field(default_factory=Faults)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


def read_case(path: Path, *, seconds: float | None = None, seed: int | None = None) -> Case:
    """Read a case.

    Args:
        path: the TOML file.
        seconds: instead of the file's.
        seed: instead of the file's.

    Raises:
        ConfigError: the file cannot be read, or is not a legal case; says where.
        TraceFormatError: a trace that it names is not what its reader expects.
    """
    given = {"seconds": seconds, "seed": seed}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        document |= {key: value for key, value in given.items() if value is not None}
        return _case(build(_File, document, ""), path.parent)
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"case {path}: {error}") from None


def _case(file: _File, folder: Path) -> Case:
    if file.seed < 0:
        raise ConfigError(f"seed is {file.seed}, expected 0 or more")
    duration_ns = span_ns(file.seconds, "seconds", NS_PER_S)
    models = _models(file)
    cluster = dict(file.cluster)
    kinds: dict[str, Any] = {}
    if "kinds" in cluster:
        tables = value_of(cluster.pop("kinds"), tuple[_Kind, ...], "cluster.kinds")
        kinds["kinds"] = _kinds(tables, folder, models)
        cluster.setdefault("num_workers", len(kinds["kinds"]))
    kind_of(file.scheduler.policy)
    return Case(
        workload=_workload(file, folder, models, duration_ns),
        cluster=build(Cluster, cluster, "cluster", models=models, exec_samples_ns={}, **kinds),
        duration_ns=duration_ns,
        network=file.network,
        costs=measured() if file.costs == "measured" else build(CpuCosts, file.costs, "costs"),
        faults=file.faults,
        scheduler=file.scheduler,
        seed=file.seed,
        refusal_pause_ns=file.refusal_pause_ns,
    )


def _models(file: _File) -> tuple[HostedModel, ...]:
    rows = load_profile(file.profile).rows
    models: list[HostedModel] = []
    for number, table in enumerate(file.models):
        where = f"models[{number}]"
        if table.copies < 1:
            raise ConfigError(f"{where}: copies is {table.copies}, expected 1 or more")
        if (table.row is None) == (table.first is None):
            raise ConfigError(f"{where}: expected either `row` or `first`")
        if table.first is None:
            names = [one_of(table.row, rows, f"{where}.row")]
        elif 1 <= table.first <= len(rows):
            names = list(rows)[: table.first]
        else:
            raise ConfigError(f"{where}: first is {table.first}, expected 1 to {len(rows)}")
        for name in names:
            models.extend(copies_of(rows[name], table.copies))
    return tuple(models)


def _kinds(
    tables: tuple[_Kind, ...], folder: Path, models: tuple[HostedModel, ...]
) -> tuple[WorkerKind, ...]:
    """The kind of each worker, in the order of the tables."""
    rows = {model.row.name: model.row for model in models}
    kinds: list[WorkerKind] = []
    for number, table in enumerate(tables):
        if table.workers < 0:
            raise ConfigError(
                f"cluster.kinds[{number}]: workers is {table.workers}, expected 0 or more"
            )
        here: dict[str, ProfileRow | None] = {}
        if table.profile is not None:
            path = folder / table.profile
            known = load_profile(str(path) if path.exists() else table.profile).rows
            here = {name: known.get(name) for name in rows}
        if table.exec_factor != 1.0:
            held = [row for row in {**rows, **here}.values() if row is not None]
            slower = slower_kind(f"cluster.kinds[{number}]", held, table.exec_factor)
            here = {**here, **slower.rows}
        kind = WorkerKind(name=table.name, rows=here, num_pages=table.num_pages)
        kinds += [kind] * table.workers
    return tuple(kinds)


def _workload(
    file: _File, folder: Path, models: tuple[HostedModel, ...], duration_ns: int
) -> Workload:
    sources: list[Source] = []
    loops: list[ClosedLoop] = []
    tenants = {"": 0}
    if not file.clients:
        raise ConfigError("clients: expected at least one table [[clients]]")
    for index, table in enumerate(file.clients):
        where = f"clients[{index}]"
        values = _clients(table, where)
        kind, tenant = values.pop("kind"), values.pop("tenant", "")
        whose = tenants.setdefault(tenant, len(tenants))
        asked = list(range(len(models)))
        if (row := values.pop("row", None)) is not None:
            one_of(row, {model.row.name for model in models}, f"{where}.row")
            asked = [number for number in asked if models[number].row.name == row]
        # Seeds lie further apart than there are models, so that no two sources draw the same numbers.
        seed = file.seed * 1_000_003 + index * 10_007
        try:
            if kind in TRACE_KINDS:
                sources += trace_sources(
                    kind,
                    values,
                    where,
                    folder=folder,
                    models=asked,
                    duration_ns=duration_ns,
                    seed=seed,
                    tenants=tenants,
                    tenant=tenant,
                )
                continue
            values["end_ns"] = min(values.get("end_ns", duration_ns), duration_ns)
            if kind == "closed":
                loops += [
                    ClosedLoop(model=model, tenant=whose, seed=seed + model, **values)
                    for model in asked
                ]
            else:
                source = _SOURCES[kind]
                sources.append(source(models=asked, tenants=(whose,), seed=seed, **values))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return Workload(
        models=tuple(model.model_id for model in models),
        sources=tuple(sources),
        closed_loops=tuple(loops),
        tenants=tuple(tenants),
    )


def _clients(table: Table, where: str) -> dict[str, Any]:
    """The values of a table of clients, by the fields of what plays them: all times are in ns."""
    required, optional = _KINDS[one_of(table.get("kind"), _KINDS, f"{where}.kind")]
    required = {"kind", "slo_ms", *required}
    check_keys(table, where, required=required, allowed={"row", "tenant", *required, *optional})
    values: dict[str, Any] = {}
    for key, value in table.items():
        name, _, unit = key.rpartition("_")
        place = f"{where}.{key}"
        if unit in ("s", "ms"):
            number = value_of(value, float, place)
            values[f"{name}_ns"] = span_ns(number, place, NS_PER_MS if unit == "ms" else NS_PER_S)
        else:
            values[key] = value_of(value, _VALUES[key], place)
    return values
