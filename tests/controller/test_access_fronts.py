"""Keys at the doors of all fronts: gRPC's own clients and Triton's, streams, tenants, feedback, reloading."""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.rpc import error_details_pb2, status_pb2

from clockwright.client.channel import OPTIONS, Access
from clockwright.v1 import control_pb2
from clockwright.v1 import inference_pb2 as pb
from controller.access.authoriser import Authoriser, Rules
from controller.access.grants import Grant, digest, id_of, make_key
from controller.access.roles import EVERY_ROLE, JOINING, Role
from controller.front.methods import METHODS
from tests.kit.front_end import FrontEnd, FrontEndInThread, serving_in_thread

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
FEEDBACK = "/clockwright.v1.ControlService/Feedback"
PUT = "/clockwright.v1.ControlService/PutApplication"
STREAMS = {
    STREAM,
    "/clockwright.v1.ControlService/AddModel",
    "/clockwright.v1.WorkerService/Attach",
}
WATCH = "/grpc.health.v1.Health/Watch"
CLIENT = frozenset((Role.INFERENCE, Role.METADATA, Role.FEEDBACK))


def a_key() -> str:
    return make_key(secrets.token_bytes(4), secrets.token_urlsafe(32))


def a_grant(key: str, name: str, roles: frozenset[Role] = CLIENT, tenant: str = "") -> Grant:
    return Grant(name, roles, tenant, key_id=id_of(key), key_sha256=digest(key))


@dataclass
class Guarded:
    """A server, and who may do what there."""

    server: FrontEndInThread
    authoriser: Authoriser
    keys: dict[str, str]
    rules: Rules
    channel: Any

    def call(self, path: str, request: bytes = b"", *, key: str = "", header: str = "") -> bytes:
        answer: bytes = self.channel.unary_unary(path)(
            request, metadata=metadata(key, header), timeout=60
        )
        return answer

    def code(self, path: str, request: bytes = b"", *, key: str = "") -> grpc.StatusCode:
        try:
            self.call(path, request, key=key)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK

    def use(self, rules: Rules) -> None:
        def do(front_end: FrontEnd) -> None:
            self.authoriser.use(rules, now_s=0)
            if front_end.guard is not None:
                front_end.guard.authoriser.use(rules, now_s=0)

        self.server.do(do)


def metadata(key: str, header: str = "") -> list[tuple[str, str]]:
    if not key:
        return []
    return [(header, key)] if header else [("authorization", f"Bearer {key}")]


