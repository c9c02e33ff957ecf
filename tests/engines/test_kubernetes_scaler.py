"""`clockwright scaler`: asked by KEDA's stub, and let loose on a Deployment, next to a real controller."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass

from clockwright.client.channel import Access
from clockwright.kubernetes import KubernetesApi
from clockwright.units import GpuKind
from clockwright.v1 import control_pb2
from clockwright.v1 import externalscaler_pb2 as pb
from controller.access.guard import Guard
from controller.core import SchedulerConfig
from controller.front.oip.health_messages import DESCRIPTOR
from controller.process import front_process
from controller.process.app import Controller, running
from controller.process.config import ControllerConfig, FrontConfig
from controller.process.standby import standing_by
from engines.kubernetes.keda import Scaler
from engines.kubernetes.scale_in import LEAST, ScaleIn
from engines.kubernetes.wanted import Heard, WantedFeed
from tests.kit.api_server import ApiServer, api_server
from tests.kit.processes import listening
from tests.kit.scripted_worker import LoopbackWorker

KIND = {"kind": "scripted"}
WORKERS = {"deployment": "workers"}


def stub(channel: Any) -> Any:  # noqa: ANN401
    """KEDA's, by the names of the methods; and those of the health service."""

    class Stub:
        pass

    made: Any = Stub()
    for service in (
        pb.DESCRIPTOR.services_by_name["ExternalScaler"],
        DESCRIPTOR.services_by_name["Health"],
    ):
        for method in service.methods:
            request, response = map(GetMessageClass, (method.input_type, method.output_type))
            kind = "unary_stream" if method.server_streaming else "unary_unary"
            call = getattr(channel, kind)(
                f"/{service.full_name}/{method.name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            setattr(made, method.name, call)
    return made


HEALTH = GetMessageClass(DESCRIPTOR.message_types_by_name["HealthCheckRequest"])


def asked(**metadata: str) -> Any:  # noqa: ANN401
    return pb.ScaledObjectRef(name="workers", namespace="ns", scalerMetadata=metadata)


@asynccontextmanager
async def scaling(wanted: WantedFeed, *, takes_away: bool = False) -> AsyncIterator[Any]:
    """A scaler's server, and a stub to ask it."""
    server = Scaler(wanted, takes_away=takes_away).server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield stub(channel)
    finally:
        await server.stop(0)


@asynccontextmanager
async def following(address: str) -> AsyncIterator[WantedFeed]:
    wanted = WantedFeed(address, Access())
    task = asyncio.create_task(wanted.follow())
    try:
        yield wanted
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_heard(wanted: WantedFeed, so: Callable[[Heard], bool]) -> None:
    while wanted.heard is None or not so(wanted.heard):
        await wanted.news.wait()


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:  # noqa: ANN401
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


@asynccontextmanager
async def controlling(directory: Path, *names: str) -> AsyncIterator[tuple[Controller, str]]:
    """A controller with a model, and workers of these names that serve it."""
    model = directory / "m" / "1" / "model.onnx"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"onnx")
    config = ControllerConfig(
        port=0,
        models_dir=directory,
        heartbeat_interval_ms=20,
        scheduler=SchedulerConfig(action_timeout_ns=1000 * 10**9),
    )
    async with AsyncExitStack() as stack:
        controller = await stack.enter_async_context(running(config))
        for name in names:
            await stack.enter_async_context(LoopbackWorker(controller.port, name))
        yield controller, f"127.0.0.1:{controller.port}"


