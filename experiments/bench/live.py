"""What a request costs a live server, compared with bare servers of grpcio that do nothing else.

Three servers answer the same requests: a real `clockwright up`, and a sync and an asyncio server of grpcio (the
latter on uvloop) which parse a request and answer at once with as many bytes. All processes of all servers have one
core, and the generator, a client of grpc.aio in this process, has another. The servers take turns within a
round, ratios are taken within a round, and every figure is the median of the rounds.

CPU time is that of all processes of a server, as the kernel's scheduler counts it. `small` has 3 kB in and 40
bytes out; `top` 602 kB in and 4 kB out; `echo` 602 kB in and out. The device of these is modelled and takes
1 us, so that the server is what is measured; `mlp` is `small` on the processor.

`--mosec PYTHON` names a Python that has mosec, whose server answers `small` in batches over HTTP/1.1, a connection
for each client. `--native` measures what `make native` compiled, too: as `small_us_c32_native`. `native_large_ratio` is its processor time
compared with that of the sources with 602 kB, and `native_large_memory_ratio` its memory: the worse of `top` and `echo`.
"""

from __future__ import annotations

import asyncio
import functools
import math
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import httpx
import uvloop

from clockwright.errors import ConfigError
from clockwright.process import keep_big_blocks
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_US
from clockwright.v1 import inference_pb2 as oip
from experiments.live.local_server import LocalServer, free_ports
from experiments.live.processor_time import cpu_ns, family, rss_bytes
from experiments.native import ENVIRONMENT
from experiments.study.bench import Findings, bench, need_cores
from modelzoo.build import write_model
from modelzoo.profile import Profile, ProfileRow, save_profile

OPTIONS = [("grpc.max_receive_message_length", 1 << 29), ("grpc.max_send_message_length", 1 << 29)]
INFER = "/inference.GRPCInferenceService/ModelInfer"
_MOSEC = """
from mosec import Server, Worker


class Echo(Worker):
    def deserialize(self, data):
        return data

    def serialize(self, data):
        return data

    def forward(self, data):
        return [bytes(40)] * len(data)


server = Server()
server.append_worker(Echo, num=1, max_batch_size=16, max_wait_time=1)
server.run()
"""
_MOSEC_START_S = 10.0
_WARM_S = 0.3
_LIMIT_S = 60.0
# What of the compiled build is compared, and the figure of it.
_NATIVE_LARGE = {"us": "native_large_ratio", "rss_mb": "native_large_memory_ratio"}


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    #: Measure `build/native`, too.
    native: bool = False
    #: A Python that has mosec; empty: mosec is left out.
    mosec: str = ""
    rounds: int = 3
    #: Length of each turn.
    seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Payload:
    """A kind of request."""

    architecture: str
    shape: tuple[int, ...]
    #: Bytes of the answer's one tensor.
    answer_bytes: int


PAYLOADS = {
    "small": Payload("mlp-784-128-10", (1, 784), 40),
    "top": Payload("squeezenet1.1", (1, 3, 224, 224), 4000),
    "echo": Payload("echo-150528", (1, 150_528), 602_112),
}
#: What is measured of every server: payload and clients.
CASES = (("small", 1), ("small", 8), ("small", 32), ("top", 8), ("echo", 8))


# --- servers --------------------------------------------------------------------------------------


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


