"""What a live server takes per request when clients are many, or behave as few do, and how long they wait.

The cases, against a real `clockwright up` on a device that takes 1 us, with requests of 3 kB:

* `connections`: 1,000 connections, one request under way on each.
* `names`: 4,000 models, and 32 clients that ask any of them.
* `streams`: 32 bidirectional streams, one request under way on each.
* `cancelled`: 32 clients that take every other request back as soon as it is sent; per request that is answered.
* `slow`: 8 clients beside 8 others who each have 600 kB answers coming and read 10 kB/s of them.

All of the server has one core, the generator, clients of grpc.aio in this process, another. With `--beside`
another tree's server takes turns with this one's within a round; every figure is the median of the rounds.

`make bench-crowd` holds it against the last commit before the front was our own.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from clockwright.process import keep_big_blocks
from experiments.bench.live import INFER, OPTIONS, PAYLOADS, infer_request
from experiments.bench.request_cost import instant_device
from experiments.live.local_server import LocalServer
from experiments.live.processor_time import cpu_ns, family
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

#: Asks once, and says whether that was answered.
Ask = Callable[[], Awaitable[bool]]


def _channel(address: str) -> Any:  # noqa: ANN401  the stubs want more of it
    return grpc.aio.insecure_channel(
        address, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    )


class Crowd:
    """The clients of a case: connected once, and then asking for as long as they are told."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channels: list[Any] = []
        self._slow: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._slow:
            task.cancel()
        await asyncio.gather(*self._slow, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def connections(self, num_connections: int) -> list[Ask]:
        """Each asker has a connection of its own."""
        request = infer_request(*_SMALL)
        return [self._unary(lambda: request, self._connect()) for _ in range(num_connections)]

    def names(self, num_names: int) -> list[Ask]:
        """All ask on one connection, each time for another of so many models."""
        requests = [infer_request(f"many-{number}", _SMALL[1]) for number in range(num_names)]
        generator, channel = random.Random(1), self._connect()
        return [
            self._unary(lambda: generator.choice(requests), channel) for _ in range(NUM_CLIENTS)
        ]

    def streams(self) -> list[Ask]:
        """Each asker has a stream, on one connection."""
        request, channel = infer_request(*_SMALL), self._connect()

        def asker() -> Ask:
            call = channel.stream_stream(_STREAM)()

            async def ask() -> bool:
                await call.write(request)
                return await call.read() is not EOF

            return ask

        return [asker() for _ in range(NUM_CLIENTS)]

    def cancelled(self) -> list[Ask]:
        """Each asker takes every other request back."""
        request, channel = infer_request(*_SMALL), self._connect()
        call = channel.unary_unary(INFER)

        def asker() -> Ask:
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

        return [asker() for _ in range(NUM_CLIENTS)]

    def slow(self) -> list[Ask]:
        """Some read their large answers by and by, while others ask."""
        host, _, port = self._address.rpartition(":")
        for _ in range(NUM_SLOW):
            self._slow.append(asyncio.create_task(_read_slowly(host, int(port))))
        request, channel = infer_request(*_SMALL), self._connect()
        return [self._unary(lambda: request, channel) for _ in range(NUM_BESIDE)]

    def _connect(self) -> Any:  # noqa: ANN401
        channel = _channel(self._address)
        self._channels.append(channel)
        return channel

    def _unary(self, request: Callable[[], bytes], channel: Any) -> Ask:  # noqa: ANN401
        call = channel.unary_unary(INFER)

        async def ask() -> bool:
            await call(request(), timeout=_LIMIT_S)
            return True

        return ask


async def _read_slowly(host: str, port: int) -> None:
    """Send requests for large answers on a bare connection, and read a little of them now and then."""
    reader, writer = await asyncio.open_connection(host, port, limit=_SLOW_BYTES)
    request = infer_request("echo", PAYLOADS["echo"].shape)
    writer.write(_slow_calls(request, 4))
    try:
        while True:
            if not await reader.read(_SLOW_BYTES):
                raise RuntimeError("the server hung up on a client that reads slowly")
            await asyncio.sleep(_SLOW_PAUSE_S)
    finally:
        writer.close()


def _slow_calls(request: bytes, num_calls: int) -> bytes:
    """HTTP/2's preface and some whole calls; their DATA fits the windows that our server gives."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags))
        return head + stream.to_bytes(4, "big") + payload

    def literal(name: str, value: str) -> bytes:
        return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))

    headers = {":method": "POST", ":scheme": "http", ":path": INFER, ":authority": "slow"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    block = b"".join(literal(name, value) for name, value in headers.items())
    message = b"\0" + len(request).to_bytes(4, "big") + request
    # A window that holds all the answers: they wait in the server's socket, not for a frame of ours.
    sent = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        frame(4, 0, 0, b"\0\4" + (1 << 30).to_bytes(4, "big")),
    ]
    sent.append(frame(8, 0, 0, (1 << 30).to_bytes(4, "big")))
    for number in range(num_calls):
        stream = 2 * number + 1
        sent.append(frame(1, 4, stream, block))
        pieces = [message[begin : begin + 16_384] for begin in range(0, len(message), 16_384)]
        sent += [frame(0, piece is pieces[-1], stream, piece) for piece in pieces]
    return b"".join(sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How many there are, and for how long they ask."""

    #: Another tree, whose server is measured too.
    beside: str = field(default="", metadata={"said": "TREE"})
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
    address: str, pid: int, make: Callable[[Crowd], list[Ask]], warm_s: float, seconds: float
) -> dict[str, float]:
    """Have a crowd ask for a while: us of the server's processors per answer, answers per second, latencies."""
    async with Crowd(address) as crowd:
        askers = make(crowd)
        await _ask(askers, warm_s)
        pids = family(pid)
        before_ns, begin_s = cpu_ns(pids), time.perf_counter()
        latencies_s = sorted(await _ask(askers, seconds))
        elapsed_s, used_ns = time.perf_counter() - begin_s, cpu_ns(pids) - before_ns
    return {
        "us": used_ns / len(latencies_s) / 1e3,
        "rps": len(latencies_s) / elapsed_s,
        "p50_ms": latencies_s[len(latencies_s) // 2] * 1e3,
        "p99_ms": latencies_s[int(len(latencies_s) * 0.99)] * 1e3,
    }


async def _ask(askers: list[Ask], seconds: float) -> list[float]:
    """Have all ask, one request after the other; returns the latencies of what was answered, at least one each."""
    latencies_s: list[float] = []
    end_s = time.perf_counter() + seconds

    async def go_on(ask: Ask) -> None:
        answered = False
        while not answered or time.perf_counter() < end_s:
            begin_s = time.perf_counter()
            if await ask():
                answered = True
                latencies_s.append(time.perf_counter() - begin_s)

    await asyncio.gather(*(go_on(ask) for ask in askers))
    return latencies_s


def measure(setting: Setting) -> Findings:
    """Run all cases against the servers of one tree or two, by turns; medians over the rounds, and all rounds."""
    need_cores(2)
    return measure_all(setting)


def measure_all(setting: Setting) -> Findings:
    """The same, however few cores there are."""
    trees = {"": ""} | ({"beside_": str(Path(setting.beside).resolve())} if setting.beside else {})
    keep_big_blocks()
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        models = Path(scratch) / "models"
        for name in ("small", "echo"):
            write_model(PAYLOADS[name].architecture, models / name / "1" / "model.onnx")
        write_model(PAYLOADS["small"].architecture, models / "many" / "1" / "model.onnx")
        (models / "many" / "config.toml").write_text(f"copies = {setting.num_names}\n")
        cores = sorted(os.sched_getaffinity(0))
        stack.callback(os.sched_setaffinity, 0, cores)
        server_core, generator_core = cores[0], cores[-1]
        os.sched_setaffinity(0, {server_core})
        servers: dict[str, LocalServer] = {}
        for prefix, tree in trees.items():
            arguments = [*instant_device(Path(scratch)), "--models", str(models)]
            # One more than the crowd: whoever starts the server asks it, too.
            arguments += ["--cache-dir", f"{scratch}/cache-{prefix}", "--max-connections", "2000"]
            environment = {"PYTHONPATH": tree, "PYTHONSAFEPATH": "1"} if tree else {}
            server = LocalServer(arguments, environment=environment)
            servers[prefix] = stack.enter_context(server)
        os.sched_setaffinity(0, {generator_core})
        for number in range(setting.rounds):
            for case, make in setting.cases.items():
                for prefix in [*servers][:: -1 if number % 2 else 1]:
                    server = servers[prefix]
                    measured = measure_case(
                        server.address, server.process.pid, make, setting.warm_s, setting.seconds
                    )
                    for unit, value in uvloop.run(measured).items():
                        samples.setdefault(f"{prefix}{case}_{unit}", []).append(value)
    figures = {key: round(statistics.median(values), 3) for key, values in sorted(samples.items())}
    rounds = {key: [round(value, 3) for value in values] for key, values in sorted(samples.items())}
    return Findings(figures, {"rounds": rounds})


STUDY = bench("bench-crowd", Setting(), measure)
