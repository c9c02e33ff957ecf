"""What a live server takes per request when clients are many, or behave as few do, and how long they wait.

The cases, against a real `clockwright up` on a device that takes 1 us, with requests of 3 kB:

* `connections`: 1,000 connections, one request under way on each.
* `names`: 4,000 models, and 32 clients that ask any of them.
* `streams`: 32 bidirectional streams, one request under way on each.
* `cancelled`: 32 clients that take every other request back as soon as it is sent; per request that is answered.
* `slow`: 8 clients beside 8 others who each have 600 kB answers coming and read 10 kB/s of them.

All of the server has one core, the generator, clients of grpc.aio in this process, another. Every figure is the
median of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import uvloop

from clockwright.process import keep_big_blocks
from experiments.bench.live import OPTIONS, PAYLOADS, Ask, asker, cost, infer_request, medians
from experiments.bench.request_cost import INFER, instant_device
from experiments.live.local_server import LocalServer
from experiments.live.open_loop_client import frame, header_block
from experiments.study.bench import Findings, bench, need_cores
from modelzoo.build import write_model

# The type stubs of grpcio leave this out.
EOF: object = getattr(grpc.aio, "EOF")  # noqa: B009

NUM_CLIENTS = 32
NUM_SLOW, NUM_BESIDE = 8, 8

_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_SMALL = ("small", PAYLOADS["small"].shape)
_SLOW_BYTES, _SLOW_PAUSE_S = 1000, 0.1
_LIMIT_S = 60.0


class Crowd:
    """The clients of a case: connected once, and then asking for as long as they are told."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channels: list[Any] = []
        self._slow: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A slow reader reads until it is told to end; one that has ended was hung up on.
        num_ended = sum(task.done() for task in self._slow)
        for task in self._slow:
            task.cancel()
        await asyncio.gather(*self._slow, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))
        if num_ended:
            raise RuntimeError(f"the server hung up on {num_ended} clients that read slowly")

    def connections(self, num_connections: int) -> list[Ask]:
        """Each asker has a connection of its own."""
        request = infer_request(*_SMALL)
        return [asker(self._connect(), lambda: request) for _ in range(num_connections)]

    def names(self, num_names: int) -> list[Ask]:
        """All ask on one connection, each time for another of so many models."""
        requests = [infer_request(f"many-{number}", _SMALL[1]) for number in range(num_names)]
        generator, channel = random.Random(1), self._connect()
        return [asker(channel, lambda: generator.choice(requests))] * NUM_CLIENTS

    def streams(self) -> list[Ask]:
        """Each asker has a stream, on one connection."""
        request, channel = infer_request(*_SMALL), self._connect()

        def streaming() -> Ask:
            call = channel.stream_stream(_STREAM)()

            async def ask() -> bool:
                await call.write(request)
                return await call.read() is not EOF

            return ask

        return [streaming() for _ in range(NUM_CLIENTS)]

    def cancelled(self) -> list[Ask]:
        """Each asker takes every other request back."""
        request, channel = infer_request(*_SMALL), self._connect()
        call = channel.unary_unary(INFER)

        def fickle() -> Ask:
            number = 0

            async def ask() -> bool:
                nonlocal number
                number += 1
                asked = call(request, timeout=_LIMIT_S)
                if number % 2:
                    # The request leaves before it is taken back.
                    await asyncio.sleep(0)
                    asked.cancel()
                    with suppress(asyncio.CancelledError):
                        await asked
                    return False
                await asked
                return True

            return ask

        return [fickle() for _ in range(NUM_CLIENTS)]

    def slow(self) -> list[Ask]:
        """Some read their large answers by and by, while others ask."""
        host, _, port = self._address.rpartition(":")
        for _ in range(NUM_SLOW):
            self._slow.append(asyncio.create_task(_read_slowly(host, int(port))))
        request, channel = infer_request(*_SMALL), self._connect()
        return [asker(channel, lambda: request)] * NUM_BESIDE

    def _connect(self) -> Any:  # noqa: ANN401
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(self._address, options=options)
        self._channels.append(channel)
        return channel


