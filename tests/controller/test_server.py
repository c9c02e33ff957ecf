"""The front end over loopback gRPC, asked by the clients that users already have."""

from __future__ import annotations

import gc
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.rpc import error_details_pb2, status_pb2
from tritonclient.utils import InferenceServerException

from clockwright.errors import Refusal, RefusedError
from clockwright.units import NS_PER_S
from clockwright.v1 import inference_pb2 as pb
from controller.front.oip.protocol import ParsedRequest
from controller.front.oip.statuses import CODES, status_of
from tests.kit.front_end import (
    MESSAGE_BYTES_MAX,
    FrontEndInThread,
    serving_in_thread,
)
from tests.kit.processes import PATIENCE_S
from tests.kit.processes import until as until_so

INFER = "/inference.GRPCInferenceService/ModelInfer"
SLO = {"slo_ms": 30_000}


@pytest.fixture(scope="module", params=["here", "apart"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrontEndInThread]:
    directory = tmp_path_factory.mktemp("models")
    with serving_in_thread(directory, front=request.param) as front_end:
        yield front_end


@pytest.fixture
def client(server: FrontEndInThread) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str) -> triton.InferInput:
    result = triton.InferInput(name, list(array.shape), datatype)
    result.set_data_from_numpy(array)
    return result


def vector(*rows: float) -> triton.InferInput:
    return tensor("x", np.array([[row, row + 1, row + 2] for row in rows], np.float32), "FP32")


def call(server: FrontEndInThread, request: bytes) -> bytes:
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = channel
        # Who states no SLO that can be read has this long; the default is soon over on a busy machine.
        answer: bytes = stub.unary_unary(INFER)(request, timeout=PATIENCE_S)
        return answer


def request(**fields: object) -> pb.ModelInferRequest:
    """A good request for `double`, with some fields changed."""
    good: dict[str, Any] = {
        "model_name": "double",
        "inputs": [pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 3])],
        "raw_input_contents": [bytes(12)],
        "parameters": {"slo_ms": pb.InferParameter(int64_param=30_000)},
    }
    return pb.ModelInferRequest(**{**good, **fields})


# --- good requests --------------------------------------------------------------------------------


def test_a_request_of_several_rows_runs_whole(
    client: triton.InferenceServerClient, server: FrontEndInThread
) -> None:
    result = client.infer("double", [vector(1.0, 5.0, 9.0)], parameters=SLO)
    assert result.as_numpy("y")[:, 0].tolist() == [2, 10, 18]
    assert server.do(lambda front_end: front_end.worker.infers[-1].rows) == (3,)


def test_inputs_come_in_any_order_and_a_subset_of_outputs_can_be_asked_for(
    client: triton.InferenceServerClient,
) -> None:
    a, b = np.array([[1, 2]], np.int64), np.ones((1, 2, 2), np.float32)
    inputs = [tensor("b", b, "FP32"), tensor("a", a, "INT64")]
    both = client.infer("mixed", inputs, parameters=SLO)
    assert both.as_numpy("a_plus_1").tolist() == [[2, 3]]
    assert both.as_numpy("b_sum").tolist() == [[2.0, 2.0]]
    wanted = [triton.InferRequestedOutput("b_sum")]
    one = client.infer("mixed", inputs, outputs=wanted, parameters=SLO)
    assert one.as_numpy("b_sum").tolist() == [[2.0, 2.0]]
    assert one.as_numpy("a_plus_1") is None


def test_an_explanation_adds_up_to_the_latency(client: triton.InferenceServerClient) -> None:
    result = client.infer("double", [vector(1.0)], parameters={**SLO, "explain": True})
    values = {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in result.get_response().parameters.items()
    }
    parts = ("queue_us", "load_us", "input_us", "exec_us", "output_us", "network_us")
    # Every part is rounded down.
    assert 0 <= values["measured_us"] - sum(values[part] for part in parts) <= len(parts)
    assert values["worker"] == "scripted"
    assert values["batch_size"] == 1
    assert values["cold"] in (True, False)
    assert (values["slo_us"], values["slo_source"]) == (30_000_000, "slo_ms")


