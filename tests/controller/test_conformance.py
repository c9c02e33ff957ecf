"""The same questions by clients of every make, without TLS and with it.

Each is asked for the same answers: those of many requests at once, of large ones, of wrong ones between good
ones, and of requests for which it does not wait long enough.
"""

from __future__ import annotations

import asyncio
import base64
import json
import queue
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from clockwright.client.channel import OPTIONS
from clockwright.v1 import inference_pb2 as pb
from controller.front.http.tls import server_context
from tests.kit.certificates import self_signed
from tests.kit.front_end import FrontEndInThread, serving_in_thread

SERVICE = "/inference.GRPCInferenceService"
PARAMETERS = {"slo_ms": 600_000}
#: What a client waits for answers that are to come.
LONG_S = 300.0


@dataclass
class Question:
    """A request, whatever a client makes of it."""

    id: str
    model: str
    input: np.ndarray[Any, Any]
    input_name: str = "x"

    def message(self) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=self.model, id=self.id)
        request.parameters["slo_ms"].int64_param = PARAMETERS["slo_ms"]
        request.inputs.add(name=self.input_name, datatype="FP32", shape=self.input.shape)
        request.raw_input_contents.append(self.input.tobytes())
        return request

    def triton(self) -> dict[str, Any]:
        tensor = triton.InferInput(self.input_name, list(self.input.shape), "FP32")
        tensor.set_data_from_numpy(self.input)
        return {
            "model_name": self.model,
            "inputs": [tensor],
            "request_id": self.id,
            "parameters": PARAMETERS,
        }


@dataclass
class Answer:
    """What a client was told: a tensor, or an error."""

    tensor: bytes = b""
    error: str = ""
    #: gRPC's code of a call; a stream's messages have none.
    code: grpc.StatusCode | None = None


@dataclass
class Server:
    """A front end, and how to get there."""

    running: FrontEndInThread
    #: PEM file; None: there is no TLS.
    certificate: Path | None

    @property
    def address(self) -> str:
        return self.running.address

    def channel(self, module: Any) -> Any:  # noqa: ANN401
        """A channel of `grpc` or `grpc.aio`."""
        # The types of gRPC's stubs want serializers; its clients do not.
        if self.certificate is None:
            return module.insecure_channel(self.address, options=OPTIONS)
        credentials = grpc.ssl_channel_credentials(self.certificate.read_bytes())
        return module.secure_channel(self.address, credentials, options=OPTIONS)

    def triton(self, module: Any) -> Any:  # noqa: ANN401
        """A client of `tritonclient.grpc` or its `aio`."""
        if self.certificate is None:
            return module.InferenceServerClient(self.address)
        certificate = str(self.certificate)
        return module.InferenceServerClient(self.address, ssl=True, root_certificates=certificate)


#: Asks everything at once; says what came of each by its id, none of which it waits for longer than so many
#: seconds.
Client = Callable[[Server, Sequence[Question], float], dict[str, Answer]]


def told(data: bytes) -> Answer:
    return Answer(pb.ModelInferResponse.FromString(data).raw_output_contents[0])


def failed(error: Any) -> Answer:  # noqa: ANN401
    """What an error of grpc's says, or of tritonclient's."""
    if isinstance(error, InferenceServerException):
        codes = {str(code): code for code in grpc.StatusCode}
        return Answer(error=error.message() or "", code=codes.get(error.status()))
    return Answer(error=error.details(), code=error.code())


def told_in_stream(data: bytes) -> tuple[str, Answer]:
    message = pb.ModelStreamInferResponse.FromString(data)
    response = message.infer_response
    if message.error_message:
        return response.id, Answer(error=message.error_message)
    return response.id, Answer(response.raw_output_contents[0])


def grpcio(server: Server, questions: Sequence[Question], timeout_s: float) -> dict[str, Answer]:
    with server.channel(grpc) as channel:
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer")
        calls = {
            question.id: infer.future(question.message().SerializeToString(), timeout=timeout_s)
            for question in questions
        }
        return {
            name: failed(call) if call.exception() else told(call.result())
            for name, call in calls.items()
        }


def grpcio_stream(
    server: Server, questions: Sequence[Question], timeout_s: float
) -> dict[str, Answer]:
    with server.channel(grpc) as channel:
        converse = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
        data = [question.message().SerializeToString() for question in questions]
        return dict(map(told_in_stream, converse(iter(data), timeout=timeout_s)))


