"""Large tensors through the stages of a pipeline: real sockets, a real link, shared memory."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from clockwright.v1 import inference_pb2 as pb
from controller.process import front_process
from controller.process.app import Controller, running
from controller.process.config import FrontConfig
from tests.kit.echo_serving import Clients, config, end, request, until, worker
from tests.kit.slow_echo import ROW_BYTES, SlowEcho, turned

PIPELINE = """
[pipeline]
inputs = ["x"]
outputs = { y = "third.y", first = "first.y" }
[[pipeline.stages]]
name = "first"
model = "m"
inputs = { x = "x" }
[[pipeline.stages]]
name = "second"
model = "m"
inputs = { x = "first.y" }
[[pipeline.stages]]
name = "third"
model = "m"
inputs = { x = "second.y" }
"""


async def ask(clients: Clients, number: int) -> None:
    data = random.Random(number).randbytes(ROW_BYTES)
    message = pb.ModelInferRequest.FromString(request(number, data))
    message.model_name = "three"
    answer = pb.ModelInferResponse.FromString(await clients.infer(message.SerializeToString()))
    assert list(answer.raw_output_contents) == [turned(turned(turned(data))), turned(data)]


def outputs_in_use(controller: Controller) -> int:
    gc.collect()
    arenas = [link.actions.outputs for link in controller.links.links]
    return sum(arena.used_bytes for arena in arenas if arena is not None)


@pytest.mark.parametrize(("num_workers", "apart"), [(1, False), (2, False), (1, True)])
async def test_outputs_stay_where_they_are_if_the_next_stage_is_on_the_same_worker(
    tmp_path: Path, num_workers: int, apart: bool
) -> None:
    devices = [SlowEcho(tmp_path / "cache") for _ in range(num_workers)]
    settings = config(tmp_path, shared_memory_bytes=64 << 20)
    (tmp_path / "models" / "three").mkdir()
    (tmp_path / "models" / "three" / "config.toml").write_text(PIPELINE)
    async with running(settings) as controller, AsyncExitStack() as stack:
        serving = [
            worker(controller, tmp_path, device, f"w{number}")
            for number, device in enumerate(devices)
        ]
        await until(
            lambda: (
                len(controller.links.links) == num_workers
                and all(link.actions.outputs for link in controller.links.links)
                and controller.catalogue.ready
            )
        )
        port = controller.port
        if apart:
            front = FrontConfig(
                controller=f"127.0.0.1:{port}", port=0, shared_memory_bytes=64 << 20
            )
            port = (await stack.enter_async_context(front_process.serving(front))).port
        clients = Clients(port)
        # A worker looks at its new memory some time after it has it. Until then outputs travel.
        for number in range(100, 200):
            before = [device.own_outputs for device in devices]
            await ask(clients, number)
            if [device.own_outputs for device in devices] == before:
                break
        for device in devices:
            device.shared_inputs = device.own_inputs = 0
        # One behind the other is answered by one worker, and several at once by both.
        for number in range(3):
            await ask(clients, number)
        await asyncio.gather(*[ask(clients, number) for number in range(3, 11)])
        await until(lambda: outputs_in_use(controller) == 0)
        await clients.channel.close()
        await end(*serving)
    # A batch may be tried again where the machine is busy.
    assert sum(device.shared_inputs + device.own_inputs for device in devices) >= 33
    if apart:
        # What a front sends of its own memory is copied where the controller needs it for longer.
        assert devices[0].shared_inputs >= 22
    elif num_workers == 1:
        assert devices[0].own_inputs == 0
    for device in devices:
        await device.close()
