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

`fixed` may have `jitter_ms`, `closed` `start_jitter_ms`, and `bursty` needs `burst_s` and `pause_s`.

Traces: `azure2019` (minutes) and `azure2021` (single invocations) are Microsoft's files, `synthetic` draws
`num_functions` functions like those of 2019. Their functions are mapped to the models by popularity,
neighbours together, or dealt out in turn with `assignment = "striped"`. Those of minutes may begin at
`begin_minute` of the day and have `timers = "even"`, which fire on time instead of at random.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from controller.core import EdfMhConfig, SchedulerConfig
from controller.schedulers import kind_of
from experiments.simulator.case import (
    Case,
    Cluster,
    CpuCosts,
    Faults,
    HostedModel,
    LostWorker,
    Network,
    WorkerClock,
    WorkerKind,
    copies_of,
    slower_kind,
)
from experiments.simulator.costs import measured
from experiments.simulator.tables import (
    Table,
    check_keys,
    integer,
    number,
    one_of,
    section,
    span_ns,
    tables,
    time_ns,
)
from experiments.simulator.trace_clients import TRACE_KINDS, trace_sources
from modelzoo.profile import Noise, Profile, ProfileRow, load_profile
from traces.arrivals import Bursty, ClosedLoop, FixedRate, Poisson, Source, Workload

T = TypeVar("T")

_SPAN = {"begin_s", "end_s"}
_KINDS: dict[str, tuple[set[str], set[str]]] = {
    # By kind: keys that it needs, and keys that it may have, without the keys of all kinds.
    "closed": ({"concurrency"}, {"start_jitter_ms", *_SPAN}),
    "poisson": ({"rate_rps"}, _SPAN),
    "fixed": ({"rate_rps"}, {"jitter_ms", *_SPAN}),
    "bursty": ({"rate_rps", "burst_s", "pause_s"}, _SPAN),
    **TRACE_KINDS,
}


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
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"case {path}: {error}") from None
    try:
        return _case(document, path.parent, seconds, seed)
    except ConfigError as error:
        raise ConfigError(f"case {path}: {error}") from None


def _case(document: Table, folder: Path, seconds: float | None, seed: int | None) -> Case:
    sections = {"cluster", "models", "network", "faults", "scheduler", "clients"}
    check_keys(
        document,
        "the case",
        required={"models", "clients"},
        allowed=sections | {"seconds", "seed", "profile", "refusal_pause_ns", "costs"},
    )
    if seconds is None:
        seconds = number(document, "seconds", "the case")
    if seed is None:
        seed = integer(document, "seed", "the case", 0)
    duration_ns = span_ns(seconds, "seconds", NS_PER_S)
    models = _models(document)
    cluster = section(document, "cluster")
    if "models" in cluster:
        raise ConfigError("cluster: models are tables of their own, [[models]]")
    if "kinds" in cluster:
        kinds = _kinds(cluster, folder, models)
        cluster = {"num_workers": len(kinds), **cluster, "kinds": kinds}
    workload = _workload(document, folder, models, duration_ns, seed)
    pause_ns = document.get("refusal_pause_ns")
    scheduler = _build(SchedulerConfig, section(document, "scheduler"), "scheduler")
    kind_of(scheduler.policy)
    return Case(
        workload=workload,
        cluster=_build(Cluster, {**cluster, "models": models}, "cluster"),
        duration_ns=duration_ns,
        network=_build(Network, section(document, "network"), "network"),
        costs=_costs(document.get("costs", {})),
        faults=_build(Faults, section(document, "faults"), "faults"),
        scheduler=scheduler,
        seed=seed,
        refusal_pause_ns=(
            None if pause_ns is None else integer(document, "refusal_pause_ns", "the case", 0)
        ),
    )


def _costs(value: object) -> CpuCosts:
    return (
        measured() if value == "measured" else _build(CpuCosts, _as_table(value, "costs"), "costs")
    )


def _models(document: Table) -> tuple[HostedModel, ...]:
    spec = document.get("profile", "table1")
    if not isinstance(spec, str):
        raise ConfigError(f"profile: found {spec!r}, expected a name or a path")
    profile = load_profile(spec)
    models: list[HostedModel] = []
    for where, table in tables(document, "models"):
        check_keys(table, where, required=set(), allowed={"row", "first", "copies"})
        copies = integer(table, "copies", where, 1)
        if not copies:
            raise ConfigError(f"{where}: copies is 0, expected 1 or more")
        for name in _row_names(table, where, profile):
            models.extend(copies_of(profile.rows[name], copies))
    return tuple(models)


def _kinds(cluster: Table, folder: Path, models: tuple[HostedModel, ...]) -> tuple[WorkerKind, ...]:
    """The kind of each worker, in the order of the tables."""
    rows = {model.row.name: model.row for model in models}
    kinds: list[WorkerKind] = []
    for where, table in tables(cluster, "kinds", "cluster."):
        check_keys(
            table,
            where,
            required={"name"},
            allowed={"name", "workers", "exec_factor", "profile", "num_pages"},
        )
        here: dict[str, ProfileRow | None] = {}
        if "profile" in table:
            spec = table["profile"]
            if not isinstance(spec, str):
                raise ConfigError(f"{where}: profile is {spec!r}, expected a name or a path")
            path = folder / spec
            known = load_profile(str(path) if path.exists() else spec).rows
            here = {name: known.get(name) for name in rows}
        factor = number({"exec_factor": 1.0, **table}, "exec_factor", where)
        if factor != 1.0:
            held = [row for row in {**rows, **here}.values() if row is not None]
            here = {**here, **slower_kind(where, held, factor).rows}
        kind = WorkerKind(
            name=str(table["name"]),
            rows=here,
            num_pages=integer(table, "num_pages", where, 0) or None,
        )
        kinds += [kind] * integer(table, "workers", where, 1)
    return tuple(kinds)


