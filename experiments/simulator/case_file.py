"""Reads a case from TOML.

The tables `cluster`, `network`, `costs`, `faults` and `scheduler` take the fields of `Cluster`, `Network`,
`CpuCosts`, `Faults` and `controller.core.SchedulerConfig` by their own names, and leave the rest as it is
there::

    seconds = 20
    seed = 1                        # 0 if left out
    profile = "table1"              # or the path of a profile, or of what `clockwright models list --json` printed
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
    price = 0.2                     # for `clockwright plan`, in any unit; 1 if left out

    [[models]]                      # one row of the profile, or its `first` rows, each some times; left out where all
                                    # clients are recorded: the models that they name, each with the row of its name
    row = "resnet50_v1b"
    copies = 15

    [[clients]]                     # `closed`, `poisson`, `fixed`, `bursty`, or a trace
    kind = "closed"                 # 16 clients of each model
    concurrency = 16
    slo_ms = 100
    row = "resnet50_v1b"            # of its copies only; of all models if left out

    [[clients]]
    kind = "poisson"                # all its models together
    tenant = "ann"                  # whose requests they are; of no tenant if left out
    rate_rps = 900
    slo_ms = 25
    begin_s = 5
    end_s = 10

    [[clients]]
    kind = "azure2019"              # `azure2021` and `synthetic` likewise: see below
    path = "invocations_per_function_md.anon.d01.csv"   # relative to the case file
    slo_ms = 100
    rate_rps = 2000                 # on average of the case; or `scale`, requests per invocation

    [[clients]]
    kind = "recorded"               # what a server was asked: the folder of its telemetry, or a file of arrivals; or
                                    # a file of Azure's, whose functions are mapped to all models
    path = "telemetry"
    hours = 3                       # the last of them; all if left out
    slo_ms = 100                    # of requests that have none; this if left out
    scale = 1.5                     # requests per recorded one; 1 if left out

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
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from clockwright.errors import ConfigError, ModelError
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from controller.core import SchedulerConfig
from controller.process.schedulers import kind_of
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
from experiments.simulator.trace_clients import (
    Azure2019,
    Azure2021,
    ClientTable,
    RecordedRequests,
    Span,
    Synthetic,
    recorded_workload,
    trace_sources,
)
from modelzoo.profile import Noise, Profile, ProfileRow, load_profile
from traces.arrivals import Bursty, ClosedLoop, FixedRate, Poisson, Source, Workload, merge


class _Asking(ClientTable, kw_only=True):
    """Clients that ask from one time to another."""

    begin_s: Span = 0.0
    end_s: Span | None = None


class _Closed(_Asking, tag="closed", kw_only=True):
    concurrency: int
    start_jitter_ms: Span = 0.0


class _Poisson(_Asking, tag="poisson", kw_only=True):
    rate_rps: float


class _Fixed(_Asking, tag="fixed", kw_only=True):
    rate_rps: float
    jitter_ms: Span = 0.0


class _Bursty(_Asking, tag="bursty", kw_only=True):
    rate_rps: float
    burst_s: Span
    pause_s: Span


_SOURCES = {_Poisson: Poisson, _Fixed: FixedRate, _Bursty: Bursty}


class _Models(Struct):
    """A table of `[[models]]`."""

    row: str | None = None
    first: int | None = None
    copies: Annotated[int, Meta(ge=1)] = 1


class _Kind(Struct, frozen=True):
    """A table of `[[cluster.kinds]]`."""

    name: str
    workers: Annotated[int, Meta(ge=0)] = 1
    exec_factor: float = 1.0
    profile: str | None = None
    num_pages: int | None = None
    price: float = 1.0


class _Cluster(Struct, frozen=True):
    """The table of the cluster: its fields, but for those that follow from measurements."""

    num_workers: int | None = None
    kinds: tuple[_Kind, ...] = ()
    num_pages: int = 1376
    copy_bytes_per_s: int = 12_250_000_000
    copy_overhead_ns: int = 0
    start_delay_ns: int = 0
    io_pool_bytes: int = 512 << 20
    noise: Noise = Noise()


class _File(Struct, kw_only=True):
    """All of a case file."""

    clients: Annotated[
        tuple[
            _Closed
            | _Poisson
            | _Fixed
            | _Bursty
            | Azure2019
            | Azure2021
            | Synthetic
            | RecordedRequests,
            ...,
        ],
        Meta(min_length=1),
    ]
    seconds: Span | None = None
    models: tuple[_Models, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 0
    profile: str = "table1"
    refusal_pause_ns: int | None = None
    costs: CpuCosts | Literal["measured"] = CpuCosts()
    cluster: _Cluster = _Cluster()
    network: Network = Network()
    faults: Faults = Faults()
    scheduler: SchedulerConfig = SchedulerConfig()


def read_case(
    path: Path,
    *,
    seconds: float | None = None,
    seed: int | None = None,
    one_of_each: bool = False,
) -> Case:
    """Read a case.

    Args:
        path: the TOML file.
        seconds: instead of the file's.
        seed: instead of the file's.
        one_of_each: one worker of each kind, whatever numbers the file says.

    Raises:
        ConfigError: the file cannot be read, or is not a legal case; says where.
        TraceFormatError: a trace that it names is not what its reader expects.
    """
    given = {"seconds": seconds, "seed": seed}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        document |= {key: value for key, value in given.items() if value is not None}
        return case_of_tables(document, path.parent, one_of_each=one_of_each)
    except (OSError, ValueError, ConfigError, ModelError) as error:
        raise ConfigError(f"case {path}: {error}") from None


def case_of_tables(document: Mapping[str, Any], folder: Path, *, one_of_each: bool = False) -> Case:
    """Make a case of the tables of a file.

    Args:
        document: the tables.
        folder: paths in them are relative to it.
        one_of_each: as for `read_case`.

    Raises:
        ValueError, ConfigError, ModelError: it is not a legal case; says where.
        TraceFormatError: a trace that it names is not what its reader expects.
    """
    file = msgspec.convert(document, _File)
    _check_keys(document, msgspec.to_builtins(file))
    if one_of_each:
        kinds = tuple(msgspec.structs.replace(kind, workers=1) for kind in file.cluster.kinds)
        file.cluster = msgspec.structs.replace(file.cluster, num_workers=None, kinds=kinds)
    return _case(file, folder)


def _check_keys(given: Any, known: Any, where: str = "$") -> None:  # noqa: ANN401
    """Refuse keys that nothing was made of: msgspec passes over those that a dataclass does not have."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key not in known:
                expected = ", ".join(get_close_matches(key, known) or known)
                raise ConfigError(f"found {key!r} at `{where}`, expected one of {expected}")
            _check_keys(value, known[key], f"{where}.{key}")
    elif isinstance(given, list):
        for place, (one, other) in enumerate(zip(given, known, strict=True)):
            _check_keys(one, other, f"{where}[{place}]")


