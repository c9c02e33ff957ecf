"""Processor time of a live server's controller per request, in turns with other servers beside it.

Each server has a modelled device of 1 us; a client process of its own asks one of them, by gRPC's own asyncio
client in closed loops. What is counted is the processor time of the controller's process by the kernel's books, and
whoever compares takes ratios inside a round, so that a noisy neighbour hits all variants alike.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import uvloop

from clockwright.channel import Access
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_US
from clockwright.v1 import inference_pb2 as oip
from experiments.live.local_server import LocalServer
from experiments.live.processor_time import cpu_ns, roles
from modelzoo.build import write_model
from modelzoo.profile import Profile, ProfileRow, save_profile

INFER = "/inference.GRPCInferenceService/ModelInfer"
_SLO_MS = 60_000
_CONCURRENCY = 32


@dataclass(frozen=True, slots=True)
class ServerBeside:
    """One variant while it runs."""

    address: str
    access: Access
    #: Processes of the controller, and of its fronts.
    controller: Sequence[int]
    fronts: Sequence[int]
    #: URL of its metrics; empty: it has none.
    metrics: str


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
    return [
        *("--models", f"{scratch}/models", "--cache-dir", f"{scratch}/cache"),
        *instant_device(scratch),
    ]


def start_beside(arguments: Sequence[str], access: Access, stack: ExitStack) -> ServerBeside:
    """Start a server, which runs until the stack ends."""
    server = stack.enter_context(LocalServer(arguments))
    found = roles(server.process.pid)
    controller, fronts = found["controller"], found.get("front", ())
    return ServerBeside(server.address, access, controller, fronts, server.metrics)


@contextmanager
def asking(
    server: ServerBeside, model: str, columns: int, *, named: bool = False, over_quota: str = ""
) -> Iterator[Callable[[int], tuple[float, float]]]:
    """Have a client of its own for a server meanwhile.

    Args:
        server: is asked by nobody else while it is asked here.
        model: its name.
        columns: that it takes, of float32.
        named: each request has an id of its own, as its client calls it.
        over_quota: the tenant that asks, whom all is refused for its quota; empty: nobody is refused.

    Yields:
        What asks a number of requests: gives processor time per request of the controller and of its fronts, in us.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    client = context.Process(
        target=_ask, args=(theirs, server.address, server.access, model, columns, named, over_quota)
    )
    client.start()
    theirs.close()

    def ask(num_requests: int) -> tuple[float, float]:
        before_ns = cpu_ns(server.controller), cpu_ns(server.fronts)
        ours.send(num_requests)
        ours.recv()
        after_ns = cpu_ns(server.controller), cpu_ns(server.fronts)
        controller_us, fronts_us = (
            (after - before) / num_requests / NS_PER_US
            for before, after in zip(before_ns, after_ns, strict=True)
        )
        return controller_us, fronts_us

    try:
        ours.recv()  # It is connected, and its first requests are answered.
        yield ask
        ours.send(0)
    finally:
        ours.close()
        client.join()


def costs_us(
    server: ServerBeside, model: str, columns: int, num_requests: int, *, over_quota: str = ""
) -> tuple[float, float]:
    """As `asking`, with a new client: of the controller and of its fronts."""
    with asking(server, model, columns, over_quota=over_quota) as ask:
        return ask(num_requests)


def _ask(
    pipe: Connection,
    address: str,
    access: Access,
    model: str,
    columns: int,
    named: bool,
    over_quota: str,
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, suppress(EOFError):
        runner.run(_ask_as_told(pipe, address, access, model, columns, named, over_quota))


async def _ask_as_told(
    pipe: Connection,
    address: str,
    access: Access,
    model: str,
    columns: int,
    named: bool,
    over_quota: str,
) -> None:
    head = oip.ModelInferRequest(model_name=model).SerializeToString()
    request = oip.ModelInferRequest(raw_input_contents=[bytes(4 * columns)])
    request.parameters["slo_ms"].int64_param = _SLO_MS
    if over_quota:
        request.parameters["tenant"].string_param = over_quota
    request.inputs.add(name="input", datatype="FP32", shape=(1, columns))
    rest = request.SerializeToString()
    async with access.async_channel(address) as channel:
        call = channel.unary_unary(INFER)
        left = _CONCURRENCY

        async def loop() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                # As Triton's clients do, in front of the inputs.
                own = b"\x1a\x08%08d" % left if named else b""
                try:
                    await call(head + own + rest, metadata=access.metadata)
                except grpc.aio.AioRpcError as error:
                    if not over_quota or "QUOTA" not in str(error.details()):
                        raise

        while left:
            await asyncio.gather(*(loop() for _ in range(_CONCURRENCY)))
            pipe.send(None)
            left = await asyncio.to_thread(pipe.recv)
