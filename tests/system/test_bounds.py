"""Each bound of docs/bounds.md: one more than it is refused with the words that stand there."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import msgspec
import pytest
import requests

from clockwright.errors import ClockwrightError
from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.v1 import control_pb2 as control
from clockwright.v1 import inference_pb2 as pb
from clockwright.wire import peer as wire
from clockwright.wire.data_socket import dial
from clockwright.wire.frames import FrameReader, greeting
from clockwright.wire.tensors import TensorSpec
from clockwright.wire.worker_messages import Register
from controller.access.quota_stage import over_quota
from controller.core import Scheduler
from controller.core.quotas import Quota, Quotas
from controller.dashboard.views import DashboardViews
from controller.front.admission.entrance import WAITING_MAX, Entrance
from controller.front.admission.limits import AdmissionLimits
from controller.front.admission.pressure import MemoryPressure
from controller.front.oip.classification import CLASSES_MAX
from controller.front.oip.json_form import AnswerForm, read_request, write_answer
from controller.front.oip.protocol import CheckedRequest, Servable, parse_request
from controller.front.oip.protocol import read_request as check_request
from controller.front.oip.refusals import error_of
from controller.front.oip.regions import Regions
from controller.front.remote.link_frames import decode_from_front, encode_asks
from controller.links.slabs import Slabs
from controller.models.catalogue import Catalogue
from controller.models.model_folder import read_versions
from controller.models.state_file import StateFile
from controller.models.uploads import Uploads
from controller.port import Ask
from controller.process.app import running
from controller.process.config import ControllerConfig
from controller.runtime import Runtime
from controller.selection.core.application import Application
from controller.telemetry.tables import Telemetry
from tests.kit.front_end import FrontEndInThread, serving_in_thread, until
from tests.kit.raw_http2 import END_HEADERS, HEADERS, RawClient, frame, headers, literal

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "bounds.md"

INFER = "/inference.GRPCInferenceService/ModelInfer"
INFER_PATH = "/v2/models/double/infer"
CONTROL = "/clockwright.v1.ControlService/"
MIB = 1 << 20
LONG = "x" * 257


class Place:
    """Where bounds are tried: a server that all share, and a folder of a test's own."""

    def __init__(self, server: FrontEndInThread, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def infer(self, **fields: object) -> str:
        return self.call(INFER, request(**fields).SerializeToString())

    def call(self, method: str, *messages: bytes) -> str:
        """The words with which a call is refused."""
        with grpc.insecure_channel(
            self.server.address, options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            stub: Any = channel
            # One request or a stream of them is the same to a server.
            with pytest.raises(grpc.RpcError) as caught:
                stub.stream_unary(method)(iter(messages), timeout=60)
        error: Any = caught.value
        assert error.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        return str(error.details())

    def rest(self, path: str, body: str | bytes, **headers: str) -> str:
        """The words with which a request in HTTP is refused."""
        url = f"http://{self.server.rest}{path}"
        answer = requests.post(url, data=body, headers=headers, timeout=60)
        assert answer.status_code in (400, 413, 429, 431)
        return str(answer.json()["error"])

    def rest_tensor(self, data: str) -> str:
        tensor = f'{{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": {data}}}'
        return self.rest(INFER_PATH, f'{{"inputs": [{tensor}]}}')

    def control(self, method: str, message: Any) -> str:  # noqa: ANN401
        return self.call(CONTROL + method, message.SerializeToString())

    def upload(self, *paths: str, name: str = "fresh", content: bytes = b"") -> str:
        messages = [
            control.AddModelRequest(model_id=name, path=path, content=content) for path in paths
        ]
        return self.call(
            CONTROL + "AddModel", *(message.SerializeToString() for message in messages)
        )

    def config(self, text: str, name: str = "config.toml", **files: str) -> str:
        """What is said of a folder with such a configuration."""
        folder = self.folder / "model"
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").write_bytes(b"none")
        for path, content in {name: text, **files}.items():
            (folder / path).write_text(content)
        return refusal(lambda: read_versions(folder)[-1])

    def application(self, **fields: object) -> str:
        good: dict[str, Any] = {"name": "app", "models": ["right"]}
        application = control.Application(**{**good, **fields})
        return self.control(
            "PutApplication", control.PutApplicationRequest(application=application)
        )


def request(**fields: object) -> pb.ModelInferRequest:
    """A good request for `double`, with some fields changed."""
    good: dict[str, Any] = {
        "model_name": "double",
        "inputs": [pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 3])],
        "raw_input_contents": [bytes(12)],
    }
    return pb.ModelInferRequest(**{**good, **fields})


