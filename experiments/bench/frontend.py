"""Which gRPC server should carry requests: grpc.aio on uvloop, or grpcio's thread pool?

What is compared, and why:

- `path_*`: the whole way of a request without a scheduler: client -> front end (payload cut out by
  `split_bulk`, envelope, `join_bulk`) -> bidirectional stream -> a worker process that answers 4 kB
  -> front end -> client. (The product has put a socket in the stream's place since.) This decides, because a server that is cheap by itself can be dear once a
  request must wait for another stream: with threads every request costs two hand-overs between
  threads, in aio none. `path_threads` blocks a pool thread per request; `path_threads_nb` frees it
  (`experimental_non_blocking`) and answers from the thread that reads the worker's stream.
- `echo_*`: bare servers that answer at once: the floor that others are quoted against, parsed
  protobuf against raw bytes, asyncio against uvloop, and glibc's malloc as it is against `mallopt`
  (`nomallopt`), which stops it returning and refaulting blocks of a tensor's size.
- `echo_http2_raw`, the product's own server, and where `pygrpc-native` is installed, which the project does
  not depend on, `echo_pygrpc_raw` (its batches of events, answered by one thread) and `echo_pygrpc_aio_raw`
  (its likeness of grpc.aio, on uvloop). What was found of it is in `controller/front/__init__.py`.

Every server is a process of its own; the client is one process of blocking threads with raw bytes,
the same for all. Variants take turns in short rounds in random order, and ratios are taken inside a
round, so that a noisy neighbour hits both sides. CPU is of the server process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import uvloop

from clockwright.bulk import Buffer, join_bulk, split_bulk
from clockwright.process import keep_big_blocks
from clockwright.v1 import inference_pb2 as oip
from clockwright.wire import ATTACH_METHOD
from controller.access.authoriser import Authoriser
from controller.front.calls import Call
from controller.front.door import Door
from controller.front.http2_server import Http2Server
from controller.slabs import Slabs
from experiments.results_file import write_results

INFER = "/inference.GRPCInferenceService/ModelInfer"
# Field numbers of the raw tensors in a request and in an answer.
INPUTS_FIELD, OUTPUTS_FIELD = 7, 6
OPTIONS = [("grpc.max_receive_message_length", 1 << 29), ("grpc.max_send_message_length", 1 << 29)]
PAYLOADS = {"small": (3136, 40), "602kb": (602_112, 4000)}
CLIENTS = (1, 8, 32)
ECHOES = (
    "echo_aio", "echo_aio_uvloop", "echo_aio_uvloop_raw", "echo_aio_uvloop_raw_nomallopt",
    "echo_threads", "echo_threads_raw", "echo_http2_raw",
)  # fmt: skip
PYGRPC_ECHOES = ("echo_pygrpc_raw", "echo_pygrpc_aio_raw")
PATHS = ("path_aio", "path_threads", "path_threads_nb")
# (numerator, denominator) of requests per second, inside one round.
RATIOS = (
    ("path_aio", "path_threads"),
    ("path_aio", "path_threads_nb"),
    ("path_aio", "echo_aio"),
    ("path_threads", "echo_aio"),
    ("echo_threads_raw", "echo_aio_uvloop_raw"),
    ("echo_http2_raw", "echo_aio_uvloop_raw"),
    ("echo_http2_raw", "echo_threads_raw"),
    ("echo_http2_raw", "echo_pygrpc_raw"),
    ("echo_http2_raw", "echo_pygrpc_aio_raw"),
    ("echo_aio_uvloop_raw", "echo_aio_uvloop_raw_nomallopt"),
)


def answer_bytes(payload: Buffer) -> bytes:
    """Answer a small payload with the small reply, a big one with the big reply."""
    return bytes(PAYLOADS["602kb" if len(payload) > 100_000 else "small"][1])


# --- what both kinds of front end do to a request ------------------------------------------------


def to_worker(request: bytes, action_id: int) -> bytes:
    """Turn a ModelInferRequest into an envelope with the same tensor bytes: another one, numbered."""
    header, payload = split_bulk(request, INPUTS_FIELD)
    model = oip.ModelInferRequest.FromString(header).model_name
    envelope = oip.ModelInferRequest(model_name=model, id=str(action_id))
    return join_bulk(envelope.SerializeToString(), INPUTS_FIELD, payload)


def from_worker(message: bytes) -> tuple[int, bytes]:
    """Turn a result's envelope into its action id and a ModelInferResponse."""
    header, payload = split_bulk(message, OUTPUTS_FIELD)
    return int(oip.ModelInferResponse.FromString(header).id), join_bulk(
        oip.ModelInferResponse(
            model_name="m",
            outputs=[
                oip.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=[1])
            ],
        ).SerializeToString(),
        OUTPUTS_FIELD,
        payload,
    )


