"""A controller, workers and clients of one model that echoes; what is answered is checked byte for byte."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from onnx import TensorProto, helper

from clockwright.client.channel import Access
from clockwright.v1 import inference_pb2 as pb
from controller.core import SchedulerConfig
from controller.process.app import Controller
from controller.process.config import ControllerConfig
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

    async def give_up(self, number: int, *, when: Callable[[], bool]) -> None:
        """Ask, and give up once something is so, however long that takes."""
        call = self.infer(request(number, random.Random(number).randbytes(ROW_BYTES)))
        await until(when)
        call.cancel()

    @property
    def unexpected_refusals(self) -> list[str]:
        """Refusals with another reason than a worker that is lost, or that a busy machine made slow."""
        expected = ("WORKER_LOST", "times as long as predicted")
        return [words for words in self.refused if not any(part in words for part in expected)]

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
    controller: Controller,
    directory: Path,
    device: SlowEcho,
    name: str,
    access: Access | None = None,
) -> asyncio.Task[None]:
    address = f"127.0.0.1:{controller.port}"
    return asyncio.create_task(serve(address, directory, device, name, access))


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


def play(scenario: Any) -> None:  # noqa: ANN401
    asyncio.run(asyncio.wait_for(scenario, 200))
