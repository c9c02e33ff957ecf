"""Operators look at the controller and change it; the process starts and stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from clockwright.client.operator import control_stub
from clockwright.errors import ConfigError, Refusal, RefusedError
from clockwright.v1 import control_pb2 as pb
from controller.core import SchedulerConfig
from controller.front.methods import CONTROL
from controller.front.oip.refusals import NoAnswerError
from controller.front.services import control as control_module
from controller.links import worker_link
from controller.port import Ask
from controller.process.app import Controller, running, serve
from controller.process.config import ControllerConfig
from tests.kit import asking
from tests.kit.asking import Reply
from tests.kit.echo_serving import until
from tests.kit.scripted_worker import LoopbackWorker

S = 10**9
ROW = b"0123456789abcdef"


def make_model(directory: Path, name: str, data: bytes = b"onnx") -> Path:
    (directory / name / "1").mkdir(parents=True)
    (directory / name / "1" / "model.onnx").write_bytes(data)
    return directory


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is told to leave hears of it, also when the machine stands still meanwhile."""
    monkeypatch.setattr(worker_link, "LEAVE_LIMIT_S", 60.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))


@asynccontextmanager
async def control_of(port: int) -> AsyncIterator[Any]:
    aio: Any = grpc.aio
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield control_stub(channel)


@asynccontextmanager
async def cluster(directory: Path, **changes: Any) -> AsyncIterator[tuple[Controller, Any]]:  # noqa: ANN401
    config = ControllerConfig(
        port=0,
        models_dir=directory,
        heartbeat_interval_ms=20,
        # A worker that a test holds back does not hang, however slow the machine is.
        scheduler=SchedulerConfig(action_timeout_ns=1000 * S),
        **changes,
    )
    async with running(config) as controller, control_of(controller.port) as control:
        yield controller, control


async def until_joined(controller: Controller) -> None:
    """Wait until a worker is there and has judged all models."""
    links = controller.links
    while not (  # noqa: ASYNC110
        any(link.joined for link in links.links) and controller.catalogue.ready
    ):
        await asyncio.sleep(0.005)


def submit(controller: Controller, name: str = "m", slo_ns: int = 30 * S) -> asyncio.Future[Reply]:
    model = controller.catalogue.find(name)
    assert model is not None
    runtime = controller.runtime
    return asking.submit(runtime, model.model_id, [ROW], Ask(0, 1, runtime.clock(), slo_ns))


async def code_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error: Any = caught.value
    return error.code(), error.details() or ""


async def add_model(
    controller: Controller, requests: Iterable[pb.AddModelRequest]
) -> pb.AddModelResponse:
    """Ask as an operator does, who does not use asyncio.

    A server may end a stream before the client has sent all of it. Of gRPC's two clients, that of
    asyncio then says now and again only that it could not send.
    """

    def call() -> pb.AddModelResponse:
        channel: Any = grpc.insecure_channel(f"127.0.0.1:{controller.port}")
        with channel:
            stub = control_stub(channel)
            added: pb.AddModelResponse = stub.AddModel(iter(requests))
            return added

    return await asyncio.to_thread(call)


def upload(name: str, files: dict[str, bytes], **first: Any) -> list[pb.AddModelRequest]:  # noqa: ANN401
    """Upload a model, each file in two messages."""
    requests = []
    for path, content in files.items():
        requests.append(pb.AddModelRequest(path=path, content=content[:3]))
        requests.append(pb.AddModelRequest(content=content[3:]))
    requests = requests or [pb.AddModelRequest()]
    requests[0].MergeFrom(pb.AddModelRequest(model_id=name, **first))
    return requests