async def test_keda_hears_what_a_controller_wants(tmp_path: Path) -> None:
    async with (
        controlling(tmp_path, "workers-5d4f-aaaaa", "workers-5d4f-bbbbb-gpu0") as (_, address),
        following(address) as wanted,
        scaling(wanted) as keda,
    ):
        await until_heard(
            wanted, lambda heard: [kind.ready for kind in heard.kinds.values()] == [2]
        )
        for metadata in (KIND, WORKERS):
            (spec,) = (await keda.GetMetricSpec(asked(**metadata))).metricSpecs
            assert (spec.metricName, spec.targetSizeFloat, spec.targetSize) == (
                "workers-wanted",
                1.0,
                1,
            )
            question = pb.GetMetricsRequest(
                scaledObjectRef=asked(**metadata), metricName=spec.metricName
            )
            (value,) = (await keda.GetMetrics(question)).metricValues
            # There is no load, but fewer than there are have not been enough for long.
            assert (value.metricName, value.metricValueFloat, value.metricValue) == (
                "workers-wanted",
                2.0,
                2,
            )
            assert (await keda.IsActive(asked(**metadata))).result
        for metadata in ({"kind": "other"}, {"deployment": "worker"}):
            # Not none: KEDA would end what starts.
            code, text = await code_of(keda.IsActive(asked(**metadata)))
            assert code is grpc.StatusCode.NOT_FOUND
            assert "kinds known: scripted" in text
        code, text = await code_of(keda.GetMetricSpec(asked()))
        assert (code, "deployment" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert (await keda.Check(HEALTH())).status == 1


async def test_next_to_a_standby_keda_hears_nothing_and_probes_that_it_lives(
    tmp_path: Path,
) -> None:
    config = ControllerConfig(port=0, models_dir=tmp_path)
    async with (
        standing_by(config, Guard(config.access)) as (_, port, _),
        following(f"127.0.0.1:{port}") as wanted,
        scaling(wanted) as keda,
    ):
        await wanted.news.wait()
        for call in (keda.IsActive, keda.GetMetricSpec):
            code, text = await code_of(call(asked(**KIND)))
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "another one leads" in text
        code, _ = await code_of(keda.StreamIsActive(asked(**KIND)).read())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert (await keda.Check(HEALTH())).status == 2
        assert (await keda.Check(HEALTH(service="liveness"))).status == 1


@dataclass
class Told(WantedFeed):
    """What a test says instead of a controller."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", Access())

    def say(self, wanted: int, ready: int) -> None:
        kind = control_pb2.KindWanted(gpu_kind="scripted", wanted=wanted, ready=ready)
        self._tell(Heard({"scripted": kind}, {}, None, Access(), 0.0))

    def lose(self) -> None:
        self._tell(None)


async def test_keda_is_told_at_once_when_more_are_wanted_and_let_go_when_another_leads() -> None:
    told = Told()
    told.say(wanted=0, ready=0)
    async with scaling(told) as keda:
        active = keda.StreamIsActive(asked(**KIND))
        spec = keda.StreamMetricSpec(asked(**KIND))
        health = keda.Watch(HEALTH())
        assert (await spec.read()).metricSpecs[0].targetSizeFloat == 1.0
        assert (await health.read()).status == 1
        assert not (await active.read()).result
        for wanted in (1, 3):
            told.say(wanted=wanted, ready=0)
            assert (await active.read()).result
        # Nothing new, and fewer: that is not KEDA's affair.
        told.say(wanted=3, ready=3)
        told.say(wanted=2, ready=3)
        told.say(wanted=4, ready=3)
        assert (await active.read()).result
        told.lose()
        assert await active.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        assert await spec.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        assert (await health.read()).status == 2
        health.cancel()


@pytest.mark.parametrize("takes_away", [False, True])
async def test_keda_ends_no_pods_where_this_process_does(takes_away: bool) -> None:
    told = Told()
    async with scaling(told, takes_away=takes_away) as keda:
        told.say(wanted=0, ready=2)
        assert (await keda.IsActive(asked(**KIND))).result is takes_away
        told.say(wanted=0, ready=0)
        assert not (await keda.IsActive(asked(**KIND))).result


DEPLOYMENTS = "/apis/apps/v1/namespaces/ns/deployments"
PODS = "/api/v1/namespaces/ns/pods"
COST = "controller.kubernetes.io/pod-deletion-cost"


def deployed(api: ApiServer, *pods: str, least: int = 1, **conditions: str) -> None:
    """A Deployment `workers`, its Pods, and a ReplicaSet that deletes what is too many."""
    labels = {"app": "workers", "pod-template-hash": "5d4f"}
    api.put(
        f"{DEPLOYMENTS}/workers",
        {
            "metadata": {"annotations": {LEAST: str(least)}},
            "spec": {"replicas": len(pods), "selector": {"matchLabels": {"app": "workers"}}},
        },
    )
    for name in pods:
        ready = conditions.get(name.rpartition("-")[2], "True")
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}
        api.put(f"{PODS}/{name}", {"metadata": {"labels": labels}, "status": status})
    # A Deployment without the annotation is left alone.
    api.put(
        f"{DEPLOYMENTS}/other", {"spec": {"replicas": 9, "selector": {"matchLabels": {"app": "o"}}}}
    )
    api.put(f"{PODS}/other-1-1", {"metadata": {"labels": {"app": "o"}}})

    def reconcile() -> None:
        own = [path for path in api.objects if path.startswith(f"{PODS}/workers")]
        own.sort(
            key=lambda path: (
                api.objects[path]["status"]["conditions"][0]["status"] == "True",
                int(api.objects[path]["metadata"].get("annotations", {}).get(COST, 0)),
            )
        )
        for path in own[: len(own) - replicas(api)]:
            api.delete(path)

    api.changed = reconcile


def replicas(api: ApiServer) -> int:
    number: int = api.objects[f"{DEPLOYMENTS}/workers"]["spec"]["replicas"]
    return number


def names(api: ApiServer) -> set[str]:
    found = [path for path in api.objects if path.startswith(f"{PODS}/workers")]
    return {path.rpartition("/")[2] for path in found}


@asynccontextmanager
async def taking_away(api: ApiServer, wanted: WantedFeed) -> AsyncIterator[None]:
    cluster = KubernetesApi(api.url, limit_s=60)
    task = asyncio.create_task(ScaleIn(wanted, cluster, "ns", settle_s=0).keep())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(so: Callable[[], bool]) -> None:
    """The API server is in threads, and says nothing of itself."""
    while not so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_workers_that_are_not_wanted_drain_and_their_pods_end(tmp_path: Path) -> None:
    workers = [f"workers-5d4f-{letter * 5}" for letter in "abc"]
    with api_server() as api:
        deployed(api, *workers)
        async with (
            controlling(tmp_path, *workers) as (controller, address),
            following(address) as wanted,
            taking_away(api, wanted),
        ):
            await until(lambda: replicas(api) == 1 and len(names(api)) == 1)
            (left,) = (link.worker_id for link in controller.links.links)
            assert names(api) == {left}
            gone = sorted(set(workers) - {left})
            marks = [call for call in api.calls if "/pods/" in call]
            assert sorted(marks) == [f"PATCH {PODS}/{name}" for name in gone]
            # What a worker had was done before its Pod was to end: each is marked, then one goes.
            assert [call.rpartition("/")[2] == "scale" for call in api.calls] == [False, True] * 2
            assert sorted(controller.links.may_go(GpuKind("scripted"))) == gone
            assert replicas(api) == 1


async def test_a_start_that_is_pending_ends_before_any_worker_drains(tmp_path: Path) -> None:
    serving, pending = "workers-5d4f-aaaaa", "workers-5d4f-bbbbb"
    with api_server() as api:
        deployed(api, serving, pending, bbbbb="False")
        async with (
            controlling(tmp_path, serving) as (controller, address),
            following(address) as wanted,
            taking_away(api, wanted),
        ):
            await until(lambda: names(api) == {serving})
            assert [link.draining for link in controller.links.links] == [False]


async def test_what_was_begun_is_gone_on_with_and_what_keda_changed_is_not_overruled(
    tmp_path: Path,
) -> None:
    """The process before has marked a Pod whose worker has drained since; then KEDA wants more."""
    first, second = "workers-5d4f-aaaaa", "workers-5d4f-bbbbb"
    with api_server() as api:
        deployed(api, first, second)
        api.objects[f"{PODS}/{second}"]["metadata"]["annotations"] = {COST: "-1000"}
        refused = f"PATCH {DEPLOYMENTS}/workers/scale"
        api.refusals[refused] = 409
        async with (
            controlling(tmp_path, first) as (_, address),
            following(address) as wanted,
            taking_away(api, wanted),
        ):
            await until(lambda: refused in api.calls)
            assert names(api) == {first, second}
            # It reads again, and finds two wanted: the mark goes, and both stay.
            with api.lock:
                found = api.objects[f"{DEPLOYMENTS}/workers"]
                found["metadata"]["annotations"][LEAST] = "2"
                api.refusals.clear()
            path = f"{PODS}/{second}"
            await until(lambda: COST not in api.objects[path]["metadata"]["annotations"])
            assert replicas(api) == 2


async def test_workers_that_no_pod_has_stop_it_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inside, outside = "workers-5d4f-aaaaa", "by-hand"
    with api_server() as api:
        deployed(api, inside, "workers-5d4f-bbbbb")
        async with (
            controlling(tmp_path, inside, outside) as (_, address),
            following(address) as wanted,
            taking_away(api, wanted),
        ):
            await until(lambda: "--id $(POD_NAME)" in caplog.text)
            assert api.calls == []
            assert "worker by-hand is in no Pod of Deployment workers" in caplog.text


async def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    async with (
        controlling(tmp_path, "workers-5d4f-aaaaa") as (_, address),
        # It hands on to the controller that leads.
        front_process.serving(FrontConfig(controller=address, port=0, http_port=None)) as front,
    ):

        def ask() -> int:
            flags = (
                "--controller",
                f"127.0.0.1:{front.port}",
                "--listen",
                "127.0.0.1:0",
                "--kubernetes",
                "ns",
            )
            with (
                api_server() as api,
                listening("scaler", *flags, "--api", api.url) as (process, scaler),
                grpc.insecure_channel(scaler) as channel,
            ):
                watch = stub(channel).Watch(HEALTH())
                while next(watch).status != 1:
                    pass
                assert stub(channel).IsActive(asked(**WORKERS)).result
                process.send_signal(signal.SIGTERM)
                return process.wait()

        assert await asyncio.to_thread(ask) == 0
