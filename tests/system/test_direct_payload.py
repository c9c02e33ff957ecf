"""Large tensors between a front and a worker that share no memory: straight, and never through the controller.

A front without shared memory comes to its controller over TCP and hands over no files, as one of another host.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from clockwright.channel import Access
from clockwright.frames import greeting
from controller import front_process
from controller.app import Controller, running
from controller.config import FrontConfig
from tests.kit.certificates import self_signed
from tests.kit.echo_serving import Clients, config, end, play, ready, until, worker
from tests.kit.slow_echo import ROW_BYTES, SlowEcho

#: First byte of a record with which TLS hangs up.
TLS_ALERT = 21


def far_front(
    controller: Controller,
    **changes: Any,  # noqa: ANN401
) -> AbstractAsyncContextManager[front_process.Front]:
    values = {"port": 0, "shared_memory_bytes": 0, **changes}
    settings = FrontConfig(controller=f"localhost:{controller.port}", **values)
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


def test_with_tls_every_link_of_a_front_and_a_worker_speaks_it(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    access = Access(ca=certificate)
    # No Unix socket can have so long a path, so that the worker comes by TCP.
    folder = tmp_path / ("long" * 40)
    folder.mkdir()

    async def scenario() -> None:
        device = SlowEcho(tmp_path / "cache")
        settings = config(tmp_path, tls_certificate=certificate, tls_key=key)
        async with (
            running(settings) as controller,
            far_front(controller, joining=access) as front,
        ):
            serving = worker(controller, tmp_path, device, "w", access)
            await ready(controller)
            await reached(front, 1)
            clients = Clients(front.port)
            for number in range(10):
                await clients.ask(number)
            assert (clients.answered, clients.refused) == (10, [])
            assert controller.fronts.num_bytes < ROW_BYTES
            [link] = controller.links.links
            assert not link.is_local
            for port in (controller.links.listener.port, link.register.payload_port):
                # A stranger learns no more than that TLS is spoken there.
                where = "127.0.0.1", port
                assert "CERTIFICATE" in await asyncio.to_thread(ssl.get_server_certificate, where)
                reader, writer = await asyncio.open_connection(*where)
                writer.write(greeting(bytes(32)))
                with suppress(ConnectionResetError):
                    assert await reader.read(1) in (b"", bytes([TLS_ALERT]))
                writer.close()
            await clients.channel.close()
            await end(serving)
        await device.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        play(scenario())
