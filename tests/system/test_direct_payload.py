"""Large tensors between a front and a worker that share no memory: straight, and never through the controller.

A front without shared memory comes to its controller over TCP and hands over no files, as one of another host.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import tempfile
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clockwright.client.channel import Access
from clockwright.wire.data_socket import dial
from clockwright.wire.frames import greeting
from clockwright.wire.leadership import Term
from controller.access.guard import Guard
from controller.process import front_process
from controller.process.app import Controller, running
from controller.process.config import FrontConfig
from controller.process.standby import standing_by
from tests.kit.certificates import self_signed
from tests.kit.echo_serving import Clients, config, end, play, ready, until, worker
from tests.kit.slow_echo import ROW_BYTES, SlowEcho, serve

#: First byte of a record with which TLS hangs up.
TLS_ALERT = 21


def far_front(
    controller: Controller,
    **changes: Any,  # noqa: ANN401
) -> AbstractAsyncContextManager[front_process.Front]:
    return far_front_of(f"localhost:{controller.port}", **changes)


def far_front_of(
    address: str,
    **changes: Any,  # noqa: ANN401
) -> AbstractAsyncContextManager[front_process.Front]:
    values = {"port": 0, "shared_memory_bytes": 0, **changes}
    return front_process.serving(FrontConfig(controller=address, **values))


def inputs_in_use(front: front_process.Front) -> int:
    gc.collect()
    assert front.slabs.inputs is not None
    return front.slabs.inputs.used_bytes


async def reached(front: front_process.Front, num_workers: int) -> None:
    await until(lambda: front.backend.num_workers_reached == num_workers)


async def test_tensors_of_a_front_elsewhere_go_straight_to_the_worker_and_back(
    tmp_path: Path,
) -> None:
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
            assert not link.actions.is_local
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


async def test_answers_are_right_when_clients_of_a_front_elsewhere_leave(tmp_path: Path) -> None:
    device = SlowEcho(tmp_path / "cache")
    async with running(config(tmp_path)) as controller, far_front(controller) as front:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        await reached(front, 1)
        clients = Clients(front.port)
        await clients.crowd(60)
        assert clients.refused == []
        assert clients.answered
        assert clients.given_up
        await until(lambda: controller.runtime.num_waiting == 0)
        await until(lambda: front.backend.num_held == 0)
        await clients.channel.close()
        await end(serving)
    await device.close()


async def test_what_a_front_of_the_controllers_host_sends_elsewhere_goes_straight_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_tcp(host: str, port: int, path: str, **others: Any) -> socket.socket:  # noqa: ANN401
        return dial(host, port, **others)

    monkeypatch.setattr("worker.controller_socket.dial", by_tcp)
    device = SlowEcho(tmp_path / "cache")
    async with (
        running(config(tmp_path)) as controller,
        far_front(controller, shared_memory_bytes=64 << 20) as front,
    ):
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        await reached(front, 1)
        clients = Clients(front.port)
        before = controller.fronts.num_bytes
        await clients.crowd(40)
        assert clients.refused == []
        # An input that lies in no slab goes by the controller.
        tensors_bytes = 2 * ROW_BYTES * (clients.answered + clients.given_up)
        [link] = controller.links.links
        assert not link.actions.is_local
        for num_bytes in (controller.fronts.num_bytes - before, link.num_bytes):
            assert num_bytes < tensors_bytes / 3
        # Slabs of inputs are free when their actions are over.
        await until(lambda: inputs_in_use(front) == 0)
        await clients.channel.close()
        await end(serving)
    await device.close()


def test_a_worker_that_a_front_cannot_reach_is_fed_by_the_controller_which_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    walled: list[int] = []

    def through_a_wall(host: str, port: int, **others: Any) -> socket.socket:  # noqa: ANN401
        if not walled:
            walled.append(port)
        if port in walled:
            raise OSError(113, "No route to host")
        return dial(host, port, **others)

    monkeypatch.setattr("controller.front.remote.worker_sockets.dial", through_a_wall)

    async def scenario() -> None:
        devices = [SlowEcho(tmp_path / "cache") for _ in range(2)]
        async with running(config(tmp_path)) as controller, far_front(controller) as front:
            serving = [
                worker(controller, tmp_path, device, name)
                for device, name in zip(devices, "ab", strict=True)
            ]
            await ready(controller, 2)
            await reached(front, 1)
            clients = Clients(front.port)
            while not all(device.own_inputs for device in devices):
                await clients.crowd(20)
            await until(lambda: "No route to host" in caplog.text)
            assert clients.refused == []
            await clients.channel.close()
            await end(*serving)
        for device in devices:
            await device.close()

    play(scenario())
    assert caplog.text.count("its tensors go by the controller meanwhile") == 1


async def test_what_a_way_that_breaks_swallows_is_sent_or_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[socket.socket] = []

    def noted(host: str, port: int, **others: Any) -> socket.socket:  # noqa: ANN401
        dialled.append(dial(host, port, **others))
        return dialled[-1]

    monkeypatch.setattr("controller.front.remote.worker_sockets.dial", noted)
    device = SlowEcho(tmp_path / "cache")
    async with running(config(tmp_path)) as controller, far_front(controller) as front:
        serving = worker(controller, tmp_path, device, "w")
        await ready(controller)
        clients = Clients(front.port)
        broken: list[socket.socket] = []

        async def ask_until_all_are_broken() -> None:
            while len(broken) < 5:
                await clients.crowd(20)

        asking = asyncio.create_task(ask_until_all_are_broken())
        while len(broken) < 5:
            # The worker may know of the front later than the front of it, and hang up on it at first.
            await until(
                lambda: (
                    front.backend.num_workers_reached == 1
                    and dialled[-1] not in broken
                    and front.backend.num_held
                )
            )
            broken.append(dialled[-1])
            broken[-1].shutdown(socket.SHUT_RDWR)
        await asking
        assert clients.refused == []
        assert clients.answered
        await until(lambda: front.backend.num_held == 0)
        await clients.channel.close()
        await end(serving)
    await device.close()


async def test_a_worker_that_leaves_under_load_costs_a_front_elsewhere_nothing(
    tmp_path: Path,
) -> None:
    devices = [SlowEcho(tmp_path / "cache") for _ in range(2)]
    async with running(config(tmp_path)) as controller, far_front(controller) as front:
        serving = [
            worker(controller, tmp_path, device, name)
            for device, name in zip(devices, "ab", strict=True)
        ]
        await ready(controller, 2)
        await reached(front, 2)
        clients = Clients(front.port)
        asking = asyncio.create_task(clients.crowd(80))
        await until(lambda: clients.answered > 10)
        controller.links.links[0].drain()
        await asking
        assert clients.refused == []
        await until(lambda: len(controller.links.links) == 1)
        await until(lambda: front.backend.num_workers_reached == 1)
        await clients.channel.close()
        await end(*serving)
    for device in devices:
        await device.close()


async def test_a_controller_that_takes_over_has_fronts_elsewhere_reach_the_workers_anew(
    tmp_path: Path,
) -> None:
    device = SlowEcho(tmp_path / "cache")
    settings = config(tmp_path)
    async with AsyncExitStack() as stack:
        standby = standing_by(settings, Guard(settings.access))
        async with running(settings, Term("l", 1)) as first, standby as (_, port, _):
            addresses = f"127.0.0.1:{first.port},127.0.0.1:{port}"
            serving = asyncio.create_task(serve(addresses, tmp_path, device, "w"))
            front = await stack.enter_async_context(far_front_of(addresses))
            await ready(first)
            await reached(front, 1)
            clients = Clients(front.port)
            asking = asyncio.create_task(clients.crowd(60))
            await until(lambda: clients.answered > 10)
            await first.drain(60, notice_s=0)
        leading = running(replace(settings, port=port), Term("l", 2))
        second = await stack.enter_async_context(leading)
        await ready(second)
        await reached(front, 1)
        await asking
        before, answered = second.fronts.num_bytes, clients.answered
        for number in range(100, 110):
            await clients.ask(number)
        assert (clients.answered - answered, clients.refused) == (10, [])
        assert second.fronts.num_bytes - before < ROW_BYTES
        await until(lambda: front.backend.num_held == 0)
        await clients.channel.close()
        await end(serving)
    await device.close()
