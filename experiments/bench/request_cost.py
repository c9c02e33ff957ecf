"""Processor time of a live server's controller per request, in turns with other servers beside it.

Each server has a modelled device of 1 us; a client process of its own asks one of them, by gRPC's own asyncio
client in closed loops. What is counted is the processor time of the controller's process by the kernel's books, and
whoever compares takes ratios inside a round, so that a noisy neighbour hits all variants alike.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from clockwright.channel import Access
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_US
from clockwright.v1 import inference_pb2 as oip
from experiments.live.local_server import LocalServer
from experiments.live.processor_time import cpu_ns, roles
from modelzoo.build import write_model
from modelzoo.profile import Profile, ProfileRow, save_profile

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_SLO_MS = 60_000
_CONCURRENCY = 32


@dataclass(frozen=True, slots=True)
class ServerBeside:
    """One variant while it runs."""

    address: str
    access: Access
    #: Processes of the controller.
    controller: Sequence[int]
    #: URL of its metrics; empty: it has none.
    metrics: str


def prepare(scratch: Path, models: Mapping[str, str]) -> list[str]:
    """Write models, by name and architecture, and a device; gives the flags of a server with both."""
    row = ProfileRow(
        name="*",
        weights_bytes=1,
        load_ns=NS_PER_US,
        exec_ns=dict.fromkeys(DEFAULT_BATCH_SIZES, NS_PER_US),
    )
    save_profile(Profile(name="instant", rows={"*": row}), scratch / "instant.json")
    for name, architecture in models.items():
        write_model(architecture, scratch / "models" / name / "1" / "model.onnx")
    return [
        *("--models", f"{scratch}/models", "--device", f"modelled:{scratch}/instant.json"),
        *("--cache-dir", f"{scratch}/cache"),
    ]


def start_beside(arguments: Sequence[str], access: Access, stack: ExitStack) -> ServerBeside:
    """Start a server, which runs until the stack ends."""
    server = stack.enter_context(LocalServer(arguments))
    controller = roles(server.process.pid)["controller"]
    return ServerBeside(server.address, access, controller, server.metrics)


def cost_us(server: ServerBeside, model: str, columns: int, num_requests: int) -> float:
    """Processor time of the controller per request of so many float32, in us."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    client = context.Process(
        target=_ask, args=(theirs, server.address, server.access, model, columns, num_requests)
    )
    client.start()
    theirs.close()
    try:
        ours.recv()  # It is connected, and its first requests are answered.
        before_ns = cpu_ns(server.controller)
        ours.send(None)
        ours.recv()
        return (cpu_ns(server.controller) - before_ns) / num_requests / NS_PER_US
    finally:
        client.join()


def _ask(
    pipe: Connection,
    address: str,
    access: Access,
    model: str,
    columns: int,
    num_requests: int,
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_ask_all(pipe, address, access, model, columns, num_requests))


async def _ask_all(
    pipe: Connection,
    address: str,
    access: Access,
    model: str,
    columns: int,
    num_requests: int,
) -> None:
    request = oip.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4 * columns)])
    request.parameters["slo_ms"].int64_param = _SLO_MS
    request.inputs.add(name="input", datatype="FP32", shape=(1, columns))
    data = request.SerializeToString()
    async with access.async_channel(address) as channel:
        call = channel.unary_unary(_INFER)
        left = _CONCURRENCY

        async def loop() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await call(data, metadata=access.metadata)

        for count in (_CONCURRENCY, num_requests):
            left = count
            await asyncio.gather(*(loop() for _ in range(_CONCURRENCY)))
            pipe.send(None)
            if count != num_requests:
                await asyncio.to_thread(pipe.recv)
