"""What a request costs a live server, beside bare servers of grpcio that do nothing else.

Three servers answer the same requests: a real `clockwright up`, and a sync and an asyncio server of grpcio (the
latter on uvloop) which parse a request and answer at once with as many bytes. All processes of all servers have one
core, and the generator, a client of grpc.aio in this process, has another. The servers take turns within a
round, ratios are taken within a round, and every figure is the median of the rounds.

CPU time is that of all processes of a server, as the kernel's scheduler counts it. `small` has 3 kB in and 40
bytes out; `top` 602 kB in and 4 kB out; `echo` 602 kB in and out. The device of these is modelled and takes
1 us, so that the server is what is measured; `mlp` is `small` on the processor.

`--native` measures what `make native` compiled, too: as `small_us_c32_native`.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from clockwright.process import keep_big_blocks
from clockwright.v1 import inference_pb2 as oip
from experiments.bench.request_cost import instant_device
from experiments.live.local_server import LocalServer
from experiments.live.processor_time import cpu_ns, family
from experiments.study.bench import Findings, bench, need_cores
from modelzoo.build import write_model

INFER = "/inference.GRPCInferenceService/ModelInfer"
OPTIONS = [("grpc.max_receive_message_length", 1 << 29), ("grpc.max_send_message_length", 1 << 29)]
_WARM_S = 0.3
_SERVER_CORE, _GENERATOR_CORE = 0, 1
NATIVE = Path(__file__).resolve().parents[2] / "build" / "native"


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured."""

    #: Measure `build/native`, too.
    native: bool = False
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


def infer_request(model: str, shape: Sequence[int], *, slo_ms: int = 10_000) -> bytes:
    """Serialise a request with one FP32 tensor of zeros; by default its SLO is never missed."""
    request = oip.ModelInferRequest(
        model_name=model, raw_input_contents=[bytes(4 * math.prod(shape))]
    )
    request.inputs.add(name="input", datatype="FP32", shape=shape)
    request.parameters["slo_ms"].int64_param = slo_ms
    return request.SerializeToString()


# --- servers --------------------------------------------------------------------------------------


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


def serve_bare(kind: str) -> None:
    """Answer at once, until killed: `sync` or `aio`."""
    keep_big_blocks()
    if kind == "sync":
        server = grpc.server(ThreadPoolExecutor(max(c for _, c in CASES)), options=OPTIONS)
        server.add_generic_rpc_handlers((_handler(lambda request, _: _answer(request)),))
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        server.start()
        server.wait_for_termination()
        return

    async def main() -> None:
        async def infer(request: Any, _: object) -> Any:  # noqa: ANN401
            return _answer(request)

        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((_handler(infer),))
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        await server.start()
        await server.wait_for_termination()

    uvloop.run(main())


class BareServer:
    """A bare server in a process of its own, until the `with` block ends."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments.bench.live", kind],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = f"127.0.0.1:{int(self.process.stdout.readline())}"

    def __enter__(self) -> BareServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


# --- the generator --------------------------------------------------------------------------------


async def _ask(address: str, request: bytes, num_clients: int, seconds: float) -> list[float]:
    """Have closed-loop clients ask for a while; returns the latencies in s. All must be answered."""
    latencies: list[float] = []
    channel: Any = grpc.aio.insecure_channel(address, options=OPTIONS)
    async with channel:
        call = channel.unary_unary(INFER)
        end_s = time.perf_counter() + seconds

        async def client() -> None:
            while (begin_s := time.perf_counter()) < end_s:
                await call(request, timeout=30)
                latencies.append(time.perf_counter() - begin_s)

        await asyncio.gather(*(client() for _ in range(num_clients)))
    return latencies


def measure_turn(
    address: str, pid: int, payload: str, num_clients: int, seconds: float
) -> dict[str, float]:
    """Ask a server for a while: us of its CPU per request, requests per second, and latencies."""
    request = infer_request(payload, PAYLOADS[payload].shape)
    uvloop.run(_ask(address, request, num_clients, _WARM_S))
    pids = family(pid)
    before_ns, begin_s = cpu_ns(pids), time.perf_counter()
    latencies = sorted(uvloop.run(_ask(address, request, num_clients, seconds)))
    elapsed_s, used_ns = time.perf_counter() - begin_s, cpu_ns(pids) - before_ns
    return {
        "us": used_ns / len(latencies) / 1e3,
        "rps": len(latencies) / elapsed_s,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
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
            # With the safe path, nothing of the working folder comes before what is compiled.
            compiled = {"PYTHONPATH": str(NATIVE), "PYTHONSAFEPATH": "1"}
            settings["native"] = (modelled, compiled)
        # Processes keep the core of whoever starts them.
        os.sched_setaffinity(0, {_SERVER_CORE})
        addresses: dict[str, tuple[str, int]] = {}
        for name, (arguments, environment) in settings.items():
            cache = f"{scratch}/cache-{name}"
            server = stack.enter_context(
                LocalServer([*arguments, "--cache-dir", cache], environment=environment)
            )
            addresses[name] = server.address, server.process.pid
        for kind in ("sync", "aio"):
            bare = stack.enter_context(BareServer(kind))
            addresses[kind] = bare.address, bare.process.pid
        os.sched_setaffinity(0, {_GENERATOR_CORE})
        for number in range(setting.rounds):
            _run_round(addresses, samples, setting.seconds, backwards=number % 2 == 1)
    figures = {key: round(statistics.median(values), 3) for key, values in sorted(samples.items())}
    rounds = {key: [round(value, 3) for value in values] for key, values in sorted(samples.items())}
    return Findings(figures, {"rounds": rounds})


def _run_round(
    addresses: dict[str, tuple[str, int]],
    samples: dict[str, list[float]],
    seconds: float,
    *,
    backwards: bool,
) -> None:
    for payload, num_clients in CASES:
        found: dict[str, dict[str, float]] = {}
        for name in [*reversed(addresses)] if backwards else [*addresses]:
            if name in ("", "sync", "aio"):
                found[name] = measure_turn(*addresses[name], payload, num_clients, seconds)
        for name, figures in found.items():
            for unit, value in figures.items():
                key = f"{payload}_{name}_{unit}_c{num_clients}".replace("__", "_")
                samples.setdefault(key, []).append(value)
        for name, suffix in (("sync", ""), ("aio", "_aio")):
            key = f"{payload}_ratio{suffix}_c{num_clients}"
            samples.setdefault(key, []).append(found[""]["us"] / found[name]["us"])
    for unit, value in measure_turn(*addresses["mlp"], "small", 8, seconds).items():
        samples.setdefault(f"mlp_{unit}_c8", []).append(value)
    if "native" in addresses:
        for num_clients in (1, 8, 32):
            for unit, value in measure_turn(
                *addresses["native"], "small", num_clients, seconds
            ).items():
                samples.setdefault(f"small_{unit}_c{num_clients}_native", []).append(value)


STUDY = bench("bench-live", Setting(), measure)

if __name__ == "__main__":  # A bare server, in its own process.
    serve_bare(sys.argv[1])
