"""Large tensors through real sockets, a real link and shared memory: every answer is checked byte for byte."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from onnx import TensorProto, helper

from clockwright.v1 import inference_pb2 as pb
from controller.app import Controller, running
from controller.config import ControllerConfig
from controller.core import SchedulerConfig
from tests.kit.slow_echo import ROW_BYTES, VALUES, SlowEcho, serve, turned

_aio: Any = grpc.aio

S = 1_000_000_000
#: Four blocks for inputs beside those that wait, and one for outputs: all are used again and again.
SHARED_BYTES = 4 << 20


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
    return asyncio.create_task(serve(controller.port, directory, device, name))


@contextmanager
def worker_process(controller: Controller, folder: Path, *flags: str) -> Iterator[int]:
    """Run a worker in a process of its own, named as its folder; gives its process id."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.kit.slow_echo", str(controller.port), str(folder)]
    with subprocess.Popen([*command, *flags]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


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
            crowd = asyncio.create_task(clients.crowd(40))
            await until(lambda: clients.answered > 10)
            await end(lost)
            await crowd
            await all_free(controller)
            await clients.channel.close()
            await end(stays)
        assert all("WORKER_LOST" in words for words in clients.refused)
        assert clients.answered > 15
        await first.close()
        await second.close()

    play(scenario())


def test_answers_are_right_when_a_worker_is_killed_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        async with running(config(tmp_path)) as controller:
            with worker_process(controller, tmp_path / "killed") as pid:
                await ready(controller)
                stays = worker(controller, tmp_path, device, "stays")
                await ready(controller, 2)
                clients = Clients(controller.port)
                crowd = asyncio.create_task(clients.crowd(40))
                await until(lambda: clients.answered > 10)
                os.kill(pid, signal.SIGKILL)
                await crowd
            await all_free(controller)
            await clients.channel.close()
            await end(stays)
        assert all("WORKER_LOST" in words for words in clients.refused)
        assert clients.answered > 15
        await device.close()

    play(scenario())


def test_a_worker_that_was_given_up_and_writes_on_spoils_no_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        settings = config(tmp_path, silence_limit_ms=4000)
        written = tmp_path / "zombie" / "written"
        async with running(settings) as controller:
            with worker_process(controller, tmp_path / "zombie", "--stall") as pid:
                await ready(controller)
                clients = Clients(controller.port)

                async def ask_on() -> None:
                    while not written.exists():
                        await clients.ask(0)

                asking = asyncio.create_task(ask_on())
                await until(written.exists)
                os.kill(pid, signal.SIGSTOP)
                await until(lambda: not controller.catalogue.models[0].ready_on)
                stays = worker(controller, tmp_path, device, "stays")
                await ready(controller)
                before = written.read_text()
                os.kill(pid, signal.SIGCONT)
                await until(lambda: written.read_text() not in ("", before))
                await asking
                # One at a time: each has the first slab that there is.
                await clients.crowd(20, at_once=1)
                after = written.read_text()
                await until(lambda: written.read_text() not in ("", after))
            await all_free(controller)
            await clients.channel.close()
            await end(stays)
        assert all("WORKER_LOST" in words for words in clients.refused)
        assert clients.answered > 5
        assert device.shared_outputs
        await device.close()

    play(scenario())


def test_outputs_that_find_no_room_travel_with_their_results(tmp_path: Path) -> None:
    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        # An eighth of the half that is not for inputs is smaller than a row.
        async with running(config(tmp_path, shared_memory_bytes=2 << 20)) as controller:
            serving = worker(controller, tmp_path, device, "w")
            await ready(controller)
            clients = Clients(controller.port)
            await clients.crowd(15)
            await all_free(controller)
            await clients.channel.close()
            await end(serving)
        assert clients.refused == []
        assert clients.answered
        assert (device.shared_inputs > 0, device.shared_outputs) == (True, 0)
        await device.close()

    play(scenario())


@pytest.mark.parametrize("missing", ["limit", "memfd", "mapping", "unix socket", "grpc front"])
def test_without_shared_memory_tensors_travel_beside_their_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    changes: dict[str, Any] = {}
    if missing == "limit":
        changes["shared_memory_bytes"] = 0
    elif missing == "grpc front":
        changes["front"] = "grpc"
    elif missing == "unix socket":
        # Its path would be longer than one may be, so that this worker comes by TCP.
        folder = tmp_path / ("long" * 40)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
    else:

        def refuse(*_: object, **__: object) -> int:
            raise OSError(12, "Cannot allocate memory")

        where = {"memfd": "os.memfd_create", "mapping": "worker.controller_socket.map_shared"}
        monkeypatch.setattr(where[missing], refuse)

    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        async with running(config(tmp_path, **changes)) as controller:
            serving = worker(controller, tmp_path, device, "w")
            await ready(controller)
            clients = Clients(controller.port)
            await clients.crowd(15)
            await clients.channel.close()
            await end(serving)
        assert clients.refused == []
        assert clients.answered
        assert (device.shared_inputs, device.own_inputs > 0) == (0, True)
        if missing != "grpc front":
            assert (device.shared_outputs, device.own_outputs > 0) == (0, True)
        await device.close()

    play(scenario())