def parameter(name: str, text: str) -> dict[str, pb.InferParameter]:
    return {name: pb.InferParameter(string_param=text)}


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(ClockwrightError) as caught:
        work()
    return str(caught.value)


# --- clients --------------------------------------------------------------------------------------


def waiting_requests(_: Place) -> str:
    door = AdmissionLimits(max_requests=1, max_bytes=MIB)
    entrance = Entrance(lambda: 0, _SpentTurn(), door, soon=lambda _: None, used_ns=lambda: 0)
    enters = [
        entrance.enter("source", _Patient(), 0, 3600 * NS_PER_S) for _ in range(WAITING_MAX + 1)
    ]
    assert enters == [True] * WAITING_MAX + [False]
    return str(entrance.refusal(0))


class _SpentTurn:
    began_ns = -NS_PER_S
    period_ns = 0

    def used(self) -> None:
        pass

    def soon(self, work: Callable[[], object]) -> None:
        pass


class _Patient:
    over = False

    def begin_waiting(self) -> None:
        raise AssertionError("its turn comes later")

    refuse = begin_waiting


def open_requests(_: Place) -> str:
    door = AdmissionLimits(max_requests=1, max_bytes=MIB)
    door.enter(1)
    return refusal(lambda: door.enter(1))


def open_bytes(_: Place) -> str:
    door = AdmissionLimits(max_requests=10, max_bytes=MIB)
    door.enter(MIB)
    return refusal(lambda: door.enter(1))


def connections(place: Place) -> str:
    with (
        serving_in_thread(place.folder, max_connections=1) as server,
        RawClient(server.address) as first,
        RawClient(server.address) as second,
    ):
        first.settle()
        (end,) = second.wait([second.infer(request().SerializeToString())])
        return end.text


def many_classes(_: Place) -> str:
    wanted = pb.ModelInferRequest.InferRequestedOutputTensor(name="y")
    wanted.parameters["classification"].int64_param = CLASSES_MAX
    message = request(outputs=[wanted])
    message.inputs[0].shape[:] = [2, 3]
    message.raw_input_contents[:] = [bytes(24)]
    x, y = TensorSpec("x", "FP32", (3,)), TensorSpec("y", "FP32", (CLASSES_MAX,))
    servable = Servable("double", "1", (x,), (y,), 16, None)
    parsed = parse_request(message.SerializeToString())
    return refusal(
        lambda: check_request(parsed, servable, rpc_remaining_s=None, default_slo_ns=NS_PER_S)
    )


def connections_of_rest(place: Place) -> str:
    with (
        serving_in_thread(place.folder / "models", max_connections=1, rest=True) as server,
        requests.Session() as first,
    ):
        url = f"http://{server.rest}/v2/health/live"
        assert first.get(url, timeout=60).status_code == 200
        return str(requests.get(url, timeout=60).json()["error"])


def large_answer(_: Place) -> str:
    servable = Servable("double", "1", (), (TensorSpec("y", "INT8", (MIB + 1,)),), 1, None)
    asked = CheckedRequest("", 1, [], [0], NS_PER_S, "default", False, "", "", b"")
    outputs = [bytes(MIB + 1)]
    return refusal(lambda: write_answer(asked, servable, outputs, {}, form=AnswerForm()))


def memory(used_percent: int) -> str:
    door, pressure = AdmissionLimits(max_requests=10, max_bytes=MIB), MemoryPressure(100 * MIB)
    pressure.see(used_percent * MIB)
    door.memory_is(pressure)
    return refusal(lambda: door.enter(64 << 10))