def _case(file: _File, folder: Path) -> Case:
    profile = _profile(file.profile, folder)
    models = _models(file, profile.rows)
    recorded = [
        recorded_workload(
            clients,
            f"clients[{index}]",
            folder=folder,
            seed=_seed_of(file, index),
            names=lambda: [model.model_id for model in models] or list(profile.rows),
            pipelines=profile.pipelines,
        )
        for index, clients in enumerate(file.clients)
        if isinstance(clients, RecordedRequests)
    ]
    if not models:
        if len(recorded) < len(file.clients):
            raise ConfigError("found no `models`, expected some unless all clients are recorded")
        names = dict.fromkeys(name for workload in recorded for name in workload.models)
        models = tuple(HostedModel(ModelId(name), profile.row_for(name)) for name in names)
    if file.seconds is not None:
        duration_ns = round(file.seconds * NS_PER_S)
    elif recorded:
        duration_ns = max(workload.end_ns for workload in recorded)
    else:
        raise ConfigError("found no `seconds`, expected how long the case lasts")
    kind_of(file.scheduler.policy)
    return Case(
        workload=merge(_workload(file, folder, models, duration_ns), *recorded),
        cluster=_cluster(file, folder, models),
        duration_ns=duration_ns,
        network=file.network,
        costs=measured() if file.costs == "measured" else file.costs,
        faults=file.faults,
        scheduler=file.scheduler,
        seed=file.seed,
        refusal_pause_ns=file.refusal_pause_ns,
    )


def _seed_of(file: _File, index: int) -> int:
    """Seeds of clients lie further apart than there are models, so that no two sources draw the same numbers."""
    return file.seed * 1_000_003 + index * 10_007