@pytest.fixture(scope="module", params=["here", "apart"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    keys = {name: a_key() for name in ("web", "labels", "silver", "ops", "front")}
    rules = Rules(
        (
            a_grant(keys["web"], "web", tenant="gold"),
            a_grant(keys["labels"], "labels", frozenset((Role.FEEDBACK,)), tenant="gold"),
            a_grant(keys["silver"], "silver", tenant="silver"),
            a_grant(keys["ops"], "ops", EVERY_ROLE - JOINING),
            a_grant(keys["front"], "front", frozenset((Role.FRONT,))),
        ),
        anonymous=frozenset((Role.HEALTH,)),
        anonymous_tenants=False,
    )
    authoriser = Authoriser(rules)
    folder = tmp_path_factory.mktemp("models")
    with (
        serving_in_thread(
            folder,
            front=request.param,
            authoriser=authoriser,
            joining=Access(key=keys["front"]),
        ) as server,
        grpc.insecure_channel(server.address, options=OPTIONS) as channel,
    ):
        guarded = Guarded(server, authoriser, keys, rules, channel)
        guarded.use(rules)
        yield guarded


def question(model: str = "double", **parameters: str) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.parameters["slo_ms"].int64_param = 600_000
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    request.inputs.add(name="x", datatype="FP32", shape=(1, 3))
    request.raw_input_contents.append(struct.pack("<3f", 0, 1, 2))
    return request.SerializeToString()


def ending(call: Any) -> grpc.StatusCode:  # noqa: ANN401
    """How a stream ends, whatever it says before."""
    with pytest.raises(grpc.RpcError) as ended:
        for _ in call:
            pass
    code: grpc.StatusCode = ended.value.code()
    return code


def test_no_method_that_needs_a_role_is_open_to_a_stranger(guarded: Guarded) -> None:
    done = threading.Event()

    def silent() -> Iterator[bytes]:
        done.wait()
        yield from ()

    for path, method in METHODS.items():
        role = method.role
        if role in JOINING and guarded.server.front_end.guard is not None:
            assert guarded.code(path) is grpc.StatusCode.UNIMPLEMENTED, path
        elif path in STREAMS:
            # A stranger that says nothing is not waited for.
            call = guarded.channel.stream_stream(path)(silent(), timeout=60)
            assert ending(call) is grpc.StatusCode.UNAUTHENTICATED, path
        elif path == WATCH:
            call = guarded.channel.unary_stream(path)(b"", timeout=60)
            assert next(call), path
            call.cancel()
        elif role is Role.HEALTH:
            assert guarded.code(path) is not grpc.StatusCode.UNAUTHENTICATED, path
        else:
            assert guarded.code(path) is grpc.StatusCode.UNAUTHENTICATED, path
            assert guarded.code(path, key=a_key()) is grpc.StatusCode.UNAUTHENTICATED, path
            if role not in CLIENT:
                found = guarded.code(path, key=guarded.keys["web"])
                assert found is grpc.StatusCode.PERMISSION_DENIED, path
    done.set()


def test_a_denial_has_a_name_that_programs_read(guarded: Guarded) -> None:
    found = []
    for key in ("", a_key(), guarded.keys["labels"]):
        with pytest.raises(grpc.RpcError) as caught:
            guarded.call(INFER, question(), key=key)
        error: Any = caught.value
        trailing = dict(error.trailing_metadata())
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert error.details().startswith(f"{info.reason}: ")
        assert key not in error.details() or not key
        found.append(info.reason)
    assert found == ["NO_CREDENTIALS", "UNKNOWN_CREDENTIALS", "NOT_ALLOWED"]


def test_a_key_opens_inference_to_grpcs_and_tritons_clients(guarded: Guarded) -> None:
    key = guarded.keys["web"]
    for header in ("", "triton-grpc-protocol-api-key"):
        answers = {guarded.call(INFER, question(), key=key, header=header) for _ in range(3)}
        (data,) = answers
        answer = pb.ModelInferResponse.FromString(data)
        assert struct.unpack("<3f", answer.raw_output_contents[0]) == (0, 2, 4)
    client = triton.InferenceServerClient(guarded.server.address)
    tensor = triton.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2, 3]], np.float32))
    parameters = {"slo_ms": 600_000}
    with client:
        assert client.is_server_ready()
        for headers in ({"triton-grpc-protocol-infer": key}, {"authorization": f"Bearer {key}"}):
            result = client.infer("double", [tensor], parameters=parameters, headers=headers)
            assert result.as_numpy("y").tolist() == [[2, 4, 6]]
        with pytest.raises(triton.InferenceServerException, match="NO_CREDENTIALS"):
            client.infer("double", [tensor], parameters=parameters)


def test_a_stream_is_opened_by_a_key(guarded: Guarded) -> None:
    shown = metadata(guarded.keys["web"])
    call = guarded.channel.stream_stream(STREAM)(iter([question()] * 3), metadata=shown)
    answers = [pb.ModelStreamInferResponse.FromString(data) for data in call]
    assert [answer.error_message for answer in answers] == ["", "", ""]


