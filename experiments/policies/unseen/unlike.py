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

from experiments.policies.load import Load, asked_at_random, hosted, row_of
from experiments.simulator import Case, WorkerKind
from modelzoo.profile import ProfileRow

#: By kind of worker: milliseconds of one request, and the share of them that each further request of a batch adds.
#: A kind that is missing cannot run the model.
Costs = Mapping[str, tuple[float, float]]
#: By model: requests per second of all copies together, and its costs.
Models = Mapping[str, tuple[float, Costs]]

# One family is ten times faster on processors than on either card, two run well on cards only, one of them
# nowhere else.
NINE: Models = {
    "mobile": (800, {"processor": (2.6, 0.9), "card": (26, 0.4), "large card": (24, 0.4)}),
    "residual": (500, {"processor": (30, 0.9), "card": (9, 0.3), "large card": (5, 0.3)}),
    "dense": (250, {"processor": (60, 0.9), "card": (18, 0.3), "large card": (14, 0.3)}),
    "efficient": (400, {"processor": (12, 0.9), "card": (14, 0.4), "large card": (10, 0.4)}),
    "plain": (400, {"processor": (180, 0.9), "card": (12, 0.4), "large card": (6, 0.3)}),
    "detector": (250, {"processor": (90, 0.9), "card": (15, 0.4), "large card": (11, 0.3)}),
    "reader": (350, {"processor": (55, 0.9), "card": (20, 0.3), "large card": (7, 0.2)}),
    "writer": (220, {"card": (60, 0.3), "large card": (22, 0.2)}),
    "translator": (300, {"processor": (280, 0.9), "card": (25, 0.3), "large card": (16, 0.2)}),
}
_OPPOSITE: Models = {
    "small": (900, {"processor": (3, 0.9), "card": (15, 0.5)}),
    "tabular": (900, {"processor": (2, 0.8), "card": (8, 0.5)}),
    "vision": (600, {"processor": (40, 0.9), "card": (4, 0.3)}),
    "language": (350, {"processor": (60, 0.9), "card": (8, 0.2)}),
}
_SIZED: Models = {
    "a": (900, {"quick": (3, 1.0), "wide": (8, 0.15)}),
    "b": (700, {"quick": (4, 1.0), "wide": (6, 0.5)}),
    "c": (900, {"quick": (3, 0.8), "wide": (9, 0.1)}),
}
_FACTOR: Models = {
    name: (rate_rps, {"card": (ms, 0.3), "slower card": (2.5 * ms, 0.3)})
    for name, rate_rps, ms in (("a", 500, 3), ("b", 400, 5), ("c", 200, 8), ("d", 500, 4))
}


def _at_rates(models: Models, *rates_rps: float) -> Models:
    return {
        name: (rate_rps, costs)
        for (name, (_, costs)), rate_rps in zip(models.items(), rates_rps, strict=True)
    }


def _times(models: Models, factor: float) -> Models:
    return _at_rates(models, *(factor * rate_rps for rate_rps, _ in models.values()))


def _row(name: str, costs: Costs, kind: str) -> ProfileRow:
    """A profile's row: a batch of b takes the time of one, and the share of it for each further request."""
    first_ms, share = costs[kind]
    return row_of(name, 15, {size: first_ms * (1 + share * (size - 1)) for size in (1, 2, 4, 8)})


def unlike(
    seed: int,
    models: Models,
    workers: Mapping[str, int],
    *,
    slo_ms: float,
    seconds: float = 5,
    **others: Any,  # noqa: ANN401
) -> Case:
    """Models on kinds of worker, of each of which there are so many; others as for `asked_at_random`."""
    kinds: list[WorkerKind] = []
    for kind, count in workers.items():
        rows = {
            name: _row(name, costs, kind) if kind in costs else None
            for name, (_, costs) in models.items()
        }
        kinds += [WorkerKind(name=kind, rows=rows)] * count
    case = asked_at_random(
        tuple(
            hosted(f"{name}-0", _row(name, costs, next(iter(costs))))
            for name, (_, costs) in models.items()
        ),
        *(
            (range(at, at + 1), rate_rps, slo_ms)
            for at, (rate_rps, _) in enumerate(models.values())
        ),
        seconds=seconds,
        gpus=len(kinds),
        **others,
    )(seed)
    return replace(case, cluster=replace(case.cluster, kinds=tuple(kinds)))


_TEN_EACH = {"processor": 10, "card": 10, "large card": 10}


def _family(
    name: str,
    models: Models,
    workers: Mapping[str, int],
    group: str = "kinds",
    **others: Any,  # noqa: ANN401
) -> Load:
    return Load(f"unlike_{name}", group, partial(unlike, models=models, workers=workers, **others))


_FEW = _at_rates(_OPPOSITE, 1800, 1800, 350, 220)

FAMILIES: tuple[Load, ...] = (
    _family("nine", _times(NINE, 1.5), _TEN_EACH, "unlike", slo_ms=300),
    _family("nine_half", _times(NINE, 0.75), _TEN_EACH, "unlike", slo_ms=300),
    _family("nine_deep", _times(NINE, 2.6), _TEN_EACH, slo_ms=300, seconds=4),
    _family("two", _OPPOSITE, {"processor": 6, "card": 4}, slo_ms=100, bursts_ms=250),
    _family("few", _FEW, {"processor": 10, "card": 2}, slo_ms=100),
    _family("sizes", _SIZED, {"quick": 4, "wide": 4}, slo_ms=60),
    _family("full", _times(NINE, 0.25), _TEN_EACH, slo_ms=300, pages=7),
    _family("factor", _FACTOR, {"card": 3, "slower card": 3}, slo_ms=40),
)