async def test_status_workers_and_models_tell_what_is_there(tmp_path: Path) -> None:
    make_model(make_model(tmp_path, "m"), "unfit")
    async with (
        cluster(tmp_path) as (controller, control),
        LoopbackWorker(controller.port, refuse=lambda m: "no" if m == "unfit" else ""),
    ):
        await until_joined(controller)
        await submit(controller)
        await submit(controller)
        status = await control.Status(pb.StatusRequest())
        assert (status.num_workers, status.num_models, status.num_models_ready) == (1, 2, 1)
        assert (status.requests, status.answered, status.counters["cold_starts"]) == (2, 2, 1)
        assert status.ready
        assert not status.draining
        (worker,) = (await control.ListWorkers(pb.ListWorkersRequest())).workers
        assert (worker.worker_id, worker.state, worker.device) == (
            "w0",
            "READY",
            "scripted",
        )
        assert (worker.num_pages, worker.num_free_pages) == (8, 7)
        assert list(worker.resident) == ["m"]
        assert list(worker.models_refused) == ["unfit: no"]
        assert worker.round_trip_us > 0
        fit, unfit = (await control.ListModels(pb.ListModelsRequest())).models
        assert (fit.model_id, fit.state, fit.version) == ("m", "READY", "1")
        assert (fit.slo_ns, fit.requests, fit.counters["cold_starts"]) == (S // 10, 2, 1)
        assert [batch.batch_size for batch in fit.exec] == [1, 2, 4]
        assert list(fit.resident_on) == ["w0"]
        assert (unfit.state, unfit.reason) == ("UNAVAILABLE", "no")
        one = await control.ListModels(pb.ListModelsRequest(model_id="m"))
        assert list(one.models) == [fit]


async def test_unknown_workers_and_models_are_not_found(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, control):
        calls = [
            control.ListWorkers(pb.ListWorkersRequest(worker_id="x")),
            control.ListModels(pb.ListModelsRequest(model_id="x")),
            control.DrainWorker(pb.DrainWorkerRequest(worker_id="x")),
            control.RemoveModel(pb.RemoveModelRequest(model_id="x")),
        ]
        for call in calls:
            code, text = await code_of(call)
            assert code is grpc.StatusCode.NOT_FOUND
            assert "x" in text


async def test_draining_a_worker_returns_when_it_has_left(tmp_path: Path) -> None:
    async with (
        cluster(make_model(tmp_path, "m")) as (controller, control),
        LoopbackWorker(controller.port) as worker,
    ):
        await until_joined(controller)
        await submit(controller)
        await control.DrainWorker(pb.DrainWorkerRequest(worker_id="w0"))
        assert worker.end.startswith("drain:")
        assert controller.links.links == []


async def test_a_worker_without_which_a_model_has_none_is_drained_only_if_that_is_meant(
    tmp_path: Path,
) -> None:
    make_model(tmp_path, "m")
    make_model(tmp_path, "only")

    async def refusal_of(worker_id: str) -> str:
        request = pb.DrainWorkerRequest(worker_id=worker_id, unless_last=True)
        code, text = await code_of(control.DrainWorker(request))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        return text

    def refuse(model_id: str) -> str:
        return "no" if model_id == "only" else ""

    async with (
        cluster(tmp_path) as (controller, control),
        LoopbackWorker(controller.port, "w0"),
    ):
        await until_joined(controller)
        await submit(controller, "m")
        assert await refusal_of("w0") == "worker w0 is the last one"
        async with LoopbackWorker(controller.port, "w1", refuse=refuse):
            models = controller.catalogue.models
            await until(lambda: all(link.joined for link in controller.links.links))
            await until(lambda: all("w1" in {*one.ready_on, *one.refused_by} for one in models))
            assert await refusal_of("w0") == "worker w0 is the only one ready for only"
            await control.DrainWorker(pb.DrainWorkerRequest(worker_id="w1", unless_last=True))
            await control.DrainWorker(pb.DrainWorkerRequest(worker_id="w0"))
            assert controller.links.links == []


async def test_engines_hear_how_many_workers_are_wanted_and_release_one(tmp_path: Path) -> None:
    async with (
        cluster(make_model(tmp_path, "m")) as (controller, control),
        LoopbackWorker(controller.port, "w0", exec_ns=50_000_000) as first,
    ):
        await until_joined(controller)
        watch = control.WatchWorkersWanted(pb.WatchWorkersWantedRequest())
        told = aiter(watch)
        gpu_kind = first.register.gpu_kind

        async def until_told(**least: int) -> pb.KindWanted:
            async for each in told:
                found: pb.KindWanted = each.kinds[0]
                if all(getattr(found, name) >= value for name, value in least.items()):
                    return found
            raise AssertionError("the stream ended")

        kind = await until_told(ready=1)
        assert (kind.gpu_kind, kind.wanted, list(kind.may_go)) == (gpu_kind, 1, [])
        assert kind.start_s == 60
        # The last one stays, unless it is named.
        release = pb.ReleaseWorkerRequest(gpu_kind=gpu_kind)
        code, text = await code_of(control.ReleaseWorker(release))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "name it" in text
        release.worker = "other"
        code, text = await code_of(control.ReleaseWorker(release))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "w0" in text
        code, text = await code_of(control.ReleaseWorker(pb.ReleaseWorkerRequest(gpu_kind="a100")))
        assert code is grpc.StatusCode.NOT_FOUND
        assert f"kinds that do: {gpu_kind}" in text

        # More is asked for than one worker does in time: as one that works on something else until then.
        await submit(controller)
        overloaded = 0
        while not overloaded:
            first.hold = True
            asked = [submit(controller, slo_ns=S // 5) for _ in range(50)]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            refused = [each for each in outcomes if isinstance(each, NoAnswerError)]
            overloaded = sum(each.refusal is Refusal.OVERLOADED for each in refused)
            await first.release()
        kind = await until_told(wanted=2)
        assert kind.limit == "exec"
        async with LoopbackWorker(controller.port, "w1") as second:
            kind = await until_told(ready=2)
            # From when it was asked for.
            assert 0 < kind.start_s < 60
            release.worker = ""
            released = await control.ReleaseWorker(release)
            assert released.worker in ("w0", "w1")
            assert "it costs least" in released.reason
            kind = await until_told(ready=1, draining=0)
            while not kind.may_go:
                kind = await until_told(ready=1)
            assert list(kind.may_go) == [released.worker]
            gone = second if released.worker == "w1" else first
            assert gone.end.startswith("drain:")
            # It comes again under its name, and may not go any more.
            async with LoopbackWorker(controller.port, released.worker):
                kind = await until_told(ready=2)
                assert list(kind.may_go) == []
        watch.cancel()


async def test_who_watches_the_workers_wanted_is_let_go_when_the_controller_stops(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (_, control):
        watch = control.WatchWorkersWanted(pb.WatchWorkersWantedRequest())
        told = aiter(watch)
        assert list((await anext(told)).kinds) == []
    with pytest.raises((StopAsyncIteration, grpc.RpcError, asyncio.CancelledError)):
        await anext(told)


async def test_so_many_watch_the_workers_wanted_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "WATCHERS_MAX", 1)
    async with cluster(tmp_path) as (_, control):
        first = control.WatchWorkersWanted(pb.WatchWorkersWantedRequest())
        await anext(aiter(first))
        second = control.WatchWorkersWanted(pb.WatchWorkersWantedRequest())
        code, text = await code_of(anext(aiter(second)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "expected fewer" in text
        first.cancel()


async def test_a_model_is_added_replaced_and_removed_at_run_time(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as (controller, control),
        LoopbackWorker(controller.port) as worker,
    ):
        await until_joined(controller)
        files = {
            "1/model.onnx": b"first graph",
            "1/data/w.bin": b"weights",
            "config.toml": b"slo_ms = 7",
        }
        added = await control.AddModel(upload("new", files))
        assert [(model.model_id, model.slo_ns) for model in added.models] == [("new", 7_000_000)]
        await submit(controller, "new")
        assert sorted(worker.files.values()) == [b"first graph", b"weights"]

        code, text = await code_of(add_model(controller, upload("new", files)))
        assert (code, text) == (
            grpc.StatusCode.ALREADY_EXISTS,
            "there is a model new already",
        )
        second = upload("new", {"2/model.onnx": b"second graph"}, replace=True)
        (model,) = (await control.AddModel(second)).models
        assert model.version == "2"
        await submit(controller, "new")
        await control.RemoveModel(pb.RemoveModelRequest(model_id="new"))
        assert controller.catalogue.models == []


@pytest.mark.parametrize(
    ("requests", "code", "message"),
    [
        ([], grpc.StatusCode.INVALID_ARGUMENT, "found an empty stream"),
        (upload("m", {}), grpc.StatusCode.INVALID_ARGUMENT, "found none"),
        (upload("a/b", {"1/model.onnx": b"x"}), grpc.StatusCode.FAILED_PRECONDITION, "model name"),
        (upload("m", {"../x": b"x"}), grpc.StatusCode.INVALID_ARGUMENT, "found '../x'"),
        (upload("m", {"/etc/x": b"x"}), grpc.StatusCode.INVALID_ARGUMENT, "found '/etc/x'"),
        (upload("m", {"1\0": b"x"}), grpc.StatusCode.INVALID_ARGUMENT, "inside the model's folder"),
        (upload("m", {"1": b"x", "1/y": b"x"}), grpc.StatusCode.INVALID_ARGUMENT, "sent before"),
        (
            upload("m", {"1/model.onnx": b""}),
            grpc.StatusCode.FAILED_PRECONDITION,
            "1/model.onnx is empty",
        ),
        (
            upload("m", {"model.onnx": b"x"}),
            grpc.StatusCode.FAILED_PRECONDITION,
            "expected a version folder",
        ),
        (
            upload("m", {"1/model.onnx": b"x", "config.toml": b"foo = 1"}),
            grpc.StatusCode.FAILED_PRECONDITION,
            "unknown key 'foo'",
        ),
        (
            upload("unfit", {"1/model.onnx": b"x"}),
            grpc.StatusCode.FAILED_PRECONDITION,
            "model unfit: not ONNX",
        ),
    ],
)
async def test_a_model_that_cannot_be_added_says_why_and_changes_nothing(
    tmp_path: Path, requests: Iterable[pb.AddModelRequest], code: grpc.StatusCode, message: str
) -> None:
    async with (
        cluster(tmp_path) as (controller, _),
        LoopbackWorker(controller.port, refuse=lambda m: "not ONNX" if m == "unfit" else ""),
    ):
        await until_joined(controller)
        found, text = await code_of(add_model(controller, requests))
        assert found is code
        assert message in text
        assert controller.catalogue.models == []


async def test_a_message_over_the_limit_is_refused_clearly_and_harms_nobody(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, max_message_bytes=1 << 20) as (controller, control),
        LoopbackWorker(controller.port),
    ):
        await until_joined(controller)
        huge = upload("m", {"1/model.onnx": bytes(1 << 21)})
        code, text = await code_of(add_model(controller, huge))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in text
        await control.AddModel(upload("m", {"1/model.onnx": b"small"}))
        await submit(controller)


async def test_files_of_models_that_are_replaced_or_removed_are_deleted(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as (controller, control),
        LoopbackWorker(controller.port, refuse=lambda m: "no" if m == "unfit" else ""),
    ):
        await until_joined(controller)
        for data in (b"first", b"second"):
            files = {"1/model.onnx": data, "1/data/w.bin": b"weights"}
            await control.AddModel(upload("new", files, replace=True))
        folder = controller.catalogue.models[0].folder
        assert folder is not None
        uploads = folder.files[0].path.parents[4]
        assert uploads.name == "uploads"
        assert len(list(uploads.iterdir())) >= 1
        await code_of(control.AddModel(upload("unfit", {"1/model.onnx": b"x"})))
        while len(list(uploads.iterdir())) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert folder.files[0].path.read_bytes() == b"weights"
        await control.RemoveModel(pb.RemoveModelRequest(model_id="new"))
        while list(uploads.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_an_upload_ends_where_the_limit_of_all_uploads_is(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, upload_limit_bytes=100_000) as (controller, control),
        LoopbackWorker(controller.port),
    ):
        await until_joined(controller)
        sent = 0

        def endless() -> Iterator[pb.AddModelRequest]:
            nonlocal sent
            yield pb.AddModelRequest(model_id="m", path="1/model.onnx")
            while True:
                sent += 1
                yield pb.AddModelRequest(content=bytes(10_000))

        code, text = await code_of(add_model(controller, endless()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "expected 100000 in all at most (--upload-limit-mib)" in text
        # The room is there again, and a file that is empty needs some, too.
        await control.AddModel(upload("m", {"1/model.onnx": bytes(60_000)}))
        code, _ = await code_of(add_model(controller, upload("n", {"1/x": bytes(60_000)})))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        many = upload("n", {f"1/{number}": b"" for number in range(20)})
        code, _ = await code_of(add_model(controller, many))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await control.RemoveModel(pb.RemoveModelRequest(model_id="m"))
        await control.AddModel(upload("n", {"1/model.onnx": bytes(60_000)}))


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["ControlService"].methods]


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_an_invalid_argument_and_no_traceback(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (controller, _):

            def call() -> tuple[grpc.StatusCode, str]:
                channel: Any = grpc.insecure_channel(f"127.0.0.1:{controller.port}")
                with channel, pytest.raises(grpc.RpcError) as caught:
                    channel.stream_unary(f"/{CONTROL}/{method}")(iter([b"\xff\xff"]))
                error: Any = caught.value
                return error.code(), error.details()

            code, text = await asyncio.to_thread(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "message ends inside a tag" in text or f"not the request of {method}" in text

    run(test)
    # gRPC's client for asyncio may still log that the loop of a test before this one is closed.
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [message for message in logged if "PollerCompletionQueue" not in message] == []


async def test_feedback_is_counted_before_it_is_parsed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, control):
        item = pb.FeedbackItem(query_id="q", label=1)
        taken = await control.Feedback(pb.FeedbackRequest(items=[item] * 10_000))
        assert len(taken.outcomes) == 10_000
        for num_items in (10_001, 500_000):
            code, text = await code_of(
                control.Feedback(pb.FeedbackRequest(items=[pb.FeedbackItem()] * num_items))
            )
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "10000 fields, expected 10000 at most" in text or "1000000 bytes" in text
        long = pb.FeedbackItem(query_id="q" * 257, label=1)
        _, text = await code_of(control.Feedback(pb.FeedbackRequest(items=[long])))
        assert text == "query_id: found 257 characters, expected 256 at most"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options_json": "[" * 60_000}, "options_json: maximum recursion depth exceeded"),
        ({"options_json": "9" * 5000}, "options_json: Exceeds the limit"),
        ({"options_json": "[1]"}, "options_json: found a list, expected a JSON object"),
        ({"models": ["m"] * 65}, "models: found 65, expected 64 at most"),
        ({"models": ["m"], "label_output": "l" * 257}, "label_output: found 257 characters"),
        (
            {"models": ["m"], "slo_ns": 2**63 - 1},
            "slo_ns: found 9223372036854775807, expected at most",
        ),
    ],
)
async def test_settings_of_an_application_are_bounded(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    async with cluster(tmp_path) as (_, control):
        request = pb.PutApplicationRequest(application=pb.Application(name="app", **settings))
        code, text = await code_of(control.PutApplication(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in text


# --- the process ------------------------------------------------------------------------------


async def test_sigterm_finishes_what_is_admitted_and_leaves_the_workers_waiting(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "models", "m")
    config = ControllerConfig(
        port=0,
        models_dir=tmp_path / "models",
        heartbeat_interval_ms=20,
        telemetry_dir=tmp_path / "telemetry",
    )
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    process = asyncio.create_task(serve(config, started=lambda ports: port.set_result(ports.port)))
    async with (
        LoopbackWorker(await port) as worker,
        control_of(port.result()) as control,
    ):
        while not (await control.Status(pb.StatusRequest())).num_models_ready:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert await process == 0
        await worker.ended.wait()
        # It is not sent home: it will try again.
        assert worker.end == "the controller is shutting down"
    assert (tmp_path / "telemetry" / "requests.csv").read_text().startswith("run,")


async def test_draining_waits_for_the_answers_and_refuses_newcomers(tmp_path: Path) -> None:
    async with (
        cluster(make_model(tmp_path, "m")) as (controller, _),
        LoopbackWorker(controller.port, hold=True) as worker,
    ):
        await until_joined(controller)
        future = submit(controller)
        await worker.wait_for("load_weights")
        draining = asyncio.create_task(controller.drain(60, notice_s=0))
        # The first turn makes it not ready, the second closes admission.
        for _ in range(2):
            await asyncio.sleep(0)
            assert controller.runtime.draining
        with pytest.raises(RefusedError, match="DRAINING"):
            await submit(controller)
        assert worker.end == ""
        await worker.release()
        assert [bytes(output) for output in (await future).outputs] == [ROW]
        await draining
        await worker.ended.wait()
        assert worker.end == "the controller is shutting down"


async def test_draining_gives_up_after_its_limit(tmp_path: Path) -> None:
    async with (
        cluster(make_model(tmp_path, "m")) as (controller, _),
        LoopbackWorker(controller.port, hold=True) as worker,
    ):
        await until_joined(controller)
        future = submit(controller)
        await worker.wait_for("load_weights")
        await controller.drain(0.05, notice_s=0)
        with pytest.raises(RefusedError):
            await future


async def test_a_taken_port_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            await serve(ControllerConfig(port=port, models_dir=tmp_path))


async def test_two_controllers_do_not_share_a_port(tmp_path: Path) -> None:
    async with running(ControllerConfig(port=0, models_dir=tmp_path)) as controller:
        with pytest.raises(ConfigError, match="Address already in use"):
            await serve(ControllerConfig(port=controller.port, models_dir=tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 70000}, "port is 70000, expected 0 to 65535"),
        ({"host": ""}, "host is empty"),
        ({"default_slo_ns": 0}, "default_slo_ns is 0"),
        ({"max_message_bytes": -1}, "max_message_bytes is -1"),
        ({"heartbeat_interval_ms": 20_000}, "below twice heartbeat_interval_ms"),
        ({"models_dir": Path("nowhere")}, "models directory nowhere is not a folder"),
    ],
)
def test_settings_that_cannot_work_are_config_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ControllerConfig(scheduler=SchedulerConfig(), **changes)
    assert message in str(caught.value)
