"""Traces of requests, as a collector gets them: one that speaks OTLP over gRPC, in the test's own process."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from clockwright.errors import ConfigError
from clockwright.units import NS_PER_S
from clockwright.v1 import inference_pb2 as pb
from controller.front.services.tracing import SPAN, Tracing
from controller.port import Answered, Course
from controller.process import front_process
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig, FrontConfig
from controller.process.front_process import Front
from tests.kit.front_end import until
from tests.kit.scripted_worker import LoopbackWorker

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
TRACE, ABOVE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(otlp_grpc.TraceServiceServicer):
    """Takes what is exported."""

    def __init__(self) -> None:
        self.spans: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.server: Any = grpc.server(ThreadPoolExecutor(2))
        add: Any = otlp_grpc.add_TraceServiceServicer_to_server
        add(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Export(self, request: Any, _: Any) -> Any:  # noqa: ANN401
        for of_resource in request.resource_spans:
            for scope in of_resource.scope_spans:
                for span in scope.spans:
                    self.spans.put((of_resource.resource, span))
        return otlp.ExportTraceServiceResponse()

    def taken(self) -> list[Any]:
        """All spans that came, by when they began."""
        found = []
        while not self.spans.empty():
            found.append(self.spans.get()[1])
        return sorted(found, key=lambda span: (span.start_time_unix_nano, span.name))


@asynccontextmanager
async def traced(directory: Path, share: float) -> AsyncIterator[tuple[Controller, Collector]]:
    """A controller that is traced; whoever leaves finds all spans with the collector."""
    (directory / "m" / "1").mkdir(parents=True)
    (directory / "m" / "1" / "model.onnx").write_bytes(b"onnx")
    collector = Collector()
    config = ControllerConfig(
        port=0,
        http_port=0,
        models_dir=directory,
        trace_to=collector.address,
        trace_share=share,
    )
    try:
        async with running(config) as controller, LoopbackWorker(controller.port):
            await until(
                lambda: (
                    controller.catalogue.ready
                    and any(link.joined for link in controller.links.links)
                )
            )
            yield controller, collector
    finally:
        collector.server.stop(None)


async def ask(
    server: Controller | Front, traceparent: str = "", *, name: str = "", slo_ms: float = 30_000
) -> grpc.StatusCode:
    try:
        await answered(server, traceparent, name=name, slo_ms=slo_ms)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


async def answered(
    server: Controller | Front,
    traceparent: str = "",
    *,
    name: str = "",
    slo_ms: float = 30_000,
    explain: bool = False,
) -> pb.ModelInferResponse:
    request = pb.ModelInferRequest(
        model_name="m",
        id=name,
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])],
        raw_input_contents=[bytes(16)],
    )
    request.parameters["slo_ms"].double_param = slo_ms
    if explain:
        request.parameters["explain"].bool_param = True
    metadata = (("traceparent", traceparent),) if traceparent else ()
    aio: Any = grpc.aio
    async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        data = await channel.unary_unary(INFER)(request.SerializeToString(), metadata=metadata)
    return pb.ModelInferResponse.FromString(data)


def attributes(span: Any) -> dict[str, Any]:  # noqa: ANN401  protobuf's
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


async def test_a_request_that_comes_in_a_trace_goes_on_in_it_with_queue_load_and_exec(
    tmp_path: Path,
) -> None:
    async with traced(tmp_path, share=0.0) as (controller, collector):
        assert await ask(controller) is grpc.StatusCode.OK  # without a context: not traced
        assert await ask(controller, f"00-{TRACE}-{ABOVE}-00") is grpc.StatusCode.OK
        for wrong in ("nonsense", f"ff-{TRACE}-{ABOVE}-01", f"00-{'0' * 32}-{ABOVE}-01"):
            assert await ask(controller, wrong) is grpc.StatusCode.OK
        assert await ask(controller, f"00-{TRACE}-{ABOVE}-01", name="mine") is (grpc.StatusCode.OK)
    spans = collector.taken()
    (whole,) = (span for span in spans if span.parent_span_id.hex() == ABOVE)
    inner = [span for span in spans if span is not whole]
    assert whole.name == "inference.GRPCInferenceService/ModelInfer"
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, ABOVE)
    found = attributes(whole)
    assert found["rpc.system.name"] == "grpc"
    assert found["rpc.response.status_code"] == "OK"
    assert found["request_id"] == "mine"
    assert found["clockwright.request_id"] == 6
    assert sorted(span.name for span in inner) == ["exec", "queue"]
    for span in inner:
        assert span.trace_id == whole.trace_id
        assert span.parent_span_id == whole.span_id
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    (run_,) = (span for span in inner if span.name == "exec")
    assert attributes(run_)["clockwright.batch_size"] == 1


async def test_so_does_a_request_by_rest(tmp_path: Path) -> None:
    asked = {
        "id": "mine",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}],
        "parameters": {"slo_ms": 30_000},
    }
    async with (
        traced(tmp_path, share=0.0) as (controller, collector),
        httpx.AsyncClient(timeout=60) as client,
    ):
        url = f"http://127.0.0.1:{controller.http_port}/v2/models/m/infer"
        headers = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}
        answer = await client.post(url, json=asked, headers=headers)
        assert answer.status_code == 200, answer.text
    (whole,) = (span for span in collector.taken() if span.parent_span_id.hex() == ABOVE)
    assert whole.trace_id.hex() == TRACE
    assert attributes(whole)["request_id"] == "mine"


async def test_a_share_of_the_others_is_traced_and_the_first_waited_for_a_load(
    tmp_path: Path,
) -> None:
    async with traced(tmp_path, share=1.0) as (controller, collector):
        assert await ask(controller) is grpc.StatusCode.OK
    spans = collector.taken()
    assert {span.name for span in spans if span.parent_span_id} == {"queue", "load", "exec"}
    (whole,) = (span for span in spans if not span.parent_span_id)
    assert {span.trace_id for span in spans} == {whole.trace_id}


async def test_a_refusal_is_a_span_with_its_reason_its_figures_and_its_remedy(
    tmp_path: Path,
) -> None:
    async with traced(tmp_path, share=1.0) as (controller, collector):
        assert await ask(controller) is grpc.StatusCode.OK
        code = await ask(controller, slo_ms=0.01)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    refused = [span for span in collector.taken() if span.status.code]
    (whole,) = refused
    found = attributes(whole)
    assert found["error.type"] == "INFEASIBLE"
    assert found["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert found["clockwright.enough_slo_ns"] > found["clockwright.slo_ns"] == 10_000


async def test_a_front_apart_traces_what_its_controller_tells_of_a_request(tmp_path: Path) -> None:
    apart = Collector()
    async with traced(tmp_path, share=0.0) as (controller, collector):
        config = FrontConfig(
            controller=f"127.0.0.1:{controller.port}",
            port=0,
            trace_to=apart.address,
            trace_share=1.0,
        )
        async with front_process.serving(config) as front:
            for name in ("first", "second"):
                # It is the trace that wants to know, and not the client.
                assert not (await answered(front, name=name)).parameters
            told = (await answered(front, name="told", explain=True)).parameters
            assert told["slo_source"].string_param == "slo_ms"
            assert await ask(front, name="late", slo_ms=0.01) is not grpc.StatusCode.OK
    apart.server.stop(None)
    assert collector.taken() == []
    spans = apart.taken()
    wholes = {attributes(span)["request_id"]: span for span in spans if not span.parent_span_id}
    assert wholes.keys() == {"first", "second", "told", "late"}
    for name, whole in wholes.items():
        inner = {span.name: span for span in spans if span.parent_span_id == whole.span_id}
        queue = inner["queue"]
        assert queue.start_time_unix_nano == whole.start_time_unix_nano
        if name == "late":
            assert inner.keys() == {"queue"}
            continue
        assert attributes(whole)["clockwright.request_id"] > 0
        assert inner.keys() == {"queue", "exec"} | ({"load"} if name == "first" else set())
        run = inner["exec"]
        assert queue.end_time_unix_nano == run.start_time_unix_nano
        assert run.end_time_unix_nano <= whole.end_time_unix_nano
        assert attributes(run)["clockwright.worker"] == "w0"
        assert attributes(run)["clockwright.batch_size"] == 1


@pytest.mark.parametrize(
    ("begin_ns", "end_ns", "found"),
    [(2000, 5000, (3000, 6000)), (-3000, 2000, (1000, 3000)), (8000, 11_000, (9000, 10_000))],
    ids=["right", "ahead", "behind"],
)
def test_a_run_lies_inside_its_request_however_wrong_its_workers_clock_is(
    begin_ns: int, end_ns: int, found: tuple[int, int]
) -> None:
    collector = Collector()
    tracing = Tracing(collector.address, share=1.0, clock=lambda: 10_000)
    call: Any = _Asking()
    asked: Any = SimpleNamespace(slo_ns=NS_PER_S, request_id="one")
    figures: dict[str, Any] = dict.fromkeys(Course.__struct_fields__, 0)
    figures |= {"worker": "w0", "exec_begin_ns": begin_ns, "exec_end_ns": end_ns}
    course = Course(**figures)
    trace = tracing.begin(call)
    assert trace is not None
    trace.answered(Answered(0, course=course), asked)
    tracing.close()
    collector.server.stop(None)
    spans = {span.name: span for span in collector.taken()}
    # The request comes at 1000 on a clock that stands at 10,000 now.
    zero_ns = spans.pop(SPAN).start_time_unix_nano - 1000
    lie = {
        name: (span.start_time_unix_nano - zero_ns, span.end_time_unix_nano - zero_ns)
        for name, span in spans.items()
    }
    assert lie == {"queue": (1000, found[0]), "exec": found}


def test_traces_without_a_collector_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT of a collector"):
        ControllerConfig(trace_share=0.5)
    with pytest.raises(ConfigError, match="trace_share is 2"):
        ControllerConfig(trace_to="127.0.0.1:4317", trace_share=2)


class _Asking:
    """A call whose client wants it traced."""

    arrival_ns = 1000

    def header(self, name: str) -> str:
        return f"00-{TRACE}-{ABOVE}-01" if name == "traceparent" else ""


@pytest.fixture
def nobody_answers() -> Iterator[str]:
    """Where a collector would be: connections are taken up, and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_collector_that_does_not_answer_keeps_no_process_from_its_end(
    nobody_answers: str,
) -> None:
    tracing = Tracing(nobody_answers, share=1.0, clock=time.monotonic_ns)
    call: Any = _Asking()
    for _ in range(10_000):  # More than any queue takes.
        if (trace := tracing.begin(call)) is not None:
            trace.gone(None)
    before_s = time.monotonic()
    tracing.close()
    # Its exporter tries for 40 s and more.
    assert time.monotonic() - before_s < 35


def test_clients_that_want_all_traced_get_so_many_a_second(nobody_answers: str) -> None:
    now_ns = 0
    tracing = Tracing(nobody_answers, share=0.0, clock=lambda: now_ns)
    call: Any = _Asking()
    counts = []
    for _ in range(3):
        counts.append(sum(tracing.begin(call) is not None for _ in range(1000)))
        now_ns += NS_PER_S
    tracing.close()
    assert counts == [200, 200, 200]