def headers_of_a_call(place: Place) -> str:
    with RawClient(place.server.address) as client:
        block = headers() + literal("a", "b" * 100) * 200
        client.send(frame(HEADERS, END_HEADERS, client.next_id(), block))
        closed = client.wait_closed()
        assert closed is not None
        return closed[1]


@contextmanager
def regions(folder: Path) -> Iterator[Regions]:
    (folder / "object").write_bytes(bytes(1000))
    slabs = Slabs(0)
    yield Regions(slabs, num_bytes_max=300, request_bytes_max=300, objects=folder)
    slabs.close()


def many_regions(place: Place) -> str:
    with regions(place.folder) as found:
        for number in range(256):
            found.register(str(number), "object", 0, 1)
        words = refusal(lambda: found.register("one more", "object", 0, 1))
        found.unregister("")
        return words


def many_regions_of_a_tenant(place: Place) -> str:
    with regions(place.folder) as found:
        for number in range(128):
            found.register(str(number), "object", 0, 1, owner="gold")
        words = refusal(lambda: found.register("one more", "object", 0, 1, owner="gold"))
        found.unregister("", owner="gold")
        return words


def large_regions_of_a_tenant(place: Place) -> str:
    with regions(place.folder) as found:
        found.register("a", "object", 0, 150, owner="gold")
        words = refusal(lambda: found.register("b", "object", 0, 1, owner="gold"))
        found.unregister("", owner="gold")
        return words


def long_region(place: Place) -> str:
    with regions(place.folder) as found:
        return refusal(lambda: found.register(LONG, "object", 0, 1))


def large_regions(place: Place) -> str:
    with regions(place.folder) as found:
        found.register("a", "object", 0, 300)
        words = refusal(lambda: found.register("b", "object", 0, 1))
        found.unregister("")
        return words


def quota(bounds: Quota, *, slo_ns: int = NS_PER_S) -> Callable[[Place], str]:
    """The second request of a tenant that may have one."""

    def ask(_: Place) -> str:
        use = Quotas({"gold": bounds}).find("gold", 0)
        assert use is not None
        for _number in range(2):
            exceeded = use.enter(0, 100, slo_ns)
        assert exceeded is not None
        return str(error_of(over_quota("gold", exceeded), ""))

    return ask


# --- operators ------------------------------------------------------------------------------------


def many_models(place: Place) -> str:
    async def main() -> None:
        for name in ("models/many", "one-more"):
            (place.folder / name / "1").mkdir(parents=True)
            (place.folder / name / "1" / "model.onnx").write_bytes(b"none")
        (place.folder / "models" / "many" / "config.toml").write_text("copies = 7\n")
        runtime = Runtime(Scheduler(), Telemetry())
        catalogue = Catalogue(runtime, place.folder / "models", models_max=7)
        await catalogue.scan()
        await catalogue.add(place.folder / "one-more")

    return refusal(lambda: asyncio.run(main()))


def many_being_added(place: Place) -> str:
    """Streams that have begun, and then say nothing."""

    async def main() -> str:
        async with grpc.aio.insecure_channel(place.server.address) as channel:
            stub: Any = channel
            calls = [stub.stream_unary(CONTROL + "AddModel")() for _ in range(65)]
            ended, _ = await asyncio.wait(
                [asyncio.ensure_future(call.code()) for call in calls],
                return_when=asyncio.FIRST_COMPLETED,
            )
            words = [await call.details() for call in calls if call.done()]
            assert len(ended) == len(words) == 1
            for call in calls:
                call.cancel()
            return str(words[0])

    return asyncio.run(main())


def load_with_much(place: Place) -> str:
    parameters = {"config": "{" + " " * (64 << 10) + "}"}
    return place.rest("/v2/repository/models/m/load", json.dumps({"parameters": parameters}))


def uploads_on_disk(place: Place) -> str:
    async def main() -> str:
        state = StateFile(None)
        try:
            uploads = Uploads(place.folder / "uploads", state, bytes_max=10_000)
            upload = uploads.begin()
            uploads.grow(upload, 10_000)
            return refusal(lambda: uploads.grow(upload, 1))
        finally:
            await state.close()

    return asyncio.run(main())


