"""Requests with several answers: step after step behind the port, and over gRPC and REST, here and in a front apart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import threading
import tomllib
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from clockwright import AsyncClient, BadRequestError, Client, RefusedError, UnknownModelError
from clockwright.client.client import InferResult
from clockwright.errors import ModelError, Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId, RequestId
from clockwright.wire.bulk import Buffer
from clockwright.wire.tensors import TensorSpec
from controller.core import Scheduler as CoreScheduler
from controller.core import SchedulerConfig
from controller.core.quotas import Quota
from controller.front.remote.front_link import FrontLinks
from controller.models.catalogue import Catalogue
from controller.models.entry import Entry
from controller.models.stepped import StatePair, first_state
from controller.models.streamed import StreamSettings, find_stream, read_stream
from controller.port import Answered, Ask, Failed, Refused, Sink, Streaming, Told
from controller.runtime import Runtime
from controller.stages.sequences.beats import StreamBeat, longest_gap_ns
from controller.stages.sequences.driven import DrivenStage
from controller.stages.sequences.stage import SequenceStage
from controller.telemetry.tables import Telemetry
from experiments.bench.step_stories import StoryModels
from experiments.bench.story_devices import RuntimeStage, StoryFleet
from experiments.bench.story_loop import StoryLoop
from tests.kit import scripted_worker
from tests.kit.front_end import FrontEnd, FrontEndInThread, serving_in_thread
from tests.kit.scripted_worker import Script

COUNT = """
state = { past = "present" }
[stream]
final = "done"
max_steps = 50
max_open = 3
"""


def _count(inputs: Sequence[Buffer]) -> list[Buffer]:
    """Counts from 0 to a limit, and says which request it is for; the state is the next number."""
    whose, limit = struct.unpack("<2q", inputs[0])
    (at,) = struct.unpack("<q", inputs[1])
    return [struct.pack("<2q", whose, at), struct.pack("<q", at + 1), bytes([at + 1 >= limit])]


COUNTING = Script(
    (TensorSpec("x", "INT64", (2,)), TensorSpec("past", "INT64", (1,))),
    (
        TensorSpec("y", "INT64", (2,)),
        TensorSpec("present", "INT64", (1,)),
        TensorSpec("done", "BOOL", (1,)),
    ),
    _count,
)


def models(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(scripted_worker._EVERY, "count", COUNTING)
    (directory / "count" / "1").mkdir(parents=True)
    (directory / "count" / "1" / "model.onnx").write_bytes(b"scripted")
    (directory / "count" / "config.toml").write_text(COUNT)
    return directory


@pytest.fixture(params=["here", "apart"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FrontEndInThread]:
    directory = models(tmp_path / "models", monkeypatch)
    with serving_in_thread(directory, front=request.param, rest=True) as running:
        running.until(lambda front: front.catalogue.ready)
        yield running


def x(whose: int, limit: int) -> np.ndarray[Any, Any]:
    return np.array([[whose, limit]])


def test_each_answer_comes_as_it_is_there_and_the_last_ends_them(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        answers = list(client.stream("count", {"x": x(7, 4)}, slo_ms=600_000))
    assert [each.outputs["y"].tolist() for each in answers] == [[[7, n]] for n in range(4)]
    assert [each.outputs["done"].item() for each in answers] == [False] * 3 + [True]
    assert list(answers[0].outputs) == ["y", "done"], "the state stays with the server"


@pytest.mark.parametrize("wants_empty", [False, True])
def test_triton_gets_one_final_mark(server: FrontEndInThread, wants_empty: bool) -> None:
    told: list[Any] = []
    over = threading.Event()

    def take(result: Any, error: Any) -> None:  # noqa: ANN401
        told.append(error or result.get_response())
        if error or told[-1].parameters["triton_final_response"].bool_param:
            over.set()

    with InferenceServerClient(server.address) as client:
        client.start_stream(take)
        wanted = InferInput("x", [1, 2], "INT64")
        wanted.set_data_from_numpy(x(3, 3))
        client.async_stream_infer(
            "count",
            [wanted],
            request_id="mine",
            enable_empty_final_response=wants_empty,
            parameters={"slo_ms": 600_000},
        )
        assert over.wait(60)
        client.stop_stream()
    finals = [each.parameters["triton_final_response"].bool_param for each in told]
    assert finals == [False] * (len(told) - 1) + [True]
    assert [len(each.outputs) for each in told] == [2] * 3 + [0] * wants_empty
    assert {each.id for each in told} == {"mine"}


def post(server: FrontEndInThread, path: str, told: object) -> Any:  # noqa: ANN401
    request = urllib.request.Request(f"http://{server.rest}/{path}", json.dumps(told).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers["content-type"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read().decode()


def test_rest_gets_events_or_all_at_once(server: FrontEndInThread) -> None:
    asked = {"x": [5, 3], "slo_ms": 600_000, "id": "me"}
    status, kind, text = post(server, "v2/models/count/generate_stream", asked)
    assert (status, kind) == (200, "text/event-stream")
    head = {"id": "me", "model_name": "count", "model_version": "1"}
    events = [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n")[:-1]]
    assert events == [{**head, "y": [5, n], "done": n == 2} for n in range(3)]
    status, kind, text = post(server, "v2/models/count/versions/1/generate", asked)
    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == {**head, "y": [5, 0, 5, 1, 5, 2], "done": [False, False, True]}
    plain = {"x": [1, 2, 3], "parameters": {"slo_ms": 600_000, "explain": True}}
    status, _, text = post(server, "v2/models/double/generate", plain)
    assert json.loads(text)["y"] == [2, 4, 6]
    # What an answer says besides: an application's query_id, for feedback, is there too.
    assert json.loads(text)["parameters"]["batch_size"] == 1


def test_what_answers_several_times_gets_no_shadow(server: FrontEndInThread) -> None:
    catalogue = server.do(lambda front_end: front_end.catalogue)
    with pytest.raises(ModelError, match="model count answers several times, expected a model"):
        server.run(catalogue.route("count", aliases={}, traffic={}, shadow={"1": 0.5}))


def test_what_is_asked_wrongly_is_told_in_words(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        with pytest.raises(
            BadRequestError, match="doesn't support models with decoupled transaction policy"
        ):
            client.infer("count", {"x": x(1, 2)}, slo_ms=600_000)
        with pytest.raises(BadRequestError, match="max_steps: found 51, expected a whole number"):
            list(client.stream("count", {"x": x(1, 2)}, slo_ms=600_000, max_steps=51))
        with pytest.raises(BadRequestError, match="max_steps: found in a request to 'double'"):
            list(
                client.stream(
                    "double", {"x": np.zeros((1, 3), np.float32)}, slo_ms=600_000, max_steps=2
                )
            )
        with pytest.raises(UnknownModelError):
            list(client.stream("nobody", {"x": x(1, 2)}, slo_ms=600_000))
        assert len(list(client.stream("count", {"x": x(1, 9)}, slo_ms=600_000, max_steps=2))) == 2
        plain = client.stream("double", {"x": np.ones((1, 3), np.float32)}, slo_ms=600_000)
        assert [each.outputs["y"].tolist() for each in plain] == [[[2, 2, 2]]]
        unnamed = client.stream("double", np.ones((1, 3), np.float32), slo_ms=600_000)
        assert [each.outputs["y"].tolist() for each in unnamed] == [[[2, 2, 2]]]
    body = {
        "inputs": [{"name": "x", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}],
        "parameters": {"slo_ms": 600_000},
    }
    status, _, text = post(server, "v2/models/count/infer", body)
    assert status == 400
    assert "decoupled" in text
    status, _, text = post(
        server, "v2/models/count/generate_stream", {"x": [1.5, 2], "slo_ms": 600_000}
    )
    assert (status, json.loads(text)) == (
        400,
        {"error": "input 'x': found a value that is none of INT64"},
    )
    assert post(server, "v2/models/nobody/generate_stream", {"x": [1, 2]})[0] == 404


def test_metadata_has_no_state_and_the_configuration_says_decoupled(
    server: FrontEndInThread,
) -> None:
    with InferenceServerClient(server.address) as client:
        config = client.get_model_config("count", as_json=True)["config"]
        assert config["model_transaction_policy"] == {"decoupled": True}
        metadata = client.get_model_metadata("count")
    assert [each.name for each in metadata.inputs] == ["x"]
    assert [each.name for each in metadata.outputs] == ["y", "done"]


def stage_of(front: FrontEnd) -> DrivenStage[Any]:
    assert front.backend is not None
    return front.backend.streams


def ask_by_rest(server: FrontEndInThread, asked: object, name: str) -> socket.socket:
    host, _, port = server.rest.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    body = json.dumps(asked).encode()
    head = (
        f"POST /v2/models/{name}/generate_stream HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}"
    )
    sock.sendall(head.encode() + b"\r\n\r\n" + body)
    return sock


def links_of(front: FrontEnd) -> FrontLinks:
    assert front.fronts is not None
    return front.fronts


def hold_after_first(
    server: FrontEndInThread, client: Client, name: str = "count"
) -> Generator[InferResult, None, None]:
    """A stream that has given its first answer; the worker keeps the second step."""
    answers = client.stream(name, {"x": x(1, 1000)}, slo_ms=600_000)
    server.do(lambda front: front.worker.slow.add(name))
    server.until(lambda front: not stage_of(front)._streams)
    released = threading.Thread(target=lambda: release_once(server))
    released.start()
    next(answers)
    released.join()
    server.until(lambda front: len(front.worker.held) == 1)
    return answers


def release_once(server: FrontEndInThread) -> None:
    """Have the worker answer what it keeps, and keep the next."""
    server.until(lambda front: bool(front.worker.held))

    def release(front: FrontEnd) -> None:
        held = [*front.worker.held]
        front.worker.held.clear()
        for action, payload in held:
            front.worker._finish(action, payload)

    server.do(release)


def test_a_client_that_leaves_stops_the_asking(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        answers = hold_after_first(server, client)
        answers.close()
        server.until(lambda front: not stage_of(front)._streams)
        asked = server.do(lambda front: len(front.worker.infers))
        server.do(lambda front: front.worker.release())
        client.infer("double", {"x": np.ones((1, 3), np.float32)}, slo_ms=600_000)
    assert server.do(lambda front: len(front.worker.infers)) == asked + 1
    assert server.do(lambda front: (stage_of(front)._num_bytes, len(stage_of(front)._steps))) == (
        0,
        0,
    )


def test_a_client_of_rest_that_hangs_up_stops_the_asking(server: FrontEndInThread) -> None:
    server.do(lambda front: front.worker.slow.add("count"))
    with ask_by_rest(server, {"x": [1, 1000], "slo_ms": 600_000}, "count") as sock:
        release_once(server)
        heard = b""
        while b"data: " not in heard:
            heard += sock.recv(1 << 16)
    server.until(lambda front: not stage_of(front)._streams)


def test_each_answer_takes_a_token_of_the_tenants_rate(server: FrontEndInThread) -> None:
    quota = Quota(rate_rps=0.001, burst=3)
    server.run(server.front_end.quotas.set("acme", quota))
    with Client(server.address) as client:
        stream = client.stream("count", {"x": x(1, 5)}, slo_ms=600_000, tenant="acme")
        assert len(list(stream)) == 5
        with pytest.raises(RefusedError) as caught:
            client.infer("double", {"x": np.ones((1, 3), np.float32)}, tenant="acme")
    assert caught.value.refusal is Refusal.QUOTA


def test_a_worker_that_is_lost_ends_the_stream_with_a_reason(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        answers = hold_after_first(server, client)
        server.do(lambda front: front.worker.leave())
        with pytest.raises(RefusedError, match="after 1 answer of its stream") as caught:
            next(answers)
    assert caught.value.refusal in (Refusal.WORKER_LOST, Refusal.NO_WORKER)


def test_a_server_that_shuts_down_ends_the_stream_with_that(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        answers = hold_after_first(server, client)
        server.do(lambda front: front.runtime.close_admission())
        server.do(lambda front: front.worker.release())
        with pytest.raises(RefusedError, match=r"shutting down .*after 2 answers") as caught:
            list(answers)
    assert caught.value.refusal is Refusal.DRAINING


def test_a_refusal_comes_behind_the_answers_that_were_given(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        # No step takes so little time: the second is refused in the turn in which the first answer is written.
        answers = client.stream("count", {"x": x(1, 9)}, slo_ms=600_000, tpot_ms=0.01)
        assert next(answers).outputs["y"].tolist() == [[1, 0]]
        with pytest.raises(RefusedError, match="after 1 answer of its stream"):
            next(answers)
    server.until(lambda front: not stage_of(front)._streams)


def test_a_model_that_is_replaced_serves_the_streams_that_it_has(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        answers = hold_after_first(server, client)
        old = server.do(lambda front: front.catalogue.find("count"))
        server.run(server.front_end.catalogue.reload("count"))
        assert server.do(lambda front: front.catalogue.find("count")) is not old
        server.do(lambda front: front.worker.release())
        told = [each.outputs["y"].tolist() for each in answers]
    assert told == [[[1, at]] for at in range(1, 50)]


def test_streams_of_one_call_keep_apart_and_in_order(server: FrontEndInThread) -> None:
    told: dict[str, list[Any]] = {}
    over = threading.Semaphore(0)

    def take(result: Any, error: Any) -> None:  # noqa: ANN401
        response = result.get_response()
        told.setdefault(response.id, []).append(result.as_numpy("y").tolist())
        if response.parameters["triton_final_response"].bool_param:
            over.release()

    with InferenceServerClient(server.address) as client:
        client.start_stream(take)
        for whose in range(3):
            wanted = InferInput("x", [1, 2], "INT64")
            wanted.set_data_from_numpy(x(whose, 10 + whose))
            parameters = {"slo_ms": 600_000}
            client.async_stream_infer(
                "count", [wanted], request_id=f"r{whose}", parameters=parameters
            )
        for _ in range(3):
            assert over.acquire(timeout=60)
        client.stop_stream()
    assert told == {f"r{who}": [[[who, at]] for at in range(10 + who)] for who in range(3)}


def test_a_controller_that_is_lost_ends_the_stream_and_asks_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = models(tmp_path / "models", monkeypatch)
    with serving_in_thread(directory, front="apart") as server, Client(server.address) as client:
        server.until(lambda front: front.catalogue.ready)
        answers = hold_after_first(server, client)
        server.do(lambda front: links_of(front).close())
        server.until(lambda front: not stage_of(front)._streams)
        with pytest.raises(
            RefusedError, match="after 1 answers of 'count' the controller was lost"
        ):
            next(answers)


def test_streams_of_a_model_are_bounded(server: FrontEndInThread) -> None:
    with Client(server.address) as client:
        server.do(lambda front: front.worker.slow.add("count"))
        threads = [
            threading.Thread(
                target=lambda: list(client.stream("count", {"x": x(1, 1)}, slo_ms=600_000))
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        server.until(lambda front: len(stage_of(front)._streams) == 3)
        with pytest.raises(
            RefusedError, match="found 4 streams of model count, expected 3 at most"
        ):
            next(client.stream("count", {"x": x(1, 1)}, slo_ms=600_000))
        server.do(lambda front: front.worker.release())
        for thread in threads:
            thread.join()
        assert len(list(client.stream("count", {"x": x(1, 1)}, slo_ms=600_000))) == 1


def bulk(inputs: Sequence[Buffer]) -> list[Buffer]:
    (at,) = struct.unpack("<q", inputs[1])
    return [bytes(1 << 20), struct.pack("<q", at + 1)]


BULK = Script(
    (TensorSpec("x", "INT64", (2,)), TensorSpec("past", "INT64", (1,))),
    (TensorSpec("y", "UINT8", (1 << 20,)), TensorSpec("present", "INT64", (1,))),
    bulk,
)


@pytest.mark.parametrize("by", ["grpc", "rest"])
def test_a_client_that_does_not_read_is_ended_in_bounded_memory(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scripted_worker._EVERY, "bulk", BULK)
    (tmp_path / "models" / "bulk" / "1").mkdir(parents=True)
    (tmp_path / "models" / "bulk" / "1" / "model.onnx").write_bytes(b"scripted")
    text = 'state = { past = "present" }\n[stream]\nmax_steps = 100_000\n'
    (tmp_path / "models" / "bulk" / "config.toml").write_text(text)
    with (
        serving_in_thread(tmp_path / "models", rest=True) as server,
        Client(server.address) as client,
    ):
        server.until(lambda front: front.catalogue.ready)
        asked = server.do(lambda front: len(front.worker.infers))
        if by == "grpc":
            answers = client.stream("bulk", {"x": x(1, 1)}, slo_ms=600_000)
            next(answers)
            server.until(lambda front: not stage_of(front)._streams)
            with pytest.raises(RefusedError, match="that this client does not read"):
                list(answers)
        else:
            with ask_by_rest(server, {"x": [1, 1], "slo_ms": 600_000}, "bulk") as sock:
                server.until(lambda front: bool(stage_of(front)._streams))
                server.until(lambda front: not stage_of(front)._streams)
                end = b""
                while b"0\r\n\r\n" not in end[-8:] and (data := sock.recv(1 << 20)):
                    end = (end + data)[-1000:]
                assert b"that this client does not read" in end
        # What the two kernels take, and the bound.
        assert server.do(lambda front: len(front.worker.infers)) - asked < 60


# --- the stage alone ------------------------------------------------------------------------------


class Scheduler:
    """The next stage: keeps what it is asked, and answers when the test says so; and the sink of clients."""

    def __init__(self) -> None:
        self.open: dict[RequestId, tuple[Ask, Sequence[Buffer], Sink]] = {}
        self.heard: dict[RequestId, list[Told | tuple[int, int]]] = {}
        self.last_id = 0
        self.withdrawn: list[RequestId] = []

    def ask(self, subject: Entry, ask: Ask, inputs: Sequence[Buffer], sink: Sink) -> RequestId:
        self.last_id += 1
        self.open[RequestId(self.last_id)] = ask, inputs, sink
        return RequestId(self.last_id)

    def withdraw(self, request_id: RequestId) -> None:
        self.withdrawn.append(request_id)
        self.open.pop(request_id, None)

    def answer(self, request_id: RequestId) -> None:
        _, inputs, sink = self.open.pop(request_id)
        sink.told(request_id, Answered(0), _count(inputs))

    def told(self, request_id: RequestId, told: Told, outputs: Sequence[Buffer]) -> None:
        heard = self.heard.setdefault(request_id, [])
        if outputs:
            whose, at = struct.unpack("<2q", outputs[0])
            heard.append((whose, at))
        if not (isinstance(told, Answered) and told.more):
            heard.append(told)


def counting_model(max_open: int | None = None) -> Entry:
    entry = Entry(ModelId("count"), "count", None, inputs=COUNTING.inputs, outputs=COUNTING.outputs)
    entry.state = (StatePair("past", "present", 1, 1),)
    settings = StreamSettings(final="done", max_open=max_open)
    entry.stream = find_stream(settings, entry.state, entry.inputs, entry.outputs)
    return entry


def a_stage(scheduler: Scheduler, clock: Callable[[], int] = lambda: 0) -> DrivenStage[Entry]:
    runtime = Runtime(CoreScheduler(), Telemetry(), clock=clock)
    sequences = SequenceStage[Entry](scheduler, runtime, Catalogue(runtime))
    return DrivenStage(scheduler, runtime, sequences, streams_max=100, input_bytes_max=10_000)


def asked(*, steps: int = 50, next_ns: int = 7) -> Ask:
    return Ask(
        0, 1, 1000, 30, "tenant", "name", decide_within_ns=5, streaming=Streaming(next_ns, steps)
    )


def test_each_step_is_due_in_time_after_the_answer_before() -> None:
    scheduler, now = Scheduler(), [1010]
    stage = a_stage(scheduler, lambda: now[0])
    number = stage.ask(counting_model(), asked(steps=3), [x(4, 9).tobytes()], scheduler)
    due = []
    for request_id, now[0] in ((1, 1020), (2, 1025), (3, 1040)):
        ask, inputs, _ = scheduler.open[RequestId(request_id)]
        due.append((ask.arrival_ns, ask.slo_ns, ask.decide_within_ns, ask.tenant, ask.name))
        assert bytes(inputs[1]) == struct.pack("<q", request_id - 1)
        scheduler.answer(RequestId(request_id))
    assert due == [
        (1000, 30, 5, "tenant", "name"),
        (1020, 7, 0, "tenant", "name"),
        (1025, 7, 0, "tenant", "name"),
    ]
    assert scheduler.heard[number][:-1] == [(4, 0), (4, 1), (4, 2)]
    assert not scheduler.open, "as many steps as the request allows"


def test_a_step_that_is_late_ends_its_stream_behind_the_answers_given() -> None:
    scheduler = Scheduler()
    stage = a_stage(scheduler)
    number = stage.ask(counting_model(), asked(), [x(4, 9).tobytes()], scheduler)
    scheduler.answer(RequestId(1))
    _, _, sink = scheduler.open.pop(RequestId(2))
    sink.told(RequestId(2), Refused(Refusal.LATE, {"slo_ns": 7}), ())
    *given, last = scheduler.heard[number]
    assert given == [(4, 0)]
    assert last == Refused(
        Refusal.LATE, {"slo_ns": 7, "answers": 1}, "after 1 answer of its stream"
    )
    assert not scheduler.open
    stage.withdraw(number)
    assert not scheduler.withdrawn


def told_to(scheduler: Scheduler, number: int, *outputs: bytes) -> None:
    _, _, sink = scheduler.open.pop(RequestId(number))
    sink.told(RequestId(number), Answered(0), outputs)


def test_a_state_that_grows_beyond_the_bound_ends_its_stream() -> None:
    scheduler, model = Scheduler(), counting_model()
    model.inputs = (model.inputs[0], TensorSpec("past", "BYTES", (1,)))
    model.outputs = (model.outputs[0], TensorSpec("present", "BYTES", (1,)), model.outputs[2])
    model.stream = find_stream(
        StreamSettings(final="done"), model.state, model.inputs, model.outputs
    )
    stage = a_stage(scheduler)
    number = stage.ask(model, asked(), [x(4, 9).tobytes()], scheduler)
    y = struct.pack("<2q", 4, 0)
    told_to(scheduler, 1, y, bytes(9000), b"\0")
    told_to(scheduler, 2, y, bytes(11_000), b"\0")
    *given, last = scheduler.heard[number]
    assert given == [(4, 0)]
    assert isinstance(last, Refused)
    assert last.refusal is Refusal.OVERLOADED
    assert "found 11016 bytes of streams' inputs, expected 10000 at most" in last.message
    assert not scheduler.open
    assert not stage.holds(number)
    assert stage._num_bytes == 0


def test_a_final_output_of_another_size_ends_its_stream() -> None:
    scheduler = Scheduler()
    stage = a_stage(scheduler)
    number = stage.ask(counting_model(), asked(), [x(4, 9).tobytes()], scheduler)
    y = struct.pack("<2q", 4, 0)
    told_to(scheduler, 1, y, bytes(8), b"\0\0\0")
    told_to(scheduler, 2, y, bytes(8), b"\0\0")
    *given, last = scheduler.heard[number]
    assert given == [(4, 0)]
    assert isinstance(last, Failed)
    assert "found 2 values of stream.final, expected 3" in last.text
    assert not stage.holds(number)


@pytest.mark.parametrize("seed", range(20))
def test_streams_never_cross_whatever_ends_them(seed: int) -> None:
    rng = Random(seed)
    scheduler, model = Scheduler(), counting_model()
    stage = a_stage(scheduler)
    limits: dict[RequestId, tuple[int, int]] = {}
    cancelled: dict[RequestId, int] = {}
    for turn in range(2000):
        choice = rng.random()
        if choice < 0.1 and len(stage._streams) < 60:
            whose, limit = turn, rng.randrange(1, 30)
            number = stage.ask(model, asked(), [x(whose, limit).tobytes()], scheduler)
            limits[number] = whose, limit
        elif choice < 0.13 and stage._streams:
            number = rng.choice([*stage._streams])
            stage.withdraw(number)
            cancelled[number] = len(scheduler.heard.get(number, []))
        elif scheduler.open:
            step = rng.choice([*scheduler.open])
            if choice < 0.16:
                _, _, sink = scheduler.open.pop(step)
                sink.told(step, Refused(Refusal.WORKER_LOST, {}), ())
            else:
                scheduler.answer(step)
    for number in [*stage._streams]:
        stage.withdraw(number)
        cancelled[number] = len(scheduler.heard.get(number, []))
    assert len(limits) > 100
    assert not crossings(scheduler, limits, cancelled)
    assert (stage._num_bytes, stage._steps, model.num_streams) == (0, {}, 0)


@pytest.mark.parametrize("seed", range(10))
def test_streams_never_cross_on_devices_that_fail_and_vanish(seed: int) -> None:
    rng, loop, heard = Random(seed), StoryLoop(), Scheduler()
    runtime = Runtime(
        CoreScheduler(SchedulerConfig()), Telemetry(capacity=16), clock=lambda: loop.now_ns
    )
    last, model = RuntimeStage(runtime), counting_model()
    stage: DrivenStage[Entry] = DrivenStage(
        last, runtime, SequenceStage(last, runtime, StoryModels())
    )
    exec_ns = {1: 2 * NS_PER_MS, 2: 2 * NS_PER_MS, 4: 3 * NS_PER_MS}
    fleet = StoryFleet(loop, runtime, exec_ns, _count)
    limits: dict[RequestId, tuple[int, int]] = {}
    cancelled: dict[RequestId, int] = {}

    def happen() -> None:
        draw = rng.random()
        if draw < 0.6:
            whose, limit = len(limits), rng.randrange(1, 30)
            ask = Ask(0, 1, loop.now_ns, 50 * NS_PER_MS, streaming=Streaming(40 * NS_PER_MS, 50))
            limits[stage.ask(model, ask, [x(whose, limit).tobytes()], heard)] = whose, limit
        elif draw < 0.75 and stage._streams:
            number = rng.choice([*stage._streams])
            stage.withdraw(number)
            cancelled[number] = len(heard.heard.get(number, []))
        elif draw < 0.85:
            fleet.join()
        elif fleet.devices:
            device = rng.choice(fleet.devices)
            if draw < 0.92:
                fleet.lose(device)
            elif draw < 0.96:
                device.fails = True
            else:
                device.slowness = rng.choice((1, 30))

    def begin() -> None:
        fleet.join()
        fleet.add_model(model.model_id)

    loop.at(loop.now_ns, begin)
    for turn in range(300):
        loop.at(loop.now_ns + NS_PER_S + turn * 7 * NS_PER_MS, happen)
    loop.play(until_ns=loop.now_ns + 60 * NS_PER_S)
    assert len(limits) > 100
    assert not crossings(heard, limits, cancelled)
    ends = Counter(type(told[-1]).__name__ for told in heard.heard.values())
    assert min(ends["Answered"], ends["Refused"]) > 0
    assert (stage._num_bytes, stage._steps, model.num_streams) == (0, {}, 0)


def crossings(
    heard: Scheduler,
    limits: Mapping[RequestId, tuple[int, int]],
    cancelled: Mapping[RequestId, int],
) -> list[RequestId]:
    """Streams that heard anything but their own answers in order, and then one end."""
    found = []
    for number, (whose, limit) in limits.items():
        told = heard.heard.get(number, [])
        answers = [each for each in told if isinstance(each, tuple)]
        ends = [each for each in told if not isinstance(each, tuple)]
        if number in cancelled:
            is_right = len(told) == cancelled[number] and not ends
        else:
            # A last answer is heard as two: what it says, and that it is the last.
            is_right = ends == told[-1:] and len(ends) == 1
            is_right &= not isinstance(ends[0], Answered) or len(answers) == limit
        if not is_right or answers != [(whose, at) for at in range(len(answers))]:
            found.append(number)
    return found


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("stream = 3", "stream is 3, expected a table with some of final, feed"),
        ("stream.max_steps = 0", "stream.max_steps is 0, expected a whole number from 1"),
        ("stream.final = 1", "stream.final is 1, expected the name of an output"),
        ("stream.feed = 1", "stream.feed is 1, expected a table"),
        ("stream.generate.tokens = 'x'", "expected a table with tokens = INPUT, logits = OUTPUT"),
        ("stream.final = 'present'", "found no state and no feed"),
        ("stream.final = 'y2'", "stream.final: found 'y2', expected an output of BOOL"),
        ("stream.feed = { x = 'done' }", "found INT64 [-1, 2] as input and BOOL [-1, 1] as output"),
        ("stream.feed = { z = 'y' }", "found z = 'y', expected an input of x, past"),
        (
            "stream.generate = { tokens = 'x', logits = 'y' }",
            "expected an input of INT32 or INT64 that takes one token at a time, and is no state and no feed; stream.generate"
            ".logits: found 'y', expected an output of floats",
        ),
    ],
)
def test_what_cannot_be_streamed_is_said_in_words(toml: str, words: str) -> None:
    def find() -> None:
        settings = read_stream(tomllib.loads(toml)["stream"])
        find_stream(settings, (), COUNTING.inputs, COUNTING.outputs)

    with pytest.raises(ModelError, match=re.escape(words)):
        find()


def test_a_state_of_several_rows_begins_as_that_of_one() -> None:
    row = np.arange(6, dtype=np.int64).reshape(2, 1, 3)
    spec = TensorSpec("h", "INT64", (2, 3), 1)
    assert first_state(spec, row.tobytes(), 3) == row.repeat(3, axis=1).tobytes()
    assert first_state(spec, b"", 3) == bytes(144)
    assert first_state(TensorSpec("at", "INT64", (1,), None), b"", 3) == bytes(8)
    behind_open = TensorSpec("h", "INT64", (-1, 3), 1)
    assert first_state(behind_open, row[:1].tobytes(), 3) == row[:1].tobytes() * 3


# --- models that generate -------------------------------------------------------------------------

VOCABULARY = 7


def next_token(inputs: Sequence[Buffer]) -> list[Buffer]:
    """Prefers the sum of all tokens so far, modulo the vocabulary, by far."""
    (token,) = struct.unpack("<q", inputs[0])
    (total,) = struct.unpack("<q", inputs[1])
    total = (total + token) % VOCABULARY
    logits = np.zeros(VOCABULARY, np.float32)
    logits[total] = 20
    return [logits.tobytes(), struct.pack("<q", total)]


GENERATOR = Script(
    (TensorSpec("ids", "INT64", (1,)), TensorSpec("past", "INT64", (1,))),
    (TensorSpec("logits", "FP32", (VOCABULARY,)), TensorSpec("present", "INT64", (1,))),
    next_token,
)
GENERATE = """
state = { past = "present" }
[stream]
max_steps = 9
[stream.generate]
tokens = "ids"
logits = "logits"
end = 0
max_prompt = 4
"""


def expected(prompt: Sequence[int], steps: int) -> list[int]:
    total, told = sum(prompt) % VOCABULARY, list[int]()
    while len(told) < steps and (not told or told[-1]):
        told.append(total)
        total = 2 * total % VOCABULARY
    return told


@pytest.fixture(params=["here", "apart"])
def generator(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FrontEndInThread]:
    monkeypatch.setitem(scripted_worker._EVERY, "lm", GENERATOR)
    (tmp_path / "models" / "lm" / "1").mkdir(parents=True)
    (tmp_path / "models" / "lm" / "1" / "model.onnx").write_bytes(b"scripted")
    (tmp_path / "models" / "lm" / "config.toml").write_text(GENERATE)
    with serving_in_thread(tmp_path / "models", front=request.param, rest=True) as running:
        running.until(lambda front: front.catalogue.ready)
        yield running


def test_tokens_go_in_and_tokens_come_out(generator: FrontEndInThread) -> None:
    with Client(generator.address) as client:
        for prompt in ([3], [1, 2, 5], [3, 4]):
            answers = client.stream("lm", {"ids": np.array([prompt])}, slo_ms=600_000)
            told = [each.outputs for each in answers]
            assert [list(each) for each in told] == [["token"]] * len(told)
            assert [each["token"].item() for each in told] == expected(prompt, 9)
        few = client.stream("lm", {"ids": np.array([[3]])}, slo_ms=600_000, max_steps=2)
        assert [each.outputs["token"].item() for each in few] == [3, 6]
        with pytest.raises(BadRequestError, match="found prompt 5"):
            list(client.stream("lm", {"ids": np.array([[1, 1, 1, 1, 1]])}, slo_ms=600_000))
    asked = {"ids": [1, 2], "slo_ms": 600_000, "max_steps": 3}
    status, _, text = post(generator, "v2/models/lm/generate", asked)
    assert (status, json.loads(text)["token"]) == (200, expected([1, 2], 3))


def test_a_prompt_without_tokens_is_refused_and_harms_nobody(generator: FrontEndInThread) -> None:
    with Client(generator.address) as client:
        with pytest.raises(BadRequestError, match="ids"):
            list(client.stream("lm", {"ids": np.zeros((1, 0), np.int64)}, slo_ms=600_000))
        others = client.stream("lm", {"ids": np.array([[3]])}, slo_ms=600_000)
        assert [each.outputs["token"].item() for each in others] == expected([3], 9)
    status, _, _ = post(generator, "v2/models/lm/generate", {"ids": [], "slo_ms": 600_000})
    assert status == 400


def test_a_seed_that_is_no_whole_number_is_refused_in_words(generator: FrontEndInThread) -> None:
    for seed in (-1, 1.5, 1e300, "nan", "inf"):
        asked = {"ids": [3], "slo_ms": 600_000, "seed": seed}
        status, _, text = post(generator, "v2/models/lm/generate", asked)
        assert status == 400, seed
        assert "parameter seed: found" in text


def test_a_client_for_asyncio_gets_the_same_and_leaves(generator: FrontEndInThread) -> None:
    async def ask() -> list[int]:
        async with AsyncClient(generator.address) as client:
            told = []
            async with contextlib.aclosing(
                client.stream("lm", {"ids": np.array([[3]])}, slo_ms=600_000, temperature=0, seed=1)
            ) as answers:
                async for each in answers:
                    told.append(each.outputs["token"].item())
                    if len(told) == 2:
                        break
            return told

    assert asyncio.run(ask()) == expected([3], 2)
    generator.until(lambda front: not stage_of(front)._streams)


def test_a_seed_makes_the_same_choice_again(generator: FrontEndInThread) -> None:
    def said(seed: int) -> list[int]:
        asked = {"ids": [3], "slo_ms": 600_000, "temperature": 15.0, "seed": seed}
        _, _, text = post(generator, "v2/models/lm/generate", asked)
        told = json.loads(text)["token"]
        return told if isinstance(told, list) else [told]

    assert said(1) == said(1)
    assert len({tuple(said(seed)) for seed in range(8)}) > 1


def test_a_stream_is_refused_before_its_first_token_if_there_is_no_time_for_its_beat(
    generator: FrontEndInThread,
) -> None:
    with Client(generator.address) as client:

        def ask(tpot_ms: float) -> list[int]:
            answers = client.stream(
                "lm", {"ids": np.array([[3]])}, ttft_ms=600_000, tpot_ms=tpot_ms
            )
            return [each.outputs["token"].item() for each in answers]

        assert ask(600_000) == expected([3], 9)
        # Two runs of a millisecond, one behind the other, do not fit.
        with pytest.raises(RefusedError, match="no batch is fast enough"):
            ask(1.5)

        def fill(front: FrontEnd) -> None:
            (beat,) = [StreamBeat(ModelId("lm"), 10 * NS_PER_MS, 10 * NS_PER_MS)]
            front.sequences.others[beat] = 34

        generator.do(fill)
        with pytest.raises(RefusedError, match="would be busy for") as caught:
            ask(10)
        assert caught.value.refusal is Refusal.OVERLOADED
        generator.do(lambda front: front.sequences.others.clear())
        assert not generator.do(lambda front: stage_of(front)._streams)


@pytest.mark.parametrize(
    ("exec_ms", "streams", "longest_ms"),
    [
        ({1: 6}, 5, 30),
        # Seven run one by one, when one of the eight has ended.
        ({1: 6, 8: 7}, 8, 42),
        # Batches of four, two and one behind each other, and the one that runs when a step is asked.
        ({1: 6, 2: 6, 4: 6, 8: 7}, 8, 18),
        # While one batch of four runs, the others fill the next: a step waits for it, and then runs.
        ({1: 6, 2: 6, 4: 8}, 12, 24),
    ],
)
def test_streams_that_are_asked_at_once_wait_for_each_other(
    exec_ms: dict[int, int], streams: int, longest_ms: int
) -> None:
    assert longest_gap_ns(exec_ms, streams) == longest_ms


def test_a_stream_that_would_have_the_others_wait_too_long_is_refused(
    generator: FrontEndInThread,
) -> None:
    with Client(generator.address) as client:

        def crowd(front: FrontEnd) -> None:
            entry = front.catalogue.find("lm")
            assert entry is not None
            entry.num_streams = 50

        generator.do(crowd)
        asked = client.stream("lm", {"ids": np.array([[3]])}, ttft_ms=600_000, tpot_ms=10)
        with pytest.raises(RefusedError, match=r"51 streams wait .* for each other, expected 10"):
            list(asked)


def test_the_steps_of_a_prompt_share_the_time_of_the_first_answer() -> None:
    entry = Entry(ModelId("lm"), "lm", None, inputs=GENERATOR.inputs, outputs=GENERATOR.outputs)
    entry.state = (StatePair("past", "present", 1, 1),)
    settings = read_stream(tomllib.loads(GENERATE)["stream"])
    plan = entry.stream = find_stream(settings, entry.state, entry.inputs, entry.outputs)
    assert plan is not None
    scheduler, now = Scheduler(), [1000]
    stage = a_stage(scheduler, lambda: now[0])
    stage._sequences.too_busy = lambda *_: None  # type: ignore[method-assign]
    prompt = np.array([[1, 2, 3]])
    raw = plan.inputs[0].header(prompt.shape, prompt.nbytes) + prompt.tobytes()
    told: list[tuple[bool, int]] = []

    class Client:
        def told(self, _: RequestId, heard: Told, outputs: Sequence[Buffer]) -> None:
            assert isinstance(heard, Answered)
            told.append((heard.more, int.from_bytes(outputs[0][-8:], "little")))

    stage.ask(entry, asked(next_ns=7), [raw], Client())
    due = []
    for request_id, now[0] in ((1, 1002), (2, 1015), (3, 1025), (4, 1030)):
        ask, inputs, sink = scheduler.open.pop(RequestId(request_id))
        due.append((ask.arrival_ns + ask.slo_ns, *struct.unpack("<q", inputs[0])))
        sink.told(RequestId(request_id), Answered(0), next_token(inputs))
        assert len(told) == max(request_id - 2, 0)
    assert due == [(1010, 1), (1020, 2), (1030, 3), (1032, 6)]
    assert told == [(True, 6), (True, 5)]
