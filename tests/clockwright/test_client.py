"""The client library against a real front end."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from clockwright import (
    AsyncClient,
    BadRequestError,
    Client,
    ClockwrightError,
    ConfigError,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
)
from clockwright.statuses import error_of
from clockwright.tensors import TensorSpec
from controller.core import Scheduler
from controller.core.events import Command, Event, RequestArrived
from tests.kit.front_end import (
    MESSAGE_BYTES_MAX,
    FrontEndInThread,
    serving,
    serving_in_thread,
    until,
)

SLO_MS = 30_000.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEndInThread]:
    with serving_in_thread(tmp_path_factory.mktemp("models")) as front_end:
        yield front_end


@pytest.fixture
def client(server: FrontEndInThread) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens: it is taken, so that nobody else can begin to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_arrays_go_in_and_come_out(client: Client) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = client.infer("double", {"x": rows}, slo_ms=SLO_MS)
    np.testing.assert_array_equal(result.outputs["y"], rows * 2)
    assert (result.model_name, result.model_version, result.explanation) == ("double", "1", {})


def test_whose_request_it_is_reaches_the_scheduler(
    client: Client, server: FrontEndInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []
    handle = Scheduler.handle

    def spied(self: Scheduler, event: Event, *, now_ns: int) -> list[Command]:
        if isinstance(event, RequestArrived):
            tenants.append(event.tenant)
        return handle(self, event, now_ns=now_ns)

    monkeypatch.setattr(Scheduler, "handle", spied)
    rows = np.ones((1, 3), np.float32)
    client.infer("double", rows, slo_ms=SLO_MS, tenant="ann")
    client.infer("double", rows, slo_ms=SLO_MS)
    assert tenants == ["ann", ""]


def test_the_only_input_needs_no_name(client: Client) -> None:
    rows = np.ones((1, 3), np.float32)
    assert client.infer("double", rows, slo_ms=SLO_MS).outputs["y"].tolist() == [[2, 2, 2]]
    with pytest.raises(BadRequestError, match="expected arrays by name: 'a', 'b'"):
        client.infer("mixed", rows, slo_ms=SLO_MS)


def test_arrays_in_any_memory_layout_arrive_right(client: Client) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2).T
    big_endian = rows.astype(">f4")
    for array in (rows, big_endian, rows[::-1]):
        result = client.infer("double", {"x": array}, slo_ms=SLO_MS)
        np.testing.assert_array_equal(result.outputs["y"], array * 2)


@pytest.mark.parametrize(
    "datatype",
    ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"],
)  # fmt: skip
def test_every_datatype_comes_back_as_its_dtype(client: Client, datatype: str) -> None:
    dtype = {"BOOL": "bool", "FP": "float", "INT": "int", "UINT": "uint"}[
        datatype.rstrip("0123456789")
    ]
    array = np.array([[1, 0]]).astype(dtype + datatype.lstrip("BOLFPINTU"))
    output = client.infer(f"echo-{datatype}", {"x": array}, slo_ms=SLO_MS).outputs["y"]
    assert output.dtype == array.dtype
    np.testing.assert_array_equal(output, array)


def test_explanations_are_plain_values(client: Client) -> None:
    rows = np.ones((2, 3), np.float32)
    explanation = client.infer("double", rows, slo_ms=SLO_MS, explain=True).explanation
    assert explanation["worker"] == "scripted"
    assert explanation["batch_size"] == 2
    assert explanation["slo_us"] == 30_000_000


def test_a_refusal_is_an_exception_with_its_reason_and_figures(client: Client) -> None:
    with pytest.raises(
        RefusedError, match="INFEASIBLE: model double cannot be that fast"
    ) as caught:
        client.infer("double", np.ones((1, 3), np.float32), slo_ms=0.01)
    assert caught.value.refusal is Refusal.INFEASIBLE
    assert caught.value.figures["slo_ns"] == 10_000
    assert caught.value.figures["exec_ns"] > 0


def test_bad_requests_and_unknown_models_are_told_apart(client: Client) -> None:
    with pytest.raises(UnknownModelError, match="there is no model 'nothing'"):
        client.infer("nothing", {"x": np.ones((1, 3), np.float32)})
    with pytest.raises(BadRequestError, match=r"found datatype 'FP64', expected FP32"):
        client.infer("double", {"x": np.ones((1, 3))})
    with pytest.raises(BadRequestError, match="found dtype <U1"):
        client.infer("double", {"x": np.array([["a"]])})
    with pytest.raises(BadRequestError, match="inputs: found list, expected an array"):
        client.infer("double", [1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match="parameter slo_ms: found -3"):
        client.infer("double", {"x": np.ones((1, 3), np.float32)}, slo_ms=-3)
    for slo_ms in (float("nan"), float("inf")):
        with pytest.raises(BadRequestError, match=f"parameter slo_ms: found {slo_ms}"):
            client.infer("double", {"x": np.ones((1, 3), np.float32)}, slo_ms=slo_ms)
    with pytest.raises(BadRequestError, match="the request is too big"):
        client.infer("double", {"x": np.ones((1, MESSAGE_BYTES_MAX), np.float32)})


def test_metadata_and_models_are_typed(client: Client) -> None:
    assert client.is_ready()
    metadata = client.metadata("mixed")
    assert metadata.inputs == (TensorSpec("a", "INT64", (2,)), TensorSpec("b", "FP32", (2, 2)))
    assert {model.state for model in client.models()} == {"READY"}


def test_an_unreachable_server_is_a_config_error_and_not_ready(nobody: str) -> None:
    with Client(nobody) as client:
        assert not client.is_ready()
        with pytest.raises(ConfigError, match="no server answers at 127"):
            client.infer("double", {"x": np.ones((1, 3), np.float32)})


class Failed(grpc.RpcError):
    """Give the exception that a call raises."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "what the server said"

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("UNAVAILABLE", ConfigError, "no server answers at HOST:1; is `clockwright up` running"),
        ("UNIMPLEMENTED", ConfigError, "the server at HOST:1 is not Clockwright: what"),
        ("INVALID_ARGUMENT", BadRequestError, "^what the server said$"),
        ("RESOURCE_EXHAUSTED", BadRequestError, "the request is too big: what the server said"),
        ("NOT_FOUND", UnknownModelError, "^what the server said$"),
        ("FAILED_PRECONDITION", ModelError, "^what the server said$"),
        ("ALREADY_EXISTS", ModelError, "what the server said; --replace takes its place"),
        ("DEADLINE_EXCEEDED", RefusedError, "LATE: no answer from HOST:1 in time"),
        ("INTERNAL", ClockwrightError, "HOST:1: INTERNAL: what the server said"),
    ],
)
def test_every_status_is_an_exception_with_one_sentence(
    code: str, kind: type[ClockwrightError], message: str
) -> None:
    error = error_of(Failed(grpc.StatusCode[code]), "HOST:1")
    assert type(error) is kind
    assert re.search(message, str(error))