async def _read_slowly(host: str, port: int) -> None:
    """Send requests for large answers on a bare connection, and read a little of them now and then."""
    reader, writer = await asyncio.open_connection(host, port, limit=_SLOW_BYTES)
    request = infer_request("echo", PAYLOADS["echo"].shape)
    writer.write(_slow_calls(request, 4))
    try:
        while True:
            if not await reader.read(_SLOW_BYTES):
                return
            await asyncio.sleep(_SLOW_PAUSE_S)
    finally:
        writer.close()


def _slow_calls(request: bytes, num_calls: int) -> bytes:
    """HTTP/2's preface and some whole calls; their DATA fits the windows that our server gives."""
    message = b"\0" + len(request).to_bytes(4, "big") + request
    # A window that holds all the answers: they wait in the server's socket, not for a frame of ours.
    sent = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        frame(4, 0, 0, b"\0\4" + (1 << 30).to_bytes(4, "big")),
    ]
    sent.append(frame(8, 0, 0, (1 << 30).to_bytes(4, "big")))
    for number in range(num_calls):
        stream = 2 * number + 1
        sent.append(frame(1, 4, stream, header_block("slow")))
        pieces = [message[begin : begin + 16_384] for begin in range(0, len(message), 16_384)]
        sent += [frame(0, piece is pieces[-1], stream, piece) for piece in pieces]
    return b"".join(sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How many there are, and for how long they ask."""

    num_connections: int = 1000
    num_names: int = 4000
    #: Times that each case is measured.
    rounds: int = 3
    #: Measured time of a case, and the time before it that does not count.
    seconds: float = 3.0
    warm_s: float = 1.0

    @property
    def cases(self) -> Mapping[str, Callable[[Crowd], list[Ask]]]:
        """By name, how a case makes its askers."""
        return {
            "connections": lambda crowd: crowd.connections(self.num_connections),
            "names": lambda crowd: crowd.names(self.num_names),
            "streams": Crowd.streams,
            "cancelled": Crowd.cancelled,
            "slow": Crowd.slow,
        }


async def measure_case(
    server: LocalServer, make: Callable[[Crowd], list[Ask]], setting: Setting
) -> dict[str, float]:
    """What a server costs while a crowd asks it, and how long it takes."""
    async with Crowd(server.address) as crowd:
        return await cost(server.process.pid, make(crowd), setting.warm_s, setting.seconds)


def measure(setting: Setting) -> Findings:
    """Run all cases; medians over the rounds, and all rounds."""
    need_cores(2)
    return measure_all(setting)


def measure_all(setting: Setting) -> Findings:
    """The same, however few cores there are."""
    keep_big_blocks()
    samples: dict[str, list[float]] = {}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch) / "models"
        for name, payload in (("small", "small"), ("echo", "echo"), ("many", "small")):
            write_model(PAYLOADS[payload].architecture, models / name / "1" / "model.onnx")
        (models / "many" / "config.toml").write_text(f"copies = {setting.num_names}\n")
        arguments = [*instant_device(Path(scratch)), "--models", str(models)]
        # More than the crowd: whoever starts the server asks it, too.
        arguments += ["--cache-dir", f"{scratch}/cache", "--max-connections", "2000"]
        try:
            # Processes keep the core of whoever starts them.
            os.sched_setaffinity(0, cores[:1])
            with LocalServer(arguments) as server:
                os.sched_setaffinity(0, cores[-1:])
                for _, (case, make) in product(range(setting.rounds), setting.cases.items()):
                    for unit, value in uvloop.run(measure_case(server, make, setting)).items():
                        samples.setdefault(f"{case}_{unit}", []).append(value)
        finally:
            os.sched_setaffinity(0, cores)
    return medians(samples)


STUDY = bench("bench-crowd", Setting(), measure)