def grpc_aio(server: Server, questions: Sequence[Question], timeout_s: float) -> dict[str, Answer]:
    async def main() -> dict[str, Answer]:
        async with server.channel(grpc.aio) as channel:
            infer = channel.unary_unary(f"{SERVICE}/ModelInfer")

            async def ask(question: Question) -> Answer:
                data = question.message().SerializeToString()
                try:
                    return told(await infer(data, timeout=timeout_s))
                except grpc.aio.AioRpcError as error:
                    return failed(error)

            answers = await asyncio.gather(*map(ask, questions))
        return {question.id: answer for question, answer in zip(questions, answers, strict=True)}

    return asyncio.run(main())


def grpc_aio_stream(
    server: Server, questions: Sequence[Question], timeout_s: float
) -> dict[str, Answer]:
    async def main() -> dict[str, Answer]:
        async with server.channel(grpc.aio) as channel:
            call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(timeout=timeout_s)
            for question in questions:
                await call.write(question.message().SerializeToString())
            await call.done_writing()
            return dict([told_in_stream(data) async for data in call])

    return asyncio.run(main())


def outcome(result: Any, error: Any) -> Answer:  # noqa: ANN401
    """What tritonclient hands to a callback."""
    return failed(error) if error else Answer(result.get_response().raw_output_contents[0])


def tritonclient(
    server: Server, questions: Sequence[Question], timeout_s: float
) -> dict[str, Answer]:
    answers = {}
    with server.triton(triton) as client:
        for question in questions:
            try:
                result = client.infer(**question.triton(), client_timeout=timeout_s)
                answers[question.id] = outcome(result, None)
            except InferenceServerException as error:
                answers[question.id] = outcome(None, error)
    return answers


def tritonclient_async(
    server: Server, questions: Sequence[Question], timeout_s: float
) -> dict[str, Answer]:
    ended: queue.SimpleQueue[tuple[str, Answer]] = queue.SimpleQueue()

    def note(name: str) -> Callable[[Any, Any], None]:
        return lambda result, error: ended.put((name, outcome(result, error)))

    with server.triton(triton) as client:
        for question in questions:
            client.async_infer(
                **question.triton(), callback=note(question.id), client_timeout=timeout_s
            )
        return dict(ended.get(timeout=LONG_S) for _ in questions)


def tritonclient_stream(
    server: Server, questions: Sequence[Question], timeout_s: float
) -> dict[str, Answer]:
    ended: queue.SimpleQueue[tuple[str, Answer]] = queue.SimpleQueue()

    def note(result: Any, error: Any) -> None:  # noqa: ANN401
        # An error comes as its text alone.
        ended.put((result.get_response().id if result else "", outcome(result, error)))

    with server.triton(triton) as client:
        client.start_stream(note, stream_timeout=timeout_s)
        for question in questions:
            client.async_stream_infer(**question.triton())
        answers = dict(ended.get(timeout=LONG_S) for _ in questions)
        client.stop_stream()
    return answers


def tritonclient_aio(
    server: Server, questions: Sequence[Question], timeout_s: float
) -> dict[str, Answer]:
    async def main() -> dict[str, Answer]:
        async with server.triton(triton_aio) as client:

            async def ask(question: Question) -> Answer:
                try:
                    result = await client.infer(**question.triton(), client_timeout=timeout_s)
                except InferenceServerException as error:
                    return outcome(None, error)
                return outcome(result, None)

            answers = await asyncio.gather(*map(ask, questions))
        return {question.id: answer for question, answer in zip(questions, answers, strict=True)}

    return asyncio.run(main())


def tritonclient_aio_stream(
    server: Server, questions: Sequence[Question], timeout_s: float
) -> dict[str, Answer]:
    async def main() -> dict[str, Answer]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            for question in questions:
                yield question.triton()

        answers = {}
        async with server.triton(triton_aio) as client:
            async for result, error in client.stream_infer(requests(), stream_timeout=timeout_s):
                answers[result.get_response().id if result else ""] = outcome(result, error)
        return answers

    return asyncio.run(main())


def javascript(
    server: Server, questions: Sequence[Question], timeout_s: float, how: str = "unary"
) -> dict[str, Answer]:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    root = Path(__file__).parents[2]
    asked = [
        {
            "id": question.id,
            "model_name": question.model,
            "parameters": {name: {"int64_param": value} for name, value in PARAMETERS.items()},
            "inputs": [
                {
                    "name": question.input_name,
                    "datatype": "FP32",
                    "shape": list(question.input.shape),
                }
            ],
            "tensor": base64.b64encode(question.input.tobytes()).decode(),
            "timeout_ms": 1000 * timeout_s,
        }
        for question in questions
    ]
    command = ["node", str(root / "tests/kit/grpc_js_client.js"), server.address]
    command += [str(root / "proto/inference/inference.proto"), how, str(server.certificate or "")]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if "Cannot find module '@grpc" in done.stderr:
        pytest.skip("node finds no @grpc/grpc-js and @grpc/proto-loader in NODE_PATH")
    assert done.returncode == 0, done.stderr
    codes = {code.value[0]: code for code in grpc.StatusCode}
    return {
        name: Answer(
            base64.b64decode(found.get("tensor", "")),
            found.get("error", ""),
            codes.get(found.get("code")),
        )
        for name, found in json.loads(done.stdout).items()
    }


