"""The whole way of a request over loopback gRPC, against a bare grpc.aio echo server.

A real `clockwright up` with a modelled device that takes 10 us, so everything but the device is
measured: front end, scheduler, worker link, worker process and its lanes, and back. The echo server
(`bench_frontend`'s `echo_aio`: asyncio, both messages through protobuf) answers payloads of the same
size at once. Closed-loop clients, the same for both; the two take turns in short rounds and ratios are
taken inside a round, so that a noisy neighbour hits both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc

from clockwright.process import keep_big_blocks
from clockwright.units import DEFAULT_BATCH_SIZES, NS_PER_MS, NS_PER_US, PAGE_BYTES
from clockwright.v1 import inference_pb2 as oip
from experiments.bench.frontend import INFER, OPTIONS, measure, request_bytes
from experiments.live.local_server import LocalServer
from modelzoo.build import write_model
from modelzoo.profile import Profile, ProfileRow, save_profile

# Input bytes as bench_frontend's payloads: 784 floats in, 10 out; 3x224x224 in, 1000 out.
MODELS = {"small": ("mlp-784-128-10", [1, 784]), "602kb": ("squeezenet1.1", [1, 3, 224, 224])}
CLIENTS = (1, 8, 32)
# Every batch size takes 10 us, so no request waits for the device.
NEAR_ZERO = Profile(
    name="near-zero",
    rows={
        "*": ProfileRow(
            name="*",
            weights_bytes=PAGE_BYTES,
            load_ns=NS_PER_MS,
            exec_ns=dict.fromkeys(DEFAULT_BATCH_SIZES, 10 * NS_PER_US),
        )
    },
)
ROUNDS = 7
SECONDS = 0.7


def infer_request(model: str, shape: list[int], *, slo_ms: int = 10_000) -> bytes:
    """Serialise a request with one FP32 tensor of zeros; by default its SLO is never missed."""
    num_bytes = 4
    for size in shape:
        num_bytes *= size
    tensor = oip.ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=shape)
    request = oip.ModelInferRequest(
        model_name=model, inputs=[tensor], raw_input_contents=[bytes(num_bytes)]
    )
    request.parameters["slo_ms"].int64_param = slo_ms
    return request.SerializeToString()


def measure_all() -> tuple[dict[str, float], dict[str, Any]]:
    """Run the comparison; medians over rounds, and their spread."""
    keep_big_blocks()
    samples: dict[str, list[float]] = {}
    echo = subprocess.Popen(
        [sys.executable, "-m", "experiments.bench.frontend", "--serve", "echo_aio"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:
            models = Path(scratch) / "models"
            for name, (architecture, _) in MODELS.items():
                write_model(architecture, models / name / "1" / "model.onnx")
            profile = Path(scratch) / "near-zero.json"
            save_profile(NEAR_ZERO, profile)
            device = f"modelled:{profile}"
            arguments = ["--models", str(models), "--device", device]
            with LocalServer([*arguments, "--cache-dir", f"{scratch}/cache"]) as server:
                assert echo.stdout is not None
                addresses = {
                    "clockwright": (server.address, server.process.pid),
                    "echo": (f"127.0.0.1:{int(echo.stdout.readline())}", echo.pid),
                }
                _take_turns(addresses, samples)
    finally:
        echo.kill()
        echo.wait()
    figures = {key: round(statistics.median(values), 4) for key, values in sorted(samples.items())}
    spread = {key: [round(min(v), 4), round(max(v), 4)] for key, v in sorted(samples.items())}
    return figures, {"rounds": ROUNDS, "seconds": SECONDS, "spread": spread}


def _take_turns(addresses: dict[str, tuple[str, int]], samples: dict[str, list[float]]) -> None:
    channels: list[Any] = []
    calls: dict[str, tuple[Any, int]] = {}
    for name, (address, pid) in addresses.items():
        channel: Any = grpc.insecure_channel(address, options=OPTIONS)
        channels.append(channel)
        calls[name] = channel.unary_unary(INFER), pid
    for round_number in range(ROUNDS):
        for payload, (_, shape) in MODELS.items():
            num_bytes = len(infer_request(payload, shape)) // 1000 * 1000
            requests = {
                "clockwright": infer_request(payload, shape),
                "echo": request_bytes(3136 if num_bytes < 100_000 else 602_112),
            }
            for num_clients in CLIENTS:
                turn = {}
                names = list(calls) if round_number % 2 else list(reversed(calls))
                for name in names:
                    call, pid = calls[name]
                    turn[name] = measure(call, requests[name], num_clients, SECONDS, pid)
                    for key, value in turn[name].items():
                        samples.setdefault(
                            f"grpc_{name}_{payload}_c{num_clients}_{key}", []
                        ).append(value)
                samples.setdefault(f"grpc_ratio_{payload}_c{num_clients}", []).append(
                    turn["clockwright"]["rps"] / turn["echo"]["rps"]
                )
    for channel in channels:
        channel.close()


if __name__ == "__main__":
    for key, value in measure_all()[0].items():
        print(f"{key:45} {value:12.3f}")