def test_a_proxy_that_is_meant_for_browsers_is_not_asked(
    server: FrontEndInThread, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{nobody}")
    with Client(server.address) as client:
        assert client.is_ready()


def test_a_server_without_workers_refuses_and_is_not_unreachable(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server, Client(server.address) as client:
        server.do(lambda front_end: front_end.worker.leave())
        with pytest.raises(RefusedError) as caught:
            client.infer("double", {"x": np.ones((1, 3), np.float32)})
        assert caught.value.refusal is Refusal.NO_WORKER


def test_the_async_client_does_the_same_and_cancelling_withdraws(
    tmp_path: Path, nobody: str
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as front_end, AsyncClient(front_end.address) as client:
            assert await client.is_ready()
            assert len(await client.models()) == len(front_end.catalogue.models)
            rows = np.ones((1, 3), np.float32)
            results = await asyncio.gather(
                *(client.infer("double", rows * n, slo_ms=SLO_MS) for n in range(10))
            )
            assert [result.outputs["y"][0, 0] for result in results] == [2 * n for n in range(10)]
            with pytest.raises(RefusedError, match="INFEASIBLE"):
                await client.infer("double", rows, slo_ms=0.01)

            front_end.worker.hold = True
            task = asyncio.create_task(client.infer("double", rows, slo_ms=SLO_MS))
            await until(lambda: front_end.runtime.num_waiting == 1)
            task.cancel()
            await until(lambda: front_end.runtime.num_waiting == 0)
            with pytest.raises(asyncio.CancelledError):
                await task

        async with AsyncClient(nobody) as client:
            assert not await client.is_ready()

    asyncio.run(main())


def test_a_model_without_a_worker_that_takes_it_says_why(tmp_path: Path) -> None:
    version = tmp_path / "unknown" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"no")
    with serving_in_thread(tmp_path) as server, Client(server.address) as client:
        (status,) = [model for model in client.models() if model.name == "unknown"]
        assert (status.state, status.reason) == ("UNAVAILABLE", "it is not in the script")
        with pytest.raises(RefusedError, match="unknown is UNAVAILABLE: it is not in the script"):
            client.metadata("unknown")