def _row_names(table: Table, where: str, profile: Profile) -> list[str]:
    if ("row" in table) == ("first" in table):
        raise ConfigError(f"{where}: expected either `row` or `first`")
    if "first" in table:
        first = integer(table, "first", where, 0)
        if not 1 <= first <= len(profile.rows):
            raise ConfigError(f"{where}: first is {first}, expected 1 to {len(profile.rows)}")
        return list(profile.rows)[:first]
    return [one_of(table["row"], profile.rows, f"{where}: row")]


def _workload(
    document: Table,
    folder: Path,
    models: tuple[HostedModel, ...],
    duration_ns: int,
    seed: int,
) -> Workload:
    sources: list[Source] = []
    loops: list[ClosedLoop] = []
    for index, (where, table) in enumerate(tables(document, "clients")):
        kind = one_of(table.get("kind"), _KINDS, f"{where}: kind")
        required, optional = _KINDS[kind]
        check_keys(
            table,
            where,
            required={"kind", "slo_ms", *required},
            allowed={"kind", "slo_ms", "row", *required, *optional},
        )
        chosen = range(len(models))
        asked: list[int] = list(chosen)
        if "row" in table:
            row = one_of(table["row"], {m.row.name for m in models}, f"{where}: row")
            asked = [model for model in chosen if models[model].row.name == row]
        end_ns = time_ns(table, "end_s", where, NS_PER_S, duration_ns)
        common: dict[str, Any] = {
            "slo_ns": time_ns(table, "slo_ms", where, NS_PER_MS),
            "begin_ns": time_ns(table, "begin_s", where, NS_PER_S, 0),
            "end_ns": min(end_ns, duration_ns),
            # Seeds lie further apart than there are models, so that no two sources draw the same numbers.
            "seed": seed * 1_000_003 + index * 10_007,
        }
        try:
            if kind == "closed":
                common["concurrency"] = integer(table, "concurrency", where, 0)
                common["start_jitter_ns"] = time_ns(table, "start_jitter_ms", where, NS_PER_MS, 0)
                first_seed = common.pop("seed")
                loops += [ClosedLoop(model=m, seed=first_seed + m, **common) for m in asked]
                continue
            if kind in TRACE_KINDS:
                sources += trace_sources(
                    kind,
                    table,
                    where,
                    folder=folder,
                    models=asked,
                    slo_ns=common["slo_ns"],
                    duration_ns=duration_ns,
                    seed=common["seed"],
                )
                continue
            common["models"] = asked
            common["rate_rps"] = number(table, "rate_rps", where)
            if kind == "poisson":
                sources.append(Poisson(**common))
            elif kind == "fixed":
                jitter_ns = time_ns(table, "jitter_ms", where, NS_PER_MS, 0)
                sources.append(FixedRate(jitter_ns=jitter_ns, **common))
            else:
                burst_ns = time_ns(table, "burst_s", where, NS_PER_S)
                pause_ns = time_ns(table, "pause_s", where, NS_PER_S)
                sources.append(Bursty(burst_ns=burst_ns, pause_ns=pause_ns, **common))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return Workload(
        models=tuple(model.model_id for model in models),
        sources=tuple(sources),
        closed_loops=tuple(loops),
    )


# Fields that are configuration values themselves.
_NESTED: dict[str, Callable[[object, str], object]] = {
    "noise": lambda value, where: _build(Noise, _as_table(value, where), where),
    "edf_mh": lambda value, where: _build(EdfMhConfig, _as_table(value, where), where),
    "tenant_weights": lambda value, where: _as_table(value, where),
    "clocks": lambda value, where: _build_all(WorkerClock, value, where),
    "lost_workers": lambda value, where: _build_all(LostWorker, value, where),
}


def _build(kind: type[T], table: Table, where: str) -> T:
    """Make a configuration value from a table of its fields."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = [
        name
        for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING
    ]
    check_keys(table, where, required=needed, allowed=known)
    values: dict[str, object] = {}
    for name, value in table.items():
        if name in _NESTED:
            values[name] = _NESTED[name](value, f"{where}.{name}")
            continue
        expected = str(known[name].type)
        if name not in ("models", "kinds") and not _is(value, expected):
            raise ConfigError(f"{where}: {name} is {value!r}, expected {expected}")
        values[name] = value
    return kind(**values)


def _is(value: object, annotation: str) -> bool:
    """Whether a TOML value suits a field: `int`, `int | None`, `float`, `bool` or `str`."""
    legal: dict[str, tuple[type, ...]] = {"bool": (bool,), "str": (str,), "float": (int, float)}
    if isinstance(value, bool):
        return annotation == "bool"
    return isinstance(value, legal.get(annotation, (int,)))


def _build_all(kind: type[T], value: object, where: str) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: found {value!r}, expected a list of tables")
    return tuple(
        _build(kind, _as_table(item, f"{where}[{number}]"), f"{where}[{number}]")
        for number, item in enumerate(value)
    )


def _as_table(value: object, where: str) -> Table:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: found {value!r}, expected a table")
    return value
