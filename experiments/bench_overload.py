"""Overload, live over gRPC: one device of exactly 10 ms per request, offered more than it can do.

A real `clockwright up` with one modelled device (batch size 1, 10 ms each), Poisson arrivals at 50, 90,
150 and 300 requests per second, SLO 100 ms, open loop. Goodput is what the client had in hand within
100 ms of the time the request was due to be sent, per second of offered load. The same experiment on
six other servers is in `experiments/results/other_servers.csv`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from experiments.bench_frontend import INFER
from experiments.bench_grpc import infer_request
from experiments.local_server import LocalServer
from modelzoo.build import write_model

RATES = (50, 90, 150, 300)
SECONDS = 20.0
SLO_S = 0.1


@dataclass(slots=True)
class RateOutcome:
    """Outcome of one rate's requests."""

    offered: int = 0
    in_time: int = 0
    #: Answered as a success, but not in hand within the SLO as the client measures it.
    late_successes: int = 0
    latencies_s: list[float] = field(default_factory=list)
    #: Time from when each refused request was due until its error.
    refusal_s: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    #: How late the client itself sent.
    lateness_s: list[float] = field(default_factory=list)


async def offer(
    address: str, data: bytes, rate: float, seconds: float, seed: int, *, slo_s: float
) -> RateOutcome:
    """Send one serialised request as Poisson arrivals, never waiting for answers."""
    generator = random.Random(seed)
    outcome = RateOutcome()
    channel: Any = grpc.aio.insecure_channel(address)
    async with channel:
        call = channel.unary_unary(INFER)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call(data)  # connect, and load the weights

        async def one(due_s: float) -> None:
            outcome.lateness_s.append(time.perf_counter() - due_s)
            try:
                await call(data)
            except grpc.aio.AioRpcError as error:
                outcome.codes[error.code().name] += 1
                outcome.refusal_s.append(time.perf_counter() - due_s)
                return
            latency_s = time.perf_counter() - due_s
            outcome.latencies_s.append(latency_s)
            outcome.in_time += latency_s <= slo_s
            outcome.late_successes += latency_s > slo_s

        due_s = begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            while True:
                due_s += generator.expovariate(rate)
                if due_s > begin_s + seconds:
                    break
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.create_task(one(due_s))
                outcome.offered += 1
    return outcome


def measure(seconds: float = SECONDS) -> dict[str, float]:
    """Run every rate against one server."""
    figures: dict[str, float] = {}
    data = infer_request("m", [1, 784], slo_ms=int(SLO_S * 1000))
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch) / "models"
        write_model("mlp-784-128-10", models / "m" / "1" / "model.onnx")
        arguments = ["--models", str(models), "--device", "modelled:10ms"]
        with LocalServer([*arguments, "--cache-dir", f"{scratch}/cache"]) as server:
            for seed, rate in enumerate(RATES):
                outcome = uvloop.run(offer(server.address, data, rate, seconds, seed, slo_s=SLO_S))
                latencies = sorted(outcome.latencies_s)
                key = f"overload_{{}}_{rate}"
                figures[key.format("goodput")] = round(outcome.in_time / seconds, 2)
                figures[key.format("offered")] = round(outcome.offered / seconds, 2)
                figures[key.format("late_successes")] = outcome.late_successes
                figures[key.format("p50_ms")] = round(latencies[len(latencies) // 2] * 1000, 2)
                figures[key.format("p99_ms")] = round(
                    latencies[len(latencies) * 99 // 100] * 1e3, 2
                )
                refusals = sorted(outcome.refusal_s)
                if refusals:
                    for percent in (50, 99):
                        refusal_s = refusals[len(refusals) * percent // 100]
                        figures[key.format(f"refusal_p{percent}_ms")] = round(refusal_s * 1000, 2)
                lateness = sorted(outcome.lateness_s)
                figures[key.format("client_lateness_p99_ms")] = round(
                    lateness[len(lateness) * 99 // 100] * 1000, 2
                )
    return figures


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:35} {value:10.2f}")