def test_the_tenant_is_the_keys_and_no_other(guarded: Guarded) -> None:
    def last_tenant() -> str:
        return guarded.server.do(lambda front_end: front_end.runtime.telemetry.requests[-1].tenant)

    gold, ops = guarded.keys["web"], guarded.keys["ops"]
    for request in (question(), question(tenant="gold"), question()):
        guarded.call(INFER, request, key=gold)
        assert last_tenant() == "gold"
    guarded.call(INFER, question(), key=ops)
    assert last_tenant() == ""
    for key, tenant in ((gold, "silver"), (ops, "gold"), (gold, "gold ")):
        # Twice, for the second is read by the template of the first.
        for _ in range(2):
            found = guarded.code(INFER, question(tenant=tenant), key=key)
            assert found is grpc.StatusCode.PERMISSION_DENIED
    stream = guarded.channel.stream_stream(STREAM)(
        iter([question(tenant="silver"), question()]), metadata=metadata(gold)
    )
    answers = sorted(pb.ModelStreamInferResponse.FromString(data).error_message for data in stream)
    assert answers[0] == ""
    assert answers[1].startswith("NOT_ALLOWED: parameter tenant: found 'silver'")


def test_feedback_comes_from_the_tenant_that_asked(guarded: Guarded) -> None:
    application = control_pb2.Application(name="app", models=["right", "wrong"], no_cache=True)
    put = control_pb2.PutApplicationRequest(application=application, replace=True)
    guarded.call(PUT, put.SerializeToString(), key=guarded.keys["ops"])
    answer = pb.ModelInferResponse.FromString(
        guarded.call(INFER, question("app"), key=guarded.keys["web"])
    )
    feedback = control_pb2.FeedbackRequest()
    feedback.items.add(query_id=answer.parameters["query_id"].string_param, label=1)
    data = feedback.SerializeToString()

    def outcome(name: str) -> str:
        response = guarded.call(FEEDBACK, data, key=guarded.keys[name])
        return control_pb2.FeedbackResponse.FromString(response).outcomes[0].status

    assert [outcome(name) for name in ("silver", "ops", "labels", "web")] == [
        *("UNKNOWN", "UNKNOWN", "APPLIED", "DUPLICATE"),
    ]


def test_the_id_of_a_query_tells_nothing_of_anothers(guarded: Guarded) -> None:
    application = control_pb2.Application(name="app", models=["right"], no_cache=True)
    put = control_pb2.PutApplicationRequest(application=application, replace=True)
    guarded.call(PUT, put.SerializeToString(), key=guarded.keys["ops"])
    ids = []
    for _ in range(10):
        data = guarded.call(INFER, question("app"), key=guarded.keys["web"])
        answer = pb.ModelInferResponse.FromString(data)
        ids.append(answer.parameters["query_id"].string_param)
    assert {len(query_id) for query_id in ids} == {32}
    # No prefix, time or counter stands in any part of it.
    for begin in range(0, 32, 4):
        assert len({query_id[begin : begin + 4] for query_id in ids}) > 5


def test_a_revoked_key_opens_nothing_more_and_its_streams_end(guarded: Guarded) -> None:
    key, rules = a_key(), guarded.rules
    more = replace(rules, grants=(*rules.grants, a_grant(key, "soon gone")))
    assert guarded.code(INFER, question(), key=key) is grpc.StatusCode.UNAUTHENTICATED
    guarded.use(more)
    assert guarded.code(INFER, question(), key=key) is grpc.StatusCode.OK
    asked = threading.Event()

    def one_question() -> Iterator[bytes]:
        yield question()
        asked.wait()

    streams = {
        name: guarded.channel.stream_stream(STREAM)(one_question(), metadata=metadata(shown))
        for name, shown in (("gone", key), ("stays", guarded.keys["web"]))
    }
    for stream in streams.values():
        assert not pb.ModelStreamInferResponse.FromString(next(stream)).error_message
    guarded.use(rules)
    assert ending(streams["gone"]) is grpc.StatusCode.UNAUTHENTICATED
    assert guarded.code(INFER, question(), key=key) is grpc.StatusCode.UNAUTHENTICATED
    asked.set()
    assert list(streams["stays"]) == []
