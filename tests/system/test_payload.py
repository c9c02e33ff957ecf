"""Large tensors through real sockets, a real link and shared memory: every answer is checked byte for byte."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from onnx import TensorProto, helper
from typing_extensions import override

from clockwright.actions import Infer
from clockwright.bulk import Buffer
from clockwright.v1 import inference_pb2 as pb
from controller.app import Controller, running
from controller.config import ControllerConfig
from controller.core import SchedulerConfig
from modelzoo.profile import load_profile
from worker.config import WorkerConfig
from worker.core.lanes import Step
from worker.devices.modelled import ModelledDevice
from worker.link import ControllerLink
from worker.models.file_store import FileStore
from worker.models.model_files import Limits
from worker.models.served_model import ServedModel

_aio: Any = grpc.aio

S = 1_000_000_000
#: FP32 values of a row: 160 kB in, and as much out.
VALUES = 40_000
ROW_BYTES = 4 * VALUES
#: Four blocks for inputs beside those that wait, and one for outputs: all are used again and again.
SHARED_BYTES = 4 << 20


class SlowEcho(ModelledDevice):
    """Answers with the inputs, turned over, after a while; like a GPU it copies them in and the outputs out."""

    def __init__(self, cache: Path) -> None:
        super().__init__(
            load_profile("0us"),
            limits=Limits(arena_bytes=64 << 20, num_pages=4, io_bytes=1 << 20),
            io_pool_bytes=8 << 20,
            files=FileStore(cache),
            compile_limit_s=100.0,
        )
        self.rng = random.Random(1)
        self.kept: dict[int, bytes] = {}
        #: How inputs came, and outputs went: by shared memory or not.
        self.shared_inputs = self.shared_outputs = self.own_inputs = self.own_outputs = 0
        #: EXECs wait for it.
        self.go = threading.Event()
        self.go.set()

    @override
    def run_input(self, step: Step[ServedModel], payload: Sequence[Buffer]) -> None:
        for tensor in payload:
            if isinstance(tensor, memoryview) and tensor.readonly and len(tensor) == ROW_BYTES:
                self.shared_inputs += 1
            else:
                self.own_inputs += 1
        self.kept[step.action.action_id] = b"".join(payload)

    @override
    def run_exec(self, step: Step[ServedModel]) -> None:
        threading.Event().wait(self.rng.choice((0, 0.002, 0.02)))
        self.go.wait()

    @override
    def run_output(
        self, step: Step[ServedModel], room: memoryview | None = None
    ) -> Sequence[Buffer]:
        action = step.action
        assert isinstance(action, Infer)
        data = turned(self.kept.pop(action.action_id))
        if room is not None:
            self.shared_outputs += 1
            room[:] = data
            return (room,)
        self.own_outputs += 1
        return [data[begin : begin + ROW_BYTES] for begin in range(0, len(data), ROW_BYTES)]


def turned(data: bytes) -> bytes:
    return data.translate(bytes(255 - value for value in range(256)))


def write_model(directory: Path) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", VALUES])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", VALUES])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (directory / "m" / "1").mkdir(parents=True)
    (directory / "m" / "1" / "model.onnx").write_bytes(model.SerializeToString())
    (directory / "m" / "config.toml").write_text("batch_sizes = [1]\n")
    return directory


def request(number: int, data: bytes) -> bytes:
    message = pb.ModelInferRequest(model_name="m", id=str(number), raw_input_contents=[data])
    message.inputs.add(name="x", datatype="FP32", shape=[1, VALUES])
    message.parameters["slo_ms"].int64_param = 600_000
    return message.SerializeToString()


class Clients:
    """Ask, and give up at times; what is answered has to be right."""

    def __init__(self, port: int) -> None:
        self.channel = _aio.insecure_channel(f"127.0.0.1:{port}")
        self.infer = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        self.rng = random.Random(2)
        self.answered = self.given_up = 0
        #: Statuses of requests that were not answered.
        self.refused: list[str] = []

    async def ask(self, number: int, *, patience_s: float | None = None) -> None:
        data = random.Random(number).randbytes(ROW_BYTES)
        call = self.infer(request(number, data))
        try:
            answer = pb.ModelInferResponse.FromString(
                await asyncio.wait_for(asyncio.shield(self._end(call)), patience_s)
            )
        except TimeoutError:
            call.cancel()
            self.given_up += 1
            return
        except grpc.aio.AioRpcError as error:
            self.refused.append(f"{error.code().name}: {error.details()}")
            return
        assert answer.id == str(number)
        assert answer.raw_output_contents[0] == turned(data), f"answer {number} is another's"
        self.answered += 1

    async def crowd(self, count: int, *, at_once: int = 6) -> None:
        numbers = iter(range(count))

        async def one() -> None:
            for number in numbers:
                impatient = self.rng.random() < 0.4
                await self.ask(
                    number, patience_s=self.rng.choice((0.001, 0.01, 0.03)) if impatient else None
                )

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(one())

    async def _end(self, call: Any) -> bytes:  # noqa: ANN401
        with suppress(asyncio.CancelledError):
            answer: bytes = await call
            return answer
        return b""


def config(directory: Path, **changes: Any) -> ControllerConfig:  # noqa: ANN401
    values: dict[str, Any] = {
        "port": 0,
        "models_dir": write_model(directory / "models"),
        "shared_memory_bytes": SHARED_BYTES,
        # A test that holds an EXEC back is no worker that hangs.
        "scheduler": SchedulerConfig(action_timeout_ns=1000 * S),
        "silence_limit_ms": 100_000,
    }
    return ControllerConfig(**{**values, **changes})


def worker(
    controller: Controller, directory: Path, device: SlowEcho, name: str
) -> asyncio.Task[None]:
    settings = WorkerConfig(
        controller=f"127.0.0.1:{controller.port}",
        device="modelled:0us",
        worker_id=name,
        cache_dir=directory / "cache",
    )
    return asyncio.create_task(
        ControllerLink(settings, device, FileStore(settings.cache_dir)).run()
    )


async def until(condition: Any) -> None:  # noqa: ANN401
    while not condition():  # noqa: ASYNC110 - any condition, not one that signals
        await asyncio.sleep(0.005)


async def ready(controller: Controller, count: int = 1) -> None:
    await until(lambda: len(controller.catalogue.models[0].ready_on) == count)


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def all_free(controller: Controller) -> None:
    """What nobody uses comes back; a cycle that the collector has to find may keep some for a while."""

    def free() -> bool:
        gc.collect()
        inputs = controller.slabs.inputs
        return inputs is None or inputs.used_bytes == 0

    await until(free)


def play(scenario: Any) -> None:  # noqa: ANN401
    asyncio.run(asyncio.wait_for(scenario, 200))


def test_answers_are_right_when_clients_leave_while_slow_actions_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        async with running(config(tmp_path)) as controller:
            serving = worker(controller, tmp_path, device, "w")
            await ready(controller)
            clients = Clients(controller.port)
            await clients.crowd(60)
            await all_free(controller)
            await clients.channel.close()
            await end(serving)
        assert clients.refused == []
        assert clients.answered + clients.given_up == 60
        assert clients.answered
        assert clients.given_up
        assert device.shared_inputs
        assert device.shared_outputs
        await device.close()

    play(scenario())


def test_an_input_outlives_its_client_until_the_action_has_read_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        async with running(config(tmp_path)) as controller:
            serving = worker(controller, tmp_path, device, "w")
            await ready(controller)
            clients = Clients(controller.port)
            await clients.ask(0)
            device.go.clear()
            asking = asyncio.create_task(clients.ask(1, patience_s=0.05))
            await until(lambda: device.shared_inputs + device.own_inputs > 1)
            await asking
            assert clients.given_up == 1
            # The client has gone, and its request; the action runs, and has its slab.
            await until(lambda: controller.runtime.num_waiting == 0)
            assert controller.slabs.inputs is not None
            assert controller.slabs.inputs.used_bytes > 0
            device.go.set()
            await all_free(controller)
            await clients.channel.close()
            await end(serving)
        await device.close()

    play(scenario())


def test_answers_are_right_when_a_worker_is_lost_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = SlowEcho(tmp_path / "cache"), SlowEcho(tmp_path / "cache")
        async with running(config(tmp_path)) as controller:
            lost = worker(controller, tmp_path, first, "first")
            stays = worker(controller, tmp_path, second, "second")
            await ready(controller, 2)
            clients = Clients(controller.port)
            crowd = asyncio.create_task(clients.crowd(50))
            await until(lambda: clients.answered > 10)
            await end(lost)
            await crowd
            await all_free(controller)
            await clients.channel.close()
            await end(stays)
        assert all("WORKER_LOST" in words for words in clients.refused)
        assert clients.answered > 12
        await first.close()
        await second.close()

    play(scenario())


@pytest.mark.parametrize("missing", ["limit", "memfd", "grpc front"])
def test_without_shared_memory_tensors_travel_beside_their_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    changes: dict[str, Any] = {}
    if missing == "limit":
        changes["shared_memory_bytes"] = 0
    elif missing == "grpc front":
        changes["front"] = "grpc"
    else:

        def refuse(name: str, flags: int) -> int:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(os, "memfd_create", refuse)

    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        async with running(config(tmp_path, **changes)) as controller:
            serving = worker(controller, tmp_path, device, "w")
            await ready(controller)
            clients = Clients(controller.port)
            await clients.crowd(12)
            await clients.channel.close()
            await end(serving)
        assert clients.refused == []
        assert clients.answered
        assert (device.shared_inputs, device.own_inputs > 0) == (0, True)
        if missing != "grpc front":
            assert (device.shared_outputs, device.own_outputs > 0) == (0, True)
        await device.close()

    play(scenario())
