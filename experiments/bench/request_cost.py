"""Processor time of a live server per request, by the kernel's books: what several benchmarks share.

Each server has a modelled device of 1 us, so that the server is what is measured. It is asked by gRPC's own asyncio
client, in closed loops in this process. Servers that are compared run side by side and are asked in turns, and
ratios are taken inside a turn, so that a noisy neighbour hits all alike.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any

import grpc

from clockwright.client.channel import Access
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_US
from clockwright.v1 import inference_pb2 as oip
from experiments.live.local_server import LocalServer, folders
from experiments.live.processor_time import cpu_ns, roles
from modelzoo.build import write_model
from modelzoo.profile import Profile, ProfileRow, save_profile

INFER = "/inference.GRPCInferenceService/ModelInfer"
_CONCURRENCY = 32
# How often each server is asked in a round.
_TURNS = 20
_LIMIT_S = 60.0
#: Asks once.
Ask = Callable[[], Awaitable[None]]


def instant_device(scratch: Path) -> list[str]:
    """Flags of a server whose device takes 1 us for any batch."""
    row = ProfileRow(
        name="*",
        weights_bytes=1,
        load_ns=NS_PER_US,
        exec_ns=dict.fromkeys(DEFAULT_BATCH_SIZES, NS_PER_US),
    )
    save_profile(Profile(name="instant", rows={"*": row}), scratch / "instant.json")
    return ["--device", f"modelled:{scratch}/instant.json"]


def prepare(scratch: Path, models: Mapping[str, str]) -> list[str]:
    """Write models, by name and architecture, and a device; gives the flags of a server with both."""
    for name, architecture in models.items():
        write_model(architecture, scratch / "models" / name / "1" / "model.onnx")
    return [*folders(scratch), *instant_device(scratch)]


# --- asking ---------------------------------------------------------------------------------------


def infer_request(
    model: str,
    shape: Sequence[int],
    *,
    slo_ms: int = 10_000,
    tenant: str = "",
    request_id: str = "",
) -> bytes:
    """Serialise a request with one FP32 tensor of zeros; by default its SLO is never missed."""
    request = oip.ModelInferRequest(
        model_name=model, id=request_id, raw_input_contents=[bytes(4 * math.prod(shape))]
    )
    request.inputs.add(name="input", datatype="FP32", shape=shape)
    request.parameters["slo_ms"].int64_param = slo_ms
    if tenant:
        request.parameters["tenant"].string_param = tenant
    return request.SerializeToString()


def named(model: str, request: bytes) -> Callable[[], bytes]:
    """Give the same request with another id each time, at the place where Triton's clients have it."""
    numbers, after_name = itertools.count(), 2 + len(model)
    head, rest = request[:after_name], request[after_name:]
    return lambda: head + b"\x1a\x08%08d" % next(numbers) + rest


def asker(
    channel: Any,  # noqa: ANN401
    request: Callable[[], bytes],
    metadata: Sequence[tuple[str, str]] = (),
    *,
    over_quota: bool = False,
) -> Ask:
    """Ask on a channel, each time for what `request` gives; all must be answered, or refused as over quota."""
    call = channel.unary_unary(INFER)

    async def ask() -> None:
        try:
            await call(request(), timeout=_LIMIT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if not over_quota or "QUOTA" not in str(error.details()):
                raise

    return ask


async def latencies(askers: Sequence[Ask], seconds: float) -> list[float]:
    """Have all ask for a while, one request after the other, each at least once; gives what each request took, in s."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds

    async def go_on(ask: Ask) -> None:
        now_s = 0.0
        while now_s < end_s:
            begin_s = time.perf_counter()
            await ask()
            now_s = time.perf_counter()
            found.append(now_s - begin_s)

    await asyncio.gather(*(go_on(ask) for ask in askers))
    return found


async def costs_us(
    askers: Sequence[Ask], seconds: float, *processes: Sequence[int]
) -> tuple[float, ...]:
    """Have all ask for a while; gives processor time per request, of each group of processes."""
    before_ns = [cpu_ns(group) for group in processes]
    num_requests = len(await latencies(askers, seconds))
    return tuple(
        (cpu_ns(group) - before) / num_requests / NS_PER_US
        for group, before in zip(processes, before_ns, strict=True)
    )


# --- servers side by side --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerBeside:
    """One server while it runs."""

    address: str
    access: Access
    #: Processes of the controller, and of its fronts.
    controller: Sequence[int]
    fronts: Sequence[int]
    #: URL of its metrics; empty: it has none.
    metrics: str

    async def askers(
        self, request: Callable[[], bytes], stack: AsyncExitStack, *, over_quota: bool = False
    ) -> Sequence[Ask]:
        """Make closed loops that ask it on one connection, which is open until the stack ends."""
        channel = await stack.enter_async_context(self.access.async_channel(self.address))
        ask = asker(channel, request, self.access.metadata, over_quota=over_quota)
        return [ask] * _CONCURRENCY


def start_beside(
    arguments: Sequence[str], stack: AsyncExitStack, access: Access | None = None
) -> ServerBeside:
    """Start a server, which runs until the stack ends."""
    server = stack.enter_context(LocalServer(arguments))
    found = roles(server.process.pid)
    controller, fronts = found["controller"], found.get("front", ())
    return ServerBeside(server.address, access or Access(), controller, fronts, server.metrics)


async def compare(
    asked: Mapping[str, tuple[ServerBeside, Sequence[Ask]]], rounds: int, seconds: float
) -> dict[str, float]:
    """Ask all servers in turns, a little each time, because other load on the machine comes and goes.

    Args:
        asked: by name, a server and its askers; the first is what others are compared with.
        rounds: after each of which there is a ratio.
        seconds: for which each server is asked in a round.

    Returns:
        Processor time of each controller per request in us; and how many times that of the first it is: the median
        over the turns of a round, in the middle of all rounds and at their quartiles.
    """
    rng = random.Random(1)
    rows: list[dict[str, list[float]]] = []
    for _ in range(rounds + 1):
        row: dict[str, list[float]] = {name: [] for name in asked}
        for _ in range(_TURNS):
            for name in rng.sample(tuple(asked), len(asked)):
                server, askers = asked[name]
                row[name] += await costs_us(askers, seconds / _TURNS, server.controller)
        rows.append(row)
    del rows[0]  # What is new to a server is looked at longer.
    first, *others = asked
    figures = {
        f"{name}_us": statistics.median(us for row in rows for us in row[name]) for name in asked
    }
    for name in others:
        ratios = [statistics.median(map(truediv, row[name], row[first])) for row in rows]
        figures[f"{name}_ratio"] = statistics.median(ratios)
        if len(ratios) > 1:
            lower, _, upper = statistics.quantiles(ratios, n=4)
            figures[f"{name}_ratio_lower_quartile"] = lower
            figures[f"{name}_ratio_upper_quartile"] = upper
    return figures
