"""What is too much for a server is refused, what its clients take back is not run, and others are served.

What is wrong with a request, a registration or a model is told by tests of the controller and of the worker.
"""

from __future__ import annotations

import asyncio
import csv
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest

from clockwright import (
    AsyncClient,
    Client,
    ClockwrightError,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
)
from clockwright.client.operator import Operator
from experiments.live.local_server import LocalServer
from tests.kit.hostile_models import bomb, endless
from tests.kit.processes import until, write_models
from tests.kit.raw_http2 import DATA, END_HEADERS, HEADERS, RawClient, frame, headers

# A pause of the machine counts as a long execution, and the next ones are predicted to take as long:
# all that wait have the time for it.
SLO_MS = 600_000
IMAGE = np.ones((1, 1, 8, 8), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("faults")
    models = write_models(directory / "models", tiny="tiny_conv")
    arguments = ["--pages", "4", "--cache-dir", str(cache_dir)]
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


def test_a_message_of_one_gigabyte_is_refused_by_its_size(server: LocalServer) -> None:
    # As soon as it is announced: none of its bytes are taken, nor does this test need room for them.
    with RawClient(server.address) as client:
        stream_id = client.next_id()
        client.send(frame(HEADERS, END_HEADERS, stream_id, headers()))
        client.send(frame(DATA, 0, stream_id, struct.pack(">BI", 0, 1_000_000_000)))
        (end,) = client.wait([stream_id])
    assert end.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert "1000000000" in end.text


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


def test_a_model_removed_while_requests_wait_refuses_those_only(
    tmp_path: Path, cache_dir: Path
) -> None:
    models = write_models(tmp_path / "models", gone="echo-4")
    shutil.copytree(models / "gone", models / "stays")
    # One execution takes longer than it takes all requests to arrive.
    arguments = ["--device", "modelled:1000ms", "--cache-dir", str(cache_dir)]
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


def test_what_clients_cancel_leaves_the_workers_lane_to_others(
    tmp_path: Path, cache_dir: Path
) -> None:
    models = write_models(tmp_path / "models", config="batch_sizes = [1]", slow="echo-4")
    arguments = ["--device", "modelled:3000ms", "--cache-dir", str(cache_dir)]
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
