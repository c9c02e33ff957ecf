"""gRPC's own client of reflection: what it learns of a server is enough to ask it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from controller.front.methods import REFLECTION
from tests.kit.front_end import FrontEndInThread, serving_in_thread


@pytest.fixture(scope="module", params=["here", "apart"])
def channel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models")
    with serving_in_thread(folder, front=request.param) as server:
        running: FrontEndInThread = server
        with grpc.insecure_channel(running.address) as found:
            yield found


def test_whoever_knows_nothing_learns_to_ask_a_model(channel: Any) -> None:  # noqa: ANN401
    database = ProtoReflectionDescriptorDatabase(channel)
    assert list(database.get_services()) == [
        "clockwright.v1.ControlService",
        "grpc.health.v1.Health",
        "inference.GRPCInferenceService",
    ]
    pool = DescriptorPool(database)
    for name in database.get_services():
        service = pool.FindServiceByName(name)
        assert service.methods
    method = pool.FindMethodByName("inference.GRPCInferenceService.ModelInfer")
    request = GetMessageClass(method.input_type)(
        model_name="double",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 3]}],
        raw_input_contents=[struct.pack("<3f", 1, 2, 3)],
        parameters={"slo_ms": {"int64_param": 60_000}},
    )
    ask = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=type(request).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    answer = ask(request, timeout=60)
    assert struct.unpack("<3f", answer.raw_output_contents[0]) == (2, 4, 6)


def test_what_there_is_not_is_told(channel: Any) -> None:  # noqa: ANN401
    database = ProtoReflectionDescriptorDatabase(channel)
    for find in (database.FindFileByName, database.FindFileContainingSymbol):
        with pytest.raises(KeyError):
            find("nothing.Here")


@pytest.mark.parametrize("service", REFLECTION)
def test_what_is_no_request_ends_the_call_in_words(channel: Any, service: str) -> None:  # noqa: ANN401
    ask = channel.stream_stream(f"/{service}/ServerReflectionInfo")
    for wrong, words in ((b"\xff\xff", "are no request"), (bytes(5000), "expected 4096 at most")):
        with pytest.raises(grpc.RpcError) as caught:
            list(ask(iter([wrong]), timeout=60))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in error.details()