def javascript_stream(
    server: Server, questions: Sequence[Question], timeout_s: float
) -> dict[str, Answer]:
    return javascript(server, questions, timeout_s, "stream")


UNARY: list[Client] = [
    grpcio, grpc_aio, tritonclient, tritonclient_async, tritonclient_aio, javascript,
]  # fmt: skip
STREAMS: list[Client] = [
    grpcio_stream, grpc_aio_stream, tritonclient_stream, tritonclient_aio_stream,
    javascript_stream,
]  # fmt: skip
#: tritonclient's streams say of an error only its text, and no longer of which request.
ANONYMOUS: list[Client] = [tritonclient_stream, tritonclient_aio_stream]


@pytest.fixture(scope="module", params=["plain", "behind tls"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    certificate, tls = None, None
    if request.param == "behind tls":
        certificate, key = self_signed(tmp_path_factory.mktemp("tls"))
        tls = server_context(certificate, key)
    directory = tmp_path_factory.mktemp("models")
    with serving_in_thread(directory, tls=tls) as running:
        yield Server(running, certificate)


def every(clients: Sequence[Client]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("client", clients, ids=lambda client: client.__name__)


def vector(number: float) -> np.ndarray[Any, Any]:
    return np.array([[number, number + 1, number + 2]], np.float32)


@every(UNARY + STREAMS)
def test_each_of_many_requests_at_once_gets_its_own_answer(server: Server, client: Client) -> None:
    questions = [Question(f"r{number}", "double", vector(number)) for number in range(40)]
    answers = client(server, questions, LONG_S)
    assert answers == {
        question.id: Answer((2 * question.input).tobytes()) for question in questions
    }


@every(UNARY + STREAMS)
def test_large_tensors_arrive_whole(server: Server, client: Client) -> None:
    rng = np.random.default_rng(1)
    images = [rng.random((rows, 3, 224, 224), np.float32) for rows in (1, 2, 1)]
    questions = [
        Question(f"r{number}", "image", image, "image") for number, image in enumerate(images)
    ]
    answers = client(server, questions, LONG_S)
    assert answers == {question.id: Answer(question.input.tobytes()[:8]) for question in questions}


@every(UNARY + STREAMS)
def test_wrong_requests_between_good_ones_get_errors_of_their_own(
    server: Server, client: Client
) -> None:
    unknown = Question("u", "nobody", vector(0))
    unfit = Question("w", "double", np.zeros((1, 4), np.float32))
    good = [Question(f"r{number}", "double", vector(number)) for number in range(10)]
    answers = client(server, [*good[:5], unknown, *good[5:], unfit], LONG_S)
    errors = [answer.error for answer in answers.values() if answer.error]
    for question in good:
        assert answers[question.id] == Answer((2 * question.input).tobytes())
    if client in ANONYMOUS:
        # The later of the two stands in the place of both.
        assert len(errors) == 1
        assert "there is no model 'nobody'" in errors[0] or "shape" in errors[0]
        return
    assert "there is no model 'nobody'" in answers["u"].error
    assert "shape" in answers["w"].error
    if client in UNARY:
        assert answers["u"].code is grpc.StatusCode.NOT_FOUND
        assert answers["w"].code is grpc.StatusCode.INVALID_ARGUMENT


@every(UNARY)
def test_who_does_not_wait_long_enough_is_told_so_and_its_requests_are_withdrawn(
    server: Server, client: Client
) -> None:
    server.running.do(lambda front: setattr(front.worker, "hold", True))
    try:
        answers = client(server, [Question("r", "double", vector(0))], 0.5)
        # The server's own refusal may come first: that it cannot be in time.
        assert answers["r"].code is grpc.StatusCode.DEADLINE_EXCEEDED
        server.running.until(lambda front: front.runtime.num_waiting == 0)
    finally:
        server.running.do(lambda front: front.worker.release())
    assert client(server, [Question("r", "double", vector(3))], LONG_S) == {
        "r": Answer((2 * vector(3)).tobytes())
    }