def _profile(spec: str, folder: Path) -> Profile:
    path = folder / spec
    return load_profile(str(path) if path.exists() else spec)


def _models(file: _File, rows: Mapping[str, ProfileRow]) -> tuple[HostedModel, ...]:
    models: list[HostedModel] = []
    for number, table in enumerate(file.models):
        where = f"models[{number}]"
        if (table.row is None) == (table.first is None):
            raise ConfigError(f"{where}: expected either `row` or `first`")
        if table.row is not None:
            names = [_row_of(table.row, rows, where)]
        elif table.first is not None and 1 <= table.first <= len(rows):
            names = list(rows)[: table.first]
        else:
            raise ConfigError(f"{where}: first is {table.first}, expected 1 to {len(rows)}")
        for name in names:
            models.extend(copies_of(rows[name], table.copies))
    return tuple(models)


def _row_of(name: str, rows: Mapping[str, ProfileRow], where: str) -> str:
    if name not in rows:
        shown = ", ".join(sorted(rows)[:8])
        raise ConfigError(f"{where}: row is {name!r}, expected one of {shown}")
    return name


def _cluster(file: _File, folder: Path, models: tuple[HostedModel, ...]) -> Cluster:
    kinds: list[WorkerKind] = []
    for number, kind in enumerate(file.cluster.kinds):
        kinds += [_kind(kind, f"cluster.kinds[{number}]", folder, models)] * kind.workers
    said = msgspec.structs.asdict(file.cluster) | {"models": models, "kinds": tuple(kinds)}
    if said["num_workers"] is None:
        said["num_workers"] = len(kinds) or 1
    return Cluster(**said)


def _kind(table: _Kind, where: str, folder: Path, models: tuple[HostedModel, ...]) -> WorkerKind:
    rows = {model.row.name: model.row for model in models}
    here: dict[str, ProfileRow | None] = {}
    if table.profile is not None:
        known = _profile(table.profile, folder).rows
        here = {name: known.get(name) for name in rows}
    if table.exec_factor != 1.0:
        held = [row for row in {**rows, **here}.values() if row is not None]
        here = {**here, **slower_kind(where, held, table.exec_factor).rows}
    return WorkerKind(name=table.name, rows=here, num_pages=table.num_pages, price=table.price)


def _workload(
    file: _File, folder: Path, models: tuple[HostedModel, ...], duration_ns: int
) -> Workload:
    sources: list[Source] = []
    loops: list[ClosedLoop] = []
    tenants = {"": 0}
    for index, clients in enumerate(file.clients):
        if isinstance(clients, RecordedRequests):
            continue
        where = f"clients[{index}]"
        whose = tenants.setdefault(clients.tenant, len(tenants))
        asked = list(range(len(models)))
        if clients.row is not None:
            _row_of(clients.row, {model.row.name: model.row for model in models}, where)
            asked = [number for number in asked if models[number].row.name == clients.row]
        seed = _seed_of(file, index)
        try:
            if not isinstance(clients, _Asking):
                sources += trace_sources(
                    clients,
                    where,
                    folder=folder,
                    models=asked,
                    duration_ns=duration_ns,
                    seed=seed,
                    tenants=tenants,
                )
                continue
            values = _values(clients)
            values["end_ns"] = min(values.get("end_ns", duration_ns), duration_ns)
            if isinstance(clients, _Closed):
                loops += [
                    ClosedLoop(model=model, tenant=whose, seed=seed + model, **values)
                    for model in asked
                ]
            else:
                source = _SOURCES[type(clients)]
                sources.append(source(models=asked, tenants=(whose,), seed=seed, **values))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return Workload(
        models=tuple(model.model_id for model in models),
        sources=tuple(sources),
        closed_loops=tuple(loops),
        tenants=tuple(tenants),
    )


def _values(clients: _Asking) -> dict[str, Any]:
    """The fields of what plays these clients: all times are in ns."""
    values: dict[str, Any] = {}
    for key, value in msgspec.structs.asdict(clients).items():
        name, _, unit = key.rpartition("_")
        if unit in ("s", "ms"):
            if value is not None:
                values[f"{name}_ns"] = round(value * (NS_PER_MS if unit == "ms" else NS_PER_S))
        elif key not in ("row", "tenant"):
            values[key] = value
    return values