def echo_raw(request: bytes) -> bytes:
    """Answer at once."""
    return answer_bytes(request)


def echo_parsed(request: oip.ModelInferRequest) -> oip.ModelInferResponse:
    """Answer at once, both messages through protobuf."""
    reply = answer_bytes(request.raw_input_contents[0])
    return oip.ModelInferResponse(model_name=request.model_name, raw_output_contents=[reply])


# A handler gets and returns bytes, or parsed messages.
Message = Any
PARSED = (oip.ModelInferRequest.FromString, oip.ModelInferResponse.SerializeToString)
RAW = (None, None)


def handlers(
    infer: grpc.RpcMethodHandler[Any, Any], attach: grpc.RpcMethodHandler[Any, Any] | None = None
) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
    """Mount the method handlers under their real names."""
    mounted = [
        grpc.method_handlers_generic_handler(
            "inference.GRPCInferenceService", {"ModelInfer": infer}
        )
    ]
    if attach is not None:
        service = ATTACH_METHOD.split("/")[1]
        mounted.append(grpc.method_handlers_generic_handler(service, {"Attach": attach}))
    return tuple(mounted)


# --- grpc.aio -------------------------------------------------------------------------------------


def aio_path() -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
    """Front end and worker link on one event loop."""
    outgoing: asyncio.Queue[bytes] = asyncio.Queue()
    waiting: dict[int, asyncio.Future[bytes]] = {}
    ids = iter(range(1, sys.maxsize))

    async def infer(request: bytes, context: object) -> bytes:
        action_id = next(ids)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        waiting[action_id] = future
        outgoing.put_nowait(to_worker(request, action_id))
        return await future

    async def attach(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        async def write() -> None:
            while True:
                await context.write(await outgoing.get())

        writer = asyncio.create_task(write())
        async for message in requests:
            action_id, response = from_worker(message)
            waiting.pop(action_id).set_result(response)
        writer.cancel()

    return handlers(
        grpc.unary_unary_rpc_method_handler(infer), grpc.stream_stream_rpc_method_handler(attach)
    )


def serve_aio(variant: str) -> None:
    """Serve until killed, on asyncio or uvloop."""

    async def main() -> None:
        server = grpc.aio.server(options=OPTIONS)
        if variant == "path_aio":
            server.add_generic_rpc_handlers(aio_path())
        else:
            behaviour: Callable[[Message], Message] = echo_raw if "raw" in variant else echo_parsed
            codec: tuple[Any, Any] = RAW if "raw" in variant else PARSED

            async def infer(request: Message, context: object) -> Message:
                return behaviour(request)

            server.add_generic_rpc_handlers(
                handlers(grpc.unary_unary_rpc_method_handler(infer, *codec))
            )
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        await server.start()
        await server.wait_for_termination()

    if "aio" in variant and variant != "echo_aio":
        uvloop.run(main())
    else:
        asyncio.run(main())


# --- grpcio's thread pool -------------------------------------------------------------------------


def threads_path(*, blocking: bool) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
    """Front end and worker link on pool threads."""
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    waiting: dict[int, Callable[[bytes], None]] = {}
    ids = iter(range(1, sys.maxsize))

    def infer(request: bytes, context: object) -> bytes:
        answer: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        action_id = next(ids)
        waiting[action_id] = answer.put
        outgoing.put(to_worker(request, action_id))
        return answer.get()

    # On the wire a stream of one answer is a unary call, and only streams can be non-blocking.
    def infer_non_blocking(
        request: bytes, context: object, send: Callable[[bytes | None], None]
    ) -> None:
        def answer(response: bytes) -> None:
            send(response)
            send(None)

        action_id = next(ids)
        waiting[action_id] = answer
        outgoing.put(to_worker(request, action_id))

    infer_non_blocking.experimental_non_blocking = True  # type: ignore[attr-defined]

    def attach(requests: Iterator[bytes], context: object) -> Iterator[bytes]:
        def read() -> None:
            for message in requests:
                action_id, response = from_worker(message)
                waiting.pop(action_id)(response)

        threading.Thread(target=read, daemon=True).start()
        while True:
            yield outgoing.get()

    return handlers(
        grpc.unary_unary_rpc_method_handler(infer)
        if blocking
        else grpc.unary_stream_rpc_method_handler(infer_non_blocking),
        grpc.stream_stream_rpc_method_handler(attach),
    )


def serve_threads(variant: str) -> None:
    """Serve until killed, on a thread pool with room for every client."""
    server = grpc.server(ThreadPoolExecutor(48), options=OPTIONS)
    if variant.startswith("path"):
        server.add_generic_rpc_handlers(threads_path(blocking=variant == "path_threads"))
    else:
        behaviour: Callable[[Message], Message] = echo_raw if "raw" in variant else echo_parsed
        codec: tuple[Any, Any] = RAW if "raw" in variant else PARSED
        server.add_generic_rpc_handlers(
            handlers(
                grpc.unary_unary_rpc_method_handler(lambda request, _: behaviour(request), *codec)
            )
        )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


# --- without grpcio -------------------------------------------------------------------------------


def serve_http2() -> None:
    """Serve until killed, by the product's own server."""

    def infer(call: Call, request: Buffer) -> None:
        # Never too late, so that nobody makes the error of it.
        call.answer((answer_bytes(request),), sys.maxsize, lambda _: TimeoutError())

    async def main() -> None:
        server = Http2Server(
            clock=time.monotonic_ns,
            door=Door(max_requests=10_000, max_bytes=1 << 30),
            max_message_bytes=1 << 29,
            max_connections=1000,
            slabs=Slabs(1 << 30),
            authoriser=Authoriser(),
        )
        service, _, method = INFER[1:].partition("/")
        server.answer_directly(service, method, infer)
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        await server.start()
        await asyncio.Event().wait()

    uvloop.run(main())


def serve_pygrpc(variant: str) -> None:
    """Serve until killed, by pygrpc-native."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    if variant == "echo_pygrpc_raw":
        package: Any = importlib.import_module("pygrpc_native")
        front = package.NativeGrpcFront(f"127.0.0.1:{port}", [(INFER, False)])
        front.start()
        print(port, flush=True)
        while (events := front.recv_batch(64)) is not None:
            for kind, call_id, _, request, _ in events:
                if kind == package.EVENT_CALL:
                    front.respond(call_id, answer_bytes(request))
        return

    async def main() -> None:
        server = importlib.import_module("pygrpc_native.aio").server(options=OPTIONS)

        async def infer(request: bytes, context: object) -> bytes:
            return answer_bytes(request)

        service, _, method = INFER[1:].partition("/")
        handler = grpc.unary_unary_rpc_method_handler(infer)
        server.add_registered_method_handlers(service, {method: handler})
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    uvloop.run(main())


def serve(variant: str) -> None:
    """Serve until killed."""
    if "pygrpc" in variant:
        serve_pygrpc(variant)
    elif "http2" in variant:
        serve_http2()
    elif "threads" in variant:
        serve_threads(variant)
    else:
        serve_aio(variant)


# --- worker and client ----------------------------------------------------------------------------


def work(port: int) -> None:
    """Answer every Infer on the stream at once; the same worker for every path."""

    async def main() -> None:
        channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        async with channel:
            stream = channel.stream_stream(ATTACH_METHOD)()
            async for message in stream:
                header, payload = split_bulk(message, INPUTS_FIELD)
                action_id = oip.ModelInferRequest.FromString(header).id
                result = oip.ModelInferResponse(id=action_id).SerializeToString()
                await stream.write(join_bulk(result, OUTPUTS_FIELD, [answer_bytes(payload[0])]))

    uvloop.run(main())


def request_bytes(num_bytes: int) -> bytes:
    """Make a serialised request with one FP32 tensor of that many bytes."""
    tensor = oip.ModelInferRequest.InferInputTensor(
        name="x", datatype="FP32", shape=[1, num_bytes // 4]
    )
    return oip.ModelInferRequest(
        model_name="m", inputs=[tensor], raw_input_contents=[bytes(num_bytes)]
    ).SerializeToString()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    call: Callable[..., bytes], request: bytes, num_clients: int, seconds: float, pid: int
) -> dict[str, float]:
    """Closed-loop clients for a while: requests per second, latency, server CPU per request, errors."""
    latencies: list[list[float]] = [[] for _ in range(num_clients)]
    errors: list[int] = []
    begin, cpu = time.perf_counter(), cpu_seconds(pid)
    end = begin + seconds

    def client(mine: list[float]) -> None:
        start = time.perf_counter()
        while start < end:
            try:
                call(request, timeout=30)
            except grpc.RpcError:
                errors.append(1)
                time.sleep(0.01)
                start = time.perf_counter()
                continue
            done = time.perf_counter()
            mine.append(done - start)
            start = done

    threads = [threading.Thread(target=client, args=(mine,)) for mine in latencies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - begin
    merged = sorted(latency for mine in latencies for latency in mine) or [wall]
    return {
        "rps": len(merged) / wall,
        "p50_us": merged[len(merged) // 2] * 1e6,
        "p99_us": merged[int(len(merged) * 0.99)] * 1e6,
        "errors": float(len(errors)),
        "cpu_us": (cpu_seconds(pid) - cpu) / len(merged) * 1e6,
    }


def run(rounds: int, seconds: float, seed: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Start every server, take turns, and reduce to medians and spread over rounds."""
    me = [sys.executable, "-m", "experiments.bench.frontend"]
    rng = random.Random(seed)
    processes: list[subprocess.Popen[str]] = []
    calls: dict[str, tuple[Callable[..., bytes], int]] = {}
    samples: dict[str, list[float]] = {}
    try:
        pygrpc = PYGRPC_ECHOES if importlib.util.find_spec("pygrpc_native") else ()
        for variant in (*ECHOES, *pygrpc, *PATHS):
            server = subprocess.Popen([*me, "--serve", variant], stdout=subprocess.PIPE, text=True)
            processes.append(server)
            assert server.stdout is not None
            port = int(server.stdout.readline())
            if variant in PATHS:
                processes.append(subprocess.Popen([*me, "--work", str(port)], text=True))
            channel: Any = grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
            call = channel.unary_unary(INFER)
            for num_bytes, _ in PAYLOADS.values():  # warm
                call(request_bytes(num_bytes), timeout=30, wait_for_ready=True)
            calls[variant] = (call, server.pid)
        for _ in range(rounds):
            for payload, (num_bytes, _) in PAYLOADS.items():
                request = request_bytes(num_bytes)
                for num_clients in CLIENTS:
                    turn = {}
                    for variant in rng.sample(list(calls), len(calls)):
                        call, pid = calls[variant]
                        turn[variant] = measure(call, request, num_clients, seconds, pid)
                        for key, value in turn[variant].items():
                            name = f"{variant}_{payload}_c{num_clients}_{key}"
                            samples.setdefault(name, []).append(value)
                    for over, under in RATIOS:
                        if under not in turn:
                            continue
                        name = f"{over}_over_{under}_{payload}_c{num_clients}_ratio"
                        ratio = turn[over]["rps"] / turn[under]["rps"]
                        samples.setdefault(name, []).append(ratio)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    figures = {key: round(statistics.median(values), 3) for key, values in sorted(samples.items())}
    spread = {key: [round(min(v), 3), round(max(v), 3)] for key, v in sorted(samples.items())}
    return figures, {"rounds": rounds, "seconds": seconds, "spread": spread}


def main() -> None:
    """Run the comparison, or be one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="per variant and round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "nomallopt" not in (arguments.serve or ""):
        keep_big_blocks()
    if arguments.serve:
        serve(arguments.serve)
    elif arguments.work:
        work(arguments.work)
    else:
        figures, extra = run(arguments.rounds, arguments.seconds, arguments.seed)
        command = (
            f"python -m experiments bench-frontend --rounds {arguments.rounds}"
            f" --seconds {arguments.seconds} --seed {arguments.seed}"
        )
        path = write_results(
            "frontend", figures, command=command, seeds=[arguments.seed], extra=extra
        )
        for key, figure in figures.items():
            if key.endswith("ratio"):
                low, high = extra["spread"][key]
                print(f"{key:70} {figure:8.2f}  ({low:.2f} .. {high:.2f})")
        print(path)


if __name__ == "__main__":
    main()