def test_the_rpc_deadline_is_the_slo_when_nothing_else_is(
    client: triton.InferenceServerClient,
) -> None:
    result = client.infer("double", [vector(1.0)], client_timeout=90, parameters={"explain": True})
    parameters = result.get_response().parameters
    assert parameters["slo_source"].string_param == "rpc_deadline"
    assert 30_000_000 < parameters["slo_us"].int64_param <= 90_000_000


def test_tritons_timeout_is_microseconds(client: triton.InferenceServerClient) -> None:
    result = client.infer("double", [vector(1.0)], timeout=45_000_000, parameters={"explain": True})
    parameters = result.get_response().parameters
    assert parameters["slo_source"].string_param == "timeout"
    assert parameters["slo_us"].int64_param == 45_000_000


# --- streams --------------------------------------------------------------------------------------


def test_requests_of_a_stream_are_in_flight_together_and_a_refusal_starts_with_its_reason(
    server: FrontEndInThread, client: triton.InferenceServerClient
) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    server.do(lambda front_end: setattr(front_end.worker, "hold", True))
    try:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("double", [vector(3)], request_id="slow", parameters=SLO)
        server.until(lambda front_end: len(front_end.worker.held) == 1)
        tiny = {"slo_ms": 0.001}
        client.async_stream_infer("double", [vector(3)], request_id="fast", parameters=tiny)
        _, error = answers.get(timeout=60)
        assert error.message().startswith("INFEASIBLE: model double")
    finally:
        server.do(lambda front_end: front_end.worker.release())
    result, error = answers.get(timeout=60)
    assert error is None
    assert result.get_response().id == "slow"
    client.stop_stream()


# --- refusals -------------------------------------------------------------------------------------


def error_info(error: grpc.Call) -> error_details_pb2.ErrorInfo:
    (value,) = [v for k, v in error.trailing_metadata() if k == "grpc-status-details-bin"]
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(info)
    return info


def test_a_refusal_carries_its_reason_for_people_and_for_programs(server: FrontEndInThread) -> None:
    impossible = {"slo_ms": pb.InferParameter(string_param="0.01")}
    with pytest.raises(grpc.RpcError) as caught:
        call(server, request(parameters=impossible).SerializeToString())
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details().startswith("INFEASIBLE: model double cannot be that fast")
    info = error_info(error)
    assert (info.reason, info.domain) == ("INFEASIBLE", "clockwright")
    assert info.metadata["slo_ns"] == "10000"
    assert int(info.metadata["exec_ns"]) > 0


