"""Whatever is sent to a server, it says what was wrong with it, and serves everybody else."""

from __future__ import annotations

import asyncio
import csv
import random
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest

from clockwright import (
    AsyncClient,
    Client,
    ClockwrightError,
    ConfigError,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
    wire,
)
from clockwright.operator import Operator
from clockwright.v1 import inference_pb2 as pb
from clockwright.v1 import worker_pb2
from experiments.live.local_server import LocalServer
from modelzoo.build import build_model
from tests.kit.hostile_models import bomb, endless
from tests.kit.processes import PATIENCE_S, until, worker, write_models
from tests.kit.scripted_worker import LoopbackWorker

INFER = "/inference.GRPCInferenceService/ModelInfer"
# A pause of the machine counts as a long execution, and the next ones are predicted to take as long:
# all that wait have the time for it.
SLO_MS = 600_000
IMAGE = np.ones((1, 1, 8, 8), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("faults")
    models = write_models(directory / "models", tiny="tiny_conv", pair="two_by_two")
    whole = build_model("mlp-64-64-10").SerializeToString()
    truncated = models / "truncated" / "1" / "model.onnx"
    truncated.parent.mkdir(parents=True)
    truncated.write_bytes(whole[: len(whole) // 2])
    arguments = ["--pages", "4", "--cache-dir", str(directory / "cache")]
    arguments += ["--compile-memory-mib", "1024", "--compile-cpu-s", "5"]
    with LocalServer(["--models", str(models), *arguments]) as server:
        yield server


@pytest.fixture(autouse=True)
def witness(server: LocalServer) -> Iterator[None]:
    """Somebody else, who is served as before once the test has done its worst."""
    with Client(server.address) as client, Operator(server.address) as operator:
        expected = client.infer("tiny", IMAGE, slo_ms=SLO_MS).outputs["output"]
        pids = [row.pid for row in operator.workers() if row.worker_id == "local-0"]
        yield
        found = client.infer("tiny", IMAGE, slo_ms=SLO_MS).outputs["output"]
        np.testing.assert_array_equal(found, expected)
        assert [row.pid for row in operator.workers() if row.worker_id == "local-0"] == pids
    assert server.process.poll() is None


def call(server: LocalServer, request: bytes, *, method: str = INFER) -> tuple[str, str]:
    """Code and text of a call that fails."""
    options = [("grpc.max_send_message_length", -1)]
    channel: Any = grpc.insecure_channel(server.address, options=options)
    with channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(request, timeout=PATIENCE_S)
    error: Any = caught.value
    return error.code().name, error.details()


def tensor(
    name: str = "input", datatype: str = "FP32", shape: tuple[int, ...] = (1, 1, 8, 8)
) -> pb.ModelInferRequest.InferInputTensor:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)


def request(**changes: object) -> bytes:
    """A good request for `tiny`, with some fields changed."""
    fields: dict[str, Any] = {
        "model_name": "tiny",
        "inputs": [tensor()],
        "raw_input_contents": [bytes(256)],
        "parameters": {"slo_ms": pb.InferParameter(int64_param=SLO_MS)},
    }
    return pb.ModelInferRequest(**{**fields, **changes}).SerializeToString()


def slo(milliseconds: float) -> dict[str, pb.InferParameter]:
    return {"slo_ms": pb.InferParameter(double_param=milliseconds)}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model_name": "nobody"}, "NOT_FOUND", ["nobody"]),
        ({"inputs": [tensor(shape=(1, 1, 8, 9))]}, "INVALID_ARGUMENT", ["input", "8, 9", "8, 8"]),
        ({"inputs": [tensor(datatype="INT64")]}, "INVALID_ARGUMENT", ["INT64", "FP32"]),
        ({"raw_input_contents": [bytes(255)]}, "INVALID_ARGUMENT", ["255", "256"]),
        ({"inputs": [], "raw_input_contents": []}, "INVALID_ARGUMENT", ["input"]),
        (
            {"inputs": [tensor(), tensor("more")], "raw_input_contents": [bytes(256)] * 2},
            "INVALID_ARGUMENT",
            ["more"],
        ),
        ({"parameters": slo(0)}, "INVALID_ARGUMENT", ["slo_ms", "0"]),
        ({"parameters": slo(-5)}, "INVALID_ARGUMENT", ["slo_ms", "-5"]),
        ({"parameters": slo(0.001)}, "RESOURCE_EXHAUSTED", ["INFEASIBLE", "1 us"]),
        ({"model_name": "truncated"}, "UNAVAILABLE", ["truncated"]),
    ],
    ids=[
        "unknown model",
        "wrong shape",
        "wrong datatype",
        "raw content of the wrong length",
        "missing tensor",
        "surplus tensor",
        "zero SLO",
        "negative SLO",
        "impossible SLO",
        "model that no worker takes",
    ],
)
def test_a_bad_request_is_told_what_is_wrong(
    server: LocalServer, changes: dict[str, object], code: str, words: list[str]
) -> None:
    found_code, text = call(server, request(**changes))
    assert found_code == code, text
    for word in words:
        assert word in text


