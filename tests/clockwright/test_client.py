"""The client library against a real front end."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from clockwright import (
    Access,
    AsyncClient,
    BadRequestError,
    Client,
    ClockwrightError,
    ConfigError,
    Feedback,
    ModelError,
    Refusal,
    RefusedError,
    UnknownModelError,
)
from clockwright.client.operator import Operator
from clockwright.client.statuses import error_of
from clockwright.wire.tensors import TensorSpec
from controller.core import Scheduler
from controller.core.events import CertaintyAsked, Command, Event, RequestArrived
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


def test_how_soon_a_request_is_to_be_decided_reaches_the_scheduler(
    client: Client, server: FrontEndInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    within_ns: list[int] = []
    handle = Scheduler.handle

    def spied(self: Scheduler, event: Event, *, now_ns: int) -> list[Command]:
        if isinstance(event, CertaintyAsked):
            within_ns.append(event.within_ns)
        return handle(self, event, now_ns=now_ns)

    monkeypatch.setattr(Scheduler, "handle", spied)
    rows = np.ones((1, 3), np.float32)
    for _ in range(3):  # the third is made from the first one's template
        answer = client.infer("double", rows, slo_ms=SLO_MS, decide_within_ms=20_000, explain=True)
        assert 0 < answer.explanation["decided_us"] < 20_000_000
    assert "decided_us" not in client.infer("double", rows, slo_ms=SLO_MS, explain=True).explanation
    assert within_ns == [20_000_000_000] * 3
    for within_ms in (SLO_MS, SLO_MS + 1):
        with pytest.raises(
            BadRequestError, match=r"expected less than the SLO, 30.* s; leave it out"
        ):
            client.infer("double", rows, slo_ms=SLO_MS, decide_within_ms=within_ms)


def test_what_an_answer_is_worth_and_the_work_ahead_reach_the_scheduler(
    client: Client, server: FrontEndInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int, int]] = []
    handle = Scheduler.handle

    def spied(self: Scheduler, event: Event, *, now_ns: int) -> list[Command]:
        if isinstance(event, RequestArrived):
            asked.append((event.weight, event.work_ahead_ns, event.slo_ns))
        return handle(self, event, now_ns=now_ns)

    monkeypatch.setattr(Scheduler, "handle", spied)
    rows = np.ones((1, 3), np.float32)
    for _ in range(3):  # the third is made from the first one's template
        client.infer("double", rows, slo_ms=SLO_MS, weight=0.5, work_ahead_ms=5000)
    client.infer("double", rows, slo_ms=SLO_MS)
    slo_ns = round(SLO_MS * 1e6)
    assert asked == [(0.5, 5_000_000_000, slo_ns - 5_000_000_000)] * 3 + [(1.0, 0, slo_ns)]
    with pytest.raises(RefusedError, match=r"may have request_weight_max 1 at most, found 1\.5"):
        client.infer("double", rows, slo_ms=SLO_MS, weight=1.5)
    with pytest.raises(
        BadRequestError, match=r"work_ahead_ms: found .* expected less than the SLO"
    ):
        client.infer("double", rows, slo_ms=SLO_MS, work_ahead_ms=SLO_MS)


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
    with pytest.raises(BadRequestError, match=r"found datatype 'BYTES', expected FP32"):
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
        (
            "UNIMPLEMENTED",
            ConfigError,
            "the server at HOST:1 is not Clockwright, or of another version: what",
        ),
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
        with pytest.raises(RefusedError, match="unknown cannot be served: it is not in") as caught:
            client.metadata("unknown")
        assert caught.value.refusal is Refusal.UNFIT


WRONG_ASKS = {
    "slo_ms: found 'a' (str), expected a number of milliseconds": {"slo_ms": "a"},
    "slo_ms: found True (bool), expected a number": {"slo_ms": True},
    "slo_ms: found [25] (list), expected a number": {"slo_ms": [25]},
    "explain: found 'no' (str), expected True or False": {"explain": "no"},
    "context: found 7 (int), expected a text": {"context": 7},
    "tenant: found 1.5 (float), expected a text": {"tenant": 1.5},
    "tenant: found '\\ud800' (str), expected a text without halves": {"tenant": "\ud800"},
    "model: found 5 (int), expected a text": {"model": 5},
    "inputs: found list, expected an array": {"inputs": [[1, 2, 3]]},
    "inputs: found NoneType, expected an array": {"inputs": None},
    "name of an input: found 3 (int), expected a text": {
        "inputs": {3: np.ones((1, 3), np.float32)}
    },
    "input 'x': found dtype datetime64[D], expected text or one of": {
        "inputs": {"x": np.array(["2026-01-01"], "M8[D]")}
    },
    "input 'x': found an element of type NoneType, expected str or bytes": {
        "inputs": {"x": np.array([None])}
    },
    "input 'x': found text that is no UTF-8": {"inputs": {"x": np.array(["\ud800"])}},
    "input 'x': found no array: ": {"inputs": {"x": [[1], [2, 3]]}},
}


@pytest.mark.parametrize(("words", "wrong"), WRONG_ASKS.items(), ids=WRONG_ASKS)
def test_an_argument_of_a_wrong_type_is_named(
    client: Client, server: FrontEndInThread, words: str, wrong: dict[str, Any]
) -> None:
    asked = {"model": "double", "inputs": np.ones((1, 3), np.float32), **wrong}
    with pytest.raises(BadRequestError, match=re.escape(words)):
        client.infer(**asked)

    async def ask() -> None:
        async with AsyncClient(server.address) as other:
            await other.infer(**asked)

    with pytest.raises(BadRequestError, match=re.escape(words)):
        asyncio.run(ask())


def test_numbers_of_numpy_are_numbers(client: Client) -> None:
    rows = np.ones((1, 3), np.float32)
    numbers: list[Any] = [np.float32(30_000), np.int64(30_000), 30_000]
    true: Any = np.True_
    for slo_ms in numbers:
        result = client.infer("double", rows, slo_ms=slo_ms, explain=true)
        assert result.explanation["slo_us"] == 30_000_000
    with pytest.raises(BadRequestError, match="more than 0 and at most"):
        client.infer("double", rows, slo_ms=10**400)


@pytest.mark.parametrize(
    ("words", "item"),
    [
        ("items: found [] (list), expected Feedback", []),
        ("query_id: found 1 (int), expected a text", Feedback(1, label=1)),  # type: ignore[arg-type]
        ("label: found 1.5 (float), expected a text, or a whole", Feedback("q", label=1.5)),  # type: ignore[arg-type]
        ("label: found 118059", Feedback("q", label=1 << 70)),
        ("reward: found 'good' (str), expected a number", Feedback("q", reward="good")),  # type: ignore[arg-type]
    ],
)
def test_feedback_of_a_wrong_type_is_named(client: Client, words: str, item: Any) -> None:  # noqa: ANN401
    with pytest.raises(BadRequestError, match=re.escape(words)):
        client.feedback(item)


def test_models_and_addresses_are_texts(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        for ask in (client.metadata, client.load_model):
            with pytest.raises(BadRequestError, match=r"model: found 5 \(int\), expected a text"):
                ask(5)  # type: ignore[arg-type]
    for made in (Client, Operator):
        with pytest.raises(ConfigError, match=r"address: found 8001 \(int\), expected HOST:PORT"):
            made(8001)  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match=r"access: found a text, expected Access\(key=\.\.\.\)"
        ):
            made(server.address, "secret")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"key: found int, expected a text"):
        Access(key=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ca: found 5 \(int\), expected a path"):
        Access(ca=5)  # type: ignore[arg-type]
    assert Access(ca="ca.pem").ca == Path("ca.pem")  # type: ignore[arg-type]


def test_what_an_operator_passes_in_a_wrong_type_is_named(
    server: FrontEndInThread, tmp_path: Path
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").touch()
    with Operator(server.address) as operator:
        asks: dict[str, Callable[..., object]] = {
            "worker_id: found 1 (int), expected a text": lambda any: operator.drain(any),
            "name: found 1 (int), expected a text": lambda any: operator.remove_model(any),
            "tenant: found 1 (int), expected a text": lambda any: operator.remove_quota(any),
            "application: found 1 (int), expected a text": lambda any: operator.erase_context(
                any, ""
            ),
            "context: found 1 (int), expected a text": lambda any: operator.erase_context("a", any),
            "request_id: found 1 (int), expected a text": lambda any: operator.explain(any),
            "folder: found 1 (int), expected a path": lambda any: operator.add_model(
                any, name="a", replace=False
            ),
            "replace: found 1 (int), expected True or False": lambda any: operator.add_model(
                tmp_path, name="a", replace=any
            ),
            "pinned: found 1 (int), expected True or False": lambda any: operator.pin_model(
                "a", pinned=any
            ),
            "quota: found 1 (int), expected a Quota": lambda any: operator.set_quota("a", any),
            "application: found 1 (int), expected an Application": lambda any: (
                operator.put_application(any)
            ),
        }
        for words, ask in asks.items():
            with pytest.raises(BadRequestError, match=re.escape(words)):
                ask(1)
        # A text is a path, too.
        with pytest.raises(ConfigError, match="is not a folder"):
            operator.add_model(str(tmp_path / "none"), name="a", replace=False)


async def test_a_step_takes_its_inputs_by_name(server: FrontEndInThread) -> None:
    words = re.escape("step: found ndarray, expected arrays by input name, without the state")
    rows = np.ones((1, 3), np.float32)
    with Client(server.address) as client, pytest.raises(BadRequestError, match=words):
        client.sequence("double").step(rows)  # type: ignore[arg-type]
    async with AsyncClient(server.address) as other:
        with pytest.raises(BadRequestError, match=words):
            await other.sequence("double").step(rows)  # type: ignore[arg-type]