def many_applications(place: Place) -> str:
    applications = place.server.front_end.applications

    async def main() -> str:
        try:
            for number in range(1000):
                await applications.put(Application(name=f"app-{number}", models=("right",)))
            with pytest.raises(ClockwrightError) as caught:
                await applications.put(Application(name="one-more", models=("right",)))
        finally:
            for running_one in applications.all:
                await applications.remove(running_one.application.name)
        return str(caught.value)

    return place.server.run(main())


def many_quotas(place: Place) -> str:
    book = place.server.front_end.quotas

    async def main() -> str:
        book.quotas.bind({str(number): Quota(rate_rps=1) for number in range(10_000)})
        return await asyncio.to_thread(
            place.control,
            "SetQuota",
            control.SetQuotaRequest(tenant="one more", quota=control.Quota(rate_rps=1)),
        )

    try:
        return place.server.run(main())
    finally:
        place.server.do(lambda _: book.quotas.bind({}))


# --- workers and fronts ---------------------------------------------------------------------------


@asynccontextmanager
async def controlling() -> AsyncIterator[tuple[Any, Any]]:
    # Peers of these tests say nothing once they have joined.
    quiet = ControllerConfig(port=0, heartbeat_interval_ms=60_000, silence_limit_ms=600_000)
    async with (
        running(quiet) as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
    ):
        yield controller, channel


def register(**fields: object) -> bytes:
    good: dict[str, Any] = {
        "protocol_version": wire.PROTOCOL_VERSION,
        "worker_id": "w",
        "device": "d",
        "gpu_kind": "k",
        "num_pages": 1,
        "page_bytes": 1,
        "arena_bytes": 1,
    }
    return wire.encode(Register(**{**good, **fields}))


async def attach(channel: Any, message: bytes) -> tuple[Any, str]:  # noqa: ANN401
    """Ask for a worker's connection; gives the answer, or why it is rejected."""
    try:
        answer = await channel.unary_unary(f"/{wire.WORKER_SERVICE}/{wire.ATTACH}")(message)
    except grpc.aio.AioRpcError as error:
        return None, str(error.details())
    return msgspec.msgpack.decode(answer, type=wire.Welcome), ""


def registration(**fields: object) -> Callable[[Place], str]:
    def ask(_: Place) -> str:
        async def main() -> str:
            async with controlling() as (_, channel):
                return (await attach(channel, register(**fields)))[1]

        return asyncio.run(main())

    return ask


def many_workers(most: int, *, alike: bool) -> Callable[[Place], str]:
    def ask(_: Place) -> str:
        def one(name: str, kind: str) -> bytes:
            return register(worker_id=name) if alike else register(worker_id=name, gpu_kind=kind)

        async def main() -> str:
            async with controlling() as (controller, channel):
                with ExitStack() as stack:
                    for number in range(most):
                        name = f"w{number}"
                        welcome, reason = await attach(channel, one(name, name))
                        assert not reason
                        await connect(welcome, stack)
                        await until(lambda: len(controller.links.links) > number)  # noqa: B023
                    return (await attach(channel, one("one-more", "x")))[1]

        return asyncio.run(main())

    return ask


async def connect(welcome: wire.Welcome, stack: ExitStack) -> None:
    """Open the connection of a peer."""
    sock = await asyncio.to_thread(
        dial, "127.0.0.1", welcome.socket_port, welcome.socket_path, limit_s=60
    )
    stack.callback(sock.close)
    sock.sendall(greeting(welcome.token))


def many_fronts(_: Place) -> str:
    def message(number: int) -> bytes:
        return wire.encode(
            wire.FrontRegister(wire.PROTOCOL_VERSION, "here", 1, instance=f"{number}")
        )

    async def main() -> str:
        async with controlling() as (controller, channel):
            attach_front = channel.unary_unary(f"/{wire.FRONT_SERVICE}/{wire.ATTACH}")
            with ExitStack() as stack:
                for number in range(256):
                    answer = await attach_front(message(number))
                    await connect(msgspec.msgpack.decode(answer, type=wire.Welcome), stack)
                    await until(lambda: controller.fronts.num_fronts > number)  # noqa: B023
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await attach_front(message(256))
                return str(caught.value.details())

    return asyncio.run(main())


