"""Large tensors between a front and a worker that share no memory: straight, and never through the controller.

A front without shared memory comes to its controller over TCP and hands over no files, as one of another host.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from controller import front_process
from controller.app import Controller, running
from controller.config import FrontConfig
from tests.kit.echo_serving import Clients, config, end, play, ready, until, worker
from tests.kit.slow_echo import ROW_BYTES, SlowEcho


def far_front(controller: Controller) -> AbstractAsyncContextManager[front_process.Front]:
    settings = FrontConfig(controller=f"127.0.0.1:{controller.port}", port=0, shared_memory_bytes=0)
    return front_process.serving(settings)


async def reached(front: front_process.Front, num_workers: int) -> None:
    await until(lambda: front.backend.num_workers_reached == num_workers)


def test_tensors_of_a_front_elsewhere_go_straight_to_the_worker_and_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        async with running(config(tmp_path)) as controller, far_front(controller) as front:
            serving = worker(controller, tmp_path, device, "w")
            await ready(controller)
            await reached(front, 1)
            clients = Clients(front.port)
            before = controller.fronts.num_bytes
            for number in range(10):
                await clients.ask(number)
            assert (clients.answered, clients.refused) == (10, [])
            # Each is 160 kB in and as much out.
            assert controller.fronts.num_bytes - before < ROW_BYTES
            await clients.channel.close()
            await end(serving)
        assert (device.shared_inputs, device.shared_outputs) == (0, 0)
        await device.close()

    play(scenario())
