"""Unlike devices: which kind of worker suits which model is a matter of relative speed.

`unlike_nine` has nine families of models whose durations differ by kind in both directions on three kinds of
worker, thirty in all; `unlike_nine_half` is the same at half the rate, `unlike_nine_deep` at 1.7 times, more than can be served;
`unlike_two` has two kinds with opposite preferences, in bursts; `unlike_few` a small minority of fast cards that
two models need; `unlike_sizes` a kind that is faster for single requests and slower for batches; `unlike_full`
kinds whose memory holds one model; `unlike_factor` kinds that differ by one factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.policies.load import Load, case_of, hosted, ms, poisson, row_of, s
from experiments.simulator import Case, HostedModel, WorkerKind
from modelzoo.profile import ProfileRow
from traces.arrivals import Bursty, Source

#: Milliseconds of one request by kind, share of them that each further request of a batch adds; None: cannot run.
Costs = Mapping[str, tuple[float, float] | None]

# One family is ten times faster on processors than on either card, two run well on cards only, one of them
# nowhere else.
NINE: Mapping[str, Costs] = {
    "mobile": {"processor": (2.6, 0.9), "card": (26, 0.4), "large card": (24, 0.4)},
    "residual": {"processor": (30, 0.9), "card": (9, 0.3), "large card": (5, 0.3)},
    "dense": {"processor": (60, 0.9), "card": (18, 0.3), "large card": (14, 0.3)},
    "efficient": {"processor": (12, 0.9), "card": (14, 0.4), "large card": (10, 0.4)},
    "plain": {"processor": (180, 0.9), "card": (12, 0.4), "large card": (6, 0.3)},
    "detector": {"processor": (90, 0.9), "card": (15, 0.4), "large card": (11, 0.3)},
    "reader": {"processor": (55, 0.9), "card": (20, 0.3), "large card": (7, 0.2)},
    "writer": {"processor": None, "card": (60, 0.3), "large card": (22, 0.2)},
    "translator": {"processor": (280, 0.9), "card": (25, 0.3), "large card": (16, 0.2)},
}


def _row(name: str, cost: tuple[float, float]) -> ProfileRow:
    """A profile's row: a batch of b takes the time of one, and the share of it for each further request."""
    first_ms, share = cost
    return row_of(name, 15, {size: first_ms * (1 + share * (size - 1)) for size in (1, 2, 4, 8)})


def unlike(
    seed: int,
    costs: Mapping[str, Costs],
    workers: Mapping[str, int],
    rates_rps: Mapping[str, float],
    *,
    slo_ms: float,
    bursty: bool = False,
    num_pages: int = 1376,
    seconds: int = 5,
) -> Case:
    """Models on kinds of worker.

    Args:
        seed: of the arrivals, and of the noise.
        costs: by model, by kind.
        workers: how many there are of each kind.
        rates_rps: of each model, all copies together.
        slo_ms: of every request.
        bursty: each model is asked in bursts, so long as the pauses between; else at random.
        num_pages: of each worker.
        seconds: arrivals end here.
    """
    models: list[HostedModel] = []
    sources: list[Source] = []
    for number, (name, rate_rps) in enumerate(rates_rps.items()):
        row = _row(name, next(cost for cost in costs[name].values() if cost is not None))
        asked = range(len(models), len(models) + 1)
        models.append(hosted(f"{name}-0", row))
        source: Source = poisson(asked, rate_rps, slo_ms, seconds, seed * 1_000 + number)
        if bursty:
            source = Bursty(
                models=asked,
                rate_rps=2 * rate_rps,
                burst_ns=ms(250),
                pause_ns=ms(250),
                slo_ns=ms(slo_ms),
                end_ns=s(seconds),
                seed=seed * 1_000 + number,
            )
        sources.append(source)
    kinds: list[WorkerKind] = []
    for kind, count in workers.items():
        of_kind = {name: costs[name][kind] for name in rates_rps}
        rows = {name: None if cost is None else _row(name, cost) for name, cost in of_kind.items()}
        kinds += [WorkerKind(name=kind, rows=rows)] * count
    case = case_of(tuple(models), sources, seed, seconds, gpus=len(kinds), pages=num_pages)
    return replace(case, cluster=replace(case.cluster, kinds=tuple(kinds)))


_TEN_EACH = {"processor": 10, "card": 10, "large card": 10}
_NINE_RPS = {
    "mobile": 800,
    "residual": 500,
    "dense": 250,
    "efficient": 400,
    "plain": 400,
    "detector": 250,
    "reader": 350,
    "writer": 220,
    "translator": 300,
}


def nine(seed: int, factor: float, *, seconds: int = 5) -> Case:
    """The nine families at a multiple of the rate."""
    rates_rps = {name: factor * rate for name, rate in _NINE_RPS.items()}
    return unlike(seed, NINE, _TEN_EACH, rates_rps, slo_ms=300, seconds=seconds)


_OPPOSITE: Mapping[str, Costs] = {
    "small": {"processor": (3, 0.9), "card": (15, 0.5)},
    "tabular": {"processor": (2, 0.8), "card": (8, 0.5)},
    "vision": {"processor": (40, 0.9), "card": (4, 0.3)},
    "language": {"processor": (60, 0.9), "card": (8, 0.2)},
}
_SIZED: Mapping[str, Costs] = {
    "a": {"quick": (3, 1.0), "wide": (8, 0.15)},
    "b": {"quick": (4, 1.0), "wide": (6, 0.5)},
    "c": {"quick": (3, 0.8), "wide": (9, 0.1)},
}
_FACTOR: Mapping[str, Costs] = {
    name: {"card": (ms, 0.3), "slower card": (2.5 * ms, 0.3)}
    for name, ms in (("a", 3), ("b", 5), ("c", 8), ("d", 4))
}

_TWO = {"processor": 6, "card": 4}
_TWO_RPS = {"small": 900, "tabular": 900, "vision": 600, "language": 350}
_FEW_RPS = {"small": 1800, "tabular": 1800, "vision": 350, "language": 220}
_SIZED_RPS = {"a": 900, "b": 700, "c": 900}
_FACTOR_RPS = {"a": 500, "b": 400, "c": 200, "d": 500}
_QUARTER_RPS = {name: rate / 4 for name, rate in _NINE_RPS.items()}


def _family(
    name: str,
    costs: Mapping[str, Costs],
    workers: Mapping[str, int],
    rates_rps: Mapping[str, float],
    **others: Any,  # noqa: ANN401
) -> Load:
    case = partial(unlike, costs=costs, workers=workers, rates_rps=rates_rps, **others)
    return Load(name, "kinds", case)


FAMILIES: tuple[Load, ...] = (
    Load(name="unlike_nine", group="unlike", case=partial(nine, factor=1.5)),
    Load(name="unlike_nine_half", group="unlike", case=partial(nine, factor=0.75)),
    Load(
        name="unlike_nine_deep",
        group="kinds",
        case=partial(nine, factor=2.6, seconds=4),
    ),
    _family("unlike_two", _OPPOSITE, _TWO, _TWO_RPS, slo_ms=100, bursty=True),
    _family("unlike_few", _OPPOSITE, {"processor": 10, "card": 2}, _FEW_RPS, slo_ms=100),
    _family("unlike_sizes", _SIZED, {"quick": 4, "wide": 4}, _SIZED_RPS, slo_ms=60),
    _family("unlike_full", NINE, _TEN_EACH, _QUARTER_RPS, slo_ms=300, num_pages=7),
    _family("unlike_factor", _FACTOR, {"card": 3, "slower card": 3}, _FACTOR_RPS, slo_ms=40),
)