def _answer(request: Any) -> Any:  # noqa: ANN401  ModelInferRequest and ModelInferResponse
    payload = PAYLOADS[request.model_name]
    response = oip.ModelInferResponse(
        model_name=request.model_name, raw_output_contents=[bytes(payload.answer_bytes)]
    )
    response.outputs.add(name="output", datatype="FP32", shape=(1, payload.answer_bytes // 4))
    return response


def _handler(behaviour: Callable[..., Any]) -> grpc.GenericRpcHandler[Any, Any]:
    service, _, method = INFER[1:].partition("/")
    infer = grpc.unary_unary_rpc_method_handler(
        behaviour, oip.ModelInferRequest.FromString, oip.ModelInferResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(service, {method: infer})


def _serve_bare(kind: str, port: Connection) -> None:
    """Answer at once, until killed: `sync` or `aio`."""
    keep_big_blocks()
    if kind == "sync":
        server = grpc.server(ThreadPoolExecutor(max(c for _, c in CASES)), options=OPTIONS)
        server.add_generic_rpc_handlers((_handler(lambda request, _: _answer(request)),))
        port.send(server.add_insecure_port("127.0.0.1:0"))
        server.start()
        server.wait_for_termination()
        return

    async def main() -> None:
        async def infer(request: Any, _: object) -> Any:  # noqa: ANN401
            return _answer(request)

        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((_handler(infer),))
        port.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    uvloop.run(main())


@contextmanager
def bare_server(kind: str) -> Iterator[tuple[str, int]]:
    """A bare server in a process of its own, until the block ends: its address and its pid."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_bare, args=(kind, theirs))
    process.start()
    theirs.close()
    try:
        port = ours.recv()
        assert process.pid is not None
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.join()


@contextmanager
def mosec_server(python: str, folder: Path) -> Iterator[tuple[str, int]]:
    """A server of mosec with batches of 16 and a bound of 64 requests, until the block ends: its address and its pid.

    Raises:
        ConfigError: it does not start.
    """
    script = folder / "mosec_server.py"
    script.write_text(_MOSEC)
    (port,) = free_ports(1)
    command = [python, str(script), "--port", str(port), "--capacity", "64", "--log-level", "error"]
    environment = {**os.environ, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.DEVNULL)
    url, since_s = f"http://127.0.0.1:{port}/inference", time.monotonic()
    try:
        while True:
            with suppress(httpx.TransportError):
                if httpx.post(url, content=bytes(3136), trust_env=False).is_success:
                    break
            if process.poll() is not None or time.monotonic() - since_s > _MOSEC_START_S:
                raise ConfigError(f"mosec of {python} did not start")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


# --- the generator --------------------------------------------------------------------------------


def infer_request(
    model: str, shape: Sequence[int], *, slo_ms: int = 10_000, request_id: str = ""
) -> bytes:
    """Serialise a request with one FP32 tensor of zeros; by default its SLO is never missed."""
    request = oip.ModelInferRequest(
        model_name=model, id=request_id, raw_input_contents=[bytes(4 * math.prod(shape))]
    )
    request.inputs.add(name="input", datatype="FP32", shape=shape)
    request.parameters["slo_ms"].int64_param = slo_ms
    return request.SerializeToString()


Asker = Callable[[], Awaitable[object]]


@asynccontextmanager
async def _over_grpc(address: str, payload: str, num_clients: int) -> AsyncIterator[list[Asker]]:
    """Clients that ask over one channel."""
    request = infer_request(payload, PAYLOADS[payload].shape)
    channel: Any
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        ask = functools.partial(channel.unary_unary(INFER), request, timeout=_LIMIT_S)
        yield [ask] * num_clients


@asynccontextmanager
async def _over_http(address: str, payload: str, num_clients: int) -> AsyncIterator[list[Asker]]:
    """Clients that ask over a connection of HTTP/1.1 each."""
    body = bytes(4 * math.prod(PAYLOADS[payload].shape))
    head = f"POST /inference HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n\r\n"
    host, _, port = address.partition(":")

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + body)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        assert status.startswith("http/1.1 200"), status
        (length,) = (line[15:] for line in lines if line.startswith("content-length:"))
        await reader.readexactly(int(length))

    streams = [await asyncio.open_connection(host, int(port)) for _ in range(num_clients)]
    try:
        yield [functools.partial(ask, *stream) for stream in streams]
    finally:
        for _, writer in streams:
            writer.close()


async def _latencies(askers: Sequence[Asker], seconds: float) -> list[float]:
    """Have clients ask for a while, one request after the other, each at least once; gives what each took, in s."""
    found = list[float]()
    end_s = time.perf_counter() + seconds

    async def go_on(ask: Asker) -> None:
        now_s = 0.0
        while now_s < end_s:
            begin_s = time.perf_counter()
            await ask()
            now_s = time.perf_counter()
            found.append(now_s - begin_s)

    await asyncio.gather(*map(go_on, askers))
    return found


async def _turn(
    clients: AbstractAsyncContextManager[list[Asker]], pid: int, seconds: float
) -> dict[str, float]:
    """Have clients ask a server for a while, one request after the other.

    Returns:
        us of the server's processors per answer, answers per second, latencies, and MB that the server has resident.
    """
    async with clients as askers:
        await _latencies(askers, _WARM_S)
        pids = family(pid)
        before_ns, begin_s = cpu_ns(pids), time.perf_counter()
        latencies_s = sorted(await _latencies(askers, seconds))
        elapsed_s, used_ns = time.perf_counter() - begin_s, cpu_ns(pids) - before_ns
    return {
        "us": used_ns / len(latencies_s) / 1e3,
        "rps": len(latencies_s) / elapsed_s,
        "p50_ms": latencies_s[len(latencies_s) // 2] * 1e3,
        "p99_ms": latencies_s[int(len(latencies_s) * 0.99)] * 1e3,
        "rss_mb": sum(map(rss_bytes, pids)) / 1e6,
    }


# --- all of it ------------------------------------------------------------------------------------


def measure(setting: Setting) -> Findings:
    """Run the comparison; medians over the rounds, and all rounds."""
    need_cores(2)
    keep_big_blocks()
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        models = Path(scratch) / "models"
        for name, payload in PAYLOADS.items():
            write_model(payload.architecture, models / name / "1" / "model.onnx")
        mlp = Path(scratch) / "mlp"
        write_model(PAYLOADS["small"].architecture, mlp / "small" / "1" / "model.onnx")
        modelled = [*instant_device(Path(scratch)), "--models", str(models)]
        settings: dict[str, tuple[list[str], Mapping[str, str]]] = {
            "": (modelled, {}),
            "mlp": (["--device", "cpu", "--models", str(mlp)], {}),
        }
        if setting.native:
            settings["native"] = (modelled, ENVIRONMENT)
        # Processes keep the core of the process that starts them.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])
        addresses: dict[str, tuple[str, int]] = {}
        for name, (arguments, environment) in settings.items():
            cache = f"{scratch}/cache-{name}"
            server = stack.enter_context(
                LocalServer([*arguments, "--cache-dir", cache], environment=environment)
            )
            addresses[name] = server.address, server.process.pid
        for kind in ("sync", "aio"):
            addresses[kind] = stack.enter_context(bare_server(kind))
        if setting.mosec:
            addresses["mosec"] = stack.enter_context(mosec_server(setting.mosec, Path(scratch)))
        os.sched_setaffinity(0, cores[-1:])
        for number in range(setting.rounds):
            _run_round(addresses, samples, setting.seconds, backwards=number % 2 == 1)
    rounds = {key: [round(value, 3) for value in values] for key, values in sorted(samples.items())}
    return Findings(
        {key: statistics.median(values) for key, values in rounds.items()}, {"rounds": rounds}
    )


def _run_round(
    addresses: Mapping[str, tuple[str, int]],
    samples: dict[str, list[float]],
    seconds: float,
    *,
    backwards: bool,
) -> None:
    def turn(name: str, payload: str, num_clients: int, key: str) -> dict[str, float]:
        address, pid = addresses[name]
        over = _over_http if name == "mosec" else _over_grpc
        found = uvloop.run(_turn(over(address, payload, num_clients), pid, seconds))
        for unit, value in found.items():
            samples.setdefault(key.format(unit=unit), []).append(value)
        return found

    order = [name for name in ("", "native", "sync", "aio", "mosec") if name in addresses]
    if backwards:
        order.reverse()
    large: dict[str, float] = {}
    for payload, clients in CASES:
        found = {}
        for name in order:
            if name == "mosec" and payload != "small":
                continue
            key = f"{payload}_{name}_{{unit}}_c{clients}"
            if name in ("", "native"):
                key = f"{payload}_{{unit}}_c{clients}{'_' * bool(name)}{name}"
            found[name] = turn(name, payload, clients, key)
        for name, suffix in (("sync", ""), ("aio", "_aio"), ("mosec", "_mosec")):
            if name in found:
                ratio = found[""]["us"] / found[name]["us"]
                samples.setdefault(f"{payload}_ratio{suffix}_c{clients}", []).append(ratio)
        if "native" in found and payload != "small":
            for unit, figure in _NATIVE_LARGE.items():
                ratio = found["native"][unit] / found[""][unit]
                large[figure] = max(large.get(figure, 0.0), ratio)
    for figure, ratio in large.items():
        samples.setdefault(figure, []).append(ratio)
    turn("mlp", "small", 8, "mlp_{unit}_c8")


STUDY = bench("bench-live", Setting(), measure)