def test_bytes_that_are_no_request_are_told_so(server: LocalServer) -> None:
    code, text = call(server, b"\xff" * 100)
    assert (code, "ModelInfer" in text) == ("INVALID_ARGUMENT", True), text


def test_a_message_of_one_gigabyte_is_refused_by_its_size(server: LocalServer) -> None:
    code, text = call(server, bytes(1_000_000_000))
    assert code == "RESOURCE_EXHAUSTED"
    assert "1000000000" in text


def test_garbage_on_the_port_is_hung_up_on(server: LocalServer) -> None:
    host, _, port = server.address.rpartition(":")
    noise = random.Random(1).randbytes(1 << 16)
    for garbage in (b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", noise):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            try:
                connection.sendall(garbage)
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:
                pass


def test_garbage_on_a_workers_stream_ends_that_stream(server: LocalServer) -> None:
    channel: Any = grpc.insecure_channel(server.address)
    with channel:
        stream = channel.stream_stream(wire.ATTACH_METHOD)(iter([b"\xff" * 64]))
        [message] = [worker_pb2.ToWorker.FromString(data) for data in stream]
    assert "64 bytes that are no FromWorker message" in message.rejected.reason


def test_a_worker_of_another_protocol_version_is_rejected_by_name(server: LocalServer) -> None:
    async def attach() -> str:
        port = int(server.address.rpartition(":")[2])
        async with LoopbackWorker(port, "stranger", version=99) as stranger:
            await stranger.ended.wait()
            return stranger.end

    reason = asyncio.run(attach())
    assert "99" in reason
    assert str(wire.PROTOCOL_VERSION) in reason


def test_a_worker_that_registers_and_falls_silent_harms_nobody(server: LocalServer) -> None:
    silent = worker_pb2.Register(
        protocol_version=wire.PROTOCOL_VERSION,
        worker_id="silent",
        device="none",
        gpu_kind="none",
        num_pages=1,
        page_bytes=1 << 24,
        arena_bytes=1 << 24,
    )
    message = worker_pb2.FromWorker(register=silent).SerializeToString()
    channel: Any = grpc.insecure_channel(server.address)
    with channel:
        stream = channel.stream_stream(wire.ATTACH_METHOD)(iter([message]))
        next(stream)
        stream.cancel()


def test_a_second_worker_of_one_name_is_rejected(
    server: LocalServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--device", "modelled:1ms", "--cache-dir", str(tmp_path))
    with worker(server.address, "--id", "local-0", *arguments) as twin:
        assert twin.wait(PATIENCE_S) == 1
    assert "local-0" in capfd.readouterr().err


def test_a_truncated_model_is_listed_with_the_reason(server: LocalServer) -> None:
    with Operator(server.address) as operator:
        [model] = [model for model in operator.models() if model.model_id == "truncated"]
    assert model.state == "UNAVAILABLE"
    assert "not an ONNX file, or is truncated" in model.reason
    assert any(line.startswith("refused: truncated: ") for line in server.output)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"no model at all", "not an ONNX file"),
        (build_model("tiny_conv").SerializeToString()[:-500], "not an ONNX file, or is truncated"),
    ],
    ids=["empty", "nonsense", "truncated"],
)
def test_an_unfit_model_is_not_added_and_changes_nothing(
    server: LocalServer, tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "unfit" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with Operator(server.address) as operator:
        before = [model.model_id for model in operator.models()]
        with pytest.raises(ModelError, match=reason):
            operator.add_model(tmp_path / "unfit", name="unfit", replace=False)
        assert [model.model_id for model in operator.models()] == before


def test_a_model_too_large_for_the_cache_is_not_added(server: LocalServer, tmp_path: Path) -> None:
    # 80 MB of weights, four pages of 16 MiB.
    write_models(tmp_path, large="mlp-1000-20000-10")
    with (
        Operator(server.address) as operator,
        pytest.raises(ModelError, match=r"pages|cache|arena"),
    ):
        operator.add_model(tmp_path / "large", name="large", replace=False)


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        pytest.param(bomb(3 << 30), "--compile-memory-mib", id="memory"),
        pytest.param(endless(), "--compile-cpu-s", id="time", marks=pytest.mark.long),
    ],
)
def test_a_model_that_wants_everything_is_refused_by_a_limit_while_others_are_served(
    server: LocalServer, tmp_path: Path, model: onnx.ModelProto, limit: str
) -> None:
    path = tmp_path / "greedy" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(model.SerializeToString())
    with (
        Operator(server.address) as operator,
        Client(server.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        adding = pool.submit(operator.add_model, tmp_path / "greedy", name="greedy", replace=False)
        num_answered = 0
        while not adding.done() or not num_answered:
            client.infer("tiny", IMAGE, slo_ms=SLO_MS)
            num_answered += 1
        with pytest.raises(ModelError, match=limit):
            adding.result()


def test_a_name_that_is_taken_is_not_given_twice(server: LocalServer, tmp_path: Path) -> None:
    write_models(tmp_path, tiny="tiny_conv")
    with Operator(server.address) as operator, pytest.raises(ModelError, match="tiny already"):
        operator.add_model(tmp_path / "tiny", name="tiny", replace=False)


def test_nobody_listening_is_told_with_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with Operator(address) as operator, pytest.raises(ConfigError, match=address):
            operator.status()


def test_a_model_removed_while_requests_wait_refuses_those_only(tmp_path: Path) -> None:
    models = write_models(tmp_path / "models", gone="echo-4")
    shutil.copytree(models / "gone", models / "stays")
    # One execution takes longer than it takes all requests to arrive.
    arguments = ["--device", "modelled:1000ms", "--cache-dir", str(tmp_path / "cache")]
    row = np.zeros((1, 4), np.float32)

    with (
        LocalServer(["--models", str(models), *arguments]) as server,
        Client(server.address) as client,
        Operator(server.address) as operator,
        ThreadPoolExecutor(20) as pool,
    ):

        def ask(model: str) -> str:
            try:
                client.infer(model, {"input": row}, slo_ms=SLO_MS)
            except RefusedError as error:
                return error.refusal.value
            except UnknownModelError:
                return "unknown"
            return "OK"

        to_go = [pool.submit(ask, "gone") for _ in range(12)]
        to_stay = [pool.submit(ask, "stays")]
        until(lambda: operator.status().requests == 13, what="all requests have arrived")
        operator.remove_model("gone")
        outcomes = [future.result() for future in to_go]
        assert Refusal.MODEL_REMOVED.value in outcomes, outcomes
        assert set(outcomes) <= {"OK", Refusal.MODEL_REMOVED.value}, outcomes
        assert [future.result() for future in to_stay] == ["OK"]
        with pytest.raises(ClockwrightError, match="gone"):
            client.infer("gone", {"input": row}, slo_ms=SLO_MS)


def test_what_clients_cancel_leaves_the_workers_lane_to_others(tmp_path: Path) -> None:
    models = write_models(tmp_path / "models", config="batch_sizes = [1]", slow="echo-4")
    arguments = ["--device", "modelled:3000ms", "--cache-dir", str(tmp_path / "cache")]
    arguments += ["--telemetry", str(tmp_path / "telemetry")]
    row = {"input": np.zeros((1, 4), np.float32)}

    async def ask_and_cancel(server: LocalServer, operator: Operator) -> None:
        async with AsyncClient(server.address) as client:
            asks = [
                asyncio.create_task(client.infer("slow", row, slo_ms=10 * SLO_MS))
                for _ in range(100)
            ]
            while operator.status().waiting < 100 or not operator.workers()[0].actions_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            await client.infer("slow", row, slo_ms=10 * SLO_MS)

    with (
        LocalServer(["--models", str(models), *arguments]) as server,
        Operator(server.address) as operator,
    ):
        asyncio.run(ask_and_cancel(server, operator))
        assert operator.status().answered == 1
    with (tmp_path / "telemetry" / "actions.csv").open() as file:
        ran = Counter(row["error"] for row in csv.DictReader(file) if row["type"] == "Infer")
    # The one that ran when they left, and the last one; one more where the machine was slow.
    assert ran["NONE"] <= 3, ran
