"""Overload, live over gRPC: one device of exactly 10 ms per request, offered more than it can do.

A real `clockwright up` with one modelled device (batch size 1, 10 ms each), Poisson arrivals at 50, 90,
150 and 300 requests per second, SLO 100 ms, and the independent client of `open_loop`. Goodput is what that client
had in hand within 100 ms of sending it, per second of offered load. The same experiment on six other servers is
in `experiments/results/other_servers.csv`; twenty times the load is in `live_promises`.
"""

from __future__ import annotations

from experiments.live.live_promises import served
from experiments.live.open_loop import ClientLoad, offer

RATES = (50, 90, 150, 300)
SECONDS = 20.0
SLO_MS = 100


def measure(seconds: float = SECONDS) -> dict[str, float]:
    """Run every rate against one server."""
    figures: dict[str, float] = {}
    with served("10ms", 1) as (server, models):
        for seed, rate in enumerate(RATES):
            account = offer(
                ClientLoad(
                    address=server.address, models=models, slo_ms=SLO_MS, seconds=seconds, rate=rate,
                    seed=seed,
                )
            )  # fmt: skip
            of_rate = {
                "goodput": account.goodput_rps,
                "offered": account.num_offered / seconds,
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