def test_an_answer_after_its_deadline_is_refused_as_late(tmp_path: Path) -> None:
    ahead_ns = 0
    with (
        serving_in_thread(tmp_path, clock=lambda: time.monotonic_ns() + ahead_ns) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        server.do(lambda front_end: setattr(front_end.worker, "hold", True))
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.async_infer(
            "double", [vector(1)], lambda result, error: done.put(error), parameters=SLO
        )
        server.until(lambda front_end: bool(front_end.worker.held))
        # The deadline passes on the controller's clock alone, so the test neither hurries nor waits.
        ahead_ns = 31 * NS_PER_S
        server.do(lambda front_end: front_end.worker.release())
        error = done.get(timeout=60)
    assert "DEADLINE_EXCEEDED" in error.status()
    assert error.message().startswith("LATE: model double")


def test_without_a_worker_requests_are_refused_as_unavailable(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server:
        server.do(lambda front_end: front_end.worker.leave())
        with pytest.raises(grpc.RpcError) as caught:
            call(server, request().SerializeToString())
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error_info(error).reason == "NO_WORKER"


def test_a_stream_whose_client_goes_away_withdraws_its_requests(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server:
        server.do(lambda front_end: setattr(front_end.worker, "hold", True))
        client = triton.InferenceServerClient(server.address)
        client.start_stream(lambda result, error: None)
        for n in range(5):
            client.async_stream_infer("double", [vector(n)], parameters=SLO)
        server.until(lambda front_end: front_end.runtime.num_waiting == 5)
        client.stop_stream(cancel_requests=True)
        server.until(lambda front_end: front_end.runtime.num_waiting == 0)
        client.close()


# --- bad requests ---------------------------------------------------------------------------------

Input = pb.ModelInferRequest.InferInputTensor
Parameter = pb.InferParameter


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [
        ({"model_name": "nothing"}, "NOT_FOUND", "there is no model 'nothing'"),
        ({"model_name": ""}, "INVALID_ARGUMENT", "model_name: found none"),
        ({"model_version": "2"}, "NOT_FOUND", "model double: found version '2', expected '1'"),
        (
            {"model_version": "two"},
            "NOT_FOUND",
            "failed to get model version from specified version string 'two'",
        ),
    ],
)
def test_a_bad_request_gets_its_own_error(
    server: FrontEndInThread, bad: dict[str, Any], code: str, text: str
) -> None:
    with pytest.raises(grpc.RpcError, match=text) as caught:
        call(server, request(**bad).SerializeToString())
    error: Any = caught.value
    assert error.code().name == code


def test_garbage_bytes_get_an_error_and_the_next_request_an_answer(
    server: FrontEndInThread,
) -> None:
    for garbage in (b"\xff" * 10, b"\x3a\xff\xff\xff\xff\x0f" + bytes(20_000)):
        with pytest.raises(grpc.RpcError, match="are not a ModelInferRequest"):
            call(server, garbage)
    assert call(server, request().SerializeToString())


def test_every_method_answers_garbage_with_invalid_argument(server: FrontEndInThread) -> None:
    methods = ("ModelReady", "ModelMetadata", "RepositoryIndex", "RepositoryModelLoad")
    with grpc.insecure_channel(server.address) as channel:
        for method in methods:
            stub: Any = channel
            with pytest.raises(grpc.RpcError, match=f"not the request of {method}") as caught:
                stub.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"\xff\xff")
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_is_refused_is_not_kept_until_the_garbage_collector_comes(
    server: FrontEndInThread,
) -> None:
    bad = request(raw_input_contents=[bytes(MESSAGE_BYTES_MAX // 2)]).SerializeToString()
    hopeless = request(parameters={"slo_ms": pb.InferParameter(double_param=1e-6)})
    gc.collect()
    gc.disable()
    try:
        for message in (bad, hopeless.SerializeToString()) * 10:
            with pytest.raises(grpc.RpcError):
                call(server, message)
        # The server's thread may still be letting go of the last requests. One that only the collector
        # could free would stay.
        until_so(
            lambda: not any(type(thing) is ParsedRequest for thing in gc.get_objects()),
            what="no refused request is kept",
        )
    finally:
        gc.enable()


# --- health, metadata, repository -----------------------------------------------------------------


def test_health_and_metadata_are_as_tritons_client_expects(
    client: triton.InferenceServerClient,
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.is_model_ready("double", "1")
    assert not client.is_model_ready("nothing")  # Triton gives no error either.
    server = client.get_server_metadata()
    assert server.name == "clockwright"
    assert "model_repository" in server.extensions
    metadata = client.get_model_metadata("mixed")
    assert metadata.versions == ["1"]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("a", "INT64", [-1, 2]),
        ("b", "FP32", [-1, 2, 2]),
    ]


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.get_model_metadata("nothing"),
        lambda client: client.get_model_metadata("double", "9"),
    ],
)
def test_an_unknown_model_is_not_found(
    client: triton.InferenceServerClient, ask: Callable[[Any], Any]
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        ask(client)
    assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_kubernetes_health_probe_works(server: FrontEndInThread) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = channel
        check = stub.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"") == b"\x08\x01"
        assert check(b"\x0a\x1e" + b"inference.GRPCInferenceService"[:30]) == b"\x08\x01"
        with pytest.raises(grpc.RpcError, match="there is no service 'x'") as caught:
            check(b"\x0a\x01x")
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.NOT_FOUND


def test_models_are_listed_loaded_and_unloaded(tmp_path: Path) -> None:
    def states(client: triton.InferenceServerClient) -> dict[str, tuple[str, str]]:
        index = client.get_model_repository_index()
        return {model.name: (model.state, model.reason) for model in index.models}

    with (
        serving_in_thread(tmp_path) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        assert states(client)["double"] == ("READY", "")
        client.unload_model("double")
        assert "double" not in states(client)
        with pytest.raises(InferenceServerException, match="there is no model 'double'"):
            client.infer("double", [vector(1)], parameters=SLO)
        client.load_model("double")
        assert client.infer("double", [vector(4)], parameters=SLO).as_numpy("y")[0, 0] == 8

        unknown = tmp_path / "unknown" / "1"
        unknown.mkdir(parents=True)
        (unknown / "model.onnx").write_bytes(b"no")
        with pytest.raises(InferenceServerException, match="it is not in the script"):
            client.load_model("unknown")
        assert "unknown" not in states(client)


def test_kserve_sends_the_models_name_in_the_first_field(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as server, grpc.insecure_channel(server.address) as channel:
        stub: Any = channel
        service = "/inference.GRPCInferenceService/RepositoryModel"
        named = pb.RepositoryModelUnloadRequest(repository_name="double").SerializeToString()
        stub.unary_unary(service + "Unload")(named)
        assert server.do(lambda front_end: front_end.catalogue.find("double")) is None
        stub.unary_unary(service + "Load")(named)
        assert server.do(lambda front_end: front_end.catalogue.find("double")) is not None
        with pytest.raises(grpc.RpcError, match="model_name: found none"):
            stub.unary_unary(service + "Load")(b"")


def test_bfloat16_goes_through_raw(server: FrontEndInThread) -> None:
    bits = b"\x80\x3f\x00\x40"
    inputs = [Input(name="x", datatype="BF16", shape=[1, 2])]
    data = request(model_name="echo-BF16", inputs=inputs, raw_input_contents=[bits])
    response = pb.ModelInferResponse.FromString(call(server, data.SerializeToString()))
    assert (response.outputs[0].datatype, response.raw_output_contents[0]) == ("BF16", bits)


def test_typed_contents_are_answered_raw(server: FrontEndInThread) -> None:
    contents = pb.InferTensorContents(fp32_contents=[1, 2, 3])
    inputs = [Input(name="x", datatype="FP32", shape=[1, 3], contents=contents)]
    data = request(inputs=inputs, raw_input_contents=[])
    response = pb.ModelInferResponse.FromString(call(server, data.SerializeToString()))
    assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [2, 4, 6]
    assert not response.outputs[0].HasField("contents")


def test_what_nobody_foresaw_is_internal_and_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    code, text, _ = status_of(ZeroDivisionError("a secret"), method="ModelInfer")
    assert code is grpc.StatusCode.INTERNAL
    assert text == "internal error in ModelInfer: ZeroDivisionError"
    (record,) = [each for each in caplog.records if each.name == "controller.front.oip.statuses"]
    assert record.getMessage() == "ModelInfer: unexpected ZeroDivisionError: a secret"
    assert record.exc_info is None


@pytest.mark.parametrize("refusal", list(Refusal))
def test_every_refusal_has_a_code_and_its_text_starts_with_its_name(refusal: Refusal) -> None:
    code, text, _ = status_of(RefusedError(refusal, "because"), method="ModelInfer")
    assert code is CODES[refusal]
    assert text == f"{refusal.value}: because"