def long_frame(_: Place) -> str:
    reader = FrameReader(payload_bytes_max=0)
    prefix = struct.pack("<II", MIB + 1, 0)
    reader.room()[: len(prefix)] = prefix
    return refusal(lambda: reader.received(len(prefix)))


def tenant_by_a_front(_: Place) -> str:
    message = encode_asks([Ask(1, 1, 1, 1, LONG)], [])
    reader = FrameReader()
    data = b"".join(message)
    reader.room()[: len(data)] = data
    ((header, _payload),) = reader.received(len(data))
    return refusal(lambda: decode_from_front(header))


def registration_of_a_worker(_: Place) -> str:
    async def main() -> str:
        async with controlling() as (_, channel):
            return (await attach(channel, register(host="x" * (32 * MIB))))[1]

    return asyncio.run(main())


def request_for_metrics(_: Place) -> str:
    async def main() -> str:
        async with running(ControllerConfig(port=0, metrics_port=0)) as controller:
            reader, writer = await asyncio.open_connection("127.0.0.1", controller.metrics_port)
            writer.write(b"GET /metrics HTTP/1.1\r\nx: ".ljust(17 << 10, b"x"))
            answer = await reader.read()
            writer.close()
            return answer.decode()

    return asyncio.run(main())


def viewers_of_the_dashboard(_: Place) -> str:
    async def view(port: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /live/overview HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        return reader, writer

    async def main() -> str:
        async with running(ControllerConfig(port=0, metrics_port=0)) as controller:
            viewers = [await view(controller.metrics_port) for _ in range(16)]
            for reader, _ in viewers:
                await reader.readuntil(b"data: ")
            reader, writer = await view(controller.metrics_port)
            # The connection stays, for whoever asks again.
            answer = await reader.readuntil(b"dashboard\n")
            for _, each in (*viewers, (reader, writer)):
                each.close()
            return answer.decode()

    return asyncio.run(main())


def looks_at_the_dashboard(_: Place) -> str:
    async def ask(port: int | None) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /look/history HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        try:
            return (await reader.readuntil(b"again\n")).decode()
        finally:
            writer.close()

    async def main() -> str:
        over = asyncio.Event()

        async def history(_: DashboardViews, __: str) -> bytes:
            await over.wait()
            return b"{}"

        with mock.patch.object(DashboardViews, "history", history):
            async with running(ControllerConfig(port=0, metrics_port=0)) as controller:
                asking = [asyncio.create_task(ask(controller.metrics_port)) for _ in range(17)]
                [refused], others = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                over.set()
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
                return refused.result()

    return asyncio.run(main())


#: One more than each bound of the page, by its name: returns the message.
ONE_MORE: dict[str, Callable[[Place], str]] = {
    "message": lambda place: place.call(INFER, bytes(4 * MIB + 1)),
    "fields of a message": lambda place: place.call(INFER, b"\x78\x00" * 8193),
    "raw tensors of a request": lambda place: place.infer(raw_input_contents=[bytes(20)] * 1025),
    "bytes besides raw tensors": lambda place: place.infer(id="x" * MIB),
    "inputs of a request": lambda place: place.infer(
        inputs=[pb.ModelInferRequest.InferInputTensor()] * 1025
    ),
    "requested outputs": lambda place: place.infer(
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor()] * 1025
    ),
    "classes of an output, in all rows": many_classes,
    "rows of a request": lambda place: place.infer(
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1000, 3])]
    ),
    "request id": lambda place: place.infer(id=LONG),
    "requested model name": lambda place: place.infer(model_name=LONG),
    "requested model version": lambda place: place.infer(model_version=LONG),
    "context": lambda place: place.control(
        "ListApplications", control.ListApplicationsRequest(context=LONG)
    ),
    "tenant": lambda place: place.infer(parameters=parameter("tenant", LONG)),
    "time for a decision": lambda place: place.infer(
        parameters=parameter("slo_ms", "60000") | parameter("decide_within_ms", "60000")
    ),
    "SLO": lambda place: place.infer(parameters=parameter("slo_ms", "86400001")),
    "weight of a request": lambda place: place.infer(parameters=parameter("weight", "1000.1")),
    "work ahead of a request": lambda place: place.infer(
        parameters=parameter("slo_ms", "60000") | parameter("work_ahead_ms", "60000")
    ),
    "headers of a call": headers_of_a_call,
    "open requests": open_requests,
    "requests that wait for a busy event loop": waiting_requests,
    "bytes of open requests": open_bytes,
    "connections": connections,
    "memory, large requests": lambda _: memory(85),
    "memory, all requests": lambda _: memory(95),
    "regions of shared memory": many_regions,
    "regions of one tenant": many_regions_of_a_tenant,
    "bytes of one tenant's regions": large_regions_of_a_tenant,
    "name of a region": long_region,
    "bytes of all regions": large_regions,
    "a tenant's rate": quota(Quota(rate_rps=1, burst=1)),
    "a tenant's open requests": quota(Quota(open_requests=1)),
    "a tenant's open bytes": quota(Quota(open_bytes=199)),
    "a tenant's largest SLO": quota(Quota(slo_ns_max=NS_PER_S - 1)),
    "a tenant's smallest SLO": quota(Quota(slo_ns_min=NS_PER_S + 1)),
    "a tenant's largest weight of a request": lambda place: place.infer(
        parameters=parameter("weight", "1.5")
    ),
    "body of an inference": lambda place: place.rest(INFER_PATH, bytes(4 * MIB + 1)),
    "body of a load": lambda place: place.rest("/v2/repository/models/m/load", bytes(4 * MIB + 1)),
    "body of feedback": lambda place: place.rest("/v2/feedback", bytes(MIB + 1)),
    "body of anything else": lambda place: place.rest(
        "/v2/repository/index", bytes((128 << 10) + 1)
    ),
    "JSON of a request": lambda _: refusal(
        lambda: asyncio.run(
            read_request(
                bytes(4 * MIB + 1), None, model="m", version="", pause=lambda: asyncio.sleep(0)
            )
        )
    ),
    "elements of an answer in JSON": large_answer,
    "nested lists": lambda place: place.rest_tensor("[" * 33 + "1" + "]" * 33),
    "parameters": lambda place: place.rest(
        INFER_PATH,
        json.dumps({"inputs": [], "parameters": dict.fromkeys(map(str, range(1025)), 1)}),
    ),
    "bytes of parameters": lambda place: place.rest(
        INFER_PATH, json.dumps({"inputs": [], "parameters": {"a": "x" * MIB}})
    ),
    "SLO in a header": lambda place: place.rest(
        INFER_PATH, '{"inputs": []}', **{"x-clockwright-slo-ms": "86400000.1"}
    ),
    "headers of a request": lambda place: place.rest(INFER_PATH, "", x="x" * (16 << 10)),
    "connections of REST": connections_of_rest,
    "message of an operator": lambda place: place.control(
        "RemoveModel", control.RemoveModelRequest(model_id="x" * MIB)
    ),
    "items of feedback": lambda place: place.control(
        "Feedback", control.FeedbackRequest(items=[control.FeedbackItem(query_id="q")] * 10_001)
    ),
    "query id": lambda place: place.control(
        "Feedback", control.FeedbackRequest(items=[control.FeedbackItem(query_id=LONG)])
    ),
    "models": many_models,
    "models that are being added": many_being_added,
    "name of a model": lambda place: place.upload("1/model.onnx", name="x" * 129),
    "files of an upload": lambda place: place.upload(*(f"1/{number}" for number in range(4097))),
    "path of a file": lambda place: place.upload("x" * 4097),
    "name of a file": lambda place: place.upload("x" * 256),
    "nested folders": lambda place: place.upload("a/" * 32 + "b"),
    "uploads on disk": uploads_on_disk,
    "config.toml": lambda place: place.config("#" * (64 * 1024 + 1)),
    "config.pbtxt": lambda place: place.config("#" * (64 * 1024 + 1), name="config.pbtxt"),
    "labels of an output": lambda place: place.config("labels = { y = 'y' }", y="a\n" * (1 << 20)),
    "configuration in a load": load_with_much,
    "most rows of a model": lambda place: place.config("max_rows = 16385"),
    "copies in an upload": lambda place: place.upload(
        "config.toml", "1/model.onnx", content=b"copies = 1001"
    ),
    "copies": lambda place: place.config("copies = 100001"),
    "versions of a model": lambda place: place.config("[versions]\nserve = { latest = 33 }"),
    "aliases of a model": lambda place: place.config(
        "[aliases]\n" + "".join(f"a{number} = 1\n" for number in range(65))
    ),
    "levels of priority": lambda place: place.config("[priority]\nlevels = 101\ndefault = 1"),
    "stages of a pipeline": lambda place: place.config("[[pipeline.stages]]\n" * 33),
    "sequences of a model": lambda place: place.config("[sequence]\nmax = 1000001"),
    "answers of a request": lambda place: place.config("[stream]\nmax_steps = 1000001"),
    "tokens of a prompt": lambda place: place.config(
        '[stream.generate]\ntokens = "t"\nlogits = "l"\nmax_prompt = 65537'
    ),
    "batch size": lambda place: place.config("batch_sizes = [1, 1025]"),
    "SLO of a model": lambda place: place.config("slo_ms = 86400001"),
    "applications": many_applications,
    "models of an application": lambda place: place.application(models=["right"] * 65),
    "name of an application": lambda place: place.application(name=LONG),
    "SLO of an application": lambda place: place.application(slo_ns=86_400_001 * NS_PER_MS),
    "options of a policy": lambda place: place.application(options_json=" " * (64 * 1024 + 1)),
    "tenants with a quota": many_quotas,
    "name of a tenant with a quota": lambda place: place.control(
        "SetQuota", control.SetQuotaRequest(tenant=LONG)
    ),
    "request for metrics": request_for_metrics,
    "viewers of the dashboard": viewers_of_the_dashboard,
    "waiting requests of the dashboard": looks_at_the_dashboard,
    "weight of a tenant": lambda place: place.control(
        "SetQuota", control.SetQuotaRequest(tenant="t", quota=control.Quota(weight=101))
    ),
    "workers": many_workers(1024, alike=True),
    "kinds of workers, since the start": many_workers(64, alike=False),
    "name of a worker": registration(worker_id="x" * 129),
    "text of a registration": registration(device="x" * 201),
    "memory of a worker": registration(num_pages=1 << 20, page_bytes=(1 << 30) + 1),
    "registration of a worker": registration_of_a_worker,
    "header of a frame": long_frame,
    "fronts": many_fronts,
    "tenant by a front": tenant_by_a_front,
}


