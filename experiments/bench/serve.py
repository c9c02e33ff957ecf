"""`make bench NAME=bench-serve`: what serving costs and keeps.

The parts: `core` (the scheduler per request, virtual time), and `overload`: goodput with a device that is offered up to
three times what it can do. What a request costs is `bench-live`'s.

Under `overload` a real `clockwright up` has one modelled device (batch size 1, 10 ms each), Poisson arrivals, SLO 100 ms,
and the independent client of `open_loop`. Goodput is what that client had in hand within 100 ms of sending it, per second
of offered load. The same on six other servers is in `experiments/results/other_servers.csv`; twenty times the load is in
`live_promises`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from experiments.bench import core
from experiments.live.live_promises import served
from experiments.live.open_loop import ClientLoad, offer
from experiments.study.bench import bench
from experiments.study.study import chosen

RATES = (50, 90, 150, 300)
SECONDS = 20.0
SLO_MS = 100


def measure_overload() -> dict[str, float]:
    """Run every rate against one server."""
    figures: dict[str, float] = {}
    with served("10ms", 1) as (server, models):
        for seed, rate in enumerate(RATES):
            account = offer(
                ClientLoad(
                    address=server.address, models=models, slo_ms=SLO_MS, seconds=SECONDS, rate=rate,
                    seed=seed,
                )
            )  # fmt: skip
            of_rate = {
                "goodput": account.goodput_rps,
                "offered": account.num_offered / SECONDS,
                "late_successes": account.num_late,
                "other_ends": sum(account.others.values()),
                "p50_ms": account.latency_ms(50),
                "p99_ms": account.latency_ms(99),
                "client_lateness_p99_ms": account.lateness_ms(99),
            }
            if account.refusals:
                of_rate["refusal_p50_ms"] = account.refusal_ms(50)
                of_rate["refusal_p99_ms"] = account.refusal_ms(99)
            figures |= {f"overload_{key}_{rate}": round(value, 2) for key, value in of_rate.items()}
    return figures


PARTS: Mapping[str, Callable[[], dict[str, float]]] = {
    "core": core.measure,
    "overload": measure_overload,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured."""

    parts: tuple[str, ...] = tuple(PARTS)

    @property
    def seeds(self) -> range:
        """Arrivals of the core's cases, and those of the overload."""
        return range(max(core.REPEATS, len(RATES)))

    def __post_init__(self) -> None:
        chosen("part", self.parts, PARTS)


def measure(setting: Setting) -> dict[str, float]:
    """Measure the parts, one after the other."""
    begin_s = time.monotonic()
    figures: dict[str, float] = {}
    for part in setting.parts:
        figures |= PARTS[part]()
    return figures | {"wall_s": round(time.monotonic() - begin_s, 1)}


STUDY = bench("bench-serve", Setting(), measure)
