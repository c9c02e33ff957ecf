"""`clockwright load`: put a load on a server and report how much of it was answered in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clockwright.client.channel import Access
from clockwright.client.client import Client
from clockwright.errors import ClockwrightError, ConfigError
from clockwright.units import NS_PER_MS, NS_PER_S
from traces.arrivals import ClosedLoop, FixedRate, Models, Poisson, Source, Workload
from traces.client_record import LATENESS_NS_MAX, ClientRecord, LoadSummary, summarise

#: Weights become whole numbers by repeating models; limit on all repetitions.
_TURNS_MAX = 100_000

Arrivals = Literal["poisson", "uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """A load without a trace."""

    #: Weight of each model among the requests, by name.
    weights: Mapping[str, Fraction]
    #: Requests per second of an open loop, of all models together; 0: a closed loop.
    rate_rps: float = 0.0
    arrivals: Arrivals = "poisson"
    #: Clients of a closed loop, each with one open request.
    concurrency: int = 0
    #: Each open-loop request has one of them; clients of a closed loop are dealt out to them.
    slos_ns: Sequence[int]
    #: Names of tenants; each request has one of them; empty: no tenant.
    tenants: Sequence[str] = ()
    duration_ns: int
    seed: int = 0

    def workload(self) -> Workload:
        """Describe the requests. Raises ConfigError if the load is empty, or the weights differ too much."""
        if (self.rate_rps > 0) == (self.concurrency > 0):
            raise ConfigError(
                f"rate {self.rate_rps:g} and concurrency {self.concurrency}: expected one of them"
            )
        turns = _turns(tuple(self.weights.values()))
        tenants = range(1, len(self.tenants) + 1) if self.tenants else (0,)
        sources: list[Source] = []
        loops: list[ClosedLoop] = []
        if self.rate_rps:
            sources = [
                self._source(number, slo_ns, turns, tenants)
                for number, slo_ns in enumerate(self.slos_ns)
            ]
        else:
            # Client i of N stands at (i + 1/2) / N of the turns, so models get clients by their weights.
            for client in range(self.concurrency):
                place = (2 * client + 1) * len(turns) // (2 * self.concurrency)
                loops.append(
                    ClosedLoop(
                        model=turns[place],
                        concurrency=1,
                        slo_ns=self.slos_ns[client % len(self.slos_ns)],
                        end_ns=self.duration_ns,
                        tenant=tenants[client % len(tenants)],
                    )
                )
        return Workload(
            models=tuple(self.weights),
            sources=tuple(sources),
            closed_loops=tuple(loops),
            tenants=("", *self.tenants),
        )

    def _source(self, number: int, slo_ns: int, turns: Sequence[int], tenants: Models) -> Source:
        share_rps = self.rate_rps / len(self.slos_ns)
        if self.arrivals == "poisson":
            return Poisson(
                models=turns,
                tenants=tenants,
                rate_rps=share_rps,
                slo_ns=slo_ns,
                end_ns=self.duration_ns,
                seed=self.seed + number,
            )
        # One SLO after the other, so that requests are evenly apart together too.
        return FixedRate(
            models=turns,
            tenants=tenants,
            rate_rps=share_rps,
            slo_ns=slo_ns,
            begin_ns=round(number * NS_PER_S / self.rate_rps),
            end_ns=self.duration_ns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Outcome of a load, as its client saw it."""

    address: str
    #: Time over which requests were due, without the warm-up.
    seconds: float
    total: LoadSummary
    #: By SLO in milliseconds, ascending, and by model.
    by_slo_ms: dict[str, LoadSummary]
    by_model: dict[str, LoadSummary]
    #: Delay of open-loop requests, because the client was busy.
    client_late_ms_p99: float
    #: At most one request in a thousand was sent late, so the server was measured.
    kept_up: bool
    #: Open-loop requests that were sent late, and the outcomes of all others, which describe the server.
    client_late: int
    left_in_time: LoadSummary

    def numbers(self) -> dict[str, Any]:
        """Return everything as for JSON."""
        return asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat row per summary: in total, per SLO and per model."""
        named = [("all", "", self.total)]
        named += [("slo_ms", name, summary) for name, summary in self.by_slo_ms.items()]
        named += [("model", name, summary) for name, summary in self.by_model.items()]
        return [{"of": of, "name": name, **_flat(summary)} for of, name, summary in named]


def report_of(record: ClientRecord, *, address: str, begin_s: float, seconds: float) -> LoadReport:
    """Sum up the requests that were due from `begin_s` on."""
    record = record.where(record.due_ns >= begin_s * NS_PER_S)
    return LoadReport(
        address=address,
        seconds=seconds,
        total=summarise(record, seconds),
        by_slo_ms={
            f"{slo_ns / NS_PER_MS:g}": summarise(record.where(record.slo_ns == slo_ns), seconds)
            for slo_ns in np.unique(record.slo_ns).tolist()
        },
        by_model={
            name: summarise(record.where(record.model == position), seconds)
            for position, name in enumerate(record.models)
        },
        client_late_ms_p99=record.lateness_ns_p99 / NS_PER_MS,
        kept_up=record.kept_up,
        client_late=int(record.left_late.sum()),
        left_in_time=summarise(record.where(~record.left_late), seconds),
    )


def read_weights(arguments: Sequence[str]) -> dict[str, Fraction]:
    """Read NAME or NAME=WEIGHT arguments.

    Raises ConfigError if a weight is not a positive number, or a name is given twice.
    """
    weights: dict[str, Fraction] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        try:
            weight = Fraction(text if equals else 1)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if weight <= 0 or not name:
            raise ConfigError(f"found {argument!r}, expected MODEL or MODEL=WEIGHT, above 0")
        if name in weights:
            raise ConfigError(f"found model {name} twice")
        weights[name] = weight
    return weights


def ready_models(address: str, access: Access) -> list[str]:
    """Ask a server which models are ready.

    Raises ConfigError if the server does not list its models, or none is ready.
    """
    with Client(address, access) as client:
        try:
            names = [model.name for model in client.models() if model.state in ("READY", "")]
        except ClockwrightError as error:
            raise ConfigError(
                f"expected names of models: the server lists none ({error})"
            ) from None
    if not names:
        raise ConfigError(f"{address} has no model that is ready")
    return names


def slo_parameter(address: str, access: Access) -> str:
    """Return the parameter by which a server takes a request's SLO; empty: not known."""
    with Client(address, access) as client:
        name = client.server_name().lower()
    return {"clockwright": "slo_ms", "triton": "timeout"}.get(name, "")