def rows() -> dict[str, str]:
    """Message over each bound, by its name, as the page has it."""
    found: dict[str, str] = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if len(cells) == 4 and cells[0] != "input" and set(cells[0]) != {"-"}:
            assert cells[0] not in found, f"{cells[0]} twice"
            found[cells[0]] = cells[3]
    return found


def test_every_row_of_the_page_is_tried_and_nothing_else() -> None:
    assert ONE_MORE.keys() == rows().keys()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEndInThread]:
    with serving_in_thread(tmp_path_factory.mktemp("models"), rest=True) as server:
        yield server


@pytest.mark.parametrize("what", ONE_MORE)
def test_one_more_than_a_bound_is_refused_with_the_words_of_the_page(
    server: FrontEndInThread, tmp_path: Path, what: str
) -> None:
    found = ONE_MORE[what](Place(server, tmp_path))
    expected = rows()[what].strip("`")
    assert re.search(".*".join(map(re.escape, expected.split("…"))), found), found


@pytest.mark.parametrize("text", ["slo_ms = " + "[" * 20_000, "copies = " + "9" * 5000])
def test_a_config_that_its_reader_gives_up_is_a_fault_of_the_model(
    server: FrontEndInThread, tmp_path: Path, text: str
) -> None:
    assert Place(server, tmp_path).config(text).startswith("config.toml: ")