def too_late(path: Path | None, report: LoadReport) -> str:
    """Report that the client was the bottleneck, if it was."""
    if report.kept_up:
        return ""
    where = f" ({path} says which)" if path else ""
    words = (
        f"THIS CLIENT was too slow: {report.client_late:,} of {report.total.num_requests:,} requests were sent over "
        f"{LATENESS_NS_MAX // NS_PER_MS} ms late{where}, p99 {report.client_late_ms_p99:.1f} ms, which the figures "
        "above count as if the server had caused it."
    )
    others = report.left_in_time
    if others.num_requests:
        words += (
            f" Of the {others.num_requests:,} others {others.good_request_fraction:.2%} were answered in time, p99 "
            f"{others.latency_ms['99']:.1f} ms: that is the server."
        )
    return f"{words} One process cannot send more: start several, each with a part of --rate, or lower the rate"


def _turns(weights: Sequence[Fraction]) -> list[int]:
    """Order models in turns, each as often as its weight says and as evenly as possible."""
    whole = lcm(*(weight.denominator for weight in weights))
    counts = [int(weight * whole) for weight in weights]
    if sum(counts) > _TURNS_MAX:
        raise ConfigError(f"the weights need {sum(counts)} turns, expected {_TURNS_MAX} at most")
    places = [
        ((turn + 0.5) / count, position)
        for position, count in enumerate(counts)
        for turn in range(count)
    ]
    return [position for _, position in sorted(places)]


def _flat(summary: LoadSummary) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in asdict(summary).items():
        match key:
            case "latency_ms" | "refusal_ms":
                row |= {f"{key}_p{percent}": number for percent, number in value.items()}
            case "refusals" | "failures":
                row[key] = " ".join(f"{name}:{num}" for name, num in value.items())
            case _:
                row[key] = value
    return row
